"""Trained length models on disk: JSON, versioned, strict.

``core.length_model`` explains their contents.
"""

import json
from pathlib import Path
from typing import Any

from hetero_gateway.core.lengths.length_model import LengthModel, from_document, to_document
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.whole_file import read_json, write_document


def read_length_model(path: Path) -> LengthModel:
    """The model written by ``hetero-gateway predictor fit``. Raises ConfigError: its error."""
    document = read_json(path)
    try:
        return from_document(document)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_length_model(path: Path, model: LengthModel, about: dict[str, Any]) -> None:
    """Write a model. Raises ConfigError: it cannot be written.

    Args:
        about: for people: its source, date and error. Not read again.
    """
    document = to_document(model) | {"about": about}
    write_document(path, json.dumps(document, indent=1, sort_keys=True) + "\n")
