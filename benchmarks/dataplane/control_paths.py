"""How long each control path holds the event loop, in CPU time: clients, models and instances many.

Goal: 10 000 keys × 10 models, no path above 50 ms at a time. A gateway in this process has
instances that nobody can reach (a control path asks none), usage of each client and model, and
decisions; each path is asked over ASGI, while the loop's turns are counted, and the CPU time
between two of them is taken: the process's, since a thread may keep the interpreter's lock.

    python benchmarks/dataplane/control_paths.py
    python benchmarks/dataplane/control_paths.py --keys 3000 --instances 500 --models 2000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import yaml

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Outcome, Reject
from hetero_gateway.engines.vllm import ModelCard
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.serve.app import App, create_app

MOST_HELD_S = 0.05
PROFILES = ("A100-80GB-SXM/Llama-3-8B/tp1", "L40S-48GB/Llama-3-8B/tp1")


class Held(NamedTuple):
    """Of one path: the longest hold of the loop, s of CPU time; all of it; turns; bytes sent."""

    most_s: float
    cpu_s: float
    turns: int
    size_bytes: int


class Size(NamedTuple):
    """How many there are of each."""

    keys: int = 10_000
    models: int = 10
    instances: int = 100


def write_files(directory: Path, size: Size, *, limit: int = 1000) -> Path:
    """A configuration and its file of keys; the former's path."""
    keys = [
        {
            "name": f"client-{number}",
            "hash": "sha256:" + hashlib.sha256(b"%d" % number).hexdigest(),
            "requests_per_minute": limit,
        }
        for number in range(size.keys)
    ]
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    (directory / "keys.yaml").write_text(yaml.dump({"keys": keys}, Dumper=dumper))
    config = {
        "server": {"admin_key_env": "CONTROL_PATHS_ADMIN_KEY"},
        "clients": {"keys_file": "keys.yaml", "most_labels": size.keys},
        "health": {"probe_interval_s": 3600},
        "instances": [
            {
                "id": f"i{number}",
                "base_url": f"http://127.0.0.1:{number + 1}",
                "model": "model-0",
                "profile": PROFILES[number % len(PROFILES)],
            }
            for number in range(size.instances)
        ],
    }
    path = directory / "gateway.yaml"
    path.write_text(yaml.dump(config, Dumper=dumper))
    return path


def fill(app: App, size: Size) -> None:
    """Have instances serve all models, and clients have used them."""
    gateway = app.gateway
    names = [f"model-{number}" for number in range(size.models)]
    cards = {name: ModelCard(max_model_len=8192) for name in names}
    for instance in gateway.fleet.instances.values():
        instance.config = instance.config.model_copy(update={"model": None})
        instance.up = True
        gateway.fleet.list_models(instance, cards)
        gateway.fleet.publish(instance)
    usage = gateway.admission.usage
    for number in range(size.keys):
        for name in names[:10]:
            usage.count(f"client-{number}", name, 100, 10, 50)
    for instance_id in gateway.fleet.instances:
        for name in names[:10]:
            gateway.metrics.counts(name, instance_id).outcomes["completed"] += 1
    scheduler, now_s = gateway.fleet.scheduler, time.monotonic()
    for _ in range(300):
        ticket = scheduler.place(Request(names[0], 100, 100.0), now_s)
        assert not isinstance(ticket, Reject)
        assert ticket.decision is not None
        assert ticket.dispatch is not None
        gateway.dataplane.decisions.append(0.0, b"id", ticket.decision, 0.0)
        scheduler.settle(ticket.dispatch, Outcome.COMPLETED, now_s)


async def held(work: Callable[[], Awaitable[int]]) -> Held:
    """What this holds of the loop."""
    loop = asyncio.get_running_loop()
    most_s = last_s = begun_s = time.process_time()
    most_s, turns, done = 0.0, 0, False

    def tick() -> None:
        nonlocal most_s, last_s, turns
        now_s = time.process_time()
        most_s, last_s, turns = max(most_s, now_s - last_s), now_s, turns + 1
        if not done:
            loop.call_soon(tick)

    loop.call_soon(tick)
    await asyncio.sleep(0)
    try:
        size_bytes = await work()
    finally:
        done = True
    await asyncio.sleep(0)
    return Held(most_s, time.process_time() - begun_s, turns, size_bytes)


async def ask(app: App, path: str, key: str, *, first: bool = False) -> int:
    """Bytes that a path answers with, or its first event. Over ASGI: no socket is in between."""
    target, _, query = path.partition("?")
    size_bytes, asked, told = 0, False, asyncio.Event()

    async def receive() -> dict[str, object]:
        nonlocal asked
        if asked:
            await told.wait()
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        nonlocal size_bytes
        if message["type"] == "http.response.start":
            assert message["status"] == 200, (path, message)
            return
        body = message.get("body", b"")
        assert isinstance(body, bytes)
        size_bytes += len(body)
        if first and body:
            told.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "path": target, "raw_path": target.encode(), "query_string": query.encode(),
        "headers": [(b"host", b"localhost"), (b"authorization", b"Bearer " + key.encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "state": {},
    }  # fmt: skip
    await app(scope, receive, send)  # type: ignore[arg-type]
    return size_bytes


PATHS = (
    "/admin/clients", "/admin/usage", "/metrics", "/admin/instances", "/admin/decisions?limit=256",
    "/admin/explain?model=model-0&prompt_tokens=100", "/admin/requests", "/v1/models",
)  # fmt: skip


async def measure(path: Path, size: Size) -> dict[str, Held]:
    """By path, and of a reload of the file of keys."""
    config = load_gateway_config(path, {})
    app = create_app(config, path)
    results = {}
    await app.gateway.start()
    try:
        gc.collect()
        gc.freeze()  # as the server does
        fill(app, size)
        for each in PATHS:
            key = "0" if each.startswith("/v1") else "admin"
            results[each] = await held(lambda each=each, key=key: ask(app, each, key))
        results["/admin/events"] = await held(
            lambda: ask(app, "/admin/events", "admin", first=True)
        )
        results["a step of the dashboard's trend"] = await held(lambda: _step(app))
        path.with_name("keys.yaml").write_text(
            path.with_name("keys.yaml").read_text().replace("minute: 1000", "minute: 999")
        )
        results["reload"] = await held(lambda: _reload(app))
    finally:
        await app.gateway.stop()
    return results


async def _step(app: App) -> int:
    app.gateway.board._step()
    return 0


async def _reload(app: App) -> int:
    changed = await app.gateway.reloader.reload("a benchmark")
    assert changed["settings"]
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=Size().keys)
    parser.add_argument("--models", type=int, default=Size().models)
    parser.add_argument("--instances", type=int, default=Size().instances)
    args = parser.parse_args()
    size = Size(args.keys, args.models, args.instances)
    os.environ["CONTROL_PATHS_ADMIN_KEY"] = "admin"
    with tempfile.TemporaryDirectory() as directory:
        results = asyncio.run(measure(write_files(Path(directory), size), size))
    print(f"{size.keys} keys × {size.models} models, {size.instances} instances")
    print("longest hold   CPU in all   turns   MB   path")
    for name, each in results.items():
        print(
            f"{1e3 * each.most_s:9.1f} ms {1e3 * each.cpu_s:9.0f} ms {each.turns:7d} "
            f"{each.size_bytes / 1e6:5.1f}  {name}"
        )
    return 1 if max(each.most_s for each in results.values()) > MOST_HELD_S else 0


if __name__ == "__main__":
    sys.exit(main())
