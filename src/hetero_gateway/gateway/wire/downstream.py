"""The client's side of a relay: how response bytes reach the client's connection.

``UvicornDownstream`` is the splice: it writes to the client's transport directly, past ASGI's
``send``, which saves a task wake-up, a dict and a re-framing per chunk (a third of a chunk's cost,
benchmarks/dataplane/proxies.py). It reaches uvicorn's RequestResponseCycle through
``send.__self__`` and uses only the attributes in ``CYCLE_ATTRIBUTES``;
tests/gateway/wire/test_downstream.py fails loudly when uvicorn changes them. Under any other server
``AsgiDownstream`` does the same through ``send`` and ``receive``.

Both end a relay's wait when the client disconnects, and both say when the client reads too slowly.
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from hetero_gateway.gateway.wire.upstream import Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in http.HTTPStatus
}
CYCLE_ATTRIBUTES = (
    "transport",
    "flow",
    "disconnected",
    "keep_alive",
    "message_event",
    "on_response",
    "response_started",
    "response_complete",
)
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
        """Takes body bytes: with their framing if ``passes_framing``, else decoded."""
        ...

    @property
    def disconnected(self) -> bool: ...

    @property
    def started(self) -> bool:
        """Whether ``start`` was called."""
        ...

    @property
    def passes_framing(self) -> bool:
        """Whether chunk framing can be written as it is (else bodies are passed decoded)."""
        ...

    def start(self, status: int, headers: Headers, *, chunked: bool) -> bytes:
        """Begin the response; returns bytes to write ahead of the body, in one write with it.

        ``chunked``: the body has no content-length header.
        """
        ...

    def finish(self) -> None:
        """The response is complete; the connection may serve the next request."""
        ...

    def cut(self) -> None:
        """Close the connection after what was written: the client sees a broken response."""
        ...

    def wake(self) -> None:
        """End the current or the next ``wait``."""
        ...

    async def wait(self) -> None:
        """Return after ``wake``, on a disconnect, or at times for no reason."""
        ...

    async def drain(self) -> None:
        """Return when the client has caught up or gone."""
        ...


def downstream_of(scope: Scope, receive: Receive, send: Send) -> Downstream:
    """The splice where the server is uvicorn with httptools, else plain ASGI."""
    cycle = getattr(send, "__self__", None)
    if (
        isinstance(cycle, RequestResponseCycle)
        and scope["http_version"] == "1.1"
        and all(hasattr(cycle, name) for name in CYCLE_ATTRIBUTES)
    ):
        return UvicornDownstream(cycle, receive)
    return AsgiDownstream(receive, send)


class UvicornDownstream:
    """Writes past ASGI to the transport of a uvicorn (httptools) connection."""

    __slots__ = ("_cycle", "_receive", "_transport", "flow", "write")

    passes_framing = True

    def __init__(self, cycle: Any, receive: Receive) -> None:
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self.flow: FlowControl = cycle.flow
        # A closed transport swallows what is written in the moment before the relay is told.
        self.write: Callable[[bytes], None] = cycle.transport.write
        self._receive = receive

    @property
    def disconnected(self) -> bool:
        result: bool = self._cycle.disconnected
        return result

    @property
    def started(self) -> bool:
        result: bool = self._cycle.response_started
        return result

    def start(self, status: int, headers: Headers, *, chunked: bool) -> bytes:
        cycle = self._cycle
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        cycle.response_started = True
        return b"".join(parts)

    def finish(self) -> None:
        # What uvicorn's own send() does after the last body message.
        cycle = self._cycle
        if cycle.response_complete:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    def cut(self) -> None:
        self._cycle.keep_alive = False
        self.finish()

    def wake(self) -> None:
        self._cycle.message_event.set()

    async def wait(self) -> None:
        # receive() sleeps on the event that wake(), finish() and a disconnect set.
        await self._receive()

    async def drain(self) -> None:
        await self.flow.drain()


class AsgiDownstream:
    """The same through ``send`` and ``receive``, for any ASGI server and for HTTP/1.0."""

    passes_framing = False

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._messages: deque[MutableMapping[str, Any]] = deque()
        self._queued_bytes = 0
        self._event = asyncio.Event()
        self._watcher: asyncio.Future[None] | None = None
        self.disconnected = False
        self.started = False

    @property
    def flow(self) -> Flow:
        return self

    @property
    def write_paused(self) -> bool:
        return self._queued_bytes > _HIGH_WATER_BYTES

    def start(self, status: int, headers: Headers, *, chunked: bool) -> bytes:
        self.started = True
        self._queue({"type": "http.response.start", "status": status, "headers": headers})
        return b""

    def write(self, data: bytes) -> None:
        self._queued_bytes += len(data)
        self._queue({"type": "http.response.body", "body": data, "more_body": True})

    def finish(self) -> None:
        self._queue({"type": "http.response.body", "body": b"", "more_body": False})

    def cut(self) -> None:
        # ASGI has no way to break a response off but to return without completing it.
        self._event.set()

    def wake(self) -> None:
        self._event.set()

    def _queue(self, message: MutableMapping[str, Any]) -> None:
        self._messages.append(message)
        self._event.set()

    async def wait(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
        await self._event.wait()
        self._event.clear()
        await self.drain()

    async def drain(self) -> None:
        while self._messages and not self.disconnected:
            message = self._messages.popleft()
            self._queued_bytes -= len(message.get("body", b""))
            await self._send(message)

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                self._event.set()
                return

    async def close(self) -> None:
        """Flush what is queued and stop watching for a disconnect."""
        await self.drain()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
