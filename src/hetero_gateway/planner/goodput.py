"""Goodput: the highest rate of requests that is held within the limits.

As ``simulate --held`` finds it: Poisson arrivals, the share of the requests whose TTFT and TPOT are
both within their limits, and bisection on the rate. What never finished is not within them. No rate
counts that is above what the engines do with always enough to do, less ``HEADROOM``: a short run
at such a rate is over before its queue has grown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero_gateway.planner import trials
from hetero_gateway.planner.goals import HEADROOM, Goals
from hetero_gateway.planner.plan import Figures
from hetero_gateway.planner.question import Question
from hetero_gateway.sim.alone import Mix
from hetero_gateway.sim.held import held_loads

# Rates are tried in hundredths of the most that engines can do.
STEP = 0.01


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate that was held, in requests/s, and what was seen at it."""

    rate_per_s: float
    figures: Figures


def find_goodput(
    hold: Callable[[float], Figures | None],
    goals: Goals,
    most_per_s: float,
    *,
    step: float = STEP,
    likely_per_s: float | None = None,
) -> Goodput | None:
    """The highest rate at which the goals' limits are kept; None: none that was tried.

    Args:
        hold: what is seen at a rate; None: no request finishes.
        most_per_s: the highest rate to try, above 0.
        step: of the rates that are tried, as a share of ``most_per_s``.
        likely_per_s: about what is expected, which saves runs.
    """
    seen: dict[float, Figures] = {}

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


def system_goodput(
    question: Question,
    system: trials.System,
    mix: Mix,
    full: Figures,
    *,
    likely_per_s: float | None = None,
) -> Goodput | None:
    """What a whole system holds; ``full``: what it does with everything at once."""
    most_per_s = full.tokens_per_s / (1 + HEADROOM) / mix.mean_tokens
    if not most_per_s:
        return None
    return find_goodput(
        lambda rate_per_s: question.hold(system, mix, rate_per_s),
        question.goals,
        most_per_s,
        likely_per_s=likely_per_s,
    )
