"""Policies that weigh a request by what it would cost: min-max and its relatives (section 4.1)."""

from __future__ import annotations

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray, workload, workloads
from hetero_gateway.core.policies.base import (
    Candidates,
    PlacesAtOnce,
    WorkloadCharge,
    argmin_with_random_ties,
)
from hetero_gateway.core.types import Request


class MinMax(WorkloadCharge):
    """Algorithm 2 with every decision of docs/scheduling.md.

    It minimises the highest load that results. Ties, which are the rule with three or more
    instances, go to the lowest load of the chosen instance itself: if any placement leaves the
    maximum where it is, the one with the lowest L_s + w_s does, and if none does, the new maximum
    is that sum. So the argmin of L_s + w_s is the min-max choice with that tie-break, and no
    maximum over the others is needed (erratum 18).
    """

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        return argmin_with_random_ties(candidates.load + candidates.workload(), rng)


class Paper(WorkloadCharge):
    """Algorithm 2 as the paper's evaluation ran it: ties go to the lowest index.

    Mended are errata 1 (the start value), 3, 4, 6 and 7; the tie-break is as printed.
    """

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        # The highest load stands for that of the others: on its own instance load + w is above it.
        load = candidates.load
        return int(np.maximum(load.max(), load + candidates.workload()).argmin())


class MemoryBased(PlacesAtOnce):
    """The paper's MB: Algorithm 2 with T_r^s = 1, so that only the KV usage counts."""

    def charges(self, candidates: Candidates) -> FloatArray:
        return workloads(np.ones(candidates.load.size), candidates.kv_usage, candidates.theta)

    def charge(self, candidates: Candidates, position: int) -> float:
        return workload(1.0, float(candidates.kv_usage[position]), candidates.theta)

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        return argmin_with_random_ties(candidates.load + self.charges(candidates), rng)


class LeastWork(PlacesAtOnce):
    """The lowest load + T_r^s, with T_r^s as the charge: no KV term."""

    def charges(self, candidates: Candidates) -> FloatArray:
        return candidates.request_time_s

    def charge(self, candidates: Candidates, position: int) -> float:
        return float(candidates.request_time_s[position])

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        return argmin_with_random_ties(candidates.load + candidates.request_time_s, rng)
