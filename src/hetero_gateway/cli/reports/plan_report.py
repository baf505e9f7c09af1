"""The page that ``plan --report`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero_gateway.cli.reports.page import colour, fill, json_block, table, text
from hetero_gateway.cli.reports.plan_table import (
    BEST_HEAD,
    at_own_goodput,
    best_rows,
    columns,
    headline,
    how_known,
    legend,
    names,
    once,
    rate,
    unfit_lines,
)
from hetero_gateway.files.plan_request import PlanRequest
from hetero_gateway.planner.plan import Plan
from hetero_gateway.sim.figures import finite

_GIB = 2**30
# Long labels stand where a legend would be.
_LEGEND_ABOVE = {"orientation": "h", "yanchor": "bottom", "y": 1.02}


def render(plan: Plan, request: PlanRequest, document: dict[str, Any]) -> str:
    """The whole page.

    Args:
        document: what ``plan --json`` prints; it stands in the page for programs to read.
    """
    shown = columns(plan)
    told: set[str] = set()
    rows = [
        (
            f"{i}. {name}" + (" ◆" if c in plan.pareto else ""),
            *(column.text(c) for column in shown),
            once(c.why_not, told),
        )
        for i, (name, c) in enumerate(zip(names(plan), plan.candidates, strict=True), 1)
    ]
    figures = {
        "throughput": throughput_figure(plan),
        "pareto": pareto_figure(plan),
        "memory": memory_figure(plan),
    }
    parts = {
        "title": text(f"{Path(request.source).name}: a plan for {request.model.name}"),
        "subtitle": text(
            f"context {request.max_model_len}, {plan.mean_prompt_tokens:.0f} prompt and "
            f"{plan.mean_output_tokens:.0f} output tokens on average, goal {plan.goal}, policy "
            f"{plan.policy}"
        ),
        "headline": text(headline(plan)),
        "best": table(BEST_HEAD, best_rows(plan), text_columns=3),
        "candidates": table(
            ("layout", *(c.name for c in shown), "why not"), rows, text_columns=1, last_is_text=True
        ),
        "legend": text(legend(plan)),
        "rate": "its own goodput" if at_own_goodput(plan) else f"{rate(plan)} requests/s",
        "types": _types_table(plan),
        "unfit": _list("Not deployable", unfit_lines(plan.unfit)),
        "notes": _list("Notes", plan.notes),
        "figures": json_block(figures),
        "document": json_block(document),
    }
    return fill("plan_report.html", parts)


def throughput_figure(plan: Plan) -> dict[str, Any]:
    """Bars by candidate; what is not known is left out."""
    labels = [f"{i}" for i in range(1, len(plan.candidates) + 1)]
    hover = [text(name) for name in names(plan)]
    series = (
        ("simulated", [c.simulated.tokens_per_s if c.simulated else None for c in plan.candidates]),
        ("instances alone", [c.alone_tokens_per_s or None for c in plan.candidates]),
        ("Algorithm 1", [finite(c.estimate_tokens_per_s) for c in plan.candidates]),
        ("as printed", [finite(c.estimate_paper_tokens_per_s) for c in plan.candidates]),
    )
    return {
        "data": [
            {
                "type": "bar",
                "name": name,
                "x": labels,
                "y": values,
                "text": hover,
                "textposition": "none",
                "marker": {"color": colour(i)},
                "hovertemplate": "%{text}<br>%{fullData.name}: %{y:.0f} tokens/s<extra></extra>",
            }
            for i, (name, values) in enumerate(series)
        ],
        "layout": {
            "barmode": "group",
            "legend": _LEGEND_ABOVE,
            "xaxis": {"type": "category", "title": {"text": "candidate, by the table's number"}},
            "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"},
        },
    }


def pareto_figure(plan: Plan) -> dict[str, Any]:
    """Throughput against mean latency at the plan's rate, and the line of the undominated."""
    known = [
        (name, c)
        for name, c in zip(names(plan), plan.candidates, strict=True)
        if c.at_rate is not None and c.simulated is not None
    ]
    front = [c for c in plan.pareto if c.at_rate is not None and c.simulated is not None]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "undominated",
                "x": [c.at_rate.latency_mean_s for c in front if c.at_rate],
                "y": [c.simulated.tokens_per_s for c in front if c.simulated],
                "line": {"color": "#888888", "dash": "dash"},
                "hoverinfo": "skip",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "name": "candidates",
                "x": [c.at_rate.latency_mean_s for _, c in known if c.at_rate],
                "y": [c.simulated.tokens_per_s for _, c in known if c.simulated],
                "text": [text(name) for name, _ in known],
                "marker": {"color": colour(0), "size": 10},
                "hovertemplate": "%{text}<br>%{y:.0f} tokens/s, %{x:.2f} s<extra></extra>",
            },
        ],
        "layout": {
            "xaxis": {"title": {"text": "mean latency, s"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"},
        },
    }


def memory_figure(plan: Plan) -> dict[str, Any]:
    """GiB of one accelerator by instance type, stacked; the KV cache on top."""
    keys = sorted(plan.types)
    labels = [text(f"{accelerator} tp{t}") for accelerator, t in keys]
    parts = list(dict.fromkeys(p.name for key in keys for p in plan.types[key].memory.parts))
    series = [
        (
            part,
            [
                sum(
                    p.bytes_per_accelerator / _GIB
                    for p in plan.types[key].memory.parts
                    if p.name == part
                )
                for key in keys
            ],
        )
        for part in parts
    ]
    series.append(("KV cache", [plan.types[k].memory.kv_bytes / k[1] / _GIB for k in keys]))
    return {
        "data": [
            {
                "type": "bar",
                "name": text(name),
                "x": labels,
                "y": values,
                "marker": {"color": colour(i)},
                "hovertemplate": "%{fullData.name}<br>%{x}: %{y:.2f} GiB<extra></extra>",
            }
            for i, (name, values) in enumerate(series)
        ],
        "layout": {
            "barmode": "stack",
            "legend": _LEGEND_ABOVE,
            "margin": {"l": 64, "r": 16, "t": 36, "b": 120},
            "xaxis": {"type": "category", "automargin": True},
            "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        },
    }


def _types_table(plan: Plan) -> str:
    rows = []
    for (accelerator, t), found in sorted(plan.types.items()):
        alone = plan.alone.get((accelerator, t))
        memory, times = how_known(plan, accelerator, t)
        rows.append(
            (
                accelerator,
                f"tp{t}",
                f"{found.memory.kv_capacity_tokens}",
                memory,
                f"{found.profile.max_num_seqs}",
                f"{alone.tokens_per_s:.0f}" if alone else "–",
                f"{alone.batch:.0f}" if alone else "–",
                f"{alone.step_s * 1000:.1f}" if alone else "–",
                alone.limit if alone else "–",
                times,
                str(found.profile.source.get("note", "")),
            )
        )
    head = (
        *("accelerator", "t", "KV tokens", "known", "max_num_seqs", "alone, tokens/s", "batch"),
        *("ms a token", "limit", "times", "note"),
    )
    return table(head, rows, text_columns=2, last_is_text=True)


def _list(title: str, lines: Any) -> str:
    if not lines:
        return ""
    items = "".join(f"<p>{text(line)}</p>" for line in lines)
    return f'<section class="panel"><h2>{title}</h2>{items}</section>'
