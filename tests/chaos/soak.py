"""A soak: many streams and many idle connections for long, with memory and descriptors over time.

The instances send prepared chunks from one timer each, and the clients only count: what is measured
is the gateway. A stream that ends is replaced by a new one, and so is an idle connection that the
gateway closes (its keep-alive time-out is shorter than a soak): there are always as many as asked.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, cast

import yaml

from tests.chaos.gateway import GatewayProcess
from tests.fakes.vllm import bound

INSTANCES = 2
EVENTS_PER_STREAM = 120
_EVENT = (
    b'data: {"id":"s","object":"chat.completion.chunk","created":1,"model":"soak",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_USAGE = (
    b'data: {"id":"s","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,'
    b'"total_tokens":%d}}\n\ndata: [DONE]\n\n' % (EVENTS_PER_STREAM, EVENTS_PER_STREAM + 9)
)
_BODY = (
    b'{"model":"soak","messages":[{"role":"user","content":"go on"}],"max_tokens":%d,'
    b'"stream":true,"stream_options":{"include_usage":true}}' % EVENTS_PER_STREAM
)
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_IDLE_REQUEST = b"GET /livez HTTP/1.1\r\nhost: soak\r\n\r\n"
# Idle connections are opened this many at a time.
_OPENED_AT_ONCE = 64
# From one source address a kernel has some 28 000 ports to one destination.
_PORTS_PER_ADDRESS = 20_000
# The time of a soak begins when all are open, or after this.
OPEN_WITHIN_S = 300.0
# Memory at the end over that at a third of the time, when all is open.
RSS_GROWTH_BYTES = 24 * 2**20


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# The instance


class _InstanceConnection(asyncio.Protocol):
    def __init__(self, streams: "dict[_InstanceConnection, int]") -> None:
        self._streams = streams
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        if head.startswith(b"GET "):
            self._buffer = rest
            self.transport.write(_page(head.split(b" ")[1]))
        elif len(rest) >= len(_BODY):
            self._buffer = b""
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._streams[self] = EVENTS_PER_STREAM

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)


def _page(path: bytes) -> bytes:
    body = b""
    if path == b"/v1/models":
        body = b'{"object":"list","data":[{"id":"soak","max_model_len":8192}]}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def serve_instance(port: int, interval_s: float, control: Pipe) -> None:
    """The process of an instance; ends when whoever holds the other end of ``control`` is gone."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        streams: dict[_InstanceConnection, int] = {}
        listener = bound(port)
        await loop.create_server(lambda: _InstanceConnection(streams), sock=listener, backlog=4096)
        gone = asyncio.Event()
        loop.add_reader(control.fileno(), gone.set)
        control.send("ready")
        event, end = _chunk(_EVENT), _chunk(_USAGE) + b"0\r\n\r\n"
        # A tenth of the streams at a time, so that they do not come in one burst.
        slots, slot = 10, 0
        while not gone.is_set():
            for number, connection in enumerate(list(streams)):
                if number % slots == slot:
                    left = streams[connection]
                    if left:
                        streams[connection] = left - 1
                        connection.transport.write(event)
                    else:
                        del streams[connection]
                        connection.transport.write(end)
            slot = (slot + 1) % slots
            await asyncio.sleep(interval_s / slots)

    asyncio.run(serve())


# The clients


@dataclass
class Counts:
    """What the clients saw."""

    open: int = 0  # idle connections
    closed: int = 0  # of them, by the gateway
    streaming: int = 0
    completed: int = 0
    broken: int = 0
    chunks: int = 0
    refused: int = 0


class _Stream(asyncio.Protocol):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._tail = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self) -> None:
        self._tail = b""
        self.done = asyncio.get_running_loop().create_future()
        self._transport.write(_REQUEST)

    def data_received(self, data: bytes) -> None:
        self._counts.chunks += data.count(b"data: ")
        self._tail = (self._tail + data)[-32:] if len(data) < 32 else data[-32:]
        if self._tail.endswith(b"\r\n0\r\n\r\n") and not self.done.done():
            self.done.set_result(b"[DONE]\n\n" in self._tail)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(False)


class _Idle(asyncio.Protocol):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._counts.open += 1
        # A request, so that it is a connection that is kept, not one that has sent nothing.
        cast(asyncio.Transport, transport).write(_IDLE_REQUEST)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.open -= 1
        self.gone.set()


@dataclass
class Soak:
    """``await Soak(...).run()``; ``rows`` are what was seen over time."""

    seconds: float
    streams: int
    idle: int
    interval_s: float
    directory: Path
    counts: Counts = field(default_factory=Counts)
    rows: list[dict[str, float]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    _over: bool = False

    async def run(self) -> None:
        with _instances(self.interval_s) as urls:
            document = {
                # Far enough from full that no idle connection has to make room.
                "server": {
                    "shutdown_timeout_s": 5,
                    "max_connections": max_connections(self.streams, self.idle),
                },
                "instances": [{"id": f"i{n}", "base_url": url} for n, url in enumerate(urls)],
            }
            path = self.directory / "gateway.yaml"
            path.write_text(yaml.safe_dump(document), "utf-8")
            gateway = await GatewayProcess.start(path, self.directory / "soak.log")
            try:
                await self._soak(gateway)
            finally:
                await gateway.aclose()

    async def _soak(self, gateway: GatewayProcess) -> None:
        before = gateway.descriptors
        gate = asyncio.Semaphore(_OPENED_AT_ONCE)
        tasks = [asyncio.create_task(self._stream(gateway.port)) for _ in range(self.streams)]
        tasks += [
            asyncio.create_task(self._keep_idle(gateway.port, number, gate))
            for number in range(self.idle)
        ]
        began_s = time.monotonic()
        while (  # noqa: ASYNC110 - a count of thousands, not an event
            self.counts.open < self.idle and time.monotonic() - began_s < OPEN_WITHIN_S
        ):
            await asyncio.sleep(0.1)
        began_s, warm_cpu_s = time.monotonic(), gateway.cpu_s
        warm_bytes, warm_chunks, warm_s = 0, 0, 0.0
        while (elapsed_s := time.monotonic() - began_s) < self.seconds:
            await asyncio.sleep(min(self.seconds / 20, self.seconds - elapsed_s))
            elapsed_s = time.monotonic() - began_s
            if not warm_bytes and elapsed_s > self.seconds / 3:
                warm_bytes, warm_chunks = gateway.rss_bytes, self.counts.chunks
                warm_cpu_s, warm_s = gateway.cpu_s, elapsed_s
            self._note(gateway, elapsed_s)
        end_bytes, end_cpu_s = gateway.rss_bytes, gateway.cpu_s
        chunks = self.counts.chunks - warm_chunks
        self._over = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._check(gateway, before, warm_bytes, end_bytes)
        spent_s, lasted_s = end_cpu_s - warm_cpu_s, elapsed_s - warm_s
        self.figures = {
            "seconds": self.seconds,
            "streams": self.streams,
            "idle_connections": self.idle,
            "streams_completed": self.counts.completed,
            "idle_reopened": self.counts.closed,
            "chunks_per_s": round(chunks / lasted_s),
            "cpu_share": round(spent_s / lasted_s, 3),
            "cpu_us_per_chunk": round(spent_s / max(chunks, 1) * 1e6, 1),
            "cpu_ms_per_stream": round(
                spent_s / max(chunks, 1) * EVENTS_PER_STREAM * 1e3, 2
            ),
            "rss_warm_mb": round(warm_bytes / 1e6, 1),
            "rss_end_mb": round(end_bytes / 1e6, 1),
        }  # fmt: skip

    def _note(self, gateway: GatewayProcess, elapsed_s: float) -> None:
        self.rows.append(
            {
                "s": round(elapsed_s, 1),
                "rss_mb": round(gateway.rss_bytes / 1e6, 1),
                "descriptors": gateway.descriptors,
                "streaming": self.counts.streaming,
                "idle": self.counts.open,
                "cpu_s": round(gateway.cpu_s, 1),
            }
        )

    async def _check(
        self, gateway: GatewayProcess, before: int, warm_bytes: int, end_bytes: int
    ) -> None:
        if end_bytes > warm_bytes + RSS_GROWTH_BYTES:
            self.violations.append(f"memory: {end_bytes / 1e6:.1f} MB, {warm_bytes / 1e6:.1f} warm")
        if self.counts.broken:
            self.violations.append(f"{self.counts.broken} streams were broken")
        if self.counts.refused:
            self.violations.append(f"{self.counts.refused} connections were refused")
        most = max((row["streaming"] for row in self.rows), default=0)
        if most < self.streams:
            self.violations.append(f"at most {most:g} of {self.streams} streams were open at once")
        most = max((row["idle"] for row in self.rows), default=0)
        if most < self.idle:
            self.violations.append(f"at most {most:g} of {self.idle} connections were open at once")
        deadline_s = time.monotonic() + 60
        while True:
            left = await gateway.left_over()
            held = gateway.descriptors
            if held > before + 2 * INSTANCES + 4:
                left.append(f"{held} descriptors, {before} at first")
            if not left:
                break
            if time.monotonic() > deadline_s:
                self.violations += left
                break
            await asyncio.sleep(0.5)
        self.violations += gateway.alarms()[:5]

    async def _stream(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        while not self._over:
            try:
                transport, stream = await loop.create_connection(
                    lambda: _Stream(self.counts), "127.0.0.1", port
                )
            except OSError:
                self.counts.refused += 1
                await asyncio.sleep(1)
                continue
            try:
                while not self._over and not transport.is_closing():
                    stream.begin()
                    self.counts.streaming += 1
                    try:
                        whole = await stream.done
                    finally:
                        self.counts.streaming -= 1
                    self.counts.completed += whole
                    self.counts.broken += not whole
            finally:
                transport.abort()

    async def _keep_idle(self, port: int, number: int, gate: asyncio.Semaphore) -> None:
        loop = asyncio.get_running_loop()
        source = (f"127.0.0.{2 + number // _PORTS_PER_ADDRESS}", 0)
        while not self._over:
            async with gate:
                try:
                    transport, idle = await loop.create_connection(
                        lambda: _Idle(self.counts), "127.0.0.1", port, local_addr=source
                    )
                except OSError:
                    self.counts.refused += 1
                    await asyncio.sleep(1)
                    continue
            try:
                await idle.gone.wait()
                self.counts.closed += 1
            finally:
                transport.abort()


@contextlib.contextmanager
def _instances(interval_s: float) -> Iterator[list[str]]:
    """The instances' URLs, while the block lasts."""
    context = multiprocessing.get_context("forkserver")
    urls, running = [], []
    for _ in range(INSTANCES):
        with bound(0) as held:
            port = held.getsockname()[1]
            ours, theirs = context.Pipe()
            arguments = (port, interval_s, theirs)
            process = context.Process(target=serve_instance, args=arguments, daemon=True)
            process.start()
            theirs.close()
            if not ours.poll(60):
                raise RuntimeError("an instance did not come up")
            ours.recv()
        running.append((ours, process))
        urls.append(f"http://127.0.0.1:{port}")
    yield urls
    for pipe, process in running:
        pipe.close()
        process.join(10)
        process.kill()


def max_connections(streams: int, idle: int) -> int:
    """The gateway's setting: nine tenths of it, and a little, are in use."""
    return (streams + idle) * 5 // 4 + 100


def descriptors_needed(streams: int, idle: int) -> int:
    """Of the gateway, which has both sides of each stream open."""
    return max_connections(streams, idle) + streams + 200


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "scripts/soak",
        description="Streams and idle connections for long: memory and descriptors over time, and "
        "the CPU that a stream costs.",
        epilog="example:\n  scripts/soak --seconds 600 --streams 1000 --idle 10000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="default: %(default)g")
    parser.add_argument("--streams", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--idle", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument(
        "--interval", type=float, default=0.5, metavar="S",
        help="between two chunks of a stream (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one document instead of tables")
    args = parser.parse_args(words)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(args.streams, args.idle)
    if hard != resource.RLIM_INFINITY and hard < needed:
        print(f"scripts/soak: {needed} descriptors are needed, and {hard} allowed", file=sys.stderr)
        return 2
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(args.seconds, args.streams, args.idle, args.interval, Path(directory))
        asyncio.run(soak.run())
    if args.json:
        document = {"figures": soak.figures, "rows": soak.rows, "violations": soak.violations}
        print(json.dumps(document, indent=1))
    else:
        for line in _table(soak):
            print(line)
    return 1 if soak.violations else 0


def _table(soak: Soak) -> Iterator[str]:
    names = list(soak.rows[0])
    yield "".join(f"{name:>13}" for name in names)
    for row in soak.rows:
        yield "".join(f"{row[name]:>13g}" for name in names)
    yield ""
    for name, value in soak.figures.items():
        yield f"  {name:24} {value!s:>12}"
    yield f"\n{len(soak.violations)} violations"
    yield from (f"  {text}" for text in soak.violations[:20])


if __name__ == "__main__":
    sys.exit(main())
