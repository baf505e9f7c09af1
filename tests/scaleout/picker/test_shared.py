"""Two active pickers on one Envoy that share their load through Redis; one of them is killed."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.envoy import cluster
from tests.fakes.envoy import PickerProcess
from tests.fakes.redis import redis_server
from tests.scaleout.picker.test_envoy import behind_processes, streamed

pytestmark = pytest.mark.system

TTL_S = 2.0
LATE_S = 0.5


def all_active(document: dict[str, Any]) -> None:
    """Envoy asks both in turn."""
    endpoints = cluster(document, "picker")["load_assignment"]["endpoints"]
    for each in endpoints:
        each["priority"] = 0


async def others_in_flight(client: httpx.AsyncClient, picker: PickerProcess) -> int:
    """What a picker knows of the others' requests."""
    told = (await client.get(f"{picker.url}/admin/instances")).json()["sharing"]["others"]
    return sum(each["in_flight"] for each in told.values()) if told else 0


async def test_two_active_pickers_know_each_others_load_and_one_may_be_killed(tmp_path: Path):
    with redis_server() as server:
        scheduler = {"shared": server.url, "sharing": {"ttl_s": TTL_S}}
        async with behind_processes(tmp_path, 2, all_active, scheduler=scheduler) as (client, both):
            doomed, other = both
            open_ones = [asyncio.ensure_future(streamed(client, 1500)) for _ in range(20)]
            async with asyncio.timeout(30):
                while not (  # noqa: ASYNC110 - it asks other processes
                    await others_in_flight(client, doomed) > 2
                    and await others_in_flight(client, other) > 2
                ):
                    await asyncio.sleep(0.02)
            killed_s = time.monotonic()
            doomed.process.kill()
            fresh = [asyncio.ensure_future(streamed(client, 20)) for _ in range(20)]
            async with asyncio.timeout(30):
                while await others_in_flight(client, other):  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.02)
            assert time.monotonic() - killed_s < TTL_S + LATE_S
            for text in await asyncio.gather(*open_ones, *fresh):
                assert text.endswith("data: [DONE]\n\n")
