"""Liveness from traffic: instances that freeze, and those whose probes alone are late."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from tests.fakes.running import CHAT, FAST, Rig, chat, rig

EQUAL = (FAST,)
HEALTH = {"probe_interval_s": 2, "probe_timeout_s": 2}  # as by default


@dataclass
class Clients:
    """So many, each with one request after the other. ``begun``: when, and how long each took."""

    at: Rig
    stream: bool
    fake: dict[str, float]
    statuses: list[int] = field(default_factory=list)
    took_s: list[tuple[float, float]] = field(default_factory=list)

    async def run(self, count: int, seconds: float) -> None:
        self.end_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self._one(number))

    async def _one(self, number: int) -> None:
        await asyncio.sleep(0.01 * number)
        while (began_s := time.monotonic()) < self.end_s:
            body = chat(f"of client {number}", fake=self.fake, stream=self.stream)
            async with self.at.client.stream("POST", CHAT, json=body) as answer:
                parts = answer.aiter_raw()
                await anext(parts)
                self.took_s.append((began_s, time.monotonic() - began_s))
                async for _ in parts:
                    pass
            self.statuses.append(answer.status_code)


@pytest.mark.parametrize(
    ("stream", "clients", "workers"),
    [(True, 4, 2), (False, 4, 1), (True, 16, 1), (False, 24, 2)],
)
async def test_a_frozen_instance_gets_hardly_any_requests_and_none_of_them_waits(
    clients: int, stream: bool, workers: int
) -> None:
    fake = {"events": 10, "delay_s": 0.08, "first_delay_s": 0.1 if stream else 0.8}
    async with rig(2, profiles=EQUAL, health=HEALTH, workers=workers) as at:
        load = Clients(at, stream, fake)
        running = asyncio.ensure_future(load.run(clients, 20))
        await asyncio.sleep(5.3)
        before, frozen_s = [fake.requests for fake in at.fakes], time.monotonic()
        at.fakes[0].runs.clear()
        await asyncio.sleep(10)
        at.fakes[0].runs.set()
        await asyncio.sleep(2)
        touched, others = (f.requests - b for f, b in zip(at.fakes, before, strict=True))
        await running
        waits = [took for began, took in load.took_s if frozen_s <= began < frozen_s + 12]
        assert touched < 0.05 * (touched + others)
        assert max(waits) <= 3
        assert set(load.statuses) == {200}
        assert at.fakes[0].requests - before[0] > touched  # it is back


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("late", [1, 2])
async def test_while_requests_are_answered_a_late_health_takes_nobody_out(
    late: int, stream: bool
) -> None:
    async with rig(2, profiles=EQUAL, health=HEALTH) as at:
        for fake in at.fakes[:late]:
            fake.health_delay_s = 4
        load = Clients(at, stream, {"events": 5, "delay_s": 0.2, "first_delay_s": 1})
        running = asyncio.ensure_future(load.run(8, 30))
        await asyncio.sleep(25)
        up = [instance.up for instance in at.running.gateway.fleet.instances.values()]
        await running
        assert set(load.statuses) == {200}
        assert sum(fake.requests for fake in at.fakes) == len(load.statuses)
        if stream:  # others are heard of less often than they are probed, where few are there
            assert up == [True, True]


async def test_where_all_are_down_by_their_probes_alone_requests_go_on() -> None:
    async with rig(3, profiles=EQUAL, health=HEALTH) as at:
        for fake in at.fakes[:2]:
            fake.health_delay_s = 4
        await asyncio.sleep(20)
        instances = list(at.running.gateway.fleet.instances.values())
        assert [instance.up for instance in instances] == [False, False, True]
        at.fakes[2].health_delay_s = 4
        await asyncio.sleep(20)
        assert all(instance.up for instance in instances)
        statuses = []
        for number in range(40):
            await asyncio.sleep(0.7)
            statuses.append((await at.client.post(CHAT, json=chat(str(number)))).status_code)
        assert statuses == [200] * 40
        at.fakes[2].health_delay_s = 0  # one is well again, and the others have to wait for that
        await asyncio.sleep(20)
        assert [instance.up for instance in instances] == [False, False, True]
        await at.fakes[2].kill()
        await asyncio.sleep(10)
        assert [instance.up for instance in instances] == [True, True, False]


async def test_one_alone_that_hangs_with_its_requests_is_down() -> None:
    async with rig(1, profiles=EQUAL, health=HEALTH) as at:
        at.fakes[0].runs.clear()
        await asyncio.sleep(20)
        (instance,) = at.running.gateway.fleet.instances.values()
        assert instance.up
        hanging = asyncio.ensure_future(at.client.post(CHAT, json=chat("one")))
        await asyncio.sleep(10)
        assert not instance.up
        assert (await at.client.post(CHAT, json=chat("two"))).status_code == 503
        at.fakes[0].runs.set()
        assert (await hanging).status_code == 200
        await asyncio.sleep(5)
        assert instance.up


@pytest.mark.parametrize("profiles", [EQUAL, (None,)])
@pytest.mark.parametrize("fake", [
    {"events": 30, "delay_s": 1.5, "first_delay_s": 6},  # a slow engine, whatever its profile says
    {"events": 10, "delay_s": 0.2, "first_delay_s": 9},
])  # fmt: skip
async def test_an_engine_that_is_slow_is_not_taken_for_frozen_for_long(
    fake: dict[str, float], profiles: tuple[str | None, ...]
) -> None:
    async with rig(2, profiles=profiles, health=HEALTH) as at:
        load = Clients(at, True, fake)
        await load.run(6, 150)
        assert set(load.statuses) == {200}
        assert at.fakes[0].requests + at.fakes[1].requests == len(load.statuses)  # none moved
        ejections = at.running.gateway.metrics.ejections
        assert sum(ejections.values()) <= 10
