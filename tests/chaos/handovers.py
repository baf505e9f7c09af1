"""Gateways that take over from each other, and clients on kept connections who must not notice.

    python -m tests.chaos.handovers [--handovers 20] [--clients 200] [--every 2] [--workers 1]
                                    [--seed 1] [--json]

Half of the clients ask for streams, half for JSON; each keeps its connection as long as the gateway
does, and opens another one where an answer said that it is the last. A request is *lost* that has
no answer, or not 200; an answer is *broken* that is not whole. At their ends, the loads of all
gateways are 0.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.gateway import GatewayProcess
from tests.chaos.instances import MODEL, make_instances, write_profiles
from tests.fakes.processes import until

_PATH = "/v1/completions"
_TOKENS = (5, 40)
_PAUSE_S = 0.5  # of a client between two requests, at most
_ENDS_WITHIN_S = 60.0
_LEFT = re.compile(r"have finished: (\d+) left, with (\S+) s of load")


@dataclass
class Seen:
    """What the clients saw; ``faults``: what was wrong, a line each."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.faults.append(f"{kind}: {what}")


class Client:
    """One that sends a request after the other, on one connection as long as that is kept."""

    def __init__(self, port: int, *, streams: bool, rng: random.Random, seen: Seen) -> None:
        self._port, self._streams, self._rng, self._seen = port, streams, rng, seen
        self._writer: asyncio.StreamWriter | None = None
        self._answered = 0  # on this connection

    async def run(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self.ask()
            await asyncio.sleep(self._rng.uniform(0, _PAUSE_S))
        self._close()

    async def ask(self) -> None:
        tokens = self._rng.randint(*_TOKENS)
        asked = {"model": MODEL, "prompt": "word" * 50, "max_tokens": tokens, "ignore_eos": True}
        body = json.dumps(asked | {"stream": self._streams}).encode()
        if self._writer is None:
            self._seen.counts["connections"] += 1
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._answered = 0
        head = f"POST {_PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        self._seen.counts["streams" if self._streams else "documents"] += 1
        try:
            self._writer.write(head.encode() + body)
            said = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        except (OSError, asyncio.IncompleteReadError) as error:
            self._seen.fault("lost", f"after {self._answered} on this connection: {error!r}")
            self._close()
            return
        try:
            told = await self._read_body(said)
            if b" 200 " not in said[:20]:
                self._seen.fault("lost", f"{said[:20]!r} {told[:200]!r}")
            elif not self._is_whole(told, tokens):
                self._seen.fault("broken", f"{tokens} tokens: {told[-200:]!r}")
            self._answered += 1
            if b"connection: close" in said:
                self._close()
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            self._seen.fault("broken", repr(error))
            self._close()

    async def _read_body(self, head: bytes) -> bytes:
        length = re.search(rb"content-length: (\d+)", head)
        if length is not None:
            return await self._reader.readexactly(int(length[1]))
        told = b""
        while size := int(await self._reader.readline(), 16):
            told += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return told

    def _is_whole(self, told: bytes, tokens: int) -> bool:
        if not self._streams:
            return bool(json.loads(told)["usage"]["completion_tokens"] == tokens)
        events = [line[6:] for line in told.decode().splitlines() if line.startswith("data: ")]
        texts = [c["text"] for event in events[:-1] for c in json.loads(event)["choices"]]
        return events[-1] == "[DONE]" and len("".join(texts).split()) == tokens

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def run(args: argparse.Namespace, directory: Path) -> Seen:
    seen, rng = Seen(), random.Random(args.seed)
    instances = make_instances(args.instances, args.seed)
    for instance in instances:
        await instance.start()
    profiles = write_profiles(instances, directory)
    config = {
        "health": {"probe_interval_s": 0.5},
        "instances": [
            {"id": i.id, "base_url": i.url, "profile": profiles[i.id]} for i in instances
        ],
    }
    path = directory / "gateway.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    workers = [int(each) for each in args.workers.split(",")]
    gateway = await GatewayProcess.start(path, directory / "0.log", workers[0])
    over = asyncio.Event()
    clients = [
        Client(gateway.port, streams=i % 2 == 0, rng=random.Random(rng.random()), seen=seen)
        for i in range(args.clients)
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client.run(over))
            for number in range(1, args.handovers + 1):
                await asyncio.sleep(args.every)
                more = "--port", str(gateway.port), "--takeover"
                log = directory / f"{number}.log"
                before = gateway
                count = workers[number % len(workers)]
                gateway = await GatewayProcess.start(path, log, count, *more)
                seen.counts["handovers"] += 1
                await see_off(before, seen)
            await asyncio.sleep(args.every)
            over.set()
        with contextlib.suppress(TimeoutError):
            await until(gateway.left_over, lambda left: not left)
        for what in await gateway.left_over() + gateway.alarms():
            seen.fault("left", what)
    finally:
        await gateway.aclose()
        for instance in instances:
            instance.close()
    return seen


async def see_off(gateway: GatewayProcess, seen: Seen) -> None:
    """One that was taken over from: it ends, with nothing left."""
    code = await gateway.wait(_ENDS_WITHIN_S)
    left = _LEFT.search(gateway.log.read_text("utf-8", "replace"))
    if code != 0 or left is None or (left[1], left[2]) != ("0", "0"):
        seen.fault("left", f"exit code {code}, {left and left[0]}")
    for what in gateway.alarms():
        seen.fault("left", what)
    await gateway.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--handovers", type=int, default=20)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--every", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", default="1", help="of each gateway, or of them in turn: 2,1")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="handovers-") as directory:
        seen = asyncio.run(run(args, Path(directory)))
    names = "handovers", "connections", "streams", "documents", "lost", "broken", "left"
    document: dict[str, Any] = {name: seen.counts[name] for name in names}
    document["faults"] = seen.faults[:20]
    lines = [f"{name}: {value}" for name, value in document.items()]
    sys.stdout.write(json.dumps(document) if args.json else "\n".join([*lines, ""]))
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
