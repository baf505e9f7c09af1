"""A client's connection: uvicorn's HTTP protocol, with our parsing and our engine paths.

A POST on an engine path uses no ASGI: no scope, no cycle of uvicorn's, no task. The body is
gathered and handed with an ``Inbound`` to the service; its answer is written to the transport
directly. Every other request gets uvicorn's cycle and the ASGI application. All of them are parsed
here (``heads``, ``chunks``), by one grammar.

``EngineCycle`` stands where uvicorn keeps its RequestResponseCycle (``self.cycle``), so that
uvicorn's code for shutdown and flow control keeps working. tests/http/test_protocol.py pins what
this relies on, and fails loudly when uvicorn changes.

A connection's phases (``clients.Phase``), events down; "–": impossible or without effect:

    event             IDLE                HEAD                BODY                SERVING
    ----------------  ------------------  ------------------  ------------------  ----------------
    bytes             HEAD, BODY or       the same            kept, or dropped    kept, 64 KB and
                      SERVING                                 once answered       a read at most
    head refused      –                   4xx: CLOSING        –                   –
    body complete     –                   –                   SERVING; IDLE once  –
                                                              answered
    response's end    –                   –                   the rest is dropped HEAD if there are
                                                                                  bytes, else IDLE
    too slow          closed              408: CLOSING        408: CLOSING        –
    server ends       closed after a      closed after a      the last request; if its head went
                      last call           last call           without saying so, the next one
    reads nothing     closed              closed              closed              closed
    connection lost   over                over                over                over

What a client sends after a request waits, unread, until that is answered, and begins in a callback
of its own: a client may pipeline more requests than the stack is deep. CLOSING drops input until
the client closes its side or ``clients.LINGER_S`` have passed.
"""

import asyncio
import http
import re
import urllib.parse
from typing import Any, Protocol, cast

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hetero_gateway.engines.vllm import REALTIME, WORK_BY_PATH
from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import SMALL_BYTES, BodyBuffer, BodyLimits
from hetero_gateway.http.chunks import ChunkDecoder
from hetero_gateway.http.clients import Phase, Watch, Watched
from hetero_gateway.http.downstream import Downstream, Flow, Listener
from hetero_gateway.http.errors import error_body
from hetero_gateway.http.headers import fields_in
from hetero_gateway.http.heads import Inbound, RequestHead, head_size, read_head

_REALTIME = REALTIME.encode()
_IDLE, _HEAD, _BODY, _SERVING, _CLOSING = Phase

_LINE_ENDS = re.compile(rb"(?:\r\n)+")
_BY_TARGET = {path.encode(): (path, work) for path, work in WORK_BY_PATH.items()}
# How long a connection may still bring a request once the server is shutting down: a new one, and
# one that has been served, whose client may be about to send the next.
LAST_CALL_S = 0.5
NEXT_CALL_S = 2.0
# Limit of input after a request: the rest is left to the kernel.
_MOST_KEPT_BYTES = 65536
# Limit of an unwanted body that is read: beyond it, the connection is given up.
_MOST_DROPPED_BYTES = 16 * 2**20


STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in http.HTTPStatus
}


class Service(Protocol):
    """Serves engine paths."""

    @property
    def body_limits(self) -> BodyLimits: ...

    def open(self, inbound: Inbound, downstream: Downstream) -> Listener:
        """Take a request whose head is here; it may be answered at once."""


class _NoEvent:
    """Stands in where uvicorn would wake a coroutine."""

    def set(self) -> None:
        pass


class EngineCycle:
    """One request on an engine path and its response: the ``Downstream`` of its relay."""

    __slots__ = (
        "_body",
        "_connection",
        "disconnected",
        "flow",
        "inbound",
        "keep_alive",
        "listener",
        "passes_framing",
        "response_complete",
        "started",
        "waits_for_100",
        "write",
    )

    message_event = _NoEvent()  # of uvicorn's

    def __init__(self, connection: "EngineProtocol", inbound: Inbound, head: RequestHead) -> None:
        self._connection = connection
        self.waits_for_100 = head.expects_continue
        self.listener: Listener | None = None
        self._body: BodyBuffer | None = None  # if it comes in pieces
        self.inbound: Inbound | None = inbound  # until it is over
        self.keep_alive = head.keep_alive
        self.passes_framing = not head.http_10
        self.flow: Flow = connection.flow
        # A closed transport discards what is written in the moment before the relay learns of it.
        self.write = connection.transport.write
        self.started = False
        self.disconnected = False
        self.response_complete = False

    def __repr__(self) -> str:
        over = self.response_complete or self.disconnected
        return f"<EngineCycle {self.inbound!r} {'over' if over else self._connection.phase.value}>"

    # The request

    def begin(self, *, body_is_here: bool) -> None:
        assert self.inbound is not None
        listener = self.listener = self._connection.service.open(self.inbound, self)
        if listener.over:
            self.listener = None
        elif self.waits_for_100 and not body_is_here:
            self.waits_for_100 = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def take_body(self, data: bytes) -> None:
        self.waits_for_100 = False
        if self._body is None:
            self._body = BodyBuffer(self._connection.service.body_limits)
        try:
            self._body.add(data)
        except Refusal as refusal:
            if self.listener is not None:
                self.listener.refuse(refusal)

    def end_body(self) -> None:
        self.waits_for_100 = False  # a request that expects 100 may have an empty body
        body = self._body
        whole = b"" if body is None else body.take()
        if self.listener is not None:
            assert self.inbound is not None
            if body is not None and body.holds:
                self.inbound.buffer = body
            self.listener.begin(whole)

    def caught_up(self) -> None:
        if self.listener is not None:
            self.listener.caught_up()

    def lost(self) -> None:
        """The connection is gone, or given up."""
        self.disconnected = True
        if self._body is not None:
            self._body.release()
        listener, self.listener, self.inbound = self.listener, None, None
        if listener is not None and not self.response_complete:
            listener.client_gone()

    # Downstream

    @property
    def gone(self) -> bool:
        return self.disconnected

    def start(self, status: int, fields: bytes, *, chunked: bool) -> bytes:
        parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, fields]
        if chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        if self.waits_for_100:
            # Whether its body will come is up to the client (RFC 9110, 10.1.1): what comes next
            # could be that or a request.
            self.keep_alive = False
        if not self.passes_framing and self.keep_alive:
            self.keep_alive = any(name == b"content-length" for name, _ in fields_in(fields))
            if self.keep_alive:
                parts.append(b"connection: keep-alive\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self.started = True
        return b"".join(parts)

    def finish(self) -> None:
        if self.response_complete:
            return
        self.response_complete = True
        # An idle connection keeps its last cycle, but not its body.
        self.listener = self.inbound = None
        if self._body is not None:
            self._body.release()
        if not self.keep_alive:
            self._connection.close()
        self._connection.on_response_complete()

    def cut(self) -> None:
        self.keep_alive = False
        self.finish()


def _has_begun(cycle: Any) -> bool:
    """Whether the head of its response was sent, and so cannot say that it is the last one."""
    return bool(cycle.started if type(cycle) is EngineCycle else cycle.response_started)


class _CycleTransport:
    """The transport of uvicorn's cycles. Closing it is up to us: not under a client that writes."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, connection: "EngineProtocol") -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close


class EngineProtocol(HttpToolsProtocol, Watched):
    """A client's connection. Use ``engine_protocol`` to make the class for uvicorn."""

    # Slots: uvicorn's attributes just fit into what instances can share the names of; one more
    # would cost every connection 1.4 KB.
    __slots__ = (
        "_buffer",
        "_chunks",
        "_left",
        "_seen",
        "body_bytes",
        "phase",
        "turn",
    )

    service: Service
    watch: Watch

    phase: Phase
    turn: int
    body_bytes: int

    _buffer: bytearray | None  # a part of a head, or input after the request
    _seen: int  # bytes of that part which have been looked at
    _chunks: ChunkDecoder | None  # of the body, if it comes in chunks
    _left: int  # of the body, in bytes, if its length is known

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn's is never fed.
        self.parser = None  # type: ignore[assignment]
        self._buffer = self._chunks = None
        self._seen = self._left = self.body_bytes = self.turn = 0
        self.phase = _IDLE
        if not self.watch.add(self):
            if self.watch.may_answer:
                self._refuse(_TOO_MANY)
            else:
                self.watch.refused[_TOO_MANY.status] += 1
                transport.abort()
        elif self.watch.ending:
            self._call_last()

    def data_received(self, data: bytes) -> None:
        phase = self.phase
        if phase is _IDLE:
            self._read(data)
        elif phase is _BODY and self._buffer is None:
            self._take_body(data)
        elif phase is not _CLOSING:
            self._keep(data)
            if phase is _HEAD:
                self._read_kept()

    # Heads

    def _read(self, data: bytes) -> None:
        """Begin the request at the start of ``data``."""
        if data.startswith(b"\r\n"):
            # Some clients send an empty line after a body (RFC 9112, 2.2).
            data = _LINE_ENDS.sub(b"", data, count=1)
            if not data:
                return
        try:
            size = head_size(data)
            if size:
                self._open(read_head(data[:size]), data[size:])
                return
        except Refusal as refusal:
            self._refuse(refusal, has_body=not data.startswith(b"HEAD "))
            return
        self._buffer = bytearray(data)
        self._seen = len(data)
        self.phase = _HEAD
        self.turn += 1

    def _read_kept(self) -> None:
        """Continue with a kept part of a head, or a whole one."""
        buffer = self._buffer
        assert buffer is not None
        if not self._seen or buffer.startswith(b"\r\n"):
            self.phase, self._buffer = _IDLE, None
            self._read(bytes(buffer))
            return
        try:
            size = head_size(buffer, self._seen)
        except Refusal as refusal:
            self._refuse(refusal, has_body=not buffer.startswith(b"HEAD "))
            return
        self._seen = len(buffer)
        if size:
            self.phase, self._buffer = _IDLE, None
            self._read(bytes(buffer))

    def _open(self, head: RequestHead, rest: bytes) -> None:
        length = head.length
        self._chunks = ChunkDecoder() if length is None else None
        self._left = length or 0
        self._seen = self.body_bytes = 0
        self.turn += 1
        self.phase = _SERVING if length == 0 else _BODY
        path = head.target.partition(b"?")[0]
        engine_path = _BY_TARGET.get(path) if head.method == b"POST" else None
        if engine_path is None:
            if path == _REALTIME and _wants_websocket(head):
                self._upgrade(head, rest)
                return
            self.cycle = cycle = self._uvicorn_cycle(head, path)
            self._start_asgi_task(cycle, self.app)
        else:
            path_text, work = engine_path
            inbound = Inbound(path_text, head.target, work, head.headers, head.by_name)
            inbound.dropped = head.options
            self.cycle: Any = EngineCycle(self, inbound, head)
            ours: EngineCycle = self.cycle
            if self.watch.ending:
                ours.keep_alive = False
            ours.begin(body_is_here=bool(rest))
        if length == 0:
            self._end_body(rest)
        elif rest and self.phase is _BODY:
            self._take_body(rest)

    def _upgrade(self, head: RequestHead, rest: bytes) -> None:
        """Turn the connection into a WebSocket's, by uvicorn's protocol for them."""
        self.watch.discard(self)
        self.connections.discard(self)
        self.phase = _CLOSING
        parts = [b"GET ", head.target, b" HTTP/1.1\r\n"]
        for name, value in head.headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n")
        # This imports `websockets`, 1 MB.
        from hetero_gateway.http.websocket import ClientWebSocket

        websocket = ClientWebSocket(
            config=self.config, server_state=self.server_state, app_state=self.app_state
        )
        websocket.connection_made(self.transport)
        websocket.watched_by(self.watch)
        self.transport.set_protocol(websocket)
        websocket.data_received(b"".join(parts))
        if rest:
            websocket.data_received(rest)

    def _uvicorn_cycle(self, head: RequestHead, path: bytes) -> RequestResponseCycle:
        text = path.decode("ascii")
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.0" if head.http_10 else "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": head.headers,
            "state": self.app_state.copy(),
            "method": head.method.decode("ascii"),
            "path": urllib.parse.unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": head.target[len(path) + 1 :],
        }
        return RequestResponseCycle(
            scope=cast(Any, scope),
            transport=cast(Any, _CycleTransport(self)),
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=head.expects_continue,
            keep_alive=head.keep_alive and not head.http_10 and not self.watch.ending,
            on_response=self.on_response_complete,
        )

    # Bodies

    def _take_body(self, data: bytes) -> None:
        cycle: Any = self.cycle
        size = len(data)
        if size == self._left and not self.body_bytes and size <= SMALL_BYTES:
            # In one short piece, as nearly all are. (In chunks, nothing is left.)
            if type(cycle) is EngineCycle and not cycle.response_complete:
                self._left, self.body_bytes = 0, size
                self.phase = _SERVING
                cycle.waits_for_100 = False
                if cycle.listener is not None:
                    cycle.listener.begin(data)
                return
        chunks = self._chunks
        if chunks is not None:
            self.body_bytes += len(data)
            try:
                data, rest = chunks.feed(data)
            except Refusal as refusal:
                self._abandon(refusal)
                return
            self.body_bytes -= len(rest)
            whole = chunks.complete
        else:
            rest = data[self._left :]
            if rest:
                data = data[: self._left]
            self.body_bytes += len(data)
            self._left -= len(data)
            whole = not self._left
        if data and not cycle.response_complete:
            if type(cycle) is EngineCycle:
                cycle.take_body(data)
            else:
                cycle.body += data
                if len(cycle.body) > HIGH_WATER_LIMIT:
                    self.flow.pause_reading()
                cycle.message_event.set()
        if whole:
            self._end_body(rest)
        elif cycle.response_complete and self.body_bytes > _MOST_DROPPED_BYTES:
            self.close()
        elif rest:
            self._keep(rest)
            self.flow.pause_reading()
            self.loop.call_soon(self._go_on)

    def _end_body(self, rest: bytes) -> None:
        self._chunks = None
        if self.phase is _CLOSING:
            return
        self.phase = _SERVING
        cycle: Any = self.cycle
        if rest and cycle.keep_alive:
            self._keep(rest)
        if cycle.response_complete:
            self._await_request()
        elif type(cycle) is EngineCycle:
            cycle.end_body()
        else:
            cycle.more_body = False
            cycle.message_event.set()

    def _keep(self, data: bytes) -> None:
        if self._buffer is None:
            self._buffer = bytearray(data)
        else:
            self._buffer += data
        if self.phase is _SERVING and len(self._buffer) > _MOST_KEPT_BYTES:
            self.flow.pause_reading()

    def _go_on(self) -> None:
        """Continue with kept input."""
        buffer = self._buffer
        if buffer is None or self.transport.is_closing():
            return
        if self.phase is _HEAD:
            self._read_kept()
        elif self.phase is _BODY:
            self._buffer = None
            self.flow.resume_reading()
            self._take_body(bytes(buffer))

    # Ends

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.phase is _SERVING:
            self._await_request()
        elif self.phase is _BODY:
            self.flow.resume_reading()
            if self._left > _MOST_DROPPED_BYTES:
                self.close()

    def _await_request(self) -> None:
        if self.transport.is_closing():
            return
        self.turn += 1
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.watch.ending:
            self._call_last()
        if self._buffer is None:
            self.phase = _IDLE
        else:
            self.phase = _HEAD
            self.loop.call_soon(self._go_on)

    def close(self) -> None:
        """Close the connection once what was written is sent; not under a client that writes."""
        if self.phase is _CLOSING:
            return  # it closes as soon as its client has read the answer
        if self.phase is not _BODY or not self.transport.can_write_eof():
            self.transport.close()
        elif not self.transport.is_closing():
            self._linger()

    def _linger(self) -> None:
        self.phase = _CLOSING
        self.turn += 1
        self._buffer = self._chunks = None
        self.flow.resume_reading()
        self.transport.write_eof()

    def _refuse(self, refusal: Refusal, *, has_body: bool = True) -> None:
        """Answer what is not a request, and nothing after it."""
        self.watch.refused[refusal.status] += 1
        body = error_body(refusal)
        parts = [
            STATUS_LINES[refusal.status],
            b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
        ]
        if refusal.retry_after_s is not None:
            parts.append(b"retry-after: %d\r\n" % refusal.retry_after_s)
        parts.append(b"connection: close\r\n\r\n")
        if has_body:
            parts.append(body)
        self.transport.write(b"".join(parts))
        if self.transport.can_write_eof():
            self._linger()
        else:
            self.transport.close()

    def _abandon(self, refusal: Refusal) -> None:
        """Give up a request whose body cannot be read to its end."""
        cycle: Any = self.cycle
        if cycle.response_complete:
            self.close()
            return
        if type(cycle) is EngineCycle:
            started = cycle.started
            cycle.lost()
        else:
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if started:
            self.transport.abort()
        else:
            self._refuse(refusal)

    # For its watch

    @property
    def reading_paused(self) -> bool:
        return self.flow.read_paused

    def expire(self) -> None:
        if self.phase is _HEAD:
            self._refuse(_LATE)
        elif self.phase is _BODY:
            self._abandon(_LATE)
        elif self.phase is _IDLE:
            self.transport.close()
        else:
            self.transport.abort()

    # For the server

    def shutdown(self) -> None:
        """The server is shutting down: requests under way, and possibly on their way here, are
        answered."""
        self.watch.ending = True
        cycle: Any = self.cycle
        if self.phase is _HEAD or self.phase is _IDLE:
            # A request may have been sent before the client could know. Its answer says that it is
            # the last one.
            self._call_last()
        elif cycle is None or cycle.response_complete or not _has_begun(cycle):
            super().shutdown()

    def _call_last(self) -> None:
        last_s = LAST_CALL_S if self.cycle is None else NEXT_CALL_S
        self.loop.call_later(last_s, self._close_unused, self.turn)

    def _close_unused(self, turn: int) -> None:
        if self.turn == turn:
            self.transport.close()

    # For the transport

    def resume_writing(self) -> None:
        super().resume_writing()
        cycle: Any = self.cycle
        if type(cycle) is EngineCycle:
            cycle.caught_up()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.watch.discard(self)
        self._buffer = self._chunks = None
        self.phase = _CLOSING
        cycle: Any = self.cycle
        if type(cycle) is EngineCycle:
            cycle.lost()


def _wants_websocket(head: RequestHead) -> bool:
    return (
        head.method == b"GET"
        and not head.http_10
        and head.length == 0
        and head.by_name.get(b"upgrade", b"").lower() == b"websocket"
    )


_LATE = Refusal(408, "request_timeout", "The request did not come in time.")
_TOO_MANY = Refusal(
    503,
    "too_many_connections",
    "The gateway already has as many connections as it may.",
    kind="server_error",
    retry_after_s=2,
)


def engine_protocol(service: Service, watch: Watch) -> type[asyncio.Protocol]:
    """The protocol class of a server whose engine paths ``service`` serves."""
    return type("EngineProtocol", (EngineProtocol,), {"service": service, "watch": watch})
