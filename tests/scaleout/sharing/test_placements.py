"""Gateways that share what they have sent, through a real redis-server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from hetero_gateway.core.request import keys_of
from hetero_gateway.core.types import PrefixKeys
from hetero_gateway.scaleout.sharing.log import NO_NUMBER, PlacementLog
from hetero_gateway.scaleout.sharing.placements import SharedPlacements
from tests.fakes.redis import RedisServer
from tests.fakes.running import FAST, SLOW, eventually
from tests.fakes.sharing import SharingGateway, exchanging, sharing_config

pytestmark = pytest.mark.system

STREAM, NAMES = "{hetero-gateway}:placements", "{hetero-gateway}:names"


def text(number: int) -> PrefixKeys:
    return keys_of([b"%d" % number + b"x" * 4000], 7)


def send(gateway: SharingGateway, number: int) -> None:
    gateway.settle(gateway.place(prefix=text(number)))


def made(server: RedisServer) -> SharingGateway:
    # A busy machine is no Redis that is away.
    return SharingGateway(sharing_config(server.url, FAST, SLOW, timeout_s=2.0))


def shared(gateway: SharingGateway) -> SharedPlacements:
    assert gateway.sharing.placements is not None
    return gateway.sharing.placements


@contextlib.asynccontextmanager
async def two(server: RedisServer) -> AsyncIterator[tuple[SharingGateway, SharingGateway]]:
    async with exchanging(made(server)) as (first,), exchanging(made(server)) as (second,):
        yield first, second


async def test_all_know_what_one_has_sent_and_who_starts_knows_it_at_once(
    server: RedisServer,
) -> None:
    async with two(server) as (first, second):
        assert shared(first).secret == shared(second).secret
        for number in range(10):
            send(first, number)
        await eventually(lambda: second.matched(text(9)) == first.matched(text(9)) > 0)
        async with exchanging(made(server)) as (late,):
            assert [late.matched(text(n)) for n in range(10)] == [
                first.matched(text(n)) for n in range(10)
            ]
    # All have gone, and one is back.
    async with exchanging(made(server)) as (again,):
        assert again.matched(text(3)) > 0
        assert shared(again).live


async def test_a_redis_that_comes_late_or_loses_all_brings_them_together(
    server: RedisServer,
) -> None:
    server.kill()
    async with two(server) as (first, second):
        assert shared(first).secret != shared(second).secret
        told: list[bytes] = []
        shared(first).on_secret = told.append
        shared(second).on_secret = told.append
        send(first, 1)
        assert not shared(first).live
        server.start()
        await eventually(lambda: shared(first).live and shared(second).live)
        assert shared(first).secret == shared(second).secret
        assert told == [shared(first).secret], "one of them has had it"
        send(first, 2)
        await eventually(lambda: second.matched(text(2)) > 0)
        with redis.Redis(port=server.port) as client:
            client.flushall()
        send(second, 3)
        await eventually(lambda: first.matched(text(3)) > 0)
        with redis.Redis(port=server.port) as client:
            assert client.get(NAMES) == shared(first).secret.hex().encode()
            assert 0 < client.ttl(STREAM) <= 3600


@pytest.mark.parametrize("key", [STREAM, NAMES])
async def test_what_is_no_log_is_taken_away(server: RedisServer, key: str) -> None:
    async with two(server) as (first, second):
        with redis.Redis(port=server.port) as client:
            client.delete(key)
            client.lpush(key, "x")
        number = 0
        # On a busy machine a text is not known there before the next one is sent.
        while not any(second.matched(text(n)) for n in range(1, number + 1)):
            number += 1
            send(first, number)
            await asyncio.sleep(0.1)
            assert number < 100


async def test_entries_of_others_are_bounded_and_checked(server: RedisServer) -> None:
    async with exchanging(made(server)) as (first,):
        with redis.Redis(port=server.port) as client:
            for entry in (b"x", b"\0" * 4096):
                client.xadd(STREAM, {"d": entry})
        await eventually(lambda: shared(first).counts["rejected"] == 2)
        with redis.Redis(port=server.port) as client:
            client.xadd(STREAM, {"d": b"x" * 3_000_000})  # longer than any reply may be
            await eventually(lambda: not client.exists(STREAM))
        send(first, 1)
        async with exchanging(made(server)) as (second,):
            await eventually(lambda: second.matched(text(1)) > 0)


async def test_the_log_is_read_in_pages_forwards_and_backwards(server: RedisServer) -> None:
    log = PlacementLog(sharing_config(server.url, FAST, timeout_s=2.0).scheduler, Path())
    assert await log.append([]) is None
    assert await log.after(NO_NUMBER) == ([], NO_NUMBER, NO_NUMBER, False)
    assert await log.before(None) == ([], NO_NUMBER, NO_NUMBER, False)
    sent = [b"%d" % number for number in range(300)]
    for start in range(0, 300, 10):
        await log.append(sent[start : start + 10])
    forwards, backwards = [], []
    last, more = NO_NUMBER, True
    while more:
        read = await log.after(last)
        forwards += read.entries
        last, more = read.last, read.more
    first = None
    for _ in range(4):
        read = await log.before(first)
        backwards += read.entries
        first = read.last
    assert forwards == backwards[::-1] == sent
    log.close()


async def test_without_the_scheduler_s_caches_nothing_is_shared(server: RedisServer) -> None:
    for changes in ({"prefix_cache": False}, {}):
        settings = sharing_config(server.url, FAST, placements=not not changes)
        scheduler = settings.scheduler.model_copy(update=changes)
        gateway = SharingGateway(settings.model_copy(update={"scheduler": scheduler}))
        assert gateway.sharing.placements is None


async def test_a_log_that_fails_leaves_each_with_what_it_knows(server: RedisServer) -> None:
    async with two(server) as (first, second):
        server.kill()
        send(first, 1)
        await eventually(lambda: bool(shared(first).problem))
        assert first.matched(text(1)) > 0
        assert second.matched(text(1)) == 0
