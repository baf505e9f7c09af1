"""What ``bench`` prints: a run in figures, its times, and what each instance answered."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hetero_gateway.load.result import Summary
from hetero_gateway.sim.figures import Distribution


def print_summary(summary: Summary, url: str, model: str) -> None:
    """To standard output."""
    console = Console(highlight=False)
    console.print(f"{url}, model {model}", soft_wrap=True)
    figures = Table(show_header=False)
    figures.add_column()
    figures.add_column(justify="right")
    failed = ", ".join(f"{kind} {n}" for kind, n in summary.errors_by_kind.items())
    figures.add_row("requests answered", f"{summary.requests - summary.errors}")
    figures.add_row("requests failed", f"{summary.errors}" + (f" ({failed})" if failed else ""))
    figures.add_row("duration", f"{summary.duration_s:.1f} s")
    figures.add_row("prompt tokens", f"{summary.input_tokens}")
    if summary.cached_share is not None:
        figures.add_row("of them cached", f"{summary.cached_share:.1%}")
    figures.add_row("output tokens", f"{summary.output_tokens}")
    figures.add_row("throughput", f"{summary.throughput_tokens_per_s:.0f} tokens/s")
    figures.add_row("of it output", f"{summary.output_tokens_per_s:.0f} tokens/s")
    console.print(figures)

    times = Table()
    times.add_column("milliseconds")
    for name in ("mean", "p50", "p90", "p99", "max"):
        times.add_column(name, justify="right")
    for name, distribution in (
        ("latency", summary.latency_s),
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("sent late by", summary.send_delay_s),
    ):
        times.add_row(name, *_milliseconds(distribution))
    console.print(times)

    if summary.instances:
        answered = summary.requests - summary.errors
        shares = Table()
        shares.add_column("instance")
        shares.add_column("requests", justify="right")
        shares.add_column("share", justify="right")
        shares.add_column("last answer", justify="right")
        for i in summary.instances:
            share = f"{i.requests / answered:.0%}"
            shares.add_row(i.instance_id, f"{i.requests}", share, f"{i.completion_s:.1f} s")
        console.print(shares)


def _milliseconds(d: Distribution) -> list[str]:
    figures = d.scaled(1000).to_dict().values()
    return ["–" if value is None else f"{value:.1f}" for value in figures]
