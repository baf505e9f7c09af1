"""What it is worth that engines tell of their caches, simulated: exact knowledge over placements.

    python benchmarks/scheduling/prefix_traces.py chat -o chat.jsonl.gz --requests 1500
    python benchmarks/scheduling/prefix_exact.py chat=chat.jsonl.gz … [--clusters equal,A]
        [--share 0.333] [--load 0.9] [--seeds 2] [--limit N] [--past 0]

Of one gateway with ``finish-time``:

    own      it knows what it has sent, and guesses what is gone by the cache's size
    exact    the engines tell which blocks they store and remove (``core/prefixes/engine_blocks``);
             their events are there by the next decision

Caches hold ``--share`` of what the traffic needs: of all sessions that are alive at a time, from
their first turn to their last, the longest prompts that they will have, at the most (but never less
than one longest request). 0: their own size, which is the healthy case. ``--past``: so much of the
requests goes past the gateway, to an instance that is drawn; nobody tells it of these.

Printed: exact over own, by cell and as geometric means with their standard errors; above 1 is
worse. What was wrong of each knowledge: tokens that should have been cached and were not, and the
other way round, as shares of all prompts'.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
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
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceSpec, Outcome, Reject, Usage
from hetero_gateway.lab.emulator.kv_events import WatchedKeys
from hetero_gateway.sim import block_cache
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.engine import DEFAULT_BLOCK_TOKENS
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.prefixes import Prefixes
from hetero_gateway.sim.result import RunResult, summarise
from hetero_gateway.sim.workload import Workload

FIGURES = ("latency_mean", "ttft_mean", "ttft_p99", "cached")


class Past(Scheduler):
    """Some of the requests go where they are drawn, as if they had never been here."""

    def __init__(self, *args: Any, past: Sequence[bool] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._past = past
        self._draw = np.random.default_rng(5)
        self.prompts = self.missing = self.unforeseen = 0.0  # tokens

    def place(
        self, request: Request, now_s: float, *args: Any, owner: Any = None, **kwargs: Any
    ) -> Ticket | Reject:
        if self._past and self._past[owner]:
            ids = list(self.members.specs)
            only = ids[int(self._draw.integers(len(ids)))]
            request = request.replace(prefix=None, only=only)
        return super().place(request, now_s, *args, owner=owner, **kwargs)

    def settle(
        self,
        dispatch: Dispatch,
        outcome: Outcome,
        now_s: float = 0.0,
        usage: Usage | None = None,
        unseen_tokens: float | None = None,
    ) -> bool:
        if usage is not None and usage.cached_tokens is not None:
            surplus = usage.cached_tokens - dispatch.match_tokens
            self.prompts += dispatch.request.prompt_tokens
            self.missing += max(0.0, -surplus)
            self.unforeseen += max(0.0, surplus)
        return super().settle(dispatch, outcome, now_s, usage, unseen_tokens)

    @property
    def wrong(self) -> str:
        """Of what was predicted."""
        return f"{self.missing / self.prompts:.1%} and {self.unforeseen / self.prompts:.1%} wrong"


class Told(Past):
    """A scheduler whose instances tell of their blocks."""

    def __init__(self, prefixes: Prefixes, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prefixes = prefixes
        self._watched: list[WatchedKeys] = []
        self._blocks: list[EngineBlocks] = []
        # Of each key that an engine was given: the one in front of it, and the request.
        self._known: dict[int, tuple[int | None, str]] = {}
        self._owners: dict[Dispatch, int] = {}

    def watch(self, fleet: EngineFleet) -> None:
        for cache in fleet.tables()[3]:
            cache[block_cache.KEY] = WatchedKeys(cache[block_cache.KEY])
            self._watched.append(cache[block_cache.KEY])

    def add(self, spec: InstanceSpec) -> None:
        super().add(spec)
        assert self.caches is not None
        self._blocks.append(EngineBlocks(self.caches.index, spec.instance_id, 10**7))
        self.caches.listen(spec.instance_id, self._blocks[-1])

    def _hear(self) -> None:
        for watched, blocks in zip(self._watched, self._blocks, strict=True):
            changes, watched.changes = watched.changes, []
            for key, is_there in changes:
                if is_there:
                    parent, session = self._known.get(key, (None, ""))
                    blocks.stored((key,), parent, DEFAULT_BLOCK_TOKENS, session)
                else:
                    blocks.removed((key,))

    def place(self, *args: Any, **kwargs: Any) -> Ticket | Reject:
        self._hear()
        return super().place(*args, **kwargs)

    def pump(self, now_s: float) -> list[Ticket]:
        self._hear()
        tickets = super().pump(now_s)
        for ticket in tickets:
            if ticket.dispatch is not None:
                self._owners[ticket.dispatch] = ticket.owner
                keys = self._prefixes.engine_keys(ticket.owner, DEFAULT_BLOCK_TOKENS).tolist()
                session = "" if ticket.request.prefix is None else f"{ticket.owner}"
                for before, key in zip([None, *keys], keys, strict=False):
                    self._known[key] = before, session
        return tickets

    def settle(self, dispatch: Dispatch, *args: Any, **kwargs: Any) -> bool:
        self._hear()
        owner, keys = self._owners.pop(dispatch), dispatch.request.prefix
        if keys is not None:
            at = list(self.members.specs).index(dispatch.instance_id)
            self._blocks[at].ended(f"{owner}", keys, dispatch.request.prompt_tokens)
        return super().settle(dispatch, *args, **kwargs)


def with_caches(
    instances: Sequence[SimulatedInstance], tokens: float, longest: int
) -> tuple[SimulatedInstance, ...]:
    """The same with caches of so many tokens together, each its part of what it had."""
    whole = sum(i.profile.kv_capacity_tokens for i in instances)
    result = []
    for instance in instances:
        part = tokens * instance.profile.kv_capacity_tokens / whole
        size = max(longest + 16, int(part)) // 16 * 16
        profile = dataclasses.replace(instance.profile, kv_capacity_tokens=size)
        result.append(dataclasses.replace(instance, profile=profile, believed=profile))
    return tuple(result)


def needed_tokens(workload: Workload, sessions: Sequence[int]) -> float:
    """Of the sessions that are alive at a time, their longest prompts and answers, at the most."""
    tokens = (workload.prompt_tokens + workload.output_tokens).tolist()
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    size: dict[int, int] = {}
    for at_s, session, length in zip(workload.arrival_s.tolist(), sessions, tokens, strict=True):
        begin.setdefault(session, at_s)
        end[session] = at_s
        size[session] = max(size.get(session, 0), length)
    changes = sorted(
        [(begin[s], size[s]) for s in size if end[s] > begin[s]]
        + [(end[s], -size[s]) for s in size if end[s] > begin[s]]
    )
    return float(np.max(np.cumsum([change for _, change in changes])))


def run(
    exact: bool,
    instances: Sequence[SimulatedInstance],
    workload: Workload,
    past: Sequence[bool],
    seed: int,
) -> tuple[RunResult, str]:
    assert workload.prefixes is not None
    mean_output = float(workload.output_tokens.mean())
    reference = (float(workload.prompt_tokens.mean()), mean_output)
    policy, rng = make_policy("finish-time"), np.random.default_rng((seed, 2))
    options: dict[str, Any] = {}
    scheduler: Past
    if exact:
        scheduler = told = Told(workload.prefixes, policy, rng, reference=reference, past=past)
        options["watch"] = told.watch
    else:
        scheduler = Past(policy, rng, reference=reference, past=past)
    predictor = BucketMeanPredictor(mean_output)
    # Engines that are watched are lists; both are, or what is compared would differ by more.
    records = simulate(instances, workload, scheduler, predictor, compiled=False, **options)
    return summarise(workload, records, len(instances), SLO), scheduler.wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE.jsonl.gz")
    parser.add_argument("--clusters", default="equal,A")
    parser.add_argument("--share", type=float, default=1 / 3)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--past", type=float, default=0.0, help="share that goes past the gateway")
    parser.add_argument("--limit", type=int, help="requests of each trace")
    args = parser.parse_args()
    cells: list[dict[str, float]] = []
    for named in args.traces:
        name, _, path = named.partition("=")
        for cluster in args.clusters.split(","):
            for seed in range(args.seeds):
                instances = load_instances(cluster)
                largest = max(i.profile.kv_capacity_tokens for i in instances) // 16 * 16
                rows = read_rows(Path(path), largest, args.limit, seed)
                workload = workload_of(rows)
                sessions = [row.text.session for row in rows]
                longest = int((workload.prompt_tokens + workload.output_tokens).max())
                workload = at_load(workload, args.load * capacity_per_s(instances, workload, seed))
                if args.share:
                    tokens = args.share * needed_tokens(workload, sessions)
                    instances = with_caches(instances, tokens, longest)
                    rate = args.load * capacity_per_s(instances, workload, seed)
                    workload = at_load(workload, rate)
                draws = np.random.default_rng((seed, 6)).random(len(workload))
                past = (draws < args.past).tolist() if args.past else []
                (own, own_wrong), (exact, exact_wrong) = (
                    run(e, instances, workload, past, seed) for e in (False, True)
                )
                cell = {
                    "latency_mean": exact.latency_s.mean / own.latency_s.mean,
                    "ttft_mean": exact.ttft_s.mean / own.ttft_s.mean,
                    "ttft_p99": exact.ttft_s.p99 / own.ttft_s.p99,
                    "cached": exact.cached_share / own.cached_share,
                }
                cells.append(cell)
                kv = sum(i.profile.kv_capacity_tokens for i in instances)
                print(
                    f"{name} on {cluster}, seed {seed}, {kv} tokens of cache, own: TTFT "
                    f"{own.ttft_s.mean:.3f} s, p99 {own.ttft_s.p99:.2f} s, cached "
                    f"{own.cached_share:.1%}, {own_wrong}; exact {exact_wrong}, over own: "
                    + "  ".join(f"{figure} {cell[figure]:.3f}" for figure in FIGURES),
                    flush=True,
                )
    means = "  ".join(_mean(figure, [cell[figure] for cell in cells]) for figure in FIGURES)
    print(f"{len(cells)} cells, geometric means: {means}")


def _mean(figure: str, values: list[float]) -> str:
    error = np.std(np.log(values), ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{figure} {geometric_mean(values):.3f} ± {error:.3f}"


if __name__ == "__main__":
    main()
