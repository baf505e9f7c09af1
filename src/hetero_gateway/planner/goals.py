"""The goals of a plan, and its costs; docs/guide/plan.md has the goals.

A rate is held if the system, with everything sent at once, does at least ``HEADROOM`` more than the
rate asks for, and keeps the limits at that rate: those of each request (``slo``: TTFT and TPOT,
both, for at least ``share`` of the requests) and of the 99th percentiles.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.planner.layouts import Group
from hetero_gateway.planner.plan import Layout, Machine, PlanCandidate, SystemFigures
from hetero_gateway.sim.held import held_loads

GoalName = Literal["throughput", "goodput", "cost", "fewest"]


# Default share of the requests that must be within ``slo``.
DEFAULT_SHARE = 0.95
# A queue at full load grows without end; this much below it, it does not within a run. No rate
# counts above the engines' saturated throughput less this: a short run at such a rate is over
# before its queue has grown.
HEADROOM = 0.05

# Rates are tried in hundredths of the engines' maximum.
STEP = 0.01


@dataclass(frozen=True, slots=True)
class Goals:
    """The request.

    Args:
        rate_per_s: requests per second to hold; None: none.
        ttft_p99_s, tpot_p99_s: limits of the 99th percentile at that rate; None: none.
        slo: limits of each request; None: none.
        share: of the requests that must be within both limits of ``slo``, above 0, at most 1.
    """

    name: GoalName = "throughput"
    rate_per_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    slo: Slo | None = None
    share: float = DEFAULT_SHARE

    @property
    def has_limits(self) -> bool:
        return self.limits != ""

    @property
    def at_goodput(self) -> bool:
        """Whether each candidate is judged at a rate of its own: the highest that it holds."""
        return self.name == "goodput" or (
            self.name == "cost" and self.rate_per_s is None and self.has_limits
        )

    @property
    def limits(self) -> str:
        """``95 % within TTFT 2 s, TPOT 50 ms and TPOT p99 ≤ 60 ms``; empty without any."""
        parts = []
        if self.slo is not None and (each := slo_text(self.slo)):
            parts.append(f"{self.share * 100:g} % within {each}")
        if self.ttft_p99_s is not None:
            parts.append(f"TTFT p99 ≤ {self.ttft_p99_s:g} s")
        if self.tpot_p99_s is not None:
            parts.append(f"TPOT p99 ≤ {self.tpot_p99_s * 1000:g} ms")
        return " and ".join(parts)

    def missed(self, figures: SystemFigures) -> str:
        """Which limit these figures miss, and by how much; empty if they keep all."""
        if self.slo is not None and not figures.slo_share >= self.share:
            return (
                f"{figures.slo_share:.1%} of the requests within {slo_text(self.slo)}, "
                f"under {self.share * 100:g} %"
            )
        if self.ttft_p99_s is not None and not figures.ttft_p99_s <= self.ttft_p99_s:
            return f"TTFT p99 {figures.ttft_p99_s:.3g} s, over {self.ttft_p99_s:g} s"
        if self.tpot_p99_s is not None and not figures.tpot_p99_s <= self.tpot_p99_s:
            return f"TPOT p99 {figures.tpot_p99_s * 1000:.3g} ms, over {self.tpot_p99_s * 1000:g}"
        return ""

    def rank(self, candidate: PlanCandidate) -> tuple[float, ...]:
        """Sorts the better candidate first; those not simulated come last."""
        known = candidate.simulated is not None
        if self.name == "goodput" and known:
            key = (-(candidate.goodput_per_s or 0.0), float(candidate.accelerators))
        elif self.name == "cost" and candidate.alone_tokens_per_s:
            key = (candidate.usd_per_million_tokens or 0.0, -candidate.tokens_per_s)
        elif known and self.name == "fewest":
            key = (float(candidate.accelerators), -candidate.tokens_per_s)
        elif known:
            key = (-candidate.tokens_per_s, float(candidate.accelerators))
        else:
            key = (-candidate.alone_tokens_per_s, -candidate.estimate_tokens_per_s)
        return (float(not known), float(candidate.holds is False), *key)


def lacking(goals: Goals, machines: Iterable[Machine]) -> tuple[str, str] | None:
    """What else the goal needs: a key of the plan's file, and why; None: nothing."""
    unpriced = sorted({m.accelerator for m in machines if m.price_per_hour_usd is None})
    if goals.name == "cost" and unpriced:
        return "prices", f"the goal cost needs USD per accelerator-hour of {', '.join(unpriced)}"
    if goals.name == "goodput" and not goals.has_limits:
        limits = "ttft_s (--slo-ttft), tpot_s (--slo-tpot), or both"
        return "slo", f"the goal goodput needs limits: {limits}"
    if goals.rate_per_s is None and not goals.at_goodput:
        if goals.name == "fewest" or goals.has_limits:
            within = f" within {goals.limits}" if goals.has_limits else ""
            return "workload.rate_per_s", (
                f"the goal {goals.name}{within} needs a rate to hold (--rate); the highest rate "
                "that keeps limits is the goal goodput"
            )
    return None


def slo_text(slo: Slo) -> str:
    """``TTFT 2 s, TPOT 50 ms``; empty without limits."""
    parts = [f"TTFT {slo.ttft_s:g} s"] if math.isfinite(slo.ttft_s) else []
    if math.isfinite(slo.tpot_s):
        parts.append(f"TPOT {slo.tpot_s * 1000:g} ms")
    return ", ".join(parts)


def price_per_hour_usd(group: Group, machines: int = 1) -> float:
    """Of so many whole machines; nan if the price is not known."""
    if group.price_per_hour_usd is None:
        return math.nan
    return group.price_per_hour_usd * group.count * machines


def usd_per_million_tokens(
    machines: Sequence[Machine], layouts: Mapping[str, Layout], tokens_per_s: float
) -> float | None:
    """The price of a million tokens on the machines that a layout uses; None without all prices."""
    per_hour = usd_per_hour(machines, layouts)
    if per_hour is None or tokens_per_s <= 0:
        return None
    return per_hour / (tokens_per_s * 3600) * 1e6


def usd_per_hour(machines: Sequence[Machine], layouts: Mapping[str, Layout]) -> float | None:
    """The price of the machines that a layout uses, each whole; None if one is not known."""
    per_hour = 0.0
    used = [machine for machine in machines if layouts[machine.id]]
    for machine in used:
        if machine.price_per_hour_usd is None:
            return None
        per_hour += machine.price_per_hour_usd * machine.count
    return per_hour if used else None


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate that was held, in requests/s, and the figures at it."""

    rate_per_s: float
    figures: SystemFigures


def find_goodput(
    hold: Callable[[float], SystemFigures | None],
    goals: Goals,
    most_per_s: float,
    *,
    step: float = STEP,
    likely_per_s: float | None = None,
) -> Goodput | None:
    """Goodput: the highest rate at which the goals' limits are kept; None: no tried rate.

    The same method as ``simulate --held``: Poisson arrivals, and bisection on the rate.

    Args:
        hold: the figures at a rate; None: no request finishes.
        most_per_s: the highest rate to try, above 0.
        step: of the tried rates, as a share of ``most_per_s``.
        likely_per_s: a rough expectation, which saves runs.
    """
    seen: dict[float, SystemFigures] = {}

    def keeps(load: float) -> float:
        figures = hold(load * most_per_s)
        if figures is None or goals.missed(figures):
            return 0.0
        seen[load] = figures
        return 1.0

    likely = None if likely_per_s is None else likely_per_s / most_per_s
    held_loads(keeps, (1.0,), most=1.0, step=step, likely=likely)
    if not seen:
        return None
    load = max(seen)
    return Goodput(load * most_per_s, seen[load])
