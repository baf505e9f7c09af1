"""Two clients, one of which floods: what the other one waits for its first token.

    python benchmarks/scheduling/fair_shares.py [--seats 64] [--seeds 3] [--seconds 300]
    python benchmarks/scheduling/fair_shares.py --reserve 0,0.1,0.25,0.5
    python benchmarks/scheduling/fair_shares.py --http --seats 16 [--seconds 60]

Two unequal instances serve both. The quiet client asks twice a second; the other one not at all,
as often as the machines bear (``within``), or three times as often (``flood``). Once with who came
first going first (``fifo``), once with fair shares (``clients``), for each ``--reserve``
(``scheduler.queue.reserve``). Simulated, or with ``--http`` over emulated instances and a gateway,
each in a process of its own, and keys for both clients.

The goal is of fair shares: the quiet client's p99 time to first token in the flood is at most a
tenth above that where the other asks for what the machines bear (``rise``). Exit code 1 where it is
missed. ``alone`` is the same beside the quiet client by itself: a full engine computes a prompt
more slowly than an empty one, so that what is left of it is bought with output tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import Column, report
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.disciplines import DisciplineName, make_discipline
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import DEFAULT_CLASS, Reject
from hetero_gateway.files.client_keys import hash_of, new_key
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.children import Child, Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance, write_profile
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.plain_httpx import httpx
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths, Workload, gamma_arrivals

GOAL = 0.10
PROFILES = ("V100-32GB-NVLink2/Llama-3-8B/tp4", "V100-32GB-NVLink2/Llama-3-8B/tp1")
MODEL = "shared"
QUIET, OTHER = "quiet", "other"
QUIET_PER_S = 2.0
# By seats of each instance: what the other one may ask for beside the quiet one until somebody has
# to wait, as its flood shows: in all 17.4 a second with 64 seats, 7.9 with 16.
WITHIN_PER_S = {16: 5.9, 64: 15.4}
FLOOD_TIMES = 3
LENGTHS = LogNormalLengths(LogNormal(300, 0.8, 4000), LogNormal(150, 0.7, 1000))
# Of a run, what counts: not its beginning, and not what comes as the others end.
COUNTED = (0.2, 0.9)
COLUMNS = (
    Column("discipline", "discipline", 12),
    Column("reserve", "reserve", 8, ".2f"),
    Column("other", "other", 10),
    Column("p50 s", "p50_s", 9, ".3f"),
    Column("p99 s", "p99_s", 9, ".3f"),
    Column("rise", "rise", 9, "+.1%"),
    Column("alone", "alone", 9, "+.1%"),
    Column("tokens/s", "tokens_per_s", 10, ".0f"),
)


class ByClient(Scheduler):
    """Takes a simulated request's class for its client."""

    def place(self, request: Request, now_s: float, *args: Any, **named: Any) -> Ticket | Reject:
        client = request.request_class
        request = request.replace(client=client, request_class=DEFAULT_CLASS)
        return super().place(request, now_s, *args, **named)


def workload(other_per_s: float, seconds: float, seed: int) -> Workload:
    """Both clients' requests; the quiet one's are the same beside any other."""
    parts = []
    for k, rate_per_s in enumerate((QUIET_PER_S, other_per_s)):
        count = round(rate_per_s * seconds)
        if not count:
            continue
        rng = np.random.default_rng((seed, k))
        arrival_s = gamma_arrivals(count, rate_per_s, 1.0, rng)
        parts.append((arrival_s, *LENGTHS.draw(count, rng), np.full(count, k)))
    arrival_s, prompts, outputs, whose = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(arrival_s, kind="stable")
    names = (QUIET, OTHER)
    return Workload(
        arrival_s[order],
        prompts[order],
        outputs[order],
        classes=tuple(names[k] for k in whose[order]),
    )


def simulated(
    args: argparse.Namespace, discipline: DisciplineName, reserve: float, per_s: float
) -> tuple[list[float], float]:
    """The quiet client's times to first token, and all output tokens per second, of all seeds."""
    profiles = [
        dataclasses.replace(builtin_profiles()[n], max_num_seqs=args.seats) for n in PROFILES
    ]
    instances = [SimulatedInstance(f"i{k}", p, p) for k, p in enumerate(profiles)]  # type: ignore[arg-type]
    ttft_s: list[float] = []
    made_tokens = 0
    first_s, last_s = (share * args.seconds for share in COUNTED)
    for seed in range(args.seeds):
        load = workload(per_s, args.seconds, seed)
        scheduler = ByClient(
            make_policy("finish-time"),
            np.random.default_rng(seed),
            discipline=make_discipline(discipline, reserve=reserve),
        )
        records = simulate(instances, load, scheduler, BucketMeanPredictor(200.0), compiled=False)
        counts = (np.array(load.classes) == QUIET) & (load.arrival_s >= first_s)
        counts &= load.arrival_s < last_s
        ttft_s += (records.first_token_s - load.arrival_s)[counts].tolist()
        over = (records.finish_s >= first_s) & (records.finish_s < last_s)
        made_tokens += int(load.output_tokens[over].sum())
    return ttft_s, made_tokens / (args.seeds * (last_s - first_s))


class OverHttp:
    """The same over emulated instances and a gateway that knows two keys."""

    def __init__(self, args: argparse.Namespace, folder: Path, children: Children) -> None:
        self._args = args
        self._folder = folder
        self._children = children
        self._keys = {name: new_key() for name in (QUIET, OTHER)}
        self._maker = BodyMaker(MODEL, PromptKind.CHAT, True, 4.0, filler_pool())
        self._gateway: Child | None = None
        self._url = ""

    async def start_instances(self) -> None:
        instances = []
        for k, name in enumerate(PROFILES):
            profile = dataclasses.replace(builtin_profiles()[name], max_num_seqs=self._args.seats)
            path = self._folder / f"i{k}.yaml"
            write_profile(profile, path)
            instances.append(EmulatedInstance(f"i{k}", str(path)))
        cluster = EmulatedCluster(
            instances, MODEL, 1.0, 0, self._folder, self._children,
            instance_options=("--max-num-seqs", str(self._args.seats)),
            gateway_config={"clients": {"keys_file": "keys.yaml"}},
        )  # fmt: skip
        keys = [{"name": name, "hash": hash_of(key)} for name, key in self._keys.items()]
        (self._folder / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}), "utf-8")
        await cluster.start_instances()

    async def start_gateway(self, discipline: DisciplineName, reserve: float) -> None:
        if self._gateway is not None:
            self._children.stop(self._gateway)
        config = yaml.safe_load((self._folder / "gateway.yaml").read_text("utf-8"))
        config["scheduler"] = {"queue": {"discipline": discipline, "reserve": reserve}}
        path = self._folder / f"{discipline}-{reserve}.yaml"
        path.write_text(yaml.safe_dump(config), "utf-8")
        self._gateway = self._children.start(
            f"the gateway, {discipline}",
            *("serve", "-c", str(path), "--host", "127.0.0.1", "--port", "0"),
            *("--log-level", "warning"),
        )
        self._url = await self._gateway.url()
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            # The address is said before the instances are known to be up.
            while (await client.get(f"{self._url}/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def run(self, per_s: float) -> tuple[list[float], float]:
        load = workload(per_s, self._args.seconds, 0)
        rows = zip(
            load.arrival_s, load.prompt_tokens, load.output_tokens, load.classes, strict=True
        )
        requests: dict[str, list[LoadRequest]] = {QUIET: [], OTHER: []}
        for arrival_s, prompt, output, name in rows:
            requests[name].append(LoadRequest(float(arrival_s), int(prompt), int(output)))

        async def of(name: str) -> list[Any]:
            target = parse_target(self._url, self._keys[name])
            return await replay(target, requests[name], self._maker, timeout_s=900)

        # What still waits when the quiet one is done tells nothing more.
        flood = asyncio.ensure_future(of(OTHER))
        quiet = await of(QUIET)
        flood.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flood
        if wrong := [record.error for record in quiet if record.error]:
            raise SystemExit(f"a request failed: {wrong[0]}")
        first_s, last_s = (share * self._args.seconds for share in COUNTED)
        ttft_s = [r.first_s - r.due_s for r in quiet if first_s <= r.due_s < last_s]
        return ttft_s, math.nan


def rows_of(
    args: argparse.Namespace, runs: Iterator[tuple[DisciplineName, float, str, list[float], float]]
) -> Iterator[dict[str, Any]]:
    beside: dict[str, float] = {}
    for discipline, reserve, other, ttft_s, tokens_per_s in runs:
        p50_s, p99_s = np.percentile(ttft_s, (50, 99))
        beside.setdefault(f"{discipline} {other}", p99_s)
        rise = alone = None
        if other == "flood":
            rise = p99_s / beside[f"{discipline} within"] - 1
            alone = p99_s / beside[f"{discipline} none"] - 1
        yield {
            "discipline": discipline,
            "reserve": reserve,
            "other": other,
            "requests": len(ttft_s),
            "p50_s": float(p50_s),
            "p99_s": float(p99_s),
            "rise": rise,
            "alone": alone,
            "tokens_per_s": None if math.isnan(tokens_per_s) else tokens_per_s,
            "met": rise is None or discipline == "fifo" or rise <= GOAL,
        }


def cells(args: argparse.Namespace) -> list[tuple[DisciplineName, float, str, float]]:
    """(discipline, reserve, what the other does, its requests per second)."""
    within = WITHIN_PER_S.get(args.seats, args.seats * WITHIN_PER_S[64] / 64)
    loads = (("none", 0.0), ("within", within), ("flood", FLOOD_TIMES * within))
    reserves = [float(each) for each in args.reserve.split(",")]
    return [
        *(("fifo", 0.0, *load) for load in loads),
        *(("clients", reserves[0], *load) for load in loads),
        *(("clients", reserve, *loads[-1]) for reserve in reserves[1:]),
    ]


async def over_http(
    args: argparse.Namespace, folder: Path, children: Children
) -> list[tuple[DisciplineName, float, str, list[float], float]]:
    rig = OverHttp(args, folder, children)
    await rig.start_instances()
    done = []
    for discipline, reserve, other, per_s in cells(args):
        await rig.start_gateway(discipline, reserve)
        done.append((discipline, reserve, other, *await rig.run(per_s)))
    return done


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seats", type=int, default=64, help="of each instance")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, simulated")
    parser.add_argument("--reserve", default="0.1", help="shares, with commas between them")
    parser.add_argument("--http", action="store_true", help="over HTTP, in real time")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    if not args.http:
        runs = (
            (discipline, reserve, other, *simulated(args, discipline, reserve, per_s))
            for discipline, reserve, other, per_s in cells(args)
        )
        return report(rows_of(args, runs), COLUMNS, as_json=args.json)
    with tempfile.TemporaryDirectory(prefix="shares-") as name, Children(Path(name)) as children:
        measured = asyncio.run(over_http(args, Path(name), children))
    return report(rows_of(args, iter(measured)), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
