"""Policies that count requests: the baselines that common gateways offer."""

from __future__ import annotations

import numpy as np

from hetero_gateway.core.policies.base import (
    Candidates,
    WorkloadCharge,
    argmin_with_random_ties,
)
from hetero_gateway.core.types import Request


class LeastRequests(WorkloadCharge):
    """The fewest outstanding requests."""

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        return argmin_with_random_ties(candidates.in_flight, rng)


class CapacityWeighted(WorkloadCharge):
    """The fewest outstanding requests per fitted capacity, this one included.

    The honest baseline: it knows the constants, but not the request.
    """

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        return argmin_with_random_ties((candidates.in_flight + 1) / candidates.capacity, rng)


class PowerOfTwo(WorkloadCharge):
    """The better of two random candidates, by outstanding requests per fitted capacity."""

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        size = candidates.in_flight.size
        first = int(rng.random() * size)
        if size == 1:
            return first
        second = (first + 1 + int(rng.random() * (size - 1))) % size
        scores = (candidates.in_flight[[first, second]] + 1) / candidates.capacity[[first, second]]
        return first if scores[0] <= scores[1] else second
