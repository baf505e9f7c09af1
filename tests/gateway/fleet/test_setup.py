"""Set-ups that are hardly meant: warned of in the log and by ``status``, as instances say more."""

import asyncio
import json
import logging

import pytest

from hetero_gateway.cli import main
from tests.fakes.running import FAST, eventually, rig
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
