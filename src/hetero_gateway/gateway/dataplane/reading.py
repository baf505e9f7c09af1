"""Reads a body in steps, and counts its prompt, if that takes longer than a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.dataplane.intake import Intake
from hetero_gateway.gateway.request.byte_counts import lacks_scans, load_scans
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.gateway.turns import Steps, advance
from hetero_gateway.http.heads import Inbound

# How long reading a body may block the event loop at a time.
_STEP_S = 0.001


class LongBodies:
    """Reads long bodies in steps, with turns of the event loop between them.

    One at a time, so that all of them together block it no longer than one.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._loads = False

    def begin(self, steps: Steps[ParsedRequest], size_bytes: int) -> ParsedRequest | None:
        """The first step; None: there are more. Raises Refusal."""
        if self._loads or lacks_scans(size_bytes):
            self._loads = True
            return None
        return advance(steps, _STEP_S)

    async def finish(
        self, steps: Steps[ParsedRequest], over: Callable[[], bool]
    ) -> ParsedRequest | None:
        """The remaining steps; None: the request has ended meanwhile. Raises Refusal."""
        parsed = None
        async with self._lock:
            if self._loads:
                await asyncio.to_thread(load_scans)
                self._loads = False
            while parsed is None and not over():
                await asyncio.sleep(0)
                parsed = advance(steps, _STEP_S)
        return parsed


class ReadingRooms(Protocol):
    """The shared parts that reading a body needs."""

    @property
    def intake(self) -> Intake: ...

    @property
    def reading(self) -> LongBodies: ...


class RequestReader:
    """A request until it is described; the drivers of requests derive from it.

    Most bodies are read at once (``Intake.read``); a task exists only while a long body is read in
    steps, or a tokenizer counts. ``Attempts`` and the picker's streams derive from this.
    """

    __slots__ = ("_client", "_task")

    _client: Client | None  # its client, once its head was admitted
    _task: asyncio.Task[None] | None

    # Implemented by the drivers

    def _describe(self, parsed: ParsedRequest, counted: int | None) -> None:
        """The body is read; ``counted``: tokens. May raise Refusal."""
        raise NotImplementedError

    def _refuse(self, refusal: Refusal) -> None:
        """Answer it with an error."""
        raise NotImplementedError

    def broke(self, error: Exception) -> None:
        """The boundary of a request: a bug affects only this one."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Whether the request has ended."""
        raise NotImplementedError

    # Reading

    def _read_in_steps(self, rooms: ReadingRooms, inbound: Inbound) -> None:
        """Read what ``Intake.read`` leaves to this. Raises Refusal."""
        steps = rooms.intake.read_in_steps(inbound, self._client)
        parsed = rooms.reading.begin(steps, len(inbound.body))
        if parsed is None:
            self._start(self._read_on(rooms, inbound, steps))
        elif rooms.intake.counts(inbound, parsed):
            self._start(self._count(rooms, inbound, parsed))
        else:
            self._describe(parsed, None)

    async def _read_on(
        self, rooms: ReadingRooms, inbound: Inbound, steps: Steps[ParsedRequest]
    ) -> None:
        """Read the rest of a long body, with turns of the event loop in between."""
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
        """Run what has to wait. At most one task acts at a time, beside one that follows a split
        request until it sees that this has ended; none is ever cancelled here.
        """
        self._task = asyncio.get_running_loop().create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refusal as refusal:
            if not self._is_over():
                self._refuse(refusal)
        except Exception as error:
            self.broke(error)
