"""What ``simulate`` prints: the JSON document, and the columns for the terminal's tables and for
the report's.

A terminal gets as many as it is wide, by rank; docs/guide/simulate.md says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from hetero_gateway.cli.reports.columns import print_table
from hetero_gateway.sim.experiment import Bound, Experiment, Moments
from hetero_gateway.sim.held import SHARES
from hetero_gateway.sim.result import Cell, RunResult, Spread

# A pipe has no width: there, everything ranked fits.
_PIPE_WIDTH = 200
# Arrivals lasting less than this many mean latencies. On two V100s with the chat mix at 90 % load,
# 1000, 2000 and 4000 requests last 6, 12 and 19; their throughput is 56, 69 and 79 % of the bound,
# of the 90 % that endless runs would come to (simulate --load 0.9 --count N).
_SHORT_RUN = 8


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a policy at a rate.

    ``rank``: on a terminal, the columns with the highest ones go first; None: in the report only.
    """

    name: str
    rank: int | None
    text: Callable[[Cell], str]


def _mean(figure: Callable[[RunResult], float], factor: float = 1.0) -> Callable[[Cell], str]:
    return lambda cell: number(cell.spread(figure).mean * factor)


def _share(figure: Callable[[RunResult], float]) -> Callable[[Cell], str]:
    return lambda cell: percent(cell.spread(figure).mean)


def _count(figure: Callable[[RunResult], int]) -> Callable[[Cell], str]:
    return lambda cell: f"{cell.total(figure) / len(cell.runs):.3g}"


def _done(cell: Cell) -> str:
    times_s = [cell.completion_s(i).mean for i in range(len(cell.instance_ids))]
    return f"{number(min(times_s))}–{number(max(times_s))}"


COLUMNS = (
    Column("tokens/s", 0, lambda cell: with_sd(cell.throughput_tokens_per_s)),
    Column("of bound", 3, lambda cell: percent(cell.share_of_bound.mean)),
    Column("steady", 8, _mean(lambda run: run.steady_tokens_per_s)),
    Column("latency", 1, lambda cell: with_sd(cell.spread(lambda run: run.latency_s.mean))),
    Column("p50", None, _mean(lambda run: run.latency_s.p50)),
    Column("p99", 2, _mean(lambda run: run.latency_s.p99)),
    Column("TTFT", 4, _mean(lambda run: run.ttft_s.mean)),
    Column("TTFT p99", 9, _mean(lambda run: run.ttft_s.p99)),
    Column("TPOT ms", 5, _mean(lambda run: run.tpot_s.mean, 1000)),
    Column("TPOT p99", None, _mean(lambda run: run.tpot_s.p99, 1000)),
    Column("in SLO", 6, _share(lambda run: run.slo_share)),
    Column("done, s", 10, _done),
    Column("spread", 7, _share(lambda run: run.completion_spread)),
    # Shown where there is any.
    Column("cached", 4, _share(lambda run: run.cached_share)),
    Column("evicted", 11, _count(lambda run: run.preemptions)),
    # Ranked before the others where there are any, and else left out of the terminal's tables.
    Column("refused", None, _count(lambda run: run.refused)),
    Column("lost", None, _count(lambda run: run.lost)),
)


def document(
    config: Path,
    experiment: Experiment,
    bound: Bound,
    moments: Moments,
    cells: list[Cell],
) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "cluster": str(config),
        "instances": [
            {
                "id": instance.instance_id,
                "profile": instance.profile.name,
                "bound_tokens_per_s": alone,
            }
            for instance, alone in zip(
                experiment.instances, bound.instances_tokens_per_s, strict=True
            )
        ],
        "bound_tokens_per_s": bound.tokens_per_s,
        "mix": {
            "requests": experiment.count,
            "mean_prompt_tokens": moments.mean_prompt,
            "mean_output_tokens": moments.mean_output,
            "sd_output_tokens": moments.sd_output,
        },
        "arrivals": "random" if experiment.trace_arrival_s is None else "trace",
        "arrival_cv": experiment.arrival_cv,
        "scheduling": experiment.scheduling,
        "predictor": experiment.predictor,
        "objective": experiment.objective,
        "queue": experiment.queue,
        "batch_share": experiment.batch_share,
        "prefix_cache": experiment.prefix_cache and experiment.prefixes is not None,
        "faults": len(experiment.faults),
        "slo": {"ttft_s": experiment.slo.ttft_s, "tpot_s": experiment.slo.tpot_s},
        "heeds_slo": experiment.heeds_slo,
        "caution": short_runs(cells),
        "results": [cell.to_dict() for cell in cells],
    }


def print_results(
    config: Path,
    experiment: Experiment,
    bound: Bound,
    moments: Moments,
    cells: list[Cell],
) -> None:
    """What was simulated, the tables, and what to mind in them."""
    print(
        f"{config}: {len(experiment.instances)} instances, {experiment.count} requests a "
        f"run, {moments.mean_prompt:.0f} prompt and {moments.mean_output:.0f} output tokens on "
        f"average; bound {bound.tokens_per_s:.0f} output tokens/s"
    )
    print_tables(cells)
    slo = experiment.slo
    print(
        f"Output tokens per second; times in seconds, TPOT in milliseconds; mean ± sd over "
        f"{len(cells[0].runs)} seeds. In SLO: TTFT up to {slo.ttft_s:g} s and TPOT up to "
        f"{slo.tpot_s * 1000:g} ms. Differences under 2 % are noise."
    )
    if caution := short_runs(cells):
        print(caution)


def held_document(held: Mapping[str, tuple[float, ...]]) -> dict[str, dict[str, float]]:
    """``held`` of ``simulate --json``: by policy, the load that holds each share."""
    return {
        policy: {f"{share:g}": load for share, load in zip(SHARES, loads, strict=True)}
        for policy, loads in held.items()
    }


def print_held(held: Mapping[str, tuple[float, ...]]) -> None:
    """The highest load that holds each share, by policy."""
    print("\nHighest load at which this share of the requests is within the SLO:")
    print_table(
        ("POLICY", *(f"{share:.0%}" for share in SHARES)),
        [(policy, *(f"{load:.2f}" for load in loads)) for policy, loads in held.items()],
    )


def by_rate(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups of one rate each, in order."""
    groups: dict[tuple[float, float | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.rate_per_s, cell.load), []).append(cell)
    return list(groups.values())


def print_tables(cells: Sequence[Cell], console: Console | None = None) -> None:
    """One table per rate on standard output; says so where columns were left out."""
    console = console or Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    left_out = False
    for group in by_rate(cells):
        console.print(f"\n{rate_name(group[0].rate_per_s, group[0].load)}", soft_wrap=True)
        columns = [c for c in COLUMNS if _shown(c, group)]
        table = _table(group, columns)
        while len(columns) > 1 and _width(table, console) > console.width:
            columns.remove(max(columns, key=lambda column: column.rank or 0))
            table = _table(group, columns)
            left_out = True
        console.print(table)
    if left_out:
        console.print("A wider terminal shows more columns, --json all of them.", soft_wrap=True)


def short_runs(cells: Sequence[Cell]) -> str | None:
    """A line of caution where filling and emptying the cluster are much of a run, else None."""
    for group in by_rate(cells):
        arrivals_s = group[0].runs[0].requests / group[0].rate_per_s
        latency_s = min(cell.spread(lambda run: run.latency_s.mean).mean for cell in group)
        if 0 < arrivals_s < _SHORT_RUN * latency_s:
            return (
                f"At {rate_name(group[0].rate_per_s)} the arrivals last {number(arrivals_s)} s, "
                f"and the mean latency is {number(latency_s)} s or more: filling and emptying the "
                "cluster are much of such a run, if it is not overloaded. Raise --count."
            )
    return None


def rate_name(rate_per_s: float, load: float | None = None) -> str:
    if math.isinf(rate_per_s):
        return "all at once"
    return f"{rate_per_s:.3g} requests/s" + (f" ({load:.0%} of the bound)" if load else "")


def with_sd(spread: Spread) -> str:
    if not math.isfinite(spread.mean):
        return "–"
    return f"{number(spread.mean)} ± {spread.sd:.{_digits(spread.mean)}f}"


def number(value: float) -> str:
    return f"{value:.{_digits(value)}f}" if math.isfinite(value) else "–"


def percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "–"


def _digits(value: float) -> int:
    """Behind the point, for three figures in all where there are not more before it."""
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _shown(column: Column, group: Sequence[Cell]) -> bool:
    if column.name in ("refused", "lost"):
        return any(column.text(cell) != "0" for cell in group)
    if column.name == "cached":
        return any(run.cached_share for cell in group for run in cell.runs)
    return column.rank is not None


def _table(group: Sequence[Cell], columns: Sequence[Column]) -> Table:
    table = Table()
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for cell in group:
        table.add_row(cell.policy, *(column.text(cell) for column in columns))
    return table


def _width(table: Table, console: Console) -> int:
    # Asked for with room to spare: a table says that it fits whatever width it is offered.
    options = console.options.update(width=10_000)
    return Measurement.get(console, options, table).maximum
