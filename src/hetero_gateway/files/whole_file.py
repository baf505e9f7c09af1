"""Whole files: JSON objects that are read, and files that are written in one step.

Whoever reads what is being written finds the old file or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hetero_gateway.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return data


def write_whole(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write beside the file, and then rename; whatever fails leaves nothing behind.

    Args:
        mode: of the new file. ``mkstemp``'s are their owner's alone, and nothing here is a secret.

    Raises:
        OSError: it cannot be written.
    """
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(made, mode)
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise


def write_document(path: Path, text: str) -> None:
    """``write_whole``. Raises ConfigError: it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
