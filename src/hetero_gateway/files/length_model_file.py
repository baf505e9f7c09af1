"""Trained length models on disk: JSON, versioned, strict.

``core.length_model`` says what is in them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetero_gateway.core.lengths.length_model import LengthModel, from_document, to_document
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.whole_file import write_whole


def read_length_model(path: Path) -> LengthModel:
    """Read a file that ``hetero-gateway predictor fit`` wrote.

    Raises:
        ConfigError: one line with the file and what is wrong in it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    try:
        return from_document(document)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_length_model(path: Path, model: LengthModel, about: dict[str, Any]) -> None:
    """Write a model; what is there already stays whole until the new file is.

    Args:
        path: the file.
        model: what was trained.
        about: for people: from what, when, with which error. Not read again.

    Raises:
        ConfigError: it cannot be written.
    """
    document = to_document(model) | {"about": about}
    try:
        write_whole(path, json.dumps(document, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
