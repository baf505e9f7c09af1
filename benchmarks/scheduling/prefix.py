"""``finish-time`` with and without the prefix cache in its cost, beside other routers' rules.

    python benchmarks/scheduling/prefix.py chat=TRACE.jsonl.gz agents=… -o cells.jsonl
        [--clusters A,B,mix,equal,one-six] [--loads 0.5,0.7,0.9] [--slo] [--seed 0] [--limit N]
        [--routers blind,aware,aware@1,llm-d,…]

One line per trace, cluster, load and router: mean latency, mean and p99 TTFT, cached share. Loads
are shares, in the trace's middle, of what ``finish-time`` without knowledge of the caches serves in
its stride when everything is there at once. With ``--slo``: the highest load at which 95 % of the
requests have their first token within 2 s. ``aware@W`` is ``finish-time`` with a
``first_token_weight`` of W; ``session`` is the
policy of that name, consistent hashing by conversation with bounded loads. Traces have the form of
docs/guide/simulate.md#traces-with-prefixes. What ``-o`` has already is not run again. At the
end: ratios to the blind ``finish-time`` and to the best of the others in each cell, as geometric
means.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.losses import CLUSTERS as KINDS
from benchmarks.scheduling.losses import instances_of
from benchmarks.scheduling.prefix_peers import RULES, geometric_mean, peer
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.cluster_config import load_cluster
from hetero_gateway.files.trace import read_trace
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.prefixes import KnownText, Prefixes, Run
from hetero_gateway.sim.result import RunResult, summarise
from hetero_gateway.sim.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = {"A": "paper-a", "B": "paper-b", "eight": "eight-of-four-kinds", "mix": "modern-mix"}
LOPSIDED = KINDS["lopsided"]
BLIND, AWARE, SESSION = "blind", "aware", "session"
ROUTERS = (BLIND, AWARE, *RULES)
SLO = Slo(2.0, 1e9)
SLO_SHARE = 0.95


def load_instances(name: str) -> tuple[SimulatedInstance, ...]:
    """A cluster by name; ``equal`` is four of A's faster kind, others are ``losses.py``'s."""
    if name in LOPSIDED:
        return tuple(instances_of(LOPSIDED[name]))
    if name != "equal":
        return load_cluster(ROOT / "configs" / "clusters" / f"{CLUSTERS[name]}.yaml").instances
    first = load_instances("A")[0]
    return tuple(dataclasses.replace(first, instance_id=InstanceId(f"e{i}")) for i in range(4))


def read_rows(path: Path, most_tokens: int, limit: int | None, seed: int = 0) -> list[Any]:
    """A trace's requests, as far as they fit the largest instance.

    ``seed``: 0 leaves the trace as it is; with others the sessions begin at each other's times.
    """
    rows = [
        row
        for row in read_trace(path, limit)
        if row.input_tokens + row.output_tokens <= most_tokens and row.text is not None
    ]
    if seed:
        rows = with_sessions_moved(rows, np.random.default_rng((seed, 3)))
    return rows


def read_workload(path: Path, most_tokens: int, limit: int | None, seed: int = 0) -> Workload:
    """The same, to be simulated."""
    return workload_of(read_rows(path, most_tokens, limit, seed))


def workload_of(rows: list[Any]) -> Workload:
    prompt = np.array([row.input_tokens for row in rows], np.int64)
    output = np.array([row.output_tokens for row in rows], np.int64)
    texts = [KnownText(tuple(Run(*run) for run in row.text.runs)) for row in rows if row.text]
    assert rows[0].text is not None
    arrival_s = np.array([row.arrival_s for row in rows], float)
    prefixes = Prefixes(texts, prompt, output, rows[0].text.block_tokens)
    return Workload(arrival_s - arrival_s[0], prompt, output, prefixes)


def with_sessions_moved(rows: list[Any], rng: np.random.Generator) -> list[Any]:
    """The same sessions, their turns as far apart as they were, in another order."""
    begin_s: dict[int, float] = {}
    for row in rows:
        begin_s.setdefault(row.text.session, row.arrival_s)
    moved_s = dict(zip(begin_s, rng.permutation(list(begin_s.values())).tolist(), strict=True))
    moved = [
        dataclasses.replace(row, arrival_s=row.arrival_s - begin_s[s] + moved_s[s])
        for row in rows
        for s in (row.text.session,)
    ]
    return sorted(moved, key=lambda row: row.arrival_s)


class BySession(Scheduler):
    """Told of each request's conversation: by its first block that does not stand in a run that
    others begin with."""

    texts: Sequence[KnownText] = ()

    def place(self, request: Request, now_s: float, **options: Any) -> Any:
        runs = self.texts[options["owner"]].runs
        session = runs[min(1, len(runs) - 1)].first if runs else 0
        return super().place(request.replace(session=session), now_s, **options)


def run(
    router: str, instances: Sequence[SimulatedInstance], workload: Workload, seed: int
) -> RunResult:
    assert workload.prefixes is not None
    mean_output = float(workload.output_tokens.mean())
    options: dict[str, Any] = {"compiled": can_compile()}
    gateway: Any
    if router in RULES:
        gateway = peer(router, workload.prefixes, seed)
        options["watch"] = gateway.watch
    elif router == SESSION:
        gateway = BySession(make_policy(router), np.random.default_rng((seed, 2)))
        gateway.texts = workload.prefixes.texts
    else:
        kind, _, weight = router.partition("@")
        gateway = Scheduler(
            make_policy("finish-time", options_of(weight)),
            np.random.default_rng((seed, 2)),
            reference=(float(workload.prompt_tokens.mean()), mean_output),
            prefix_cache=kind == AWARE,
        )
    records = simulate(instances, workload, gateway, BucketMeanPredictor(mean_output), **options)
    return summarise(workload, records, len(instances), SLO)


def options_of(first_token_weight: str) -> PolicyOptions:
    if not first_token_weight:
        return PolicyOptions()
    return PolicyOptions(first_token_weight=float(first_token_weight))


def plateau_per_s(workload: Workload) -> float:
    """Arrivals per second between a tenth and eight tenths of them.

    Sessions begin and end: the first and the last of a trace's requests come more slowly, and at
    90 % of a capacity by the mean rate its middle would be an overload.
    """
    size = len(workload)
    first, last = size // 10, 8 * size // 10
    return (last - first) / float(workload.arrival_s[last] - workload.arrival_s[first])


def at_load(workload: Workload, rate_per_s: float) -> Workload:
    """Its own times, stretched to a rate in its middle."""
    arrival_s = workload.arrival_s * (plateau_per_s(workload) / rate_per_s)
    return dataclasses.replace(workload, arrival_s=arrival_s)


def capacity_per_s(instances: Sequence[SimulatedInstance], workload: Workload, seed: int) -> float:
    """Requests per second that the blind ``finish-time`` serves in its stride."""
    at_once = dataclasses.replace(workload, arrival_s=np.zeros(len(workload)))
    result = run(BLIND, instances, at_once, seed)
    return result.steady_tokens_per_s / float(workload.output_tokens.mean())


def slo_load(
    router: str,
    instances: Sequence[SimulatedInstance],
    workload: Workload,
    capacity: float,
    seed: int,
) -> float:
    """The highest load, to 3 %, that keeps the first token within the limit; by halving."""
    low, high = 0.0, 4.0
    while high - low > 0.03 * max(high, 0.5):
        middle = (low + high) / 2 if low else high / 2
        result = run(router, instances, at_load(workload, middle * capacity), seed)
        low, high = (middle, high) if result.slo_share >= SLO_SHARE else (low, middle)
        if high < 0.05:
            break
    return low


class Cells:
    """What is known already, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                cell = json.loads(line)
                self.by_key[tuple(cell["key"])] = cell

    def get(self, *key: Any) -> dict[str, Any] | None:
        return self.by_key.get(key)

    def put(self, *key: Any, **figures: Any) -> dict[str, Any]:
        cell = self.by_key[key] = {"key": list(key), **figures}
        with self._path.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE.jsonl.gz")
    parser.add_argument("-o", "--output", type=Path, required=True, help="cells, as JSON lines")
    parser.add_argument("--clusters", default="A,B,eight,equal")
    parser.add_argument("--loads", default="0.5,0.7,0.9")
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--slo", action="store_true", help="find the load that keeps the limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="requests of each trace")
    args = parser.parse_args()
    cells = Cells(args.output)
    routers = args.routers.split(",")
    loads = [float(load) for load in args.loads.split(",")]
    for named in args.traces:
        name, _, path = named.partition("=")
        for cluster in args.clusters.split(","):
            instances = load_instances(cluster)
            largest = max(i.profile.kv_capacity_tokens for i in instances) // 16 * 16
            workload = read_workload(Path(path), largest, args.limit, args.seed)
            known = cells.get(name, cluster, "capacity", args.seed)
            if known is None:
                capacity = capacity_per_s(instances, workload, args.seed)
                known = cells.put(name, cluster, "capacity", args.seed, per_s=capacity)
            run_cells(
                cells, name, cluster, instances, workload, known["per_s"], loads, routers, args
            )
    summarise_cells(cells, args.seed, routers)


def run_cells(
    cells: Cells,
    name: str,
    cluster: str,
    instances: Sequence[SimulatedInstance],
    workload: Workload,
    capacity: float,
    loads: Sequence[float],
    routers: Sequence[str],
    args: argparse.Namespace,
) -> None:
    own = plateau_per_s(workload)
    print(
        f"{name} on {cluster}: {len(workload)} requests, blind capacity {capacity:.2f}/s "
        f"(the trace's own rate {own:.2f}/s)"
    )
    for load in loads:
        for router in routers:
            cell = cells.get(name, cluster, load, args.seed, router)
            if cell is None:
                started_s = time.perf_counter()
                result = run(router, instances, at_load(workload, load * capacity), args.seed)
                cell = cells.put(
                    name, cluster, load, args.seed, router,
                    latency_s=result.latency_s.mean, ttft_s=result.ttft_s.mean,
                    ttft_p99_s=result.ttft_s.p99, cached=result.cached_share,
                    refused=result.refused, took_s=time.perf_counter() - started_s,
                )  # fmt: skip
            print(
                f"  {load:4.0%} {router:12s} latency {cell['latency_s']:7.2f} s  TTFT "
                f"{cell['ttft_s']:7.3f} s  p99 {cell['ttft_p99_s']:7.2f} s  cached "
                f"{cell['cached']:5.1%}"
                + (f"  refused {cell['refused']}" if cell["refused"] else ""),
                flush=True,
            )
    for router in routers if args.slo else ():
        cell = cells.get(name, cluster, "slo", args.seed, router)
        if cell is None:
            load = slo_load(router, instances, workload, capacity, args.seed)
            cell = cells.put(name, cluster, "slo", args.seed, router, load=load)
        print(f"  TTFT <= 2 s for 95 %: {router:12s} up to {cell['load']:.0%}", flush=True)


FIGURES = (("mean latency", "latency_s"), ("mean TTFT", "ttft_s"), ("TTFT p99", "ttft_p99_s"))


def summarise_cells(cells: Cells, seed: int, routers: Sequence[str]) -> None:
    """Ratios over the cells that have all of these: to blind, and to the best peer of each cell."""
    peers = [name for name in routers if name in RULES or name == SESSION]
    if not {BLIND, AWARE} <= set(routers) or not peers:
        return
    groups: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    for key, cell in cells.by_key.items():
        if len(key) == 5 and key[3] == seed and isinstance(key[2], float):
            groups.setdefault((key[0], key[1], key[2]), {})[key[4]] = cell
    whole = {where: cell for where, cell in groups.items() if set(routers) <= set(cell)}
    for equal in (False, True):
        for load in sorted({where[2] for where in whole}):
            here = {w: c for w, c in whole.items() if w[2] == load and (w[1] == "equal") == equal}
            if not here:
                continue
            kind = "equal" if equal else "unequal"
            print(f"\n{kind} machines at {load:.0%}, {len(here)} cells, geometric means")
            for label, figure in FIGURES:
                print(f"  {label}: " + ", ".join(ratios(here, figure, peers)))


def ratios(
    here: dict[tuple[str, str, float], dict[str, dict[str, Any]]], figure: str, peers: Sequence[str]
) -> list[str]:
    parts = []
    for router in (AWARE, *peers):
        mean = geometric_mean([c[router][figure] / c[BLIND][figure] for c in here.values()])
        parts.append(f"{router} {mean:.2f}")
    against = {
        where: c[AWARE][figure] / min(c[name][figure] for name in peers)
        for where, c in here.items()
    }
    worst = max(against, key=lambda where: against[where])
    best = f"aware over the best peer {geometric_mean(list(against.values())):.2f}"
    return [
        "over blind: " + " · ".join(parts),
        f"{best} (worst {against[worst]:.2f}, {worst[0]} on {worst[1]})",
    ]


if __name__ == "__main__":
    main()
