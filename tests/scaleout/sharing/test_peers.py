"""Two gateways and a store that works, hangs, fails, forgets or holds nonsense."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from hetero_gateway.core.sharing.exchange import Mode
from hetero_gateway.core.sharing.message import Message, pack
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import EngineMetrics
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.scaleout.sharing.node import StoreError
from hetero_gateway.scaleout.sharing.store import RedisStore
from tests.fakes.running import FAST, SLOW, rig
from tests.fakes.sharing import SharingGateway, exchanging, sharing_config

TTL_S, INTERVAL_S, TIMEOUT_S, NEWS_S = 3.0, 0.05, 0.05, 0.005


class Memory:
    """What a Redis holds: values that run out."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, float]] = {}
        self.fault = ""  # "hangs" or "refuses"
        self.tries: list[float] = []
        self.listeners: dict[str, Callable[[str, bytes], None]] = {}

    def at(self, name: str) -> "MemoryStore":
        return MemoryStore(self, name)

    async def answer(self) -> None:
        if self.fault == "hangs":
            await asyncio.sleep(TIMEOUT_S)
        if self.fault:
            raise StoreError(f"it {self.fault}")


class MemoryStore:
    """One replica's place in it."""

    def __init__(self, memory: Memory, name: str) -> None:
        self._memory = memory
        self._name = name

    async def exchange(self, value: bytes | None) -> Mapping[str, bytes]:
        memory, now_s = self._memory, time.monotonic()
        memory.tries.append(now_s)
        await memory.answer()
        if value is not None:
            memory.values[self._name] = (value, now_s + TTL_S)
        return {
            name: told
            for name, (told, until_s) in memory.values.items()
            if name != self._name and until_s > now_s
        }

    async def tell(self, news: bytes) -> None:
        await self._memory.answer()
        for name, hear in self._memory.listeners.items():
            if name != self._name:
                hear(self._name, news)

    async def listen(self, hear: Callable[[str, bytes], None]) -> None:
        self._memory.listeners[self._name] = hear
        try:
            await asyncio.Event().wait()
        finally:
            del self._memory.listeners[self._name]

    async def leave(self) -> None:
        self._memory.values.pop(self._name, None)


SETTINGS = sharing_config("redis://unused", FAST, SLOW)
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
# What a decision has of both instances when nothing is in flight.
NOTHING = {"i0": 0, "i1": 0}


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Memory, SharingGateway, SharingGateway]]:
    memory = Memory()
    first, second = (SharingGateway(SETTINGS, memory.at(n * 16), n * 16) for n in "01")
    async with exchanging(first, second):
        yield memory, first, second


async def test_a_load_is_seen_by_the_other_within_two_intervals_and_goes_as_fast() -> None:
    pumps = []
    async with two() as (_, first, second):
        second.sharing.on_change = lambda: pumps.append(None)
        dispatches = [first.place() for _ in range(5)]
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert second.seen() == first.seen() != NOTHING
        assert pumps
        assert second.sharing.mode is Mode.SHARED
        described = second.sharing.describe()
        assert described["other_replicas"] == 1
        assert sum(i["in_flight"] for i in described["others"].values()) == 5
        for dispatch in dispatches:
            first.settle(dispatch)
        pumps.clear()
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert second.seen() == NOTHING
        assert pumps, "who waits there may have room now"
        assert second.sharing.describe()["others"] == {}


async def test_where_a_request_went_is_news_at_once() -> None:
    async with two() as (_, first, second):
        await asyncio.sleep(2.5 * INTERVAL_S)  # both know of each other, and nothing is due
        dispatch = first.place()
        await asyncio.sleep(0.001)
        assert second.seen() == first.seen() != NOTHING
        assert (first.sharing.news["told"], second.sharing.news["heard"]) == (1, 1)
        # Its end is no news: it comes with the next exchange, though nothing differs from the last.
        first.settle(dispatch)
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert second.seen() == NOTHING


async def test_news_come_a_few_at_a_time() -> None:
    async with two() as (_, first, second):
        await asyncio.sleep(2.5 * INTERVAL_S)
        for _ in range(100):
            first.place()
            await asyncio.sleep(NEWS_S / 20)
        await asyncio.sleep(NEWS_S)
        assert second.seen() == first.seen()
        assert 3 <= first.sharing.news["told"] <= 6


async def test_exchanges_that_take_long_come_seldom_and_news_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two() as (_, first, second):
        cpu_s, say = [0.0], first.sharing._exchange.say

        def slowly(now_s: float) -> Message | None:
            cpu_s[0] += 0.02
            return say(now_s)

        monkeypatch.setattr(time, "process_time", lambda: cpu_s[0])
        monkeypatch.setattr(first.sharing._exchange, "say", slowly)
        await asyncio.sleep(1.0)
        before = first.sharing.outcomes["ok"]
        for number in range(1, 41):
            first.place()
            await asyncio.sleep(0.05)
            assert second.in_flight() == number
        # 20 ms each and a twentieth of a core: 2.5 a second.
        assert 4 <= first.sharing.outcomes["ok"] - before <= 6


async def test_who_is_alone_has_nobody_to_tell() -> None:
    async with two() as (memory, first, second):
        await second.sharing.stop()
        await asyncio.sleep(2.1 * INTERVAL_S)
        first.place()
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert not first.sharing.news
        # Who has left is not heard any more, whatever is still on its way.
        memory.listeners[first.sharing.name]("1" * 16, pack(message_of(first)))
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert first.sharing.replicas == 0
        assert not first.sharing.news


def message_of(gateway: SharingGateway) -> Message:
    news = gateway.sharing._exchange.say_news(gateway.fleet.instances, time.monotonic())
    assert news is not None
    return news


async def test_news_that_make_no_sense_or_are_too_many_harm_nobody() -> None:
    async with two() as (memory, first, second):
        await asyncio.sleep(2.5 * INTERVAL_S)
        hear = memory.listeners[second.sharing.name]
        for _ in range(10_000):
            hear(first.sharing.name, b"nonsense")
        first.place()
        await asyncio.sleep(3 * INTERVAL_S)
        assert second.seen() == first.seen()
        assert second.sharing.outcomes["rejected"] == 4096
        assert second.sharing.mode is Mode.SHARED


async def test_no_request_waits_for_a_redis_that_says_nothing() -> None:
    """By virtual time, which passes only while somebody waits: a real client of a silent socket."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        # Tried all the time, and each try takes half a second.
        scheduler = {"shared": url, "sharing": {"interval_s": 0.01, "timeout_s": 0.5}}
        async with rig(2, scheduler=scheduler) as (_, client, _):
            waits_s = []
            for _ in range(40):
                began_s = time.monotonic()
                answer = await client.post("/v1/chat/completions", json=BODY)
                waits_s.append(time.monotonic() - began_s)
                assert answer.status_code == 200
                await asyncio.sleep(0.05)
            told = (await client.get("/admin/instances")).json()["sharing"]
            assert told["problem"].endswith(": no answer in time")
            assert max(waits_s) < 0.05, "tries took 0.5 s each, in a task of their own"


async def test_who_ends_in_order_takes_its_load_along() -> None:
    async with two() as (_, first, second):
        first.place()
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert second.sharing.replicas == 1
        await first.sharing.stop()
        await asyncio.sleep(1.1 * INTERVAL_S)
        assert second.sharing.replicas == 0
        assert second.seen() == NOTHING


async def test_who_is_killed_is_gone_with_its_lease() -> None:
    async with two() as (_, first, second):
        first.place()
        await asyncio.sleep(2.1 * INTERVAL_S)
        for task in first.sharing._tasks:
            task.cancel()
        await asyncio.sleep(TTL_S / 2)
        assert second.in_flight() == 1
        await asyncio.sleep(TTL_S / 2 + 2 * INTERVAL_S)
        assert second.in_flight() == 0


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
async def test_without_the_store_a_gateway_decides_alone_and_is_exact_again_after(fault, caplog):
    async with two() as (memory, first, second):
        dispatch = first.place()
        await asyncio.sleep(2.1 * INTERVAL_S)
        memory.fault = fault
        await asyncio.sleep(0.5)
        assert second.sharing.mode is Mode.STALE
        assert second.in_flight() == 1, "the last view is kept for the lease"
        first.settle(dispatch)
        more = [first.place() for _ in range(3)]
        await asyncio.sleep(TTL_S)
        assert second.sharing.mode is Mode.LOCAL
        assert second.in_flight() == 0
        assert second.sharing.describe()["problem"] == f"it {fault}"
        before = len(memory.tries)
        await asyncio.sleep(10)
        assert len(memory.tries) - before <= 2 * 11, "it is tried once a second"
        # It comes back as an empty one.
        memory.fault, memory.values = "", {}
        await asyncio.sleep(1.0 + 3 * INTERVAL_S)
        assert second.sharing.mode is Mode.SHARED
        assert second.seen() == first.seen()
        assert second.in_flight() == len(more)
        told = [r.message for r in caplog.records if "scheduler.shared" in r.message]
        assert sum("deciding with this gateway's own load" in line for line in told) == 2
        assert sum("answers again" in line for line in told) == 2


async def test_a_store_that_swallows_a_cancellation_keeps_no_gateway_from_ending() -> None:
    class Stubborn(MemoryStore):
        cancelled = entered = 0

        async def exchange(self, value: bytes | None) -> Mapping[str, bytes]:
            self.entered += 1
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.cancelled += 1
            return {}

    store = Stubborn(Memory(), "0" * 16)
    gateway = SharingGateway(SETTINGS, store, "0" * 16)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        await gateway.sharing.start(tasks)
        while store.entered < 2:  # noqa: ASYNC110 - it is asked for by nobody else
            await asyncio.sleep(0.001)
        await gateway.sharing.stop()
    assert store.cancelled == 1


async def test_what_is_no_message_is_counted_and_the_others_go_on() -> None:
    async with two() as (memory, first, second):
        memory.values["f" * 16] = (b"nonsense", 1e12)
        first.place()
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert second.in_flight() == 1
        rejected = second.sharing.outcomes["rejected"]
        assert rejected == 1, "the same nonsense is looked at once"
        assert second.sharing.mode is Mode.SHARED


async def test_instances_that_come_and_go_are_followed() -> None:
    async with two() as (_, first, second):
        first.place()
        await asyncio.sleep(2.1 * INTERVAL_S)
        (where,) = [i for i, n in second.seen().items() if n]
        again = second.fleet.instances[InstanceId(where)].config
        second.fleet.remove(InstanceId(where))
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert second.sharing.unmatched == 1
        second.fleet.admit(second.fleet.build(again))
        second.fleet.mark_up(second.fleet.instances[InstanceId(where)])
        await asyncio.sleep(2.1 * INTERVAL_S)
        assert second.sharing.unmatched == 0
        assert second.seen()[where] == 1


async def test_what_a_removed_instance_reports_is_nothing() -> None:
    async with two() as (_, first, _second):
        assert first.fleet.on_scrape is not None
        first.fleet.remove(InstanceId("i1"))
        for told in (None, EngineMetrics(), EngineMetrics(running=3.0, waiting=0.0)):
            first.fleet.on_scrape(InstanceId("i1"), told)
            first.fleet.on_scrape(InstanceId("i0"), told)
    assert first.fleet.on_scrape is None


async def test_a_gateway_whose_redis_is_not_there_serves_and_says_so() -> None:
    async with rig(2, scheduler={"shared": "redis://127.0.0.1:1"}) as (running, client, _):
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        sharing = (await client.get("/admin/instances")).json()["sharing"]
        assert sharing["mode"] == "local"
        assert "127.0.0.1" in sharing["problem"]
        text = await running.metrics()
        assert 'hetero_gateway_sharing_mode{mode="local"} 1.0' in text
        assert "hetero_gateway_sharing_replicas 0.0" in text
        assert 'hetero_gateway_sharing_exchanges_total{outcome="failed"}' in text
    async with rig() as (alone, _, _):
        assert "hetero_gateway_sharing" not in await alone.metrics()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://:hunter2@h", "password_env"),
        ("redis://joe:hunter2@h:1", "password_env"),
        ("http://h", "redis://HOST"),
        ("redis://", "redis://HOST"),
        ("redis://h?password=hunter2", "query"),
        ("redis://h/name", "database number"),
        ("redis://h:99999", "not a URL"),
    ],
)
def test_a_url_that_cannot_be_is_refused_and_never_quoted(url, problem, tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(f"scheduler: {{shared: '{url}'}}\n")
    with pytest.raises(ConfigError, match=problem) as caught:
        load_gateway_config(path)
    assert "hunter2" not in str(caught.value)
    assert "scheduler.shared" in str(caught.value)


def test_a_password_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS.scheduler
    sharing = settings.sharing.model_copy(update={"password_env": "NO_SUCH_PASSWORD"})
    monkeypatch.delenv("NO_SUCH_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_PASSWORD is not set"):
        RedisStore(settings.model_copy(update={"sharing": sharing}), Path(), "0" * 16)
