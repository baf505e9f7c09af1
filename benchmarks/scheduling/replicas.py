"""Four gateways that share over a real Redis, and one, in front of the same emulated instances.

    python benchmarks/scheduling/replicas.py [--seeds 5] [--seconds 40] [--only 0.7,burst]
        [--ways 'one;shared'] [--json]

Needs ``redis-server`` on the PATH. Four unequal emulated instances at their real speed (one of each
kind of ``benchmarks/clusters.py``, 64 sequences at most), so that the gateways' own times, that
between two exchanges among them, are what they are in front of real ones. In front of them nine
gateways that run all the while: ``one``, four that share (``scheduler.shared``), and four that know
nothing of each other (``alone``). Clients are spread over the four in turn, or unevenly: 70, 10, 10
and 10 % by chance. Prompts and outputs are log-normal, streamed; output lengths are hidden from the
gateways.

Four loads, each with the same requests at the same times for every way, in an order that rotates
from seed to seed:

    serial   one request every 0.25 s, so that all have heard of one before the next comes
    0.7 0.9  Poisson arrivals at this share of what the instances can do
    burst    all at once

Figures are ratios to ``one`` in the same seed, as mean ± standard error over the seeds; those of
p99 are of all seeds' requests together. ``same picks``: how many requests of the serial load went
to the instance that ``one`` had chosen. The goals: throughput and tails (p99 of latency and of
TTFT) within 3 % of one gateway, 10 % in a burst. A goal is missed where a ratio is beyond it by
more than two standard errors.

Emulated engines are real processes, so this machine's speed matters: the cores that everybody used
are printed, and by how much the emulated clocks fell behind. A run in which they lost more than
0.1 s is made again, twice at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import uvloop
import yaml

from benchmarks.clusters import PROFILES
from benchmarks.ports import free_port
from benchmarks.tables import Column, report
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.files.trace import LoadRequest, schedule, synthetic_trace
from hetero_gateway.lab.load.admin import fetch_document
from hetero_gateway.lab.load.children import START_TIMEOUT_S, Child, Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import RequestRecord, summarise
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

REPLICAS = 4
MODEL = "m"
MAX_NUM_SEQS = 64
MIX = LogNormalLengths(LogNormal(256, 1.0, 3072), LogNormal(64, 0.7, 512))
MAX_TOKENS = 1024  # of every request: it says nothing of its length
# The emulated answers are as long as min_tokens says: by themselves they would end at once.
INSTANCE_OPTIONS = (
    *("--max-num-seqs", str(MAX_NUM_SEQS)),
    *("--mean-output-tokens", "1", "--cv-output-tokens", "0"),
)
# Whose gateways, and how the clients are spread over them.
WAYS = {
    "one": ("one", "even"),
    "shared": ("shared", "even"),
    "shared, uneven": ("shared", "uneven"),
    "alone": ("alone", "even"),
    "alone, uneven": ("alone", "uneven"),
}
LOADS = ("serial", "0.7", "0.9", "burst")
SERIAL_GAP_S, SERIAL_REQUESTS, SERIAL_OUTPUT = 0.25, 80, 160
BURST_REQUESTS = 600
UNEVEN_SHARES = (0.7, 0.1, 0.1, 0.1)
GOALS = {"0.7": 0.03, "0.9": 0.03, "burst": 0.10}
TAILS = ("p99", "ttft_p99")
TOLERATED_LOST_S = 0.1
TRIES = 3
TIMEOUT_S = 300.0
COLUMNS = (
    Column("load", "load", 8),
    Column("gateways", "way", 16),
    Column("runs", "runs", 5, "d"),
    Column("tokens/s", "throughput", 16),
    Column("mean", "mean", 16),
    Column("p99", "p99", 16),
    Column("TTFT", "ttft", 16),
    Column("TTFT p99", "ttft_p99", 16),
    Column("same picks", "same_picks", 12),
    Column("failed", "errors", 7, "d"),
)


class Lengths:
    """``MIX``, as the simulator wants it."""

    def draw(self, count: int, rng: np.random.Generator) -> Any:
        trace = synthetic_trace(count, int(rng.integers(2**31)), MIX)
        return np.array([(r.input_tokens, r.output_tokens) for r in trace]).T


def capacity_per_s() -> float:
    """Requests per second of all instances, each alone with always enough to do."""
    mix, profiles = Mix.of(Lengths(), 0), builtin_profiles()
    limited = [replace(profiles[name], max_num_seqs=MAX_NUM_SEQS) for name in PROFILES]
    alone = [run_alone(profile, mix, Engines(), 1000) for profile in limited]
    return sum(each.output_tokens_per_s for each in alone if each is not None) / mix.mean_output


def requests_of(load: str, seed: int, seconds: float, capacity: float) -> list[LoadRequest]:
    if load == "serial":
        trace = synthetic_trace(SERIAL_REQUESTS, seed, MIX)
        return [
            LoadRequest(SERIAL_GAP_S * i, r.input_tokens, SERIAL_OUTPUT)
            for i, r in enumerate(trace)
        ]
    if load == "burst":
        return schedule(synthetic_trace(BURST_REQUESTS, seed, MIX), math.inf, seed)
    rate_per_s = float(load) * capacity
    return schedule(synthetic_trace(round(rate_per_s * seconds), seed, MIX), rate_per_s, seed)


def targets_of(split: str, gateways: int, requests: int, seed: int) -> list[int]:
    """Which gateway each request goes to."""
    if split == "even" or gateways == 1:
        return [i % gateways for i in range(requests)]
    chosen = np.random.default_rng((seed, 1)).choice(gateways, requests, p=UNEVEN_SHARES)
    return [int(i) for i in chosen]


@dataclass(frozen=True, slots=True)
class Run:
    """One load over one way. CPU is in cores, over the run."""

    load: str
    way: str
    seed: int
    records: list[RequestRecord]
    lost_s: float
    cpu: dict[str, float]

    def figures(self) -> dict[str, float]:
        summary = summarise(self.records)
        good = [r for r in self.records if r.error is None]
        ttft_s = [r.ttft_s for r in good if r.ttft_s is not None]
        latency_s = [r.latency_s for r in good]
        return {
            "throughput": summary.throughput_tokens_per_s,
            "mean": statistics.fmean(latency_s),
            "p99": float(np.quantile(latency_s, 0.99)),
            "ttft": statistics.fmean(ttft_s),
            "ttft_p99": float(np.quantile(ttft_s, 0.99)),
        }


class Machine:
    """CPU seconds by name of who used them, and of the whole machine."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._pids = pids
        self._before = self._now()
        self._began_s = time.perf_counter()

    def cores(self) -> dict[str, float]:
        span_s = time.perf_counter() - self._began_s
        now = self._now()
        return {name: (now[name] - was) / span_s for name, was in self._before.items()}

    def _now(self) -> dict[str, float]:
        used_s = {name: sum(map(_cpu_s, pids)) for name, pids in self._pids.items()}
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        idle = float(fields[3]) + float(fields[4])
        total = sum(map(float, fields))
        return used_s | {"machine": (total - idle) / os.sysconf("SC_CLK_TCK")}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Rig:
    """All processes: the instances, a Redis, and the gateways of each group, in a folder."""

    def __init__(self, folder: Path, children: Children, redis_port: int) -> None:
        self._folder = folder
        self._children = children
        self._redis_port = redis_port
        profiles = builtin_profiles()
        instances = [
            EmulatedInstance(f"i{i}", name, replace(profiles[name], max_num_seqs=MAX_NUM_SEQS))
            for i, name in enumerate(PROFILES)
        ]
        self.cluster = EmulatedCluster(
            instances, MODEL, 1.0, 0, folder, children, instance_options=INSTANCE_OPTIONS
        )
        self.urls: dict[str, list[str]] = {}
        self.pids: dict[str, list[int]] = {}

    async def start(self, groups: Sequence[str]) -> None:
        await self.cluster.start_instances()
        document = yaml.safe_load((self._folder / "gateway.yaml").read_text("utf-8"))
        started: dict[str, list[Child]] = {}
        for group in groups:
            shared = {"shared": f"redis://127.0.0.1:{self._redis_port}"}
            path = self._folder / f"{group}.yaml"
            more = {"scheduler": shared} if group == "shared" else {}
            path.write_text(yaml.safe_dump(document | more), "utf-8")
            count = 1 if group == "one" else REPLICAS
            started[group] = [self._gateway(group, path) for _ in range(count)]
        for group, gateways in started.items():
            self.urls[group] = [await gateway.url() for gateway in gateways]
            self.pids[group] = [gateway.process.pid for gateway in gateways]
        self.pids["instances"] = self.cluster.emulator_pids
        self.pids["load"] = [os.getpid()]
        async with asyncio.timeout(START_TIMEOUT_S):
            for group, urls in self.urls.items():
                for url in urls:
                    while not await self._ready(group, url):
                        self._children.check()
                        await asyncio.sleep(0.1)

    def _gateway(self, name: str, path: Path) -> Child:
        return self._children.start(
            name, *("serve", "-c", str(path), "--port", "0", "--log-level", "warning")
        )

    async def _ready(self, group: str, url: str) -> bool:
        told = await _instances(url)
        others = REPLICAS - 1 if group == "shared" else None
        known = (told["sharing"] or {}).get("other_replicas")
        return all(i["up"] for i in told["instances"]) and known == others

    async def idle(self) -> None:
        """Wait until nothing is on any instance."""
        async with asyncio.timeout(TIMEOUT_S):
            for url in (u for urls in self.urls.values() for u in urls):
                while True:
                    if not any(i["in_flight"] for i in (await _instances(url))["instances"]):
                        break
                    await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)

    async def run(self, load: str, way: str, seed: int, requests: list[LoadRequest]) -> Run:
        group, split = WAYS[way]
        urls = self.urls[group]
        target_of = targets_of(split, len(urls), len(requests), seed)
        await self.idle()
        before_s, machine = await self.cluster.lost_s(), Machine(self.pids)
        maker = BodyMaker(MODEL, PromptKind.CHAT, True, 4.0, filler_pool(), MAX_TOKENS)
        parts = [
            [i for i, target in enumerate(target_of) if target == number]
            for number in range(len(urls))
        ]
        told = await asyncio.gather(
            *(
                replay(
                    parse_target(url),
                    [requests[i] for i in part],
                    maker,
                    timeout_s=TIMEOUT_S,
                )
                for url, part in zip(urls, parts, strict=True)
            )
        )
        records: dict[int, RequestRecord] = {}
        for part, those in zip(parts, told, strict=True):
            records |= {i: replace(r, index=i) for i, r in zip(part, those, strict=True)}
        cores = machine.cores()
        cpu = {"gateways": cores[group]} | {
            name: cores[name] for name in ("instances", "load", "redis", "machine")
        }
        lost_s = await self.cluster.lost_s() - before_s
        return Run(load, way, seed, [records[i] for i in sorted(records)], lost_s, cpu)


async def _instances(url: str) -> dict[str, Any]:
    """What a gateway shows of its instances."""
    return await asyncio.to_thread(fetch_document, url, None, "/admin/instances", {})


async def quiet_run(rig: Rig, load: str, way: str, seed: int, requests: list[LoadRequest]) -> Run:
    """The first run in which the emulated clocks kept up, or the best of a few."""
    tried: list[Run] = []
    for _ in range(TRIES):
        run = await rig.run(load, way, seed, requests)
        tried.append(run)
        shown = {name: round(value, 3) for name, value in (run.figures() | run.cpu).items()}
        print(
            f"seed {seed} {load} {way}: lost {run.lost_s:.2f} s; {shown}",
            file=sys.stderr,
            flush=True,
        )
        if run.lost_s <= TOLERATED_LOST_S:
            break
    return min(tried, key=lambda each: each.lost_s)


async def measure(
    args: argparse.Namespace, rig: Rig, capacity: float, redis_pid: int, runs: list[Run]
) -> None:
    """All runs; those that were made are in ``runs``, however this ends."""
    rig.pids["redis"] = [redis_pid]
    await rig.start(sorted({WAYS[way][0] for way in args.ways}))
    for way in args.ways:  # their first requests are another matter, and not looked at
        await rig.run("serial", way, 0, requests_of("0.7", 10**6, 5.0, capacity))
    end_s = time.monotonic() + args.minutes * 60
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        turn = seed % len(args.ways)
        order = args.ways[turn:] + args.ways[:turn]
        for load in args.only:
            if time.monotonic() > end_s:
                return
            requests = requests_of(load, seed, args.seconds, capacity)
            runs += [await quiet_run(rig, load, way, seed, requests) for way in order]


def measure_all(args: argparse.Namespace, runs: list[Run]) -> None:
    capacity = capacity_per_s()
    print(f"the instances can do {capacity:.1f} requests/s", file=sys.stderr)
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with (
        tempfile.TemporaryDirectory(prefix="replicas-") as folder,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as redis,
    ):
        try:
            with (
                Children(Path(folder)) as children,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                rig = Rig(Path(folder), children, port)
                runner.run(measure(args, rig, capacity, redis.pid, runs))
        except KeyboardInterrupt:
            print("cut short", file=sys.stderr)
        finally:
            redis.terminate()


# What came of it


def rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    by_key = {(run.load, run.way, run.seed): run for run in runs}
    for load in LOADS:
        ones = {run.seed: run for run in runs if run.load == load and run.way == "one"}
        for way in WAYS:
            seeds = [seed for seed in ones if (load, way, seed) in by_key]
            if way != "one" and seeds:
                pairs = [(by_key[load, way, seed], ones[seed]) for seed in seeds]
                yield _row(load, way, pairs)


def _row(load: str, way: str, pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    ratios: dict[str, tuple[float, float]] = {}
    for name in ("throughput", "mean", "ttft"):
        each = [several.figures()[name] / one.figures()[name] for several, one in pairs]
        ratios[name] = statistics.fmean(each), _standard_error(each)
    for name in TAILS:
        ratios[name] = _tail(name, pairs)
    met = True
    if way.startswith("shared") and load in GOALS:
        throughput, error = ratios["throughput"]
        met = throughput + 2 * error >= 1 - GOALS[load]
        for ratio, error in (ratios[name] for name in TAILS):
            met = met and ratio - 2 * error <= 1 + GOALS[load]
    same = [
        mine.instance == its.instance
        for several, one in pairs
        for mine, its in zip(several.records, one.records, strict=True)
    ]
    return {
        "load": load,
        "way": way,
        "runs": len(pairs),
        **{name: f"{ratio:.3f} ± {error:.3f}" for name, (ratio, error) in ratios.items()},
        "ratios": ratios,
        "same_picks": f"{statistics.fmean(same):.0%}" if load == "serial" else "",
        "errors": sum(r.error is not None for run, _ in pairs for r in run.records),
        "met": met,
    }


def _tail(name: str, pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float]:
    """Ratio of the p99 of all seeds together; its error by leaving one seed out at a time."""

    def of(chosen: Sequence[tuple[Run, Run]]) -> float:
        several, one = ([_times(name, pair[i]) for pair in chosen] for i in (0, 1))
        return float(
            np.quantile(np.concatenate(several), 0.99) / np.quantile(np.concatenate(one), 0.99)
        )

    count = len(pairs)
    if count < 2:
        return of(pairs), 0.0
    left_out = [of([p for j, p in enumerate(pairs) if j != i]) for i in range(count)]
    mean = statistics.fmean(left_out)
    spread = sum((each - mean) ** 2 for each in left_out)
    return of(pairs), math.sqrt((count - 1) / count * spread)


def _times(name: str, run: Run) -> list[float]:
    good = [r for r in run.records if r.error is None]
    if name == "p99":
        return [r.latency_s for r in good]
    return [r.ttft_s for r in good if r.ttft_s is not None]


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def mean_cpu(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Cores used, by way, and the most seconds that the emulated clocks lost in a run."""
    shown: dict[str, dict[str, float]] = {}
    for way in WAYS:
        those = [run for run in runs if run.way == way and run.load in ("0.7", "0.9")]
        if those:
            shown[way] = {
                name: round(statistics.fmean(run.cpu[name] for run in those), 3)
                for name in those[0].cpu
            }
            shown[way]["lost_s"] = round(max(run.lost_s for run in those), 3)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    listed = lambda text: text.split(";" if ";" in text else ",")  # noqa: E731
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=40.0, help="of steady arrivals")
    parser.add_argument("--minutes", type=float, default=120.0, help="no load is begun after these")
    parser.add_argument("--only", type=listed, default=list(LOADS), help="loads")
    parser.add_argument("--ways", type=listed, default=list(WAYS),
                        help="separated by ';'; 'one' has to be among them")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    runs: list[Run] = []
    measure_all(args, runs)
    cpu = mean_cpu(runs)
    code = report(rows(runs), COLUMNS, as_json=args.json, cores=cpu)
    if not args.json:
        for way, used in cpu.items():
            print(f"cores used, {way}: {json.dumps(used)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
