"""One request on an engine path and its response, as its connection (``protocol``) has them."""

from __future__ import annotations

import asyncio
import http
from typing import Protocol

from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import BodyBuffer, BodyLimits
from hetero_gateway.http.clients import Phase
from hetero_gateway.http.downstream import Downstream, Flow, Listener
from hetero_gateway.http.headers import Headers
from hetero_gateway.http.heads import RequestHead
from hetero_gateway.http.inbound import Inbound

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in http.HTTPStatus
}


class Service(Protocol):
    """What engine paths are served by."""

    @property
    def body_limits(self) -> BodyLimits: ...

    def open(self, inbound: Inbound, downstream: Downstream) -> Listener:
        """Take a request whose head is here; it may be answered at once."""


class Connection(Protocol):
    """What a cycle needs of the connection that it is of."""

    service: Service
    phase: Phase

    @property
    def transport(self) -> asyncio.Transport: ...

    @property
    def flow(self) -> Flow: ...

    def close(self) -> None:
        """Close it once what was written is sent."""

    def on_response_complete(self) -> None: ...


class _NoEvent:
    """Where uvicorn wakes a coroutine that is not there."""

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

    def __init__(self, connection: Connection, inbound: Inbound, head: RequestHead) -> None:
        self._connection = connection
        self.waits_for_100 = head.expects_continue
        self.listener: Listener | None = None
        self._body: BodyBuffer | None = None  # where it comes in pieces
        self.inbound: Inbound | None = inbound  # until it is over
        self.keep_alive = head.keep_alive
        self.passes_framing = not head.http_10
        self.flow: Flow = connection.flow
        # A closed transport swallows what is written in the moment before the relay hears of it.
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
        self.waits_for_100 = False  # the body of one that announced it may be empty
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
        listener, self.listener = self.listener, None
        if listener is not None and not self.response_complete:
            listener.client_gone()

    # Downstream

    @property
    def gone(self) -> bool:
        return self.disconnected

    def start(self, status: int, headers: Headers, *, chunked: bool) -> bytes:
        parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        if self.waits_for_100:
            # Whether its body will come is the client's to decide (RFC 9110, 10.1.1): what comes
            # next could be that or a request.
            self.keep_alive = False
        if not self.passes_framing and self.keep_alive:
            self.keep_alive = any(name == b"content-length" for name, _ in headers)
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
        # An idle connection keeps its last cycle: not its body.
        self.listener = self.inbound = None
        if self._body is not None:
            self._body.release()
        if not self.keep_alive:
            self._connection.close()
        self._connection.on_response_complete()

    def cut(self) -> None:
        self.keep_alive = False
        self.finish()
