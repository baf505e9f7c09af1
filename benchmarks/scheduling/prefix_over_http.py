"""What knowing of the prefix caches is worth over real HTTP, and what the simulator says of it.

    python benchmarks/scheduling/prefix_traces.py chat -o chat.jsonl.gz --requests 1000
    python benchmarks/scheduling/prefix_over_http.py chat.jsonl.gz          # about 12 minutes
        [--cluster A] [--load 0.9] [--routers blind,finish-time,…] [--time-scale 1] [--limit N]

Measured: the cluster's instances are emulated ones, each in a process of its own, in front of them
a gateway, freshly started for each router. What is sent is what ``hetero-gateway bench --requests``
sends: chats with real text, streamed, each turn with the answer to the one before, and not before
that answer is there. Nothing is known of output lengths but what the predictor learns. Each run has
a ``cache_salt`` of its own, so that it finds the engines' caches as if they were empty.

Simulated: the same requests by the same rule, a turn not before the simulated end of the last one.
Where messages end and what a chat's template adds is not simulated.

``blind`` is ``finish-time`` with ``scheduler.prefix_cache: false``; the load is a share of what
that serves in its stride, by simulation (``prefix.py``). Requests that are longer than an
instance's context are left out. Figures in brackets are measured over simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.prefix import at_load, capacity_per_s, load_instances, read_workload
from benchmarks.simulator.simulated_and_measured import (
    INSTANCE_OPTIONS,
    MODEL,
    TIMEOUT_S,
    TOLERATED_LATE_S,
    TOLERATED_LOST_S,
)
from benchmarks.tables import write_between_markers
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.files.trace import LoadRequest, read_trace
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance, write_profile
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import summarise
from hetero_gateway.sim import result as simulated_result
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.prefixes import KnownText, Prefixes, Run
from hetero_gateway.sim.workload import Workload

BLIND = "blind"
ROUTERS = (BLIND, "finish-time", "capacity-weighted", "prefix-affinity")
# Of an emulated instance, and what a chat's template may add to a conversation.
CONTEXT_TOKENS, TEMPLATE_TOKENS = 8192, 192
# A turn follows the end of the one before at this distance; so often the simulation is made again.
TURN_S, ROUNDS = 0.001, 6
MARKERS = ("<!-- prefix over http: begin -->", "<!-- prefix over http: end -->")
# What is compared: (name, unit of the table, digits).
FIGURES = (
    ("cached_share", "cached", 3),
    ("latency_mean_s", "latency, mean, s", 2),
    ("latency_p99_s", "p99", 2),
    ("ttft_mean_s", "TTFT, mean, s", 3),
    ("ttft_p99_s", "p99", 2),
)


def policy_of(router: str) -> tuple[str, bool]:
    """The policy's name, and whether its scheduler knows of the caches."""
    return ("finish-time", False) if router == BLIND else (router, True)


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests in the order of their times, which are the hardware's; with their texts."""

    requests: tuple[LoadRequest, ...]

    @property
    def mean_prompt(self) -> float:
        return float(np.mean([r.input_tokens for r in self.requests]))

    @property
    def mean_output(self) -> float:
        return float(np.mean([r.output_tokens for r in self.requests]))


def make_load(
    path: Path, instances: Sequence[SimulatedInstance], load: float, limit: int | None
) -> Load:
    """A trace's requests that every instance can take, at a share of what ``blind`` serves."""
    least = min(CONTEXT_TOKENS, *(i.profile.kv_capacity_tokens // 16 * 16 for i in instances))
    most_tokens = least - TEMPLATE_TOKENS
    workload = read_workload(path, most_tokens, limit)
    timed = at_load(workload, load * capacity_per_s(instances, workload, 0))
    rows = [r for r in read_trace(path, limit) if r.input_tokens + r.output_tokens <= most_tokens]
    return Load(
        tuple(
            LoadRequest(due_s, row.input_tokens, row.output_tokens, row.text)
            for due_s, row in zip(timed.arrival_s.tolist(), rows, strict=True)
        )
    )


# Measured


class Rig:
    """The emulated instances, and a gateway in front of them for each router."""

    def __init__(
        self,
        instances: Sequence[SimulatedInstance],
        load: Load,
        time_scale: float,
        folder: Path,
        children: Children,
    ) -> None:
        self._load = load
        self._time_scale = time_scale
        self._children = children
        self._runs = 0
        emulated = []
        for instance in instances:
            path = folder / f"{instance.instance_id}.yaml"
            write_profile(instance.profile, path)
            emulated.append(EmulatedInstance(str(instance.instance_id), str(path)))
        self._cluster = EmulatedCluster(
            emulated,
            MODEL,
            time_scale,
            0,
            folder,
            children,
            instance_options=(*INSTANCE_OPTIONS, "--enable-prompt-tokens-details"),
            prefix_caching=True,
        )

    async def start(self) -> None:
        await self._cluster.start_instances()

    async def run(self, router: str) -> dict[str, Any]:
        """The figures, in the hardware's seconds."""
        cluster, scale, load = self._cluster, self._time_scale, self._load
        policy, aware = policy_of(router)
        await cluster.start_gateway(
            policy,
            {
                "prefix_cache": aware,
                "predictor": {"mean_tokens": load.mean_output},
                "reference_prompt_tokens": round(load.mean_prompt),
                "reference_output_tokens": round(load.mean_output),
            },
        )
        self._runs += 1
        longest = max(request.output_tokens for request in load.requests)
        maker = BodyMaker(
            MODEL, PromptKind.CHAT, True, 4.0, filler_pool(), longest, f"run {self._runs}"
        )
        requests = [dataclasses.replace(r, due_s=r.due_s / scale) for r in load.requests]
        lost_s = await cluster.lost_s()
        target = parse_target(cluster.url)
        records = await replay(target, requests, maker, timeout_s=TIMEOUT_S)
        self._children.check()
        lost_s = await cluster.lost_s() - lost_s
        summary = summarise(records)
        late_s = summary.send_delay_s.p99 or 0.0
        summary = summary.scaled(scale)
        return {
            "cached_share": summary.cached_share,
            "latency_mean_s": summary.latency_s.mean,
            "latency_p99_s": summary.latency_s.p99,
            "ttft_mean_s": summary.ttft_s.mean,
            "ttft_p99_s": summary.ttft_s.p99,
            "requests": {i.instance_id: i.requests for i in summary.instances},
            "errors": summary.errors_by_kind,
            "trust": {i["id"]: i.get("prefix_trust") for i in await cluster.instances()},
            "emulated_clocks_lost_s": lost_s,
            "sent_late_p99_s": late_s,
            "quiet": lost_s <= TOLERATED_LOST_S and late_s <= TOLERATED_LATE_S,
        }


# Simulated


def simulated(router: str, instances: Sequence[SimulatedInstance], load: Load) -> dict[str, Any]:
    """The figures of a simulated run, in which each turn waits for the one before, too.

    The simulator takes arrivals as they are; so it is run again with those that the last run gives.
    """
    due_s = np.array([r.due_s for r in load.requests])
    arrival_s, previous = due_s, _previous(load)
    for _ in range(ROUNDS):
        order = np.argsort(arrival_s, kind="stable")
        workload = _workload(load, order, arrival_s)
        records = _simulate(router, instances, workload, load)
        finish_s = np.empty(len(order))
        finish_s[order] = records.finish_s + arrival_s[order[0]]
        before_s = np.where(previous >= 0, finish_s[previous] + TURN_S, 0.0)
        moved_s, arrival_s = arrival_s, np.fmax(due_s, before_s)
        if np.abs(moved_s - arrival_s).max() < TURN_S:
            break
    result = simulated_result.summarise(workload, records, len(instances), Slo(2.0, 1e9))
    return {
        "cached_share": result.cached_share,
        "latency_mean_s": result.latency_s.mean,
        "latency_p99_s": result.latency_s.p99,
        "ttft_mean_s": result.ttft_s.mean,
        "ttft_p99_s": result.ttft_s.p99,
        "requests": {
            str(i.instance_id): done.requests
            for i, done in zip(instances, result.instances, strict=True)
        },
    }


def _previous(load: Load) -> NDArray[np.int64]:
    """For each request, which one it goes on from; -1: none."""
    latest: dict[tuple[int, int], int] = {}
    previous = np.full(len(load.requests), -1)
    for i, request in enumerate(load.requests):
        assert request.text is not None
        session, turn = request.text.session, request.text.turn
        previous[i] = latest.get((session, turn - 1), -1)
        latest[session, turn] = i
    return previous


def _workload(load: Load, order: NDArray[np.int64], arrival_s: NDArray[np.float64]) -> Workload:
    requests = [load.requests[i] for i in order]
    prompt = np.array([r.input_tokens for r in requests], np.int64)
    output = np.array([r.output_tokens for r in requests], np.int64)
    texts = [r.text for r in requests if r.text is not None]
    known = [KnownText(tuple(Run(*run) for run in text.runs)) for text in texts]
    prefixes = Prefixes(known, prompt, output, texts[0].block_tokens)
    return Workload(arrival_s[order] - arrival_s[order[0]], prompt, output, prefixes)


def _simulate(
    router: str, instances: Sequence[SimulatedInstance], workload: Workload, load: Load
) -> Records:
    policy, aware = policy_of(router)
    scheduler = Scheduler(
        make_policy(policy),
        np.random.default_rng((0, 2)),
        reference=(load.mean_prompt, load.mean_output),
        prefix_cache=aware,
    )
    predictor = BucketMeanPredictor(load.mean_output)
    compiled = len(workload) > 500 and can_compile()
    return simulate(instances, workload, scheduler, predictor, compiled=compiled)


# What came out


def markdown(document: Mapping[str, Any]) -> str:
    """The table: measured / simulated (ratio); the share of requests that each instance got."""
    ids = document["instances"]
    head = ["router", *(unit for _, unit, _ in FIGURES), *(f"to {name}" for name in ids)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for router, row in document["routers"].items():
        cells = [f"`{router}`"]
        for name, _, digits in FIGURES:
            one, other = row["measured"][name], row["simulated"][name]
            cells.append(f"{one:.{digits}f} / {other:.{digits}f} ({one / other:.2f})")
        for name in ids:
            shares = [
                row[side]["requests"].get(name, 0) / sum(row[side]["requests"].values())
                for side in ("measured", "simulated")
            ]
            cells.append(f"{shares[0]:.0%} / {shares[1]:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *against_blind(document)])


def against_blind(document: Mapping[str, Any]) -> list[str]:
    """What each router has of ``blind``'s latency and TTFT, in words."""
    routers = document["routers"]
    if BLIND not in routers:
        return []
    lines = []
    for router in routers:
        if router == BLIND:
            continue
        parts = []
        for side in ("measured", "simulated"):
            ratios = [
                routers[router][side][name] / routers[BLIND][side][name]
                for name in ("latency_mean_s", "ttft_mean_s", "ttft_p99_s")
            ]
            parts.append(f"{side} {' · '.join(f'{ratio:.2f}' for ratio in ratios)}")
        lines.append(f"- `{router}`: {'; '.join(parts)}")
    return ["Over blind's mean latency · mean TTFT · TTFT p99:", "", *lines]


async def measure(
    args: argparse.Namespace, instances: Sequence[SimulatedInstance], load: Load
) -> dict[str, Any]:
    routers: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hetero-gateway-prefix-") as folder,
        Children(Path(folder)) as children,
    ):
        rig = Rig(instances, load, args.time_scale, Path(folder), children)
        await rig.start()
        for router in args.routers:
            measured = await rig.run(router)
            routers[router] = {
                "measured": measured,
                "simulated": simulated(router, instances, load),
            }
            print(
                f"{router}: mean latency {measured['latency_mean_s']:.2f} s, cached "
                f"{measured['cached_share']:.1%}, trust {measured['trust']}; clocks lost "
                f"{measured['emulated_clocks_lost_s']:.2f} s, sent "
                f"{measured['sent_late_p99_s']:.3f} s late"
                + ("" if measured["quiet"] else "  NOT QUIET")
                + (f"  errors: {measured['errors']}" if measured["errors"] else ""),
                file=sys.stderr,
            )
    return {
        "requests": len(load.requests),
        "load": args.load,
        "time_scale": args.time_scale,
        "instances": [str(instance.instance_id) for instance in instances],
        "routers": routers,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.jsonl.gz")
    parser.add_argument("--cluster", default="A", help="as prefix.py names them (default: A)")
    parser.add_argument("--load", type=float, default=0.9, help="share of what blind serves")
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--limit", type=int, help="requests of the trace")
    parser.add_argument("--json", type=Path, help="write what came out into this file")
    parser.add_argument("--markdown", type=Path, help="write the table between the file's markers")
    args = parser.parse_args()
    args.routers = tuple(args.routers.split(","))
    instances = load_instances(args.cluster)
    load = make_load(args.trace, instances, args.load, args.limit)
    last_s = load.requests[-1].due_s
    print(
        f"{len(load.requests)} requests in {last_s:.0f} s, prompts of {load.mean_prompt:.0f} and "
        f"answers of {load.mean_output:.0f} tokens in the mean",
        file=sys.stderr,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(measure(args, instances, load))
    text = markdown(document)
    print(text)
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1))
    if args.markdown is not None:
        write_between_markers(args.markdown, MARKERS, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
