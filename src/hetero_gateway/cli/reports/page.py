"""What the pages of ``--report`` share: one HTML file that needs nothing from elsewhere.

plotly.js stands in the page; figures are plain specifications in its JSON format, coloured by the
page's own style sheet, so that the light and the dark theme are one set of figures. Everything
that comes from a file is text, never markup: escaped in HTML, in plotly's labels (which take tags)
and in the JSON block. A content security policy in the page keeps the browser from fetching
anything all the same.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hetero_gateway.errors import ConfigError

# Okabe and Ito's colours, apart for the colour-blind and legible on white and on near-black.
_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
    *("#8A6D3B", "#7F7F7F", "#B2A800", "#6A51A3"),
)


def check_can_write(path: Path) -> None:
    """Find out before minutes of work what would fail after them.

    Raises:
        ConfigError: there is no such folder.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--report: {path}: its folder does not exist, or it is one itself")


def write(path: Path, page: str) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report: {path}: cannot be written: {error.strerror}") from error


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template of this package with its ``{{places}}`` filled, style, script and plotly too.

    ``{{head}}`` is what all of them begin with, down to the page's title.
    """
    from plotly.offline import get_plotlyjs

    known = {
        **parts,
        "style": _file("page.css"),
        "script": _file("page.js"),
        "plotly": get_plotlyjs(),
    }
    whole = _file(template).replace("{{head}}\n", _file("page_head.html"))
    # In one pass: what is put in is not searched again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: known[place[1]], whole)


def _file(name: str) -> str:
    return resources.files("hetero_gateway.cli.reports").joinpath(name).read_text(encoding="utf-8")


def colour(position: int) -> str:
    return _COLOURS[position % len(_COLOURS)]


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text_columns: int,
    last_is_text: bool = False,
) -> str:
    """An HTML table; the first ``text_columns`` columns are text, the others figures."""

    def cell(tag: str, i: int, value: str) -> str:
        is_text = i < text_columns or (last_is_text and i == len(head) - 1)
        kind = ' class="text"' if is_text else ""
        return f"<{tag}{kind}>{text(value)}</{tag}>"

    def line(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(tag, i, v) for i, v in enumerate(values)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", head)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def text(value: str) -> str:
    return html.escape(value, quote=True)


def json_block(value: Any) -> str:
    """JSON that may stand inside ``<script>``: nothing in it can end the element."""
    encoded = json.dumps(_without_nan(value), ensure_ascii=True, allow_nan=False)
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_nan(value: Any) -> Any:
    """JSON has no nan; plotly leaves a gap at null."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
