"""Every instance's state, and what is believed of those that nobody has seen yet."""

from __future__ import annotations

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.types import InstanceId


class Table:
    """The ``states`` by instance id. Each has a slot: a small number, used again.

    ``keeps``: keep what is observed as rows, too.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.states: dict[InstanceId, InstanceState] = {}
        self._free_slots: list[int] = []

    def __getitem__(self, instance_id: InstanceId) -> InstanceState:
        return self.states[instance_id]

    def join(self, instance_id: InstanceId) -> InstanceState:
        """An instance with nothing on it."""
        slot = self._free_slots.pop() if self._free_slots else len(self.states)
        state = InstanceState(instance_id, slot, keeps=self._keeps)
        self.states[instance_id] = state
        return state

    def leave(self, instance_id: InstanceId, now_s: float) -> list[Dispatch]:
        """Forget an instance; everything on it is settled and returned. KeyError: unknown."""
        state = self.states.pop(instance_id)
        orphans = state.leave(now_s)
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
