"""A short request's way through the code, counted: calls, changes of file, files, bytecodes.

    python benchmarks/dataplane/path.py [--features [NAME …] | --calls] [--requests 160]

A call is a function of the package that begins; a change of file, a call in another file than the
one before it. Everything counts from the first byte of a request to the last row that is written
about it, in one process, of which the clients and two instances that answer at once are a part.
These figures are the same on every machine, quiet or busy, within 1 %: the clock passes a
millisecond with each request and each answer, and no time by itself. What is done once a second and
rows that are written together still go by real time: of five counts the lowest is taken.

``--features`` switches each feature on, or off (or those that are named), and says what that
changes; a key with limits has a goal of at most 5 % more bytecodes. ``--calls`` lists every
function.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvloop
import yaml

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import Column, report
from hetero_gateway.files.client_keys import hash_of, new_key
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.gateway.dataplane import records
from hetero_gateway.scaleout.workers.hub import listen
from hetero_gateway.serve.app import create_app
from hetero_gateway.serve.processes.worker import Worker
from hetero_gateway.serve.server import GatewayServer, Given
from hetero_gateway.serve.wiring.gateway import Gateway

KEY_GOAL = 0.05
WARM_UP = 320
CLIENTS = 16
PROMPT_BYTES = 800
APART_S = 0.001
# Counting slows requests down, so rows wait longer: as many are written together as else.
SLOWER = 100
# What is done once a second is not in all of them.
TIMES = 5
PACKAGE = "hetero_gateway/"
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 1767225600,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "x" * 780},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 100, "total_tokens": 300, "completion_tokens": 200},
    }
).encode()
LIMITS = {"requests_per_minute": 10**8, "tokens_per_minute": 10**11, "concurrency": 10**5}
COLUMNS = (
    Column("feature", "feature", 28),
    Column("calls", "calls", 7, ".0f"),
    Column("changes", "changes", 9, ".0f"),
    Column("files", "files", 7, ".0f"),
    Column("core calls", "core_calls", 12, ".0f"),
    Column("core changes", "core_changes", 14, ".0f"),
    Column("bytecodes", "bytecodes", 11, ".0f"),
    Column("more", "more", 9, "+.1%"),
)


class RequestPath(NamedTuple):
    """Of one request, in the mean.

    Attributes:
        calls: functions of the package that begin.
        changes: calls in another file than the one before.
        files: that have a function to which at least every fourth request comes.
        core_calls, core_changes: those in ``core``.
        functions: calls of each, by "file:name".
    """

    calls: float
    changes: float
    files: int
    core_calls: float
    core_changes: float
    functions: dict[str, float]


COUNTS = ("calls", "changes", "files", "core_calls", "core_changes")


class CallCounter:
    """Counts calls while it is on; ``path``: what they come to for each of so many requests."""

    def __init__(self) -> None:
        self._functions: Counter[tuple[str, str]] = Counter()
        self._changes: Counter[bool] = Counter()
        self._last = ""

    def __enter__(self) -> CallCounter:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        _, found, file = frame.f_code.co_filename.partition(PACKAGE)
        if not found:
            return
        self._functions[file, frame.f_code.co_qualname] += 1
        if file != self._last:
            self._changes[file.startswith("core/")] += 1
            self._last = file

    def path(self, requests: int) -> RequestPath:
        core = sum(n for (file, _), n in self._functions.items() if file.startswith("core/"))
        return RequestPath(
            sum(self._functions.values()) / requests,
            sum(self._changes.values()) / requests,
            len({file for (file, _), n in self._functions.items() if n >= requests / 4}),
            core / requests,
            self._changes[True] / requests,
            {f"{file}:{name}": n / requests for (file, name), n in self._functions.items()},
        )


class BytecodeCounter:
    """Counts the bytecodes that the package's functions run, while it is on."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> BytecodeCounter:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if PACKAGE not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.count += event == "opcode"
        return self._step


class StoppedClock:
    """``time.monotonic`` as a clock that passes no time by itself, from ``stop`` on."""

    def __init__(self) -> None:
        self._now_s: float | None = None

    def stop(self) -> None:
        self._now_s = time.monotonic()
        time.monotonic = self._read

    def _read(self) -> float:
        assert self._now_s is not None
        return self._now_s

    def pass_time(self) -> None:
        """A request was sent, or an answer."""
        if self._now_s is not None:
            self._now_s += APART_S


CLOCK = StoppedClock()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An instance's side of a connection."""
    ends = contextlib.suppress(ConnectionError, asyncio.IncompleteReadError)
    with contextlib.closing(writer), ends:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.lower().split(b"\r\n")
            length = next((int(x[15:]) for x in lines if x.startswith(b"content-length:")), 0)
            await reader.readexactly(length)
            body = ANSWER if head.startswith(b"POST") else b""
            CLOCK.pass_time()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )


def request(number: int, key: str, text: str) -> bytes:
    """A short request; no two numbers begin their prompts alike."""
    number = number * 0x9E3779B97F4A7C15 % 2**64
    body = json.dumps(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": f"{number:016x}{text}"},
            ],
            "temperature": 0.7,
            "max_tokens": 200,
            "stream": False,
        }
    ).encode()
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
        f"User-Agent: path\r\nAccept: */*\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def prompt_of(size_bytes: int) -> str:
    """The text of prompts of this size, without the number that each begins with."""
    return "".join("abcdefghij "[i % 11] for i in range(size_bytes - 16))


class Traffic:
    """Clients of a gateway in this process: ``ask`` sends requests, as many at once as there are.

    Args:
        gateway: that of the application.
        port: where it listens on loopback.
        key: that the clients send.
        prompt_bytes: of each prompt, no two of which begin alike.
    """

    def __init__(self, gateway: Any, port: int, key: str, prompt_bytes: int) -> None:
        self._gateway = gateway
        self._port = port
        self._key = key
        self._text = prompt_of(prompt_bytes)
        self._numbers = iter(range(10**9))
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self) -> None:
        for _ in range(CLIENTS):
            self._open.append(await asyncio.open_connection("127.0.0.1", self._port))

    def close(self) -> None:
        for _, writer in self._open:
            writer.close()

    async def ask(self, requests: int) -> None:
        """Send so many, each client its share; returns once all that they leave is written."""
        for _ in range(requests // CLIENTS):
            for _, writer in self._open:
                CLOCK.pass_time()
                writer.write(self._request())
            await asyncio.gather(*(self._read(reader) for reader, _ in self._open))
        await asyncio.sleep(0.1)
        self._gateway.metrics.catch_up()

    def _request(self) -> bytes:
        return request(next(self._numbers), self._key, self._text)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request was not served: {head.decode('latin-1')}")
        lines = head.lower().split(b"\r\n")
        length = next(int(x[15:]) for x in lines if x.startswith(b"content-length:"))
        await reader.readexactly(length)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, sections: Mapping[str, Any], *, by_worker: bool = False
) -> AsyncIterator[tuple[GatewayServer, int, Gateway]]:
    """A gateway with these sections of a configuration in front of two instances, and its port.

    ``by_worker``: what serves is a worker, which asks that gateway; both are in this process.
    """
    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    profile = "A100-80GB-SXM/Llama-3-8B/tp1"
    document: dict[str, Any] = {
        "server": {"port": 0},
        "health": {"probe_interval_s": 3600, "scrape_interval_s": 3600},
        "instances": [
            {"id": f"i{n}", "base_url": f"http://127.0.0.1:{port}", "model": "m"}
            | {"profile": profile}
            for n, port in enumerate(s.sockets[0].getsockname()[1] for s in servers)
        ],
        **sections,
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    config, hub, control = load_gateway_config(path), str(folder / "hub"), str(folder / "control")
    app = create_app(config, path, listen(hub) if by_worker else None)
    if sections.get("log"):
        app.gateway.access = lambda lines: None  # else nobody takes its lines
    try:
        async with contextlib.AsyncExitStack() as stack:
            listener = listen(control) if by_worker else None
            server, url = await stack.enter_async_context(started(app, app.gateway, listener))
            while not all(instance.up for instance in app.gateway.fleet.instances.values()):  # noqa: ASYNC110 - they are probed at the start
                await asyncio.sleep(0.01)
            if by_worker:
                worker = Worker(config, path, 0, hub, control)
                server, url = await stack.enter_async_context(started(worker.app, worker))
            yield server, int(url.rsplit(":", 1)[1]), app.gateway
    finally:
        for each in servers:
            each.close()


@contextlib.asynccontextmanager
async def started(
    service: Any, parts: Any, listener: socket.socket | None = None
) -> AsyncIterator[tuple[GatewayServer, str]]:
    """One server, and its URL."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(service, parts, ready.set_result, Given([listener] if listener else []))
    task = asyncio.ensure_future(server.serve())
    try:
        yield server, await ready
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def traffic(
    folder: Path, sections: Mapping[str, Any], key: str, prompt_bytes: int = PROMPT_BYTES
) -> AsyncIterator[Traffic]:
    """Clients of such a gateway, which has served some requests."""
    async with serving(folder, sections) as (_, port, gateway):
        clients = Traffic(gateway, port, key, prompt_bytes)
        try:
            await clients.connect()
            CLOCK.stop()
            await clients.ask(WARM_UP)
            yield clients
        finally:
            clients.close()


def features(folder: Path, key: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(its name, its sections of a configuration, bytes of a prompt)."""
    yield "the default", {}, PROMPT_BYTES
    yield "a prompt of 16 KB", {}, 16384
    for policy in ("min-max", "round-robin"):
        yield f"policy: {policy}", {"scheduler": {"policy": policy}}, PROMPT_BYTES
    yield "without prefix caches", {"scheduler": {"prefix_cache": False}}, PROMPT_BYTES
    yield "with limits of TTFT", {"scheduler": {"slo": {"ttft_s": 2.0}}}, PROMPT_BYTES
    yield "with an access log", {"log": {"access": True}}, PROMPT_BYTES
    yield "an alias", {"models": {"other": {"serve": "m"}}}, PROMPT_BYTES
    yield "classes", {"scheduler": {"queue": {"discipline": "classes"}}}, PROMPT_BYTES
    entry = {"name": "one", "hash": hash_of(key), **LIMITS}
    grouped = {"tokens_per_minute": 10**11}
    for name, keys in (
        ("a key with limits", {"keys": [entry]}),
        ("and a group's", {"groups": {"g": grouped}, "keys": [{**entry, "group": "g"}]}),
    ):
        (folder / "keys.yaml").write_text(yaml.safe_dump(keys), "utf-8")
        yield name, {"clients": {"keys_file": "keys.yaml"}}, PROMPT_BYTES


async def measured(
    folder: Path, sections: Mapping[str, Any], key: str, requests: int, prompt_bytes: int
) -> dict[str, Any]:
    async with traffic(folder, sections, key, prompt_bytes) as clients:
        found = []
        for _ in range(TIMES):
            with CallCounter() as calls:
                await clients.ask(requests)
            found.append(calls.path(requests))
        least, part = float("inf"), max(1, requests * 3 // 10 // CLIENTS) * CLIENTS
        for _ in range(TIMES):
            with BytecodeCounter() as bytecodes:
                await clients.ask(part)
            least = min(least, bytecodes.count / part)
    lowest = {name: min(getattr(counted, name) for counted in found) for name in COUNTS}
    return {**lowest, "functions": found[0].functions, "bytecodes": least}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    key = new_key()
    first = None
    with tempfile.TemporaryDirectory(prefix="path-") as folder:
        for name, sections, size in features(Path(folder), key):
            if first is not None and args.features and name not in args.features:
                continue
            row = uvloop.run(measured(Path(folder), sections, key, args.requests, size))
            functions = row.pop("functions")
            first = first or row["bytecodes"]
            row["more"] = row["bytecodes"] / first - 1
            met = name != "a key with limits" or row["more"] <= KEY_GOAL
            yield {"feature": name, **row, "met": met}
            if args.calls:
                for function, calls in sorted(functions.items()):
                    print(f"{calls:8.2f}  {function}")
            if args.features is None:
                return


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", nargs="*", metavar="NAME", help="each on, or off")
    parser.add_argument("--calls", action="store_true", help="list every function")
    parser.add_argument("--requests", type=int, default=160, help="that are counted of each")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    records.LATER_S *= SLOWER
    return report(rows(args), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
