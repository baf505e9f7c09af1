"""What `serve --workers 2` costs beside `serve` of one process, and how many streams it carries.

    python benchmarks/dataplane/workers.py [--rounds 5] [--json FILE]

One gateway of one process and one of several are up at once, in front of the same two mock
instances (mock.c), and take turns under the same load (load.c, distinct prompts). For the cost both
have one core, and mocks and load the other: CPU is read from each process's own clock, less what it
uses when idle, and the several are added up: workers, scheduler process and supervisor. Requests
come as fast as they are answered (``busy``) and 200 per second (``paced``); streams have 200
chunks. The round trip is the workers' own histogram, of paced requests.

For the capacity nothing is pinned: all processes, mocks and load share the machine's cores, and
more streams begin each second than can be served, under `min-max`, which keeps none waiting for an
instance's slot; the load's and the mocks' own share is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: find the package of benchmarks
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import os

import yaml

from benchmarks.dataplane.cpu import process_cpu_s, tree_pids
from benchmarks.dataplane.rig import BenchError, Rig, note
from benchmarks.ports import free_port

PROFILES = ("V100-32GB-NVLink2/Llama-3-8B/tp4", "V100-32GB-NVLink2/Llama-3-8B/tp1")
START_S, IDLE_S, SETTLE_S = 60.0, 3.0, 1.5
CHUNKS = 200
KINDS: dict[str, dict[str, float]] = {
    "busy": {"stream": 0, "connections": 64, "rate": 20_000.0, "count": 6000},
    "paced": {"stream": 0, "connections": 64, "rate": 200.0, "count": 800},
    "stream": {"stream": 1, "connections": 256, "rate": 40.0, "count": 240, "chunks": CHUNKS},
}
_ROUND_TRIP = re.compile(
    r'^hetero_gateway_worker_round_trip_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE
)


class Target:
    """A gateway: its port, and its processes by what they are."""

    def __init__(self, rig: Rig, name: str, workers: int, core: int | None) -> None:
        self.port = free_port()
        config = rig.workdir / "gateway.yaml"
        instances = [
            {"id": f"mock-{i}", "base_url": url, "model": "bench", "profile": PROFILES[i]}
            for i, url in enumerate(rig.instance_urls)
        ]
        config.write_text(yaml.safe_dump({"instances": instances}), "utf-8")
        command = [
            *(sys.executable, "-m", "hetero_gateway", "serve", "-c", str(config)),
            *("--port", str(self.port), "--workers", str(workers), "--log-level", "warning"),
        ]
        if core is None:
            command += ["--policy", "min-max"]  # which never keeps a stream waiting for a slot
            log = (rig.workdir / f"{name}.log").open("wb")
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            rig.processes.append(process)
        else:
            process = rig.start(name, command, core)
        self.process = process
        self._ready()
        self.pids = self._pids() if workers > 1 else {process.pid: "serve"}
        self.idle_s_per_s = self._idle()

    def _ready(self) -> None:
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise BenchError(f"the gateway at port {self.port} is not ready")

    def _pids(self) -> dict[int, str]:
        kinds = {}
        for pid in tree_pids(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b'"worker":null' in words:
                kinds[pid] = "scheduler"
            else:
                kinds[pid] = "worker" if b'"worker":' in words else "supervisor"
        return kinds

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by what the processes are."""
        used: dict[str, float] = {}
        for pid, kind in self.pids.items():
            used[kind] = used.get(kind, 0.0) + process_cpu_s(pid)
        return used

    def _idle(self) -> dict[str, float]:
        before, began_s = self.cpu_s(), time.monotonic()
        time.sleep(IDLE_S)
        elapsed_s = time.monotonic() - began_s
        return {kind: (s - before[kind]) / elapsed_s for kind, s in self.cpu_s().items()}

    def round_trips(self) -> list[tuple[float, float]]:
        """The round trip's histogram: (upper bound in seconds, how many up to there)."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return [(float(bound), float(count)) for bound, count in _ROUND_TRIP.findall(text)]


def measure(rig: Rig, target: Target, kind: str) -> dict[str, Any]:
    """One load: CPU microseconds per request by process, and the load's own figures."""
    options = KINDS[kind]
    run = rig.load(target.port, distinct=1, **options)
    time.sleep(SETTLE_S)
    before, began_s, trips = target.cpu_s(), time.monotonic(), target.round_trips()
    run.go()
    load = run.wait()
    time.sleep(SETTLE_S)
    elapsed_s, after = time.monotonic() - began_s, target.cpu_s()
    if load.result["errors"]:
        raise BenchError(f"{kind}: {load.result}")
    cpu_us = {
        name: 1e6
        * (used_s - before[name] - target.idle_s_per_s[name] * elapsed_s)
        / options["count"]
        for name, used_s in after.items()
    }
    later = target.round_trips()
    counts = [(bound, b - a) for (bound, b), (_, a) in zip(later, trips, strict=True)]
    return {"cpu_us": cpu_us, "load": load.result, "round_trips": counts}


def middle_s(counts: list[tuple[float, float]]) -> float | None:
    """The median of a cumulative histogram, straight within its bucket."""
    if not counts or not counts[-1][1]:
        return None
    half, low_s, below = counts[-1][1] / 2, 0.0, 0.0
    for bound_s, count in counts:
        if count >= half:
            return low_s + (bound_s - low_s) * (half - below) / (count - below)
        low_s, below = bound_s, count
    return None


@contextmanager
def spread_out() -> Iterator[None]:
    """The load may use every core."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def costs(rounds: int) -> dict[str, Any]:
    """CPU per request and per stream, one process and several, in turns."""
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="workers-bench-") as folder, Rig(Path(folder)) as rig:
        targets = {
            "one": Target(rig, "one", 1, rig.proxy_core),
            "two": Target(rig, "two", 2, rig.proxy_core),
        }
        for number in range(rounds):
            for kind in KINDS:
                for name, target in sorted(targets.items(), reverse=bool(number % 2)):
                    note(f"round {number + 1}: {kind} through {name}")
                    seen.setdefault((kind, name), []).append(measure(rig, target, kind))
    result: dict[str, Any] = {}
    for kind in KINDS:
        one = [sum(r["cpu_us"].values()) for r in seen[kind, "one"]]
        two = [sum(r["cpu_us"].values()) for r in seen[kind, "two"]]
        shares = [
            r["cpu_us"]["scheduler"] / total
            for r, total in zip(seen[kind, "two"], two, strict=True)
        ]
        parts = {
            name: statistics.median(r["cpu_us"][name] for r in seen[kind, "two"])
            for name in ("worker", "scheduler", "supervisor")
        }
        result[kind] = {
            "one_us": statistics.median(one),
            "two_us": statistics.median(two),
            "two_parts_us": parts,
            "ratio": statistics.median(b / a for a, b in zip(one, two, strict=True)),
            "scheduler_share": statistics.median(shares),
        }
    trips = [r["round_trips"] for r in seen["paced", "two"]]
    bounds = [bound for bound, _ in trips[0]]
    counts = [(bound, sum(t[i][1] for t in trips)) for i, bound in enumerate(bounds)]
    result["round_trip_p50_us"] = 1e6 * (middle_s(counts) or float("nan"))
    return result


def capacity(seconds: float, rate: float) -> dict[str, Any]:
    """Streams per second at saturation, and the share of the CPU that the rest of the bench has."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="workers-bench-") as folder, Rig(Path(folder)) as rig:
        rig.load_core = rig.proxy_core  # replaced below: nothing is pinned
        cores = os.sched_getaffinity(0)
        for pid in rig.instance_pids:
            os.sched_setaffinity(pid, cores)
        for name, workers in (("one", 1), ("two", 2)):
            target = Target(rig, name, workers, None)
            count = int(seconds * rate)
            run = rig.load(
                target.port, stream=1, connections=3072, rate=rate, count=count, chunks=CHUNKS,
                distinct=1,
            )  # fmt: skip
            os.sched_setaffinity(run.pid, cores)
            mocks_before_s = sum(map(process_cpu_s, rig.instance_pids))
            before, began_s = target.cpu_s(), time.monotonic()
            run.go()
            load = run.wait()
            elapsed_s = time.monotonic() - began_s
            used = {kind: s - before[kind] for kind, s in target.cpu_s().items()}
            mocks_s = sum(map(process_cpu_s, rig.instance_pids)) - mocks_before_s
            result[name] = {
                "streams_per_s": (count - load.result["errors"]) / elapsed_s,
                "cores": {kind: s / elapsed_s for kind, s in used.items()},
                "mocks_cores": mocks_s / elapsed_s,
                "load_cores": load.cpu_s / elapsed_s if load.cpu_s else None,
                "load": load.result,
            }
            rig.stop(target.process)
    result["ratio"] = result["two"]["streams_per_s"] / result["one"]["streams_per_s"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the capacity's load")
    parser.add_argument("--rate", type=float, default=150.0, help="streams per second, for that")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=("costs", "capacity"))
    args = parser.parse_args()
    document: dict[str, Any] = {}
    try:
        if args.only != "capacity":
            document["costs"] = costs(args.rounds)
        if args.only != "costs":
            document["capacity"] = capacity(args.seconds, args.rate)
    except BenchError as error:
        sys.exit(f"workers: {error}")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    for kind in KINDS if "costs" in document else ():
        row = document["costs"][kind]
        parts = ", ".join(f"{name} {us:.0f}" for name, us in row["two_parts_us"].items())
        print(
            f"{kind:7} one {row['one_us']:.0f} µs, two {row['two_us']:.0f} µs ({parts}): "
            f"{row['ratio']:.2f} times, scheduler's share {100 * row['scheduler_share']:.1f} %"
        )
    if "costs" in document:
        print(f"round trip p50 {document['costs']['round_trip_p50_us']:.0f} µs")
    if "capacity" in document:
        for name in ("one", "two"):
            row = document["capacity"][name]
            print(f"{name}: {row['streams_per_s']:.1f} streams/s of {CHUNKS} chunks; cores:")
            print(f"  {row['cores']}, mocks {row['mocks_cores']:.2f}, load {row['load_cores']}")
        print(f"two carry {document['capacity']['ratio']:.2f} times the streams of one")


if __name__ == "__main__":
    main()
