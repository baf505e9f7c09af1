"""What it costs that several gateways see each other's load late, in virtual time.

    python benchmarks/scheduling/sharing.py [--replicas 2,4,8] [--intervals 0.02,0.05,0.2,1]
        [--news 0.005] [--seeds 3] [--requests 4000] [--only steady] [--markdown] [--json]
    python benchmarks/scheduling/sharing.py --cost

Eight unequal instances (two of each of four kinds) behind one gateway, or behind several that
exchange their rows every so often, or never; ``news``: every 50 ms, and where a request went is
said at once, but not more often than every 5 ms, as the gateway does it. Three kinds of traffic:

    steady   Poisson arrivals at 0.8 of the instances' summed throughput
    bursts   the same mean rate in bursts: a gap has a coefficient of variation of 8
    at once  every request at time 0

Requests come to a replica by chance, evenly or unevenly (the first one gets 70 %). Throughput and
times are relative to one gateway with the same requests, means over the seeds: 1.00 is what one
scheduler would do; ``error`` is the largest standard error of the times' means. ``starved`` is the
highest mean latency of a replica's requests over the lowest: how unfair it is that queues are
local.

``--cost``: CPU time of one exchange where every instance has changed, without Redis and its
client, the bytes of a replica's message, and what all replicas read together. What it is with a
real Redis is measured by ``traffic.py``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters import PROFILES, draw_lengths
from benchmarks.scheduling.several_gateways import Assumed, Replicas, ReplicaScheduler
from benchmarks.tables import Column, report
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.sharing.exchange import OTHERS, LoadExchange
from hetero_gateway.core.sharing.message import pack, unpack
from hetero_gateway.core.types import InstanceId, InstanceSpec
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.workload import Workload, gamma_arrivals

REPLICAS = (2, 4, 8)
INTERVALS_S = (0.02, 0.05, 0.2, 1.0)
TRAFFIC = ("steady", "bursts", "at once")
SPLITS = ("even", "uneven")
NEWS = "news"
LOAD = 0.8
BURST_CV = 8.0
UNEVEN_SHARE = 0.7
ASSUMED: tuple[Assumed, ...] = ("nothing", "alike-at-first", "alike")
COLUMNS = (
    Column("traffic", "traffic", 9),
    Column("replicas", "replicas", 10, "d"),
    Column("split", "split", 8),
    Column("exchanged every", "every", 17),
    Column("assumed", "assumed", 16),
    Column("tokens/s", "throughput", 10, ".3f"),
    Column("mean s", "mean", 8, ".3f"),
    Column("p99 s", "p99", 8, ".3f"),
    Column("TTFT s", "ttft", 8, ".3f"),
    Column("TTFT p99", "ttft_p99", 10, ".3f"),
    Column("error", "error", 7, ".3f"),
    Column("starved", "starved", 9, ".2f"),
)
COST_COLUMNS = (
    Column("replicas", "replicas", 10, "d"),
    Column("instances", "instances", 11, "d"),
    Column("CPU µs", "cpu_us", 10, ".0f"),
    Column("bytes", "bytes", 9, "d"),
    Column("every ms", "every_ms", 10, ".0f"),
    Column("read MB/s", "read_mb_per_s", 11, ".1f"),
)
INTERVAL_S, NEWS_S = 0.05, 0.005  # the defaults


class ChatLengths:
    """``draw_lengths``, as the simulator wants it."""

    def draw(self, count: int, rng: np.random.Generator) -> Any:
        return draw_lengths(rng, count)


def make_instances(count: int) -> list[SimulatedInstance]:
    profiles = builtin_profiles()
    chosen = [profiles[PROFILES[i % len(PROFILES)]] for i in range(count)]
    return [SimulatedInstance(InstanceId(f"i{i}"), p, p) for i, p in enumerate(chosen)]


def capacity_per_s(instances: Sequence[SimulatedInstance]) -> float:
    """Requests per second of all of them, each alone with always enough to do."""
    mix = Mix.of(ChatLengths(), 0)
    found = {p: run_alone(p, mix, Engines(), 1000) for p in {i.profile for i in instances}}
    tokens = [alone.output_tokens_per_s for i in instances if (alone := found[i.profile])]
    return sum(tokens) / mix.mean_output


def make_workload(traffic: str, requests: int, rate_per_s: float, seed: int) -> Workload:
    prompts, outputs = draw_lengths(np.random.default_rng((seed, 0)), requests)
    rng = np.random.default_rng((seed, 1))
    if traffic == "at once":
        arrival_s = np.zeros(requests)
    else:
        cv = BURST_CV if traffic == "bursts" else 1.0
        arrival_s = gamma_arrivals(requests, rate_per_s, cv, rng)
    return Workload(arrival_s, prompts, outputs)


def make_scheduler(seed: int, replica: int = 0) -> ReplicaScheduler:
    return ReplicaScheduler(make_policy("finish-time"), np.random.default_rng((seed, 2, replica)))


def run(
    instances: Sequence[SimulatedInstance], workload: Workload, gateways: Any
) -> tuple[dict[str, float], Records]:
    """Figures of one run, and its records."""
    mean_output = float(workload.output_tokens.mean())
    records = simulate(instances, workload, gateways, BucketMeanPredictor(mean_output))
    latency_s = records.finish_s - workload.arrival_s
    ttft_s = records.first_token_s - workload.arrival_s
    assert not np.isnan(latency_s).any()
    span_s = records.finish_s.max() - workload.arrival_s[0]
    figures = {
        "throughput": float(workload.output_tokens.sum() / span_s),
        "mean": float(latency_s.mean()),
        "p99": float(np.quantile(latency_s, 0.99)),
        "ttft": float(ttft_s.mean()),
        "ttft_p99": float(np.quantile(ttft_s, 0.99)),
    }
    return figures, records


def split_of(split: str, replicas: int, requests: int, seed: int) -> Any:
    shares = np.full(replicas, 1 / replicas)
    if split == "uneven":
        shares = np.full(replicas, (1 - UNEVEN_SHARE) / (replicas - 1))
        shares[0] = UNEVEN_SHARE
    return np.random.default_rng((seed, 3)).choice(replicas, requests, p=shares)


def compare(
    traffic: str,
    workloads: Sequence[Workload],
    ones: Sequence[dict[str, float]],
    instances: Sequence[SimulatedInstance],
    replicas: int,
    split: str,
    every_s: float | None,
    news_s: float | None,
    assumed: Assumed,
) -> dict[str, Any]:
    """One row: figures over those of one gateway."""
    ratios: dict[str, list[float]] = {}
    starved = []
    for seed, (workload, one) in enumerate(zip(workloads, ones, strict=True)):
        replica_of = split_of(split, replicas, len(workload), seed)
        gateways = [make_scheduler(seed, r) for r in range(replicas)]
        figures, records = run(
            instances, workload, Replicas(gateways, replica_of, every_s, assumed, news_s)
        )
        for name, value in figures.items():
            ratios.setdefault(name, []).append(value / one[name])
        latency_s = records.finish_s - workload.arrival_s
        means = [float(latency_s[replica_of == r].mean()) for r in range(replicas)]
        starved.append(max(means) / min(means))
    return {
        "traffic": traffic,
        "replicas": replicas,
        "split": split,
        "every": _in_words(every_s, news_s),
        "assumed": assumed,
        **{name: statistics.mean(values) for name, values in ratios.items()},
        "errors": {name: _standard_error(values) for name, values in ratios.items()},
        "error": max(_standard_error(ratios[name]) for name in ("mean", "p99", "ttft")),
        "starved": statistics.mean(starved),
        "met": True,
    }


def _in_words(every_s: float | None, news_s: float | None) -> str:
    if every_s is None:
        return "never"
    return f"{every_s * 1000:g} ms" if news_s is None else NEWS


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    instances = make_instances(8)
    rate_per_s = LOAD * capacity_per_s(instances)
    ways: list[tuple[float | None, float | None]] = [(INTERVAL_S, args.news)]
    ways += [(every_s, None) for every_s in (*args.intervals, None)]
    for traffic in TRAFFIC if args.only is None else [args.only]:
        seeds = range(args.seeds)
        workloads = [make_workload(traffic, args.requests, rate_per_s, s) for s in seeds]
        ones = [run(instances, w, make_scheduler(s))[0] for s, w in enumerate(workloads)]
        for replicas, split, (every_s, news_s), assumed in itertools.product(
            args.replicas, args.splits, ways, args.assumed
        ):
            if every_s is None and assumed == "alike-at-first":
                continue  # the same as alike
            told = every_s, news_s, assumed
            yield compare(traffic, workloads, ones, instances, replicas, split, *told)


def cost_rows() -> Iterator[dict[str, Any]]:
    for replicas, count in itertools.product((2, 8), (8, 64, 512, 4096)):
        names = [(InstanceId(f"i{i}"), f"http://10.0.0.1:{i}") for i in range(count)]
        mine, other = _gateway(names), _gateway(names)
        spent_s, size = [], 0
        for turn in range(1, 6):
            now_s = float(turn)
            for scheduler, _ in (mine, other):
                for name, _ in names:
                    scheduler.members.table[name].dispatch(Request("m", 100, 50.0), 0.5, now_s)
            message = other[1].say(now_s)
            assert message is not None
            size = len(data := pack(message))
            spent_s.append(_exchange_s(*mine, data, replicas, now_s))
        cpu_s = statistics.median(spent_s)
        every_s = max(INTERVAL_S, 20 * cpu_s)
        yield {
            "replicas": replicas,
            "instances": count,
            "cpu_us": cpu_s * 1e6,
            "bytes": size,
            "every_ms": every_s * 1e3,
            "read_mb_per_s": replicas * (replicas - 1) * size / every_s / 1e6,
            "met": True,
        }


def _gateway(names: Sequence[tuple[InstanceId, str]]) -> tuple[ReplicaScheduler, LoadExchange]:
    profiles, scheduler = builtin_profiles(), make_scheduler(0)
    for i, (name, _) in enumerate(names):
        profile = profiles[PROFILES[i % len(PROFILES)]]
        scheduler.add(InstanceSpec(name, frozenset({"m"}), profile))
    exchange = LoadExchange(scheduler, ttl_s=3.0, interval_s=INTERVAL_S)
    exchange.set_instances(names)
    return scheduler, exchange


def _exchange_s(
    scheduler: ReplicaScheduler, exchange: LoadExchange, data: bytes, replicas: int, now_s: float
) -> float:
    """CPU time of saying, and of hearing the same from each of the others."""
    begun_s = time.process_time()
    message = exchange.say(now_s)
    assert message is not None
    pack(message)
    exchange.said()
    for replica in range(replicas - 1):
        exchange.hear(str(replica), unpack(data), now_s)
    for change in exchange.changes(now_s):
        scheduler.members.table[change.instance_id].set_peer(OTHERS, change.load, now_s)
    return time.process_time() - begun_s


def print_markdown(found: Sequence[dict[str, Any]]) -> None:
    """The document's table: mean latency / its p99 / mean TTFT."""
    ways = list(dict.fromkeys(row["every"] for row in found))
    print(f"| traffic | replicas | split | {' | '.join(ways)} |")
    print("|---" * (3 + len(ways)) + "|")
    for line, those in itertools.groupby(
        found, lambda row: (row["traffic"], row["replicas"], row["split"])
    ):
        cells = [f"{r['mean']:.2f} / {r['p99']:.2f} / {r['ttft']:.2f}" for r in those]
        print(f"| {' | '.join(map(str, (*line, *cells)))} |")
    for name in ("mean", "p99", "ttft"):
        errors = sorted(row["errors"][name] for row in found)
        print(f"standard errors of {name}: median {statistics.median(errors):.3f}", end=", ")
        print(f"largest {errors[-1]:.3f}")
    print(f"starved: at most {max(row['starved'] for row in found):.2f}")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what late news of the others' load costs")
    parser.add_argument("--replicas", type=lambda t: [int(n) for n in t.split(",")],
                        default=list(REPLICAS))  # fmt: skip
    parser.add_argument("--intervals", type=numbers, default=list(INTERVALS_S), help="s")
    parser.add_argument("--news", type=float, default=NEWS_S, help="s between two")
    parser.add_argument("--splits", type=lambda t: t.split(","), default=list(SPLITS))
    parser.add_argument("--assumed", type=lambda t: t.split(","), default=list(ASSUMED))
    parser.add_argument("--only", choices=TRAFFIC, help="one kind of traffic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000, help="of each run")
    parser.add_argument("--cost", action="store_true", help="of one exchange")
    parser.add_argument("--markdown", action="store_true", help="print the document's table")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    if args.cost:
        return report(cost_rows(), COST_COLUMNS, as_json=args.json)
    if args.markdown:
        print_markdown(list(rows(args)))
        return 0
    return report(rows(args), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
