"""The scheduler's modules as ``scripts/compile`` has compiled them: for who serves or plans, where
they are of this source and of this Python.

It is the same source, and decides the same to the last bit, in a third of the time. All other
commands run the source itself: numba compiles parts of it for the simulator.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).with_name("native")
# In ``FOLDER``: what was compiled.
TABLE = "compiled.json"
_AGAIN = "scripts/compile makes it anew"


def digest(modules: Sequence[str]) -> str:
    """Of the source of these modules, by their full names. OSError: there is none."""
    found = hashlib.blake2b(digest_size=16)
    for name in modules:
        found.update(
            Path(__file__).parents[1].joinpath(*name.split(".")).with_suffix(".py").read_bytes()
        )
    return found.hexdigest()


def form() -> str:
    """What the scheduler is that is imported, or would be."""
    found = find_spec("hetero_gateway.core.scheduling.scheduler")
    is_source = found is None or str(found.origin).endswith(".py")
    return "interpreted" if is_source else "compiled"


def take(folder: Path = FOLDER) -> str:
    """Have what is imported from now on be compiled, where there is such a thing.

    Returns why it is not taken, in one line; "": it is, or nothing was ever compiled.
    """
    if not (folder / TABLE).exists():
        return ""
    try:
        table = json.loads((folder / TABLE).read_text("utf-8"))
        modules, shared, suffix = table["modules"], table["shared"], table["suffix"]
        if suffix not in EXTENSION_SUFFIXES:
            return f"the compiled scheduler is of another Python ({suffix}); {_AGAIN}"
        if digest(modules) != table["digest"]:
            return f"the compiled scheduler is of another source; {_AGAIN}"
        finder = _Finder(folder, [*modules, shared], suffix)
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module(shared)
        except ImportError:
            sys.meta_path.remove(finder)
            raise
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        return f"the compiled scheduler cannot be used ({error}); {_AGAIN}"
    return ""


class _Finder(MetaPathFinder):
    """Finds the compiled modules in their folder, under the names that their source has."""

    def __init__(self, folder: Path, modules: Sequence[str], suffix: str) -> None:
        self._files = {name: folder.joinpath(*name.split(".")) for name in modules}
        self._suffix = suffix

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file.with_name(file.name + self._suffix))
