"""What it costs when several gateways do not know what the others have sent where, simulated.

    python benchmarks/scheduling/prefix_replicas.py chat=TRACE.jsonl.gz … [--clusters A,B,eight]
        [--replicas 4] [--load 0.9] [--seeds 2] [--limit N]

One gateway with ``finish-time``, and several that exchange their loads as ``scheduler.shared`` does
(every 0.5 s, and news at once). Of prefix caches each replica knows

    at once    what any of them has sent, at once: the best that an exchange could do
    exchanged  the same, through a log that each visits every 0.25 s, as ``scheduler.shared`` does
    own        what it has sent itself; requests come to any replica
    affinity   the same, but all requests of a session come to the same replica, by a hash
    blind      nothing

Loads are shares of what one blind gateway serves, as in ``prefix.py``. Printed: mean latency, mean
TTFT and cached share, as ratios to one gateway; geometric means over the seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.prefix import (
    SLO,
    at_load,
    capacity_per_s,
    load_instances,
    read_rows,
    workload_of,
)
from benchmarks.scheduling.prefix_peers import geometric_mean
from benchmarks.scheduling.several_gateways import Replicas
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.result import RunResult, summarise
from hetero_gateway.sim.workload import Workload

# As ``scheduler.shared`` exchanges.
INTERVAL_S, NEWS_S = 0.5, 0.01
WAYS = ("at once", "exchanged", "own", "affinity", "blind")
PLACEMENTS_S = {"at once": 0.0, "exchanged": 0.25}


def run(
    way: str,
    instances: tuple[SimulatedInstance, ...],
    workload: Workload,
    sessions: np.ndarray[Any, Any],
    replicas: int,
    seed: int,
) -> tuple[RunResult, float]:
    """``way``: one of ``WAYS``, or "one". With the bytes that a request takes in the log."""
    mean_output = float(workload.output_tokens.mean())
    reference = (float(workload.prompt_tokens.mean()), mean_output)
    schedulers = [
        Scheduler(
            make_policy("finish-time"),
            np.random.default_rng((seed, i)),
            reference=reference,
            prefix_cache=way != "blind",
        )
        for i in range(1 if way == "one" else replicas)
    ]
    gateway: Scheduler | Replicas = schedulers[0]
    if way != "one":
        rng = np.random.default_rng((seed, 4))
        replica_of = rng.integers(replicas, size=len(workload))
        if way == "affinity":
            replica_of = sessions % replicas
        gateway = Replicas(
            schedulers, replica_of, INTERVAL_S, news_s=NEWS_S, placements_s=PLACEMENTS_S.get(way)
        )
    predictor = BucketMeanPredictor(mean_output)
    records = simulate(instances, workload, gateway, predictor, compiled=can_compile())
    log_bytes = gateway.log_bytes if isinstance(gateway, Replicas) else 0
    return summarise(workload, records, len(instances), SLO), log_bytes / len(workload)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE.jsonl.gz")
    parser.add_argument("--clusters", default="A,B,eight")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--limit", type=int, help="requests of each trace")
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    ways = args.ways.split(",")
    for named in args.traces:
        name, _, path = named.partition("=")
        for cluster in args.clusters.split(","):
            instances = load_instances(cluster)
            largest = max(i.profile.kv_capacity_tokens for i in instances) // 16 * 16
            found: dict[str, list[RunResult]] = {way: [] for way in ("one", *ways)}
            said: dict[str, float] = {}
            for seed in range(args.seeds):
                rows = read_rows(Path(path), largest, args.limit, seed)
                workload = workload_of(rows)
                capacity = capacity_per_s(instances, workload, seed)
                workload = at_load(workload, args.load * capacity)
                sessions = np.array([row.text.session for row in rows])
                for way, results in found.items():
                    told = run(way, instances, workload, sessions, args.replicas, seed)
                    results.append(told[0])
                    said[way] = said.get(way, 0.0) + told[1] / args.seeds
            one = found["one"]
            print(f"{name} on {cluster}, {args.replicas} replicas at {args.load:.0%}")
            for way in ways:
                pairs = list(zip(found[way], one, strict=True))
                latency = geometric_mean([r.latency_s.mean / o.latency_s.mean for r, o in pairs])
                ttft = geometric_mean([r.ttft_s.mean / o.ttft_s.mean for r, o in pairs])
                cached = sum(r.cached_share for r, _ in pairs) / len(pairs)
                print(
                    f"  {way:9s} latency {latency:.3f}  TTFT {ttft:.3f}  cached {cached:.1%} "
                    f"(one: {sum(o.cached_share for o in one) / len(one):.1%})"
                    + (f"  {said[way]:.0f} bytes a request" if said[way] else ""),
                    flush=True,
                )


if __name__ == "__main__":
    main()
