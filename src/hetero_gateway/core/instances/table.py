"""Every instance's state, and the same figures as arrays, for pools large enough for numpy.

A state notes itself when one of its sums changes; its column is written when somebody asks for
arrays. Between two decisions a few instances change, so that costs little, and where nobody asks
(small pools) it costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.instances.dispatch import NO_PEERS, Dispatch
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.lengths.predictors import STAGE_TOKENS
from hetero_gateway.core.types import InstanceId

# Rows of ``Table.rows``, named as in ``state.py``; the fleet's load and KV tokens are among them.
(
    WAITING,
    STREAMING,
    WAITING_PROMPT,
    WAITING_PREFILL,
    WAITING_OUTPUT,
    CONTEXT,
    SPEED,
    SILENT_S,  # how long it has owed a first token without giving any; else 0
    LOAD_S,
    KV_TOKENS,
    IN_FLIGHT,
    _READ_S,
    _STEPS_PER_S,
    SEATS,  # sequences that may be there, where that was learnt; else 2^53
    SHARED,
    RECENT_PREFILL,
    PREFILL_AGE_S,  # how long ago that was so
) = range(17)
ROWS = 17

# The members of a pool: a slice where their slots are consecutive, as they mostly are.
Slots = slice | NDArray[np.intp]


class Table:
    """The ``states`` by instance id.

    Args:
        keeps: keep what is observed as rows, too.
        loads_only: nobody asks for ``rows`` or ``stages``, which spares most of writing a column.
    """

    def __init__(self, *, keeps: bool = True, loads_only: bool = False) -> None:
        self._keeps = keeps
        self._loads_only = loads_only
        self.states: dict[InstanceId, InstanceState] = {}
        self._free_slots: list[int] = []
        self._changed: list[InstanceState] = []
        self._rows: FloatArray = np.zeros((ROWS, 8))
        self._stages: FloatArray = np.zeros((len(STAGE_TOKENS), 8))

    def set_loads_only(self, loads_only: bool) -> None:
        """Whether somebody asks for ``rows`` and ``stages`` from now on."""
        self._loads_only = loads_only
        # Columns that were written in part have to be written anew.
        for state in self.states.values():
            if not state.noted:
                state.noted = True
                self._changed.append(state)

    def __getitem__(self, instance_id: InstanceId) -> InstanceState:
        return self.states[instance_id]

    def join(self, instance_id: InstanceId) -> InstanceState:
        """An instance with nothing on it."""
        slot = self._free_slots.pop() if self._free_slots else len(self.states)
        if slot >= self._rows.shape[1]:
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)), axis=1)
            self._stages = np.concatenate((self._stages, np.zeros_like(self._stages)), axis=1)
        state = InstanceState(instance_id, slot, self._changed, keeps=self._keeps)
        self.states[instance_id] = state
        return state

    def leave(self, instance_id: InstanceId, now_s: float) -> list[Dispatch]:
        """Forget an instance; everything on it is settled and returned. KeyError: unknown."""
        state = self.states.pop(instance_id)
        orphans = state.leave(now_s)
        if state.noted:
            self._changed.remove(state)
        state.noted = True  # what is still reported of it is no column's business any more
        self._free_slots.append(state.slot)
        return orphans

    # Stand-ins: what nobody has seen yet is taken for as fast as the fastest of its kind.

    def stand_in_speed(self) -> float:
        """The lowest speed factor that was observed of an instance without a profile; else 1."""
        seen = (s.speed for s in self.states.values() if s.stands_in and s.observed)
        return min(seen, default=1.0)

    def spread_stand_in_speed(self) -> None:
        """Give it to those that were not observed."""
        speed = self.stand_in_speed()
        for state in self.states.values():
            if state.stands_in and not state.observed:
                state.set_speed(speed)

    # Arrays

    def rows(self, slots: Slots, now_s: float) -> FloatArray:
        """The rows of these slots at ``now_s``, by the names above; a copy."""
        self._refresh()
        rows: FloatArray = (
            self._rows[:, slots].copy()
            if isinstance(slots, slice)
            else self._rows.take(slots, axis=1)
        )
        elapsed_s = np.maximum(now_s - rows[_READ_S], 0.0)
        rows[CONTEXT] += rows[STREAMING] * elapsed_s * rows[_STEPS_PER_S]
        rows[SILENT_S] = (now_s - rows[SILENT_S]) * (rows[WAITING] > 0)
        rows[PREFILL_AGE_S] = now_s - rows[PREFILL_AGE_S]
        return rows

    def stages(self, slots: Slots) -> FloatArray:
        """Streaming sequences by stage, shape (stages, slots), as of each slot's last event."""
        self._refresh()
        result: FloatArray = self._stages[:, slots]
        return result

    def loads(self, slots: Slots) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Loads (s), KV tokens and requests in flight of these slots; copies."""
        self._refresh()
        rows = self._rows
        if isinstance(slots, slice):
            return rows[LOAD_S, slots].copy(), rows[KV_TOKENS, slots], rows[IN_FLIGHT, slots].copy()
        return (
            rows[LOAD_S].take(slots),
            rows[KV_TOKENS].take(slots),
            rows[IN_FLIGHT].take(slots),
        )

    def _refresh(self) -> None:
        changed = self._changed
        if not changed:
            return
        if self._loads_only:
            self._refresh_loads()
            return
        rows, stages = self._rows, self._stages
        for s in changed:
            s.noted = False
            p = s.peers or NO_PEERS
            rows[:, s.slot] = (
                s.waiting + p.waiting,
                s.streaming + p.streaming,
                s.waiting_prompt + p.waiting_prompt,
                s.waiting_prefill + p.waiting_prefill,
                s.waiting_output + p.waiting_output,
                s.context + p.context,
                s.speed,
                s.heard_s,
                s.load_s + p.load_s,
                s.kv_tokens + p.kv_tokens,
                s.in_flight + p.in_flight,
                s.read_s,
                s.steps_per_s,
                s.seats,
                s.shared_tokens,
                s.recent_prefill,
                s.recent_prefill_s,
            )
            stages[:, s.slot] = s.stages
            stages[0, s.slot] += p.streaming  # how far those are, nobody says
        changed.clear()

    def _refresh_loads(self) -> None:
        load_s, kv_tokens, in_flight = self._rows[LOAD_S : IN_FLIGHT + 1]
        for state in self._changed:
            state.noted = False
            peers, slot = state.peers or NO_PEERS, state.slot
            load_s[slot] = state.load_s + peers.load_s
            kv_tokens[slot] = state.kv_tokens + peers.kv_tokens
            in_flight[slot] = state.in_flight + peers.in_flight
        self._changed.clear()
