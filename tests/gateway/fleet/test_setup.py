"""Set-ups that are hardly meant: warned of in the log and by ``status``, as instances say more."""

import asyncio
import json
import logging
import re

import pytest

from hetero_gateway.cli import main
from hetero_gateway.core.types import InstanceId
from tests.fakes.running import FAST, RunningGateway, eventually, rig
from tests.fakes.vllm import FakeInstance, fake_instances

OTHER = "instance i0: its profile is of Llama-3-8B, and it serves qwen-14b"
TWICE = "instance again: it has the address of i0: one server would be counted as two"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.endswith("fleet.setup")]


async def test_a_profile_of_another_model_is_seen_when_the_instance_says_what_it_serves(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rig([FakeInstance(("qwen-14b",))], profiles=(FAST,)) as (running, *_):
        assert logged(caplog) == [OTHER]
        assert await asyncio.to_thread(main, ["status", running.url]) == 0
        assert f"warning: {OTHER}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("root", "odd"), [("/models/Qwen2.5-14B-Instruct", True), ("/models/Meta-Llama-3-8B", False)]
)
async def test_behind_an_alias_the_checkpoint_is_looked_at(
    root: str, odd: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeInstance(("chat",))
    fake.models_body = json.dumps({"data": [{"id": "chat", "root": root}]}).encode()
    async with rig([fake], profiles=(FAST,)):
        said = f"instance i0: its profile is of Llama-3-8B, and it serves {root}"
        assert logged(caplog) == [said] * odd


async def test_a_warning_comes_with_a_change_once_and_goes_with_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig([FakeInstance(("llama-3-8b",))], profiles=(FAST,)) as (_, client, fakes):

        async def warnings() -> list[str]:
            return (await client.get("/admin/instances")).json()["warnings"]

        assert await warnings() == logged(caplog) == []
        twin = {"id": "again", "base_url": fakes[0].url + "/"}
        await client.post("/admin/instances", json=twin)
        assert await warnings() == [TWICE]
        await eventually(lambda: logged(caplog) == [TWICE])
        other = twin | {"id": "x", "base_url": "http://127.0.0.1:1"}
        await client.post("/admin/instances", json=other)
        await asyncio.sleep(60)
        assert logged(caplog) == [TWICE]
        await client.delete("/admin/instances/again")
        assert await warnings() == []


async def test_a_configured_model_that_the_server_does_not_list_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with fake_instances(1, models=("served",)) as fakes:
        wrong = {"id": "i0", "base_url": fakes[0].url, "model": "wanted"}
        async with rig(fakes, instances=[wrong]):
            said = "instance i0: its server does not list wanted; it lists served"
            assert logged(caplog) == [said]


async def test_a_gateway_without_instances_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(0):
        assert logged(caplog) == ["there are no instances: every request gets an error"]


def told_of(caplog: pytest.LogCaptureFixture, *parts: str) -> list[tuple[str, bool]]:
    """Lines of the fleet with one of these, and whether each is a warning."""
    rows = [r for r in caplog.records if "gateway.fleet" in r.name]
    said = [(r.getMessage(), r.levelno == logging.WARNING) for r in rows]
    return [each for each in said if any(part in each[0] for part in parts)]


async def problems(running: RunningGateway) -> set[str]:
    """By the metric."""
    found = re.findall(
        r'hetero_gateway_instance_problem\{backend="i0",problem="(\w+)"\} 1\.0\n',
        await running.metrics(),
    )
    return set(found)


async def test_what_cannot_be_read_is_logged_once_and_once_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with rig([FakeInstance(("m",))]) as (running, _, fakes):
        instance = next(iter(running.gateway.fleet.instances.values()))
        assert await problems(running) == set()
        good = fakes[0].metrics
        fakes[0].metrics_status = 500
        await eventually(lambda: "metrics_unreadable" in instance.problems)
        await asyncio.sleep(60)
        assert await problems(running) == {"metrics_unreadable"}
        fakes[0].metrics_status = 200
        fakes[0].metrics = good
        await eventually(lambda: not instance.problems)
        await asyncio.sleep(60)
        assert await problems(running) == set()
    assert told_of(caplog, "/metrics") == [
        ("instance i0: /metrics answered 500; what the gateway knows of it is out of date", True),
        ("instance i0: /metrics can be read again", False),
    ]


async def test_another_model_and_an_odd_speed_are_a_metric_and_a_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with rig([FakeInstance(("qwen-14b",))], profiles=(FAST,)) as (running, _, fakes):
        assert await problems(running) == {"other_model"}
        fakes[0].models = ("llama-3-8b",)
        await eventually(lambda: not next(iter(running.gateway.fleet.instances.values())).problems)
        setup, fleet = running.gateway.setup, running.gateway.fleet
        members = fleet.scheduler.members
        state, slowness = members.table[InstanceId("i0")], members.slowness[InstanceId("i0")]
        for speed, odd in (
            (1.9, False), (4.0, False), (1.0, False), (4.0, False), (4.0, True), (4.5, True),
            (1.7, True), (1.2, False), (0.3, False), (0.3, True), (1.0, False),
        ):  # fmt: skip
            state.speed = speed
            for _ in range(5):
                slowness.look(1.0, 1.0 / speed, 0.0)
            setup.look_at_speeds()
            assert (await problems(running) == {"speed"}) is odd, speed
        state.speed = 1.0
    over = ("instance i0 is as fast as its profile says again", False)
    lines = told_of(caplog, "steps take", "as fast as")
    assert [lines[1], lines[3]] == [over, over]
    assert lines[0][0].startswith("instance i0: its steps take 4 times as long as its profile says")
    fast = "instance i0: its steps take 0.3 times as long as its profile says"
    assert lines[2][0].startswith(fast)
    assert told_of(caplog, "resolved: ") == [(f"resolved: {OTHER}", False)]
