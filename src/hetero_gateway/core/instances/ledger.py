"""Outstanding work per instance: a state machine that settles each dispatch exactly once.

Rules:

1. There are two events. ``dispatch`` makes a request outstanding on one instance; ``settle`` takes
   it off. A dispatch is outstanding until its first ``settle`` and settled ever after.
2. ``settle`` takes off what ``dispatch`` put on, which the dispatch remembers; nothing is computed
   anew. The first call returns True, every later one False and changes nothing.
3. At any time an instance's load, KV tokens and count are the sums over its outstanding
   dispatches, and exactly 0 when there are none. Loads are kept as whole numbers of 2^-40 s, so
   adding and taking off leaves no residue (erratum 3: as floats of size e^(θu), the residue of a
   burst can outweigh real loads for the rest of the run).
4. Removing an instance settles everything that is outstanding on it.

The shell settles in a ``finally``: on success, error, time-out, client disconnect.
Per-instance state is in arrays indexed by slot, so that a policy reads them without a loop.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.types import InstanceId, Outcome, Request

# 2^-40 s is 0.9 ps: far below any workload that matters, and a power of two keeps floats exact.
_UNITS_PER_S = 2.0**40


class Dispatch:
    """One request outstanding on one instance. Made and changed by the ledger alone."""

    __slots__ = ("instance_id", "kv_tokens", "outcome", "request", "slot", "workload")

    def __init__(
        self, request: Request, instance_id: InstanceId, slot: int, workload: float
    ) -> None:
        self.request = request
        self.instance_id = instance_id
        self.slot = slot
        self.workload = workload
        self.kv_tokens = request.kv_tokens
        self.outcome: Outcome | None = None


class Ledger:
    """Loads by slot: ``load`` (s), ``kv_tokens`` (tokens), ``in_flight`` (requests).

    The three arrays are read-only to everyone else, and are replaced when slots are added: take
    them from the ledger each time.
    """

    def __init__(self) -> None:
        self.load: NDArray[np.float64] = np.zeros(8)
        self.kv_tokens: NDArray[np.float64] = np.zeros(8)
        self.in_flight: NDArray[np.float64] = np.zeros(8)
        self._load_units: list[int] = []
        self._kv_tokens: list[int] = []
        self._outstanding: list[set[Dispatch]] = []
        self._free_slots: list[int] = []

    def add_slot(self) -> int:
        """A slot with nothing on it."""
        if self._free_slots:
            return self._free_slots.pop()
        slot = len(self._outstanding)
        self._load_units.append(0)
        self._kv_tokens.append(0)
        self._outstanding.append(set())
        if slot >= self.load.size:
            self.load = np.concatenate((self.load, np.zeros_like(self.load)))
            self.kv_tokens = np.concatenate((self.kv_tokens, np.zeros_like(self.kv_tokens)))
            self.in_flight = np.concatenate((self.in_flight, np.zeros_like(self.in_flight)))
        return slot

    def remove_slot(self, slot: int) -> list[Dispatch]:
        """Settle everything on the slot and free it; returns what was outstanding."""
        orphans = list(self._outstanding[slot])
        for dispatch in orphans:
            self.settle(dispatch, Outcome.INSTANCE_REMOVED)
        self._free_slots.append(slot)
        return orphans

    def dispatch(
        self, request: Request, instance_id: InstanceId, slot: int, workload: float
    ) -> Dispatch:
        """Put a request with a workload of 0 s or more on a slot."""
        entry = Dispatch(request, instance_id, slot, workload)
        self._outstanding[slot].add(entry)
        self._change(entry, 1)
        return entry

    def settle(self, dispatch: Dispatch, outcome: Outcome) -> bool:
        """Take a dispatch off. True the first time, False (and no change) ever after."""
        if dispatch.outcome is not None:
            return False
        dispatch.outcome = outcome
        self._outstanding[dispatch.slot].remove(dispatch)
        self._change(dispatch, -1)
        return True

    def outstanding(self, slot: int) -> frozenset[Dispatch]:
        """What is on a slot now."""
        return frozenset(self._outstanding[slot])

    def _change(self, dispatch: Dispatch, sign: int) -> None:
        slot = dispatch.slot
        units = self._load_units[slot] + sign * round(dispatch.workload * _UNITS_PER_S)
        tokens = self._kv_tokens[slot] + sign * dispatch.kv_tokens
        self._load_units[slot] = units
        self._kv_tokens[slot] = tokens
        self.load[slot] = units / _UNITS_PER_S
        self.kv_tokens[slot] = tokens
        self.in_flight[slot] = len(self._outstanding[slot])
