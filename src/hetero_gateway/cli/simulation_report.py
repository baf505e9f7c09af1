"""The page that ``simulate --report`` writes: one HTML file that needs nothing from elsewhere.

plotly.js stands in the page; figures are plain specifications in its JSON format, coloured by the
page's own style sheet, so that the light and the dark theme are one set of figures. Everything
that comes from a file is text, never markup: escaped in HTML, in plotly's labels (which take tags)
and in the JSON block. A content security policy in the page keeps the browser from fetching
anything all the same.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from hetero_gateway.cli.simulation_table import COLUMNS, by_rate, rate_name
from hetero_gateway.errors import ConfigError
from hetero_gateway.sim.experiment import Bound, Experiment
from hetero_gateway.sim.result import QUANTILES, Cell, Spread

# Okabe and Ito's colours, apart for the colour-blind and legible on white and on near-black.
_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
    *("#8A6D3B", "#7F7F7F", "#B2A800", "#6A51A3"),
)
# Bars of more instances than this cannot be told apart; then the slowest and fastest are shown.
_MANY_INSTANCES = 24


def check_can_write(path: Path) -> None:
    """Find out before minutes of simulation what would fail after them.

    Raises:
        ConfigError: plotly is not installed, or there is no such folder.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError(
            "--report: needs plotly, which is not installed; "
            "install it with: pip install 'hetero-gateway[report]'"
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--report: {path}: its folder does not exist, or it is one itself")


def write(path: Path, page: str) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report: {path}: cannot be written: {error.strerror}") from error


def render(
    name: str,
    experiment: Experiment,
    bound: Bound,
    cells: Sequence[Cell],
    document: dict[str, Any],
) -> str:
    """The whole page.

    Args:
        name: of the cluster's file.
        document: what ``simulate --json`` prints; it stands in the page for programs to read.
    """
    from plotly.offline import get_plotlyjs

    mix = document["mix"]
    figures = {
        "throughput": throughput_figure(cells, bound.tokens_per_s),
        "rates": [
            {"name": _rate_of(group[0]), "figures": _rate_figures(group)}
            for group in by_rate(cells)
        ],
    }
    parts = {
        "title": _text(f"{Path(name).name}: policies compared"),
        "subtitle": _text(
            f"{len(experiment.instances)} instances, {experiment.count} requests a run, "
            f"{mix['mean_prompt_tokens']:.0f} prompt and {mix['mean_output_tokens']:.0f} output "
            f"tokens in the mean, {len(cells[0].runs)} seeds, bound "
            f"{bound.tokens_per_s:.0f} output tokens/s"
        ),
        "options": _options(experiment),
        "results": _results_table(cells),
        "cluster": _cluster_table(experiment, bound),
        "constants": _constants_table(experiment),
        "faults": _faults_table(experiment),
        "figures": _json_block(figures),
        "document": _json_block(document),
        "plotly": get_plotlyjs(),
    }
    template = (
        resources.files("hetero_gateway.cli")
        .joinpath("simulation_report.html")
        .read_text(encoding="utf-8")
    )
    # In one pass: what is put in is not searched again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


# Figures. Labels are plotly's pseudo-HTML, so text from files is escaped in them, too.


def throughput_figure(cells: Sequence[Cell], bound_tokens_per_s: float) -> dict[str, Any]:
    """Bars by rate, one colour per policy, and the bound as a line across."""
    groups = by_rate(cells)
    names = [_text(_rate_of(group[0])) for group in groups]
    data: list[dict[str, Any]] = []
    for i, policy in enumerate(_policies(cells)):
        spreads = [
            c.throughput_tokens_per_s for group in groups for c in group if c.policy == policy
        ]
        data.append(
            {
                "type": "bar",
                "name": _text(policy),
                "x": names,
                "y": [s.mean for s in spreads],
                "error_y": _error_bars(spreads),
                "marker": {"color": _colour(i)},
                "hovertemplate": "%{fullData.name}<br>%{x}: %{y:.0f} tokens/s<extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "bound",
            "x": names,
            "y": [bound_tokens_per_s] * len(names),
            "line": {"dash": "dash", "width": 2, "color": "#888888"},
            "hovertemplate": "bound: %{y:.0f} tokens/s<extra></extra>",
        }
    )
    # A line through category centres would end in the middle of the outer ones, and with a single
    # rate be a point: the shape spans the plot, the trace above is there for the legend.
    shape = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": bound_tokens_per_s,
        "y1": bound_tokens_per_s,
        "line": {"dash": "dash", "width": 2, "color": "#888888"},
    }
    return {
        "data": data,
        "layout": {
            "barmode": "group",
            "shapes": [shape],
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": "output tokens/s"}, "rangemode": "tozero"},
        },
    }


def completion_figure(cells: Sequence[Cell]) -> dict[str, Any]:
    """When each instance was done, at one rate: bars by policy, one colour per instance."""
    ids = cells[0].instance_ids
    shown: Sequence[tuple[str, list[Spread]]]
    if len(ids) <= _MANY_INSTANCES:
        shown = [
            (instance_id, [c.completion_s(i) for c in cells]) for i, instance_id in enumerate(ids)
        ]
    else:
        every = [[c.completion_s(i) for i in range(len(ids))] for c in cells]
        shown = [
            ("first to finish", [min(of, key=lambda s: s.mean) for of in every]),
            ("last to finish", [max(of, key=lambda s: s.mean) for of in every]),
        ]
    return {
        "data": [
            {
                "type": "bar",
                "name": _text(name),
                "x": [_text(c.policy) for c in cells],
                "y": [s.mean for s in spreads],
                "error_y": _error_bars(spreads),
                "marker": {"color": _colour(i)},
                "hovertemplate": "%{fullData.name}<br>%{x}: %{y:.1f} s<extra></extra>",
            }
            for i, (name, spreads) in enumerate(shown)
        ],
        "layout": {
            "barmode": "group",
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": "last completion, s"}, "rangemode": "tozero"},
        },
    }


def latency_figure(cells: Sequence[Cell], policies: Sequence[str]) -> dict[str, Any]:
    """The share of requests that had finished within a time, at one rate; logarithmic time.

    ``policies`` fixes each policy's colour.
    """
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": _text(c.policy),
                "x": c.latency_quantiles_s().tolist(),
                "y": QUANTILES.tolist() if c.latency_quantiles_s().size else [],
                "line": {"color": _colour(policies.index(c.policy)), "width": 2},
                "hovertemplate": "%{fullData.name}<br>%{y:.1%} within %{x:.2f} s<extra></extra>",
            }
            for c in cells
        ],
        "layout": {
            "xaxis": {"type": "log", "title": {"text": "latency, s"}},
            "yaxis": {
                "title": {"text": "share of requests"},
                "range": [0, 1.01],
                "tickformat": ".0%",
            },
        },
    }


def _error_bars(spreads: Sequence[Spread]) -> dict[str, Any]:
    # Grey is seen on both themes and on every bar.
    deviations = [s.sd for s in spreads]
    return {"type": "data", "array": deviations, "thickness": 1.2, "color": "#888888"}


def _rate_of(cell: Cell) -> str:
    return rate_name(cell.rate_per_s, cell.load)


def _rate_figures(group: Sequence[Cell]) -> dict[str, Any]:
    return {
        "completion": completion_figure(group),
        "latency": latency_figure(group, _policies(group)),
    }


def _policies(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.policy for cell in cells))


def _colour(position: int) -> str:
    return _COLOURS[position % len(_COLOURS)]


# Tables


def _results_table(cells: Sequence[Cell]) -> str:
    rows = []
    for group in by_rate(cells):
        best = max(c.throughput_tokens_per_s.mean for c in group)
        for i, c in enumerate(group):
            is_best = len(group) > 1 and c.throughput_tokens_per_s.mean == best
            name = c.policy + (" ◂" if is_best else "")
            figures = (column.text(c) for column in COLUMNS)
            rows.append((_rate_of(c) if i == 0 else "", name, *figures))
    return _table(("rate", "policy", *(c.name for c in COLUMNS)), rows, text_columns=2)


def _cluster_table(experiment: Experiment, bound: Bound) -> str:
    rows = []
    pairs = zip(experiment.instances, bound.instances_tokens_per_s, strict=True)
    for instance, alone in pairs:
        profile, believed = instance.profile, instance.believed
        if believed is None:
            scale = "unprofiled"
        else:
            # p8 may be 0; a profile always has some decode constant.
            name = next(f"p{i}" for i in (8, 6, 5, 7) if getattr(profile.constants, f"p{i}") > 0)
            ratio = getattr(believed.constants, name) / getattr(profile.constants, name)
            scale = f"× {ratio:g}"
        rows.append(
            (
                str(instance.instance_id),
                profile.name,
                f"{alone:.0f}",
                f"{profile.kv_capacity_tokens}",
                f"{profile.max_num_seqs}",
                f"{instance.weight:g}",
                scale,
            )
        )
    head = (
        *("instance", "profile", "alone, tokens/s", "KV tokens", "max_num_seqs", "weight"),
        "scheduler's constants",
    )
    return _table(head, rows, text_columns=2)


def _constants_table(experiment: Experiment) -> str:
    rows = []
    for profile in dict.fromkeys(i.profile for i in experiment.instances):
        constants = [f"{getattr(profile.constants, f.name):.3g}" for f in fields(profile.constants)]
        how = str(profile.source.get("how", "not said"))
        note = str(profile.source.get("note", ""))
        rows.append((profile.name, how, *constants, note))
    head = ("profile", "obtained", *(f"p{i}" for i in range(1, 9)), "note")
    return _table(head, rows, text_columns=2, last_is_text=True)


def _faults_table(experiment: Experiment) -> str:
    if not experiment.faults:
        return ""
    rows = [
        (
            str(experiment.instances[fault.instance].instance_id),
            fault.kind.value,
            f"{fault.start_s:g}",
            "the end" if math.isinf(fault.end_s) else f"{fault.end_s:g}",
            f"{fault.factor:g}",
        )
        for fault in experiment.faults
    ]
    head = ("instance", "kind", "from, s", "to, s", "steps take × as long")
    table = _table(head, rows, text_columns=2)
    return f'<section class="panel"><h2>Faults</h2>{table}</section>'


def _options(experiment: Experiment) -> str:
    arrivals = (
        f"random, coefficient of variation {experiment.arrival_cv:g}"
        if experiment.trace_arrival_s is None
        else "the trace's own times"
    )
    pairs = (
        ("arrivals", arrivals),
        ("engine scheduling", experiment.scheduling),
        ("tokens per step", str(experiment.max_batched_tokens)),
        ("length predictor", experiment.predictor),
        (
            "SLO",
            f"TTFT {experiment.slo.ttft_s:g} s, TPOT {experiment.slo.tpot_s * 1000:g} ms",
        ),
    )
    items = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in pairs)
    return f"<dl>{items}</dl>"


def _table(
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
        return f"<{tag}{kind}>{_text(value)}</{tag}>"

    def line(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(tag, i, v) for i, v in enumerate(values)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", head)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# Text


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _json_block(value: Any) -> str:
    """JSON that may stand inside ``<script>``: nothing in it can end the element."""
    text = json.dumps(_without_nan(value), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_nan(value: Any) -> Any:
    """JSON has no nan; plotly leaves a gap at null."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
