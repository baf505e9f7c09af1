"""Adds instances to the fleet, and removes them at once or when they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import ADMIN, Fleet, Instance

# Between two looks whether a retiring instance has finished.
_SEE_OFF_EVERY_S = 0.5


class Roster:
    """Probes each instance of a fleet from its arrival to its removal.

    Args:
        fleet: the instances.
        forget: called with the id of each removed one.
    """

    # Set before anything comes or goes.
    health: HealthMonitor

    def __init__(self, fleet: Fleet, forget: Callable[[InstanceId], None]) -> None:
        self.fleet = fleet
        self._forget = forget
        self._leaving: set[InstanceId] = set()
        self._seeing_off: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Stop removing instances."""
        if self._seeing_off is not None:
            self._seeing_off.cancel()

    async def add(self, config: InstanceConfig, source: str = ADMIN) -> Instance:
        """Add an instance and begin to probe it. Raises ConfigError."""
        # In a thread: certificates and a profile may have to be read.
        instance = await asyncio.to_thread(self.fleet.build, config)
        instance.source = source
        return self.admit(instance)

    def admit(self, instance: Instance) -> Instance:
        """Add an instance that was built. ConfigError: the id is taken."""
        self.fleet.admit(instance)
        self.health.watch(instance)
        self.health.suspect(instance, "not probed yet", down=False)
        return instance

    def remove(self, instance_id: InstanceId) -> int:
        """Remove an instance and its series; returns the number of requests it had."""
        self.health.unwatch(instance_id)
        open_requests = self.fleet.remove(instance_id)
        self._forget(instance_id)
        self._leaving.discard(instance_id)
        return open_requests

    def retire(self, instance_id: InstanceId) -> None:
        """Send it no more requests, and remove it once its present ones have ended."""
        instance = self.fleet.instances[instance_id]
        if not self.fleet.scheduler.members.table[instance_id].in_flight:
            self.remove(instance_id)
            return
        instance.draining = instance.leaving = True
        self.fleet.publish(instance)
        self._leaving.add(instance_id)
        if self._seeing_off is None:
            self._see_off_later()

    def recall(self, instance: Instance) -> None:
        """Keep a retiring instance after all."""
        instance.draining = instance.leaving = False
        self._leaving.discard(instance.id)
        self.fleet.publish(instance)

    def _see_off_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._seeing_off = loop.call_later(_SEE_OFF_EVERY_S, self._see_off)

    def _see_off(self) -> None:
        """Remove retired instances that have nothing left."""
        self._seeing_off = None
        for instance_id in list(self._leaving):
            if not self.fleet.scheduler.members.table[instance_id].in_flight:
                self.remove(instance_id)
        if self._leaving:
            self._see_off_later()
