"""The page that ``simulate --report`` writes; ``report_page`` has what it shares with others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hetero_gateway.cli.reports.page import colour, fill, json_block, table, text
from hetero_gateway.cli.reports.simulation_table import COLUMNS, by_rate, rate_name
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.sim.experiment import Bound, Experiment
from hetero_gateway.sim.result import QUANTILES, Cell, Spread

# Bars of more instances than this cannot be distinguished; then the slowest and fastest are shown.
_MANY_INSTANCES = 24


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
    mix = document["mix"]
    figures = {
        "throughput": throughput_figure(cells, bound.tokens_per_s),
        "rates": [
            {"name": _rate_of(group[0]), "figures": _rate_figures(group)}
            for group in by_rate(cells)
        ],
    }
    parts = {
        "title": text(f"{Path(name).name}: policies compared"),
        "subtitle": text(
            f"{len(experiment.instances)} instances, {experiment.count} requests a run, "
            f"{mix['mean_prompt_tokens']:.0f} prompt and {mix['mean_output_tokens']:.0f} output "
            f"tokens on average, {len(cells[0].runs)} seeds, bound "
            f"{bound.tokens_per_s:.0f} output tokens/s"
        ),
        "options": _options(experiment),
        "results": _results_table(cells),
        "cluster": _cluster_table(experiment, bound),
        "constants": _constants_table(experiment),
        "faults": _faults_table(experiment),
        "figures": json_block(figures),
        "document": json_block(document),
    }
    return fill("simulation_report.html", parts)


# Figures. Labels are plotly's pseudo-HTML, so text from files is escaped in them, too.


def throughput_figure(cells: Sequence[Cell], bound_tokens_per_s: float) -> dict[str, Any]:
    """Bars by rate, one colour per policy, and the bound as a line across."""
    groups = by_rate(cells)
    names = [text(_rate_of(group[0])) for group in groups]
    data: list[dict[str, Any]] = []
    for i, policy in enumerate(_policies(cells)):
        spreads = [
            c.throughput_tokens_per_s for group in groups for c in group if c.policy == policy
        ]
        data.append(
            {
                "type": "bar",
                "name": text(policy),
                "x": names,
                "y": [s.mean for s in spreads],
                "error_y": _error_bars(spreads),
                "marker": {"color": colour(i)},
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
                "name": text(name),
                "x": [text(c.policy) for c in cells],
                "y": [s.mean for s in spreads],
                "error_y": _error_bars(spreads),
                "marker": {"color": colour(i)},
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
                "name": text(c.policy),
                "x": c.latency_quantiles_s().tolist(),
                "y": QUANTILES.tolist() if c.latency_quantiles_s().size else [],
                "line": {"color": colour(policies.index(c.policy)), "width": 2},
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
    return table(("rate", "policy", *(c.name for c in COLUMNS)), rows, text_columns=2)


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
    return table(head, rows, text_columns=2)


def _constants_table(experiment: Experiment) -> str:
    rows = []
    for profile in dict.fromkeys(i.profile for i in experiment.instances):
        constants = [f"{getattr(profile.constants, f.name):.3g}" for f in fields(profile.constants)]
        how = str(profile.source.get("how", "not said"))
        note = str(profile.source.get("note", ""))
        rows.append((profile.name, how, *constants, note))
    head = ("profile", "obtained", *(f.name for f in fields(Constants)), "note")
    return table(head, rows, text_columns=2, last_is_text=True)


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
    rendered = table(head, rows, text_columns=2)
    return f'<section class="panel"><h2>Faults</h2>{rendered}</section>'


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
    items = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in pairs)
    return f"<dl>{items}</dl>"
