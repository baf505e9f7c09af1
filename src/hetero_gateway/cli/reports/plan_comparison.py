"""The running setup compared with the best one: the table, and its part of the document."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hetero_gateway.cli.reports.report import print_table
from hetero_gateway.lab.load.admin import printable
from hetero_gateway.lab.profiler.seen import SeenGateway
from hetero_gateway.planner.layouts import describe
from hetero_gateway.planner.plan import Layout, PlanCandidate
from hetero_gateway.planner.present import NOISE, Comparison
from hetero_gateway.sim.figures import finite

# At most this many instances are named in one line.
_NAMES = 6


def document(seen: SeenGateway, comparison: Comparison) -> dict[str, Any]:
    """The running setup, the proposal, and the gain of the change, as JSON."""
    best, now, present = comparison.best, comparison.now, comparison.present
    return {
        "url": seen.url,
        "policy": seen.policy,
        "requests": len(seen.rows),
        "observed_s": seen.span_s,
        "rate_per_s": seen.rate_per_s,
        "instances": [
            {
                "id": p.instance.id,
                "machine": p.machine.id,
                "accelerator": p.machine.accelerator,
                "tensor_parallel": p.key[1],
                "times": p.profile.source.get("how", "not said"),
                "observed": p.instance.observed,
            }
            for p in present.placed
        ],
        "left_out": [{"id": name, "reason": reason} for name, reason in present.left_out],
        "now": _side(now, present.layouts),
        "proposed": _side(best, best.layouts),
        "changes": [
            {"machine": machine, "now": list(was), "proposed": list(becomes)}
            for machine, was, becomes in comparison.changes
        ],
        "throughput_gain": comparison.gain,
        "worth_it": comparison.worth_it,
    }


def _side(candidate: PlanCandidate | None, layouts: Mapping[str, Layout]) -> dict[str, Any]:
    simulated = None if candidate is None else candidate.simulated
    at_rate = None
    if candidate is not None and candidate.at_rate is not None:
        figures = dataclasses.asdict(candidate.at_rate).items()
        at_rate = {name: finite(value) for name, value in figures}
    return {
        "layouts": {machine: list(layout) for machine, layout in layouts.items()},
        "throughput_tokens_per_s": None if simulated is None else simulated.tokens_per_s,
        "output_tokens_per_s": None if simulated is None else simulated.output_tokens_per_s,
        "at_rate": at_rate,
        "usd_per_million_tokens": None if candidate is None else candidate.usd_per_million_tokens,
        "accelerators": sum(map(sum, layouts.values())),
    }


def print_comparison(seen: SeenGateway, comparison: Comparison) -> None:
    """The table, and a line about every instance that was left out."""
    plan, present = comparison.plan, comparison.present
    now, best = comparison.now, comparison.best
    rate = "" if seen.rate_per_s is None else f", {seen.rate_per_s:.3g} requests/s"
    fitted = [p.instance.id for p in present.placed if p.instance.observed]
    more = f" and {len(fitted) - _NAMES} more" if len(fitted) > _NAMES else ""
    print(
        f"{printable(seen.url)}: instances on machines of the file: {len(present.placed)}; "
        f"requests: {len(seen.rows)} in {seen.span_s:.0f} s{rate}"
    )
    names = printable(", ".join(fitted[:_NAMES]) or "none")
    print(f"Times are by their own traffic of: {names}{more}.")
    print(f"Latencies are for {plan.rate_per_s:.3g} requests/s.")
    print()
    print_table(("", "now", "proposed", "worth"), _rows(now, best))
    print()
    if now is not None and now.at_rate is None and best.at_rate is not None:
        print(f"What runs does not hold {plan.rate_per_s:.3g} requests/s; the proposal does.")
    for machine, was, becomes in comparison.changes:
        before = describe(was) if was else "unused"
        after = describe(becomes) if becomes else "unused"
        print(f"{printable(machine)}: {before} → {after}")
    if not comparison.changes:
        print("No change: what runs is the best that was found.")
    elif not comparison.worth_it:
        print(f"Not worth a change: within the {NOISE:.0%} that the simulator can be off by.")
    for name, reason in present.left_out:
        print(f"- {printable(name)} is left out: {printable(reason)}")


def _rows(now: PlanCandidate | None, best: PlanCandidate) -> list[list[str]]:
    """Each figure now, in the proposal, and the gain."""

    def of(part: str, name: str, digits: int, label: str, factor: float = 1.0) -> list[str]:
        values = []
        for candidate in (now, best):
            figures = None if candidate is None else getattr(candidate, part)
            values.append(None if figures is None else getattr(figures, name) * factor)
        return _row(label, values[0], values[1], digits)

    rows = [
        of("simulated", "tokens_per_s", 0, "tokens/s, all at once"),
        of("simulated", "output_tokens_per_s", 0, "of them output"),
        of("at_rate", "latency_mean_s", 3, "latency at the rate, s"),
        of("at_rate", "latency_p99_s", 3, "latency p99, s"),
        of("at_rate", "ttft_p99_s", 3, "TTFT p99, s"),
        of("at_rate", "tpot_p99_s", 3, "TPOT p99, ms", 1000.0),
    ]
    if best.goodput_per_s is not None:
        goodput_per_s = now.goodput_per_s if now else None
        rows.append(_row("goodput, requests/s", goodput_per_s, best.goodput_per_s, 2))
    cost = None if now is None else now.usd_per_million_tokens
    if cost is not None or best.usd_per_million_tokens is not None:
        rows.append(_row("$ per million tokens", cost, best.usd_per_million_tokens, 3))
    accelerators = None if now is None else now.accelerators
    rows.append(_row("accelerators", accelerators, best.accelerators, 0))
    return rows


def _row(name: str, now: float | None, best: float | None, digits: int) -> list[str]:
    def text(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"

    worth = "-"
    if now and best is not None and math.isfinite(now) and math.isfinite(best):
        worth = f"{best / now - 1:+.1%}"
    return [name, text(now), text(best), worth]
