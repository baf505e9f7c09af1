"""How fast each engine really decodes, as seen from the streams that pass through the gateway.

All that stream on one engine advance together, one decode step at a time, and each step is one
server-sent event of each stream. So the events that a stream got in an interval are the steps of
its engine, and the median over an instance's streams, by the time that each was seen, stands for
it: a stream that was preempted or whose client is slow does not move it. A stream that began or
ended within the interval counts for its part; one whose client held it up is left out.

An engine may put several tokens into one event: with speculative decoding, or when it is hurried.
What the scheduler calls a step is a token, so the events are multiplied by the tokens per event of
streams that reported their usage at the end.

Nothing is done per event: relays count them anyway, and one timer reads the counts each second. It
runs only while there are streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hetero_gateway.core.request import Request
from hetero_gateway.core.types import InstanceId, Outcome
from hetero_gateway.engines.vllm import CLOSING_EVENTS
from hetero_gateway.gateway.dataplane.observed import ObservedResponse
from hetero_gateway.gateway.fleet.instances import Fleet

INTERVAL_S = 1.0
# Another process's report of its streams, once a second, counts until the next is due, and late.
REPORT_LASTS_S = 1.5
# A shorter part of a stream says too little: a few steps, and the jitter of the network.
_LEAST_S = 0.1
# A look that is late by more is discarded: the gateway was short of CPU, or blocked, and what
# streams have got by now says little about their engines.
_LATE_S = 0.1
# From this many events on, one more or less at either end does not matter to the tokens per event.
_MANY_EVENTS = 32
# Nearer to 1 than this is such an event; above, no engine is known to go.
_ONE_EACH, _MOST_TOKENS = 1.1, 16.0
_KEEP = 0.8

_log = logging.getLogger(__name__)


class Streaming(Protocol):
    """A stream's owner: a ``Dispatch``, or another process's stand-in for one."""

    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def request(self) -> Request: ...

    @property
    def outcome(self) -> Outcome | None:
        """None while it is outstanding."""
        ...


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream at the last look, or at its beginning; ``since_s`` None: it was delayed since."""

    dispatch: Streaming
    events: int
    since_s: float | None
    glanced: int = -1  # events at the last glance


# By instance: (seconds, steps) of parts of streams.
Parts = dict[InstanceId, list[tuple[float, float]]]
# (instance, events, tokens) of streams that reported their usage.
Samples = list[tuple[InstanceId, int, int]]


class StreamWatch:
    """The streams of this process, and what was seen of them since the last look."""

    def __init__(self) -> None:
        self._streams: dict[ObservedResponse, _Stream] = {}
        self._ended: Parts = {}
        self._samples: dict[InstanceId, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: ObservedResponse, dispatch: Streaming, now_s: float) -> None:
        """A stream began."""
        self._streams[stream] = _Stream(dispatch, stream.events, now_s)

    def discard(self, stream: ObservedResponse, now_s: float) -> None:
        """Forget a stream that has ended; unknown ones are ignored."""
        begun = self._streams.pop(stream, None)
        if begun is None or not stream.complete:
            return
        instance_id = begun.dispatch.instance_id
        events = stream.events - CLOSING_EVENTS
        if events >= _MANY_EVENTS and instance_id not in self._samples:
            tokens = stream.usage().output_tokens
            if tokens is not None:
                self._samples[instance_id] = events, tokens
        self._part(self._ended, begun, events, now_s)

    def glance(self) -> tuple[set[InstanceId], set[InstanceId]]:
        """The instances whose streams have received anything since the last glance, and those with
        streams whose clients read.
        """
        heard: set[InstanceId] = set()
        watched: set[InstanceId] = set()
        for stream, last in self._streams.items():
            if not stream.congested:
                watched.add(last.dispatch.instance_id)
            if stream.events != last.glanced:
                last.glanced = stream.events
                heard.add(last.dispatch.instance_id)
        return heard, watched

    def look(self, now_s: float) -> tuple[Parts, Samples]:
        """What was seen since the last look; it is then forgotten."""
        seen, self._ended = self._ended, {}
        samples = [(name, *sample) for name, sample in self._samples.items()]
        self._samples.clear()
        for stream, last in self._streams.items():
            if stream.congested or last.dispatch.outcome is not None:
                last.since_s = None
                continue
            self._part(seen, last, stream.events, now_s)
            if last.since_s is None or now_s - last.since_s >= _LEAST_S:
                last.events, last.since_s = stream.events, now_s
        return seen, samples

    def _part(self, seen: Parts, stream: _Stream, events: int, now_s: float) -> None:
        since_s = stream.since_s
        if since_s is None or now_s - since_s < _LEAST_S:
            return
        steps = max(0, events - stream.events) / stream.dispatch.request.sequences
        seen.setdefault(stream.dispatch.instance_id, []).append((now_s - since_s, steps))


class StepWatch(StreamWatch):
    """Reports to the scheduler each second how many decode steps each instance made.

    Args:
        fleet: has the scheduler.
        on_look: called after each look.
    """

    def __init__(self, fleet: Fleet, on_look: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._fleet = fleet
        self.on_look = on_look
        self._loop = asyncio.get_running_loop()
        self._others: Parts = {}  # of other processes, since the last look
        # When another process reported streams of an instance, and which of them went on since the
        # last glance.
        self.reported_s: dict[InstanceId, float] = {}
        self._went_on: set[InstanceId] = set()
        self._tokens_per_event: dict[InstanceId, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    @property
    def idle(self) -> bool:
        """No stream is watched and no timer runs."""
        return not len(self) and self._timer is None

    def add(self, stream: ObservedResponse, dispatch: Streaming, now_s: float) -> None:
        super().add(stream, dispatch, now_s)
        self._arm()

    def take_in(self, parts: Parts, samples: Samples) -> None:
        """Take another process's observations of the last second."""
        now_s = time.monotonic()
        for instance_id, seen in parts.items():
            self._others.setdefault(instance_id, []).extend(seen)
            self.reported_s[instance_id] = now_s
            if any(steps for _, steps in seen):
                self._went_on.add(instance_id)
        self._learn(samples)
        self._arm()

    def glance(self) -> tuple[set[InstanceId], set[InstanceId]]:
        heard, watched = super().glance()
        heard |= self._went_on
        self._went_on.clear()
        lately_s = time.monotonic() - REPORT_LASTS_S
        for instance_id, reported_s in list(self.reported_s.items()):
            if reported_s < lately_s:
                del self.reported_s[instance_id]
            else:
                watched.add(instance_id)
        return heard, watched

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None:
            self._due_s = time.monotonic() + INTERVAL_S
            self._timer = self._loop.call_later(INTERVAL_S, self._look)

    def _learn(self, samples: Samples) -> None:
        for instance_id, events, tokens in samples:
            ratio = min(_MOST_TOKENS, tokens / events)
            if ratio < _ONE_EACH:
                ratio = 1.0
            known = self._tokens_per_event.get(instance_id, ratio)
            self._tokens_per_event[instance_id] = _KEEP * known + (1 - _KEEP) * ratio

    def _look(self) -> None:
        now_s = time.monotonic()
        self._timer = None
        late = now_s - self._due_s > _LATE_S
        if self._streams or self._others:
            self._arm()
        seen, samples = self.look(now_s)
        self._learn(samples)
        for instance_id, parts in self._others.items():
            seen.setdefault(instance_id, []).extend(parts)
        self._others.clear()
        for instance_id in self._tokens_per_event.keys() - self._fleet.instances.keys():
            del self._tokens_per_event[instance_id]
        if late:
            self._start_anew()
        for instance_id in self._fleet.instances:
            parts = seen.get(instance_id, [])
            if parts:
                duration_s, steps = _middle(parts)
                steps *= self._tokens_per_event.get(instance_id, 1.0)
                self._tell(instance_id, steps, duration_s, now_s)
            else:
                # Nothing was seen, which is not the same as no step: the next figures count from
                # here.
                self._tell(instance_id, 0.0, 0.0, now_s)
        if late:
            self._start_anew()  # without this look, too
        if self._fleet.on_look is not None:
            self._fleet.on_look()
        if self.on_look is not None:
            self.on_look()

    def _start_anew(self) -> None:
        for slowness in self._fleet.scheduler.members.slowness.values():
            slowness.start_anew()

    def _tell(self, instance_id: InstanceId, steps: float, duration_s: float, now_s: float) -> None:
        scheduler = self._fleet.scheduler
        if scheduler.members.observe_steps(instance_id, steps, duration_s, now_s):
            self._fleet.tell_drift(instance_id)


def _middle(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """(duration, steps): the longest part's time, at the median rate by time."""
    duration_s = max(part_s for part_s, _ in parts)
    rates = sorted((steps / part_s, part_s) for part_s, steps in parts)
    half_s, position = sum(part_s for _, part_s in rates) / 2, 0
    while (half_s := half_s - rates[position][1]) > 0:
        position += 1
    return duration_s, duration_s * rates[position][0]
