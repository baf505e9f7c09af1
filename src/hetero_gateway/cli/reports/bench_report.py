"""The page that ``bench --report`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetero_gateway.cli.reports.bench_table import (
    INSTANCES_HEAD,
    TIMES_HEAD,
    figure_rows,
    instance_rows,
    time_rows,
)
from hetero_gateway.cli.reports.page import colour, fill, json_block, table, text
from hetero_gateway.lab.load.result import RequestRecord, Summary

# A run's time is cut into this many parts, whatever its length.
_PARTS = 60
# Points of a curve; a run may have a million requests.
_QUANTILES = np.linspace(0.0, 1.0, 201)
# Colours of more instances than this cannot be distinguished.
_MANY_INSTANCES = 10


def render(summary: Summary, records: Sequence[RequestRecord], document: dict[str, Any]) -> str:
    """The whole page.

    Args:
        document: what ``bench --json`` prints; it stands in the page for programs to read.
    """
    figures = {"latency": latency_figure(records), "throughput": throughput_figure(records)}
    shares = table(INSTANCES_HEAD, instance_rows(summary), text_columns=1)
    parts = {
        "title": text(f"Load on {document['url']}"),
        "subtitle": text(
            f"model {document['model']}, {summary.requests} requests, "
            f"{summary.throughput_tokens_per_s:.0f} tokens/s"
        ),
        "figures_table": table(("", ""), figure_rows(summary), text_columns=1),
        "times": table(TIMES_HEAD, time_rows(summary), text_columns=1),
        "instances": f'<section class="panel"><h2>Instances</h2>{shares}</section>'
        if summary.instances
        else "",
        "figures": json_block(figures),
        "document": json_block(document),
    }
    return fill("bench_report.html", parts)


def latency_figure(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The share of answered requests that had a first byte, and all, within a time."""
    good = [record for record in records if record.error is None]
    curves = (
        ("TTFT", [record.ttft_s for record in good if record.ttft_s is not None]),
        ("latency", [record.latency_s for record in good]),
    )
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": np.quantile(times_s, _QUANTILES).tolist() if times_s else [],
                "y": _QUANTILES.tolist() if times_s else [],
                "line": {"color": colour(i), "width": 2},
                "hovertemplate": "%{fullData.name}<br>%{y:.1%} within %{x:.3f} s<extra></extra>",
            }
            for i, (name, times_s) in enumerate(curves)
        ],
        "layout": {
            "xaxis": {"type": "log", "title": {"text": "seconds"}},
            "yaxis": {
                "title": {"text": "share of requests"},
                "range": [0, 1.01],
                "tickformat": ".0%",
            },
        },
    }


def throughput_figure(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Output tokens per second over the run, stacked by instance.

    A request's tokens are spread evenly from its first byte to its last.
    """
    good = [r for r in records if r.error is None]
    start_s = min((r.sent_s for r in records), default=0.0)
    end_s = max((r.end_s for r in good), default=start_s)
    edges_s = np.linspace(0.0, max(end_s - start_s, 1e-9), _PARTS + 1)
    names = sorted({r.instance or "answered" for r in good})
    if len(names) > _MANY_INSTANCES:
        names = ["all instances"]
    rows = {name: np.zeros(_PARTS) for name in names}
    for record in good:
        row = rows[names[0] if len(names) == 1 else record.instance or "answered"]
        first_s = record.sent_s if record.first_s is None else record.first_s
        row += _spread(record.output_tokens, first_s - start_s, record.end_s - start_s, edges_s)
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "one",
                "name": text(name),
                "x": ((edges_s[1:] + edges_s[:-1]) / 2).tolist(),
                "y": (row / np.diff(edges_s)).tolist(),
                "line": {"color": colour(i), "width": 1},
                "hovertemplate": "%{fullData.name}<br>%{x:.1f} s: %{y:.0f} tokens/s<extra></extra>",
            }
            for i, (name, row) in enumerate(rows.items())
        ],
        "layout": {
            "xaxis": {"title": {"text": "seconds since the start"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "output tokens/s"}, "rangemode": "tozero"},
        },
    }


def _spread(tokens: int, first_s: float, end_s: float, edges_s: np.ndarray[Any, Any]) -> Any:
    """Tokens per part of the run; those of an answer that came at once are in one part."""
    if end_s - first_s < 1e-9:
        parts = np.zeros(len(edges_s) - 1)
        parts[min(int(np.searchsorted(edges_s, end_s, side="left")) - 1, len(parts) - 1)] = tokens
        return parts
    return tokens * np.diff(np.clip((edges_s - first_s) / (end_s - first_s), 0.0, 1.0))
