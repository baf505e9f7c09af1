"""What the fakes of servers have in common: connections to a free loopback port, and their end."""

import asyncio
import re
from typing import Self


class FakeServer:
    """``connections`` counts those that it has accepted; ``_answer`` is what each brings."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset_connections()
        for _ in range(3):  # they end by themselves, within a turn or two
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def reset_connections(self) -> None:
        """Break every connection off and go on listening."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        """One request; whether another may come over the same connection."""
        raise NotImplementedError


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(head, body)"""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return head, body
    length = re.search(rb"\r\ncontent-length:\s*(\d+)", head.lower())
    return head, await reader.readexactly(int(length[1]) if length else 0)
