"""What long bodies take of memory: as much as is allowed for them, and no second copy."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.fakes.processes import Executed

pytestmark = pytest.mark.slow

MB = 10**6
BODY_BYTES, CLIENTS = 50 * MB, 10
PIECE = b"x" * 2**18
ANSWER = b'{"choices": []}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    """Wall clock: the gateway is another process."""
    return "asyncio"


def processes(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def memory_bytes(pids: list[int], field: str) -> int:
    """Of these processes together: ``VmRSS`` now, or ``VmHWM`` at most so far."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
    return total


class Instance:
    """Reads of a request's body nothing until ``gate`` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            body = b'{"data": [{"id": "m"}]}'
            if head.startswith(b"POST"):
                await self.gate.wait()
                lines = head.lower().split(b"\r\n")
                length = next(line for line in lines if line.startswith(b"content-length"))
                left = int(length.split(b":")[1])
                while left:
                    left -= len(await reader.readexactly(min(left, 2**20)))
                body = ANSWER
            writer.write(HEAD % len(body) + body)
            await writer.drain()


@contextlib.asynccontextmanager
async def gateway_of(
    instance: Instance, directory: Path, workers: int
) -> AsyncIterator[tuple[int, list[int]]]:
    """Its port, and the ids of its processes; all settings are defaults."""
    server = await asyncio.start_server(instance.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    path = directory / "gateway.yaml"
    path.write_text(yaml.safe_dump({"instances": [{"id": "a", "base_url": url, "model": "m"}]}))
    words = ("serve", "-c", str(path), "--port", "0", "--workers", str(workers))
    gateway = await asyncio.to_thread(Executed, *words)
    try:
        port = int((await asyncio.to_thread(gateway.wait_ready)).rsplit(":", 1)[1])
        yield port, processes(gateway.process.pid)
    finally:
        instance.gate.set()
        await asyncio.to_thread(gateway.stop)
        server.close()


class Client:
    """One long request. ``sent``: all of it is, or nobody wants the rest."""

    def __init__(self, *, chunked: bool) -> None:
        self.sent = asyncio.Event()
        self._chunked = chunked

    async def post(self, port: int) -> tuple[int, bool]:
        """The status, and whether a time to come back was named."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        framing = b"transfer-encoding: chunked" if self._chunked else b"content-length: %d"
        if not self._chunked:
            framing %= BODY_BYTES
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            + framing
            + b"\r\n\r\n"
        )
        sending = asyncio.ensure_future(self._send(writer))
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        finally:
            self.sent.set()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()
        return int(head.split()[1]), b"retry-after: " in head.lower()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        begin, end = b'{"model": "m", "max_tokens": 1, "prompt": "', b'"}'
        left = BODY_BYTES - len(begin) - len(end)
        self._write(writer, begin)
        while left:
            piece = PIECE[:left]
            self._write(writer, piece)
            left -= len(piece)
            await writer.drain()
        self._write(writer, end)
        if self._chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.sent.set()

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


@pytest.mark.parametrize(
    ("workers", "chunked"),
    [
        (1, False),
        *(pytest.param(*each, marks=pytest.mark.system) for each in ((1, True), (2, False))),
    ],
    ids=["one", "chunked", "workers"],
)
async def test_ten_long_bodies_take_at_most_300_mb(
    workers: int, chunked: bool, tmp_path: Path
) -> None:
    instance = Instance()
    async with gateway_of(instance, tmp_path, workers) as (port, pids), asyncio.timeout(300):
        # What comes with the first long body stays, whatever comes after it.
        async with httpx.AsyncClient() as client:
            first = {"model": "nobody's", "prompt": "x" * 500_000}
            for _ in range(4 * workers):
                url = f"http://127.0.0.1:{port}/v1/completions"
                assert (await client.post(url, json=first)).status_code == 404
        before = memory_bytes(pids, "VmRSS")
        clients = [Client(chunked=chunked) for _ in range(CLIENTS)]
        posts = [asyncio.ensure_future(client.post(port)) for client in clients]
        await asyncio.gather(*(client.sent.wait() for client in clients))
        instance.gate.set()
        answers = await asyncio.gather(*posts)
        grown = memory_bytes(pids, "VmHWM") - before
    counts = Counter(answers)
    assert set(counts) == {(200, False), (503, True)}
    served = counts[200, False]
    # A worker has half of it; at worst all came to one.
    assert served >= (5 if workers == 1 else 2)
    assert 0.8 * BODY_BYTES * served < grown  # it was all here at once
    assert grown < 300 * MB
