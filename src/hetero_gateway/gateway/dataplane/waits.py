"""Requests without a place yet: in the queue, or while an engine is woken for them.

The result is reported to the owner once, in a callback of its own, since whatever discovers it,
such as a pump, is in the middle of something else. A wait that its owner has left reports nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.types import Reject
from hetero_gateway.gateway.dataplane.dispatcher import Owner, Waiting, report_to
from hetero_gateway.gateway.dataplane.intake import Placed, PrefillLeg
from hetero_gateway.gateway.fleet.instances import Instance


class TimedWait(Waiting):
    """Reports when it is woken, or when its time has passed."""

    __slots__ = ("_further", "_owner", "_timer")

    def __init__(self) -> None:
        self._owner: Owner[Placed] | None = None  # still to be notified
        self._further: Waiting | None = None  # that follows this one
        self._timer: asyncio.TimerHandle

    def begin(self, owner: Owner[Placed], until_s: float) -> None:
        """``until_s``: monotonic; when it ends at the latest."""
        self._owner = owner
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, until_s - time.monotonic()), self._report)

    def wake(self, *_: Any) -> None:
        """Wake it: it has a result."""
        if self._owner is not None:
            asyncio.get_running_loop().call_soon(self._report)

    def leave(self) -> None:
        if self._further is not None:
            self._further.leave()
        elif self._owner is not None:
            self._owner = None
            self._timer.cancel()
            self._abandon()

    def _report(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            self._timer.cancel()
            self._further = report_to(owner, self._found)

    def _found(self) -> Placed | Reject | Waiting:
        """Its result. Raises Refusal."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Its owner has left."""


class WaitingRoom(Protocol):
    """The scheduler's driver, as seen by waiting requests."""

    def collect(self, wait: QueueWait) -> Placed | Reject: ...

    def abandon(self, wait: QueueWait) -> None: ...


class QueueWait(TimedWait):
    """A request in the queue: the owner of its ticket.

    ``instance``, ``leg``, ``placed_s``: where and when it was placed. ``at_deadline``: its time
    ends with the whole request's, not with the longest wait. ``note``: called with its place before
    its owner is.
    """

    __slots__ = ("_queue", "at_deadline", "instance", "leg", "note", "placed_s", "ticket")

    def __init__(self, queue: WaitingRoom, ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket
        self.at_deadline = False
        self.instance: Instance | None = None
        self.leg: PrefillLeg | None = None
        self.placed_s = 0.0
        self._queue = queue
        self.note: Callable[[Placed], None]

    def _found(self) -> Placed | Reject:
        place = self._queue.collect(self)
        if isinstance(place, Placed):
            self.note(place)
        return place

    def _abandon(self) -> None:
        self._queue.abandon(self)


class WakingWait(TimedWait):
    """A request for which an engine is woken: it is submitted again once that is awake.

    Args:
        waking: returns whether it is awake.
        reject: its result otherwise.
        submit: submits again.
    """

    __slots__ = ("_reject", "_submit", "_waking")

    def __init__(
        self,
        waking: asyncio.Task[bool],
        reject: Reject,
        submit: Callable[[], Placed | Reject | Waiting],
    ) -> None:
        super().__init__()
        self._waking = waking
        self._reject = reject
        self._submit = submit
        waking.add_done_callback(self.wake)

    def _found(self) -> Placed | Reject | Waiting:
        waking = self._waking
        awake = waking.done() and not waking.cancelled() and waking.result()
        return self._submit() if awake else self._reject
