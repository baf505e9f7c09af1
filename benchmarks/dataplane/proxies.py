"""What the gateway costs per request and per chunk, beside other proxies, in one run.

    python benchmarks/dataplane/proxies.py                # about 15 minutes with set-up
    python benchmarks/dataplane/proxies.py --targets gateway,nginx,vllm-router --rounds 3

Every server is up at once, on one core, before the same two mock instances; the load, the mocks
and this script are on another core. Each round measures every server once with each kind of load,
in shuffled order: plain requests (1 KB out, 1 KB back), short streams (10 chunks) and long ones
(200 chunks of 250 bytes, 15 ms apart, --streams at a time). A server's CPU is that of its whole
process tree, less what it uses when idle. Two kinds of stream give the cost of a chunk (the slope)
and of a stream as such (the intercept). Rates are lowered for a server that would use more than
--utilization of its core.

CPU used meanwhile by anything else is reported. A segment waits a while for a quiet machine; one
that had much foreign CPU is measured again, once, and left out where at least half of its kind are
clean. Absolute figures move with the machine:
compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dataplane import targets
from benchmarks.dataplane.cpu import process_cpu_s, tree_cpu_s
from benchmarks.dataplane.rig import BenchError, Rig, Watch, note
from benchmarks.dataplane.targets import Launch, Place, Server, Unavailable

REFERENCE = "vllm-router"
SHORT_CHUNKS, LONG_CHUNKS = 10, 200
KINDS = ("request", "short", "long")
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
                stream=int(kind != "request"),
                connections=shape.connections,
                rate=shape.rate_per_s,
                count=shape.count,
                chunks=shape.chunks,
                seed=self._rng.randrange(2**31),
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
        """Warms a server up and sets its loads. Raises Unavailable for wrong answers."""
        for kind, light in (
            ("request", Shape(8, 200.0, 200, 0)),
            ("short", Shape(8, 50.0, 24, SHORT_CHUNKS)),
            ("long", Shape(8, 50.0, 8, LONG_CHUNKS)),
        ):
            shape = self.shape(kind, self._cost_s(server, kind, light))
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
        order = [(server, kind) for server in bench.servers for kind in KINDS]
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


# Results


@dataclass
class Row:
    """One server's figures: medians, and half the interquartile range after each."""

    target: str
    version: str
    request_us: float
    request_spread_us: float
    chunk_us: float
    chunk_spread_us: float
    stream_fixed_us: float
    stream_fixed_spread_us: float
    stream_us: float
    stream_spread_us: float
    request_ratio: float | None
    stream_ratio: float | None
    idle_us_per_s: float
    request_added_p50_s: float
    request_added_p99_s: float
    first_added_p50_s: float
    first_added_p99_s: float
    request_rate_per_s: float
    streams: int
    events_per_stream: float
    reconnects: int
    late: int
    errors: int
    first_error: str
    segments: int
    noisy: int


def spread(values: list[float]) -> float:
    """Half the interquartile range; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def clean(segments: list[Segment]) -> list[Segment]:
    """Those without noise where they are at least half, else all."""
    good = [s for s in segments if not s.noisy]
    return good if 2 * len(good) >= len(segments) else segments


def unit_costs(segments: Iterable[Segment], idle_s_per_s: float) -> list[float]:
    """Microseconds of CPU per request or stream, idle taken off, one per segment."""
    return [
        (s.cpu_s - idle_s_per_s * (s.duration_s + SETTLE_S)) / s.units * 1e6
        for s in segments
        if s.units
    ]


def chunk_costs(short: list[Segment], long: list[Segment], idle: float) -> list[float]:
    """The slope: of the two kinds of one round where there are such, else of all pairs."""
    pairs = [(a, b) for a in short for b in long if a.units and b.units]
    pairs = [(a, b) for a, b in pairs if a.round == b.round] or pairs
    costs = []
    for pair in pairs:
        of_short, of_long = unit_costs(pair, idle)
        costs.append((of_long - of_short) / (LONG_CHUNKS - SHORT_CHUNKS))
    return costs


def make_rows(bench: Bench, segments: list[Segment], idles: list[dict[str, float]]) -> list[Row]:
    direct = {k: _latencies(segments, "direct", k) for k in KINDS}
    rows = []
    for server in bench.servers:
        idle = statistics.median(i.get(server.name, 0.0) for i in idles)
        rows.append(_row(bench, server, segments, idle, direct))
    reference = next((row for row in rows if row.target == REFERENCE), None)
    if reference is not None:
        for row in rows:
            row.request_ratio = row.request_us / reference.request_us
            row.stream_ratio = row.stream_us / reference.stream_us
    return rows


def _latencies(
    segments: list[Segment], target: str, kind: str
) -> tuple[float, float, float, float]:
    mine = clean([s for s in segments if s.target == target and s.kind == kind and s.units])
    if not mine:
        return (0.0, 0.0, 0.0, 0.0)
    return (
        statistics.median(s.latency_p50_s for s in mine),
        statistics.median(s.latency_p99_s for s in mine),
        statistics.median(s.first_p50_s for s in mine),
        statistics.median(s.first_p99_s for s in mine),
    )


def _row(
    bench: Bench,
    server: Server,
    segments: list[Segment],
    idle: float,
    direct: dict[str, tuple[float, float, float, float]],
) -> Row:
    mine = [s for s in segments if s.target == server.name]
    by_kind = {kind: clean([s for s in mine if s.kind == kind]) for kind in KINDS}
    request = unit_costs(by_kind["request"], idle)
    long = unit_costs(by_kind["long"], idle)
    short = unit_costs(by_kind["short"], idle)
    chunk = chunk_costs(by_kind["short"], by_kind["long"], idle)
    chunk_us = _median(chunk)
    latency = {kind: _latencies(segments, server.name, kind) for kind in KINDS}
    added = {k: [a - b for a, b in zip(latency[k], direct[k], strict=True)] for k in KINDS}
    events = [s.events_per_unit for s in by_kind["long"] if s.units]
    return Row(
        target=server.name,
        version=server.version,
        request_us=_median(request),
        request_spread_us=spread(request),
        chunk_us=chunk_us,
        chunk_spread_us=spread(chunk),
        stream_fixed_us=_median(short) - SHORT_CHUNKS * chunk_us,
        stream_fixed_spread_us=spread([cost - SHORT_CHUNKS * chunk_us for cost in short]),
        stream_us=_median(long),
        stream_spread_us=spread(long),
        request_ratio=None,
        stream_ratio=None,
        idle_us_per_s=idle * 1e6,
        request_added_p50_s=added["request"][0],
        request_added_p99_s=added["request"][1],
        first_added_p50_s=added["long"][2],
        first_added_p99_s=added["long"][3],
        request_rate_per_s=bench.shapes[server.name, "request"].rate_per_s,
        streams=bench.shapes[server.name, "long"].connections,
        events_per_stream=_median(events),
        reconnects=sum(s.reconnects for s in mine),
        late=sum(s.late for s in mine),
        errors=sum(s.errors for s in mine),
        first_error=next((s.first_error for s in mine if s.first_error), ""),
        segments=len(mine),
        noisy=sum(s.noisy for s in mine),
    )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def print_report(
    rows: list[Row], segments: list[Segment], missing: dict[str, str], args: argparse.Namespace
) -> None:
    heads = (
        "target", "version", "µs/request", "µs/chunk", "µs fixed/stream", "µs/stream of 200",
        "×vr request", "×vr stream", "idle ms/s", "request +p50/p99 ms", "first +p50/p99 ms",
        "req/s", "streams", "errors", "noisy",
    )  # fmt: skip
    table = [heads, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
    print(f"\nCPU of each server, median ± half the interquartile range of {args.rounds} rounds")
    for line in table:
        cells = [
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    for row in rows:
        if row.errors:
            print(f"{row.target}: {row.errors} wrong answers, first: {row.first_error}")
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    _print_conditions(rows, segments, args)


def _cells(row: Row) -> tuple[str, ...]:
    def ratio(value: float | None) -> str:
        return "-" if value is None or row.target == "direct" else f"{value:.2f}"

    return (
        row.target,
        row.version,
        f"{row.request_us:.1f} ±{row.request_spread_us:.1f}",
        f"{row.chunk_us:.1f} ±{row.chunk_spread_us:.1f}",
        f"{row.stream_fixed_us:.0f} ±{row.stream_fixed_spread_us:.0f}",
        f"{row.stream_us:.0f} ±{row.stream_spread_us:.0f}",
        ratio(row.request_ratio),
        ratio(row.stream_ratio),
        f"{row.idle_us_per_s / 1e3:.2f}",
        f"{row.request_added_p50_s * 1e3:+.2f}/{row.request_added_p99_s * 1e3:+.2f}",
        f"{row.first_added_p50_s * 1e3:+.2f}/{row.first_added_p99_s * 1e3:+.2f}",
        f"{row.request_rate_per_s:.0f}",
        str(row.streams),
        str(row.errors),
        f"{row.noisy}/{row.segments}",
    )


def _print_conditions(rows: list[Row], segments: list[Segment], args: argparse.Namespace) -> None:
    by_kind = {
        kind: clean([s for s in segments if s.target == "direct" and s.kind == kind and s.units])
        for kind in KINDS
    }
    if all(by_kind.values()):
        cost = {
            kind: _median([(s.load_cpu_s + s.mock_cpu_s) / s.units * 1e6 for s in mine])
            for kind, mine in by_kind.items()
        }
        chunk = (cost["long"] - cost["short"]) / (LONG_CHUNKS - SHORT_CHUNKS)
        p50 = _median([s.latency_p50_s for s in by_kind["request"]])
        print(
            f"load and mock themselves, direct: {cost['request']:.1f} µs/request, "
            f"{chunk:.1f} µs/chunk; request p50 {p50 * 1e3:.3f} ms"
        )
    foreign = [s.foreign_cores for s in segments if s.units]
    steal = [s.steal_cores for s in segments if s.units]
    if foreign:
        print(
            f"foreign CPU during segments: median {_median(foreign):.2f}, most {max(foreign):.2f} "
            f"cores (noisy above {args.max_foreign:g}); stolen: most {max(steal):.2f}"
        )
    gateway = next((row for row in rows if row.target == "gateway"), None)
    if (
        gateway is not None
        and gateway.stream_ratio is not None
        and gateway.request_ratio is not None
    ):
        print(
            f"gateway against {REFERENCE}: stream of 200 chunks ×{gateway.stream_ratio:.2f} "
            f"(goal ≤ 1), request ×{gateway.request_ratio:.2f} (goal ≤ 2)"
        )


# Command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(targets.TARGETS)
    parser.add_argument("--targets", default=names, help=f"comma-separated; default: {names}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a segment")
    parser.add_argument("--streams", type=int, default=64, help="streams at a time")
    parser.add_argument("--request-rate", type=float, default=1000.0, help="requests per second")
    parser.add_argument("--skip-install", action="store_true", help="use what is installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every segment there")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME=COMMAND",
        help="another server: a command line with {port}, {first} and {second}",
    )  # fmt: skip
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        help="seconds to wait for a quiet machine, each time",
    )
    parser.add_argument("--utilization", type=float, default=0.5, help="most of a core to load")
    parser.add_argument("--max-foreign", type=float, default=0.15, help="in cores; more is noise")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.targets.split(",")) - set(targets.TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if bad := [extra for extra in args.extra if "=" not in extra]:
        parser.error(f"--extra wants NAME=COMMAND, not {bad[0]!r}")
    return args


def start_all(
    rig: Rig, wanted: dict[str, Callable[[Place], Launch]], install: bool
) -> tuple[list[Server], dict[str, str]]:
    """The servers that came up, and the reason for each that did not."""
    servers, missing = [targets.direct(rig)], {}
    for name, make in wanted.items():
        note(f"starting {name} …")
        try:
            servers.append(targets.start(rig, name, make, install))
        except BenchError as error:
            missing[name] = str(error)
            note(f"{name}: {error}")
    return servers, missing


def main() -> int:
    args = parse_arguments()
    wanted = {name: targets.TARGETS[name] for name in args.targets.split(",")}
    for item in args.extra:
        name, command = item.split("=", 1)
        wanted[name] = targets.extra(command)
    rng = random.Random(args.seed)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="hetero-gateway-bench-") as workdir,
            Rig(Path(workdir), INTERVAL_S * 1e3) as rig,
        ):
            servers, missing = start_all(rig, wanted, not args.skip_install)
            bench = Bench(rig, servers, args)
            for server in list(servers):
                try:
                    bench.calibrate(server)
                except Unavailable as error:
                    servers.remove(server)
                    missing[server.name] = str(error)
                    note(f"{server.name}: {error}")
            segments, idles = measure(bench, args.rounds, rng)
            rows = make_rows(bench, segments, idles)
    except BenchError as error:
        print(f"dataplane: {error}", file=sys.stderr)
        return 1
    print_report(rows, segments, missing, args)
    if args.json:
        document = {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "rows": [asdict(row) for row in rows],
            "missing": missing,
            "segments": [asdict(segment) for segment in segments],
            "idle_s_per_s": idles,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
