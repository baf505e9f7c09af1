"""What simulating a cluster costs: CPU seconds and peak memory per run, and how both grow.

    python benchmarks/simulator/cost.py [--requests N] [--policies a,b] [--scaling] [--plain] \\
        [--json]

The instances have four different profiles of Llama-3-8B. Lengths are log-normal. The load is 90 %
of the sum of what each instance finishes per second on its own with everything sent at once.
CPU time of this process alone, numba's compilation and loading apart; each run is one process,
so that peak memory is its own. Exit code 1 when a goal is missed (they hold for 1 M requests on
16 instances, compiled).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters import PROFILES, draw_lengths
from benchmarks.tables import Column, report
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor, ConstantPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.workload import Workload

GOALS_S = {"round-robin": 5.0, "capacity-weighted": 5.0, "min-max": 5.0, "finish-time": 7.0}
LOAD = 0.9
INSTANCES = 16
REQUESTS = 1_000_000
COLUMNS = (
    Column("policy", "policy", 20),
    Column("requests", "requests", 10, "d"),
    Column("instances", "instances", 10, "d"),
    Column("CPU s", "cpu_s", 8, ".1f"),
    Column("goal s", "goal_s", 8, ".0f"),
    Column("µs/request", "us_per_request", 12, ".1f"),
    Column("peak MB", "peak_memory_mb", 9, "d"),
    Column("mean latency s", "mean_latency_s", 16, ".2f"),
)
SOLO_REQUESTS = 2000
SCALING_REQUESTS = (10_000, 100_000, 1_000_000)
SCALING_INSTANCES = (4, 16, 64, 256)
SCALING_AT_REQUESTS = 100_000


def solo_requests_per_s(profile: Profile) -> float:
    """How many requests the instance finishes per second, with everything sent at once."""
    prompts, outputs = draw_lengths(np.random.default_rng(7), SOLO_REQUESTS)
    workload = Workload(np.zeros(SOLO_REQUESTS), prompts, outputs)
    scheduler = Scheduler(make_policy("round-robin"), np.random.default_rng(0))
    alone = SimulatedInstance(InstanceId("alone"), profile, profile)
    records = simulate([alone], workload, scheduler, ConstantPredictor(250.0), compiled=False)
    # Without the tail, in which the batch runs empty.
    finishes = np.sort(records.finish_s)
    steady = finishes[int(0.1 * SOLO_REQUESTS) : int(0.8 * SOLO_REQUESTS)]
    return float((steady.size - 1) / (steady[-1] - steady[0]))


def cluster(count: int) -> tuple[list[SimulatedInstance], float]:
    """So many instances, and the sum of their solo rates in requests/s."""
    profiles = builtin_profiles()
    rates = {name: solo_requests_per_s(profiles[name]) for name in PROFILES}
    names = [PROFILES[i % len(PROFILES)] for i in range(count)]
    instances = [
        SimulatedInstance(InstanceId(f"i{i}"), profiles[name], profiles[name], weight=rates[name])
        for i, name in enumerate(names)
    ]
    return instances, sum(rates[name] for name in names)


def run_once(policy: str, requests: int, count: int, plain: bool) -> dict[str, Any]:
    """One run in this process."""
    instances, capacity_per_s = cluster(count)
    compiled = can_compile() and not plain
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1 / (LOAD * capacity_per_s), requests))
    workload = Workload(arrival_s, *draw_lengths(rng, requests))
    if compiled:  # load or compile the kernel
        head = Workload(arrival_s[:10], workload.prompt_tokens[:10], workload.output_tokens[:10])
        simulate_under(policy, instances, head, compiled)
    begin_s, begin_wall_s = time.process_time(), time.perf_counter()
    records = simulate_under(policy, instances, workload, compiled)
    cpu_s, wall_s = time.process_time() - begin_s, time.perf_counter() - begin_wall_s
    latency_s = records.finish_s - workload.arrival_s
    goal_s = GOALS_S.get(policy)
    if (requests, count, compiled) != (REQUESTS, INSTANCES, True):
        goal_s = None
    return {
        "policy": policy,
        "requests": requests,
        "instances": count,
        "compiled": compiled,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "us_per_request": round(cpu_s / requests * 1e6, 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "simulated_s": round(float(np.nanmax(records.finish_s)), 1),
        "finished": int((~np.isnan(records.finish_s)).sum()),
        "mean_latency_s": round(float(np.nanmean(latency_s)), 3),
        "preemptions": int(records.preemptions.sum()),
        "requests_per_s": round(LOAD * capacity_per_s, 2),
        "goal_s": goal_s,
        "met": goal_s is None or cpu_s <= goal_s,
    }


def simulate_under(
    policy: str, instances: list[SimulatedInstance], workload: Workload, compiled: bool
) -> Any:
    scheduler = Scheduler(make_policy(policy), np.random.default_rng(2))
    return simulate(instances, workload, scheduler, BucketMeanPredictor(250.0), compiled=compiled)


def in_a_process(policy: str, requests: int, count: int, plain: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", policy, str(requests), str(count)]
    output = subprocess.run(
        command + ["--plain"] * plain, check=True, capture_output=True, text=True
    ).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time and memory of simulations")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--policies", default=",".join(GOALS_S), help="names, with commas")
    parser.add_argument("--scaling", action="store_true", help="also over requests and instances")
    parser.add_argument("--plain", action="store_true", help="without numba")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        policy, requests, count = args.one[0], int(args.one[1]), int(args.one[2])
        print(json.dumps(run_once(policy, requests, count, args.plain)))
        return 0
    runs = [(policy, args.requests, INSTANCES) for policy in args.policies.split(",")]
    if args.scaling:
        runs += [("min-max", requests, INSTANCES) for requests in SCALING_REQUESTS]
        runs += [("min-max", SCALING_AT_REQUESTS, count) for count in SCALING_INSTANCES]
    rows = (in_a_process(*run, args.plain) for run in runs)
    return report(rows, COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
