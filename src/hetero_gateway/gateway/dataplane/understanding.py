"""From a request's body to what the scheduler is asked: read, counted, described.

Done at once where it can be; a task exists only while a long body is read in steps, or a tokenizer
counts. ``attempts`` and the picker's streams are each this and what follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.dataplane.intake import Intake, LongBodies
from hetero_gateway.gateway.request.body_fields import LEAST_BYTES
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.gateway.turns import Steps
from hetero_gateway.http.inbound import Inbound


class ReadingRooms(Protocol):
    """What reading a body needs of what every request passes through."""

    @property
    def intake(self) -> Intake: ...

    @property
    def reading(self) -> LongBodies: ...


class Understanding:
    """A request until it is described; whoever drives one is derived from it."""

    __slots__ = ("_client", "_task")

    _client: Client | None  # whose it is, once its head was let in
    _task: asyncio.Task[None] | None

    # What follows, and what it may come to

    def _describe(self, parsed: ParsedRequest, counted: int | None) -> None:
        """The body is understood; ``counted``: tokens. May raise Refusal."""
        raise NotImplementedError

    def _refuse(self, refusal: Refusal) -> None:
        """Answer it with an error."""
        raise NotImplementedError

    def broke(self, error: Exception) -> None:
        """The boundary of a request: a bug costs the one that met it."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Nobody wants an answer any more."""
        raise NotImplementedError

    # Reading

    def _read(self, rooms: ReadingRooms, inbound: Inbound) -> None:
        """The body is here: understand the request, at once if that can be. Raises Refusal."""
        inbound.received_s = time.monotonic()
        if len(inbound.body) < LEAST_BYTES:
            parsed = rooms.intake.read(inbound, self._client)
        else:
            steps = rooms.intake.read_in_steps(inbound, self._client)
            first = rooms.reading.begin(steps)
            if first is None:
                self._start(self._read_on(rooms, inbound, steps))
                return
            parsed = first
        intake = rooms.intake
        if intake.tokenizer is not None and intake.counts(inbound, parsed):
            self._start(self._count(rooms, inbound, parsed))
        else:
            self._describe(parsed, None)

    async def _read_on(
        self, rooms: ReadingRooms, inbound: Inbound, steps: Steps[ParsedRequest]
    ) -> None:
        """Read the rest of a long body, while the event loop has its turns."""
        parsed = await rooms.reading.finish(steps, self._is_over)
        if parsed is None or self._is_over():
            return
        if rooms.intake.counts(inbound, parsed):
            await self._count(rooms, inbound, parsed)
        else:
            self._describe(parsed, None)

    async def _count(self, rooms: ReadingRooms, inbound: Inbound, parsed: ParsedRequest) -> None:
        counted = await rooms.intake.count(inbound)
        if not self._is_over():
            self._describe(parsed, counted)

    # What has to wait

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what has to wait. At most one runs at a time, and none is ever cancelled here."""
        self._task = asyncio.get_running_loop().create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refusal as refusal:
            if not self._is_over():
                self._refuse(refusal)
        except Exception as error:
            self.broke(error)
