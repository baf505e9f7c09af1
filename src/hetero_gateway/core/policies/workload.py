"""Policies that weigh a request by its cost: min-max and its relatives (section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.policies.at_once import (
    Candidates,
    PlacesAtOnce,
    lowest,
    lowest_with_random_ties,
)
from hetero_gateway.core.policies.base import Decision, DefaultPredictor
from hetero_gateway.core.types import Draws


class MinMax(PlacesAtOnce):
    """Algorithm 2 with every decision of docs/design/scheduling.md.

    It minimises the highest resulting load. Ties, which are the rule with three or more instances,
    go to the lowest load of the chosen instance itself: if any placement leaves the maximum where
    it is, the one with the lowest L_s + w_s does, and if none does, the new maximum is that sum. So
    the argmin of L_s + w_s is the min-max choice with that tie-break, and no maximum over the
    others is needed (erratum 18).
    """

    name = "min-max"
    samples = True

    def position(self, candidates: Candidates, rng: Draws) -> int:
        return lowest_with_random_ties(self._loads_after(candidates), rng)

    def _loads_after(self, candidates: Candidates) -> list[float]:
        c, theta = candidates, candidates.view.theta
        return [
            load + self.charge(time_s, usage, theta)
            for load, time_s, usage in zip(c.load, c.request_time_s, c.kv_usage, strict=True)
        ]

    def because(self, decision: Decision) -> str:
        ours, theirs = "its load would be {}, the lowest", "{} would be at {}"
        return lowest(decision, decision.loads_after, ours, theirs)


class MemoryBased(MinMax):
    """The paper's MB: Algorithm 2 with T_r^s = 1, so that only the KV usage counts."""

    name = "memory-based"

    def charge(self, request_time_s: float, kv_usage: float, theta: float) -> float:
        return workload(1.0, kv_usage, theta)


class LeastWork(MinMax):
    """The lowest load + T_r^s, with T_r^s as the charge: no KV term."""

    name = "least-work"

    def charge(self, request_time_s: float, kv_usage: float, theta: float) -> float:
        return request_time_s


class Paper(MinMax):
    """Algorithm 2 as the paper's evaluation ran it: ties go to the lowest index.

    Errata 1 (the start value), 3, 4, 6 and 7 are corrected; the tie-break is as printed.
    """

    name = "paper"
    samples = False
    default_predictor: DefaultPredictor = "normal"

    def position(self, candidates: Candidates, rng: Draws) -> int:
        scores = _highest_loads(candidates.load, self._loads_after(candidates))
        return scores.index(min(scores))

    def because(self, decision: Decision) -> str:
        ours = "the highest load of all would then be {}, the lowest possible"
        tie = "of equals the first in the list gets it"
        load = decision.choice.figures.column("load_s")
        scores = _highest_loads(load, decision.loads_after)
        return lowest(decision, scores, ours, "{} would make it {}", tie=tie)


def _highest_loads(load: Sequence[float], after: Sequence[float]) -> list[float]:
    """For each candidate, the highest of all loads if it were chosen: what Algorithm 2 compares.

    The highest load stands for that of the others: on its own instance, load + w exceeds it.
    """
    highest = max(load)
    return [max(highest, one) for one in after]
