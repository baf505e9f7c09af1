"""Two active pickers on one Envoy that share their load through Redis; one of them is killed."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.envoy import cluster, configuration, with_keys_file
from tests.fakes.envoy import PickerProcess, running_envoy, until_picked
from tests.fakes.redis import redis_server
from tests.scaleout.picker.test_envoy import no_keys_needed, streamed, two_emulated, write_config

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
        async with two_emulated() as urls:
            path = write_config(tmp_path, urls)
            document = yaml.safe_load(path.read_text("utf-8"))
            document["scheduler"] = {"shared": server.url, "sharing": {"ttl_s": TTL_S}}
            path.write_text(yaml.safe_dump(document), "utf-8")
            pickers = [PickerProcess(path), PickerProcess(path)]
            try:
                await _killed_under_load(tmp_path, urls, pickers)
            finally:
                for picker in pickers:
                    picker.stop(signal.SIGKILL)


async def _killed_under_load(folder: Path, urls: list[str], pickers: list[PickerProcess]) -> None:
    envoys = configuration(urls, [await picker.ports() for picker in pickers])
    all_active(envoys)
    with_keys_file(envoys, no_keys_needed(folder))
    doomed, other = pickers
    async with (
        running_envoy(envoys, folder) as envoy,
        httpx.AsyncClient(base_url=envoy.url, timeout=60) as client,
    ):
        await until_picked(envoy, 2)
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
