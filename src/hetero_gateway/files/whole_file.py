"""Whole files: reading JSON objects, and writing files atomically.

Readers find the old file or the new one.
"""

import contextlib
import csv
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero_gateway.errors import ConfigError


@contextlib.contextmanager
def named(path: Path | str, done: str) -> Iterator[None]:
    """Name the file that could not be ``done``, read or written: ConfigError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8 text") from error
    except (OSError, ValueError) as error:  # a path may contain a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be {done}: {reason}") from error
    except csv.Error as error:
        raise ConfigError(f"{path}: not a CSV file: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    with named(path, "read"):
        text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return data


def write_whole(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file next to the target, and then rename it; a failure leaves nothing behind.

    Args:
        mode: of the new file. ``mkstemp``'s are private, and nothing here is a secret.

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
    with named(path, "written"):
        write_whole(path, text)


def write_keys(path: Path, text: str) -> None:
    """``write_whole``; a new file is readable by its owner only. Raises ConfigError."""
    with named(path, "written"):
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write_whole(path, text, mode=mode)
