"""Two instances that nobody has described: what share of the ideal their gateway gets from them.

    python benchmarks/scheduling/unconfigured.py [--seconds 40] [--clients 12,32] [--json]

One emulated instance is four times as fast as the other; each runs 8 sequences at once, and the
gateway's configuration has their addresses and nothing else. So many clients ask in closed loop.
The ideal is the sum of what each instance gives when asked directly, by 8 clients the fast one and
by the others, at most 8, the slow one. The first half of a loop, in which the gateway learns, does
not count. Exit code 1 when a share is below the goal.
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

GOAL = 0.95
MODEL = "unconfigured"
SLOTS = 8
TIMES_SLOWER = 4
TIME_SCALE = 2.0
# Of a loop.
COUNTED = (0.5, 0.8)
PROFILE = "V100-32GB-NVLink2/Llama-3-8B/tp4"
COLUMNS = (
    Column("policy", "policy", 18),
    Column("clients", "clients", 8, "d"),
    Column("tokens/s", "tokens_per_s", 10, ".0f"),
    Column("ideal", "ideal_tokens_per_s", 8, ".0f"),
    Column("share", "share", 7, ".3f"),
)


async def tokens_per_s(url: str, clients: int, seconds: float) -> float:
    """Output tokens per second of a part of a closed loop of ``seconds``."""
    maker = BodyMaker(MODEL, PromptKind.CHAT, True, 4.0, filler_pool())
    load = [
        LoadRequest(0.0, min(drawn.input_tokens, 512), min(max(drawn.output_tokens, 16), 128))
        for drawn in synthetic_trace(100_000, 0)
    ]
    records: list[RequestRecord] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await replay(parse_target(url), load, maker, records.append, concurrency=clients)
    if wrong := [record.error for record in records if record.error]:
        raise SystemExit(f"{url}: {wrong[0]}")
    # Requests that were cut off at the end do not reach back to the part that counts.
    first_s, last_s = (share * seconds for share in COUNTED)
    # Of each answer, what lies between.
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
    fast = builtin_profiles()[PROFILE]
    slow = dataclasses.replace(fast, constants=fast.constants.scaled(TIMES_SLOWER))
    paths = {"fast": folder / "fast.yaml", "slow": folder / "slow.yaml"}
    write_profile(fast, paths["fast"])
    write_profile(slow, paths["slow"])
    instances = [EmulatedInstance(name, str(path)) for name, path in paths.items()]
    cluster = EmulatedCluster(
        instances, MODEL, TIME_SCALE, 0, folder, children,
        instance_options=("--max-num-seqs", str(SLOTS)), described=False,
    )  # fmt: skip
    await cluster.start_instances()
    urls = cluster.instance_urls
    rows = []
    for clients in args.clients:
        ideal = await tokens_per_s(urls["fast"], min(SLOTS, clients), args.seconds / 2)
        if clients > SLOTS:
            rest = min(SLOTS, clients - SLOTS)
            ideal += await tokens_per_s(urls["slow"], rest, args.seconds / 2)
        for policy in args.policies:
            await cluster.start_gateway(policy)
            seen = await tokens_per_s(cluster.url, clients, args.seconds)
            rows.append(
                {
                    "policy": policy,
                    "clients": clients,
                    "tokens_per_s": round(seen, 1),
                    "ideal_tokens_per_s": round(ideal, 1),
                    "share": round(seen / ideal, 4),
                    "met": policy != "finish-time" or seen >= GOAL * ideal,
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of each closed loop")
    parser.add_argument("--clients", type=_numbers, default=[12, 32], help="with commas")
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=["finish-time", "least-requests"],
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
