"""uvicorn's HTTP protocol, with engine paths served from its callbacks.

For a POST on an engine path over HTTP/1.1 there is no ASGI: no scope, no cycle of uvicorn's, no
task. The parser's callbacks gather the body and hand an ``Inbound`` to the service; its answer is
written to the transport, splice and all. Every other request goes uvicorn's way.

``EngineCycle`` stands where uvicorn keeps its RequestResponseCycle (``self.cycle``, ``pipeline``),
so that its code for keep-alive, pipelining, shutdown and flow control goes on working. What is
leant on is pinned by tests/gateway/wire/test_protocol.py, which fails loudly when uvicorn changes.

A cycle's life, events down and states across; "–": cannot be or means nothing:

    event             queued (pipelined)  reading             serving             over
    ----------------  ------------------  ------------------  ------------------  --------
    its turn          reading; serving    –                   –                   –
                      if the body is here
    body bytes        kept                kept, or 413: over  –                   dropped
    body complete     noted               serving             –                   dropped
    response's end    –                   over (refused)      over                –
    client caught up  –                   –                   the relay resumes   –
    connection lost   over                over                over                –

Only one cycle of a connection has its turn. The next one begins in a callback of its own: a client
may pipeline more requests than the stack is deep.
"""

from __future__ import annotations

import asyncio
import http
import urllib.parse
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hetero_gateway.engines.vllm import WORK_BY_PATH, Work, work_of_path
from hetero_gateway.gateway.wire.downstream import Downstream, Flow, Listener
from hetero_gateway.gateway.wire.headers import Headers
from hetero_gateway.gateway.wire.inbound import Inbound

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in http.HTTPStatus
}
# As they stand on nearly every request line.
_BY_TARGET = {path.encode(): (path, work) for path, work in WORK_BY_PATH.items()}


class Service(Protocol):
    """What engine paths are served by."""

    @property
    def max_body_bytes(self) -> int: ...

    def open(self, inbound: Inbound, downstream: Downstream) -> Listener:
        """Take a request whose head is here; it may be answered at once."""
        ...


class _NoEvent:
    """Where uvicorn wakes a coroutine that is not there."""

    def set(self) -> None:
        pass


class EngineCycle:
    """One request on an engine path and its response: the ``Downstream`` of its relay."""

    __slots__ = (
        "_expects_continue",
        "_listener",
        "_parts",
        "_protocol",
        "_size",
        "_whole",
        "disconnected",
        "flow",
        "inbound",
        "keep_alive",
        "response_complete",
        "started",
        "write",
    )

    passes_framing = True
    message_event = _NoEvent()  # of uvicorn's

    def __init__(
        self, protocol: EngineProtocol, inbound: Inbound, keep_alive: bool, expects_continue: bool
    ) -> None:
        self._protocol = protocol
        self._expects_continue = expects_continue
        self._listener: Listener | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._whole = False
        self.inbound: Inbound | None = inbound  # until it is over
        self.keep_alive = keep_alive
        self.flow: Flow = protocol.flow
        # A closed transport swallows what is written in the moment before the relay hears of it.
        self.write = protocol.transport.write
        self.started = False
        self.disconnected = False
        self.response_complete = False

    def __repr__(self) -> str:
        if self.response_complete or self.disconnected:
            state = "over"
        elif self._listener is None:
            state = "queued"
        else:
            state = "serving" if self._whole else "reading"
        return f"<EngineCycle {self.inbound!r} {state}>"

    # The request

    def take_turn(self) -> None:
        """The responses ahead of it are complete."""
        if self.disconnected or self.inbound is None:
            return
        service = self._protocol.service
        listener = self._listener = service.open(self.inbound, self)
        if listener.over:
            return
        if self._size > service.max_body_bytes:
            listener.refuse_body()
        elif self._whole:
            self._begin(listener)
        elif self._expects_continue:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def take_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._protocol.service.max_body_bytes:
            self._parts.append(data)
            return
        self._parts.clear()
        if self._listener is not None:
            self._listener.refuse_body()

    def end_body(self) -> None:
        self._whole = True
        if self._listener is not None:
            self._begin(self._listener)

    def _begin(self, listener: Listener) -> None:
        parts, self._parts = self._parts, []
        listener.begin(parts[0] if len(parts) == 1 else b"".join(parts))

    def caught_up(self) -> None:
        if self._listener is not None:
            self._listener.caught_up()

    def lost(self) -> None:
        """The connection is gone."""
        self.disconnected = True
        listener, self._listener = self._listener, None
        if listener is not None and not self.response_complete:
            listener.client_gone()

    # Downstream

    @property
    def gone(self) -> bool:
        return self.disconnected

    def start(self, status: int, headers: Headers, *, chunked: bool) -> bytes:
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self.started = True
        return b"".join(parts)

    def finish(self) -> None:
        # What uvicorn's own cycle does after the last body message.
        if self.response_complete:
            return
        self.response_complete = True
        # An idle connection keeps its last cycle: not its body.
        self._listener = self.inbound = None
        self._parts.clear()
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()

    def cut(self) -> None:
        self.keep_alive = False
        self.finish()


class EngineProtocol(HttpToolsProtocol):
    """A connection of a client. Use ``engine_protocol`` to make the class that uvicorn gets."""

    service: Service
    # The cycle whose turn it is, ours or uvicorn's; ``self.cycle`` is the one that came last.
    _serving: Any = None

    def on_message_begin(self) -> None:
        # As the base class, but for the scope: it is made for those who want one.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        engine_path = self._engine_path()
        if engine_path is None:
            url, headers, expect = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.expect_100_continue = url, expect
            self.headers = self.scope["headers"] = headers
            super().on_headers_complete()
            return
        cycle = EngineCycle(
            self, Inbound(*engine_path, self.headers), self.parser.should_keep_alive(),
            self.expect_100_continue,
        )  # fmt: skip
        before = cast(Any, self.cycle)
        self.cycle = cast(Any, cycle)
        if before is None or before.response_complete:
            self._serving = cycle
            cycle.take_turn()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _engine_path(self) -> tuple[str, bytes, Work] | None:
        """(path, target to send on, work) of a request that is ours."""
        if self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        target = self.url
        known = _BY_TARGET.get(target)
        if known is not None:
            return known[0], target, known[1]
        parsed = httptools.parse_url(target)
        path = urllib.parse.unquote(parsed.path.decode("ascii"))
        work = work_of_path(path)
        if work is None:
            return None
        return path, parsed.path + (b"?" + parsed.query if parsed.query else b""), work

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        if type(cycle) is not EngineCycle:
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.take_body(body)

    def on_message_complete(self) -> None:
        cycle: Any = self.cycle
        if type(cycle) is not EngineCycle:
            super().on_message_complete()
        elif not cycle.response_complete:
            cycle.end_body()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # The base class comes here with each request of its own, and with the next in its pipeline.
        self._serving = cycle
        if type(cycle) is EngineCycle:
            self.loop.call_soon(cycle.take_turn)
        else:
            super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        serving = self._serving
        if type(serving) is EngineCycle and serving.started and not serving.response_complete:
            # It would be taken for a part of the response that is on its way.
            self.transport.close()
        else:
            super().send_400_response(msg)

    def resume_writing(self) -> None:
        super().resume_writing()
        if type(self._serving) is EngineCycle:
            self._serving.caught_up()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # The base class has informed the request that came last; others may be ahead of it.
        for cycle in (self._serving, *(cycle for cycle, _ in self.pipeline)):
            if type(cycle) is EngineCycle:
                cycle.lost()
            elif cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._serving = None


def engine_protocol(service: Service) -> type[asyncio.Protocol]:
    """The protocol class for a server whose engine paths ``service`` serves."""
    return type("EngineProtocol", (EngineProtocol,), {"service": service})
