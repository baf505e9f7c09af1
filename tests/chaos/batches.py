"""A batch whose gateway, workers and instances are killed every few seconds.

    python -m tests.chaos.batches [--lines 10000] [--every 5] [--seed 1] [--workers 1] [--json]

Each custom_id is in the output or among the errors, once; what stood in the files of answers at any
kill is there in the end, byte for byte; and what went again says so.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.gateway import GatewayProcess
from tests.chaos.instances import MODEL, Instance, make_instances, write_profiles
from tests.fakes.processes import children_of

_OVER = ("completed", "failed", "expired", "cancelled")
_WITHIN_S = 1800.0
_PATH = "/v1/chat/completions"


@dataclass
class Seen:
    """What was seen; ``faults``: what was wrong, a line each."""

    kills: Counter[str] = field(default_factory=Counter)
    written: set[bytes] = field(default_factory=set)  # whole answers at any kill
    counts: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    took_s: float = 0.0
    faults: list[str] = field(default_factory=list)


class Gateway:
    """One that comes back on its port."""

    def __init__(self, config: Path, directory: Path, workers: int) -> None:
        self._config, self._directory, self._workers = config, directory, workers
        self._starts = 0
        self.process: GatewayProcess | None = None

    async def start(self) -> None:
        self._starts += 1
        log = self._directory / f"gateway-{self._starts}.log"
        port = [] if self.process is None else ["--port", str(self.process.port)]
        for tries_left in range(20, -1, -1):
            try:
                self.process = await GatewayProcess.start(self._config, log, self._workers, *port)
                return
            except RuntimeError:
                # While it was away somebody's connection may have had its port.
                if not tries_left:
                    raise
                await asyncio.sleep(1)

    def kill(self, rng: random.Random, seen: Seen) -> bool:
        """The whole of it, or one of its processes, as it falls. False: it comes back itself."""
        assert self.process is not None
        there = children_of(self.process.pid)
        role = rng.choice(["gateway", *sorted(there)])
        if role != "gateway":
            os.kill(there[role], signal.SIGKILL)
            seen.kills["scheduler" if role == "null" else "worker"] += 1
            return False
        self.process.process.kill()
        self.process.process.wait()
        seen.kills["gateway"] += 1
        return True


def lines(count: int, rng: random.Random) -> bytes:
    made = []
    for number in range(count):
        words = " ".join(f"w{rng.randrange(1000)}" for _ in range(rng.randrange(5, 60)))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": rng.randrange(4, 24),
            "ignore_eos": True,
        }
        line = {"custom_id": f"c{number}", "method": "POST", "url": _PATH, "body": body}
        made.append(json.dumps(line).encode() + b"\n")
    return b"".join(made)


def whole_answers(folder: Path) -> set[bytes]:
    found = set()
    for path in (folder / "files").iterdir():
        for text in path.read_bytes().splitlines(keepends=True):
            if text.startswith(b'{"id":"batch_req_') and text.endswith(b"\n"):
                found.add(text)
    return found


async def kill_gateway(
    gateway: Gateway, folder: Path, every_s: float, rng: random.Random, seen: Seen
) -> None:
    while True:
        await asyncio.sleep(every_s * rng.uniform(0.6, 1.4))
        if gateway.kill(rng, seen):
            seen.written |= whole_answers(folder)
            await gateway.start()


async def kill_instances(
    instances: list[Instance], every_s: float, rng: random.Random, seen: Seen
) -> None:
    while True:
        await asyncio.sleep(every_s * rng.uniform(0.6, 1.4))
        victim = rng.choice(instances)
        victim.kill()
        seen.kills["instance"] += 1
        await victim.start()


async def ask(http: httpx.AsyncClient, method: str, path: str, **more: Any) -> httpx.Response:
    """Again until it is answered: the gateway may be away."""
    give_up_s = time.monotonic() + _WITHIN_S
    while True:
        try:
            answer = await http.request(method, path, **more)
            if answer.status_code < 500:
                answer.raise_for_status()
                return answer
        except httpx.TransportError:
            pass
        if time.monotonic() > give_up_s:
            raise TimeoutError(path)
        await asyncio.sleep(0.2)


async def run(args: argparse.Namespace, directory: Path) -> Seen:
    seen, rng = Seen(), random.Random(args.seed)
    folder = directory / "batches"
    instances = make_instances(4, args.seed)
    for instance in instances:
        await instance.start()
    profiles = write_profiles(instances, directory)
    config = {
        "health": {"probe_interval_s": 0.5},
        "batches": {"directory": str(folder)},
        "instances": [
            {"id": i.id, "base_url": i.url, "profile": profiles[i.id]} for i in instances
        ],
    }
    (directory / "gateway.yaml").write_text(yaml.safe_dump(config), "utf-8")
    gateway = Gateway(directory / "gateway.yaml", directory, args.workers)
    await gateway.start()
    assert gateway.process is not None
    killing: list[asyncio.Task[None]] = []
    try:
        url = gateway.process.url
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            form = {"purpose": "batch"}
            up = await ask(
                http, "POST", "/v1/files", data=form, files={"file": lines(args.lines, rng)}
            )
            asked = {"input_file_id": up.json()["id"], "endpoint": _PATH}
            batch_id = (await ask(http, "POST", "/v1/batches", json=asked)).json()["id"]
            began_s = time.monotonic()
            killing = [
                asyncio.create_task(kill_gateway(gateway, folder, args.every, rng, seen)),
                asyncio.create_task(kill_instances(instances, args.every, rng, seen)),
            ]
            batch: dict[str, Any] = {"status": ""}
            while batch["status"] not in _OVER:
                for each in killing:
                    if each.done():
                        each.result()
                await asyncio.sleep(0.5)
                batch = (await ask(http, "GET", f"/v1/batches/{batch_id}")).json()
            seen.took_s = time.monotonic() - began_s
            for each in killing:
                each.cancel()
            await asyncio.gather(*killing, return_exceptions=True)
            if gateway.process.process.poll() is not None:
                await gateway.start()
            texts: list[bytes] = []
            for name in ("output_file_id", "error_file_id"):
                if batch[name] is not None:
                    content = await ask(http, "GET", f"/v1/files/{batch[name]}/content")
                    texts += content.content.splitlines(keepends=True)
        judge(args.lines, batch, texts, seen)
        seen.faults += gateway.process.alarms()
    finally:
        for each in killing:
            each.cancel()
        await gateway.process.aclose()
        for instance in instances:
            instance.close()
    return seen


def judge(count: int, batch: dict[str, Any], texts: list[bytes], seen: Seen) -> None:
    answers = [json.loads(text) for text in texts]
    ids = Counter(each["custom_id"] for each in answers)
    wanted = {f"c{number}" for number in range(count)}
    if batch["status"] != "completed":
        seen.faults.append(f"it is {batch['status']}")
    seen.faults += [f"{each} is there {n} times" for each, n in ids.items() if n > 1]
    seen.faults += [f"{each} is not there" for each in wanted - set(ids)]
    seen.faults += [f"{each} was never asked" for each in set(ids) - wanted]
    lost = seen.written - set(texts)
    seen.faults += [f"was written, and is not there: {text[:200]!r}" for text in lost]
    seen.repeated = batch["repeated_lines"]
    told = sum(bool(each.get("repeated")) for each in answers)
    if told > seen.repeated:
        seen.faults.append(f"{told} answers say that they were repeated, the batch {seen.repeated}")
    seen.counts = batch["request_counts"]
    if seen.counts["completed"] + seen.counts["failed"] != count:
        seen.faults.append(f"counts are {seen.counts}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--every", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batches-") as directory:
        seen = asyncio.run(run(args, Path(directory)))
    document = {
        "kills": dict(seen.kills),
        "counts": seen.counts,
        "repeated": seen.repeated,
        "written_at_kills": len(seen.written),
        "took_s": round(seen.took_s, 1),
        "violations": seen.faults[:50],
        "broken": len(seen.faults),
    }
    rows = [f"{name}: {value}" for name, value in document.items()]
    sys.stdout.write(json.dumps(document) if args.json else "\n".join([*rows, ""]))
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
