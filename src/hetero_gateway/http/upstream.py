"""The HTTP/1.1 client towards the instances: one keep-alive pool per instance.

A connection carries one exchange at a time. It is fed raw bytes, finds a response's head, body and
end (``http.response``, which judges them before anything else), and hands the raw bytes on: the
relay decides whether to pass them verbatim or decoded. It never half-closes, because vLLM treats
that as a disconnect.
"""

import asyncio
import errno
import os
import select
import socket
import ssl
import time
from collections import deque
from typing import Protocol, cast
from urllib.parse import urlsplit

from hetero_gateway.engines.vllm import PRIORITY_HEADER, RANK_HEADER
from hetero_gateway.files.link_local import is_link_local
from hetero_gateway.files.server_config import PoolConfig
from hetero_gateway.http.addresses import Addresses
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.headers import Withheld
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.hops import Hops
from hetero_gateway.http.response import (
    MOST_HEAD_BYTES,
    MOST_SHORT_HEAD_BYTES,
    WHOLE_BODY,
    Body,
    ChunkedBody,
    DecodedBody,
    HeadReader,
    MalformedResponse,
    ResponseHead,
    UnframedBody,
    body_of,
    parse_head,
    parse_short_head,
    whole_chunk_length,
)

_OUR_ERRORS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)
_OUR_RESOLVER = frozenset((socket.EAI_SYSTEM, socket.EAI_MEMORY))


class ResponseSink(Protocol):
    """Receives a response. Called from the event loop's callbacks; must not block or raise."""

    def on_head(self, head: ResponseHead, *, body_follows: bool) -> bool:
        """Returns whether to decode the body. ``body_follows``: ``on_data`` comes next."""

    def on_data(self, data: bytes) -> None:
        """Body bytes: decoded if requested, else as they came, including chunk framing."""

    def on_complete(self) -> None: ...

    def on_error(self, error: InstanceError) -> None: ...

    def on_bug(self, error: Exception) -> None:
        """The sink itself raised. The connection is closed; nothing more comes."""


class UpstreamConnection:
    """One TCP or TLS connection to an instance: an ``asyncio.Protocol``.

    It does not inherit from the base class: mypyc cannot compile subclasses of uncompiled classes.
    """

    def __init__(self, pool: "InstancePool") -> None:
        self._pool: InstancePool | _LeftPool = pool
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        self._reader: HeadReader | None = None  # if a head comes in pieces
        self._body: Body | None = None  # from the head on
        self._keep_alive = False
        self._paused = False
        self.idle_since_s = 0.0
        # A request that fails on a reused connection before any byte came may have met the instance
        # closing an idle connection.
        self.reused = False
        self.got_bytes = False
        self.look_ups = 0  # of its host, when it was connected
        self._arrivals = select.poll()

    # For the relay

    def send(self, request: bytes, sink: ResponseSink, rest: bytes = b"") -> None:
        """Send a whole request; its response goes to ``sink``.

        ``rest``: a long body, which is not copied after its head.
        """
        self._sink = sink
        self._reader = self._body = None
        self.got_bytes = False
        assert self._transport is not None
        self._transport.write(request)
        if rest:
            self._transport.write(rest)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once; the sink is not called again. vLLM aborts the request within 40 ms."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def address(self) -> str:
        """The address of the other end; "": unknown."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    def leave_pool(self) -> None:
        """Close it as soon as nothing is under way on it."""
        if isinstance(self._pool, InstancePool):
            self._pool = _LeftPool(self._pool)
        if self._sink is None:
            self.abort()

    @property
    def stale(self) -> bool:
        """It was idle before and has answered nothing since: it may have been closed meanwhile."""
        return self.reused and not self.got_bytes

    @property
    def passed_whole_chunks(self) -> bool:
        """Whether what the sink has received undecoded of a chunked response ends with a chunk."""
        body = self._body
        return isinstance(body, ChunkedBody) and body.whole

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def __repr__(self) -> str:
        if not self.usable:
            state = "closed"
        elif self._sink is None:
            state = "idle"
        else:
            state = "receiving" if self.got_bytes else "waiting for an answer"
        return f"<UpstreamConnection {self._pool.host}:{self._pool.port} {state}>"

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        descriptor = transport.get_extra_info("socket").fileno()
        self._arrivals.register(descriptor, select.POLLIN)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            # Unexpected bytes: whatever they are, this connection is not to be trusted.
            self.abort()
            return
        body = self._body
        if (
            body is not None
            and body.at_chunk
            and whole_chunk_length(data[:5]) == len(data)
            and data[-1] == 10
            and data[-2] == 13
        ):
            # One whole chunk: the usual read of a stream.
            try:
                sink.on_data(data)
            except Exception as error:
                self._broke(sink, error)
            return
        head = None
        try:
            if body is None:
                self.got_bytes = True
                end = data.find(b"\r\n\r\n") + 4
                if self._reader is None and 4 <= end <= MOST_HEAD_BYTES:
                    short = end <= MOST_SHORT_HEAD_BYTES
                    head = parse_short_head(data[:end]) if short else parse_head(data[:end])
                if head is not None and head.status >= 200:
                    # A head nearly always comes whole, and a short answer with it.
                    rest = data[end:]
                else:
                    if self._reader is None:
                        self._reader = HeadReader()
                    found = self._reader.feed(data)
                    if found is None:
                        return
                    head, rest = found
                self._keep_alive = head.keep_alive
                if head.content_length == len(rest) and not head.chunked:
                    body, data = WHOLE_BODY, rest
                else:
                    body = body_of(head)
                    data = body.feed(rest)
                self._body = body
            else:
                data = body.feed(data)
        except MalformedResponse as error:
            message = f"the response is not valid HTTP/1.1: {error}"
            self._fail(InstanceError(Failure.PROTOCOL, message))
            return
        try:
            if (
                head is not None
                and sink.on_head(head, body_follows=bool(data))
                and isinstance(body, ChunkedBody)
            ):
                self._body = decoded = DecodedBody(body)
                data = decoded.decode(data)
            if data and self._sink is sink:
                sink.on_data(data)
            if body.ended and self._sink is sink:
                self._sink = None
                if self._paused:
                    # Its client is slow, which must not affect the next one.
                    self.resume_reading()
                if self._keep_alive and not body.extra:
                    self._pool.release(self)
                elif self._transport is not None:
                    self._transport.close()
                sink.on_complete()
        except Exception as error:
            self._broke(sink, error)

    def _broke(self, sink: ResponseSink, error: Exception) -> None:
        # The boundary of a request: a bug in its relay must not end up in the event loop.
        self.abort()
        sink.on_bug(error)

    def pause_writing(self) -> None:
        """What is sent waits in the transport."""

    def resume_writing(self) -> None:
        """As ``pause_writing``."""

    def eof_received(self) -> None:
        """Let the transport close: ``connection_lost`` comes next."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        sink = self._sink
        if sink is None:
            return
        if exc is None and isinstance(self._body, UnframedBody):
            self._sink = None
            sink.on_complete()
            return
        when = "before the response was complete" if self.got_bytes else "without an answer"
        self._fail(InstanceError(Failure.RESET, f"the instance closed the connection {when}"))

    def _fail(self, error: InstanceError) -> None:
        sink, self._sink = self._sink, None
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.on_error(error)


def is_our_own(error: OSError | UnicodeError) -> bool:
    """Whether connecting failed for lack of a resource of ours, not because of the instance.

    The C library's resolver does not report a missing descriptor: it finds no name, or asks to try
    again. And uvloop combines the errors of several addresses into one without a number.
    """
    if isinstance(error, socket.gaierror):
        return error.errno in _OUR_RESOLVER or _has_no_descriptor()
    if not isinstance(error, OSError):
        return False
    return error.errno in _OUR_ERRORS or (error.errno is None and _has_no_descriptor())


# OpenSSL's terms for bytes that are not TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


def _what(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return f"no host name: {error}"
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return "it speaks plain HTTP, and its address says https"
    if isinstance(error, socket.gaierror | ssl.SSLError) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)  # asyncio's own text repeats the address


def _has_no_descriptor() -> bool:
    try:
        socket.socket().close()
    except OSError as error:
        return error.errno in _OUR_ERRORS
    return False


class _LeftPool:
    """Stands in for the pool of a connection that is not reused."""

    def __init__(self, pool: "InstancePool") -> None:
        self.host, self.port, self.forget = pool.host, pool.port, pool.forget

    def release(self, connection: UpstreamConnection) -> None:
        connection.abort()


class InstancePool:
    """The connections to one instance.

    Args:
        base_url: http or https, possibly with a path prefix.
        config: limits and idle expiry.
        connect_timeout_s: for TCP and TLS together.
        ssl_context: for https.
    """

    def __init__(
        self,
        base_url: str,
        config: PoolConfig,
        connect_timeout_s: float,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None  # the configuration has checked it
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path_prefix = parts.path.rstrip("/").encode()
        self.host_header = parts.netloc.encode()
        # With the other fields of a request's head that are the instance's own.
        self.own_fields = b"host: %b\r\n" % self.host_header
        self._ssl = ssl_context if parts.scheme == "https" else None
        self._config = config
        self._idle_expiry_s = config.idle_expiry_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._connecting = 0
        self._closed = False
        self.allows_link_local = False
        self.addresses = Addresses(self.host, self.port)

    def choose_rank(self, rank: int) -> None:
        """Send requests to this one of the engines behind the address."""
        self.own_fields += b"%b: %d\r\n" % (RANK_HEADER, rank)

    def set_limits(self, config: PoolConfig, connect_timeout_s: float) -> None:
        """Apply other limits from now on; open connections stay."""
        self._config = config
        self._connect_timeout_s = connect_timeout_s

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def take_idle(self) -> UpstreamConnection | None:
        """The most recently used idle connection, or None."""
        now_s = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            transport = connection._transport
            if (
                now_s - connection.idle_since_s < self._idle_expiry_s
                and transport is not None
                and not transport.is_closing()
                # No byte and no end is waiting to be read by the event loop. Bytes after an answer
                # would be mistaken for the next one's.
                and not connection._arrivals.poll(0)
            ):
                connection.reused = True
                return connection
            connection.abort()
        return None

    def __repr__(self) -> str:
        idle, count = len(self._idle), len(self._open)
        return f"<InstancePool {self.host}:{self.port}, {count} open, {idle} of them idle>"

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises InstanceError: CONNECT, LOCAL, or POOL at the limit."""
        if len(self._open) + self._connecting >= self._config.max_connections:
            raise InstanceError(
                Failure.POOL, f"{self._config.max_connections} connections are open"
            )
        loop = asyncio.get_running_loop()
        self._connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, protocol = await loop.create_connection(
                    lambda: cast(asyncio.Protocol, UpstreamConnection(self)),
                    self.host,
                    self.port,
                    ssl=self._ssl,
                    server_hostname=self.host if self._ssl else None,
                )
        except TimeoutError as error:
            raise InstanceError(
                Failure.CONNECT, f"no connection within {self._connect_timeout_s:g} s"
            ) from error
        except (OSError, UnicodeError) as error:
            failure = Failure.LOCAL if is_our_own(error) else Failure.CONNECT
            refused = isinstance(error, ConnectionRefusedError)
            raise InstanceError(failure, _what(error), refused=refused) from error
        finally:
            self._connecting -= 1
        connection = cast(UpstreamConnection, protocol)
        self._open.add(connection)
        connection.look_ups = self.addresses.look_ups
        if not self.allows_link_local:
            self._check_peer(connection)
        return connection

    def _check_peer(self, connection: UpstreamConnection) -> None:
        """Refuse to send to a forbidden address behind a name. Raises InstanceError."""
        address = connection.address
        if is_link_local(address):
            connection.abort()
            raise InstanceError(
                Failure.CONNECT, f"{self.host} is {address}: link-local addresses are not allowed"
            )

    def release(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose exchange is over."""
        if self._closed or len(self._idle) >= self._config.max_idle:
            connection.abort()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)

    def close_expired(self) -> None:
        """Close connections that were idle for too long; the oldest come first."""
        now_s = time.monotonic()
        while self._idle and (
            not self._idle[0].usable
            or now_s - self._idle[0].idle_since_s >= self._config.idle_expiry_s
        ):
            self._idle.popleft().abort()

    def leave_old_addresses(self) -> None:
        """Stop reusing connections to addresses the host's name no longer resolves to."""
        has_left = self.addresses.has_left
        for connection in [c for c in self._open if has_left(c.address, c.look_ups)]:
            if connection in self._idle:
                self._idle.remove(connection)
            connection.leave_pool()

    def close(self) -> None:
        """Close idle connections now, and busy ones when they are released."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


# The heads of forwarded requests: which of a client's fields are passed on.

# A service elsewhere gets what it needs to read the body, and nothing else of the client.
_TO_OUTSIDE = frozenset((b"accept", b"content-type"))


class Target(Protocol):
    """An instance, or a service elsewhere. ``api_key``: sent to it; None: none is required."""

    @property
    def pool(self) -> InstancePool: ...

    @property
    def api_key(self) -> str | None: ...


def head_to_instance(
    inbound: Inbound,
    instance: Target,
    hops: Hops,
    withheld: Withheld,
    size_bytes: int,
    traceparent: bytes | None,
    priority: int | None,
) -> bytes:
    """The head of a request to an engine: all end-to-end fields except the gateway's own.

    Args:
        hops: of this gateway.
        withheld: the client's fields that the instance does not get.
        size_bytes: of the body.
        traceparent: replaces the client's; None: that is passed on.
        priority: the engine's scheduling priority; None: none.
    """
    pool = instance.pool
    parts = [
        inbound.method, b" ", pool.path_prefix, inbound.target,
        b" HTTP/1.1\r\n", pool.own_fields,
        b"x-request-id: ", inbound.request_id,
        b"\r\ncontent-length: %d\r\n" % size_bytes,
        hops.field_behind(inbound.came_through) if inbound.came_through else hops.field,
    ]  # fmt: skip
    headers = inbound.headers
    if inbound.dropped:
        headers = [pair for pair in headers if pair[0] not in inbound.dropped]
    if traceparent is not None:
        headers = [pair for pair in headers if pair[0] != b"traceparent"]
        parts += (b"traceparent: ", traceparent, b"\r\n")
    if priority is not None:
        headers = [pair for pair in headers if pair[0] != PRIORITY_HEADER]
        parts += (PRIORITY_HEADER, b": %d\r\n" % priority)
    for name, value in headers:
        if not withheld[name]:
            parts += (name, b": ", value, b"\r\n")
    if instance.api_key is not None:
        parts.append(_authorization(instance.api_key))
    parts.append(b"\r\n")
    return b"".join(parts)


def head_to_outside(inbound: Inbound, outside: Target, hops: Hops) -> bytes:
    """The head of a request to a service elsewhere, which may be a gateway as well."""
    parts = [
        inbound.method, b" ", outside.pool.path_prefix, inbound.target,
        b" HTTP/1.1\r\nhost: ", outside.pool.host_header,
        b"\r\ncontent-length: %d\r\n" % len(inbound.body),
        hops.field_behind(inbound.came_through) if inbound.came_through else hops.field,
    ]  # fmt: skip
    for name, value in inbound.headers:
        if name in _TO_OUTSIDE:
            parts += (name, b": ", value, b"\r\n")
    if outside.api_key is not None:
        parts.append(_authorization(outside.api_key))
    parts.append(b"\r\n")
    return b"".join(parts)


def _authorization(api_key: str) -> bytes:
    return b"authorization: Bearer %b\r\n" % api_key.encode()
