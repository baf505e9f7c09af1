"""Two data-parallel ranks of a real server behind one address, each a place of its own.

It takes a core for each rank and one for its frontend; on two it starts slowly.
"""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_vllm.cluster import PATIENCE_S, Cluster

from benchmarks.ports import free_port
from hetero_gateway.core.prefixes.sources import CacheSource
from hetero_gateway.core.types import InstanceId
from tests.fakes.running import CHAT, config_for, eventually, running_gateway
from tests.real_vllm.test_kv_events import PROFILE, Telling, engine_that_tells
from tests.real_vllm.test_prefix_caches import words

pytestmark = pytest.mark.real_vllm

PLACES = [InstanceId(f"a.dp{rank}") for rank in range(2)]


async def finished(http: httpx.AsyncClient) -> Counter[int]:
    """Requests that each rank has brought to their end, as it says itself."""
    text = (await http.get("/metrics")).text
    found: Counter[int] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:request_success_total":
                found[int(sample.labels["engine"])] += int(sample.value)
    return found


async def test_ranks_of_a_real_server(servers: Cluster, figure: Any) -> None:
    first = free_port(in_a_row=4)  # the second rank has the next port each
    ports = first, first + 2
    options = ("--data-parallel-size", "2", "--distributed-executor-backend", "mp")
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with engine_that_tells(servers, "ranks", *ports, *options, **env) as telling:
        told = [Telling(telling.server, ports[0] + i, ports[1] + i) for i in range(2)]
        url = telling.server.base_url
        entry = {"id": "a", "base_url": url, "profile": str(PROFILE), "data_parallel_ranks": 2}
        async with (
            running_gateway(config_for([], instances=[entry])) as running,
            httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as direct,
        ):
            fleet = running.gateway.fleet
            caches = fleet.scheduler.caches
            assert caches is not None
            await eventually(
                lambda: all(caches.source(place) is CacheSource.EXACT for place in PLACES)
            )
            before = await finished(direct)
            talks: list[list[dict[str, str]]] = [[] for _ in range(4)]

            async def turn(number: int, count: int) -> tuple[str, int]:
                """Which place had it, and what was cached there."""
                said = talks[number]
                said.append({"role": "user", "content": words(300, f"{ports} {number} {count}")})
                body = {"model": "tiny", "messages": said, "max_tokens": 4, "ignore_eos": True}
                answer = await client.post(CHAT, json=body)
                assert answer.status_code == 200, answer.text
                document = answer.json()
                said.append(document["choices"][0]["message"])
                cached = document["usage"]["prompt_tokens_details"]["cached_tokens"]
                return answer.headers["x-hetero-gateway-instance"], cached

            first = [place for place, _ in await asyncio.gather(*(turn(n, 0) for n in range(4)))]
            for count in (1, 2):
                for number in range(4):
                    place, cached = await turn(number, count)
                    assert place == first[number]
                    assert cached > 200 * count
            sent = Counter({PLACES.index(InstanceId(p)): 3 * c for p, c in Counter(first).items()})
            assert set(sent) == {0, 1}
            assert await finished(direct) - before == sent
            assert running.settled()

            def known(rank: int) -> set[int]:
                blocks = fleet.instances[PLACES[rank]].engine_blocks
                return set() if blocks is None else set(blocks.hashes())

            for rank, each in enumerate(told):
                there = set(await each.blocks())
                assert there
                await eventually(lambda rank=rank, there=there: known(rank) == there)  # type: ignore[misc]
        figure(f"ranks of one real server: {dict(sent)} requests, counted so by each rank itself")
