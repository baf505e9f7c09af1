"""Writing a file in one step: whoever reads it finds the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


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
