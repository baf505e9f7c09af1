"""The client's side of a relay: how response bytes reach the client's connection.

A relay is driven by callbacks, so it writes without waiting; events on the client's side (it left,
or has caught up with what was written) go to the ``Listener``.

``protocol.EngineCycle`` writes to the transport itself. ``AsgiDownstream`` does the same through
``send`` and ``receive``, for any other ASGI server and for HTTP/1.0: it keeps what is written, and
its coroutine sends it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import BodyBuffer, BodyLimits
from hetero_gateway.http.headers import fields_in
from hetero_gateway.http.heads import Inbound

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Bytes that may wait in AsgiDownstream before the upstream is paused; uvicorn's own limit.
_HIGH_WATER_BYTES = 65536


class Flow(Protocol):
    """Whether the client reads too slowly for what was written."""

    @property
    def write_paused(self) -> bool: ...


class Downstream(Protocol):
    """What a relay needs of a client's connection."""

    @property
    def flow(self) -> Flow: ...

    @property
    def write(self) -> Callable[[bytes], None]:
        """Write body bytes: with their framing if ``passes_framing``, else decoded."""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""

    @property
    def started(self) -> bool:
        """Whether ``start`` was called."""

    @property
    def passes_framing(self) -> bool:
        """Whether chunk framing can be written unchanged (otherwise bodies are passed decoded)."""

    def start(self, status: int, fields: bytes, *, chunked: bool) -> bytes:
        """Begin the response; returns bytes to write before the body, in one write with it.

        ``fields``: of its head, as ``lines_of`` writes them; ``chunked``: it states no length.
        """

    def finish(self) -> None:
        """Complete the response; the connection may serve the next request."""

    def cut(self) -> None:
        """Close the connection after what was written: the client sees a broken response."""


class Listener(Protocol):
    """The server of a request, as its client's side sees it. Nothing here raises."""

    @property
    def over(self) -> bool:
        """Whether it has been answered, or its client has left."""

    def begin(self, body: bytes) -> None:
        """Start: the whole body is here. Called at most once, and not when it is ``over``."""

    def refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal now: the body is too large, or there is no room for it."""

    def caught_up(self) -> None:
        """The client has read what was written."""

    def client_gone(self) -> None:
        """The client no longer reads."""


class AsgiDownstream:
    """A client's side through ``send`` and ``receive``."""

    passes_framing = False

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._messages: deque[MutableMapping[str, Any]] = deque()
        self._queued_bytes = 0
        self._event = asyncio.Event()
        self._ended = False
        self.gone = False
        self.started = False

    @property
    def flow(self) -> Flow:
        return self

    @property
    def write_paused(self) -> bool:
        return self._queued_bytes > _HIGH_WATER_BYTES

    def start(self, status: int, fields: bytes, *, chunked: bool) -> bytes:
        self.started = True
        headers = fields_in(fields)
        self._queue({"type": "http.response.start", "status": status, "headers": headers})
        return b""

    def write(self, data: bytes) -> None:
        self._queued_bytes += len(data)
        self._queue({"type": "http.response.body", "body": data, "more_body": True})

    def finish(self) -> None:
        self._ended = True
        self._queue({"type": "http.response.body", "body": b"", "more_body": False})

    def cut(self) -> None:
        # ASGI cannot break a response off except by returning without completing it.
        self._ended = True
        self._event.set()

    def _queue(self, message: MutableMapping[str, Any]) -> None:
        self._messages.append(message)
        self._event.set()

    # The coroutine of the server's task

    async def read_body(self, listener: Listener, inbound: Inbound, limits: BodyLimits) -> None:
        """Hand the request's body to its listener, unless that has answered already."""
        body = inbound.buffer = BodyBuffer(limits)
        more = True
        while more and not listener.over:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                listener.client_gone()
                return
            more = message.get("more_body", False)
            try:
                body.add(message.get("body", b""))
            except Refusal as refusal:
                listener.refuse(refusal)
        if not listener.over:
            listener.begin(body.take())

    async def relay(self, listener: Listener) -> None:
        """Send what is written, and wait for the client to leave, until the end of the response."""
        watcher = asyncio.ensure_future(self._watch())
        try:
            while not self.gone:
                await self.flush()
                if self._ended:
                    return
                listener.caught_up()
                await self._event.wait()
                self._event.clear()
            listener.client_gone()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def flush(self) -> None:
        """Send what is queued."""
        while self._messages and not self.gone:
            message = self._messages.popleft()
            self._queued_bytes -= len(message.get("body", b""))
            await self._send(message)

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                self._event.set()
                return
