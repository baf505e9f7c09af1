"""Every instance's state, and the assumed speed of instances that were not seen yet."""

from __future__ import annotations

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.types import InstanceId


class Table:
    """The ``states`` by instance id. Each has a slot: a small number that is reused.

    ``keeps``: also keep observations as rows.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.states: dict[InstanceId, InstanceState] = {}
        self._free_slots: list[int] = []

    def __getitem__(self, instance_id: InstanceId) -> InstanceState:
        return self.states[instance_id]

    def join(self, instance_id: InstanceId) -> InstanceState:
        """Add an instance with nothing on it."""
        slot = self._free_slots.pop() if self._free_slots else len(self.states)
        state = InstanceState(instance_id, slot, keeps=self._keeps)
        self.states[instance_id] = state
        return state

    def leave(self, instance_id: InstanceId, now_s: float) -> list[Dispatch]:
        """Remove an instance; everything on it is settled and returned. KeyError: unknown."""
        state = self.states.pop(instance_id)
        orphans = state.leave(now_s)
        self._free_slots.append(state.slot)
        return orphans

    # Stand-ins: an instance not seen yet is assumed to be as fast as the fastest of its kind.

    def stand_in_speed(self) -> float:
        """The lowest observed speed factor of an instance without a profile; 1 if there is none."""
        seen = (s.speed for s in self.states.values() if s.stands_in and s.observed)
        return min(seen, default=1.0)

    def spread_stand_in_speed(self) -> None:
        """Apply it to the instances that were not observed."""
        speed = self.stand_in_speed()
        for state in self.states.values():
            if state.stands_in and not state.observed:
                state.set_speed(speed)
