"""How fast each engine really decodes, as seen from the streams that pass through the gateway.

All that stream on one engine advance together, one decode step at a time, and each step is one
server-sent event of each stream. So the events that a stream got in an interval are the steps of
its engine, and the median over an instance's streams stands for it: a stream that was preempted or
whose client is slow does not move it. Streams that began or ended within the interval, or whose
client held them up, are left out.

Nothing is done per event: relays count them anyway, and one timer reads the counts each second. It
runs only while there are streams, and only for a policy that wants to know (``Placement``).
"""

from __future__ import annotations

import asyncio
import statistics
import time

from hetero_gateway.core.ledger import Dispatch
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet import Fleet
from hetero_gateway.gateway.relay import Exchange

INTERVAL_S = 1.0


class _Stream:
    """A stream at the last look: its events, or None where it does not count yet."""

    __slots__ = ("dispatch", "events")

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.events: int | None = None


class StepWatch:
    """Tells the scheduler each second how many decode steps each instance made."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Exchange, _Stream] = {}
        self._looked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """No stream is watched and no timer runs."""
        return not self._streams and self._timer is None

    def add(self, exchange: Exchange, dispatch: Dispatch) -> None:
        """A stream began."""
        self._streams[exchange] = _Stream(dispatch)
        if self._timer is None:
            self._looked_s = time.monotonic()
            self._timer = self._loop.call_later(INTERVAL_S, self._look)

    def discard(self, exchange: Exchange) -> None:
        """It is over; unknown ones are ignored."""
        self._streams.pop(exchange, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = self._loop.call_later(INTERVAL_S, self._look) if self._streams else None
        now_s = time.monotonic()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        seen: dict[InstanceId, list[float]] = {}
        for exchange, stream in self._streams.items():
            dispatch, before = stream.dispatch, stream.events
            if exchange.congested or dispatch.outcome is not None:
                stream.events = None
                continue
            stream.events = exchange.events
            if before is not None:
                steps = (exchange.events - before) / dispatch.request.sequences
                seen.setdefault(dispatch.instance_id, []).append(steps)
        scheduler = self._fleet.scheduler
        for instance_id in self._fleet.instances:
            if instance_id in seen:
                steps = statistics.median(seen[instance_id])
                scheduler.observe_steps(instance_id, steps, elapsed_s, now_s)
            else:
                # Nothing was seen, which is not the same as no step: the next figures count from
                # here.
                scheduler.observe_steps(instance_id, 0.0, 0.0, now_s)
