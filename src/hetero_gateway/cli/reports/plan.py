"""The report of ``plan``: the best in full, the others one line each, and what does not fit."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hetero_gateway.cli.reports.page import axis, bars, figure, fill, panel, points, table, text
from hetero_gateway.cli.reports.report import Column, fitted, grid, width
from hetero_gateway.cli.reports.report import console as console_of
from hetero_gateway.cli.reports.simulation import number
from hetero_gateway.deploy.command import transfer_arguments
from hetero_gateway.files.plan_request import PlanRequest
from hetero_gateway.planner import reasons
from hetero_gateway.planner.goals import usd_per_hour
from hetero_gateway.planner.layouts import describe, together
from hetero_gateway.planner.plan import Layout, Machine, Plan, PlanCandidate, SystemFigures, Unfit
from hetero_gateway.sim.figures import finite

_GIB = 2**30
# Enough for everything.
_PIPE_WIDTH = 220
# Rows of the candidates' table; the document has all.
_ROWS = 10
_ROWS_OF_SEVERAL_KINDS = 6
# Width that the reasons need besides the figures.
_REASONS = 40
# Long labels are placed where the legend would be.
_LEGEND_ABOVE = {"orientation": "h", "yanchor": "bottom", "y": 1.02}


def tokens(value: float | None) -> str:
    """About three figures, with k or M; a dash if unknown."""
    if value is None or not math.isfinite(value) or value <= 0:
        return "–"
    if value >= 99_950:
        return f"{value / 1000:.0f}k" if value < 9_995_000 else f"{value / 1e6:.1f}M"
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def _at_rate(figure: Callable[[SystemFigures], float], factor: float = 1.0) -> Callable[..., str]:
    return lambda c: "–" if c.at_rate is None else number(figure(c.at_rate) * factor)


def _known(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _goodput(candidate: PlanCandidate) -> str:
    return "–" if candidate.goodput_per_s is None else number(candidate.goodput_per_s)


def _has_share(figures: SystemFigures) -> bool:
    return math.isfinite(figures.slo_share)


def _within(candidate: PlanCandidate) -> str:
    at_rate = candidate.at_rate
    return f"{at_rate.slo_share:.1%}" if at_rate is not None and _has_share(at_rate) else "–"


def columns(plan: Plan) -> list[Column[PlanCandidate]]:
    """The figures of a candidate, for the terminal's table and the page's."""
    prices = any(c.usd_per_million_tokens is not None for c in plan.candidates)
    idle = any(c.idle_accelerators for c in plan.candidates)
    found: list[Column[PlanCandidate]] = [
        Column("tokens/s", lambda c: tokens(c.simulated.tokens_per_s if c.simulated else None), 0),
        Column("alone", lambda c: tokens(c.alone_tokens_per_s), 8),
        Column("Alg. 1", lambda c: tokens(c.estimate_tokens_per_s), 2),
        Column("as printed", lambda c: tokens(c.estimate_paper_tokens_per_s), 9),
        Column("batch", lambda c: f"{c.simulated.batch:.0f}" if c.simulated else "–", 5),
        Column("latency", _at_rate(lambda f: f.latency_mean_s), 1),
        Column("TTFT", _at_rate(lambda f: f.ttft_mean_s), 3),
        Column("p99", _at_rate(lambda f: f.ttft_p99_s), 6),
        Column("TPOT ms", _at_rate(lambda f: f.tpot_mean_s, 1000), 4),
        Column("p99", _at_rate(lambda f: f.tpot_p99_s, 1000), 7),
    ]
    if any(c.goodput_per_s is not None for c in plan.candidates):
        found.insert(0, Column("goodput/s", _goodput, 0))
    if any(c.at_rate is not None and _has_share(c.at_rate) for c in plan.candidates):
        found.append(Column("within", _within, 2))
    if prices:
        found.append(Column("$/M tokens", lambda c: _known(c.usd_per_million_tokens, ".3g"), 1))
    if plan.lower_bound is not None and plan.goal == "cost":
        machines = plan.machines
        found.append(Column("$/h", lambda c: _known(usd_per_hour(machines, c.layouts), ".2f"), 0))
    if idle or plan.goal == "fewest":
        found.append(Column("used", lambda c: str(c.accelerators), 1))
    if idle:
        found.append(Column("idle", lambda c: str(c.idle_accelerators), 2))
    return found


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the report to standard output."""
    console = console_of(_PIPE_WIDTH, console)
    left = {0, 1, 2, 6, 7}
    console.print(grid(_BEST_HEAD, best_rows(plan), left=left, title="The plan"))
    console.print(headline(plan), soft_wrap=True)
    console.print()
    _print_candidates(plan, console)
    console.print(legend(plan), soft_wrap=True)
    for line in [*unfit_lines(plan.unfit), *plan.notes]:
        console.print(f"- {line}", soft_wrap=True)
    for line in splitting_lines(plan):
        console.print(line, soft_wrap=True)


def splitting_lines(plan: Plan) -> list[str]:
    """What splitting requests would gain, and how."""
    found = plan.splitting
    if found is None:
        return []
    head = f"Splitting requests over links of {found.transfers.gbit_per_s:g} Gbit/s"
    if not found.pays:
        return [f"{head} does not pay: {found.why_not}."]
    (before_s, before), (after_s, after) = found.unsplit, found.split
    text = f"{head} pays: at {rate(plan)} requests/s a mean latency of {number(after_s)} s"
    text += f" in place of {number(before_s)} s"
    if found.holds_per_s is not None:
        text += f", {after:.1%} of the requests within the limits in place of {before:.1%}; "
        text += f"{number(found.holds_per_s)} requests/s within them"
    lines = [f"{text}."]
    counts = Counter((m.accelerator, t) for m in plan.machines for t in plan.best.layouts[m.id])
    for key, group in sorted(found.groups.items()):
        prefills, count = found.prefills.get(key), counts[key]
        does = "either, each request as is cheapest"
        if prefills is not None:
            parts = [(prefills, "prompts"), (count - prefills, "answers")]
            does = ", ".join(f"{n} for {what}" for n, what in parts if n)
        lines.append(f"  {count}× {key[0]} tp{key[1]} (group {group}): {does}")
    lines.append(f"  Each of them with {shlex.join(transfer_arguments())}, and")
    lines.append(
        "  scheduler.split_requests: roles in gateway.yaml, by which roles are found anew as "
        "requests change; -o DIR writes it all."
    )
    return lines


def title(plan: Plan, request: PlanRequest, took_s: float) -> str:
    """The planning request in one line."""
    machines = plan.machines
    accelerators = sum(m.count for m in machines)
    return (
        f"{request.source}: {request.model.name}, context {request.max_model_len}; {accelerators} "
        f"accelerators in {len(machines)} machine{'s' if len(machines) > 1 else ''}; "
        f"{plan.mean_prompt_tokens:.0f} prompt and {plan.mean_output_tokens:.0f} output tokens on "
        f"average; goal {plan.goal}, policy {plan.policy}; planned in {took_s:.1f} s"
    )


def headline(plan: Plan) -> str:
    """The best candidate's result in one line."""
    best = plan.best
    machines = {m.id: m for m in plan.machines}
    uncertain = reasons.Reasons(machines, plan.types, plan.alone).relative_uncertainty(best)
    parts = []
    if best.simulated is not None:
        parts.append(
            f"{tokens(best.simulated.tokens_per_s)} tokens/s with always enough to do "
            f"(± {uncertain:.0%}; {tokens(best.simulated.output_tokens_per_s)} of them output)"
        )
        if math.isfinite(best.simulated.cached_share):
            parts.append(f"{best.simulated.cached_share:.0%} of the prompt tokens cached")
    instances = round(sum(len(of) / together(of) for of in best.layouts.values()))
    parts.append(
        f"{best.accelerators} accelerator{'s' if best.accelerators > 1 else ''}, "
        f"{instances} instance{'s' if instances > 1 else ''}"
    )
    goodput_tokens_per_s = plan.best_goodput_tokens_per_s
    if best.goodput_per_s is not None and goodput_tokens_per_s is not None:
        parts.append(
            f"goodput {number(best.goodput_per_s)} requests/s, {tokens(goodput_tokens_per_s)} "
            f"tokens/s ({plan.limits})"
        )
    if best.usd_per_million_tokens is not None:
        parts.append(f"${best.usd_per_million_tokens:.3g} per million tokens{_priced_at(plan)}")
    if (line := _least(plan)) is not None:
        parts.append(line)
    return "; ".join(parts)


def _least(plan: Plan) -> str | None:
    """What the best candidate needs besides what every set of machines does."""
    if plan.lower_bound is None:
        return None
    if plan.goal == "fewest":
        least = math.ceil(plan.lower_bound - 1e-6)
        return f"no set of fewer than {least} accelerators can hold the rate"
    price = usd_per_hour(plan.machines, plan.best.layouts)
    if price is None:
        return None
    if price <= plan.lower_bound * (1 + 1e-6):
        return f"${price:.2f} per hour: no set that holds the rate can cost less"
    return (
        f"${price:.2f} per hour; no set that holds the rate costs less than "
        f"${plan.lower_bound:.2f} (gap {price / plan.lower_bound - 1:.1%})"
        if plan.lower_bound > 0
        else f"${price:.2f} per hour"
    )


def at_own_goodput(plan: Plan) -> bool:
    """Whether each candidate's latencies and price are at its own goodput."""
    return plan.best.goodput_per_s is not None and plan.best.goodput_per_s == plan.rate_per_s


def _priced_at(plan: Plan) -> str:
    if at_own_goodput(plan):
        return " at the goodput"
    return f" at {rate(plan)} requests/s" if plan.goal == "cost" and plan.limits else ""


def legend(plan: Plan) -> str:
    """What the columns mean, in one or two lines."""
    text = (
        "tokens/s: prompt and output, simulated as one system; alone: the sum of its instances "
        "alone; Alg. 1: the paper's estimate, unpadded and as printed. "
    )
    if at_own_goodput(plan):
        text += (
            f"Goodput: the most requests/s that are held with {plan.limits}; latencies in s and "
            "prices at each one's own, – where it was not simulated."
        )
    else:
        text += (
            f"Latencies in s at {rate(plan)} requests/s, – where that is too much or was not "
            "simulated."
        )
    if plan.pareto:
        text += " ◆: no other has both more throughput and less latency."
    return text


def rate(plan: Plan) -> str:
    return number(plan.rate_per_s)


def names(plan: Plan) -> list[str]:
    """Each candidate's layouts, or only what differs from the best."""
    machines = {m.id: m for m in plan.machines}
    kinds = {(m.accelerator, m.count) for m in plan.machines}
    best = reasons.summary(plan.best, machines)
    if len(kinds) == 1:
        return [reasons.summary(c, machines) for c in plan.candidates]
    result = ["best"]
    for candidate in plan.candidates[1:]:
        result.append(_difference(candidate, plan.best, machines) or best)
    return result


def _difference(candidate: PlanCandidate, best: PlanCandidate, machines: dict[str, Machine]) -> str:
    counts = Counter(
        (machines[i].accelerator, layout, best.layouts[i])
        for i, layout in candidate.layouts.items()
        if layout != best.layouts[i]
    )
    return "; ".join(
        f"{accelerator}: {describe(layout) if layout else 'unused'}" + (f" on {n}" if n > 1 else "")
        for (accelerator, layout, _), n in sorted(counts.items())
    )


def unfit_lines(unfit: Sequence[Unfit]) -> list[str]:
    """What cannot be deployed: one line per reason and accelerator."""
    groups: dict[tuple[str, str], list[Unfit]] = {}
    for each in unfit:
        kind = re.sub(r"\d+", "#", each.reason)
        groups.setdefault((each.accelerator, kind), []).append(each)
    lines = []
    for (accelerator, _), of in groups.items():
        sizes = ", ".join(f"tp{u.size}" for u in of)
        first = of[0]
        reason = first.reason if len(of) == 1 else re.sub(r"\d+$", "t", first.reason)
        text = f"{accelerator} {sizes}: {reason}"
        if first.shortfall_bytes > 0:
            text += f", {first.shortfall_bytes / _GIB:.1f} GiB an accelerator too little"
        if first.remedies:
            text += f"; would help: {', '.join(first.remedies)}"
        lines.append(text)
    return lines


def how_known(plan: Plan, accelerator: str, t: int) -> tuple[str, str]:
    """The source of an instance's memory and times."""
    found = plan.types[accelerator, t]
    memory = f"{found.memory.how} ± {found.memory.uncertainty:.0%}"
    if found.memory.tight:
        memory += ", tight"
    times = f"{found.profile.source.get('how', 'not said')} ± {found.time_uncertainty:.0%}"
    return memory, times


def best_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Equal machines with equal layouts in one row, and another row for each further t."""
    groups: dict[tuple[str, int, Layout], list[str]] = {}
    for machine in plan.machines:
        key = (machine.accelerator, machine.count, plan.best.layouts[machine.id])
        groups.setdefault(key, []).append(machine.id)
    rows: list[tuple[str, ...]] = []
    for (accelerator, count, layout), ids in groups.items():
        name = ids[0] if len(ids) == 1 else f"{ids[0]} … {ids[-1]} ({len(ids)})"
        on = f"{count}× {accelerator}"
        if not layout:
            rows.append((name, on, "unused", "", "", "", "", ""))
        for t, n in sorted(Counter(layout).items(), reverse=True):
            alone = plan.alone.get((accelerator, t))
            memory, times = how_known(plan, accelerator, t)
            rows.append(
                (
                    name,
                    on,
                    f"{n}× tp{t}",
                    f"{plan.types[accelerator, t].memory.kv_capacity_tokens}",
                    f"{alone.batch:.0f}" if alone else "–",
                    tokens(alone.tokens_per_s) if alone else "–",
                    memory,
                    times,
                )
            )
            name = on = ""
    return rows


_BEST_HEAD = (
    *("machine", "accelerators", "instances", "KV tokens", "batch", "tokens/s each"),
    *("memory known", "times known"),
)


def _rows(plan: Plan, columns: Iterable[Column[PlanCandidate]]) -> list[tuple[str, ...]]:
    """Each candidate's name, columns, and why it is not the best."""
    told: set[str] = set()
    return [
        (
            name + (" ◆" if candidate in plan.pareto else ""),
            *(column.text(candidate) for column in columns),
            once(candidate.why_not, told),
        )
        for name, candidate in zip(names(plan), plan.candidates, strict=True)
    ]


def _print_candidates(plan: Plan, console: Console) -> None:
    """With the reasons in the table if there is room, else in lines below a narrower one."""
    limit = _ROWS if len({m.accelerator for m in plan.machines}) == 1 else _ROWS_OF_SEVERAL_KINDS

    def made(shown: Sequence[Column[PlanCandidate]], *, reasons_too: bool = False) -> Table:
        rows = _rows(plan, shown)[:limit]
        head = ["layout", *(column.name for column in shown)]
        if reasons_too:
            head.append("why not")
        else:
            rows = [row[:-1] for row in rows]
        ends = {0, len(shown) + 1}
        title = "Candidates, best first"
        return grid(head, rows, left=ends, fold=ends, no_wrap=True, title=title)

    if width(made(columns(plan)), console) + _REASONS <= console.width:
        console.print(made(columns(plan), reasons_too=True))
    else:
        console.print(fitted(columns(plan), made, console)[0])
        for name, why_not in _rows(plan, ())[1:limit]:
            console.print(f"{name}: {why_not}", soft_wrap=True)
    if len(plan.candidates) > limit:
        console.print(f"and {len(plan.candidates) - limit} more with --json", soft_wrap=True)


def once(why_not: str, told: set[str]) -> str:
    """The line without causes that an earlier row has already given in full."""
    parts = []
    for part in why_not.split("; "):
        subject, colon, _ = part.partition(": ")
        parts.append(f"{subject}: as above" if part in told and colon else part)
        told.add(part)
    return "; ".join(parts)


def render(plan: Plan, request: PlanRequest, document: dict[str, Any]) -> str:
    """The page of ``--report``."""
    shown = columns(plan)
    rows = [(f"{i}. {row[0]}", *row[1:]) for i, row in enumerate(_rows(plan, shown), 1)]
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
        "best": table(_BEST_HEAD, best_rows(plan), text_columns=3),
        "candidates": table(
            ("layout", *(c.name for c in shown), "why not"), rows, text_columns=1, last_is_text=True
        ),
        "legend": text(legend(plan)),
        "rate": "its own goodput" if at_own_goodput(plan) else f"{rate(plan)} requests/s",
        "types": _types_table(plan),
        "unfit": _list("Not deployable", unfit_lines(plan.unfit)),
        "notes": _list("Notes", [*plan.notes, *splitting_lines(plan)]),
    }
    return fill("plan.html", figures, document, parts)


def throughput_figure(plan: Plan) -> dict[str, Any]:
    """Bars by candidate; unknown values are left out."""
    labels = [f"{i}" for i in range(1, len(plan.candidates) + 1)]
    layouts = [text(name) for name in names(plan)]
    series = (
        ("simulated", [c.simulated.tokens_per_s if c.simulated else None for c in plan.candidates]),
        ("instances alone", [c.alone_tokens_per_s or None for c in plan.candidates]),
        ("Algorithm 1", [finite(c.estimate_tokens_per_s) for c in plan.candidates]),
        ("as printed", [finite(c.estimate_paper_tokens_per_s) for c in plan.candidates]),
    )
    hover = "%{text}<br>%{fullData.name}: %{y:.0f} tokens/s"
    return figure(
        [
            bars(name, labels, values, i, hover, text=layouts, textposition="none")
            for i, (name, values) in enumerate(series)
        ],
        barmode="group",
        legend=_LEGEND_ABOVE,
        xaxis=axis("candidate, by the table's number", type="category"),
        yaxis=axis("tokens/s", rangemode="tozero"),
    )


def pareto_figure(plan: Plan) -> dict[str, Any]:
    """Throughput against mean latency at the plan's rate, and the line of undominated
    candidates."""

    def measured(candidates: Sequence[PlanCandidate]) -> list[tuple[float, float, int]]:
        return [
            (c.at_rate.latency_mean_s, c.simulated.tokens_per_s, i)
            for i, c in enumerate(candidates)
            if c.at_rate is not None and c.simulated is not None
        ]

    front, found, layouts = measured(plan.pareto), measured(plan.candidates), names(plan)
    hover = "%{text}<br>%{y:.0f} tokens/s, %{x:.2f} s"
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "undominated",
        "x": [x for x, _, _ in front],
        "y": [y for _, y, _ in front],
        "line": {"color": "#888888", "dash": "dash"},
        "hoverinfo": "skip",
    }
    dots = points("candidates", [x for x, _, _ in found], [y for _, y, _ in found], 0, hover, 10)
    return figure(
        [line, dots | {"text": [text(layouts[i]) for *_, i in found]}],
        xaxis=axis("mean latency, s", rangemode="tozero"),
        yaxis=axis("tokens/s", rangemode="tozero"),
    )


def memory_figure(plan: Plan) -> dict[str, Any]:
    """GiB of one accelerator by instance type, stacked; the KV cache on top."""
    keys = sorted(plan.types)
    labels = [text(f"{accelerator} tp{t}") for accelerator, t in keys]
    parts = list(dict.fromkeys(name for key in keys for name in plan.types[key].memory.parts))
    series = [
        (part, [plan.types[key].memory.parts.get(part, 0) / _GIB for key in keys]) for part in parts
    ]
    series.append(("KV cache", [plan.types[k].memory.kv_bytes / k[1] / _GIB for k in keys]))
    hover = "%{fullData.name}<br>%{x}: %{y:.2f} GiB"
    return figure(
        [bars(name, labels, values, i, hover) for i, (name, values) in enumerate(series)],
        barmode="stack",
        legend=_LEGEND_ABOVE,
        margin={"l": 64, "r": 16, "t": 36, "b": 120},
        xaxis={"type": "category", "automargin": True},
        yaxis=axis("GiB", rangemode="tozero"),
    )


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
    return panel(title, "".join(f"<p>{text(line)}</p>" for line in lines))
