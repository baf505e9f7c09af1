"""An instance that answers POSTs with whatever bytes a test gives it, and GETs as an engine does.

``answers`` maps a path to the pieces that answer a GET of it, and ``posts`` are those for every
POST. They are written one by one; then the connection stays open, or is closed where the last piece
is None.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

Pieces = Sequence[bytes | None]

GOOD = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"ok":true}'
_MODELS = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}).encode()


def plain(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class RawInstance:
    """A server on a free loopback port. ``connections`` counts those that it has accepted."""

    def __init__(self) -> None:
        self.posts: Pieces = [GOOD]
        self.answers: dict[str, Pieces] = {
            "/health": [plain(b"")],
            "/v1/models": [plain(_MODELS)],
            "/metrics": [plain(b"")],
        }
        self.requests = 0
        self.connections = 0
        self.probes: list[float] = []  # when /health was asked for
        self.written_bytes = 0  # in answer to POSTs
        self.pause_s = 0.0  # between pieces
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        while self._writers:  # noqa: ASYNC110 - they end by themselves, within a turn or two
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line.split(b":")[1]))
        pieces = self.posts
        if head.startswith(b"GET "):
            if head.startswith(b"GET /health "):
                self.probes.append(asyncio.get_running_loop().time())
            pieces = self.answers.get(head.split(b" ")[1].decode(), [plain(b"", b"404 Not Found")])
        else:
            self.requests += 1
        for i, piece in enumerate(pieces):
            if piece is None:
                return False
            if i:
                await asyncio.sleep(self.pause_s)
            writer.write(piece)
            if pieces is self.posts:
                self.written_bytes += len(piece)
            await writer.drain()
        return True


@contextlib.asynccontextmanager
async def raw_instance(instance: RawInstance | None = None) -> AsyncIterator[RawInstance]:
    """One that runs until the block ends."""
    instance = instance or RawInstance()
    await instance.start()
    try:
        yield instance
    finally:
        await instance.close()
