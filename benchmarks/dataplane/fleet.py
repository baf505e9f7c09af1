"""What hundreds of instances cost a gateway that has nothing to do, and what changing them does.

    python benchmarks/dataplane/fleet.py
    python benchmarks/dataplane/fleet.py --instances 200 --added 40 --tls

The gateway runs in this process, on uvloop; all instances are one other process, which tells them
apart by the path of their base_url and answers as vLLM does, 70 KB of metrics and all. Printed:

    start_s            from the start to the gateway's first look at all of them
    slowest_start_s    the same while one instance never answers
    idle_cores         CPU time of this process over wall time, with no request at all
    hold_ms            the most CPU time between two turns of the event loop, while a reload adds
                       (and another removes) instances under open streams; that is what a stream
                       waits, on a machine that has nothing else to do
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import uvloop
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.serve.app import create_app
from hetero_gateway.serve.garbage import freeze_what_start_made
from hetero_gateway.serve.server import GatewayServer

# A vLLM's exposition has some 70 KB, of which the gateway reads a few lines.
_FILLER = "".join(
    f'vllm:request_time_seconds_bucket{{engine="0",le="{i}",model_name="m"}} {i}.0\n'
    for i in range(1000)
)
METRICS = (
    'vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0\n'
    'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
    'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0\n'
    'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0\n'
    'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",'
    'num_gpu_blocks="30000"} 1.0\n' + _FILLER
)
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 8192}]})


class Instance(asyncio.Protocol):
    """One connection to any instance; ``/hang/…`` never answers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport: Any = transport
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head, rest = self.buffer[:end], self.buffer[end + 4 :]
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line[15:])
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            self.answer(head.split(b" ")[1].decode())

    def answer(self, path: str) -> None:
        if path.startswith("/hang"):
            return
        if path.endswith("/health"):
            body = ""
        elif path.endswith("/metrics"):
            body = METRICS
        elif path.endswith("/v1/models"):
            body = MODELS
        else:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self.stream()
            return
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write((head + body).encode())

    def stream(self) -> None:
        event = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.timer = asyncio.get_running_loop().call_later(0.05, self.stream)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()


def serve_instances(pipe: Connection, tls: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        context = None
        if tls:
            import ssl

            import trustme

            authority = trustme.CA()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("127.0.0.1").configure_cert(context)
            pem = authority.cert_pem.bytes()
        else:
            pem = b""
        server = await loop.create_server(Instance, "127.0.0.1", 0, ssl=context, backlog=4096)
        pipe.send((server.sockets[0].getsockname()[1], pem))
        await asyncio.Event().wait()

    uvloop.run(main())


@contextlib.contextmanager
def instances(tls: bool) -> Iterator[tuple[int, bytes]]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_instances, args=(theirs, tls), daemon=True
    )
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


class Ticker:
    """Looks how long the event loop is held: by CPU time, which other processes do not change."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._last_s = time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(0.001, self._tick)

    def _tick(self) -> None:
        now_s = time.thread_time()
        self.worst_s = max(self.worst_s, now_s - self._last_s)
        self._last_s = now_s
        self._timer = asyncio.get_running_loop().call_later(0.001, self._tick)

    def stop(self) -> float:
        self._timer.cancel()
        return self.worst_s


@contextlib.asynccontextmanager
async def gateway(path: Path) -> AsyncIterator[tuple[Any, str, float]]:
    """(the app, its URL, seconds until it served)."""
    config = load_gateway_config(path)
    began_s = time.monotonic()
    app = create_app(config, path)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(app, app.gateway, ready.set_result)
    task = asyncio.ensure_future(server.serve())
    try:
        url = await ready
        took_s = time.monotonic() - began_s
        freeze_what_start_made()
        yield app, url, took_s
    finally:
        server.should_exit = True
        await task


def write(path: Path, port: int, pem: bytes, names: list[str]) -> None:
    entry: dict[str, Any] = {"profile": "V100-32GB-NVLink2/Llama-3-8B/tp4"}
    scheme = "http"
    if pem:
        ca = path.parent / "ca.pem"
        ca.write_bytes(pem)
        scheme, entry = "https", entry | {"ca_file": str(ca)}
    document = {
        "server": {"port": 0, "shutdown_timeout_s": 0},
        "instances": [
            {"id": name.replace("/", "-"), "base_url": f"{scheme}://127.0.0.1:{port}/{name}"}
            | entry
            for name in names
        ],
    }
    path.write_text(yaml.safe_dump(document))


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    path = directory / "gateway.yaml"
    names = [f"i{i}" for i in range(args.instances)]
    more = [*names, *(f"n{i}" for i in range(args.added))]
    with instances(args.tls) as (port, pem):
        write(path, port, pem, [*names[1:], "hang/0"])
        async with gateway(path) as (app, _, took_s):
            figures["slowest_start_s"] = took_s
        write(path, port, pem, names)
        async with gateway(path) as (app, url, took_s):
            figures["start_s"] = took_s
            assert sum(i.up for i in app.gateway.fleet.instances.values()) == len(names)
            await asyncio.sleep(args.settle)
            began_s, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(args.seconds)
            figures["idle_cores"] = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
            async with httpx.AsyncClient(
                timeout=None, limits=httpx.Limits(max_connections=None)
            ) as client, asyncio.TaskGroup() as tasks:  # fmt: skip
                counts = [0] * args.streams

                async def read(i: int) -> None:
                    body = {"model": "m", "prompt": "x", "stream": True}
                    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                        async for _ in answer.aiter_bytes():
                            counts[i] += 1

                readers = [tasks.create_task(read(i)) for i in range(args.streams)]
                while not all(counts):  # noqa: ASYNC110 - it looks at numbers
                    await asyncio.sleep(0.1)
                for name, now in (("none", names), ("add", more), ("remove", names)):
                    write(path, port, pem, now)
                    ticker, began_s = Ticker(), time.monotonic()
                    if name != "none":
                        await app.gateway.reloader.reload(name)
                    figures[f"{name}_s"] = time.monotonic() - began_s
                    await asyncio.sleep(3)
                    figures[f"{name}_hold_ms"] = ticker.stop() * 1000
                up = sum(i.up for i in app.gateway.fleet.instances.values())
                assert up == len(app.gateway.fleet.instances), up
                for reader in readers:
                    reader.cancel()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--added", type=int, default=40)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0, help="of idling")
    parser.add_argument("--settle", type=float, default=12.0, help="of idling before, unmeasured")
    parser.add_argument("--tls", action="store_true", help="instances have https")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = uvloop.run(measure(args, Path(directory)))
    for name, figure in figures.items():
        print(f"{name:16} {figure:8.3f}")


if __name__ == "__main__":
    main()
