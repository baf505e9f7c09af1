"""Policies that count requests: the baselines that common gateways offer."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_gateway.core.policies.at_once import (
    Candidates,
    PlacesAtOnce,
    lowest,
    lowest_with_random_ties,
)
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.types import Draws


class LeastRequests(PlacesAtOnce):
    """The fewest outstanding requests."""

    name = "least-requests"
    samples = True

    def position(self, candidates: Candidates, rng: Draws) -> int:
        return lowest_with_random_ties(candidates.in_flight, rng)

    def because(self, decision: Decision) -> str:
        ours = "it had {} requests in flight, the fewest"
        in_flight = decision.choice.figures.column("in_flight")
        return lowest(decision, in_flight, ours, "{} had {}", whole=True)


class CapacityWeighted(PlacesAtOnce):
    """The fewest outstanding requests per fitted capacity, including this one.

    The fair baseline: it knows the constants, but not the request.
    """

    name = "capacity-weighted"
    samples = True

    def position(self, candidates: Candidates, rng: Draws) -> int:
        scores = per_capacity(candidates.in_flight, candidates.capacity)
        return lowest_with_random_ties(scores, rng)

    def told(self, candidates: Candidates) -> dict[str, Sequence[float]]:
        return {"capacity": candidates.capacity}

    def because(self, decision: Decision) -> str:
        figures = decision.choice.figures
        ours = "its requests in flight over its capacity would be {} s, the lowest"
        scores = per_capacity(figures.column("in_flight"), figures.column("capacity"))
        return lowest(decision, scores, ours, "{} would be at {} s")


class PowerOfTwo(PlacesAtOnce):
    """The better of two random candidates, by outstanding requests per fitted capacity."""

    name = "power-of-two"
    samples = True

    def position(self, candidates: Candidates, rng: Draws) -> int:
        size = len(candidates.ids)
        first = int(rng.random() * size)
        if size == 1:
            return first
        second = (first + 1 + int(rng.random() * (size - 1))) % size
        scores = per_capacity(candidates.in_flight, candidates.capacity)
        return first if scores[first] <= scores[second] else second

    def because(self, decision: Decision) -> str:
        return "of two drawn at random it had the fewer requests in flight for its capacity"


def per_capacity(in_flight: Sequence[float], capacity: Sequence[float]) -> list[float]:
    """By candidate: requests in flight plus one, over fitted requests per second, s."""
    return [(there + 1) / per_s for there, per_s in zip(in_flight, capacity, strict=True)]
