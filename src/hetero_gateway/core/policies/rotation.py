"""Policies that look at neither load nor request: the paper's RR, WRR and SI (section 5.2)."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from hetero_gateway.core.policies.at_once import Candidates, PlacesAtOnce
from hetero_gateway.core.policies.base import Decision, PolicyOptions
from hetero_gateway.core.types import Draws


class RoundRobin(PlacesAtOnce):
    """Turns of equal weight, or, randomised, a draw with equal probability as in the paper."""

    name = "round-robin"

    def __init__(self, options: PolicyOptions) -> None:
        self.randomised = options.randomised
        # By slot of ``Table``: how many turns each instance is owed.
        self.owed: dict[int, float] = {}

    def weights(self, candidates: Candidates) -> list[float]:
        """Relative shares, all above 0."""
        return [1.0] * len(candidates.ids)

    def position(self, candidates: Candidates, rng: Draws) -> int:
        weights = self.weights(candidates)
        shares = list(accumulate(weights))
        if self.randomised:
            return min(bisect_right(shares, rng.random() * shares[-1]), len(shares) - 1)
        # Smooth weighted round-robin: each is owed its weight, and the most owed one pays all back.
        # Weights 5, 1, 1 give a a b a c a a instead of a a a a a b c.
        total, owed, slots = shares[-1], self.owed, [s.slot for s in candidates.view.states]
        for slot, weight in zip(slots, weights, strict=True):
            # Never more than a round, which a round itself does not exceed: debts from other
            # weights, or of the instance that had the slot before, would starve the others.
            owed[slot] = min(max(owed.get(slot, 0.0), -total), total) + weight
        position = max(range(len(slots)), key=lambda i: owed[slots[i]])
        owed[slots[position]] -= total
        return position

    def turn(self) -> Any:
        return self.owed.copy()

    def take_back(self, turn: Any) -> None:
        self.owed = turn

    def because(self, decision: Decision) -> str:
        return f"{self.name} does not look at the load"


class WeightedRoundRobin(RoundRobin):
    """Turns by the configured weights."""

    name = "weighted-round-robin"

    def weights(self, candidates: Candidates) -> list[float]:
        return candidates.weight


class SingleInstance(PlacesAtOnce):
    """Everything to one instance; to the first candidate while that one is unavailable."""

    name = "single-instance"

    def __init__(self, options: PolicyOptions) -> None:
        self.instance_id = options.single_instance

    def position(self, candidates: Candidates, rng: Draws) -> int:
        ids = candidates.ids
        return ids.index(self.instance_id) if self.instance_id in ids else 0

    def because(self, decision: Decision) -> str:
        return "single-instance sends everything to one instance"
