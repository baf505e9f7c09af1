"""What sharing through a real Redis costs each gateway: commands, bytes and CPU time, per second.

    python benchmarks/scheduling/traffic.py [--replicas 2,4,8] [--instances 8,64,512] [--seconds 5]
        [--rate 4] [--json]

Needs ``redis-server`` on the PATH. Gateways' schedulers and their exchange as ``serve`` has them,
``scheduler.sharing`` at its defaults but for the time-out, without HTTP: requests begin on
instances that are drawn, so many per second and instance (``--rate``), evenly by gateway, and end
half a second later; 0 is an idle fleet. All figures are per gateway, Redis's own CPU is of all:

    exchanges, news   per second; with many instances they come less often than every 50 and 5 ms
    commands          per second, and kB/s to and from Redis, by Redis's own count
    CPU               of a core, in per mille: the process's CPU time less that of the same requests
                      without sharing, divided by the gateways in it
    ms each           CPU time for one exchange, the news that came since the last one included
    Redis CPU         of a core, in per mille

CPU times, so that a busy machine changes little but the number of exchanges.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import redis
import uvloop

from benchmarks.clusters import PROFILES
from benchmarks.ports import free_port
from benchmarks.tables import Column, report
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Outcome
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.scaleout.sharing.peers import make_sharing

REPLICAS = (2, 4, 8)
INSTANCES = (8, 64, 512)
TICK_S = 0.002
LIFE_S = 0.5
START_S = 20.0
COLUMNS = (
    Column("gateways", "replicas", 9, "d"),
    Column("instances", "instances", 10, "d"),
    Column("requests/s", "requests_per_s", 11, ".0f"),
    Column("exchanges", "exchanges", 10, ".1f"),
    Column("news", "news", 7, ".1f"),
    Column("commands", "commands", 9, ".0f"),
    Column("kB/s to", "to_kb", 9, ".1f"),
    Column("from", "from_kb", 9, ".1f"),
    Column("CPU ‰", "cpu", 8, ".1f"),
    Column("ms each", "each_ms", 8, ".2f"),
    Column("Redis CPU ‰", "redis_cpu", 12, ".1f"),
)


class Gateway:
    """A scheduler and its exchange, with requests that nobody serves."""

    def __init__(self, config: GatewayConfig, seed: int) -> None:
        self.fleet = Fleet(config, Path())
        self.sharing = make_sharing(config.scheduler, self.fleet, Path())
        self._rng = np.random.default_rng(seed)
        self._outstanding: deque[tuple[float, Dispatch]] = deque()

    def live(self, requests: int, now_s: float) -> None:
        """So many begin, and what is over ends."""
        scheduler, outstanding = self.fleet.scheduler, self._outstanding
        table = scheduler.members.table
        ids = list(self.fleet.instances)
        for i in self._rng.integers(len(ids), size=requests).tolist():
            dispatch = table[ids[i]].dispatch(Request("m", 400, 100.0), 0.5, now_s)
            if scheduler.on_dispatch is not None:
                scheduler.on_dispatch(dispatch, now_s)
            outstanding.append((now_s, dispatch))
        while outstanding and now_s - outstanding[0][0] > LIFE_S:
            scheduler.settle(outstanding.popleft()[1], Outcome.COMPLETED, now_s)


async def live(gateways: Sequence[Gateway], rate_per_s: float, seconds: float) -> None:
    """Requests for so long, ``rate_per_s`` at each gateway."""
    begun_s = time.monotonic()
    done = 0
    while (now_s := time.monotonic()) < begun_s + seconds:
        due = int((now_s - begun_s) * rate_per_s)
        for gateway in gateways:
            gateway.live(due - done, now_s)
        done = due
        await asyncio.sleep(TICK_S)


def config(port: int, instances: int) -> GatewayConfig:
    return GatewayConfig.model_validate(
        {
            # Nobody waits for it, and a busy machine is no Redis that is away.
            "scheduler": {"shared": f"redis://127.0.0.1:{port}", "sharing": {"timeout_s": 2.0}},
            "instances": [
                {
                    "id": f"i{i}",
                    "base_url": f"http://10.0.0.1:{i + 1}",
                    "model": "m",
                    "profile": PROFILES[i % len(PROFILES)],
                }
                for i in range(instances)
            ],
        }
    )


class Counts:
    """Running counts of Redis, of this process and of the gateways in it."""

    def __init__(self, client: redis.Redis, gateways: Sequence[Gateway]) -> None:
        told: Any = client.info()
        self.values = np.array(
            [
                time.monotonic(),
                time.process_time(),
                told["total_commands_processed"],
                told["total_net_input_bytes"],
                told["total_net_output_bytes"],
                told["used_cpu_user"] + told["used_cpu_sys"],
                sum(g.sharing.outcomes["ok"] for g in gateways),
                sum(g.sharing.news["told"] for g in gateways),
            ]
        )


async def measure(port: int, replicas: int, instances: int, args: Any) -> dict[str, Any]:
    settings = config(port, instances)
    gateways = [Gateway(settings, seed) for seed in range(replicas)]
    rate_per_s = args.rate * instances / replicas
    await live(gateways, rate_per_s, args.seconds / 4)
    begun_s, cpu_s = time.monotonic(), time.process_time()
    await live(gateways, rate_per_s, args.seconds)
    alone = (time.process_time() - cpu_s) / (time.monotonic() - begun_s)
    with redis.Redis(port=port) as client:
        client.flushall()
        async with asyncio.TaskGroup() as tasks:
            for gateway in gateways:
                await gateway.sharing.start(tasks)
            await live(gateways, rate_per_s, max(1.0, args.seconds / 4))
            before = Counts(client, gateways)
            await live(gateways, rate_per_s, args.seconds)
            spent = Counts(client, gateways).values - before.values
            for gateway in gateways:
                await gateway.sharing.stop()
    # INFO itself is one command of a few hundred bytes.
    span_s, cpu_s, commands, to_bytes, from_bytes, redis_s, exchanges, news = spent.tolist()
    cpu = (cpu_s / span_s - alone) / replicas
    return {
        "replicas": replicas,
        "instances": instances,
        "requests_per_s": args.rate * instances,
        "exchanges": exchanges / span_s / replicas,
        "news": news / span_s / replicas,
        "commands": commands / span_s / replicas,
        "to_kb": to_bytes / span_s / replicas / 1e3,
        "from_kb": from_bytes / span_s / replicas / 1e3,
        "cpu": cpu * 1e3,
        "each_ms": cpu * span_s * replicas / exchanges * 1e3,
        "redis_cpu": redis_s / span_s * 1e3,
        "met": True,
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            _wait_ready(port)
            for instances, replicas in itertools.product(args.instances, args.replicas):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    yield runner.run(measure(port, replicas, instances, args))
        finally:
            server.terminate()


def _wait_ready(port: int) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            with redis.Redis(port=port) as client:
                client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    listed = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--replicas", type=listed, default=list(REPLICAS))
    parser.add_argument("--instances", type=listed, default=list(INSTANCES))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s of an instance")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    return report(rows(args), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
