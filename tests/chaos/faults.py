"""What a faulty instance does to its answers: a transport between uvicorn and the socket.

An emulated vLLM answers as ever; what it writes passes a ``FaultyTransport``, which lets it through
until a fault is drawn for the request. Faults are drawn per request, with a share, from a seeded
generator; which fault is on is said by whoever disturbs the instance (``instances.py``).
"""

import asyncio
import random
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hetero_gateway.lab.emulator.kv_transfer import KVTransfer

# No client may ever see it: it stands in bytes that follow the end of an answer.
EVIL = b"evil-bytes-behind-the-end"
_EVIL_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(EVIL), EVIL)
)
_ERROR = b'{"error":{"message":"chaos","type":"InternalServerError","param":null,"code":%d}}'

# In place of an answer's head.
GARBAGE: tuple[bytes, ...] = (
    b"\x00\xff\x16\x03\x01" + bytes(range(256)),
    b"SSH-2.0-OpenSSH_9.2p1\r\n",
    b"HTTP/1.1 200\r\nthis is no header\r\n\r\n",
    b"HTTP/9.9 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\nhello",
    b"HTTP/1.1 99999 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000,
    b"\r\n\r\n\r\nHTTP/1.1 200 OK\r\n" + _EVIL_ANSWER,
)
# In place of a page that the gateway reads: whole answers, with bodies that are not what is asked.
PAGES: tuple[bytes, ...] = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'{"data":null}',
    b'{"data":[{"id":7,"max_model_len":"many"}]}',
    b'{"object":"list","data":[{"id":"chaos","max_model_len":1%b}]}' % (b"0" * 400),
    b"[" * 100_000,
    b'{"data":' * 50_000,
    b"vllm:num_requests_running{ 1e999\nvllm:kv_cache_usage_perc NaN\n\xff\xfe",
    b"a" * 3_000_000,
)


# Its blocks cannot be fetched.
TRANSFERS = "transfers"


def _whole(status: int, body: bytes) -> bytes:
    return (
        b"HTTP/1.1 %d Chaos\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (status, len(body), body)
    )


class Instead(NamedTuple):
    """Bytes that are the answer, whatever was asked; and whether the connection is closed then."""

    answer: bytes
    close: bool = False


class Faults:
    """Which fault is on, and who gets it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind: str | None = None
        self.share = 0.0

    def set(self, kind: str | None, share: float) -> None:
        """Faults on requests (any of ``KINDS``), on the pages that the gateway reads, on transfers
        of prompts' caches, or none.
        """
        if kind is not None and kind not in ("pages", TRANSFERS) and kind not in KINDS:
            raise ValueError(f"there is no fault {kind!r}")
        self.kind, self.share = kind, share

    def drawn(self, post: bool) -> "Fault | Instead | None":
        """What to do with the answer of a request that has just come; None: nothing."""
        if self.kind in (None, TRANSFERS) or self.rng.random() >= self.share:
            return None
        assert self.kind is not None
        if self.kind == "pages":
            return None if post else Instead(_whole(200, self.rng.choice(PAGES)))
        return KINDS[self.kind](self.rng) if post else None


Fault = Callable[["FaultyTransport", bytes], None]


class FaultyTransport:
    """The transport, as uvicorn sees it; writes go through ``fault`` where there is one."""

    def __init__(self, transport: Any) -> None:
        self.real = transport
        self.fault: Fault | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def write(self, data: bytes) -> None:
        if self.fault is None:
            self.real.write(data)
        else:
            self.fault(self, data)

    def reset(self) -> None:
        """RST, and nothing that was still to be written."""
        linger(self.real)
        self.real.abort()

    def swallow(self) -> None:
        """Nothing more of this answer is written."""
        self.fault = _nothing


def linger(transport: Any) -> None:
    """Closing the transport will reset the connection."""
    raw = transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class FaultyProtocol(HttpToolsProtocol):
    """A connection of an instance; made into a class with its ``faults`` by ``faulty``."""

    faults: Faults
    _instead: Instead | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(FaultyTransport(transport))

    def on_headers_complete(self) -> None:
        drawn = self.faults.drawn(self.parser.get_method() == b"POST")
        self._instead = drawn if isinstance(drawn, Instead) else None
        if self._instead is None:
            self.transport.fault = cast(Fault | None, drawn)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._instead is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._instead is None:
            super().on_message_complete()
            return
        self.transport.real.write(self._instead.answer)
        if self._instead.close:
            self.transport.real.close()

    def on_response_complete(self) -> None:
        if isinstance(self.transport.fault, _Added):
            self.transport.fault.end(self.transport)
        super().on_response_complete()


def faulty(faults: Faults) -> type[FaultyProtocol]:
    return type("FaultyProtocol", (FaultyProtocol,), {"faults": faults})


# The faults. Each maker draws where it strikes, and returns what is done with each write.


def _nothing(transport: FaultyTransport, data: bytes) -> None:
    pass


class _Added:
    """Another answer behind the whole one, in one write with its end.

    In a write of its own it may come when the next request has been written: then nobody can tell
    it from that one's answer.
    """

    def __init__(self) -> None:
        self._held = b""

    def __call__(self, transport: FaultyTransport, data: bytes) -> None:
        transport.real.write(self._held)
        self._held = data

    def end(self, transport: FaultyTransport) -> None:
        transport.real.write(self._held + _EVIL_ANSWER)


def _midway(rng: random.Random, end: Callable[[FaultyTransport], None]) -> Fault:
    """Some writes pass, then a half of one, then ``end``; [DONE] is never among what passes."""
    left = rng.randrange(8)

    def strike(transport: FaultyTransport, data: bytes) -> None:
        nonlocal left
        left -= 1
        whole = data.partition(b"data: [DONE]")[0]
        if left >= 0 and whole == data:
            transport.real.write(data)
            return
        transport.real.write(whole[: len(whole) // 2])
        transport.swallow()
        end(transport)

    return strike


def _bad_chunk(transport: FaultyTransport) -> None:
    transport.real.write(b"zz;\x00\r\nnot a chunk\r\n")


KINDS: dict[str, Callable[[random.Random], Fault | Instead]] = {
    "reset": lambda rng: _midway(rng, FaultyTransport.reset),
    "close": lambda rng: _midway(rng, lambda transport: transport.real.close()),
    "half-close": lambda rng: _midway(rng, lambda transport: transport.real.write_eof()),
    "bad-chunk": lambda rng: _midway(rng, _bad_chunk),
    "hang": lambda rng: _midway(rng, lambda transport: None),
    "garbage": lambda rng: Instead(rng.choice(GARBAGE), rng.random() < 0.5),
    "empty": lambda rng: Instead(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    "http-500": lambda rng: Instead(_whole(500, _ERROR % 500)),
    "http-503": lambda rng: Instead(_whole(503, _ERROR % 503)),
    "no-answer": lambda rng: Instead(b"", close=True),
    "extra": lambda rng: _Added(),
}


def break_transfers(transfer: KVTransfer, faults: Faults) -> None:
    """Have blocks not be fetched while that is on: the other side is refused, or left waiting for
    what does not come, or hears nothing any more.
    """
    whole = transfer._hand_over

    async def hand_over(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if faults.kind != TRANSFERS or faults.rng.random() >= faults.share:
            await whole(reader, writer)
            return
        asked = await reader.readline()
        how = faults.rng.randrange(3)
        if how == 1 and b'"freed":false' in asked:
            writer.write(b'{"keys":[]}\n')
            await writer.drain()
        elif how == 2:
            await reader.read()  # until it has left

    transfer._hand_over = hand_over  # type: ignore[method-assign]
