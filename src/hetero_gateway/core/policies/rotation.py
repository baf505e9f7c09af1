"""Policies that look at neither load nor request: the paper's RR, WRR and SI (section 5.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.policies.base import Decided, PlacesAtOnce, PolicyOptions, View


class RoundRobin(PlacesAtOnce):
    """Turns of equal weight, or, randomised, a draw with equal probability as the paper says."""

    name = "round-robin"

    def __init__(self, options: PolicyOptions) -> None:
        self.randomised = options.randomised
        # By slot: how much each instance is owed, in turns.
        self.owed: FloatArray = np.zeros(0)
        # Of the candidates that came last; mostly a whole pool, whose arrays never change.
        self._slots: NDArray[np.intp] | None = None
        self._weights: FloatArray = np.zeros(0)
        self._total = 0.0

    def weights(self, view: View) -> FloatArray:
        """Relative shares, all above 0."""
        return np.ones(view.slots.size)

    def position(self, view: View, rng: np.random.Generator) -> int:
        if self.randomised:
            cumulative = self.weights(view).cumsum()
            return int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
        if view.slots is not self._slots:
            self._meet(view)
        return self._take_turn(view.slots)

    def _meet(self, view: View) -> None:
        self._slots, self._weights = view.slots, self.weights(view)
        self._total = float(self._weights.cumsum()[-1])
        size = int(view.slots.max()) + 1
        if size > self.owed.size:
            self.owed = np.concatenate((self.owed, np.zeros(size - self.owed.size)))

    def _take_turn(self, slots: NDArray[np.intp]) -> int:
        # Smooth weighted round-robin: everyone is owed its weight, the most owed one pays all back.
        # Weights 5, 1, 1 give a a b a c a a instead of a a a a a b c.
        total = self._total
        # Never more than a round, which a round itself does not exceed: what was run up under
        # other weights, or by the instance that had the slot before, would starve the others.
        owed = np.minimum(np.maximum(self.owed[slots], -total), total) + self._weights
        position = int(owed.argmax())
        owed[position] -= total
        self.owed[slots] = owed
        return position

    def turn(self) -> Any:
        return self.owed.copy(), self._slots, self._weights, self._total

    def take_back(self, turn: Any) -> None:
        self.owed, self._slots, self._weights, self._total = turn

    def because(self, decision: Decided) -> str:
        return f"{self.name} does not look at the load"


class WeightedRoundRobin(RoundRobin):
    """Turns by the configured weights."""

    name = "weighted-round-robin"

    def weights(self, view: View) -> FloatArray:
        return view.weight


class SingleInstance(PlacesAtOnce):
    """Everything to one instance; to the first candidate while that one cannot take it."""

    name = "single-instance"

    def __init__(self, options: PolicyOptions) -> None:
        self.instance_id = options.single_instance

    def position(self, view: View, rng: np.random.Generator) -> int:
        if self.instance_id is not None and self.instance_id in view.ids:
            return view.ids.index(self.instance_id)
        return 0

    def because(self, decision: Decided) -> str:
        return "single-instance sends everything to one instance"
