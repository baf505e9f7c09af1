"""The same bytes read by the gateway's own classes, in any pieces, and by others' parsers.

Transports, loops and services are plain objects, so that a million messages take minutes.
"""

import os
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import h11
import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.http.chunks import ChunkDecoder
from hetero_gateway.http.downstream import Downstream
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.headers import Headers
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.protocol import EngineProtocol
from hetero_gateway.http.response import ResponseHead
from hetero_gateway.http.upstream import InstancePool, UpstreamConnection

_MOST_BODY_BYTES = 1 << 20


def chunks_by_us(pieces: list[bytes]) -> tuple[bytes, bytes] | None:
    """(body, what is behind it); None: it is refused or not complete."""
    body, parts = ChunkDecoder(), list[bytes]()
    for number, piece in enumerate(pieces):
        rest = piece
        while rest and not body.complete:
            try:
                part, rest = body.feed(rest)
            except Refusal:
                return None
            parts.append(part)
        if body.complete:
            return b"".join(parts), rest + b"".join(pieces[number + 1 :])
    return None


class Read(NamedTuple):
    """A request that is complete. ``absolute``: its target named a host."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes
    absolute: bool = False


def _plain(target: bytes) -> bytes:
    """An empty query is none: ASGI's scope does not tell them apart."""
    return target.removesuffix(b"?")


class _Loop:
    """Callbacks, in order."""

    def __init__(self) -> None:
        self.soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        self.soon.append((callback, args))

    def run(self) -> None:
        while self.soon:
            callback, args = self.soon.popleft()
            callback(*args)


class _Transport:
    """Takes what is written; ``null`` is the descriptor of something that never says anything."""

    def __init__(self, null: int) -> None:
        self._null = null
        self.closed = self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" and self._null >= 0 else default

    def fileno(self) -> int:
        return self._null

    def write(self, data: bytes) -> None:
        pass

    def write_eof(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class _Watch:
    """Looks after nobody."""

    ending = False
    may_answer = True

    def __init__(self) -> None:
        self.refused: Counter[int] = Counter()

    def add(self, connection: Any) -> bool:
        return True

    def discard(self, connection: Any) -> None:
        pass


class _Listener:
    """Answers a request as soon as it is whole."""

    over = False

    def __init__(self, read: list[Read], inbound: Inbound, downstream: Downstream) -> None:
        self._read, self._inbound, self._downstream = read, inbound, downstream

    def begin(self, body: bytes) -> None:
        inbound = self._inbound
        self._read.append(Read(inbound.method, _plain(inbound.target), inbound.headers, body))
        self._downstream.start(200, b"content-length: 0\r\n", chunked=False)
        self._downstream.finish()

    def refuse(self, refusal: Refusal) -> None:
        raise AssertionError(refusal)

    def caught_up(self) -> None:
        pass

    def client_gone(self) -> None:
        pass


class _Service:
    def __init__(self) -> None:
        self.read: list[Read] = []
        self.body_limits = BodyLimits(_MOST_BODY_BYTES, _MOST_BODY_BYTES)

    def open(self, inbound: Inbound, downstream: Downstream) -> _Listener:
        return _Listener(self.read, inbound, downstream)


class _Client(EngineProtocol):
    """A connection whose other paths are answered as soon as their body is there, too."""

    __slots__ = ("asgi", "upgraded")

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.asgi = cycle

    def _upgrade(self, head: Any, rest: bytes) -> None:
        self.upgraded = True
        self.transport.close()

    def answer(self) -> None:
        cycle, service = self.asgi, cast(Any, self.service)
        if cycle is None or cycle.more_body:
            return
        self.asgi = None
        scope = cycle.scope
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        method = scope["method"].encode()
        service.read.append(Read(method, target, scope["headers"], bytes(cycle.body)))
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.close()
        self.on_response_complete()


def _config() -> Config:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    config = Config(app, log_config=None, interface="asgi3", loop="none", lifespan="off")
    config.load()
    return config


_CONFIG = _config()
_STATE = ServerState()
_BARE: Any = {}
# Forms of a target that we rewrite.
_SCHEMES = (b"http://", b"https://")


def requests_by_us(pieces: list[bytes]) -> list[Read]:
    """The requests that a connection reads to their end, of which each is answered at once."""
    loop, service, transport = _Loop(), _Service(), _Transport(-1)
    if "class" not in _BARE:
        _BARE["class"] = type("Client", (_Client,), {"watch": _Watch()})
    cls = _BARE["class"]
    cls.service = service
    client = cls(_CONFIG, _STATE, {}, loop)
    client.asgi = None
    client.upgraded = False
    client.connection_made(transport)
    for piece in pieces:
        if transport.closed:
            break
        client.data_received(piece)
        client.answer()
        while loop.soon and not transport.closed:
            loop.run()
            client.answer()
        assert not transport.paused or transport.closed, "nobody would ever read on"
    _STATE.connections.discard(client)
    data = b"".join(pieces)
    absolute = any(scheme in data.lower() for scheme in _SCHEMES)
    return [read._replace(absolute=absolute) for read in service.read]


def requests_by_h11(data: bytes) -> tuple[list[Read], bool]:
    """(the complete ones, whether it reads nothing more: an error, or an end)."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    read: list[Read] = []
    request, body = None, b""
    try:
        while True:
            event = http.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                read.append(
                    Read(request.method, _plain(request.target), list(request.headers), body)
                )
                http.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                http.send(h11.EndOfMessage())
                if http.our_state is not h11.DONE:
                    return read, True
                http.start_next_cycle()
            elif event is h11.NEED_DATA:
                return read, False
            else:
                return read, True
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return read, True


class _Parsed:
    """What httptools calls back."""

    def __init__(self) -> None:
        self.read: list[Read] = []
        self._begin()

    def _begin(self) -> None:
        self.url, self.headers, self.body = b"", list[tuple[bytes, bytes]](), b""
        self.head_over = False

    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_over:  # trailers come as headers
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.head_over = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        method = self.parser.get_method()
        self.read.append(Read(method, _plain(self.url), self.headers, self.body))

    parser: Any


def requests_by_llhttp(data: bytes) -> tuple[list[Read], bool]:
    """As ``requests_by_h11``."""
    parsed = _Parsed()
    parsed.parser = httptools.HttpRequestParser(parsed)
    try:
        parsed.parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return parsed.read[:-1], True  # it takes what follows for another protocol
    except httptools.HttpParserError:
        return parsed.read, True
    # It does not stop at the end of the last request that a connection is for.
    return parsed.read, False


class _Pool:
    """Of one connection."""

    host, port = "instance", 8000

    def __init__(self) -> None:
        self.released = False

    def release(self, connection: UpstreamConnection) -> None:
        self.released = True

    def forget(self, connection: UpstreamConnection) -> None:
        pass


class _Sink:
    """Keeps an answer."""

    def __init__(self, *, decode: bool) -> None:
        self._decode = decode
        self.head: ResponseHead | None = None
        self.parts: list[bytes] = []
        self.complete = False
        self.error: InstanceError | None = None

    def on_head(self, head: ResponseHead, *, body_follows: bool) -> bool:
        self.head = head
        return self._decode

    def on_data(self, data: bytes) -> None:
        self.parts.append(data)

    def on_complete(self) -> None:
        self.complete = True

    def on_error(self, error: InstanceError) -> None:
        self.error = error

    def on_bug(self, error: Exception) -> None:
        raise error


_NULL = os.pipe()[0]

Answer = tuple[int, bytes, Headers, bool]


def answer_by_us(pieces: list[bytes], *, decode: bool) -> Answer | None:
    """(status, body, fields, whether the connection is used again); None: it is no answer."""
    pool, transport = _Pool(), _Transport(_NULL)
    connection = UpstreamConnection(cast(InstancePool, pool))
    connection.connection_made(cast(Any, transport))
    sink = _Sink(decode=decode)
    connection.send(b"", sink)
    for piece in pieces:
        if transport.closed:
            break
        connection.data_received(piece)
    used_again = pool.released and not transport.closed
    connection.connection_lost(None)
    if not sink.complete or sink.head is None:
        return None
    body = b"".join(sink.parts)
    if sink.head.chunked and not decode:
        # As it came: what a client makes of it.
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        theirs = answer_by_h11(head + body)
        assert theirs is not None, body
        body = theirs[1]
    return sink.head.status, body, sink.head.headers, used_again


def answer_by_h11(data: bytes) -> tuple[int, bytes] | None:
    """(status, body); None: it is none, or not complete."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    http.send(h11.EndOfMessage())
    http.receive_data(data)
    http.receive_data(b"")
    status, body = 0, b""
    try:
        while True:
            event = http.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif event is h11.NEED_DATA or event is h11.PAUSED:
                return None
            elif isinstance(event, h11.ConnectionClosed):
                return None
    except h11.RemoteProtocolError:
        return None
