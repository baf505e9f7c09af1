"""Policies that weigh a request by what it would cost: min-max and its relatives (section 4.1)."""

from __future__ import annotations

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray, workload, workloads
from hetero_gateway.core.policies.base import (
    Decided,
    DefaultPredictor,
    PlacesAtOnce,
    View,
    argmin_with_random_ties,
    lowest,
)


class _LowestLoad(PlacesAtOnce):
    """What is added to a load differs, the rule does not: the lowest load with the request wins."""

    def because(self, decision: Decided) -> str:
        ours, theirs = "its load would be {}, the lowest", "{} would be at {}"
        return lowest(decision, decision.loads_after, ours, theirs)


class MinMax(_LowestLoad):
    """Algorithm 2 with every decision of docs/design/scheduling.md.

    It minimises the highest load that results. Ties, which are the rule with three or more
    instances, go to the lowest load of the chosen instance itself: if any placement leaves the
    maximum where it is, the one with the lowest L_s + w_s does, and if none does, the new maximum
    is that sum. So the argmin of L_s + w_s is the min-max choice with that tie-break, and no
    maximum over the others is needed (erratum 18).
    """

    name = "min-max"

    def position(self, view: View, rng: np.random.Generator) -> int:
        return argmin_with_random_ties(view.load + view.workload(), rng)


class Paper(PlacesAtOnce):
    """Algorithm 2 as the paper's evaluation ran it: ties go to the lowest index.

    Mended are errata 1 (the start value), 3, 4, 6 and 7; the tie-break is as printed.
    """

    name = "paper"
    default_predictor: DefaultPredictor = "normal"

    def position(self, view: View, rng: np.random.Generator) -> int:
        # The highest load stands for that of the others: on its own instance load + w is above it.
        load = view.load
        return int(np.maximum(load.max(), load + view.workload()).argmin())

    def because(self, decision: Decided) -> str:
        ours = "the highest load of all would then be {}, the lowest possible"
        tie = "of equals the first in the list gets it"
        load = decision.choice.figures.column("load_s")
        scores = _highest_load(load, decision.loads_after)
        return lowest(decision, scores, ours, "{} would make it {}", tie=tie)


class MemoryBased(_LowestLoad):
    """The paper's MB: Algorithm 2 with T_r^s = 1, so that only the KV usage counts."""

    name = "memory-based"

    def charges(self, request_time_s: FloatArray, kv_usage: FloatArray, theta: float) -> FloatArray:
        return workloads(np.ones(kv_usage.size), kv_usage, theta)

    def charge(self, view: View, position: int) -> float:
        return workload(1.0, float(view.kv_usage[position]), view.theta)

    def position(self, view: View, rng: np.random.Generator) -> int:
        charges = self.charges(view.request_time_s, view.kv_usage, view.theta)
        return argmin_with_random_ties(view.load + charges, rng)


class LeastWork(_LowestLoad):
    """The lowest load + T_r^s, with T_r^s as the charge: no KV term."""

    name = "least-work"

    def charges(self, request_time_s: FloatArray, kv_usage: FloatArray, theta: float) -> FloatArray:
        return request_time_s

    def charge(self, view: View, position: int) -> float:
        return float(view.request_time_s[position])

    def position(self, view: View, rng: np.random.Generator) -> int:
        return argmin_with_random_ties(view.load + view.request_time_s, rng)


def _highest_load(load: FloatArray, after: FloatArray) -> FloatArray:
    """For each candidate, the highest load of all if it were chosen: what Algorithm 2 compares."""
    highest = int(load.argmax())
    others = np.full(load.size, load[highest])
    others[highest] = np.partition(load, -2)[-2]
    result: FloatArray = np.maximum(others, after)
    return result
