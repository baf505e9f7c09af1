"""What grows with the number of instances: the gateway's own work and memory, per request and per
second.

    python benchmarks/scheduling/large.py [--instances 64,512,4096] [--only request] [--json]

Under ``finish-time``, with instances of four kinds that hold four requests each. Per request: one
that is submitted, placed, seen to make its first token and settled, as in ``decision.py``, while

    ordinary     all instances are open, and the request fits all
    ejected      one instance is ejected for its failures
    recovering   one instance is in its slow start
    long         the request is longer than an eighth of the instances' contexts
    changed      the membership has just changed, so that the pool is made anew

The chores: ``doubts``, twice a second, whether speed factors are still believed; ``steps``, each
second, how fast every instance decodes, with one stream on each; ``scrape``, a scrape of /metrics
by Prometheus; ``admin``, a look at /admin/instances, as the dashboard's; ``probe`` and ``read``,
one instance asked for /health, and for its models and metrics, over sockets (a process with fixed
answers; 64 connections). Memory: what tracemalloc sees of an idle gateway's instances, each with
one model's series. CPU time of this process; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters import PROFILES
from benchmarks.dataplane.scrape import scraped
from benchmarks.scheduling.decision import (
    REQUESTS_PER_INSTANCE,
    make_requests,
    make_scheduler,
    place,
    sizes,
)
from benchmarks.tables import Column, report
from hetero_gateway.core.instances.outcomes import EjectionRules, Outcomes
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, Outcome
from hetero_gateway.engines.vllm import paths
from hetero_gateway.files.gateway_config import GatewayConfig, HealthConfig
from hetero_gateway.gateway.dataplane.speed import StepWatch
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.serve.control.admin import describe_instance
from hetero_gateway.serve.wiring.gateway import Gateway

ROUNDS = 5
REQUESTS_PER_ROUND = 200
CHANGES_PER_ROUND = 5
PROBED = 64
PROBED_S = 4.0
PROBE_EVERY_S = 0.1
COLUMNS = (
    Column("what", "what", 26),
    Column("instances", "instances", 10, "d"),
    Column("µs", "us", 12, ".1f"),
    Column("bytes", "bytes", 12, "d"),
)
Rows = Iterator[tuple[str, float | None, int | None]]


def median_us(measured: Callable[[], None], count: int, rounds: int = ROUNDS) -> float:
    """CPU of one of ``count`` that are done in each round, µs."""
    spent_s = []
    for _ in range(rounds):
        begin_s = time.process_time()
        measured()
        spent_s.append(time.process_time() - begin_s)
    return statistics.median(spent_s) / count * 1e6


# Per request


class Case:
    """A scheduler whose instances are busy, and requests for it."""

    def __init__(self, instances: int) -> None:
        self.scheduler = make_scheduler("finish-time", instances)
        self.requests = make_requests(np.random.default_rng(1), REQUESTS_PER_ROUND)
        busy = itertools.islice(itertools.cycle(self.requests), REQUESTS_PER_INSTANCE * instances)
        for request in busy:
            self.scheduler.first_token(place(self.scheduler, request), 0.0)
        self.now_s = 0.0

    def serve(self, requests: Sequence[Request]) -> None:
        scheduler, now_s = self.scheduler, self.now_s
        for request in requests:
            dispatch = place(scheduler, request, now_s)
            scheduler.first_token(dispatch, now_s)
            scheduler.settle(dispatch, Outcome.COMPLETED, now_s)

    def cost_us(self) -> float:
        return median_us(lambda: self.serve(self.requests), len(self.requests))


def first_of(scheduler: Scheduler) -> InstanceId:
    return next(iter(scheduler.members.specs.values())).instance_id


def ejected(case: Case) -> float:
    outcomes = Outcomes(EjectionRules())
    outcomes.eject(case.now_s, "reset")
    case.scheduler.restraints.heed(first_of(case.scheduler), outcomes)
    return case.cost_us()


def recovering(case: Case) -> float:
    outcomes = Outcomes(EjectionRules())
    outcomes.eject(case.now_s, "reset")
    outcomes.reprieve(case.now_s)
    case.scheduler.restraints.heed(first_of(case.scheduler), outcomes)
    return case.cost_us()


def long(case: Case) -> float:
    for spec in list(case.scheduler.members.specs.values())[::8]:
        case.scheduler.replace(dataclasses.replace(spec, max_model_len=1))
    return case.cost_us()


def changed(case: Case) -> float:
    scheduler = case.scheduler
    spec = next(iter(scheduler.members.specs.values()))
    other = dataclasses.replace(spec, available=False)

    def change() -> None:
        for k in range(CHANGES_PER_ROUND):
            scheduler.replace(spec if k % 2 else other)
            case.serve(case.requests[:1])

    return median_us(change, CHANGES_PER_ROUND)


REQUESTS = {
    "ordinary": Case.cost_us,
    "ejected": ejected,
    "recovering": recovering,
    "long": long,
    "changed": changed,
}


def request_rows(instances: int) -> Rows:
    for name, measure in REQUESTS.items():
        yield f"request, {name}", measure(Case(instances)), None


# Per second


class OneStream:
    """A stream that makes progress each time it is looked at."""

    congested = False
    complete = False
    _events = 0

    @property
    def events(self) -> int:
        self._events += 20
        return self._events

    def usage(self) -> tuple[int | None, int | None]:
        return None, None


def make_gateway(instances: int, base_url: str = "http://127.0.0.1:9") -> Gateway:
    entries = [
        {"id": f"i{i}", "base_url": base_url, "model": "m", "profile": PROFILES[i % len(PROFILES)]}
        for i in range(instances)
    ]
    gateway = Gateway(GatewayConfig.model_validate({"instances": entries}))
    for instance in gateway.fleet.instances.values():
        gateway.fleet.mark_up(instance)
        series = gateway.metrics.series("m", instance.id)
        series.outcomes["completed"] += 1
        gateway.metrics.decisions[instance.id] += 1
    return gateway


async def looks_us(fleet: Fleet) -> float:
    """One look at the progress of one stream on every instance."""
    watch = StepWatch(fleet)
    scheduler, now_s = fleet.scheduler, time.monotonic()
    for instance_id in fleet.instances:
        request = Request("m", 200, 100.0, only=instance_id)
        dispatch = place(scheduler, request, now_s)
        scheduler.first_token(dispatch, now_s)
        watch.add(OneStream(), dispatch, now_s - 1.0)  # type: ignore[arg-type]
    spent_us = []
    for _ in range(ROUNDS):
        await asyncio.sleep(0.1)
        spent_us.append(median_us(watch._look, 1, rounds=1))
    watch.close()
    return statistics.median(spent_us)


async def scrapes_us(gateway: Gateway) -> tuple[tuple[float, float], int]:
    """CPU of a scrape, and the most that it takes at a time; and its bytes."""
    spent = [await scraped(gateway, gzipped=False) for _ in range(ROUNDS)]
    cpu_us, longest_us = (statistics.median(each[i] for each in spent) * 1e6 for i in (0, 1))
    return (cpu_us, longest_us), spent[-1][2]


def chore_rows(instances: int) -> Rows:
    case = Case(instances)
    probes = case.scheduler._probes
    yield "doubts, twice a second", median_us(lambda: probes.revise(1.0), 1), None
    gateway = make_gateway(instances)
    yield "steps, each second", asyncio.run(looks_us(gateway.fleet)), None
    (scrape_us, longest_us), size = asyncio.run(scrapes_us(gateway))
    yield "scrape of /metrics", scrape_us, size
    yield "  its longest step", longest_us, None

    def admin() -> str:
        every = gateway.fleet.instances.values()
        return json.dumps([describe_instance(gateway, each) for each in every])

    yield "look at /admin/instances", median_us(lambda: admin() and None, 1), len(admin())


def memory_rows(instances: int) -> Rows:
    make_gateway(1)  # what is loaded once
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        gateway = make_gateway(instances)
        place(gateway.fleet.scheduler, Request("m", 200, 100.0))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(gateway.fleet.instances) == instances
    yield "memory, each", None, used // instances


# Probes

SERVER = r"""
import asyncio, sys
size = int(sys.argv[1])
line = b'vllm:request_success_total{engine="0",model_name="m",finished_reason="stop"} 17.0\n'
metrics = (b'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
           b'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0\n'
           b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0\n')
metrics += line * ((size - len(metrics)) // len(line))
models = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":8192}]}'
def answer(body):
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
answers = {b"/health": answer(b""), b"/v1/models": answer(models), b"/metrics": answer(metrics)}
count = 0
class Server(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        global count
        path = data.split(b" ", 2)[1]
        count += path == b"/health"
        self.transport.write(answers.get(path) or answer(b"%d" % count))
async def main():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    asyncio.get_running_loop().add_reader(0, asyncio.get_running_loop().stop)  # ends with us
    await server.serve_forever()
try:
    asyncio.run(main())
except RuntimeError:
    pass
"""
METRICS_BYTES = 70_000  # of a rank of vLLM's


async def probes_us(base_url: str, *, reads: bool) -> float:
    """CPU of one look at /health, and at models and metrics where it ``reads``."""
    gateway = make_gateway(PROBED, base_url)
    config = HealthConfig(
        probe_interval_s=PROBE_EVERY_S, scrape_interval_s=PROBE_EVERY_S / 2 if reads else 3600.0
    )
    looks = 0
    async with asyncio.TaskGroup() as tasks:
        monitor = HealthMonitor(gateway.fleet, config, tasks)
        asked = monitor._look

        async def look(*args: Any) -> None:
            nonlocal looks
            looks += 1
            await asked(*args)

        monitor._look = look  # type: ignore[method-assign]
        await monitor.start()
        begin_s, looks = time.process_time(), 0
        await asyncio.sleep(PROBED_S)
        spent_s, made = time.process_time() - begin_s, looks
        assert all(instance.up for instance in gateway.fleet.instances.values())
        monitor.stop()
    gateway.fleet.close()
    return spent_s / made * 1e6


def probe_rows() -> Rows:
    command = [sys.executable, "-c", SERVER, str(METRICS_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            base_url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            probe_us = asyncio.run(probes_us(base_url, reads=False))
            read_us = asyncio.run(probes_us(base_url, reads=True)) - probe_us
        finally:
            server.kill()
    yield f"probe, {paths.HEALTH}", probe_us, None
    yield f"read, {paths.MODELS}, {paths.METRICS}", read_us, METRICS_BYTES


PARTS = {"request": request_rows, "chores": chore_rows, "memory": memory_rows}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for part, measure in PARTS.items():
        if args.only in (None, part):
            for instances in args.instances:
                for what, us, size in measure(instances):
                    yield _row(what, instances, us, size)
    if args.only in (None, "probes"):
        for what, us, size in probe_rows():
            yield _row(what, 1, us, size)


def _row(what: str, instances: int, us: float | None, size: int | None) -> dict[str, Any]:
    return {"what": what, "instances": instances, "us": us, "bytes": size, "met": True}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what grows with the number of instances")
    parser.add_argument("--instances", type=sizes, default=[64, 512, 4096], help="with commas")
    parser.add_argument("--only", choices=(*PARTS, "probes"))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    return report(rows(args), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
