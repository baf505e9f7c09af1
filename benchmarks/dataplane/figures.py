"""The figures of the segments: costs, added latencies, ratios to the routers, and their tables."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.dataplane.segments import (
    KINDS,
    LONG_CHUNKS,
    SETTLE_S,
    SHORT_CHUNKS,
    Bench,
    Segment,
)
from benchmarks.dataplane.targets import Server

# The same router under its round-robin and under its default, which looks for cached prefixes.
ROUND_ROBIN, CACHE_AWARE = REFERENCES = ("vllm-router", "vllm-router-cache-aware")
# Of the gateway under its default policy: (what, the row's ratios, to whom, at most).
GOALS = (
    ("request", "request_ratio", ROUND_ROBIN, 1.8),
    ("request", "request_ratio", CACHE_AWARE, 0.85),
    ("stream of 200 chunks", "stream_ratio", ROUND_ROBIN, 1.0),
    ("stream of 200 chunks", "stream_ratio", CACHE_AWARE, 0.7),
    ("added p50 at 100 requests/s", "paced_ratio", ROUND_ROBIN, 1.2),
)


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
    paced_added_p50_s: float | None
    paced_spread_s: float
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
    # To each of REFERENCES that was measured.
    request_ratio: dict[str, float] = field(default_factory=dict)
    stream_ratio: dict[str, float] = field(default_factory=dict)
    paced_ratio: dict[str, float] = field(default_factory=dict)


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
    set_ratios(rows)
    return rows


def set_ratios(rows: Sequence[Row]) -> None:
    """Each server's figures over those of the references."""
    for reference in (row for row in rows if row.target in REFERENCES):
        name = reference.target
        for row in rows:
            row.request_ratio[name] = row.request_us / reference.request_us
            row.stream_ratio[name] = row.stream_us / reference.stream_us
            if row.paced_added_p50_s is not None and reference.paced_added_p50_s:
                row.paced_ratio[name] = row.paced_added_p50_s / reference.paced_added_p50_s


def paced_added(segments: list[Segment], target: str) -> list[float]:
    """Seconds that a server adds to the median latency: over the same round's without it."""
    paced = [s for s in segments if s.kind == "paced" and s.units]
    direct = clean([s for s in paced if s.target == "direct"])
    added = []
    for segment in clean([s for s in paced if s.target == target]):
        same = [s for s in direct if s.round == segment.round] or direct
        if same:
            bare_s = statistics.median(s.latency_p50_s for s in same)
            added.append(segment.latency_p50_s - bare_s)
    return added


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
    paced = paced_added(segments, server.name)
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
        paced_added_p50_s=statistics.median(paced) if paced else None,
        paced_spread_s=spread(paced),
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
    print(f"\nCPU of each server, median ± half the interquartile range of {args.rounds} rounds")
    costs = (
        "target", "version", "µs/request", "µs/chunk", "µs fixed/stream", "µs/stream of 200",
        "idle ms/s", "req/s", "streams", "errors", "noisy",
    )  # fmt: skip
    _print_table([costs, *map(_costs, rows)], words=2)
    print(
        f"\nThe same over {ROUND_ROBIN}'s (rr) and {CACHE_AWARE}'s (ca), and latency beside that "
        "without any server"
    )
    ratios = (
        "target", "request ×rr", "×ca", "stream ×rr", "×ca", "+p50 at 100/s, ms", "×rr", "×ca",
        "request +p50/p99 ms", "first +p50/p99 ms",
    )  # fmt: skip
    _print_table([ratios, *(_ratios(row) for row in rows if row.target != "direct")], words=1)
    print()
    for row in rows:
        if row.errors:
            print(f"{row.target}: {row.errors} wrong answers, first: {row.first_error}")
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    _print_conditions(segments, args)
    for row in rows:
        if row.target == "gateway":
            print_goals(row)


def print_goals(row: Row) -> None:
    """How the gateway stands to each goal whose reference was measured."""
    for what, ratios, reference, most in GOALS:
        ratio = getattr(row, ratios).get(reference)
        if ratio is not None:
            verdict = "met" if ratio <= most else "missed"
            print(f"{row.target}, {what}: ×{ratio:.2f} {reference}'s (goal ≤ {most:g}), {verdict}")


def _print_table(table: Sequence[Sequence[str]], words: int) -> None:
    """The first columns have words."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        cells = [
            c.ljust(w) if i < words else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _costs(row: Row) -> tuple[str, ...]:
    return (
        row.target,
        row.version,
        f"{row.request_us:.1f} ±{row.request_spread_us:.1f}",
        f"{row.chunk_us:.1f} ±{row.chunk_spread_us:.1f}",
        f"{row.stream_fixed_us:.0f} ±{row.stream_fixed_spread_us:.0f}",
        f"{row.stream_us:.0f} ±{row.stream_spread_us:.0f}",
        f"{row.idle_us_per_s / 1e3:.2f}",
        f"{row.request_rate_per_s:.0f}",
        str(row.streams),
        str(row.errors),
        f"{row.noisy}/{row.segments}",
    )


def _ratios(row: Row) -> tuple[str, ...]:
    def over(ratios: dict[str, float]) -> tuple[str, ...]:
        return tuple(f"{ratios[name]:.2f}" if name in ratios else "-" for name in REFERENCES)

    paced = "-"
    if row.paced_added_p50_s is not None:
        paced = f"{row.paced_added_p50_s * 1e3:+.3f} ±{row.paced_spread_s * 1e3:.3f}"
    return (
        row.target,
        *over(row.request_ratio),
        *over(row.stream_ratio),
        paced,
        *over(row.paced_ratio),
        f"{row.request_added_p50_s * 1e3:+.2f}/{row.request_added_p99_s * 1e3:+.2f}",
        f"{row.first_added_p50_s * 1e3:+.2f}/{row.first_added_p99_s * 1e3:+.2f}",
    )


def _print_conditions(segments: list[Segment], args: argparse.Namespace) -> None:
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
        p50 = _median([s.latency_p50_s for s in by_kind["paced"]])
        print(
            f"load and mock themselves, direct: {cost['request']:.1f} µs/request, "
            f"{chunk:.1f} µs/chunk; p50 at 100 requests/s {p50 * 1e3:.3f} ms"
        )
    foreign = [s.foreign_cores for s in segments if s.units]
    steal = [s.steal_cores for s in segments if s.units]
    if foreign:
        print(
            f"foreign CPU during segments: median {_median(foreign):.2f}, most {max(foreign):.2f} "
            f"cores (noisy above {args.max_foreign:g}); stolen: most {max(steal):.2f}"
        )
