"""Data-parallel ranks behind one address: a place each, its load, cache and figures its own."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hetero_gateway.core.prefixes.sources import CacheSource
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.lab.emulator.event_settings import KVEventsConfig
from hetero_gateway.lab.emulator.ranks import EmulatedRanks
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import serving
from tests.fakes.running import CHAT, FAST, Rig, There, chat, config_for, eventually, rig

pytestmark = pytest.mark.filterwarnings("ignore:.*add_reader.*")
RANKS = 4
PLACES = [f"a.dp{rank}" for rank in range(RANKS)]
EVENTS = KVEventsConfig(
    enable_kv_cache_events=True,
    endpoint="tcp://*:0",
    replay_endpoint="tcp://127.0.0.1:0",
)


def entry(url: str, **fields: Any) -> dict[str, Any]:
    given = {"id": "a", "base_url": url, "profile": FAST, "data_parallel_ranks": RANKS}
    return given | fields


@contextlib.asynccontextmanager
async def ranks(
    events: KVEventsConfig | None = None, **sections: Any
) -> AsyncIterator[tuple[Rig, EmulatedRanks]]:
    """A gateway in front of a server with four ranks."""
    settings = EmulatorSettings(
        load_profile(FAST), models=("m",), prompt_tokens_details=True, kv_events=events
    )
    engine = EmulatedRanks(settings, RANKS)
    async with serving(engine) as url:
        async with rig([There(url)], instances=[entry(url)], **sections) as it:
            fleet = it.running.gateway.fleet
            await eventually(lambda: all(i.up for i in fleet.instances.values()))
            yield it, engine


def words(number: int, kilobytes: int = 4) -> str:
    return f"{number:08d}" * (128 * kilobytes)


def place_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-hetero-gateway-instance"]


async def test_loads_are_exact_by_rank() -> None:
    async with ranks() as (it, engine):
        # The engine's own balance would use it.
        await it.client.patch("/admin/instances/a.dp3", json={"draining": True})
        table = it.running.gateway.fleet.scheduler.members.table

        def agree() -> None:
            ours = [table[InstanceId(place)].in_flight for place in PLACES]
            theirs = [
                each.loop.engine.num_running + each.loop.engine.num_waiting for each in engine.ranks
            ]
            assert ours == theirs
            seen.append(ours)

        seen: list[list[int]] = []
        bodies = [chat(words(n, 1), max_tokens=100, ignore_eos=True) for n in range(30)]
        sent = [asyncio.create_task(it.client.post(CHAT, json=body)) for body in bodies]
        await eventually(lambda: sum(each.loop.engine.num_running for each in engine.ranks) == 30)
        agree()
        answers = Counter(place_of(answer) for answer in await asyncio.gather(*sent))
        agree()
        assert seen == [[10, 10, 10, 0], [0] * RANKS]
        assert answers == dict.fromkeys(PLACES[:3], 10)
        finished = [each.loop.metrics._finished["length"] for each in engine.ranks]
        assert finished == [10, 10, 10, 0]
        # Counted and shown by rank.
        text = await it.running.metrics()
        for place in PLACES:
            assert f'hetero_gateway_instance_up{{backend="{place}"}} 1.0' in text


@pytest.mark.parametrize("workers", [1, 2])
async def test_follow_ups_go_to_their_rank(workers: int) -> None:
    async with ranks(workers=workers) as (it, _):

        async def talk(number: int) -> list[str]:
            said, places = [], []
            for turn in range(3):
                said.append({"role": "user", "content": words(100 * number + turn)})
                body = {"model": "m", "messages": said, "max_tokens": 16, "ignore_eos": True}
                answer = await it.client.post(CHAT, json=body)
                places.append(place_of(answer))
                document = answer.json()
                if turn:
                    cached = document["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert cached > 900 * turn
                said.append(document["choices"][0]["message"])
            return places

        talks = await asyncio.gather(*map(talk, range(12)))
        assert all(len(set(places)) == 1 for places in talks)
        assert {places[0] for places in talks} == set(PLACES)


async def test_each_rank_tells_what_it_has_and_how_it_is() -> None:
    async with ranks(EVENTS) as (it, engine):
        gateway = it.running.gateway
        caches = gateway.fleet.scheduler.caches
        assert caches is not None
        places = [gateway.fleet.instances[InstanceId(place)] for place in PLACES]
        await eventually(lambda: all(caches.source(p.id) is CacheSource.EXACT for p in places))
        posts = [it.client.post(CHAT, json=chat(words(n), max_tokens=8)) for n in range(8)]
        for answer in await asyncio.gather(*posts):
            place_of(answer)

        def agree() -> bool:
            known = [set(p.engine_blocks.hashes()) for p in places if p.engine_blocks is not None]
            there = []
            for each in engine.ranks:
                assert each.events is not None
                there.append(set(each.events._keys.counts))
            return known == there and all(there)

        await eventually(agree)
        tokens = engine.loop.engine.total_blocks * 16
        assert [p.engine_kv_capacity_tokens for p in places] == [tokens] * RANKS
        # A reset through the gateway is of them all.
        answer = await it.client.post("/admin/instances/a/engine/reset_prefix_cache")
        assert answer.json() == {"success": True}
        await eventually(lambda: not any(caches.index.bytes_on(p.id)[0] for p in places))


async def test_their_address_is_one_server() -> None:
    """Its metrics are read once for all; what is odd about it is told once."""
    async with ranks(health={"scrape_interval_s": 5}) as (it, engine):
        gateway = it.running.gateway
        assert gateway.setup.warnings() == []
        asked: Counter[str] = Counter()
        page = engine._pages["/metrics"]

        def counted() -> Any:
            asked["/metrics"] += 1
            return page()

        engine._pages["/metrics"] = counted
        (await it.client.post(CHAT, json=chat(max_tokens=1000, ignore_eos=True))).raise_for_status()
        await asyncio.sleep(30)
        assert 4 <= asked["/metrics"] <= 8
        listed = (await it.client.get("/admin/instances")).json()["instances"]
        rows = [(row["id"], row["instance"], row["data_parallel_rank"]) for row in listed]
        assert rows == [(place, "a", rank) for rank, place in enumerate(PLACES)]


async def test_an_operator_speaks_of_the_instance_or_of_a_rank() -> None:
    async with ranks() as (it, _):
        fleet = it.running.gateway.fleet
        url = fleet.instances[InstanceId("a.dp0")].config.base_url
        answer = await it.client.patch("/admin/instances/a", json={"draining": True})
        assert [row["draining"] for row in answer.json()["places"]] == [True] * RANKS
        answer = await it.client.patch("/admin/instances/a.dp2", json={"draining": False})
        assert answer.json()["draining"] is False
        assert place_of(await it.client.post(CHAT, json=chat(max_tokens=2))) == "a.dp2"
        again = await it.client.post("/admin/instances", json=entry(url))
        assert again.status_code == 409
        assert (await it.client.delete("/admin/instances/a")).json() == {
            "id": "a",
            "open_requests": 0,
        }
        assert not fleet.instances
        added = await it.client.post("/admin/instances", json=entry(url, data_parallel_ranks=2))
        assert added.status_code == 201
        assert [row["id"] for row in added.json()["places"]] == PLACES[:2]
        await eventually(lambda: all(i.up for i in fleet.instances.values()))
        assert place_of(await it.client.post(CHAT, json=chat(max_tokens=2))) in PLACES[:2]


async def test_a_rank_is_not_the_client_s_to_choose() -> None:
    async with rig(1) as it:
        (fake,) = it.fakes
        instances = [entry(fake.url, data_parallel_ranks=2, data_parallel_start_rank=4)]
        for instance in list(it.running.gateway.fleet.instances):
            it.running.gateway.roster.remove(instance)
        for place in InstanceConfig.model_validate(instances[0]).places():
            await it.running.gateway.roster.add(place)
        await eventually(lambda: it.running.gateway.fleet.ready())
        answer = await it.client.post(CHAT, json=chat(), headers={"x-data-parallel-rank": "1"})
        rank = int(place_of(answer).removeprefix("a.dp"))
        lines = fake.heads[-1].lower().split(b"\r\n")
        told = [line for line in lines if b"data-parallel" in line]
        assert told == [b"x-data-parallel-rank: %d" % (4 + rank)]


def test_what_cannot_be_configured() -> None:
    server = There("http://127.0.0.1:1")
    allowed = {"allow_engine_headers": ["x-data-parallel-rank"]}
    with pytest.raises(ValueError, match="a rank is either the client's"):
        config_for([], instances=[entry(server.url)], server=allowed)
    with pytest.raises(ValueError, match=r"'a\.dp1' is used twice"):
        config_for([], instances=[entry(server.url), entry("http://127.0.0.1:2", id="a.dp1",
                                                            data_parallel_ranks=1)])  # fmt: skip
    with pytest.raises(ValueError, match="one of them"):
        config_for([], instances=[entry(server.url, data_parallel_rank=1)])
    transfer = {"connector": "NixlConnector"}
    with pytest.raises(ValueError, match="not with kv_transfer"):
        config_for([], instances=[entry(server.url, kv_transfer=transfer)])
