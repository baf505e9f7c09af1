"""A batch whose gateway, workers and instances are killed every few seconds.

    python -m tests.chaos.batches [--lines 10000] [--every 5] [--seed 1] [--workers 1]
        [--gateways 1] [--json]

Each custom_id is in the output or among the errors, once; what stood among the answers at any kill
is there in the end, byte for byte; and what went again says so. Several gateways share PostgreSQL
and an S3 bucket in memory; one of them is killed at a time.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import yaml

from tests.chaos.gateway import GatewayProcess
from tests.chaos.instances import MODEL, Instance, make_instances, write_profiles
from tests.fakes.postgres import PASSWORD, PASSWORD_ENV, PostgresServer, postgres
from tests.fakes.processes import children_of
from tests.fakes.s3 import KEYS, fake_bucket

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

    def __init__(self, config: Path, directory: Path, workers: int, name: str) -> None:
        self._config, self._directory, self._workers = config, directory, workers
        self._name = name
        self._starts = 0
        self.process: GatewayProcess | None = None

    async def start(self) -> None:
        self._starts += 1
        log = self._directory / f"{self._name}-{self._starts}.log"
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


def whole_answers(folder: Path, server: PostgresServer | None) -> set[bytes]:
    """That are kept now."""
    if server is not None:
        with psycopg.connect(server.url, password=PASSWORD) as db:
            sql = "SELECT text FROM hetero_gateway_batches.answers"
            return {bytes(row[0]) for row in db.execute(sql)}
    found = set()
    for path in (folder / "files").iterdir():
        for text in path.read_bytes().splitlines(keepends=True):
            if text.startswith(b'{"id":"batch_req_') and text.endswith(b"\n"):
                found.add(text)
    return found


async def kill_gateways(
    gateways: list[Gateway],
    answers: Callable[[], set[bytes]],
    every_s: float,
    rng: random.Random,
    seen: Seen,
    over: asyncio.Event,
) -> None:
    # A start is not cancelled: what had begun would have the port.
    while not await passed(every_s * rng.uniform(0.6, 1.4), over):
        gateway = rng.choice(gateways)
        if gateway.kill(rng, seen):
            seen.written |= answers()
            await gateway.start()


async def passed(seconds: float, over: asyncio.Event) -> bool:
    """Whether it is over by then."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)
    return over.is_set()


async def kill_instances(
    instances: list[Instance],
    every_s: float,
    rng: random.Random,
    seen: Seen,
    over: asyncio.Event,
) -> None:
    while not await passed(every_s * rng.uniform(0.6, 1.4), over):
        victim = rng.choice(instances)
        victim.kill()
        seen.kills["instance"] += 1
        await victim.start()


async def ask(
    gateways: list[httpx.AsyncClient], method: str, path: str, **more: Any
) -> httpx.Response:
    """Again until it is answered: a gateway may be away."""
    give_up_s = time.monotonic() + _WITHIN_S
    while True:
        for gateway in gateways:
            try:
                answer = await gateway.request(method, path, **more)
                if answer.status_code < 500:
                    answer.raise_for_status()
                    return answer
            except httpx.TransportError:
                pass
        if time.monotonic() > give_up_s:
            raise TimeoutError(path)
        await asyncio.sleep(0.2)


def shared_storage(stack: contextlib.ExitStack) -> tuple[PostgresServer, dict[str, str]]:
    """What several gateways share, and their section."""
    server, bucket = stack.enter_context(postgres()), stack.enter_context(fake_bucket())
    os.environ.update({**KEYS, PASSWORD_ENV: PASSWORD})
    return server, {
        "database": server.url,
        "password_env": PASSWORD_ENV,
        "storage": "s3://bucket/batches",
        "storage_endpoint": bucket.url,
    }


async def run(args: argparse.Namespace, directory: Path, stack: contextlib.ExitStack) -> Seen:
    seen, rng = Seen(), random.Random(args.seed)
    folder, server = directory / "batches", None
    section = {"directory": str(folder)}
    if args.gateways > 1:
        server, section = shared_storage(stack)
    instances = make_instances(4, args.seed)
    for instance in instances:
        await instance.start()
    profiles = write_profiles(instances, directory)
    config = {
        "health": {"probe_interval_s": 0.5},
        "batches": section,
        "instances": [
            {"id": i.id, "base_url": i.url, "profile": profiles[i.id]} for i in instances
        ],
    }
    (directory / "gateway.yaml").write_text(yaml.safe_dump(config), "utf-8")
    gateways = [
        Gateway(directory / "gateway.yaml", directory, args.workers, f"gateway-{n}")
        for n in range(args.gateways)
    ]
    for gateway in gateways:
        await gateway.start()
    killing: list[asyncio.Task[None]] = []
    try:
        async with contextlib.AsyncExitStack() as clients:
            to = []
            for gateway in gateways:
                assert gateway.process is not None
                url = gateway.process.url
                client = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)
                to.append(await clients.enter_async_context(client))
            form = {"purpose": "batch"}
            up = await ask(
                to, "POST", "/v1/files", data=form, files={"file": lines(args.lines, rng)}
            )
            asked = {"input_file_id": up.json()["id"], "endpoint": _PATH}
            batch_id = (await ask(to, "POST", "/v1/batches", json=asked)).json()["id"]
            began_s = time.monotonic()
            answers = functools.partial(whole_answers, folder, server)
            over = asyncio.Event()
            killing = [
                asyncio.create_task(kill_gateways(gateways, answers, args.every, rng, seen, over)),
                asyncio.create_task(kill_instances(instances, args.every, rng, seen, over)),
            ]
            batch: dict[str, Any] = {"status": ""}
            while batch["status"] not in _OVER:
                for each in killing:
                    if each.done():
                        each.result()
                await asyncio.sleep(0.5)
                batch = (await ask(to, "GET", f"/v1/batches/{batch_id}")).json()
            seen.took_s = time.monotonic() - began_s
            over.set()
            await asyncio.gather(*killing)
            for gateway in gateways:
                assert gateway.process is not None
                if gateway.process.process.poll() is not None:
                    await gateway.start()
            texts: list[bytes] = []
            for name in ("output_file_id", "error_file_id"):
                if batch[name] is not None:
                    content = await ask(to, "GET", f"/v1/files/{batch[name]}/content")
                    texts += content.content.splitlines(keepends=True)
        judge(args.lines, batch, texts, seen)
        for gateway in gateways:
            assert gateway.process is not None
            seen.faults += gateway.process.alarms()
    finally:
        for each in killing:
            each.cancel()
        for gateway in gateways:
            if gateway.process is not None:
                await gateway.process.aclose()
        for instance in instances:
            instance.close()
    seen.faults += secrets_in(directory)
    return seen


def secrets_in(directory: Path) -> list[str]:
    """What logs must not have."""
    texts = {log.name: log.read_text("utf-8", "replace") for log in directory.glob("gateway-*.log")}
    hidden = PASSWORD, KEYS["AWS_SECRET_ACCESS_KEY"]
    return [f"{n} has a secret" for n, text in texts.items() if any(s in text for s in hidden)]


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
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="batches-") as directory,
        contextlib.ExitStack() as stack,
    ):
        seen = asyncio.run(run(args, Path(directory), stack))
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
