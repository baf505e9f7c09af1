"""Peers of the picker's port that write and read frames of HTTP/2 as they like."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import hpack
import pytest

from hetero_gateway.scaleout.picker.http2 import frames
from hetero_gateway.scaleout.picker.http2.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    ErrorCode,
    frame,
)

ECHO = "/test.Test/Echo"
GREETING = PREFACE + frames.settings({}) + frame(SETTINGS, ACK, 0)


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """The picker runs on uvloop, other tests on asyncio."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


def table_less_encoder() -> hpack.Encoder:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder


def header_block(path: str = ECHO, encoder: hpack.Encoder | None = None, **fields: str) -> bytes:
    """A call's; the first one of an encoder says that there is no header table."""
    head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    head |= {"content-type": "application/grpc", "te": "trailers"} | fields
    return (encoder or table_less_encoder()).encode(head.items())


class Peer:
    """Writes and reads frames as it likes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.path = path
        self.encoder = table_less_encoder()
        self.decoder = hpack.Decoder()

    def block(self, path: str = "", **fields: str) -> bytes:
        return header_block(path or self.path, self.encoder, **fields)

    def send(self, *sent: bytes) -> None:
        self.writer.write(b"".join(sent))

    def open(self, stream_id: int, *messages: bytes, ends: bool = False, path: str = "") -> None:
        flags = END_HEADERS | (END_STREAM if ends and not messages else 0)
        self.send(frame(HEADERS, flags, stream_id, self.block(path)))
        for i, each in enumerate(messages):
            last = END_STREAM if ends and i == len(messages) - 1 else 0
            self.send(frame(DATA, last, stream_id, frames.message(each)))

    async def read(self) -> tuple[int, int, int, bytes]:
        word, flags, stream_id = frames.HEAD.unpack(await self.reader.readexactly(9))
        return word & 0xFF, flags, stream_id, await self.reader.readexactly(word >> 8)

    async def until(self, kind: int, stream_id: int | None = None) -> tuple[int, bytes]:
        """(flags, payload) of the next frame of this kind."""
        async with asyncio.timeout(20):
            while True:
                seen, flags, number, payload = await self.read()
                if seen == kind and stream_id in (None, number):
                    return flags, payload
                assert seen != GOAWAY, payload

    async def pong(self) -> None:
        """What was sent has been read."""
        self.send(frame(PING, 0, 0, b"12345678"))
        await self.until(PING)

    async def until_goaway(self) -> tuple[int, bytes]:
        async with asyncio.timeout(20):
            while True:
                seen, flags, _, payload = await self.read()
                if seen == GOAWAY:
                    return flags, payload

    async def trailers(self, stream_id: int) -> dict[str, str]:
        while True:
            flags, payload = await self.until(HEADERS, stream_id)
            found = dict(self.decoder.decode(payload))
            if flags & END_STREAM:
                return found

    async def goaway(self) -> ErrorCode:
        """What the connection was closed with."""
        _, payload = await self.until_goaway()
        async with asyncio.timeout(20):
            assert await self.reader.read() == b""
        return ErrorCode(struct.unpack_from(">II", payload)[1])


@contextlib.asynccontextmanager
async def peer_at(port: int, *, greets: bool = True, path: str = ECHO) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    peer = Peer(reader, writer, path)
    try:
        if greets:
            peer.send(GREETING)
            await peer.until(SETTINGS)
        yield peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
