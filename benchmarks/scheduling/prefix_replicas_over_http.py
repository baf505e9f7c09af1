"""Several gateways over a real Redis, by real HTTP: what each knows of what the others have sent.

    python benchmarks/scheduling/prefix_traces.py chat -o chat.jsonl.gz --requests 600
    python benchmarks/scheduling/prefix_replicas_over_http.py chat.jsonl.gz
        [--gateways 4] [--cluster A] [--load 0.9] [--ways one,shared,own] [--limit N]

The instances are emulated ones and the requests those of ``prefix_over_http.py``; each connection
goes to a gateway that is drawn, and whatever comes over it with it: a conversation's turns come to
any of them.

    one      one gateway gets everything
    shared   all share loads and placements (``scheduler.shared``, as it is)
    own      they share loads alone (``sharing.placements: false``)

At the end of ``shared`` a gateway is started anew, and it is measured how long it takes until it
knows of as much text as the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.prefix import load_instances
from benchmarks.scheduling.prefix_over_http import Load, make_load
from benchmarks.simulator.simulated_and_measured import INSTANCE_OPTIONS, MODEL, TIMEOUT_S
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance, write_profile
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import summarise
from hetero_gateway.sim.cluster import SimulatedInstance
from tests.fakes.redis import redis_server

WAYS = ("one", "shared", "own")
# Nobody waits for Redis, and on a busy machine it answers late.
REDIS_TIMEOUT_S = 5.0
# A gateway that was started anew knows so much of what the others know.
AS_WARM, AS_WARM_WITHIN_S = 0.97, 30.0


@contextlib.asynccontextmanager
async def front(ports: Sequence[int], seed: int) -> AsyncIterator[str]:
    """An address whose connections go to one of these ports each, drawn."""
    rng = random.Random(seed)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", rng.choice(ports))
        for ends in ((reader, back), (there, writer)):
            task = asyncio.create_task(pump(*ends))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in (ending := list(tasks)):
            task.cancel()
        if ending:
            await asyncio.wait(ending)


class Rig:
    """The emulated instances, and gateways in front of them."""

    def __init__(
        self,
        instances: Sequence[SimulatedInstance],
        load: Load,
        folder: Path,
        children: Children,
        redis_url: str,
        gateways: int,
    ) -> None:
        self._load = load
        self._children = children
        self._redis_url = redis_url
        self._runs = 0
        emulated = []
        for instance in instances:
            path = folder / f"{instance.instance_id}.yaml"
            write_profile(instance.profile, path)
            emulated.append(EmulatedInstance(str(instance.instance_id), str(path)))
        self.clusters = []
        for number in range(gateways):
            own = folder / f"gateway-{number}"
            own.mkdir()
            self.clusters.append(
                EmulatedCluster(
                    emulated,
                    MODEL,
                    1.0,
                    0,
                    own,
                    children,
                    instance_options=(*INSTANCE_OPTIONS, "--enable-prompt-tokens-details"),
                    prefix_caching=True,
                )
            )

    async def start(self) -> None:
        await self.clusters[0].start_instances()
        for cluster in self.clusters[1:]:
            cluster.instance_urls = self.clusters[0].instance_urls

    def _scheduler(self, way: str) -> dict[str, Any]:
        load = self._load
        shared: dict[str, Any] = {}
        if way != "one":
            # A group for each run, so that nothing is left of the last one.
            sharing = {
                "group": f"run-{self._runs}",
                "timeout_s": REDIS_TIMEOUT_S,
                "placements": way == "shared",
            }
            shared = {"shared": self._redis_url, "sharing": sharing}
        return {
            "predictor": {"mean_tokens": load.mean_output},
            "reference_prompt_tokens": round(load.mean_prompt),
            "reference_output_tokens": round(load.mean_output),
            **shared,
        }

    async def run(self, way: str) -> dict[str, Any]:
        self._runs += 1
        clusters = self.clusters[: 1 if way == "one" else None]
        for cluster in clusters:
            await cluster.start_gateway("finish-time", self._scheduler(way))
        load = self._load
        longest = max(request.output_tokens for request in load.requests)
        maker = BodyMaker(
            MODEL, PromptKind.CHAT, True, 4.0, filler_pool(), longest, f"run {self._runs}"
        )
        lost_s = await clusters[0].lost_s()
        ports = [int(cluster.url.rsplit(":", 1)[1]) for cluster in clusters]
        async with front(ports, 1) as url:
            records = await replay(parse_target(url), load.requests, maker, timeout_s=TIMEOUT_S)
        self._children.check()
        summary = summarise(records)
        result: dict[str, Any] = {
            "cached_share": summary.cached_share,
            "latency_mean_s": summary.latency_s.mean,
            "ttft_mean_s": summary.ttft_s.mean,
            "ttft_p99_s": summary.ttft_s.p99,
            "requests": {i.instance_id: i.requests for i in summary.instances},
            "errors": summary.errors_by_kind,
            "emulated_clocks_lost_s": await clusters[0].lost_s() - lost_s,
        }
        if way == "shared":
            result["as_warm_after_s"] = await self._restart()
        return result

    async def _restart(self) -> float | None:
        """Seconds until a gateway that was started anew knows what the others know."""
        await self.clusters[0].start_gateway("finish-time", self._scheduler("shared"))
        begun_s = time.monotonic()
        while (took_s := time.monotonic() - begun_s) < AS_WARM_WITHIN_S:
            anew, other = [
                sum(i["prefix_bytes"] or 0 for i in await cluster.instances())
                for cluster in self.clusters[:2]
            ]
            if anew >= AS_WARM * other > 0:
                return took_s
            await asyncio.sleep(0.1)
        return None


async def measure(
    instances: Sequence[SimulatedInstance], load: Load, ways: Sequence[str], gateways: int
) -> dict[str, dict[str, Any]]:
    results = {}
    with (
        tempfile.TemporaryDirectory(prefix="hetero-gateway-prefix-") as folder,
        Children(Path(folder)) as children,
        redis_server() as redis,
    ):
        rig = Rig(instances, load, Path(folder), children, redis.url, gateways)
        await rig.start()
        for way in ways:
            results[way] = await rig.run(way)
            print(json.dumps({way: results[way]}), flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.jsonl.gz")
    parser.add_argument("--cluster", default="A", help="as prefix.py names them (default: A)")
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.9, help="share of what blind serves")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--limit", type=int, help="requests of the trace")
    args = parser.parse_args()
    instances = load_instances(args.cluster)
    load = make_load(args.trace, instances, args.load, args.limit)
    print(f"{len(load.requests)} requests in {load.requests[-1].due_s:.0f} s", file=sys.stderr)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(measure(instances, load, args.ways.split(","), args.gateways))
    if "one" in results:
        for way, result in results.items():
            ratios = [
                f"{name} {result[name] / results['one'][name]:.3f}"
                for name in ("cached_share", "latency_mean_s", "ttft_mean_s", "ttft_p99_s")
            ]
            print(f"{way:7s} over one: {', '.join(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
