"""Liveness from traffic: instances that fall silent are detected within about a second.

The core decides what silence means (``core/instances/silence.py``). Here is one timer, which runs
while anything is outstanding and looks at existing counts: the events of streams, and when an
instance last answered. Nothing is done per request or per chunk. A look that comes late says
nothing about instances: the gateway was not listening.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from hetero_gateway.core.instances.outcomes import BreakerState
from hetero_gateway.core.instances.silence import FLOOR_S, Pauses, Silence, judge
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.instances import Fleet, Instance

INTERVAL_S = 0.25
# How late a look may be.
_LATE_S = 0.15
_ASK_AGAIN_S = 1.0
# The progress of streams in other processes is known once a second.
_REPORTED_S = 1.0


class Streams(Protocol):
    """``reported_s``: when other processes reported streams of instances."""

    reported_s: dict[InstanceId, float]

    def glance(self) -> tuple[set[InstanceId], set[InstanceId]]:
        """The instances whose streams made progress since, and those with streams."""
        ...


class LivenessWatch:
    """Watches the instances while anything is outstanding. Needs a running event loop.

    Args:
        fleet, outcomes: of the gateway.
        streams: the open ones.
        ask: has an instance's /health asked now.
        on_silent: called when an instance has become ``silent``.

    ``watches``: its timer runs; sending a request requires ``watch`` unless it does.
    """

    def __init__(
        self,
        fleet: Fleet,
        outcomes: OutcomeWatch,
        streams: Streams,
        ask: Callable[[Instance], None],
        on_silent: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._outcomes = outcomes
        self._streams = streams
        self._ask = ask
        self._on_silent = on_silent
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._heard_s: dict[InstanceId, float] = {}
        self._asked_s: dict[InstanceId, float] = {}
        self._pauses: defaultdict[InstanceId, Pauses] = defaultdict(Pauses)
        self.watches = False

    def watch(self) -> None:
        """Watch from now on, as long as anything is outstanding."""
        self.watches = True
        self._due_s = time.monotonic() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now_s = time.monotonic()
        late = now_s > self._due_s + _LATE_S
        heard, streaming = self._streams.glance()
        silent = busy = False
        states = self._fleet.scheduler.members.table.states
        for instance in list(self._fleet.instances.values()):
            instance_id = instance.id
            state = states[instance_id]
            heard_s = max(self._heard_s.get(instance_id, now_s), instance.outcomes.heard_s)
            if instance_id not in streaming:
                # If a proxy relays them, first tokens are all that is known of streams.
                heard_s = max(heard_s, state.heard_s)
            dead = instance.silent or instance.health.asked_s is not None
            if instance_id in heard or instance.outcomes.is_heard_again:
                self._outcomes.heard(instance, now_s)
            if not state.in_flight:
                self._heard_s.pop(instance_id, None)
                continue
            busy = True
            if late or instance_id in heard:
                if not late and not dead:
                    self._pauses[instance_id].note(now_s - heard_s, now_s)
                heard_s = now_s
            self._heard_s[instance_id] = heard_s
            instance.mute = instance.mute and heard_s < now_s
            if now_s - heard_s >= FLOOR_S / 2:
                silent |= self._judge(instance, heard_s, instance_id in streaming, now_s)
        if busy:
            self.watch()
        else:
            self.watches = False
            self._heard_s.clear()
            for instance_id in self._pauses.keys() - self._fleet.instances.keys():
                del self._pauses[instance_id]
            self._asked_s.clear()
        if silent:
            self._on_silent()

    def _judge(self, instance: Instance, heard_s: float, streams: bool, now_s: float) -> bool:
        """Whether it is newly silent."""
        outcomes = instance.outcomes
        if outcomes.breaker is BreakerState.HALF_OPEN:
            if not outcomes.trials:
                return False
            heard_s = max(heard_s, outcomes.trials_since_s)
        state = self._fleet.scheduler.members.table[instance.id]
        verdict = judge(
            state,
            state.outstanding(),
            heard_s,
            streams,
            instance.health,
            self._pauses[instance.id],
            now_s,
            _REPORTED_S if instance.id in self._streams.reported_s else 0.0,
        )
        if verdict is Silence.HEARD:
            return False
        if now_s - self._asked_s.get(instance.id, -math.inf) >= _ASK_AGAIN_S:
            self._asked_s[instance.id] = now_s
            self._ask(instance)
        if verdict is not Silence.ASK:
            self._outcomes.fell_silent(instance, now_s)
            instance.mute = True
        if verdict is Silence.DEAD and outcomes.shut and not instance.silent:
            self._fleet.set_silent(instance, silent=True)
            return True
        return False
