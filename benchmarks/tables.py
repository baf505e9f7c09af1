"""How benchmarks print: a table with goals, or one JSON document; tables in a document's page."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.errors import ConfigError


class Column(NamedTuple):
    """A column; ``form`` is the format of its figures, none where it has words."""

    head: str
    key: str
    width: int
    form: str = ""


def report(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    *,
    as_json: bool,
    **more: Any,
) -> int:
    """Print each row when it is there, or all of them as one JSON document.

    Args:
        rows: each says whether its goal is ``met``; None is a figure that it does not have.
        more: what the JSON document has beside the rows.

    Returns:
        The exit code: 1 when a goal is missed.
    """
    done = []
    if not as_json:
        print("".join(_cell(c.head, c) for c in columns))
    for row in rows:
        done.append(row)
        if not as_json:
            cells = [_cell(_figure(row[c.key], c.form), c) for c in columns]
            print("".join(cells) + ("" if row["met"] else "  missed"), flush=True)
    met = all(row["met"] for row in done)
    if as_json:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        print(json.dumps({"results": done, "met": met, **more, **versions}))
    else:
        print("every goal is met" if met else "a goal is missed")
    return 0 if met else 1


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cell(text: str, column: Column) -> str:
    """Words to the left, figures to the right."""
    return text.rjust(column.width) if column.form else text.ljust(column.width)


def write_between_markers(path: Path, markers: tuple[str, str], text: str) -> None:
    """Replace what stands between two lines of a page. Raises ConfigError where they are not."""
    page = path.read_text(encoding="utf-8")
    begin, end = (page.find(marker) for marker in markers)
    if not 0 <= begin < end:
        raise ConfigError(f"{path}: has no lines {' and '.join(markers)}")
    head = page[: begin + len(markers[0])]
    path.write_text(f"{head}\n\n{text.strip()}\n\n{page[end:]}", encoding="utf-8")
