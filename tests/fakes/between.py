"""A proxy in front of an instance, that spoils what passes: as a network, or another proxy, may."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from tests.fakes.servers import FakeServer, read_request

_DROPPED = (b"content-length:", b"connection:", b"transfer-encoding:", b"expect:")


class Between(FakeServer):
    """In front of ``upstream``. A connection carries one request.

    Attributes:
        bodies: of the POSTs that came and are meant.
        asked: awaited with a POST's body; what it returns goes on. An int is the status of an
            answer in its place.
        answered: makes of the JSON that a POST is answered another one.

    Args:
        only: what a POST's body must have in it for these to be done to it.
    """

    def __init__(self, upstream: str, only: bytes = b"") -> None:
        super().__init__()
        self.upstream = upstream
        self._only = only
        self.bodies: list[bytes] = []
        self.asked: Callable[[bytes], Awaitable[bytes | int]] | None = None
        self.answered: Callable[[dict[str, Any]], object] | None = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head, body = await read_request(reader)
        meant = head.startswith(b"POST ") and self._only in body
        if meant:
            self.bodies.append(body)
            given = body if self.asked is None else await self.asked(body)
            if isinstance(given, int):
                text = b'{"error":{"message":"spoilt","type":"spoilt","code":%d}}' % given
                writer.write(_framed(b"HTTP/1.1 %d Spoilt" % given, text))
                return False
            body = given
        if reader.at_eof():
            return False  # whoever asked has gone
        address = urlsplit(self.upstream)
        theirs, sending = await asyncio.open_connection(address.hostname, address.port)
        try:
            sending.write(_framed(head[:-4], body))
            tasks = [
                asyncio.ensure_future(self._relay(theirs, writer, meant)),
                asyncio.ensure_future(reader.read(1)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tasks[0]
        finally:
            sending.transport.abort()
        return False

    async def _relay(
        self, theirs: asyncio.StreamReader, writer: asyncio.StreamWriter, meant: bool
    ) -> None:
        """Pass an answer on, as it comes or as it is made of it."""
        if meant and self.answered is not None:
            head, _, body = (await theirs.read(-1)).partition(b"\r\n\r\n")
            changed = self.answered(json.loads(body))
            body = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
            writer.write(_framed(head, body))
            return
        while data := await theirs.read(65536):
            writer.write(data)
            await writer.drain()


def _framed(head: bytes, body: bytes) -> bytes:
    """Of a message that is the last one on its connection."""
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(_DROPPED)]
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    return b"\r\n".join(lines)


def with_parameters(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """``Between.answered`` of what hands a prompt over: with other ``kv_transfer_params``."""

    def change(answer: dict[str, Any]) -> object:
        told = answer.get("kv_transfer_params")
        return answer if told is None else answer | {"kv_transfer_params": told | changes}

    return change
