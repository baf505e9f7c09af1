"""A small server that answers completions over real sockets, with scripted faults.

The model's name is the script: ``fast`` answers at once, ``slow`` waits between tokens, and the
others fail in the way that they are named after.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class FakeServer:
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    hung_up: int = 0
    token_gap_s: float = 0.01

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *rest = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in rest if line)
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        path = first.split(" ")[1]
        if path == "/v1/models":
            self._plain(writer, 200, {"object": "list", "data": [{"id": "fast"}]})
            return True
        body = json.loads(raw)
        self.paths.append(path)
        self.headers.append(headers)
        self.bodies.append(body)
        return await self._answer(reader, writer, body)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
    ) -> bool:
        model, tokens = body["model"], body["max_tokens"]
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        if model == "refused":
            self._plain(writer, 503, {"error": {"message": "no", "code": 503}})
            return True
        if model == "garbage":
            writer.write(b"\x16\x03 this is not HTTP\r\n\r\n")
            return False
        if model == "silent":
            try:
                await reader.read(1)
            finally:
                self.hung_up += 1
            return False
        if not body.get("stream"):
            self._plain(writer, 200, {"choices": [{"finish_reason": "length"}], "usage": usage})
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"x-hetero-gateway-instance: one\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if model != "merged":
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for k in range(tokens):
            finish = "length" if k == tokens - 1 else None
            if model == "cut" and k == tokens // 2:
                return False
            if model == "dead-engine" and k == tokens // 2:
                self._event(writer, {"error": {"message": "engine died", "code": 500}})
                break
            if model == "aborts" and finish:
                finish = "abort"
            if model == "slow":
                await writer.drain()
                await asyncio.sleep(self.token_gap_s)
            self._event(writer, {"choices": [{"delta": {"content": "x"}, "finish_reason": finish}]})
        if model != "no-usage":
            self._event(writer, {"choices": [], "usage": usage})
        if model != "no-done":
            self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return model != "closes"

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _event(self, writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(document).encode() + b"\n\n")

    @staticmethod
    def _plain(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )


@contextlib.asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0, backlog=2048)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        for writer in list(fake.writers):
            writer.transport.abort()
        await asyncio.sleep(0.01)  # the handlers see it and return


@pytest.fixture
def serve() -> Callable[[], contextlib.AbstractAsyncContextManager[FakeServer]]:
    """``async with serve() as fake``: a fake server on a free port."""
    return fake_server


@pytest.fixture
def serve_in_thread() -> Iterator[FakeServer]:
    """A fake server on an event loop of its own, for commands that run a loop themselves."""
    started = threading.Event()
    stop: list[Callable[[], None]] = []
    fakes: list[FakeServer] = []

    async def main() -> None:
        stopped = asyncio.Event()
        stop.append(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set))
        async with fake_server() as fake:
            fakes.append(fake)
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    yield fakes[0]
    stop[0]()
    thread.join()
