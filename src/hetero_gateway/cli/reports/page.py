"""What the pages of ``--report`` share: one HTML file that needs nothing from elsewhere.

plotly.js is embedded in the page; figures are plain specifications in its JSON format, coloured by
the page's own style sheet, so that the light and the dark theme use one set of figures. Everything
that comes from a file is text, never markup: escaped in HTML, in plotly's labels (which accept
tags) and in the JSON block. In addition, a content security policy in the page keeps the browser
from fetching anything.
"""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.whole_file import named

# Okabe and Ito's colours: distinct for the colour-blind, and legible on white and near-black.
_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
    *("#8A6D3B", "#7F7F7F", "#B2A800", "#6A51A3"),
)


def check_can_write(path: Path | None) -> None:
    """Find out before minutes of work what would fail after them; None: no page is wanted.

    Raises:
        ConfigError: there is no such folder.
    """
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--report: {path}: its folder does not exist, or the path is a folder")


def write(path: Path, page: str) -> None:
    """Raises ConfigError when the file cannot be written."""
    with named(f"--report: {path}", "written"):
        path.write_text(page, encoding="utf-8")


def fill(template: str, figures: Any, document: Any, parts: Mapping[str, str]) -> str:
    """A template of this package with its ``{{places}}`` filled, with style, script and plotly.

    ``{{head}}`` is what all pages begin with, down to the title; ``{{tail}}`` ends those whose
    figures are drawn once, each in the element of its name.

    Args:
        document: what ``--json`` prints; it is embedded in the page for programs to read.
    """
    from plotly.offline import get_plotlyjs

    filled = {
        **parts,
        "figures": json_block(figures),
        "document": json_block(document),
        "style": _file("page.css"),
        "script": _file("page.js"),
        "plotly": get_plotlyjs(),
    }
    whole = _file(template)
    for name in ("head", "tail"):
        whole = whole.replace(f"{{{{{name}}}}}\n", _file(f"page_{name}.html"))
    # In one pass: the inserted text is not searched again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], whole)


def _file(name: str) -> str:
    return resources.files("hetero_gateway.cli.reports").joinpath(name).read_text(encoding="utf-8")


def bars(name: str, x: Any, y: Any, position: int, hover: str, **more: Any) -> dict[str, Any]:
    """A plotly bar trace in the colour of its position; ``name`` is text, ``hover`` a template."""
    return _trace("bar", name, x, y, hover) | {"marker": {"color": _colour(position)}} | more


def lines(name: str, x: Any, y: Any, position: int, hover: str, **more: Any) -> dict[str, Any]:
    """A plotly line trace; see ``bars``."""
    line = {"color": _colour(position), "width": 2}
    return _trace("scatter", name, x, y, hover) | {"mode": "lines", "line": line} | more


def points(name: str, x: Any, y: Any, position: int, hover: str, size: int) -> dict[str, Any]:
    """A plotly trace of points of one size; see ``bars``."""
    marker = {"color": _colour(position), "size": size}
    return _trace("scatter", name, x, y, hover) | {"mode": "markers", "marker": marker}


def figure(data: list[dict[str, Any]], **layout: Any) -> dict[str, Any]:
    """A plotly figure."""
    return {"data": data, "layout": layout}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}} | more


def shares() -> dict[str, Any]:
    """An axis of shares of requests."""
    return axis("share of requests", range=[0, 1.01], tickformat=".0%")


def _trace(kind: str, name: str, x: Any, y: Any, hover: str) -> dict[str, Any]:
    # Labels are plotly's pseudo-HTML, so text from files is escaped there too.
    template = f"{hover}<extra></extra>"
    return {"type": kind, "name": text(name), "x": x, "y": y, "hovertemplate": template}


def _colour(position: int) -> str:
    return _COLOURS[position % len(_COLOURS)]


def panel(title: str, content: str) -> str:
    return f'<section class="panel"><h2>{title}</h2>{content}</section>'


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
    """JSON that is safe inside ``<script>``: nothing in it can close the element."""
    encoded = json.dumps(without_nan(value), ensure_ascii=True, allow_nan=False)
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def without_nan(value: Any) -> Any:
    """JSON has no nan; plotly leaves a gap for null."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
