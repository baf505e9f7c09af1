"""Policies that count requests: the baselines that common gateways offer."""

from __future__ import annotations

import numpy as np

from hetero_gateway.core.policies.base import (
    COLUMNS,
    Decided,
    Figures,
    PlacesAtOnce,
    View,
    argmin_with_random_ties,
    lowest,
)


class LeastRequests(PlacesAtOnce):
    """The fewest outstanding requests."""

    name = "least-requests"

    def position(self, view: View, rng: np.random.Generator) -> int:
        return argmin_with_random_ties(view.in_flight, rng)

    def because(self, decision: Decided) -> str:
        ours = "it had {} requests in flight, the fewest"
        in_flight = decision.choice.figures.column("in_flight")
        return lowest(decision, in_flight, ours, "{} had {}", whole=True)


class CapacityWeighted(PlacesAtOnce):
    """The fewest outstanding requests per fitted capacity, this one included.

    The honest baseline: it knows the constants, but not the request.
    """

    name = "capacity-weighted"

    def position(self, view: View, rng: np.random.Generator) -> int:
        return argmin_with_random_ties((view.in_flight + 1) / view.capacity, rng)

    def figures(self, view: View) -> Figures:
        data = (view.request_time_s, view.kv_usage, view.load, view.in_flight, view.capacity)
        return Figures((*COLUMNS, "capacity"), data)

    def because(self, decision: Decided) -> str:
        figures = decision.choice.figures
        ours = "its requests in flight over its capacity would be {} s, the lowest"
        scores = (figures.column("in_flight") + 1) / figures.column("capacity")
        return lowest(decision, scores, ours, "{} would be at {} s")


class PowerOfTwo(PlacesAtOnce):
    """The better of two random candidates, by outstanding requests per fitted capacity."""

    name = "power-of-two"

    def position(self, view: View, rng: np.random.Generator) -> int:
        size = view.in_flight.size
        first = int(rng.random() * size)
        if size == 1:
            return first
        second = (first + 1 + int(rng.random() * (size - 1))) % size
        scores = (view.in_flight[[first, second]] + 1) / view.capacity[[first, second]]
        return first if scores[0] <= scores[1] else second

    def because(self, decision: Decided) -> str:
        return "of two drawn at random it had the fewer requests in flight for its capacity"
