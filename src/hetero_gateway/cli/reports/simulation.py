"""The report of ``simulate``: policies compared on a cluster.

A terminal gets as many columns as fit, by rank; docs/guide/simulate.md explains them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hetero_gateway.cli.reports.page import (
    axis,
    bars,
    figure,
    fill,
    lines,
    panel,
    shares,
    table,
    text,
)
from hetero_gateway.cli.reports.report import (
    Column,
    CommandReport,
    console,
    fitted,
    grid,
    print_table,
)
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.planner.roles import legs_of
from hetero_gateway.planner.roles import told as roles_told
from hetero_gateway.planner.splitting import SPLITTING_POLICY, Splitting
from hetero_gateway.sim.experiment import Bound, Experiment, Moments
from hetero_gateway.sim.held import SHARES
from hetero_gateway.sim.result import QUANTILES, Cell, RunResult, Spread

# Enough for every ranked column.
_PIPE_WIDTH = 200
# Warn if arrivals last fewer mean latencies than this. On two V100s with the chat mix at 90 % load,
# 1000, 2000 and 4000 requests last 6, 12 and 19; their throughput is 56, 69 and 79 % of the bound,
# where endless runs would reach 90 % (simulate --load 0.9 --count N).
_SHORT_RUN = 8
# An experiment's name in the configuration.
_TOLD = ("arrival_cv", "scheduling", "predictor", "objective", "queue", "batch_share")
# Bars of more instances than this are hard to tell apart; then the slowest and fastest are shown.
_MANY_INSTANCES = 24


def _mean(figure: Callable[[RunResult], float], factor: float = 1.0) -> Callable[[Cell], str]:
    return lambda cell: number(cell.spread(figure).mean * factor)


def _share(figure: Callable[[RunResult], float]) -> Callable[[Cell], str]:
    return lambda cell: percent(cell.spread(figure).mean)


def _count(figure: Callable[[RunResult], int]) -> Callable[[Cell], str]:
    return lambda cell: f"{cell.total(figure) / len(cell.runs):.3g}"


def _done(cell: Cell) -> str:
    times_s = [cell.completion_s(i).mean for i in range(len(cell.instance_ids))]
    return f"{number(min(times_s))}–{number(max(times_s))}"


COLUMNS: tuple[Column[Cell], ...] = (
    Column("tokens/s", lambda cell: with_sd(cell.throughput_tokens_per_s), 0),
    Column("of bound", lambda cell: percent(cell.share_of_bound.mean), 3),
    Column("steady", _mean(lambda run: run.steady_tokens_per_s), 8),
    Column("latency", lambda cell: with_sd(cell.spread(lambda run: run.latency_s.mean)), 1),
    Column("p50", _mean(lambda run: run.latency_s.p50), None),
    Column("p99", _mean(lambda run: run.latency_s.p99), 2),
    Column("TTFT", _mean(lambda run: run.ttft_s.mean), 4),
    Column("TTFT p99", _mean(lambda run: run.ttft_s.p99), 9),
    Column("TPOT ms", _mean(lambda run: run.tpot_s.mean, 1000), 5),
    Column("TPOT p99", _mean(lambda run: run.tpot_s.p99, 1000), None),
    Column("in SLO", _share(lambda run: run.slo_share), 6),
    Column("done, s", _done, 10),
    Column("spread", _share(lambda run: run.completion_spread), 7),
    # Shown if there is any.
    Column("cached", _share(lambda run: run.cached_share), 4),
    Column("split", _share(lambda run: run.split_share), 4),
    Column("evicted", _count(lambda run: run.preemptions), 11),
    # Ranked first if there are any, else left out of the terminal's tables.
    Column("refused", _count(lambda run: run.refused), None),
    Column("lost", _count(lambda run: run.lost), None),
)


class PolicyComparison(NamedTuple):
    """Policies on a cluster.

    Args:
        source: the cluster's file, or the gateway's address.
        held: by policy, the load at which each of ``SHARES`` is kept; empty: not requested.
    """

    source: str
    experiment: Experiment
    bound: Bound
    moments: Moments
    cells: Sequence[Cell]
    held: Mapping[str, tuple[float, ...]]

    @property
    def splitting(self) -> Splitting | None:
        splits = self.experiment.splits
        return splits if isinstance(splits, Splitting) else None

    @property
    def mix(self) -> str:
        return (
            f"{len(self.experiment.instances)} instances, {self.experiment.count} requests a "
            f"run, {self.moments.mean_prompt:.0f} prompt and {self.moments.mean_output:.0f} output "
            "tokens on average"
        )


def report(of: PolicyComparison) -> CommandReport:
    told = document(of)
    return CommandReport(told, lambda: print_results(of), lambda: render(of, told))


def document(of: PolicyComparison) -> dict[str, Any]:
    """The document of ``--json``."""
    experiment, moments = of.experiment, of.moments
    alone = zip(experiment.instances, of.bound.instances_tokens_per_s, strict=True)
    told = {
        "cluster": of.source,
        "instances": [
            {"id": i.instance_id, "profile": i.profile.name, "bound_tokens_per_s": tokens_per_s}
            for i, tokens_per_s in alone
        ],
        "bound_tokens_per_s": of.bound.tokens_per_s,
        "mix": {
            "requests": experiment.count,
            "mean_prompt_tokens": moments.mean_prompt,
            "mean_output_tokens": moments.mean_output,
            "sd_output_tokens": moments.sd_output,
        },
        "arrivals": "random" if experiment.trace_arrival_s is None else "trace",
        **{name: getattr(experiment, name) for name in _TOLD},
        "prefix_cache": experiment.prefix_cache and experiment.prefixes is not None,
        "faults": len(experiment.faults),
        "slo": {"ttft_s": experiment.slo.ttft_s, "tpot_s": experiment.slo.tpot_s},
        "heeds_slo": experiment.heeds_slo,
        "caution": _caution(of),
        "results": [cell.to_dict() for cell in of.cells],
    }
    if splitting := of.splitting:
        told["transfer"] = {
            "start_s": splitting.transfers.link.start_s,
            "gbit_per_s": splitting.transfers.gbit_per_s,
            "kv_bytes_per_token": splitting.transfers.kv_bytes_per_token,
        }
        told["roles"] = [
            {
                "rate": cell.to_dict()["rate"],
                "splits": splitting.found[cell.rate_per_s] is not None,
                "legs": legs_of(splitting.found[cell.rate_per_s]),
            }
            for cell in _splitting_cells(of)
        ]
    if of.held:
        told["held"] = {
            policy: {f"{share:g}": load for share, load in zip(SHARES, loads, strict=True)}
            for policy, loads in of.held.items()
        }
    return told


def print_results(of: PolicyComparison) -> None:
    """What was simulated, the tables, and what to note about them."""
    print(f"{of.source}: {of.mix}; bound {of.bound.tokens_per_s:.0f} output tokens/s")
    print_tables(of.cells)
    slo, seeds = of.experiment.slo, len(of.cells[0].runs)
    print(
        f"Output tokens per second; times in seconds, TPOT in milliseconds; mean ± sd over "
        f"{seeds} seed{'s' * (seeds != 1)}. In SLO: TTFT up to {slo.ttft_s:g} s and TPOT up to "
        f"{slo.tpot_s * 1000:g} ms. Differences under 2 % are noise."
    )
    if caution := _caution(of):
        print(caution)
    if of.splitting:
        print()
        for cell in _splitting_cells(of):
            print(f"{_rate_of(cell)}: {roles_told(of.splitting.found[cell.rate_per_s])}")
    if of.held:
        print("\nHighest load at which this share of the requests is within the SLO:")
        print_table(
            ("POLICY", *(f"{share:.0%}" for share in SHARES)),
            [(policy, *(f"{load:.2f}" for load in loads)) for policy, loads in of.held.items()],
        )


def _splitting_cells(of: PolicyComparison) -> list[Cell]:
    """The cells for which roles were found."""
    return [cell for cell in of.cells if cell.policy == SPLITTING_POLICY]


def print_tables(cells: Sequence[Cell], on: Console | None = None) -> None:
    """One table per rate; says if columns were left out."""
    on = console(_PIPE_WIDTH, on)
    some_left_out = False
    for group in by_rate(cells):
        on.print(f"\n{_rate_of(group[0])}", soft_wrap=True)

        def made(columns: Sequence[Column[Cell]], group: Sequence[Cell] = group) -> Table:
            rows = [(cell.policy, *(column.text(cell) for column in columns)) for cell in group]
            return grid(("policy", *(c.name for c in columns)), rows, no_wrap=True)

        printed, left_out = fitted([c for c in COLUMNS if _shown(c, group)], made, on)
        on.print(printed)
        some_left_out |= left_out
    if some_left_out:
        on.print("A wider terminal shows more columns, --json all of them.", soft_wrap=True)


def by_rate(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups of one rate each, in order."""
    groups: dict[tuple[float, float | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.rate_per_s, cell.load), []).append(cell)
    return list(groups.values())


def _caution(of: PolicyComparison) -> str | None:
    own_times = of.experiment.trace_arrival_s is not None
    return short_runs(of.cells, "Give a --load." if own_times else "Raise --count.")


def short_runs(cells: Sequence[Cell], remedy: str = "Raise --count.") -> str | None:
    """A caution if filling and emptying the cluster take much of a run, else None."""
    for group in by_rate(cells):
        arrivals_s = group[0].runs[0].requests / group[0].rate_per_s
        latency_s = min(cell.spread(lambda run: run.latency_s.mean).mean for cell in group)
        if 0 < arrivals_s < _SHORT_RUN * latency_s:
            return (
                f"At {rate_name(group[0].rate_per_s)} the arrivals last {number(arrivals_s)} s, "
                f"and the mean latency is {number(latency_s)} s or more: filling and emptying the "
                f"cluster are much of such a run, if it is not overloaded. {remedy}"
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
    """Decimals for three figures in all, unless there are more before the point."""
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _shown(column: Column[Cell], group: Sequence[Cell]) -> bool:
    if column.name in ("refused", "lost"):
        return any(column.text(cell) != "0" for cell in group)
    if column.name == "cached":
        return any(run.cached_share for cell in group for run in cell.runs)
    if column.name == "split":
        return any(run.split_share for cell in group for run in cell.runs)
    return column.rank is not None


def render(of: PolicyComparison, told: dict[str, Any]) -> str:
    """The page of ``--report``; ``told`` is the document."""
    figures = {
        "throughput": throughput_figure(of.cells, of.bound.tokens_per_s),
        "rates": [
            {
                "name": _rate_of(group[0]),
                "figures": {
                    "completion": completion_figure(group),
                    "latency": latency_figure(group, _policies(group)),
                },
            }
            for group in by_rate(of.cells)
        ],
    }
    parts = {
        "title": text(f"{Path(of.source).name}: policies compared"),
        "subtitle": text(
            f"{of.mix}, {len(of.cells[0].runs)} seeds, bound "
            f"{of.bound.tokens_per_s:.0f} output tokens/s"
        ),
        "options": _options(of.experiment),
        "results": _results_table(of.cells),
        "cluster": _cluster_table(of.experiment, of.bound),
        "constants": _constants_table(of.experiment),
        "faults": _faults_table(of.experiment),
    }
    return fill("simulation.html", figures, told, parts)


def throughput_figure(cells: Sequence[Cell], bound_tokens_per_s: float) -> dict[str, Any]:
    """Bars by rate, one colour per policy, and the bound as a line across."""
    groups = by_rate(cells)
    names = [text(_rate_of(group[0])) for group in groups]
    dashed = {"dash": "dash", "width": 2, "color": "#888888"}
    bound_y = [bound_tokens_per_s] * len(names)
    hover = "%{fullData.name}<br>%{x}: %{y:.0f} tokens/s"
    data = []
    for i, policy in enumerate(_policies(cells)):
        of = [c.throughput_tokens_per_s for c in cells if c.policy == policy]
        data.append(_spread_bars(policy, names, of, i, hover))
    data.append(lines("bound", names, bound_y, 0, "bound: %{y:.0f} tokens/s", line=dashed))
    # A line through category centres would end in the middle of the outer bars, and with a single
    # rate be a point: the shape spans the plot, the trace above is for the legend.
    ends = {"x0": 0, "x1": 1, "y0": bound_tokens_per_s, "y1": bound_tokens_per_s}
    return figure(
        data,
        barmode="group",
        shapes=[{"type": "line", "xref": "paper", "line": dashed} | ends],
        xaxis={"type": "category"},
        yaxis=axis("output tokens/s", rangemode="tozero"),
    )


def completion_figure(cells: Sequence[Cell]) -> dict[str, Any]:
    """When each instance finished, at one rate: bars by policy, one colour per instance."""
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
    policies = [text(c.policy) for c in cells]
    hover = "%{fullData.name}<br>%{x}: %{y:.1f} s"
    return figure(
        [_spread_bars(name, policies, of, i, hover) for i, (name, of) in enumerate(shown)],
        barmode="group",
        xaxis={"type": "category"},
        yaxis=axis("last completion, s", rangemode="tozero"),
    )


def latency_figure(cells: Sequence[Cell], policies: Sequence[str]) -> dict[str, Any]:
    """The share of requests finished within a time, at one rate; logarithmic time.

    ``policies`` fixes each policy's colour.
    """
    hover = "%{fullData.name}<br>%{y:.1%} within %{x:.2f} s"
    data = []
    for cell in cells:
        x = cell.latency_quantiles_s()
        y = QUANTILES.tolist() if x.size else []
        data.append(lines(cell.policy, x.tolist(), y, policies.index(cell.policy), hover))
    return figure(data, xaxis=axis("latency, s", type="log"), yaxis=shares())


def _spread_bars(
    name: str, x: Sequence[str], spreads: Sequence[Spread], position: int, hover: str
) -> dict[str, Any]:
    """Means with their standard deviations; grey is visible on both themes and on every bar."""
    deviations = [s.sd for s in spreads]
    error = {"type": "data", "array": deviations, "thickness": 1.2, "color": "#888888"}
    return bars(name, x, [s.mean for s in spreads], position, hover, error_y=error)


def _rate_of(cell: Cell) -> str:
    return rate_name(cell.rate_per_s, cell.load)


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
            # p8 may be 0; every profile has some decode constant.
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
    return panel("Faults", table(head, rows, text_columns=2))


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
