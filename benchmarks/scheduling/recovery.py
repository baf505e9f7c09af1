"""How soon throughput comes back where a profile is wrong or an instance gets slower, over HTTP.

    python benchmarks/scheduling/recovery.py [--seconds 60] [--rounds 3] [--markdown] [--json]

Two unequal emulated instances, each in a process of its own, behind a real gateway, freshly started
for every run. As many requests as the two can nearly hold are in flight all the time (a closed
loop), so that whatever goes to the wrong place is lost throughput. Output lengths are hidden from
the gateway.

    right           both profiles are right
    fast one x 1/2  the fast instance's constants are half of the right ones
    slow one x 2    the slow one's are twice the right ones
    slow-down x 3   both are right, until the fast instance's steps begin to take three times as
                    long; compared with a gateway whose profile is right for that from the start

The first three have two engines of nearly the same speed and 16 slots each for 32 requests in
flight, so that every request that goes to the wrong one leaves a slot empty elsewhere; in the last
two, one is 2.5 times as fast until it slows down, with 20 slots each for 36. Each under
finish-time, which corrects itself, and under min-max, which does not: what it loses is what there
is to lose. Mistakes in the other direction spread requests more evenly, and there is little to lose
by them.

Throughput is of output tokens, spread evenly over each answer's stream, by windows of 5 s; the
yardstick is the right profile's under the same policy, and finish-time must have at least 90 % of
it in the windows from 30 s after the traffic (or the slow-down) began. All is the median over the
rounds. Exit code 1 when finish-time misses it, or when nothing of all this hurts min-max, since
then the check could not fail.

Gateway, instances and load generator share this machine; a run in which the emulated clocks fell
behind is made again, twice at most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance, write_profile
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import RequestRecord
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

MODEL = "Llama-3-8B"
NEAR = ("L40S-48GB/Llama-3-8B/tp1", "V100-32GB-NVLink2/Llama-3-8B/tp1")
FAR = ("V100-32GB-NVLink2/Llama-3-8B/tp4", "V100-32GB-NVLink2/Llama-3-8B/tp1")
LENGTHS = LogNormalLengths(LogNormal(180, 0.6, 1000), LogNormal(70, 0.6, 400))
INSTANCE_OPTIONS = ("--mean-output-tokens", "1", "--cv-output-tokens", "0")
SLOW_DOWN = 3.0
SLOW_DOWN_AT_S = 20.0
WINDOW_S = 5.0
RECOVERED_AFTER_S, RECOVERED = 30.0, 0.9
# Nothing of a run's last seconds is judged: answers that were cut are not counted.
TAIL_S = 10.0
POLICIES = ("finish-time", "min-max")
TOLERATED_LOST_S, MOST_ATTEMPTS = 0.5, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """Who is wrong about what: factors on what the gateway believes, and on what is."""

    name: str
    believed: tuple[float, float] = (1.0, 1.0)
    real: tuple[float, float] = (1.0, 1.0)
    slow_down: bool = False
    against: str = "right"
    # So few that one machine can bear it all.
    max_num_seqs: int = 16
    in_flight: int = 32
    profiles: tuple[str, str] = NEAR


_KNOWN = Case(
    "known, x 3",
    believed=(SLOW_DOWN, 1.0),
    real=(SLOW_DOWN, 1.0),
    against="known, x 3",
    max_num_seqs=20,
    in_flight=36,
    profiles=FAR,
)
CASES = (
    Case("right"),
    Case("fast one x 1/2", believed=(0.5, 1.0)),
    Case("slow one x 2", believed=(1.0, 2.0)),
    _KNOWN,
    dataclasses.replace(
        _KNOWN, name="slow-down x 3", believed=(1.0, 1.0), real=(1.0, 1.0), slow_down=True
    ),
)


async def run(case: Case, policy: str, seconds: float, seed: int) -> dict[str, Any]:
    """One run: output tokens/s by window from its begin, and what the gateway said at the end."""
    end_s = seconds + (SLOW_DOWN_AT_S if case.slow_down else 0.0) + TAIL_S
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Children(folder) as children:
            cluster = _cluster(case, folder, children)
            await cluster.start_instances()
            await cluster.start_gateway(policy)
            records: list[RequestRecord] = []
            speeds: list[list[float | None]] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end_s), asyncio.TaskGroup() as tasks:
                    tasks.create_task(_watch(cluster, speeds))
                    if case.slow_down:
                        tasks.create_task(_slow_down(cluster))
                    await _load(cluster, case.in_flight, end_s, seed, records)
            children.check()
            lost_s = await cluster.lost_s()
    if any(record.error for record in records):
        raise SystemExit(f"requests failed: {[r.error for r in records if r.error][:3]}")
    return {
        "tokens_per_s": windows(records, end_s - TAIL_S).tolist(),
        "latency_s": statistics.mean(r.latency_s for r in records),
        "speeds": speeds,
        "lost_s": lost_s,
    }


def _cluster(case: Case, folder: Path, children: Children) -> EmulatedCluster:
    instances = []
    for name, built_in, real, believed in zip(
        ("fast", "slow"), case.profiles, case.real, case.believed, strict=True
    ):
        profile = dataclasses.replace(load_profile(built_in), max_num_seqs=case.max_num_seqs)
        path = folder / f"{name}.yaml"
        write_profile(_scaled(profile, real), path)
        instances.append(EmulatedInstance(name, str(path), _scaled(profile, believed)))
    rng = np.random.default_rng(0)
    prompts, outputs = LENGTHS.draw(10_000, rng)
    scheduler = {
        "predictor": {"mean_tokens": float(outputs.mean()), "sd_tokens": float(outputs.std())},
        "reference_prompt_tokens": round(float(prompts.mean())),
        "reference_output_tokens": round(float(outputs.mean())),
    }
    return EmulatedCluster(
        instances,
        MODEL,
        1.0,
        0,
        folder,
        children,
        instance_options=INSTANCE_OPTIONS,
        gateway_config={"scheduler": scheduler},
    )


def _scaled(profile: Any, factor: float) -> Any:
    return dataclasses.replace(profile, constants=profile.constants.scaled(factor))


async def _load(
    cluster: EmulatedCluster,
    in_flight: int,
    end_s: float,
    seed: int,
    records: list[RequestRecord],
) -> None:
    count = math.ceil(end_s * 100)
    prompts, outputs = LENGTHS.draw(count, np.random.default_rng(seed))
    requests = [LoadRequest(0.0, int(i), int(o)) for i, o in zip(prompts, outputs, strict=True)]
    maker = BodyMaker(MODEL, PromptKind.TOKEN_IDS, True, 4.0, filler_pool(), int(outputs.max()))
    target = parse_target(cluster.url)
    await replay(target, requests, maker, records.append, concurrency=in_flight)


async def _slow_down(cluster: EmulatedCluster) -> None:
    await asyncio.sleep(SLOW_DOWN_AT_S)
    await cluster.slow_down("fast", SLOW_DOWN)


async def _watch(cluster: EmulatedCluster, speeds: list[list[float | None]]) -> None:
    while True:
        await asyncio.sleep(WINDOW_S)
        speeds.append([i["speed_factor"] for i in await cluster.instances()])


def windows(records: Sequence[RequestRecord], end_s: float) -> Any:
    """Output tokens per second of each window, answers spread evenly over their streams."""
    edges = np.arange(0.0, end_s + 1e-9, WINDOW_S)
    total = np.zeros(edges.size)
    for r in records:
        assert r.first_s is not None
        length_s = max(r.end_s - r.first_s, 1e-3)
        total += r.output_tokens * np.clip((edges - r.first_s) / length_s, 0.0, 1.0)
    return np.diff(total) / WINDOW_S


async def measure(seconds: float, rounds: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Every case under every policy, round by round, so that a bad minute is spread."""
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(rounds):
        for case in CASES:
            for policy in POLICIES:
                for _ in range(MOST_ATTEMPTS):
                    result = await run(case, policy, seconds, number)
                    if result["lost_s"] <= TOLERATED_LOST_S:
                        break
                results.setdefault((case.name, policy), []).append(result)
                ends = result["speeds"][-1] if result["speeds"] else None
                print(f"round {number + 1}: {case.name}, {policy}: {ends}", file=sys.stderr)
    return results


def judge(
    results: dict[tuple[str, str], list[dict[str, Any]]], seconds: float
) -> list[dict[str, Any]]:
    """A row per case and policy: medians by window over the right profile's steady throughput."""
    rows = []
    for case in CASES:
        for policy in POLICIES:
            runs = np.array([r["tokens_per_s"] for r in results[case.name, policy]])
            steady = [
                np.mean(r["tokens_per_s"][int(RECOVERED_AFTER_S / WINDOW_S) :])
                for r in results[case.against, policy]
            ]
            skipped = int(SLOW_DOWN_AT_S / WINDOW_S) if case.slow_down else 0
            shares = np.median(runs[:, skipped:] / np.array(steady)[:, None], axis=0)
            later = shares[int(RECOVERED_AFTER_S / WINDOW_S) : int(seconds / WINDOW_S)]
            rows.append(
                {
                    "case": case.name,
                    "policy": policy,
                    "tokens_per_s": float(np.mean(steady)) * float(np.mean(later)),
                    "lost_s": max(r["lost_s"] for r in results[case.name, policy]),
                    "shares": [round(float(s), 3) for s in shares],
                    "after": float(np.mean(later)),
                    "met": bool(np.mean(later) >= RECOVERED),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="throughput with wrong profiles, by window")
    parser.add_argument("--seconds", type=float, default=60.0, help="judged seconds of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="print the document's table")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    results = uvloop.run(measure(args.seconds, args.rounds))
    rows = judge(results, args.seconds)
    recovered = all(row["met"] for row in rows if row["policy"] == POLICIES[0])
    hurts = any(not row["met"] for row in rows if row["policy"] == POLICIES[1])
    if args.json:
        print(json.dumps({"rows": rows, "recovered": recovered, "hurts_min_max": hurts}))
    else:
        _print(rows, args.markdown)
        print(
            f"finish-time is back within 10 % after {RECOVERED_AFTER_S:.0f} s: "
            f"{'yes' if recovered else 'no'}; min-max loses more somewhere: "
            f"{'yes' if hurts else 'no, so this shows nothing'}"
        )
    return 0 if recovered and hurts else 1


def _print(rows: Sequence[dict[str, Any]], markdown: bool) -> None:
    shown = range(0, len(rows[0]["shares"]), 2 if markdown else 1)
    heads = ["case", "policy", "tokens/s", *(f"{(i + 1) * WINDOW_S:.0f} s" for i in shown), "after"]
    lines = [heads]
    for row in rows:
        shares = [f"{row['shares'][i]:.2f}" for i in shown]
        figures = [f"{row['tokens_per_s']:.0f}", *shares, f"{row['after']:.2f}"]
        lines.append([row["case"], row["policy"], *figures])
    if markdown:
        lines.insert(1, ["---"] * len(heads))
    for line in lines:
        print(f"| {' | '.join(line)} |" if markdown else "  ".join(c.rjust(14) for c in line))


if __name__ == "__main__":
    sys.exit(main())
