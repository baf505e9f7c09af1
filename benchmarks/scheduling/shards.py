"""What it costs to decide for a large pool in parts, in virtual time.

    python benchmarks/scheduling/shards.py [--instances 256] [--loads 0.7,0.9] [--parts 4,16,64]
        [--kinds shards,replicas,samples] [--drawn 1,2,4] [--intervals 0.05,1] [--dealt turns]
        [--seed 0] [--json]

Many unequal instances of one model (as many of each of four kinds) behind one exact scheduler, or

    shards    so many schedulers with instances of their own; a front draws some of them for each
              request and takes the one with the lowest drain time, by reports so many seconds old
    replicas  so many schedulers that all have all instances, exchange their rows every so often,
              and get the same share of the requests
    samples   one scheduler that draws so many candidates for each request (and looks at all when
              none of them has room); "+ last": and the one that the last request had chosen

Arrivals are Poisson, at a share of the instances' summed throughput. Times are those of requests
that come after the first quarter, over the exact scheduler's with the same requests: 1.00 is what
one scheduler would do. ``--dealt``: how instances come to shards: in ``turns``, so that each shard
has as many of each kind, by ``chance``, or by ``kind``, so that each shard has one kind.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters import PROFILES
from benchmarks.scheduling.several_gateways import Replicas, Shards
from benchmarks.scheduling.sharing import (
    capacity_per_s,
    make_instances,
    make_scheduler,
    make_workload,
    numbers,
)
from benchmarks.tables import Column, report
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling import decider as decider_module
from hetero_gateway.core.scheduling.decider import Decider
from hetero_gateway.core.scheduling.pool import Eligible
from hetero_gateway.core.scheduling.queue import ModelQueue
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.workload import Workload

KINDS = ("shards", "replicas", "samples")
DEALT = ("turns", "chance", "kind")
SAMPLES = ((4, 0), (8, 0), (15, 0), (8, 1))
REQUESTS_PER_INSTANCE = 150
WARM_UP = 0.25  # of the requests: the instances are empty at first
COLUMNS = (
    Column("instances", "instances", 10, "d"),
    Column("load", "load", 6, ".2f"),
    Column("  decided by", "by", 14),
    Column("drawn", "drawn", 6, "d"),
    Column("every s", "every_s", 8, "g"),
    Column("mean", "mean", 7, ".3f"),
    Column("p99", "p99", 7, ".3f"),
    Column("TTFT", "ttft", 7, ".3f"),
    Column("TTFT p99", "ttft_p99", 9, ".3f"),
    Column("mean s", "mean_s", 8, ".2f"),
    Column("TTFT s", "ttft_s", 8, ".3f"),
    Column("p99 s", "ttft_p99_s", 7, ".3f"),
    Column("CPU s", "cpu_s", 7, ".0f"),
)


class SamplingDecider(Decider):
    """Decides among a few candidates that are drawn, in plain floats.

    Args:
        size: how many are drawn.
        keep: so many of the last chosen are candidates, too.
    """

    size = 2**31
    keep = 0

    def decide(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float = 0.0,
    ) -> Decision | None:
        count = len(eligible.pool.ids)
        if eligible.kept is None and self.size < count:
            drawn = self._generator.integers(0, count, self.size).tolist()
            among = Eligible(eligible.pool, sorted({*drawn, *self._last}), ())
            decision = super().decide(request, among, now_s, queue, waited_s)
            if decision is not None:
                self._remember(eligible, decision)
                return decision
        return super().decide(request, eligible, now_s, queue, waited_s)

    def _remember(self, eligible: Eligible, decision: Decision) -> None:
        if self.keep:
            position = eligible.pool.ids.index(decision.instance_id)
            self._last = [position, *self._last][: self.keep]

    _generator: np.random.Generator
    _last: list[int]


def make_sampling(size: int, keep: int, seed: int) -> Scheduler:
    scheduler = Scheduler(make_policy("finish-time"), np.random.default_rng((seed, 2, 0)))
    plain = scheduler._decider
    decider = SamplingDecider(plain.policy, plain.rng, plain.views)
    decider.size, decider.keep = size, keep
    decider._generator, decider._last = np.random.default_rng((seed, 5)), []
    scheduler._decider = decider
    return scheduler


def run(
    instances: Sequence[SimulatedInstance], workload: Workload, gateways: Any
) -> dict[str, float]:
    """Figures of the requests after the warm-up, s; and CPU of the run."""
    begin_s = time.process_time()
    mean_output = float(workload.output_tokens.mean())
    records = simulate(instances, workload, gateways, BucketMeanPredictor(mean_output))
    counted = slice(int(WARM_UP * len(workload)), None)
    latency_s = (records.finish_s - workload.arrival_s)[counted]
    ttft_s = (records.first_token_s - workload.arrival_s)[counted]
    assert not np.isnan(latency_s).any()
    return {
        "mean": float(latency_s.mean()),
        "p99": float(np.quantile(latency_s, 0.99)),
        "ttft": float(ttft_s.mean()),
        "ttft_p99": float(np.quantile(ttft_s, 0.99)),
        "cpu_s": time.process_time() - begin_s,
    }


def dealt(
    instances: Sequence[SimulatedInstance], shards: int, how: str
) -> tuple[Sequence[SimulatedInstance], int]:
    """The instances in the order in which they are dealt out, and how many in a row to a shard."""
    size = len(instances) // shards
    if how == "turns":
        return instances, min(size, len(PROFILES))
    if how == "chance":
        order = np.random.default_rng(6).permutation(len(instances))
    else:
        order = np.argsort([i % len(PROFILES) for i in range(len(instances))], kind="stable")
    return [instances[i] for i in order], size


def cases(
    args: argparse.Namespace, instances: Sequence[SimulatedInstance], requests: int
) -> Iterator[tuple[str, int, float, Any, Sequence[SimulatedInstance]]]:
    """(by, drawn, every s, gateways, the instances in their order)."""
    seed = args.seed
    if "shards" in args.kinds:
        for shards in args.parts:
            order, block = dealt(instances, shards, args.dealt)
            for drawn in args.drawn:
                for every_s in args.intervals if drawn > 1 else (0.0,):
                    schedulers = [make_scheduler(seed, shard) for shard in range(shards)]
                    rng = np.random.default_rng((seed, 4))
                    several = Shards(schedulers, drawn, rng, block, every_s)
                    yield f"{shards} shards", drawn, every_s, several, order
    if "replicas" in args.kinds:
        for replicas in args.parts:
            for every_s in args.intervals:
                schedulers = [make_scheduler(seed, replica) for replica in range(replicas)]
                replica_of = np.random.default_rng((seed, 3)).integers(0, replicas, requests)
                several = Replicas(schedulers, replica_of, every_s)
                yield f"{replicas} replicas", 0, every_s, several, instances
    if "samples" in args.kinds:
        for size, keep in SAMPLES:
            name = "samples + last" if keep else "samples"
            yield name, size, 0.0, make_sampling(size, keep, seed), instances


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All is compared with one scheduler that looks at all instances."""
    most = decider_module.MOST_CANDIDATES
    decider_module.MOST_CANDIDATES = 2**31
    try:
        yield from rows_of_all(args)
    finally:
        decider_module.MOST_CANDIDATES = most


def rows_of_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    instances = make_instances(args.instances)
    requests = args.requests or REQUESTS_PER_INSTANCE * args.instances
    for load in args.loads:
        rate_per_s = load * capacity_per_s(instances)
        workload = make_workload("steady", requests, rate_per_s, args.seed)
        one = run(instances, workload, make_scheduler(args.seed))
        yield _row(args, load, "one", 0, 0.0, one, one)
        for by, drawn, every_s, gateways, order in cases(args, instances, requests):
            figures = run(order, workload, gateways)
            yield _row(args, load, by, drawn, every_s, figures, one)


def _row(
    args: argparse.Namespace,
    load: float,
    by: str,
    drawn: int,
    every_s: float,
    figures: dict[str, float],
    one: dict[str, float],
) -> dict[str, Any]:
    return {
        "instances": args.instances,
        "load": load,
        "by": f"  {by}",
        "drawn": drawn,
        "every_s": every_s,
        **{name: figures[name] / one[name] for name in ("mean", "p99", "ttft", "ttft_p99")},
        **{f"{name}_s": figures[name] for name in ("mean", "ttft", "ttft_p99")},
        "cpu_s": figures["cpu_s"],
        "met": True,
    }


def main(argv: Sequence[str] | None = None) -> int:
    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="what it costs to decide in parts")
    parser.add_argument("--instances", type=int, default=256)
    parser.add_argument("--loads", type=numbers, default=[0.7, 0.9], help="with commas")
    parser.add_argument("--parts", type=counts, default=[4, 16, 64], help="shards, or replicas")
    parser.add_argument("--kinds", type=lambda t: t.split(","), default=list(KINDS))
    parser.add_argument("--drawn", type=counts, default=[1, 2, 4], help="shards for a request")
    parser.add_argument("--intervals", type=numbers, default=[0.05, 1.0],
                        help="s between two reports, or exchanges")  # fmt: skip
    parser.add_argument("--dealt", choices=DEALT, default="turns")
    parser.add_argument("--requests", type=int, help="of each run; default: 150 per instance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    return report(rows(args), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
