"""What is measured: one stretch of one kind of load on one server, and the order of them all.

Plain requests at a rate that keeps the server busy ("request") give the CPU of a request; short and
long streams that of a chunk and of a stream; plain requests at 100 per second ("paced") give the
latency that a server adds where nothing waits for anything.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.dataplane.cpu import process_cpu_s, tree_cpu_s
from benchmarks.dataplane.rig import BenchError, Rig, Watch, note
from benchmarks.dataplane.targets import Server, Unavailable

SHORT_CHUNKS, LONG_CHUNKS = 10, 200
KINDS = ("request", "short", "long", "paced")
PACED_PER_S = 100.0
FIRST_S, INTERVAL_S = 0.005, 0.015  # of the mock
SETTLE_S = 0.05  # after the last byte: a proxy may still have to tidy up


@dataclass(frozen=True)
class Shape:
    """The load of one kind for one server."""

    connections: int
    rate_per_s: float
    count: int
    chunks: int


@dataclass
class Segment:
    """One measured stretch."""

    target: str
    kind: str
    round: int
    units: int = 0
    cpu_s: float = 0.0  # of the server's tree, idle share taken off later
    load_cpu_s: float = 0.0
    mock_cpu_s: float = 0.0
    duration_s: float = 0.0
    foreign_cores: float = 0.0
    steal_cores: float = 0.0
    errors: int = 0
    first_error: str = ""
    reconnects: int = 0
    late: int = 0
    events_per_unit: float = 0.0
    latency_p50_s: float = 0.0
    latency_p99_s: float = 0.0
    first_p50_s: float = 0.0
    first_p99_s: float = 0.0
    noisy: bool = False


def stream_s(chunks: int) -> float:
    """How long the mock takes over a stream."""
    return FIRST_S + chunks * INTERVAL_S


class Bench:
    """The servers that are up, and the measuring of one segment."""

    def __init__(self, rig: Rig, servers: list[Server], args: argparse.Namespace) -> None:
        self.rig = rig
        self.servers = servers
        self.seconds: float = args.seconds
        self.utilization: float = args.utilization
        self.request_rate_per_s: float = args.request_rate
        self.streams: int = args.streams
        self.distinct: bool = args.distinct
        self.max_foreign: float = args.max_foreign
        self.patience_s: float = args.patience
        self.shapes: dict[tuple[str, str], Shape] = {}
        self._rng = random.Random(args.seed)

    def own_cpu_s(self) -> float:
        pids = [server.pid for server in self.servers if server.pid is not None]
        trees = sum(tree_cpu_s(pid) for pid in pids)
        return trees + self.mock_cpu_s() + process_cpu_s(os.getpid())

    def mock_cpu_s(self) -> float:
        return sum(process_cpu_s(pid) for pid in self.rig.instance_pids)

    def idle(self, round_index: int) -> dict[str, float]:
        """Each server's CPU seconds per second with no load at all."""
        before = {s.name: tree_cpu_s(s.pid) for s in self.servers if s.pid is not None}
        started_s = time.monotonic()
        time.sleep(self.seconds)
        elapsed_s = time.monotonic() - started_s
        note(f"round {round_index + 1}: idle")
        return {
            s.name: (tree_cpu_s(s.pid) - before[s.name]) / elapsed_s
            for s in self.servers
            if s.pid is not None
        }

    def segment(self, server: Server, kind: str, shape: Shape, round_index: int) -> Segment:
        """Loads one server and reads the clocks around it. A failure is in the result."""
        segment = Segment(server.name, kind, round_index)
        self.wait_for_quiet()
        try:
            run = self.rig.load(
                server.port,
                stream=int(shape.chunks > 0),
                connections=shape.connections,
                rate=shape.rate_per_s,
                count=shape.count,
                chunks=shape.chunks,
                seed=self._rng.randrange(2**31),
                distinct=int(self.distinct),
            )
            time.sleep(SETTLE_S)  # the warm-up's own tidying up
            watch = Watch.start(self.own_cpu_s())
            cpu_s, mock_s = self._cpu_s(server), self.mock_cpu_s()
            run.go()
            load = run.wait()
            time.sleep(SETTLE_S)
            segment.cpu_s = self._cpu_s(server) - cpu_s
            segment.mock_cpu_s = self.mock_cpu_s() - mock_s
            own_s = self.own_cpu_s() + load.cpu_s
        except BenchError as error:
            segment.errors, segment.first_error = shape.count, str(error)
            return segment
        segment.load_cpu_s = load.cpu_s
        segment.foreign_cores, segment.steal_cores = watch.foreign(own_s)
        segment.noisy = segment.foreign_cores > self.max_foreign
        _take_result(segment, load.result)
        return segment

    def wait_for_quiet(self) -> None:
        """Waits until others leave the machine alone, but not longer than `patience`."""
        deadline_s = time.monotonic() + self.patience_s
        while time.monotonic() < deadline_s:
            watch = Watch.start(self.own_cpu_s())
            time.sleep(0.3)
            if watch.foreign(self.own_cpu_s())[0] <= self.max_foreign:
                return

    def _cpu_s(self, server: Server) -> float:
        return 0.0 if server.pid is None else tree_cpu_s(server.pid)

    def shape(self, kind: str, cost_s: float) -> Shape:
        """A load of a kind that uses at most `utilization` of a core at `cost_s` per unit."""
        most_per_s = self.utilization / max(cost_s, 1e-9)
        if kind == "request":
            rate = min(self.request_rate_per_s, most_per_s)
            return Shape(32 if rate > 200 else 8, rate, max(5, round(rate * self.seconds)), 0)
        chunks = SHORT_CHUNKS if kind == "short" else LONG_CHUNKS
        streams = max(1, min(self.streams, int(most_per_s * stream_s(chunks))))
        # The starts are spread: with all at once the chunks of all streams would come together,
        # which they do not in life.
        rate = streams / min(0.5, stream_s(chunks))
        rounds = max(1, round(self.seconds / stream_s(chunks)))
        return Shape(streams, rate, streams * rounds, chunks)

    def calibrate(self, server: Server) -> None:
        """Warms a server up and sets its loads. Raises Unavailable for wrong answers.

        One that 100 requests a second would saturate is not given them.
        """
        for kind, light in (
            ("request", Shape(8, 200.0, 200, 0)),
            ("short", Shape(8, 50.0, 24, SHORT_CHUNKS)),
            ("long", Shape(8, 50.0, 8, LONG_CHUNKS)),
        ):
            cost_s = self._cost_s(server, kind, light)
            if kind == "request" and PACED_PER_S * cost_s <= self.utilization:
                count = max(20, round(PACED_PER_S * self.seconds))
                self.shapes[server.name, "paced"] = Shape(8, PACED_PER_S, count, 0)
            shape = self.shape(kind, cost_s)
            # Under light load a unit costs more: where that lowered the load, look again.
            if shape != self.shape(kind, 0.0):
                shape = self.shape(kind, self._cost_s(server, kind, shape))
            self.shapes[server.name, kind] = shape

    def _cost_s(self, server: Server, kind: str, shape: Shape) -> float:
        tried = self.segment(server, kind, shape, -1)
        if tried.errors:
            raise Unavailable(f"wrong answers to {kind} load: {tried.first_error}")
        return tried.cpu_s / tried.units


def _take_result(segment: Segment, result: dict[str, Any]) -> None:
    segment.units = result["count"]
    segment.duration_s = result["duration_s"]
    segment.events_per_unit = result["events"] / max(1, segment.units)
    for name in ("errors", "first_error", "reconnects", "late"):
        setattr(segment, name, result[name])
    for name in ("latency_p50_s", "latency_p99_s", "first_p50_s", "first_p99_s"):
        setattr(segment, name, result[name])


def measure(
    bench: Bench, rounds: int, rng: random.Random
) -> tuple[list[Segment], list[dict[str, float]]]:
    """All segments of all rounds, and each round's idle CPU."""
    segments: list[Segment] = []
    idles: list[dict[str, float]] = []
    for index in range(rounds):
        idles.append(bench.idle(index))
        order = [
            (s, kind) for s in bench.servers for kind in KINDS if (s.name, kind) in bench.shapes
        ]
        rng.shuffle(order)
        for server, kind in order:
            segments.append(one(bench, server, kind, index))
    by_name = {server.name: server for server in bench.servers}
    again = [s for s in segments if s.noisy]
    rng.shuffle(again)
    for old in again:
        fresh = one(bench, by_name[old.target], old.kind, old.round)
        if not fresh.noisy and not fresh.errors:
            segments[segments.index(old)] = fresh
    return segments, idles


def one(bench: Bench, server: Server, kind: str, index: int) -> Segment:
    segment = bench.segment(server, kind, bench.shapes[server.name, kind], index)
    micros = segment.cpu_s / max(1, segment.units) * 1e6
    note(
        f"round {index + 1}: {server.name} {kind}: {segment.units} in {segment.duration_s:.1f} s, "
        f"{micros:.1f} µs each with idle, foreign {segment.foreign_cores:.2f} cores"
        + (", noisy" if segment.noisy else "")
        + (f", ERRORS {segment.errors}: {segment.first_error}" if segment.errors else "")
    )
    return segment
