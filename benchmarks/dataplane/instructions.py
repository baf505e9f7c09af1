"""Instructions of one request, counted by callgrind: the same on a busy machine and on a quiet one.

    python benchmarks/dataplane/instructions.py [--feature "the default" ...] [--requests 160]
        [--workers] [--compiled]

The gateway's whole path runs in one process, from the bytes of a short request to the last row that
is written about it; objects stand in for the sockets, so that nothing else is counted. It needs
valgrind with its headers, and gcc. Requests and answers are a millisecond apart by a clock that
passes no time by itself: what is due by then is the same in each run. Each feature's price is what
a request costs with it.

``place`` and ``settle`` are the scheduler's: a decision with its charge and its log, and what comes
off, is learnt and is recorded afterwards. They are counted in runs of their own. ``idle`` is a
second without requests, ``stream`` a whole one of 200 chunks, ``chunk`` one of them more.

``--workers``: a worker serves, with its scheduler process in this same one, over a real socket.
``scheduler`` is then that process's share: what it reads, does and answers; without the event loop
and the system calls below it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import compiled  # before what may be compiled
from benchmarks.dataplane import path
from benchmarks.tables import Column, report
from hetero_gateway.files.client_keys import new_key
from hetero_gateway.gateway.dataplane import records
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher
from hetero_gateway.gateway.dataplane.records import LATER_S, Recorder
from hetero_gateway.http.upstream import UpstreamConnection
from hetero_gateway.scaleout.workers import remote
from hetero_gateway.scaleout.workers.messages import Channel, FrameReader
from hetero_gateway.serve.garbage import freeze_what_start_made

HERE = Path(__file__).resolve().parent
# Of the default, thousands of instructions; and of a key with limits, and of 16 KB, above it.
GOAL, SCHEDULER_GOAL = 700.0, 380.0
MORE_GOALS = {"a key with limits": 0.05, "a prompt of 16 KB": 0.40}
AT_ONCE = 16
APART_S = 0.001
TURNS = 1000
WARM_UP, SLOW_WARM_UP = 640, 64
CHUNKS = (2, 200)
# Under valgrind, which has to be made up for where batches end by the clock.
SLOWER = 20
STREAM_ROUNDS = 4  # what comes due once in a while is in some of them
COLUMNS = (
    Column("feature", "feature", 24),
    Column("thousands", "all", 11, ".0f"),
    Column("more", "more", 8, "+.1%"),
    Column("place", "place", 8, ".0f"),
    Column("settle", "settle", 8, ".0f"),
    Column("idle", "idle", 8, ".0f"),
    Column("stream", "stream", 8, ".0f"),
    Column("chunk", "chunk", 8, ".2f"),
)
SCHEDULERS = Column("scheduler", "scheduler", 11, ".0f")
PLACING = ((LocalDispatcher, "submit"),)
SETTLING = ((LocalDispatcher, "settle"), (Recorder, "catch_up"))
SCHEDULER = ((FrameReader, "feed"), (Channel, "flush"), (Recorder, "catch_up"))
WHOLE = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
    % (len(path.ANSWER), path.ANSWER)
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"object":"chat.completion.chunk","choices":[{"delta":{"content":"token"}}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class End:
    """Stands in for a socket, with a descriptor that can be polled."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self._ends = socket.socketpair()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8000

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 5000


class Wire(asyncio.Transport):
    """Stands in for a connection: ``written`` is called for each write."""

    def __init__(self, written: Callable[[], object] = lambda: None) -> None:
        super().__init__({"socket": End()})
        self._written = written

    def write(self, data: Any) -> None:
        self._written()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass


class Rig:
    """Clients and idle connections to instances of a server, none of which has a socket."""

    def __init__(
        self, server: Any, key: str, prompt_bytes: int, pass_s: Callable[[float], None]
    ) -> None:
        self._key = key
        self._pass_s = pass_s
        self._text = path.prompt_of(prompt_bytes)
        self._number = 0
        self._asked: list[UpstreamConnection] = []
        for instance in server.gateway.fleet.instances.values():
            pool = instance.pool
            while pool._idle:
                pool._idle.pop().abort()
            for _ in range(2 * AT_ONCE):
                connection = UpstreamConnection(pool)
                connection.connection_made(Wire(partial(self._asked.append, connection)))
                connection.idle_since_s = time.monotonic() + 1e6
                pool._open.add(connection)
                pool._idle.append(connection)
        self._clients = []
        for _ in range(AT_ONCE):
            client = server.config.http_protocol_class(
                config=server.config,
                server_state=server.server_state,
                app_state=server.lifespan.state,
            )
            client.connection_made(Wire())
            self._clients.append(client)

    def made(self, requests: int, *, streams: bool = False) -> list[bytes]:
        """So many requests, no two of them alike; making them is not to be counted."""
        made = []
        for number in range(self._number, self._number + requests):
            data = path.request(number, self._key, self._text)
            if streams:  # as many bytes
                data = data.replace(b'"stream": false', b'"stream": true ')
            made.append(data)
        self._number += requests
        return made

    async def ask(self, requests: Sequence[bytes]) -> None:
        for begin in range(0, len(requests), AT_ONCE):
            self._send(requests[begin : begin + AT_ONCE])
            for connection in await self._answering():
                self._pass_s(APART_S)
                connection.data_received(WHOLE)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def stream(self, requests: Sequence[bytes], chunks: int) -> None:
        """A stream for each client."""
        self._send(requests)
        answering = await self._answering()
        for connection in answering:
            connection.data_received(STREAM_HEAD + CHUNK)
        for _ in range(chunks - 1):
            for connection in answering:
                connection.data_received(CHUNK)
        for connection in answering:
            connection.data_received(STREAM_END)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _send(self, requests: Sequence[bytes]) -> None:
        for client, data in zip(self._clients, requests, strict=True):
            self._pass_s(APART_S)
            client.data_received(data)

    async def _answering(self) -> list[UpstreamConnection]:
        for _ in range(TURNS):  # some may have had to wait for the last ones to be settled
            if len(self._asked) >= AT_ONCE:
                break
            self._pass_s(APART_S)
            await asyncio.sleep(APART_S)
        answering, self._asked[:] = list(self._asked), []
        if len(answering) != AT_ONCE:
            raise RuntimeError(f"{len(answering)} of {AT_ONCE} requests reached an instance")
        return answering


async def count(
    feature: str, requests: int, folder: Path, callgrind: Any, *, by_worker: bool
) -> None:
    """In the process that valgrind runs: have each count written down by its name."""
    key = new_key()
    found = {name: rest for name, *rest in path.features(folder, key)}
    sections, prompt_bytes = found[feature]
    async with path.serving(folder, sections, by_worker=by_worker) as (server, _, gateway):

        def is_schedulers(what: Any) -> bool:
            if not by_worker:
                return True
            channels = [session.channel for session in gateway.hub.sessions]
            own = (gateway.dataplane.dispatcher, gateway.dataplane.recorder)
            return what in (*own, *channels, *(channel._reader for channel in channels))

        if by_worker:
            remote.LATER_S = records.LATER_S = SLOWER * LATER_S
        freeze_what_start_made()  # as a gateway does that has a process of its own
        callgrind.pass_s(time.monotonic())
        time.monotonic = callgrind.clock
        rig = Rig(server, key, prompt_bytes, callgrind.pass_s)
        await rig.ask(rig.made(WARM_UP))
        await rig.stream(rig.made(AT_ONCE, streams=True), CHUNKS[1])
        await asyncio.sleep(0.1)
        callgrind.start()
        await rig.ask(rig.made(SLOW_WARM_UP))
        await rig.stream(rig.made(AT_ONCE, streams=True), CHUNKS[1])
        whole = rig.made(requests)
        gc.collect()  # which comes once in a thousand requests: else in some features' counts
        callgrind.toggle()
        callgrind.zero()
        await rig.ask(whole)
        await asyncio.sleep(0.3)
        callgrind.dump("all")
        callgrind.zero()
        await asyncio.sleep(1.0)
        callgrind.dump("idle")
        callgrind.toggle()
        for number, chunks in enumerate(CHUNKS * STREAM_ROUNDS):
            streams = rig.made(AT_ONCE, streams=True)
            callgrind.toggle()
            callgrind.zero()
            await rig.stream(streams, chunks)
            callgrind.dump(f"stream {chunks} {number}")
            callgrind.toggle()
            await asyncio.sleep(0.3)
        parts = {"place": PLACING, "settle": SETTLING}
        if by_worker:
            parts["scheduler"] = SCHEDULER
        for name, methods in parts.items():
            whole = rig.made(requests)
            gc.collect()
            callgrind.zero()
            with only(callgrind.toggle, is_schedulers, *methods):
                await rig.ask(whole)
                await asyncio.sleep(0.3)
            callgrind.dump(name)
    os._exit(0)  # what is left to end would be counted for minutes


class only:
    """Have what these methods run counted, of the objects that are wanted, and nothing else."""

    def __init__(
        self,
        toggle: Callable[[], None],
        is_counted: Callable[[Any], bool],
        *methods: tuple[type, str],
    ) -> None:
        self._toggle = toggle
        self._is_counted = is_counted
        self._depth = 0  # one may call another
        self._methods = [(owner, name, getattr(owner, name)) for owner, name in methods]

    def __enter__(self) -> None:
        for owner, name, method in self._methods:
            setattr(owner, name, self._counted(method))

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self._methods:
            setattr(owner, name, method)

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any, **named: Any) -> Any:
            if not self._is_counted(args[0]):
                return method(*args, **named)
            if not self._depth:
                self._toggle()
            self._depth += 1
            try:
                return method(*args, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._toggle()

        return counted


def counts_of(folder: Path) -> dict[str, float]:
    """Thousands of instructions by name, of what valgrind wrote."""
    found = {}
    for file in folder.glob("callgrind.*"):
        text = file.read_text("utf-8", "replace")
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        summary = re.search(r"^summary: (\d+)", text, re.MULTILINE)
        if name and summary:
            found[name[1]] = int(summary[1]) / 1000
    return found


def measured(feature: str, requests: int, module: Path, *, by_worker: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="instructions-") as folder:
        command = [
            *("valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"),
            f"--callgrind-out-file={folder}/callgrind.%p",
            *(sys.executable, str(Path(__file__).resolve()), "--within", folder),
            *(["--compiled"] if compiled.ASKED else []),
            *(["--workers"] if by_worker else []),
            *("--feature", feature, "--requests", str(requests)),
        ]
        environment = {**os.environ, "PYTHONPATH": f"{module}:{os.environ.get('PYTHONPATH', '')}"}
        environment["PYTHONHASHSEED"] = "0"
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = counts_of(Path(folder))
        if not {"all", "place", "settle"} <= set(found):
            raise SystemExit(f"{feature}: nothing was counted: {ran.stderr[-2000:]}")
    few, many = (
        min(count for name, count in found.items() if name.startswith(f"stream {chunks} "))
        for chunks in CHUNKS
    )
    return {
        "all": found["all"] / requests,
        "place": found["place"] / requests,
        "settle": found["settle"] / requests,
        "scheduler": found.get("scheduler", 0.0) / requests,
        "idle": found["idle"],
        "stream": many / AT_ONCE,
        "chunk": (many - few) / AT_ONCE / (CHUNKS[1] - CHUNKS[0]),
    }


def rows(wanted: Sequence[str], requests: int, *, by_worker: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="instructions-") as folder:
        module = Path(folder, f"callgrind{sysconfig.get_config_var('EXT_SUFFIX')}")
        include = sysconfig.get_path("include")
        compiler = ["gcc", "-O2", "-shared", "-fPIC", f"-I{include}", "-o", str(module)]
        subprocess.run([*compiler, str(HERE / "callgrind.c")], check=True)
        names = [name for name, *_ in path.features(Path(folder), new_key())]
        default = None
        for name in names:
            if name in wanted or not wanted:
                row = measured(name, requests, module.parent, by_worker=by_worker)
                default = row["all"] if name == names[0] else default
                row["more"] = None if default is None else row["all"] / default - 1
                yield {"feature": name, **row, "met": is_met(name, names[0], row)}


def is_met(name: str, default: str, row: dict[str, Any]) -> bool:
    if name == default:
        return row["all"] <= GOAL and row["place"] + row["settle"] <= SCHEDULER_GOAL
    return name not in MORE_GOALS or row["more"] is None or row["more"] <= MORE_GOALS[name]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--feature", action="append", default=[], help="only these, by name")
    parser.add_argument("--requests", type=int, default=160, help="that are counted of each")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)  # of the counted process
    parser.add_argument("--compiled", action="store_true", help=compiled.HELP)
    parser.add_argument("--workers", action="store_true", help="by a worker; see above")
    args = parser.parse_args(argv)
    if args.within is not None:
        import callgrind  # made by the process that has started this one
        import uvloop

        uvloop.run(
            count(args.feature[0], args.requests, args.within, callgrind, by_worker=args.workers)
        )
        return 0
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    columns = (*COLUMNS, SCHEDULERS) if args.workers else COLUMNS
    found = rows(args.feature, args.requests, by_worker=args.workers)
    return report(found, columns, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
