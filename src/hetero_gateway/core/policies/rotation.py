"""Policies that look at neither load nor request: the paper's RR, WRR and SI (section 5.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.policies.base import Candidates, PolicyOptions, WorkloadCharge
from hetero_gateway.core.types import Request


class RoundRobin(WorkloadCharge):
    """Turns of equal weight, or, randomised, a draw with equal probability as the paper says."""

    def __init__(self, options: PolicyOptions) -> None:
        self._randomised = options.randomised
        # By slot: how much each instance is owed, in turns.
        self._owed: FloatArray = np.zeros(0)
        # Of the candidates that came last; mostly a whole pool, whose arrays never change.
        self._slots: NDArray[np.intp] | None = None
        self._weights: FloatArray = np.zeros(0)
        self._total = 0.0

    def weights(self, candidates: Candidates) -> FloatArray:
        """Relative shares, all above 0."""
        return np.ones(candidates.slots.size)

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        if self._randomised:
            cumulative = self.weights(candidates).cumsum()
            return int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
        if candidates.slots is not self._slots:
            self._meet(candidates)
        return self._take_turn(candidates.slots)

    def _meet(self, candidates: Candidates) -> None:
        self._slots, self._weights = candidates.slots, self.weights(candidates)
        self._total = float(self._weights.sum())
        size = int(candidates.slots.max()) + 1
        if size > self._owed.size:
            self._owed = np.concatenate((self._owed, np.zeros(size - self._owed.size)))

    def _take_turn(self, slots: NDArray[np.intp]) -> int:
        # Smooth weighted round-robin: everyone is owed its weight, the most owed one pays all back.
        # Weights 5, 1, 1 give a a b a c a a instead of a a a a a b c.
        total = self._total
        # Never more than a round, which a round itself does not exceed: what was run up under
        # other weights, or by the instance that had the slot before, would starve the others.
        owed = np.minimum(np.maximum(self._owed[slots], -total), total) + self._weights
        position = int(owed.argmax())
        owed[position] -= total
        self._owed[slots] = owed
        return position


class WeightedRoundRobin(RoundRobin):
    """Turns by the configured weights."""

    def weights(self, candidates: Candidates) -> FloatArray:
        return candidates.weight


class SingleInstance(WorkloadCharge):
    """Everything to one instance; to the first candidate while that one cannot take it."""

    def __init__(self, options: PolicyOptions) -> None:
        self._instance_id = options.single_instance

    def choose(self, request: Request, candidates: Candidates, rng: np.random.Generator) -> int:
        if self._instance_id is not None and self._instance_id in candidates.ids:
            return candidates.ids.index(self._instance_id)
        return 0
