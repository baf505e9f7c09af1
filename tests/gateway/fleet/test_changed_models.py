"""A model that is exchanged behind an instance's address, while requests come."""

import asyncio
import json
import logging
import time
from collections import Counter

import pytest

from hetero_gateway.core.types import InstanceId
from tests.fakes.running import CHAT, FAST, chat, counted, rig
from tests.fakes.vllm import FakeInstance

HEALTH = {"probe_interval_s": 2, "scrape_interval_s": 5}  # as by default


def fakes(*models: tuple[str, ...]) -> list[FakeInstance]:
    made = [FakeInstance(each) for each in models]
    for fake in made:
        fake.checks_models = True
    return made


@pytest.mark.parametrize(("configured", "workers"), [(True, 1), (False, 2)])
async def test_a_model_that_is_exchanged_behind_an_address_is_right_within_two_seconds(
    configured: bool, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    there = fakes(("a",), ("a",), ("b",))
    options = {"profile": FAST} | ({"model": "a"} if configured else {})
    for fake in there:
        await fake.start()
    instances = [
        {"id": f"i{i}", "base_url": fake.url} | (options if i < 2 else {"profile": FAST})
        for i, fake in enumerate(there)
    ]
    statuses: Counter[int] = Counter()
    async with rig(there, instances=instances, health=HEALTH, workers=workers) as at:

        async def one(model: str, number: int) -> None:
            body = chat(f"{model} {number}", model=model, fake={"first_delay_s": 0.2})
            statuses[(await at.client.post(CHAT, json=body)).status_code] += 1

        async def load(seconds: float) -> None:
            end_s = time.monotonic() + seconds
            async with asyncio.TaskGroup() as tasks:
                while time.monotonic() < end_s:
                    for model in ("a", "b"):
                        tasks.create_task(one(model, statuses.total()))
                    await asyncio.sleep(0.05)

        running = asyncio.ensure_future(load(10))
        await asyncio.sleep(5)
        there[0].models = ("b",)
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(2)
        before = [fake.requests for fake in there]
        await running
        gained = [fake.requests - b for fake, b in zip(there, before, strict=True)]
        asked = Counter(json.loads(body)["model"] for body in there[0].bodies[before[0] :])
        assert statuses[200] >= 0.99 * statuses.total()
        assert "a" not in asked
        if not configured:  # the other one's load is shared
            assert asked["b"] > 0.2 * gained[2]
        lines = [line for line in caplog.messages if "no longer has" in line]
        assert lines == ["instance i0 no longer has 'a': its models are read again"]
        text = await at.running.metrics()
        assert 'upstream_errors_total{backend="i0",reason="model_gone"}' in text
        assert counted(text, "retries_total") <= 20


async def test_the_last_one_that_had_it_says_so_itself_and_other_404s_pass() -> None:
    (there,) = fakes(("a",))
    async with rig([there], profiles=(FAST,), health=HEALTH) as at:
        there.models = ("b",)
        answer = await at.client.post(CHAT, json=chat(model="a"))
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "NotFoundError"  # the engine's own
        await asyncio.sleep(1)
        answer = await at.client.post(CHAT, json=chat(model="a"))
        assert answer.json()["error"]["code"] == "model_not_found"  # and the gateway's
        assert (await at.client.post(CHAT, json=chat(model="b"))).status_code == 200
        plain = {"status": 404, "body": '{"detail":"Not Found"}'}
        answer = await at.client.post(CHAT, json=chat(model="b", fake=plain))
        assert (answer.status_code, answer.text) == (404, '{"detail":"Not Found"}')
        assert at.running.gateway.fleet.instances[InstanceId("i0")].models == {"b"}


async def test_one_that_lists_what_it_does_not_have_is_asked_for_it_again_and_others_help() -> None:
    there = fakes(("a",), ("a",))
    async with rig(there, profiles=(FAST,), health=HEALTH) as at:
        there[0].models_body = json.dumps({"data": [{"id": "a"}]}).encode()
        there[0].models = ()
        answers = []
        for number in range(40):
            answers.append(await at.client.post(CHAT, json=chat(str(number), model="a")))
            await asyncio.sleep(0.7)
        assert {answer.status_code for answer in answers} == {200}
        assert at.running.gateway.fleet.instances[InstanceId("i0")].models == {"a"}
