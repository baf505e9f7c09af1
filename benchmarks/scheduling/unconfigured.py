"""Instances that nobody has described: what share of the ideal their gateway gets from them.

    python benchmarks/scheduling/unconfigured.py [--times-slower 1,4] [--clients 12,32]
        [--first 12] [--seconds 40] [--rounds 3] [--json]

Each emulated instance is so many times as slow as the first and runs 8 sequences at once, and the
gateway's configuration has their addresses and nothing else. So many clients ask in closed loop of
a gateway that has just started. The ideal is the sum of what each instance gives in its stride when
asked directly, by 8 clients the fastest one and by the others what is left, at most 8 each. Two
shares of it count: that of the first ``--first`` seconds, in which the gateway learns, and that of
the rest. Policies take turns. Exit code 1 when a mean is below its goal, or below that of
``least-requests``, which is haproxy's leastconn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import Column, report
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.files.trace import LoadRequest, synthetic_trace
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance, write_profile
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import RequestRecord

GOALS = {"first": 0.92, "after": 0.97}
MODEL = "unconfigured"
SLOTS = 8
TIME_SCALE = 1.0
MOST_OUTPUT = 64
OURS, YARDSTICK = "finish-time", "least-requests"
# The end of a loop does not count, for as long as the longest answers take on the slowest machine:
# those that it cuts off are in no record.
LAST_S = 12.0
PROFILE = "V100-32GB-NVLink2/Llama-3-8B/tp4"
COLUMNS = (
    Column("machines", "machines", 10),
    Column("clients", "clients", 8, "d"),
    Column("policy", "policy", 16),
    Column("ideal", "ideal_tokens_per_s", 8, ".0f"),
    Column("first", "first", 7, ".3f"),
    Column("after", "after", 7, ".3f"),
    Column("slowest", "slowest", 8, ".3f"),
)


async def closed_loop(url: str, clients: int, seconds: float) -> list[RequestRecord]:
    """What so many clients asked in so many seconds, each its next when the last was answered."""
    maker = BodyMaker(MODEL, PromptKind.CHAT, True, 4.0, filler_pool())
    load = [
        LoadRequest(
            0.0, min(drawn.input_tokens, 512), min(max(drawn.output_tokens, 8), MOST_OUTPUT)
        )
        for drawn in synthetic_trace(100_000, 0)
    ]
    records: list[RequestRecord] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await replay(parse_target(url), load, maker, records.append, concurrency=clients)
    if wrong := [record.error for record in records if record.error]:
        raise SystemExit(f"{url}: {wrong[0]}")
    return records


def tokens_per_s(records: list[RequestRecord], first_s: float, last_s: float) -> float:
    """Output tokens per second of a part of a loop: of each answer, what lies in it."""
    tokens = sum(
        r.output_tokens
        * max(0.0, min(r.end_s, last_s) - max(r.sent_s, first_s))
        / (r.end_s - r.sent_s)
        for r in records
    )
    return tokens / (last_s - first_s)


async def measure(
    args: argparse.Namespace, folder: Path, children: Children
) -> list[dict[str, Any]]:
    profile, paths = builtin_profiles()[PROFILE], []
    for i, times in enumerate(args.times_slower):
        scaled = dataclasses.replace(profile, constants=profile.constants.scaled(times))
        paths.append(folder / f"machine{i}.yaml")
        write_profile(scaled, paths[i])
    cluster = EmulatedCluster(
        [EmulatedInstance(path.stem, str(path)) for path in paths], MODEL, TIME_SCALE, 0, folder,
        children, instance_options=("--max-num-seqs", str(SLOTS)), described=False,
    )  # fmt: skip
    await cluster.start_instances()
    ends_s = args.seconds - LAST_S
    rows = []
    for clients in args.clients:
        ideal, left = 0.0, clients
        for path in paths:
            served = min(SLOTS, left)
            left -= served
            if served:
                records = await closed_loop(cluster.instance_urls[path.stem], served, args.seconds)
                ideal += tokens_per_s(records, args.first, ends_s)
        seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in args.policies}
        for _ in range(args.rounds):
            for policy, shares in seen.items():
                await cluster.start_gateway(policy)
                records = await closed_loop(cluster.url, clients, args.seconds)
                slowest = [r.instance == paths[-1].stem for r in records]
                shares.append(
                    (
                        tokens_per_s(records, 0.0, args.first) / ideal,
                        tokens_per_s(records, args.first, ends_s) / ideal,
                        sum(slowest) / len(slowest),
                    )
                )
        means = {
            policy: [sum(column) / args.rounds for column in zip(*shares, strict=True)]
            for policy, shares in seen.items()
        }
        for policy, (first, after, slowest_share) in means.items():
            met = first >= GOALS["first"] and after >= GOALS["after"]
            if YARDSTICK in means:
                met = met and first >= means[YARDSTICK][0] and after >= means[YARDSTICK][1]
            rows.append(
                {
                    "machines": ":".join(f"{times:g}" for times in args.times_slower),
                    "clients": clients,
                    "policy": policy,
                    "ideal_tokens_per_s": round(ideal, 1),
                    "first": round(first, 4),
                    "after": round(after, 4),
                    "slowest": round(slowest_share, 4),
                    "met": policy != OURS or met,
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of each closed loop")
    parser.add_argument("--first", type=float, default=12.0, help="seconds that count apart")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times-slower", type=_numbers, default=[1, 4], help="with commas")
    parser.add_argument("--clients", type=_numbers, default=[12, 32], help="with commas")
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=[OURS, YARDSTICK],
        help="with commas",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="unconfigured-") as name,
        Children(Path(name)) as children,
    ):
        rows = asyncio.run(measure(args, Path(name), children))
    return report(iter(rows), COLUMNS, as_json=args.json)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
