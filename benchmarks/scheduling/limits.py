"""The load that policies hold within limits on the first token and on each further one.

    python benchmarks/scheduling/limits.py -o cells.jsonl [--requests NAME=TRACE.csv ...]
        [--set development|held-out|lopsided] [--clusters a,b] [--tpot 0.1,0.05] [--seeds 3]
    python benchmarks/scheduling/limits.py --at 0.9 --set lopsided [--mixes agents] ...

For each cluster of ``losses.py`` (but the one of two models) and mix: the highest load, in
hundredths of what the instances do together, at which 95 % of the requests have their first token
within 1 s and their others within ``--tpot`` seconds each. ``finish-time+limits`` knows the limits
(``scheduler.slo``); all others are only judged by them. Cells that are in the file already are not
run again. With ``--at``: the share of requests within the limits at that load, and the mean
latency, of ``finish-time`` with and without knowing them. Needs the extra ``fast``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.losses import (
    CLUSTERS,
    LOPSIDED_MIXES,
    MIXES,
    OURS,
    Kind,
    instances_of,
    named_trace,
)
from benchmarks.scheduling.policies import trace_mix
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.sim.cluster import simulate
from hetero_gateway.sim.experiment import Experiment, measure_bound, mix_moments, run_once
from hetero_gateway.sim.held import held_loads
from hetero_gateway.sim.workload import Lengths

WITH_LIMITS = f"{OURS}+limits"
OTHERS = ("min-max", "capacity-weighted", "least-work", "least-requests", "power-of-two")
POLICIES = (WITH_LIMITS, OURS, *OTHERS)
SHARE, TTFT_S = 0.95, 1.0
_REQUESTS = 3000

Key = tuple[str, str, str, float, str]


def loads_held(
    cluster: tuple[Kind, ...], lengths: Lengths, tpot_s: float, seeds: int
) -> list[float]:
    """By each policy, in the order of ``POLICIES``."""
    slo = Slo(TTFT_S, tpot_s)
    instances = tuple(instances_of(cluster))
    plain = Experiment(instances, lengths, _REQUESTS, slo)
    moments, bound = mix_moments(lengths), measure_bound(plain)
    run = partial(simulate, compiled=True)

    def held(policy: str) -> float:
        name, _, limits = policy.partition("+")
        experiment = Experiment(instances, lengths, _REQUESTS, slo, heeds_slo=bool(limits))

        def share_at(load: float) -> float:
            rate = bound.rate_per_s(load, moments)
            runs = [run_once(experiment, name, rate, s, moments, run) for s in range(seeds)]
            return float(np.mean([r.slo_share for r in runs]))

        return held_loads(share_at, (SHARE,))[0]

    return [held(policy) for policy in POLICIES]


def print_shares(
    cluster: tuple[Kind, ...], lengths: Lengths, tpot_s: float, seeds: int, load: float, name: str
) -> None:
    """Within the limits at this load, by whether ``finish-time`` knows them."""
    instances, slo = tuple(instances_of(cluster)), Slo(TTFT_S, tpot_s)
    plain = Experiment(instances, lengths, _REQUESTS, slo)
    moments = mix_moments(lengths)
    rate = measure_bound(plain).rate_per_s(load, moments)
    shown = ""
    for heeds in (True, False):
        experiment = Experiment(instances, lengths, _REQUESTS, slo, heeds_slo=heeds)
        run = partial(simulate, compiled=True)
        runs = [run_once(experiment, OURS, rate, s, moments, run) for s in range(seeds)]
        share = float(np.mean([r.slo_share for r in runs]))
        latency_s = float(np.mean([r.latency_s.mean for r in runs]))
        shown += f"{share:9.3f} in {latency_s:7.3f} s"
    print(f"{name:<26}{tpot_s:<8g}{shown}", flush=True)


def print_table(cells: dict[Key, float], which: str) -> None:
    """Each setting, and the means over them of what knowing the limits gains."""
    settings = sorted({key[:4] for key in cells if key[0] == which})
    print(f"{'':36}{'held':>6}{'best':>6}  ratio   " + " ".join(f"{p:>17}" for p in POLICIES[1:]))
    gains: dict[float, list[float]] = {}
    for setting in settings:
        held = [cells[(*setting, policy)] for policy in POLICIES]
        # Where no policy holds any load, there is nothing to compare.
        best = max(held[2:])
        if best <= 0:
            continue
        gains.setdefault(setting[3], []).append(held[0] / best)
        _, cluster, mix, tpot_s = setting
        print(
            f"{cluster:<14}{mix:<14}{tpot_s:<8g}{held[0]:6.2f}{best:6.2f}  {held[0] / best:5.2f}   "
            + " ".join(f"{one:17.2f}" for one in held[1:])
        )
    for tpot_s, found in sorted(gains.items()):
        mean = math.exp(float(np.mean(np.log(found)))) if min(found) > 0 else 0.0
        print(
            f"TPOT {tpot_s * 1000:g} ms: over the best of the others {mean:.3f}, "
            f"{min(found):.2f} to {max(found):.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="loads that are held within limits")
    parser.add_argument("--requests", type=named_trace, action="append", metavar="NAME=TRACE.csv")
    parser.add_argument("--set", choices=CLUSTERS, default="development")
    parser.add_argument("--clusters", help="default: all of the set, but two-models")
    parser.add_argument("--mixes", help="default: all there are")
    parser.add_argument("--tpot", default="0.1,0.05", help="limits in seconds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at", type=float, help="shares at this load, in place of loads held")
    parser.add_argument("-o", "--output", type=Path, help="cells, as JSON lines; added to")
    args = parser.parse_args()
    mixes = {name: trace_mix(path) for name, path in args.requests or ()}
    mixes = mixes or (LOPSIDED_MIXES if args.set == "lopsided" else MIXES)
    if args.mixes:
        mixes = {name: mixes[name] for name in args.mixes.split(",")}
    if args.at:
        print(f"{'':34}{'knowing the limits':>20}{'not':>20}")
        for cluster in args.clusters.split(",") if args.clusters else CLUSTERS[args.set]:
            for mix, lengths in mixes.items():
                for tpot_s in map(float, args.tpot.split(",")):
                    kinds, name = CLUSTERS[args.set][cluster], f"{cluster} {mix}"
                    print_shares(kinds, lengths, tpot_s, args.seeds, args.at, name)
        return 0
    if args.output is None:
        parser.error("cells go to a file: give -o")
    cells: dict[Key, float] = {}
    if args.output.exists():
        for line in args.output.read_text(encoding="utf-8").splitlines():
            *key, load = json.loads(line)
            cells[tuple(key)] = load
    every = [name for name in CLUSTERS[args.set] if name != "two-models"]
    with args.output.open("a", encoding="utf-8") as out:
        for cluster in args.clusters.split(",") if args.clusters else every:
            for mix, lengths in mixes.items():
                for tpot_s in map(float, args.tpot.split(",")):
                    setting = (args.set, cluster, mix, tpot_s)
                    if (*setting, OURS) in cells:
                        continue
                    found = loads_held(CLUSTERS[args.set][cluster], lengths, tpot_s, args.seeds)
                    for policy, load in zip(POLICIES, found, strict=True):
                        cells[(*setting, policy)] = load
                        print(json.dumps([*setting, policy, load]), file=out, flush=True)
    print_table(cells, args.set)
    return 0


if __name__ == "__main__":
    sys.exit(main())
