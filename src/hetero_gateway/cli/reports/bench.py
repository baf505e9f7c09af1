"""The report of ``bench``: a run's figures, its times, and what each instance answered."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from hetero_gateway.cli.reports.page import axis, figure, fill, lines, panel, shares, table, text
from hetero_gateway.cli.reports.report import CommandReport, grid
from hetero_gateway.lab.load.result import RequestRecord, Summary

_TIMES_HEAD = ("milliseconds", "mean", "p50", "p90", "p99", "max")
_INSTANCES_HEAD = ("instance", "requests", "share", "last answer")
# The number of parts that a run's time is divided into, whatever its length.
_PARTS = 60
# Points of a curve; a run may have a million requests.
_QUANTILES = np.linspace(0.0, 1.0, 201)
# The colours of more instances than this are hard to tell apart.
_MANY_INSTANCES = 10


def report(
    summary: Summary, records: Sequence[RequestRecord], url: str, model: str
) -> CommandReport:
    document = summary.to_dict() | {"url": url, "model": model}
    return CommandReport(
        document,
        lambda: _print(summary, url, model),
        lambda: render(summary, records, document),
    )


def _print(summary: Summary, url: str, model: str) -> None:
    print(f"{url}, model {model}")
    console = Console(highlight=False, markup=False)
    console.print(grid(("", ""), _figure_rows(summary), show_header=False))
    console.print(grid(_TIMES_HEAD, _time_rows(summary)))
    if summary.instances:
        console.print(grid(_INSTANCES_HEAD, _instance_rows(summary)))


def render(summary: Summary, records: Sequence[RequestRecord], document: dict[str, Any]) -> str:
    """The page."""
    answered = table(_INSTANCES_HEAD, _instance_rows(summary), text_columns=1)
    parts = {
        "title": text(f"Load on {document['url']}"),
        "subtitle": text(
            f"model {document['model']}, {summary.requests} requests, "
            f"{summary.throughput_tokens_per_s:.0f} tokens/s"
        ),
        "figures_table": table(("", ""), _figure_rows(summary), text_columns=1),
        "times": table(_TIMES_HEAD, _time_rows(summary), text_columns=1),
        "instances": panel("Instances", answered) if summary.instances else "",
    }
    figures = {"latency": latency_figure(records), "throughput": throughput_figure(records)}
    return fill("bench.html", figures, document, parts)


def _figure_rows(summary: Summary) -> list[tuple[str, str]]:
    """What was sent, answered and generated: (name, figure)."""
    failed = ", ".join(f"{kind} {n}" for kind, n in summary.errors_by_kind.items())
    rows = [
        ("requests answered", f"{summary.requests - summary.errors}"),
        ("requests failed", f"{summary.errors}" + (f" ({failed})" if failed else "")),
        ("duration", f"{summary.duration_s:.1f} s"),
        ("prompt tokens", f"{summary.input_tokens}"),
    ]
    if summary.cached_share is not None:
        rows.append(("of them cached", f"{summary.cached_share:.1%}"))
    rows += [
        ("output tokens", f"{summary.output_tokens}"),
        ("throughput", f"{summary.throughput_tokens_per_s:.0f} tokens/s"),
        ("output alone", f"{summary.output_tokens_per_s:.0f} tokens/s"),
    ]
    if summary.slo_share is not None:
        rows.append(("within the limits", f"{summary.slo_share:.1%}"))
    return rows


def _time_rows(summary: Summary) -> list[tuple[str, ...]]:
    named = (
        ("latency", summary.latency_s),
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("sent late by", summary.send_delay_s),
    )
    rows = ((name, d.scaled(1000).to_dict().values()) for name, d in named)
    return [(name, *("–" if ms is None else f"{ms:.1f}" for ms in row)) for name, row in rows]


def _instance_rows(summary: Summary) -> list[tuple[str, ...]]:
    answered = summary.requests - summary.errors
    return [
        (i.instance_id, f"{i.requests}", f"{i.requests / answered:.0%}", f"{i.completion_s:.1f} s")
        for i in summary.instances
    ]


def latency_figure(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The share of answered requests with a first byte, and complete, within a time."""
    good = [record for record in records if record.error is None]
    curves = (
        ("TTFT", [record.ttft_s for record in good if record.ttft_s is not None]),
        ("latency", [record.latency_s for record in good]),
    )
    return figure(
        [
            lines(
                name,
                np.quantile(times_s, _QUANTILES).tolist() if times_s else [],
                _QUANTILES.tolist() if times_s else [],
                i,
                "%{fullData.name}<br>%{y:.1%} within %{x:.3f} s",
            )
            for i, (name, times_s) in enumerate(curves)
        ],
        xaxis=axis("seconds", type="log"),
        yaxis=shares(),
    )


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
    times_s = ((edges_s[1:] + edges_s[:-1]) / 2).tolist()
    hover = "%{fullData.name}<br>%{x:.1f} s: %{y:.0f} tokens/s"
    data = []
    for i, (name, row) in enumerate(rows.items()):
        trace = lines(name, times_s, (row / np.diff(edges_s)).tolist(), i, hover, stackgroup="one")
        trace["line"]["width"] = 1
        data.append(trace)
    return figure(
        data,
        xaxis=axis("seconds since the start", rangemode="tozero"),
        yaxis=axis("output tokens/s", rangemode="tozero"),
    )


def _spread(tokens: int, first_s: float, end_s: float, edges_s: np.ndarray[Any, Any]) -> Any:
    """Tokens per part of the run; an answer that came all at once falls into one part."""
    if end_s - first_s < 1e-9:
        parts = np.zeros(len(edges_s) - 1)
        parts[min(int(np.searchsorted(edges_s, end_s, side="left")) - 1, len(parts) - 1)] = tokens
        return parts
    return tokens * np.diff(np.clip((edges_s - first_s) / (end_s - first_s), 0.0, 1.0))
