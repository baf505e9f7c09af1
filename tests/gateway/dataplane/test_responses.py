"""Responses that others continue: they go where they were made, and their prompts are known."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.request import joined, keys_of
from hetero_gateway.core.types import InstanceId, PrefixKeys
from hetero_gateway.gateway.dataplane import responses
from hetero_gateway.gateway.dataplane.responses import Response, Responses
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated
from tests.fakes.running import RunningGateway, config_for, running_gateway
from tests.fakes.vllm import FakeInstance

PATH = "/v1/responses"
CONSTANTS = Constants(1.2e-4, 1e-3, 0, 8e-3, 1e-7, 3e-4, 0, 1.2e-2)
ENGINE = EmulatorSettings(
    Profile("GPU", "tiny", 1, CONSTANTS, 120_000, 64),
    models=("m",), store_responses=True, prompt_tokens_details=True,
)  # fmt: skip
LONG = "a long story " * 300


@asynccontextmanager
async def gateway(workers: int = 1, **sections: Any) -> AsyncIterator[RunningGateway]:
    """In front of two equal emulated instances."""
    async with emulated(ENGINE) as (one, _), emulated(ENGINE) as (other, _):
        fakes = [FakeInstance().at(url) for url in (one, other)]
        config = config_for(fakes, profiles=(None,), **sections)
        async with running_gateway(config, workers=workers) as running:
            yield running


async def ask(
    running: RunningGateway, text: str, previous: str | None = None, **more: Any
) -> httpx.Response:
    body = {"model": "m", "input": text, "max_output_tokens": 20, "ignore_eos": True, **more}
    if previous is not None:
        body["previous_response_id"] = previous
    url = f"http://127.0.0.1:{running.port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await client.post(PATH, json=body)


def instance_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-hetero-gateway-instance"]


def id_of(answer: httpx.Response) -> str:
    found: str = answer.text.partition('"id":"')[2].partition('"')[0]
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_continues_a_response_goes_where_it_was_made(workers: int, stream: bool) -> None:
    async with gateway(workers, scheduler={"policy": "round-robin"}) as running:
        first = [await ask(running, f"{i} {LONG}", stream=stream) for i in range(4)]
        homes = [instance_of(answer) for answer in first]
        assert set(homes) == {"i0", "i1"}
        latest = first
        for _ in range(2):
            latest = [
                await ask(running, "and then?", id_of(answer), stream=stream) for answer in latest
            ]
            assert [instance_of(answer) for answer in latest] == homes


@pytest.mark.parametrize("workers", [1, 2])
async def test_forty_of_forty_follow_ups_reach_their_instance(workers: int) -> None:
    async with gateway(workers) as running:
        first = await asyncio.gather(*(ask(running, f"{i} {LONG}") for i in range(40)))
        homes = [instance_of(answer) for answer in first]
        assert set(homes) == {"i0", "i1"}
        then = await asyncio.gather(*(ask(running, "and then?", id_of(a)) for a in first))
        assert [instance_of(answer) for answer in then] == homes


async def test_its_prompt_is_as_long_as_all_in_front_of_it_and_is_cached_there() -> None:
    async with gateway() as running:
        decisions = running.gateway.dataplane.decisions
        answer = await ask(running, LONG, instructions="be kind")
        usage = answer.json()["usage"]
        for _ in range(3):
            before = usage["total_tokens"]
            answer = await ask(running, "and then?", answer.json()["id"], instructions="be kind")
            usage = answer.json()["usage"]
            # What a template adds is not known.
            decision = next(iter(decisions.newest_first())).decision
            assert decision.request.prompt_tokens == pytest.approx(usage["input_tokens"], abs=8)
            assert usage["input_tokens"] > before
            match = decision.prefix.match_tokens[decision.choice.position]
            cached = usage["input_tokens_details"]["cached_tokens"]
            # Whole blocks of 16 alone, and the answer's text counts as long as its tokens.
            assert match == pytest.approx(cached, abs=40)
            assert match > 900
        # With other instructions nothing begins alike.
        answer = await ask(running, "and then?", answer.json()["id"], instructions="be brief")
        decision = next(iter(decisions.newest_first())).decision
        assert decision.request.prompt_tokens == pytest.approx(usage["total_tokens"], abs=20)
        assert decision.prefix is None
        caches = running.gateway.fleet.scheduler.caches
        assert caches.eta(InstanceId(instance_of(answer))) > 0.95


async def test_a_response_whose_instance_is_gone_is_not_found() -> None:
    async with gateway(scheduler={"policy": "round-robin"}) as running:
        answer = await ask(running, LONG)
        home, name = instance_of(answer), answer.json()["id"]
        running.gateway.roster.remove(InstanceId(home))
        lost = await ask(running, "and then?", name)
        assert lost.status_code == 404
        error = lost.json()["error"]
        assert error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id"
        assert error["type"] == "invalid_request_error"
        async with httpx.AsyncClient(base_url=running.url) as client:
            for path in (name, f"{name}/input_items"):
                asked = await client.get(f"{PATH}/{path}")
                assert asked.status_code == 404
                error = asked.json()["error"]
                assert (error["code"], error["param"]) == ("response_not_found", "response_id")
                assert "the instance that made it is gone" in error["message"]
        # An id that nobody has seen is the engine's to judge.
        never = await ask(running, "and then?", "resp_0")
        assert never.status_code == 404
        assert never.json()["error"]["param"] == "response_id"


async def test_a_response_whose_instance_is_down_may_come_back() -> None:
    async with gateway(scheduler={"policy": "round-robin"}) as running:
        answer = await ask(running, LONG)
        home = running.gateway.fleet.instances[InstanceId(instance_of(answer))]
        home.draining = True
        running.gateway.fleet.publish(home)
        refused = await ask(running, "and then?", answer.json()["id"])
        assert refused.status_code == 503
        assert home.id in refused.json()["error"]["message"]


# The table


def made(name: int, keys: PrefixKeys | None = None) -> Response:
    return Response(name.to_bytes(8, "little"), InstanceId("i"), 10, keys, 1)


def test_the_table_is_bounded_in_number_keys_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MOST_RESPONSES", 100)
    monkeypatch.setattr(responses, "_MOST_KEYS", 120)
    table = Responses()
    for i in range(1000):
        table.note(made(i), 0.0)
    assert len(table) == 100
    assert table.find((999).to_bytes(8, "little"), 1.0) is not None
    assert table.find((899).to_bytes(8, "little"), 1.0) is None
    keys = keys_of([b"x" * 1024 * 12], 7)
    for i in range(1000, 1050):
        table.note(made(i, keys), 2.0)
    assert len(keys.hashes) == 12
    assert len(table) == 10
    table.complete(table.find((1049).to_bytes(8, "little"), 2.0) or made(0), 9, 9)
    table.note(made(2000, keys), 3.0)
    assert len(table) == 9, "an answer is a key more"
    assert table.find((2000).to_bytes(8, "little"), 3.0 + 86_401) is None
    table.note(made(3000), 3.0 + 86_401)
    assert len(table) == 1


def test_what_was_used_lately_stays_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MOST_RESPONSES", 3)
    table = Responses()
    for i in range(3):
        table.note(made(i), 0.0)
    assert table.find((0).to_bytes(8, "little"), 1.0) is not None
    table.note(made(3), 1.0)
    assert table.find((1).to_bytes(8, "little"), 1.0) is None
    assert table.find((0).to_bytes(8, "little"), 1.0) is not None


def test_a_conversation_of_a_thousand_turns_has_few_keys() -> None:
    keys = keys_of([b"x" * 5000], 1)
    for turn in range(1000):
        keys = joined(keys, keys_of([b"y" * 300], turn))
        assert list(keys.ends) == sorted(set(keys.ends))
        assert keys.ends[-1] == keys.text_bytes
    assert keys.text_bytes == 5000 + 300 * 1000
    assert len(keys.hashes) == len(keys.ends) < 600
