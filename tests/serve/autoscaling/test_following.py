"""How many instances the load needs, as a running gateway publishes it."""

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.planner.following import Follower, LoadSample, ScaledType
from hetero_gateway.planner.held_rates import RateQuestion
from hetero_gateway.serve.autoscaling import following_process
from hetero_gateway.serve.autoscaling.following_process import FollowingAnswer, Task
from tests.fakes.gateway_files import error_of
from tests.fakes.reloads import from_file
from tests.fakes.running import CHAT, FAST, SLOW, RunningGateway, chat, eventually, rig

TP4, TP1 = "V100-32GB-NVLink2/tp4", "V100-32GB-NVLink2/tp1"
TYPES = [
    {"model": "m", "profile": FAST, "min": 0, "max": 3},
    {"model": "m", "profile": SLOW, "min": 1, "max": 4},
]
FOLLOWING: dict[str, Any] = {"types": TYPES, "interval_s": 10, "hold_s": 60, "startup_s": 30}


async def in_a_thread(task: Task) -> FollowingAnswer:
    """Virtual time does not wait for other processes."""
    return await asyncio.to_thread(following_process.work, task)


def follow_here(running: RunningGateway, work: Callable[[Task], Any] = in_a_thread) -> None:
    assert running.gateway.following is not None
    running.gateway.following.work = work


def published(text: str, name: str = "desired_instances") -> dict[str, float]:
    """By accelerator and tensor parallelism."""
    found = re.findall(
        rf'^hetero_gateway_{name}{{accelerator="(.*?)",model="m",tensor_parallel="(.)"}} (\S+)$',
        text,
        re.MULTILINE,
    )
    return {f"{accelerator}/tp{t}": float(value) for accelerator, t, value in found}


async def test_it_is_off_unless_types_are_configured() -> None:
    async with rig(2) as (running, client, _):
        assert running.gateway.following is None
        assert (await client.get("/admin/following")).json() == {"models": []}
        assert "desired_instances" not in await running.metrics()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.system(virtual=True))])
async def test_more_load_wants_more_instances_and_less_wants_fewer_after_a_while(
    workers: int,
) -> None:
    async with rig(2, workers=workers, following=FOLLOWING) as (running, client, _):
        follow_here(running)
        await eventually(lambda: running.gateway.following.describe()[0]["reason"])
        # Both that are there are taken to be needed at first.
        assert published(await running.metrics()) == {TP4: 1, TP1: 1}
        assert sum(published(await running.metrics(), "ready_instances").values()) == 2
        for _ in range(8):
            body = chat("hello " * 50, stream=True, fake={"event_tokens": 100})
            await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(20)))
            await asyncio.sleep(1)
        await eventually(lambda: sum(published_now(running).values()) > 2)
        (row,) = (await client.get("/admin/following")).json()["models"]
        assert row["rate_per_s"] > 5
        assert row["problem"] is None
        assert {t["desired"] for t in row["types"]} != {None}
        await asyncio.sleep(400)
        assert published(await running.metrics()) == {TP4: 0, TP1: 1}


def published_now(running: RunningGateway) -> dict[str, float]:
    (row,) = running.gateway.following.describe()
    return {str(i): t["desired"] or 0 for i, t in enumerate(row["types"])}


async def test_a_failure_leaves_the_last_answer_and_is_counted() -> None:
    async def fails(task: Task) -> FollowingAnswer:
        raise HeteroGatewayError("the simulation took more than 180 s")

    async with rig(2, following=FOLLOWING) as (running, _, _):
        follow_here(running)
        await eventually(lambda: running.gateway.following.describe()[0]["reason"])
        before = published(await running.metrics())
        follow_here(running, fails)
        await asyncio.sleep(25)
        text = await running.metrics()
        assert published(text) == before
        assert "hetero_gateway_following_failures_total 2.0" in text
        (row,) = running.gateway.following.describe()
        assert row["problem"] == "the simulation took more than 180 s"


async def test_ranks_behind_one_address_are_one_instance() -> None:
    types = [TYPES[0] | {"min": 1, "data_parallel_ranks": 2}]
    async with rig(1, following=FOLLOWING | {"types": types}) as it:
        follow_here(it.running)
        fleet, roster = it.running.gateway.fleet, it.running.gateway.roster
        for instance in list(fleet.instances):
            roster.remove(instance)
        entry = {"id": "a", "base_url": it.fakes[0].url, "profile": FAST, "data_parallel_ranks": 2}
        for place in InstanceConfig.model_validate(entry).places():
            await roster.add(place)
        await eventually(lambda: it.running.gateway.following.describe()[0]["reason"])
        assert published(await it.running.metrics(), "ready_instances") == {TP4: 1}
        assert published(await it.running.metrics()) == {TP4: 1}


async def test_a_reload_takes_up_other_bounds_and_turns_it_off(tmp_path: Path) -> None:
    async with from_file(tmp_path, 2, following=FOLLOWING) as rig:
        running = rig.running
        follow_here(running)
        await eventually(lambda: running.gateway.following.describe()[0]["reason"])
        told = await rig.reload(following={"types": [TYPES[0], TYPES[1] | {"min": 3}]})
        assert told["settings"] == ["following.types"]
        await asyncio.sleep(20)
        assert published(await running.metrics())[TP1] == 3
        await rig.reload(following={"types": []})
        assert "desired_instances" not in await running.metrics()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"types": [TYPES[0]]}, "one type of 'm' needs a min of 1 or more"),
        ({"types": [TYPES[1] | {"max": 0}]}, "types.0.max"),
        ({"types": [TYPES[1] | {"min": 9}]}, "min: it is above max"),
        ({"types": [TYPES[1], TYPES[1]]}, "'m' has V100-32GB-NVLink2 with tensor parallelism 1 t"),
        ({"types": [TYPES[1] | {"profile": "no/such"}]}, "types.0.profile: no profile is named"),
        ({"types": [TYPES[1], TYPES[0] | {"price_per_hour_usd": 2}]}, "some of 'm' have a price"),
    ],
)
def test_what_cannot_be_followed_is_an_error_of_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    assert message in error_of(tmp_path, {"following": FOLLOWING | change})


@pytest.mark.slow
def test_another_process_gives_the_same_answer_and_its_failure_is_one_line() -> None:
    """In wall time, and without a gateway."""
    types = (ScaledType(("V100-32GB-NVLink2", 1), 1, 4),)
    sample = LoadSample(60.0, ((0.0, 0.0), (60.0, 3000.0)), 0, {types[0].key: 1})
    question = RateQuestion({types[0].key: load_profile(SLOW)}, [(300, 100)] * 30)
    task = Task(Follower(types), sample, question, None)
    answer = asyncio.run(following_process.work_aside(task))
    assert answer == following_process.work(task)
    assert answer.proposal.desired[types[0].key] > 1
    with pytest.raises(HeteroGatewayError, match="the simulation ended with 1: "):
        asyncio.run(following_process.work_aside(dataclasses.replace(task, sample=None)))
