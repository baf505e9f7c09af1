"""A batch beside requests that clients wait for: what these lose, what it gets, when it ends.

Four unequal emulated instances, the gateway and its clients share one event loop in virtual time
(``tests/fakes/clock``): what else the machine does matters little. Every answer's length is asked
for as ``min_tokens``, at which no gateway looks; all have a limit of 1024.

    alone      interactive requests at a share of what the instances can do
    beside     the same requests with a batch that lasts longer than they do
    ends       when a batch was said to end, beside the same requests until it does
    night      the same of a batch alone, and what ``simulate`` says of all at once
    most       what any spread over them could do beside these, by the cost model
    memory     a whole gateway's memory for short and long files, in processes and real time
"""

import argparse
import asyncio
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters import PROFILES
from hetero_gateway.files.profile_file import (
    load_profile,
    profile_document,
    write_profile_file,
)
from hetero_gateway.files.trace import LoadRequest, schedule, synthetic_trace
from hetero_gateway.lab.emulator.settings import EmulatorSettings, LogNormalOutputs
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import RequestRecord
from tests.chaos.batches import shared_storage
from tests.chaos.gateway import GatewayProcess
from tests.fakes.clock import VirtualClock
from tests.fakes.emulated import emulated
from tests.fakes.running import config_for, eventually, running_gateway
from tests.fakes.vllm import fake_instances

MODEL = "Llama-3-8B"
LIMIT = 1024
# What the four do together in the long run, requests per second (`simulate`, "bound").
_BOUND_PER_S = 48.8


@dataclass
class Told:
    """What a batch said, four times a second: (when, done, predicted end)."""

    total: int
    seen: list[tuple[float, int, float | None]]
    began_s: float = 0.0
    ended_s: float = 0.0


@asynccontextmanager
async def rig(directory: Path, seats: int) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        urls, profiles = [], []
        for number, name in enumerate(PROFILES):
            profile = replace(load_profile(name), max_num_seqs=seats)
            profiles.append(str(directory / f"{number}.yaml"))
            write_profile_file(Path(profiles[-1]), profile_document(profile, {"how": "derived"}))
            settings = EmulatorSettings(
                profile, (MODEL,), lengths=LogNormalOutputs(1, 0), seed=number
            )
            url, _ = await stack.enter_async_context(emulated(settings))
            urls.append(url)
        config = config_for(
            [_Addressed(url) for url in urls],
            profiles=tuple(profiles),
            batches={"directory": str(directory / "batches"), "max_lines": 1_000_000},
        )
        running = await stack.enter_async_context(running_gateway(config))
        await eventually(lambda: MODEL in running.gateway.fleet.models())
        yield running


@dataclass
class _Addressed:
    url: str


def maker(*, stream: bool, limit: int = LIMIT) -> BodyMaker:
    return BodyMaker(MODEL, PromptKind.CHAT, stream, 4.0, filler_pool(1), max_tokens=limit)


def lines(count: int, seed: int, shorter: int = 1) -> Sequence[bytes]:
    """``shorter``: by what their prompts and answers are divided."""
    rows, made = synthetic_trace(count, seed), maker(stream=False, limit=LIMIT // shorter)
    return [
        b'{"custom_id":"c%d","method":"POST","url":"/v1/chat/completions","body":%b}\n'
        % (
            i,
            made.body(
                100_000_000 + i, -(-row.input_tokens // shorter), -(-row.output_tokens // shorter)
            ),
        )
        for i, row in enumerate(rows)
    ]


async def start_batch(url: str, file: bytes) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        # Its storage opens beside it.
        while (await client.get("/v1/batches")).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        form = {"purpose": "batch"}
        up = await client.post("/v1/files", data=form, files={"file": ("in.jsonl", file)})
        batch = await client.post(
            "/v1/batches",
            json={
                "input_file_id": up.json()["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        )
        return str(batch.json()["id"])


async def follow(running: Any, batch_id: str, until: asyncio.Event | None = None) -> Told:
    told, runner = Told(0, []), running.gateway.batches.runner
    mine: list[Any] = []
    while not mine:
        await asyncio.sleep(0.1)
        mine = [each for each in runner.running if each.batch.id == batch_id]
    batch = mine[0].batch
    told.total, told.began_s = batch.total, time.monotonic()
    while any(e.batch is batch for e in runner.running):
        if until is not None and until.is_set():
            break
        end = runner.predicted_end_unix_s(batch)
        at_s = time.monotonic()
        told.seen.append((at_s, batch.done, None if end is None else end - time.time() + at_s))
        await asyncio.sleep(0.25)
    told.ended_s = time.monotonic()
    return told


async def interactive(
    url: str, requests: Sequence[LoadRequest], streamed: int, records: list[RequestRecord]
) -> None:
    """Each so many-th of them streams; ``records`` are put there as they are made."""
    async with asyncio.TaskGroup() as tasks:
        for stream in (True, False):
            those = [r for i, r in enumerate(requests) if (i % streamed == 0) is stream]
            if those:
                asking = replay(
                    parse_target(url), those, maker(stream=stream), records.append, timeout_s=3600
                )
                tasks.create_task(asking)


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def figures(records: Sequence[RequestRecord], after_s: float) -> dict[str, float]:
    good = [r for r in records if r.error is None and r.sent_s >= after_s]
    ttfts, latencies = [r.ttft_s or 0.0 for r in good if r.streamed], [r.latency_s for r in good]
    return {
        "requests": len(good),
        "errors": sum(r.error is not None for r in records),
        "ttft_mean_s": sum(ttfts) / len(ttfts),
        "ttft_p99_s": quantile(ttfts, 0.99),
        "latency_mean_s": sum(latencies) / len(latencies),
        "latency_p99_s": quantile(latencies, 0.99),
    }


async def day(args: argparse.Namespace, directory: Path, *, beside: bool) -> dict[str, Any]:
    """Interactive requests, alone or beside a batch that was there before them."""
    rate = args.load * _BOUND_PER_S
    rows = synthetic_trace(round(rate * (args.warm_s + args.seconds)), 7)
    requests = schedule(rows, rate_per_s=rate, seed=7)
    async with rig(directory, args.seats) as running:
        over = asyncio.Event()
        following = None
        if beside:
            batch_id = await start_batch(running.url, b"".join(lines(args.lines, 3)))
            following = asyncio.create_task(follow(running, batch_id, over))
        began_s, records = time.monotonic(), list[RequestRecord]()
        await interactive(running.url, requests, args.streamed, records)
        over.set()
        told = figures(records, args.warm_s)
        last_s = max(r.sent_s for r in records)
        if following is not None:
            batch = await following
            at = [(t - began_s, done) for t, done, _ in batch.seen]
            done = [d for t, d in at if args.warm_s <= t <= last_s]
            told["batch_lines_per_s"] = (done[-1] - done[0]) / (last_s - args.warm_s)
            told["all_per_s"] = told["batch_lines_per_s"] + rate
            told["lasted"] = float(done[-1] < batch.total)
        return told


async def night(
    args: argparse.Namespace, directory: Path, records: list[RequestRecord] | None = None
) -> Told:
    """A batch to its end, alone or beside interactive requests that are there before it.

    ``records``: where those of these go.
    """
    made, rate = lines(args.lines, 5, args.shorter), args.load * _BOUND_PER_S
    async with rig(directory, args.seats) as running, asyncio.TaskGroup() as tasks:
        if records is not None:
            # Longer than it takes by far.
            rows = synthetic_trace(round(rate * (args.lines / 4 / args.shorter + 600)), 7)
            requests = schedule(rows, rate_per_s=rate, seed=7)
            asking = tasks.create_task(interactive(running.url, requests, args.streamed, records))
            await asyncio.sleep(args.warm_s)
        batch_id = await start_batch(running.url, b"".join(made))
        told = await follow(running, batch_id)
        if records is not None:
            asking.cancel()
        return told


def errors_of(told: Told) -> dict[str, Any]:
    """How wrong its predicted ends were, as shares of how long it took, from a tenth on."""
    took_s = told.ended_s - told.began_s
    errors = [
        (done / told.total, (end - told.began_s) / took_s - 1)
        for _, done, end in told.seen
        if end is not None and done >= told.total / 10
    ]
    return {
        "took_s": took_s,
        "worst_error": max(errors, key=lambda e: abs(e[1])),
        "errors": {
            share: next(error for done, error in errors if done >= share)
            for share in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
        },
    }


def in_virtual_time(work: Any) -> Any:
    with closing(VirtualClock()) as clock, pytest.MonkeyPatch.context() as patch:
        clock.install(patch)
        clock.threads_take_time = False
        with asyncio.Runner(loop_factory=clock.new_loop) as runner:
            return runner.run(work)


def simulated_s(count: int, seed: int, directory: Path) -> float:
    """How long `simulate` takes for the same lines, all at once."""
    cluster, trace = directory / "cluster.yaml", directory / "trace.csv"
    with trace.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "input_tokens", "output_tokens"))
        rows = synthetic_trace(count, seed)
        writer.writerows((0, row.input_tokens, row.output_tokens) for row in rows)
    entries = "".join(f"  - {{id: i{i}, profile: {p}}}\n" for i, p in enumerate(PROFILES))
    cluster.write_text(f"instances:\n{entries}")
    command = (
        *(sys.executable, "-m", "hetero_gateway", "simulate", "-c", cluster, "--requests", trace),
        *("--policy", "finish-time", "--rate", "inf", "--seeds", "1", "--count", str(count)),
        *("--in-order", "--objective", "makespan", "--json"),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    per_s = json.loads(done.stdout)["results"][0]["throughput_tokens_per_s"]["mean"]
    return float(sum(row.output_tokens for row in rows) / per_s)


def most(load: float) -> dict[str, float]:
    """Shares of all that they can do, by how many times as long others' requests may take.

    Of steps of s0 + s1·n, prompts among them, at whatever rates each instance is used; others'
    requests have those that are fastest then. Nothing is left to chance.
    """
    rows = synthetic_trace(100_000, 1)
    prompts, outputs = (
        np.array([getattr(row, name) for row in rows], float)
        for name in ("input_tokens", "output_tokens")
    )
    held = float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
    tables = []
    for name in PROFILES:
        profile = load_profile(name)
        c = profile.constants
        there = np.linspace(0, min(profile.max_num_seqs, profile.kv_capacity_tokens / held), 2000)
        steps_s = c.p8 + c.p7 * held + (c.p6 + c.p5 * held) * there
        prompt_s = c.p1 * prompts.mean()
        per_s = there / (outputs.mean() * steps_s + there * prompt_s)
        tables.append((per_s, prompt_s + outputs.mean() * steps_s / (1 - per_s * prompt_s)))
    full, rate = np.array([per_s[-1] for per_s, _ in tables]), load * _BOUND_PER_S

    def fastest_first(used: Any) -> tuple[Any, Any]:
        """(what others have of it, latencies), for rows of rates."""
        latencies = np.stack([np.interp(used[:, i], *tables[i]) for i in range(len(tables))], -1)
        order = np.argsort(latencies, -1)
        used, latencies = (np.take_along_axis(each, order, -1) for each in (used, latencies))
        return np.clip(rate - (np.cumsum(used, -1) - used), 0, used), latencies

    def best(good: Any, value: Any) -> Any:
        """The rates for which a value is highest, on finer and finer grids."""
        low, high, found = np.zeros(len(full)), full, None
        for _ in range(7):
            axes = [np.linspace(a, b, 20) for a, b in zip(low, high, strict=True)]
            used = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(full))
            theirs, latencies = fastest_first(used)
            mean_s = (theirs * latencies).sum(-1) / rate
            enough = theirs.sum(-1) >= rate * (1 - 1e-9)
            worth = np.where(enough & good(mean_s), value(used, mean_s), -np.inf)
            if found is None or worth.max() > found[0]:
                found = worth.max(), used[worth.argmax()]
            width = (high - low) / 8
            low, high = np.maximum(0, found[1] - width), np.minimum(full, found[1] + width)
        return found[0]

    alone_s = -best(lambda mean_s: mean_s > 0, lambda _, mean_s: -mean_s)
    return {
        f"{times}": best(lambda s, t=times: s <= t * alone_s, lambda u, _: u.sum(-1)) / full.sum()
        for times in (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
    }


def memory(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The most that a whole gateway's process ever had, by lines of its one batch, MB."""
    told = {}
    for count in (1000, args.memory_lines):
        (directory / f"{count}").mkdir()
        place = str(directory / f"{count}")
        command = (sys.executable, "-m", "benchmarks.scheduling.batches", "_one", place)
        command += ("--lines", str(count), *(["--shared"] if args.shared else []))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        told[str(count)] = float(done.stdout.split()[-1])
    return {"most_mb": told, "more_mb": told[str(args.memory_lines)] - told["1000"]}


def peak_mb(pid: int) -> float:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmHWM")) / 1024


async def one(directory: Path, count: int, section: dict[str, str]) -> float:
    """Serve a batch of so many short lines in a process of its own; returns its peak in MB.

    A line of it is 600 bytes; the instance, a few bytes at once, is in this process.

    Args:
        section: where the gateway keeps batches.
    """
    async with fake_instances(1, models=(MODEL,)) as fakes:
        config = {
            "server": {"port": 0},
            "batches": {**section, "max_lines": 1_000_000},
            "instances": [{"id": "a", "base_url": fakes[0].url, "profile": PROFILES[0]}],
            "log": {"access": False},
        }
        path, log = directory / "gateway.yaml", directory / "gateway.log"
        path.write_text(json.dumps(config))
        gateway = await GatewayProcess.start(path, log)
        try:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 500}]}
            line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
            file = b"".join(
                json.dumps({"custom_id": f"c{i}"} | line).encode() + b"\n" for i in range(count)
            )
            batch_id = await start_batch(gateway.url, file)
            status = ""
            while status != "completed":
                await asyncio.sleep(1)
                status = (await gateway.get(f"/v1/batches/{batch_id}"))["status"]
            return peak_mb(gateway.pid)
        finally:
            await gateway.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", default=["alone", "beside", "night"])
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--warm-s", type=float, default=120.0)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--streamed", type=int, default=1, help="one of so many streams")
    parser.add_argument("--shorter", type=int, default=1, help="lines are so many times shorter")
    parser.add_argument("--seats", type=int, default=256, help="of each instance")
    parser.add_argument("--memory-lines", type=int, default=50_000)
    parser.add_argument("--shared", action="store_true", help="memory over PostgreSQL and S3")
    args = parser.parse_args()
    if args.parts[0] == "_one":
        place = Path(args.parts[1])
        with ExitStack() as stack:
            section = {"directory": str(place / "batches")}
            if args.shared:
                _, section = shared_storage(stack)
            print(asyncio.run(one(place, args.lines, section)))
        return 0
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            directory = Path(folder, part)
            directory.mkdir()
            began_s = time.perf_counter()
            if part in ("alone", "beside"):
                document[part] = in_virtual_time(day(args, directory, beside=part == "beside"))
            elif part == "most":
                document[part] = most(args.load)
            elif part == "memory":
                document[part] = memory(args, directory)
            elif part == "ends":
                records: list[RequestRecord] = []
                told = in_virtual_time(night(args, directory, records))
                document[part] = errors_of(told) | {"others": figures(records, args.warm_s)}
            elif part == "night":
                document[part] = errors_of(in_virtual_time(night(args, directory)))
                if args.shorter == 1:
                    document[part]["simulated_s"] = simulated_s(args.lines, 5, directory)
            print(part, json.dumps(document[part]), f"({time.perf_counter() - began_s:.0f} s)")
    if {"alone", "beside"} <= set(document):
        for name in ("ttft_mean_s", "ttft_p99_s", "latency_mean_s", "latency_p99_s"):
            print(f"{name}: {document['beside'][name] / document['alone'][name]:.3f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
