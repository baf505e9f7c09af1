"""What the gateway makes of what an engine says of itself."""

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet import health
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.upstream import InstancePool
from tests.fakes.raw import RawInstance, plain
from tests.fakes.running import FAST, RunningGateway, eventually, rig
from tests.fakes.vllm import NO_PREFIX_CACHE, FakeInstance, fake_instances

RANKS = (
    'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 1.0\n'
    'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.2\n'
    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="300"} 1.0\n'
)


async def test_an_engine_with_a_queue_shows_how_many_it_runs_at_once() -> None:
    fakes = FakeInstance(), FakeInstance()
    for fake in fakes:
        fake.metrics = "vllm:num_requests_running 8.0\nvllm:num_requests_waiting 3.0\n"
    async with rig(fakes, profiles=(None, FAST)) as (_, client, _):
        rows = (await client.get("/admin/instances")).json()["instances"]
    # The second has a profile, which says it.
    assert [row["learnt_max_num_seqs"] for row in rows] == [8, None]


ODD_MODELS = {
    "null": b"null",
    "a list": b"[]",
    "no list": b'{"data": {"m": 1}}',
    "a text": b'"models"',
    "no cards": b'{"data": ["m", None]}',
    "cards of nothing": b'{"data": [null, 1, "m", [], {"id": 7}, {"id": null}]}',
    "no JSON": b"<html>",
    "not UTF-8": b'{"data": [{"id": "\xff"}]}',
    "half a character": b'{"data": [{"id": "\\ud800"}]}',
    "control characters": b'{"data": [{"id": "m\\n# HELP evil"}, {"id": "a\\u0000"}]}',
    "a name of a megabyte": b'{"data": [{"id": "' + b"m" * 1000000 + b'"}]}',
    "deep": b'{"data": ' + b"[" * 500000,
    "deep in a card": b'{"data": [{"id": "m", "x": ' + b"[" * 500000 + b"]" * 500000 + b"}]}",
    "a million of them": b'{"data": [' + b"{}," * 300000 + b"{}]}",
}
MODELS_CARD = b'{"data": [{"id": "m", "max_model_len": %b}]}'


def endless(part: bytes) -> list[bytes | None]:
    """A chunked answer of 64 MB, which nobody should read to its end."""
    piece = b"%x\r\n%b\r\n" % (len(part) << 10, part * 1024)
    return [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        *[piece] * (65536 // len(part)),
    ]


BAD_ANSWERS: dict[str, list[bytes | None]] = {
    "500": [plain(b"", b"500 Oops")],
    "moved": [b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"],
    "silent": [b""],
    "closed": [None],
    "garbage": [b"SSH-2.0-OpenSSH_9.2\r\n"],
    "half a head": [b"HTTP/1.1 200 OK\r\n"],
    "half a body": [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc"],
    "a long head": [b"HTTP/1.1 200 OK\r\nx: " + b"x" * (1 << 22)],
    "200 MB": [b"HTTP/1.1 200 OK\r\ncontent-length: 200000000\r\n\r\n" + b"[" * (1 << 20)],
    "endless": endless(b"0123456789abcdef" * 16),
    "a bomb": [
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b"
        % (len(bomb := gzip.compress(bytes(1 << 26), 1)), bomb)
    ],
    "drips": [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\n[\r\n"] * 1000],
}


@contextlib.asynccontextmanager
async def beside_a_bad_one(
    path: str, pieces: list[bytes | None], **options: Any
) -> AsyncIterator[tuple[RunningGateway, Instance, httpx.AsyncClient]]:
    """A gateway over an instance that answers ``path`` so, and a good one: (gateway, bad one)."""
    async with RawInstance() as bad, fake_instances(1) as fakes:
        bad.answers[path], bad.pause_s = pieces, 0.01
        bad_config = {"id": "bad", "base_url": bad.url} | options
        instances = [bad_config, {"id": "good", "base_url": fakes[0].url}]
        health = {"probe_interval_s": 0.2, "probe_timeout_s": 1, "scrape_interval_s": 0.2}
        async with rig(fakes, instances=instances, health=health) as (running, client, _):
            yield running, running.gateway.fleet.instances[InstanceId("bad")], client


async def reason_shown(client: httpx.AsyncClient) -> dict[str, Any]:
    rows = (await client.get("/admin/instances")).json()["instances"]
    return next(row for row in rows if row["id"] == "bad")


async def serves(client: httpx.AsyncClient, by: str) -> None:
    for _ in range(3):
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] == by


@pytest.mark.parametrize("name", ODD_MODELS)
async def test_an_instance_whose_models_cannot_be_read_is_out_and_says_why(name: str) -> None:
    pieces: list[bytes | None] = [plain(ODD_MODELS[name])]
    async with beside_a_bad_one("/v1/models", pieces) as (running, bad, client):
        assert not bad.up
        assert "/v1/models: " in (await reason_shown(client))["down_reason"]
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["m"]
        await serves(client, "good")
        parse_metrics(await running.metrics())


async def test_an_instance_that_is_suspected_all_the_time_is_probed_twice_a_second_at_most() -> (
    None
):
    health = {"probe_interval_s": 10, "probe_timeout_s": 5}
    bad = RawInstance()
    async with rig([bad], profiles=(None,), health=health) as (running, *_):
        [instance] = running.gateway.fleet.instances.values()
        await eventually(lambda: instance.up)
        await asyncio.sleep(30)
        suspected_s = time.monotonic()
        bad.probes.clear()
        for _ in range(500):
            running.gateway.health.suspect(instance, "its request failed", down=False)
            await asyncio.sleep(0.02)
        assert bad.probes[0] - suspected_s < 0.1  # the first at once
        assert 19 <= len(bad.probes) <= 22
        assert instance.up


BODIES = ("half a body", "200 MB", "endless", "a bomb", "drips")


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/models", name) for name in BAD_ANSWERS]
    + [("/health", name) for name in BAD_ANSWERS if name not in BODIES],
)
async def test_an_instance_that_cannot_be_asked_is_out_and_the_gateway_is_not(
    path: str, name: str
) -> None:
    async with beside_a_bad_one(path, BAD_ANSWERS[name]) as (_, bad, client):
        await asyncio.sleep(3)
        assert not bad.up
        assert (await reason_shown(client))["down_reason"].startswith(path)
        await serves(client, "good")


@pytest.mark.parametrize("name", BODIES)
async def test_the_body_of_health_says_nothing(name: str) -> None:
    async with beside_a_bad_one("/health", BAD_ANSWERS[name]) as (_, bad, _):
        await eventually(lambda: bad.up)


@pytest.mark.parametrize("name", [n for n in BAD_ANSWERS if n != "closed"])
async def test_an_instance_without_good_metrics_is_served(name: str) -> None:
    async with beside_a_bad_one("/metrics", BAD_ANSWERS[name]) as (_, bad, client):
        await eventually(lambda: bad.up and bool(bad.scrape_problem))
        assert (await reason_shown(client))["scrape_problem"].startswith("/metrics")
        assert bad.engine_kv_capacity_tokens is None
        await serves_any(client)


async def serves_any(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert answer.status_code == 200


async def test_where_the_configuration_names_the_models_nobody_has_to_list_them() -> None:
    pieces: list[bytes | None] = [plain(b"null")]
    async with beside_a_bad_one("/v1/models", pieces, model="m") as (_, bad, client):
        await eventually(lambda: bad.up)
        assert "/v1/models" in (await reason_shown(client))["scrape_problem"]


@pytest.mark.parametrize(
    "length", [b"1" + b"0" * 400, b"-1", b"1e400", b"0", b"true", b'"4096"', b"1.5", b"9" * 5000]
)
async def test_a_window_that_is_no_count_is_not_known(length: bytes) -> None:
    pieces: list[bytes | None] = [plain(MODELS_CARD % length)]
    async with beside_a_bad_one("/v1/models", pieces) as (_, bad, client):
        await eventually(lambda: bad.up)
        assert bad.max_model_len is None
        await serves_any(client)
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("number", ["1e400", "NaN", "-1", "1" * 400, "inf", "1e300", "x"])
async def test_metrics_of_no_sane_numbers_say_nothing(number: str) -> None:
    text = (
        f"vllm:kv_cache_usage_perc {number}\nvllm:num_requests_running {number}\n"
        f'vllm:cache_config_info{{block_size="{number}",num_gpu_blocks="{number}"}} 1\n'
    )
    pieces: list[bytes | None] = [plain(text.encode())]
    async with beside_a_bad_one("/metrics", pieces) as (running, bad, client):
        await eventually(lambda: bad.up)
        assert bad.engine_kv_capacity_tokens is None
        assert bad.engine_kv_usage in (None, 1.0)
        await serves_any(client)
        parse_metrics(await running.metrics())
        assert (await client.get("/admin/instances")).status_code == 200


async def test_megabytes_of_metrics_are_read_with_turns_for_others() -> None:
    """What matters is found, and the loop turns at least once for each 64 KB."""
    line = b'vllm:unknown{a="b"} 1\n'
    body = line * 300000 + RANKS.encode()
    assert len(body) > 6 << 20
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    told = health.metrics_of(await health._read_samples(body))
    counting.cancel()
    assert told.cache.capacity_tokens == 400 * 16
    assert turns >= len(body) // 65536


async def test_a_probe_that_fails_for_a_reason_of_our_own_counts_neither_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as (running, _, _):
        (instance,) = running.gateway.fleet.instances.values()
        asked = 0

        async def exhausted(self: InstancePool) -> None:
            nonlocal asked
            asked += 1
            raise InstanceError(Failure.LOCAL, "too many open files")

        monkeypatch.setattr(InstancePool, "connect", exhausted)
        monkeypatch.setattr(InstancePool, "take_idle", lambda _: None)
        await eventually(lambda: asked > 5)
        assert instance.up
        assert instance.failed_probes == 0
        running.gateway.fleet.mark_down(instance, "for the test")
        before = asked
        await eventually(lambda: asked > before + 5)
        assert not instance.up


def parse_metrics(text: str) -> None:
    """Raises where it is no exposition."""
    families = list(text_string_to_metric_families(text))
    assert len(families) > 10


async def test_counters_are_read_where_rows_of_observation_end() -> None:
    # Else what an engine counted between two scrapes would be of parts of rows.
    async with rig() as (running, client, _):
        fleet, looks, scrapes = running.gateway.fleet, [], []
        after_look, observe = fleet.on_look, fleet.scheduler.observe_cache
        assert after_look is not None

        def looked() -> None:
            looks.append(time.monotonic())
            after_look()

        def scraped(*args: Any) -> None:
            scrapes.append(time.monotonic())
            observe(*args)

        fleet.on_look = looked
        fleet.scheduler.observe_cache = scraped  # type: ignore[method-assign]
        body = {"model": "m", "stream": True, "fake": {"events": 250, "delay_s": 0.02}}
        monitor = running.gateway.health
        monitor._config = monitor._config.model_copy(update={"scrape_interval_s": 1.8})
        scrapes.clear()
        await client.post("/v1/chat/completions", json=body)
    assert len(looks) >= 4
    assert len(scrapes) >= 2
    for at_s in scrapes:
        assert min(at_s - look_s for look_s in looks if look_s < at_s) < 0.1


async def test_a_prefix_cache_is_known_from_the_start_and_no_longer_than_it_tells() -> None:
    fake = FakeInstance()
    fake.metrics = (
        'vllm:cache_config_info{enable_prefix_caching="True"} 1.0\n'
        "vllm:prefix_cache_queries_total 10000.0\nvllm:prefix_cache_hits_total 9000.0\n"
    )
    async with rig([fake]) as (running, client, _):

        async def shown() -> tuple[bool | None, float | None]:
            (row,) = (await client.get("/admin/instances")).json()["instances"]
            return row["prefix_caching"], row["cached_share"]

        assert await shown() == (True, pytest.approx(0.9))
        fake.metrics = ""
        snapshot = running.gateway.fleet.scheduler.members.snapshot
        await eventually(lambda: snapshot(InstanceId("i0")).hit_share is None)
        assert await shown() == (None, None)
        fake.metrics = NO_PREFIX_CACHE
        await eventually(lambda: snapshot(InstanceId("i0")).hit_share == 0)
        assert await shown() == (False, 0)
