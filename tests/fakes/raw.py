"""An instance that answers POSTs with whatever bytes a test gives it, and GETs as an engine does.

``answers`` maps a path to the pieces that answer a GET of it, and ``posts`` are those for every
POST. They are written one by one; then the connection stays open, or is closed where the last piece
is None.
"""

import asyncio
import json
from collections.abc import Sequence

from tests.fakes.servers import FakeServer, read_request

Pieces = Sequence[bytes | None]

GOOD = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"ok":true}'
_MODELS = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}).encode()


def plain(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class RawInstance(FakeServer):
    def __init__(self) -> None:
        super().__init__()
        self.posts: Pieces = [GOOD]
        self.answers: dict[str, Pieces] = {
            "/health": [plain(b"")],
            "/v1/models": [plain(_MODELS)],
            "/metrics": [plain(b"")],
        }
        self.requests = 0
        self.probes: list[float] = []  # when /health was asked for
        self.written_bytes = 0  # in answer to POSTs
        self.pause_s = 0.0  # between pieces

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        return await self._plainly(*await read_request(reader), writer)

    async def _plainly(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
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
