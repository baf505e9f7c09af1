"""What runs beside what would be best, and whether a change is worth it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hetero_gateway.planner.plan import Layout, Plan, PlanCandidate
from hetero_gateway.planner.present import NOISE, Present, aligned, simulate_present
from hetero_gateway.planner.question import Question


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a gateway has seen, in figures; ``rate_per_s`` None: too few requests to tell."""

    url: str
    policy: str
    requests: int
    span_s: float
    rate_per_s: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best candidate of a plan against what runs.

    Args:
        now: what runs, simulated; None: nothing of the mix fits it.
    """

    plan: Plan
    present: Present
    now: PlanCandidate | None

    @property
    def best(self) -> PlanCandidate:
        return self.plan.best

    @property
    def changes(self) -> list[tuple[str, Layout, Layout]]:
        """(machine, layout now, layout proposed) of every machine that would change."""
        now, proposed = self.present.layouts, self.best.layouts
        return [(m, now[m], layout) for m, layout in proposed.items() if layout != now[m]]

    @property
    def gain(self) -> float | None:
        """Of throughput, relative; None where one side has none."""
        if self.now is None or self.now.simulated is None or self.best.simulated is None:
            return None
        return self.best.simulated.tokens_per_s / self.now.simulated.tokens_per_s - 1

    @property
    def worth_it(self) -> bool:
        """Whether the proposal is better at the goal by more than the simulator's noise."""
        best, now = self.best, self.now
        if not self.changes:
            return False
        if now is None:
            return True
        if self.plan.goal == "goodput" and best.goodput_per_s is not None:
            return best.goodput_per_s > (now.goodput_per_s or 0.0) * (1 + NOISE)
        if self.plan.goal == "cost" and best.usd_per_million_tokens and now.usd_per_million_tokens:
            return best.usd_per_million_tokens < now.usd_per_million_tokens * (1 - NOISE)
        if self.plan.goal == "fewest":
            holds_more = best.holds is True and now.at_rate is None
            return best.accelerators < now.accelerators or holds_more
        return (self.gain or 0.0) > NOISE


def compare(plan: Plan, question: Question, present: Present, policy: str) -> Comparison:
    """The plan, its best candidate changing as few machines as it can, against what runs.

    What runs is simulated under the gateway's own policy, at the rate that the plan tells
    latencies for.
    """
    best = aligned(plan.best, plan.machines, present.layouts)
    goals = dataclasses.replace(question.goals, rate_per_s=plan.rate_per_s or None)
    asked = dataclasses.replace(question, policy=policy, goals=goals)
    now = simulate_present(asked, present.layouts)
    if now is not None and _is_as_good(now, best, plan):
        return Comparison(_led_by(now, plan), present, now)
    plan = dataclasses.replace(
        plan,
        candidates=(best, *plan.candidates[1:]),
        pareto=tuple(best if c == plan.best else c for c in plan.pareto),
    )
    return Comparison(plan, present, now)


def _is_as_good(now: PlanCandidate, best: PlanCandidate, plan: Plan) -> bool:
    """Whether the simulation has what runs at least where it has the best that was found.

    The search does not try everything; what it found is no reason to lose something by a change.
    """
    if plan.goal != "throughput" or now.simulated is None or best.simulated is None:
        return False
    if best.at_rate is not None and now.at_rate is None:
        return False
    return now.simulated.tokens_per_s >= best.simulated.tokens_per_s


def _led_by(now: PlanCandidate, plan: Plan) -> Plan:
    """With what runs as the best, and not a second time among the others."""
    others = [c for c in plan.candidates if c.layouts != now.layouts]
    led = [dataclasses.replace(c, why_not=c.why_not or "no more than what runs") for c in others]
    known = dict(zip(map(id, others), led, strict=True))
    pareto = tuple(known[id(c)] for c in plan.pareto if id(c) in known)
    note = "what runs does at least as much as the best that the search found"
    return dataclasses.replace(
        plan, candidates=(now, *led), pareto=pareto, notes=(*plan.notes, note)
    )
