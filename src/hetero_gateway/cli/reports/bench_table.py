"""What ``bench`` prints: a run in figures, its times, and what each instance answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from hetero_gateway.lab.load.result import Summary
from hetero_gateway.sim.figures import Distribution

TIMES_HEAD = ("milliseconds", "mean", "p50", "p90", "p99", "max")
INSTANCES_HEAD = ("instance", "requests", "share", "last answer")


def print_summary(summary: Summary, url: str, model: str) -> None:
    """To standard output."""
    console = Console(highlight=False)
    console.print(f"{url}, model {model}", soft_wrap=True)
    figures = Table(show_header=False)
    figures.add_column()
    figures.add_column(justify="right")
    for row in figure_rows(summary):
        figures.add_row(*row)
    console.print(figures)
    console.print(_table(TIMES_HEAD, time_rows(summary)))
    if summary.instances:
        console.print(_table(INSTANCES_HEAD, instance_rows(summary)))


def figure_rows(summary: Summary) -> list[tuple[str, str]]:
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


def time_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Distributions in milliseconds, as ``TIMES_HEAD`` has them."""
    named = (
        ("latency", summary.latency_s),
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("sent late by", summary.send_delay_s),
    )
    return [(name, *_milliseconds(distribution)) for name, distribution in named]


def instance_rows(summary: Summary) -> list[tuple[str, ...]]:
    """What each instance answered, as ``INSTANCES_HEAD`` has it."""
    answered = summary.requests - summary.errors
    return [
        (i.instance_id, f"{i.requests}", f"{i.requests / answered:.0%}", f"{i.completion_s:.1f} s")
        for i in summary.instances
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text, and the others figures."""
    table = Table()
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _milliseconds(d: Distribution) -> list[str]:
    figures = d.scaled(1000).to_dict().values()
    return ["–" if value is None else f"{value:.1f}" for value in figures]
