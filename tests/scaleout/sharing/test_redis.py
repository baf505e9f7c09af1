"""Gateways that share through a real redis-server."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from benchmarks.clusters import PROFILES
from benchmarks.ports import free_port
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.request import Request
from hetero_gateway.core.sharing.exchange import Mode
from hetero_gateway.core.types import Outcome, Reject
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.fleet.instances import Fleet
from tests.fakes import certificates
from tests.fakes.redis import RedisServer, redis_server
from tests.fakes.sharing import SharingGateway, exchanging, fleet_of, sharing_config

pytestmark = pytest.mark.system

TTL_S = 1.0
# The machine may be busy: that is a second more, and no time-out of 50 ms.
LATE_S = 0.5
NAMES = "{hetero-gateway}:replicas"
SHARING = {"interval_s": 0.02, "ttl_s": TTL_S, "timeout_s": 1.0}


def config(url: str, *profiles: str, **changes: Any) -> GatewayConfig:
    return sharing_config(url, *(profiles or PROFILES), **SHARING | changes)


def gateways(
    count: int, settings: GatewayConfig
) -> contextlib.AbstractAsyncContextManager[tuple[SharingGateway, ...]]:
    return exchanging(*(SharingGateway(settings) for _ in range(count)))


async def until(condition: Any, within_s: float = 20.0) -> float:
    """Seconds until a condition holds."""
    begun_s = time.monotonic()
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - any state may be asked about
            await asyncio.sleep(0.005)
    return time.monotonic() - begun_s


@pytest.mark.parametrize("count", [2, 4])
async def test_a_trace_gets_the_picks_of_one_scheduler(server: RedisServer, count: int) -> None:
    """One event at a time, each seen by all before the next one."""
    settings = config(server.url, seed=3)
    one = fleet_of(settings)
    rng = np.random.default_rng(1)
    async with gateways(count, settings) as made:
        outstanding: list[tuple[SharingGateway, Dispatch, Dispatch]] = []
        picks: list[tuple[str, str]] = []
        now_s = time.monotonic()
        for i in range(80):
            now_s += 0.01
            if outstanding and rng.random() < 0.35:
                gateway, dispatch, same = outstanding.pop(int(rng.integers(len(outstanding))))
                gateway.fleet.scheduler.settle(dispatch, Outcome.COMPLETED, now_s)
                one.scheduler.settle(same, Outcome.COMPLETED, now_s)
            else:
                gateway = made[i % count]
                # Equal requests: the memory price takes the mean of what each gateway has met.
                # Short prompts: when one was sent is known as of its message, and this clock is not
                # the messages'.
                dispatch = gateway.place(4, 80.0, now_s)
                ticket = one.scheduler.place(Request("m", 4, 80.0), now_s)
                assert not isinstance(ticket, Reject)
                assert ticket.dispatch is not None
                picks.append((dispatch.instance_id, ticket.dispatch.instance_id))
                outstanding.append((gateway, dispatch, ticket.dispatch))
                assert _costs(gateway.fleet, now_s) == pytest.approx(_costs(one, now_s), rel=1e-3)
            want = len(outstanding)
            for each in made:
                await until(lambda e=each, n=want: e.in_flight() == n)
        assert len(picks) > 40
        assert all(mine == ones for mine, ones in picks)


def _costs(fleet: Fleet, now_s: float) -> list[float]:
    decision = fleet.scheduler.explain(Request("m", 64, 80.0), now_s)
    assert not isinstance(decision, Reject)
    return [row.estimates["cost_s"] for row in decision.explain()]


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_without_redis_decisions_go_on_and_are_exact_after(server, fault):
    async with gateways(2, config(server.url, timeout_s=0.05)) as (first, second):
        for _ in range(3):
            first.place()
        await until(lambda: second.in_flight() == 3)
        getattr(server, {"killed": "kill", "stopped": "stop"}[fault])()
        # A place is given in one call that awaits nothing, so that all that could hold a request up
        # is what else runs in the loop. Its longest hold is taken as CPU time: the rest of a wall
        # clock's is the machine's. (test_peers.py has the same in virtual time, over HTTP.)
        holds_s, failed = [], second.sharing.outcomes["failed"]
        end_s = time.monotonic() + TTL_S + LATE_S
        while time.monotonic() < end_s or second.sharing.mode is not Mode.LOCAL:
            cpu_s = time.thread_time()
            if len(holds_s) < 20:
                second.place(8, 8.0)
            await asyncio.sleep(0)
            holds_s.append(time.thread_time() - cpu_s)
        assert second.sharing.outcomes["failed"] > failed, "the store was tried meanwhile"
        assert max(holds_s) < 0.05
        assert second.sharing.mode is Mode.LOCAL
        assert second.in_flight() == 20, "its own, exactly"
        server.go_on() if fault == "stopped" else server.start()
        await until(lambda: first.sharing.mode is second.sharing.mode is Mode.SHARED)
        await until(lambda: first.in_flight() == second.in_flight() == 23)


async def test_news_come_through_the_channel_in_front_of_the_next_exchange(
    server: RedisServer,
) -> None:
    async with gateways(3, config(server.url, interval_s=4.0, ttl_s=30.0)) as made:
        # One exchange, in which those that came first hear of those that came last.
        await until(lambda: all(each.sharing.replicas == 2 for each in made))
        await asyncio.sleep(0.5)  # the channels are open
        for number in range(1, 4):
            made[0].place()
            for each in made:
                await until(lambda e=each, n=number: e.in_flight() == n)
        assert [each.sharing.news["heard"] for each in made] == [0, 3, 3]
        assert made[0].sharing.news["told"] == 3


async def test_a_user_without_the_channel_exchanges_all_the_same(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    with redis.Redis(port=server.port) as client:
        client.execute_command(
            *("ACL", "SETUSER", "joe", "on", ">hunter2", "~{hetero-gateway}:*", "resetchannels"),
            *("+@all", "-@dangerous"),
        )
    url = server.url.replace("redis://", "redis://joe@")
    settings = config(url, password_env="REDIS_PASSWORD", interval_s=0.5, ttl_s=30.0)
    async with gateways(2, settings) as (first, second):
        await until(lambda: first.sharing.replicas == second.sharing.replicas == 1)
        for number in range(1, 4):
            first.place()
            await until(lambda n=number: second.in_flight() == n)
        assert not second.sharing.news["heard"]
        assert first.sharing.mode is Mode.SHARED
    told = [r.message for r in caplog.records if "may not publish" in r.message]
    assert len(told) == 1


async def test_who_listens_does_so_again_after_redis_was_away(server: RedisServer) -> None:
    async with gateways(2, config(server.url)) as (first, second):
        await until(lambda: first.sharing.replicas == second.sharing.replicas == 1)
        server.kill()
        await until(lambda: first.sharing.mode is second.sharing.mode is Mode.LOCAL)
        server.start()
        heard = second.sharing.news["heard"]

        def heard_more() -> bool:
            first.place(8, 8.0)
            return second.sharing.news["heard"] > heard

        await until(heard_more)


async def test_who_ends_in_the_middle_of_an_exchange_says_good_bye(server: RedisServer) -> None:
    async with gateways(2, config(server.url, ttl_s=30.0)) as (first, second):
        first.place()
        await until(lambda: second.in_flight() == 1)
        server.stop()
        await asyncio.sleep(0.2)  # an exchange is on its way, for a second
        server.go_on()
        await first.sharing.stop()
        await until(lambda: second.in_flight() == 0, within_s=10)


async def test_flushed_keys_are_said_again_within_a_third_of_the_lease(
    server: RedisServer,
) -> None:
    async with gateways(2, config(server.url)) as (first, second):
        first.place()
        await until(lambda: second.in_flight() == 1)
        # Asked of Redis: if the next message is near, no replica sees that there was none.
        message = f"{{hetero-gateway}}:{first.sharing.name}"
        with redis.Redis(port=server.port) as client:
            client.flushall()
            took_s = await until(lambda: client.exists(message))
        assert took_s < TTL_S / 3 + LATE_S
        turns = second.sharing.outcomes["ok"]
        await until(lambda: second.sharing.outcomes["ok"] >= turns + 2)
        assert second.in_flight() == 1


async def test_names_of_the_dead_leave_the_set(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as client:
        client.sadd(NAMES, "d" * 16, "not a name", b"\xff" * 4000)
        async with gateways(1, config(server.url)) as (gateway,):
            own = {gateway.sharing.name.encode()}
            await until(lambda: client.smembers(NAMES) == own)


@pytest.mark.parametrize("binary", [False, True])
async def test_thousands_of_dead_names_hide_nobody_for_long(
    server: RedisServer, *, binary: bool
) -> None:
    """It took 5000 of them to hide the living for good."""
    with redis.Redis(port=server.port) as client:
        tail = b"\0\xff\r\n" if binary else b""
        client.sadd(NAMES, *(b"%016x" % n + tail for n in range(5000)))
        async with gateways(2, config(server.url, ttl_s=5.0)) as (first, second):
            turns = first.sharing.outcomes["ok"]
            await until(lambda: first.sharing.replicas == second.sharing.replicas == 1)
            first.place()
            await until(lambda: second.in_flight() == 1)
            # Whoever was found stays known: a view that comes and goes with the draw is none.
            for _ in range(20):
                await asyncio.sleep(0.02)
                assert (second.in_flight(), second.sharing.replicas) == (1, 1)
            # 128 at a turn, by each of two.
            await until(lambda: client.scard(NAMES) == 2)
            assert first.sharing.outcomes["ok"] - turns < 200


@pytest.mark.parametrize("kind", ["a string", "names too long to be read"])
async def test_a_set_of_names_that_cannot_be_read_is_begun_anew(server, kind):
    with redis.Redis(port=server.port) as client:
        async with gateways(2, config(server.url, ttl_s=5.0)) as (first, second):
            await until(lambda: first.sharing.replicas == second.sharing.replicas == 1)
            client.delete(NAMES)
            if kind == "a string":
                client.set(NAMES, "nonsense")
            else:
                client.sadd(NAMES, *(bytes([n]) * 3_000_000 for n in range(4)))
            failed = first.sharing.outcomes["failed"] + second.sharing.outcomes["failed"]
            await until(lambda: client.type(NAMES) == b"set" and client.scard(NAMES) == 2)
            await until(lambda: first.sharing.mode is second.sharing.mode is Mode.SHARED)
            first.place()
            await until(lambda: second.in_flight() == 1)
            failed = first.sharing.outcomes["failed"] + second.sharing.outcomes["failed"] - failed
            assert 1 <= failed < 10


async def test_values_of_other_kinds_and_sizes_hurt_nobody(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as client:
        client.sadd(NAMES, "a" * 16, "b" * 16, "c" * 16)
        client.rpush("{hetero-gateway}:" + "a" * 16, "a list")
        client.set("{hetero-gateway}:" + "b" * 16, b"x" * 50_000_000)
        client.set("{hetero-gateway}:" + "c" * 16, b"short")
        async with gateways(2, config(server.url, ttl_s=5.0)) as (first, second):
            first.place()
            await until(lambda: second.in_flight() == 1)
            assert second.sharing.mode is Mode.SHARED
            assert second.sharing.outcomes["rejected"] == 2, "each is looked at once"
            assert second.sharing.replicas == 1


async def test_a_flood_of_news_takes_a_small_share_of_a_core(server: RedisServer) -> None:
    async with gateways(2, config(server.url, ttl_s=5.0)) as (first, second):
        await until(lambda: first.sharing.replicas == second.sharing.replicas == 1)
        news = first.sharing.name + "x" * 200
        channel = "{hetero-gateway}:news"
        flood = await asyncio.create_subprocess_exec(
            *("redis-benchmark", "-p", str(server.port), "-n", "100000000", "-P", "200", "-q"),
            *("publish", channel, news),
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            await until(lambda: second.sharing.outcomes["rejected"] > 1000)
            turns, begun_s, cpu_s = (
                second.sharing.outcomes["ok"],
                time.monotonic(),
                time.thread_time(),
            )
            await asyncio.sleep(2.0)
            took_s = time.monotonic() - begun_s
            # A twentieth of a core for reading them and one for hearing them, at each of the two.
            assert (time.thread_time() - cpu_s) / took_s < 0.5
            assert second.sharing.outcomes["ok"] > turns
            assert second.sharing.mode is Mode.SHARED
        finally:
            flood.kill()
            await flood.wait()
        first.place()
        await until(lambda: second.in_flight() == 1)


async def test_messages_longer_than_a_short_one_come_whole(server: RedisServer) -> None:
    many = config(server.url, *[PROFILES[1]] * 800, ttl_s=5.0)
    async with gateways(2, many) as (first, second):
        await until(lambda: first.sharing.replicas == second.sharing.replicas == 1)
        for _ in range(800):
            first.place()
        loaded = sum(
            1 for i in first.fleet.instances if first.fleet.scheduler.members.table[i].in_flight
        )
        assert loaded * 112 > 2**16
        await until(lambda: second.in_flight() == 800)


async def test_a_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server("--requirepass", "hunter2") as server:
        monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
        async with gateways(2, config(server.url, password_env="REDIS_PASSWORD")) as (a, b):
            await until(lambda: a.sharing.replicas == b.sharing.replicas == 1)
        async with gateways(1, config(server.url)) as (alone,):
            assert alone.sharing.mode is Mode.LOCAL
            assert "hunter2" not in json.dumps(alone.sharing.describe())


async def test_over_tls(tmp_path: Path) -> None:
    files = certificates.issued(tmp_path, "server")
    tls_port = free_port()
    options = (
        *("--tls-port", str(tls_port), "--tls-cert-file", files["server"]),
        *("--tls-key-file", files["server.key"], "--tls-ca-cert-file", files["ca"]),
        *("--tls-auth-clients", "no"),
    )
    with redis_server(*options):
        url = f"rediss://127.0.0.1:{tls_port}"
        async with gateways(2, config(url, ca_file=files["ca"])) as (a, b):
            await until(lambda: a.sharing.replicas == b.sharing.replicas == 1)
        async with gateways(1, config(url)) as (alone,):
            assert alone.sharing.mode is Mode.LOCAL, "a certificate of nobody"


async def test_in_a_cluster_all_keys_are_on_one_node_which_is_found(tmp_path: Path) -> None:
    buses = [free_port(), free_port()]
    files = [tmp_path / name for name in "ab"]
    options = [
        ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-config-file", str(file))
        for bus, file in zip(buses, files, strict=True)
    ]
    with (
        redis_server(*options[0]) as a,
        redis_server(*options[1]) as b,
        redis.Redis(port=a.port) as first,
        redis.Redis(port=b.port) as second,
    ):
        first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        second.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", b.port, buses[1])
        await until(lambda: b"cluster_state:ok" in _info(first) and b"ok" in _info(second))
        # Whichever of the two a gateway is given.
        settings = config(a.url), config(b.url)
        async with gateways(1, settings[0]) as (x,), gateways(1, settings[1]) as (y,):
            await until(lambda: x.sharing.replicas == y.sharing.replicas == 1)


def _info(client: redis.Redis) -> bytes:
    told = client.execute_command("CLUSTER", "INFO")
    return told if isinstance(told, bytes) else str(told).encode()
