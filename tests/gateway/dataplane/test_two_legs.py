"""Requests that one instance computes and another answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS, MESSAGES, RESPONSES
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.profile_file import profile_document, write_profile_file
from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.emulator.transfer_settings import KVTransferSettings, read_config
from tests.fakes.between import Between, with_parameters
from tests.fakes.emulated import emulated
from tests.fakes.legs import ANSWERS, PROMPTS
from tests.fakes.running import RunningGateway, eventually, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

# Beside a pair, one that is slow.
SLOW = Constants(p1=2e-2, p2=0, p3=0, p4=0.01, p5=0, p6=0, p7=0, p8=2.0)
TOKENS, BLOCKS = 800, 400
TEXT = " fox" * TOKENS
PATHS = (CHAT_COMPLETIONS, COMPLETIONS, MESSAGES, RESPONSES)
TRANSFER = {"connector": "NixlConnector", "gbit_per_s": 100, "start_s": 0.001}
# What an instance says that has computed a prompt.
HANDED = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
    "remote_port": 5600, "remote_num_tokens": 10,
}  # fmt: skip
CHOICES = [{"index": 0, "message": {"content": "x"}, "finish_reason": "length"}]
COMPUTED = {
    "choices": CHOICES, "usage": {"prompt_tokens": 10}, "kv_transfer_params": HANDED
}  # fmt: skip


def profile(constants: Constants, first_token_s: float = 0.0) -> Profile:
    return Profile("GPU", "tiny", 1, constants, BLOCKS * 16, 16, first_token_s=first_token_s)


class Split(NamedTuple):
    running: RunningGateway
    client: httpx.AsyncClient

    async def results(self) -> dict[str, int]:
        found = {}
        for line in (await self.running.metrics()).splitlines():
            if line.startswith("hetero_gateway_handovers_total{"):
                result, _, count = line.partition('"')[2].partition('"} ')
                found[result] = int(float(count))
        return {result: count for result, count in found.items() if count}


@asynccontextmanager
async def split(
    folder: Path,
    urls: Sequence[str],
    kinds: Sequence[Constants],
    first_token_s: float = 0.0,
    **sections: Any,
) -> AsyncIterator[Split]:
    """A gateway over these, of which all but those that are slow can hand over."""
    rows = []
    for i, (url, constants) in enumerate(zip(urls, kinds, strict=True)):
        file = folder / f"{i}.yaml"
        write_profile_file(
            file, profile_document(profile(constants, first_token_s), {"how": "derived"})
        )
        row = {"id": f"i{i}", "base_url": url, "profile": str(file), "model": "m"}
        rows.append(row if constants is SLOW else row | {"kv_transfer": TRANSFER})
    document = {
        "server": {"port": 0, "shutdown_timeout_s": 1},
        "health": {"probe_interval_s": 0.5, "probe_timeout_s": 30, "scrape_interval_s": 1},
        "scheduler": {"split_requests": "each"},
        "instances": rows,
    }
    async with running_gateway(GatewayConfig.model_validate(document | sections)) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=600) as client:
            yield Split(running, client)
        await eventually(running.settled)


def settings(constants: Constants, first_token_s: float = 0.0) -> EmulatorSettings:
    config = read_config(json.dumps({"kv_connector": "NixlConnector"}))
    return EmulatorSettings(
        profile(constants, first_token_s),
        models=("m",),
        prompt_tokens_details=True,
        kv_transfer=KVTransferSettings(config),
    )


@asynccontextmanager
async def emulated_pair(
    folder: Path, first_token_s: float = 0.0
) -> AsyncIterator[tuple[Split, list[EmulatedVLLM]]]:
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(emulated(settings(each, first_token_s)))
            for each in (PROMPTS, ANSWERS)
        ]
        urls, engines = [url for url, _ in found], [engine for _, engine in found]
        at = await stack.enter_async_context(split(folder, urls, (PROMPTS, ANSWERS), first_token_s))
        yield at, engines


def body_for(path: str, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path in (COMPLETIONS, RESPONSES):
        prompt = {"prompt" if path == COMPLETIONS else "input": text}
    body = {"model": "m", limit: 30, "ignore_eos": True, **prompt, **fields}
    if body.get("stream") and path in (CHAT_COMPLETIONS, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    return body


def without_times(answer: bytes) -> bytes:
    return b"".join(part.partition(b",")[2] for part in answer.split(b'"created'))


def taken_blocks(engine: EmulatedVLLM) -> int:
    return engine.loop.engine.total_blocks - engine.loop.engine.free_blocks


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_two_instances_answer_as_one(path: str, stream: bool, tmp_path: Path) -> None:
    body = body_for(path, stream=stream)
    headers = {"x-request-id": "r"}
    async with emulated(settings(ANSWERS)) as (url, _), httpx.AsyncClient(timeout=600) as client:
        whole = (await client.post(url + path, json=body, headers=headers)).content
    async with emulated_pair(tmp_path) as (at, engines):
        answer = await at.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-prefill-instance"] == "i0"
        assert answer.headers["x-hetero-gateway-instance"] == "i1"
        assert without_times(answer.content) == without_times(whole)
        assert len(answer.content) == len(whole)
        assert await at.results() == {"handed_over": 1}
        assert [taken_blocks(engine) for engine in engines] == [0, 0]
        # The prompt was computed by one of them, once.
        assert engines[1].transfer is not None
        assert engines[1].transfer.external_tokens >= TOKENS
        decision = (await at.client.get("/admin/decisions?limit=1")).json()["decisions"][0]
        assert "i0 computes the prompt" in decision["reason"]
        assert (decision["prefill_instance"], decision["chosen"]) == ("i0", "i1")


async def test_many_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    async with emulated_pair(tmp_path) as (at, engines):
        posts = [
            at.client.post(path, json=body_for(path, f"{i} {TEXT}", stream=i % 2 == 0))
            for i, path in enumerate(PATHS * 4)
        ]
        answers = await asyncio.gather(*posts)
        assert {answer.status_code for answer in answers} == {200}
        results = await at.results()
        assert set(results) == {"handed_over"}
        assert results["handed_over"] > len(posts) / 2
        await eventually(lambda: [taken_blocks(engine) for engine in engines] == [0, 0])
        # A transfer's time was learnt.
        pairs = at.running.gateway.fleet.scheduler.legs.pairs
        assert pairs is not None
        link = pairs.link(*at.running.gateway.fleet.instances, 0.0)
        assert link is not None
        assert link.start_s != TRANSFER["start_s"]


async def test_what_a_server_takes_before_its_answer_is_no_part_of_a_transfer(
    tmp_path: Path,
) -> None:
    async with emulated_pair(tmp_path, 0.5) as (at, _):
        for i in range(8):
            body = body_for(COMPLETIONS, f"{i} {TEXT}", stream=True, max_tokens=4)
            await at.client.post(COMPLETIONS, json=body)
        assert await at.results() == {"handed_over": 8}
        pairs = at.running.gateway.fleet.scheduler.legs.pairs
        assert pairs is not None
        link = pairs.link(*at.running.gateway.fleet.instances, 0.0)
        assert link is not None
        assert link.start_s < 0.05
        # A pair pays for a second server, in what it is expected to take.
        decision = (await at.client.get("/admin/decisions?limit=1")).json()["decisions"][0]
        assert decision["prefill_instance"] == "i0"


async def test_what_cannot_be_split_goes_whole(tmp_path: Path) -> None:
    async with emulated_pair(tmp_path) as (at, _):
        for fields in ({"n": 2}, {"max_tokens": 1}, {"echo": True}):
            answer = await at.client.post(COMPLETIONS, json=body_for(COMPLETIONS, **fields))
            assert answer.status_code == 200
            assert "x-hetero-gateway-prefill-instance" not in answer.headers
        assert await at.results() == {}


async def test_a_client_that_leaves_between_the_legs_leaves_nothing(tmp_path: Path) -> None:
    async with emulated_pair(tmp_path) as (at, engines):
        for after_s in (0.001, 0.01, 0.02, 0.04, 0.1, 0.3):
            post = asyncio.ensure_future(
                at.client.post(
                    CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS, str(after_s) + TEXT)
                )
            )
            await asyncio.sleep(after_s)
            post.cancel()
            await asyncio.wait([post])
            await eventually(at.running.settled)
        await asyncio.sleep(40)  # the lease
        assert [taken_blocks(engine) for engine in engines] == [0, 0]


async def test_what_is_wrong_with_a_request_its_client_hears(tmp_path: Path) -> None:
    async with emulated_pair(tmp_path) as (at, _):
        answer = await at.client.post(COMPLETIONS, json=body_for(COMPLETIONS, temperature=99))
        assert answer.status_code == 400
        assert await at.results() == {"no_handover": 1}


# What goes wrong


@asynccontextmanager
async def faked(
    folder: Path, prefill: dict[str, Any], decode: dict[str, Any], **sections: Any
) -> AsyncIterator[tuple[Split, list[FakeInstance]]]:
    """Three fakes, the first two of which are a pair, with these faults."""
    async with fake_instances(3) as fakes:
        fakes[0].fault, fakes[1].fault = prefill, decode
        kinds = (PROMPTS, ANSWERS, SLOW)
        async with split(folder, [fake.url for fake in fakes], kinds, **sections) as at:
            yield at, fakes


def says(**changes: Any) -> dict[str, Any]:
    return {"status": 200, "body": json.dumps(COMPUTED | changes)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prefill", "result"), [
    ({"status": 500}, "prefill_failed"),
    ({"status": 503}, "prefill_failed"),
    ({"die": "before_head"}, "prefill_failed"),
    ({"garbage": "SSH-2.0"}, "prefill_failed"),
    (says(kv_transfer_params=None), "no_handover"),
    (says(kv_transfer_params=HANDED | {"remote_port": None}), "no_handover"),
    (says(kv_transfer_params=HANDED | {"remote_block_ids": []}), "no_handover"),
    ({"status": 200, "body": "not JSON"}, "no_handover"),
])  # fmt: skip
async def test_where_no_prompt_is_handed_over_the_request_goes_whole(
    prefill: dict[str, Any], result: str, stream: bool, tmp_path: Path
) -> None:
    async with faked(tmp_path, prefill, {}) as (at, fakes):
        answer = await at.client.post(
            CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS, stream=stream)
        )
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] != "i0" or result == "no_handover"
        assert b"kv_transfer_params" not in answer.content or result == "no_handover"
        assert await at.results() == {result: 1}
        whole = [json.loads(each) for fake in fakes[1:] for each in fake.bodies]
        assert all("kv_transfer_params" not in each for each in whole)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "decode",
    [{"status": 500}, {"end": "error", "events": 0}, {"empty": "length"}, {"die": "before_head"}],
)
async def test_where_the_prompt_is_not_fetched_the_request_goes_elsewhere(
    decode: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    if "end" in decode and not stream:
        decode = {"status": 500}
    async with faked(tmp_path, says(), decode) as (at, fakes):
        fakes[0].fault = says()
        body = body_for(CHAT_COMPLETIONS, stream=stream)
        answer = await at.client.post(CHAT_COMPLETIONS, json=body)
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] in ("i0", "i2")
        assert "x-hetero-gateway-prefill-instance" not in answer.headers
        results = await at.results()
        assert results["handed_over"] == 1
        # A transfer that failed is the pair's fault, and a death is not.
        pairs = at.running.gateway.fleet.scheduler.legs.pairs
        assert pairs is not None
        refused = pairs.link(*list(at.running.gateway.fleet.instances)[:2], 0.0) is None
        assert refused == ("die" not in decode) == ("decode_failed" in results)
        assert not at.running.gateway.fleet.instances["i1"].outcomes.ejected
        sent = json.loads(fakes[1].bodies[0])
        assert sent["kv_transfer_params"] == HANDED


async def test_an_instance_that_hangs_with_a_prompt_is_left(tmp_path: Path) -> None:
    async with faked(tmp_path, {"hang": True}, {}, timeouts={"first_byte_s": 5}) as (at, _):
        answer = await at.client.post(CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS))
        assert answer.status_code == 504  # as of any instance that does not answer
        assert await at.results() == {"prefill_failed": 1}


async def test_an_engine_that_hangs_with_a_prompt_behind_its_server_is_left(
    tmp_path: Path,
) -> None:
    """/health is answered. Who is to answer has not been asked yet, and is not at fault."""
    async with faked(tmp_path, {"hang": True}, {}) as (at, _):
        instances = at.running.gateway.fleet.instances
        body = body_for(CHAT_COMPLETIONS, stream=True)
        answering = asyncio.ensure_future(at.client.post(CHAT_COMPLETIONS, json=body))
        await eventually(lambda: instances["i0"].outcomes.ejected, 15)
        assert not instances["i1"].outcomes.ejected
        async with asyncio.timeout(1):
            answer = await answering
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] in ("i1", "i2")
        assert await at.results() == {"prefill_failed": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_stopped_before_it_was_fetched_from_is_left(
    stream: bool, tmp_path: Path
) -> None:
    """An engine waits for ever for what it fetches from one that is stopped."""
    health = {"probe_interval_s": 0.5, "probe_timeout_s": 2}
    async with faked(tmp_path, says(), {"hang": True}, health=health) as (at, fakes):
        body = body_for(CHAT_COMPLETIONS, stream=stream)
        answering = asyncio.ensure_future(at.client.post(CHAT_COMPLETIONS, json=body))
        await eventually(lambda: bool(fakes[1].bodies))
        fakes[0].runs.clear()
        fakes[1].fault = {}
        async with asyncio.timeout(10):
            answer = await answering
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] in ("i1", "i2")
        assert await at.results() == {"handed_over": 1, "prefill_failed": 1}
        assert b"kv_transfer_params" not in fakes[1].bodies[-1] or len(fakes[1].bodies) == 1
        fakes[0].runs.set()


async def test_prompts_that_are_computed_count_for_who_computes_them(tmp_path: Path) -> None:
    async with faked(tmp_path, says(), {}) as (at, fakes):
        for status in (500, 200, 200) * 5:
            fakes[0].fault = says() | {"status": status}
            body = body_for(CHAT_COMPLETIONS, f"{fakes[0].requests}{TEXT}")
            assert (await at.client.post(CHAT_COMPLETIONS, json=body)).status_code == 200
        assert await at.results() == {"prefill_failed": 5, "handed_over": 10}
        # Never five in a row.
        assert not at.running.gateway.fleet.instances["i0"].outcomes.ejected


async def test_a_block_too_few_is_not_handed_over(tmp_path: Path) -> None:
    """It would end the engine that is given it."""
    async with faked(tmp_path, says(usage={"prompt_tokens": 49}), {}) as (at, fakes):
        fakes[0].metrics = fakes[0].metrics.replace("}", ',block_size="16"}')
        instance = at.running.gateway.fleet.instances["i0"]
        await eventually(lambda: instance.engine_block_tokens == 16)
        answer = await at.client.post(CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS))
        assert answer.status_code == 200
        assert await at.results() == {"no_handover": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_cache_that_cannot_be_fetched_is_the_pairs_failure(
    path: str, stream: bool, tmp_path: Path
) -> None:
    """On /v1/responses the engine has opened its stream before, and breaks it off."""
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(emulated(settings(each))) for each in (PROMPTS, ANSWERS)
        ]
        between = await stack.enter_async_context(Between(found[0][0], b'"do_remote_decode":true'))
        between.answered = with_parameters(remote_port=1)
        urls, kinds = (between.url, found[1][0]), (PROMPTS, ANSWERS)
        at = await stack.enter_async_context(split(tmp_path, urls, kinds))
        answer = await at.client.post(path, json=body_for(path, stream=stream))
        assert answer.status_code == 200
        assert b"error" not in answer.content.replace(b'"error":null', b"")
        assert await at.results() == {"handed_over": 1, "decode_failed": 1}
        pairs = at.running.gateway.fleet.scheduler.legs.pairs
        assert pairs is not None
        assert list(pairs.refused(0.0)) == [("i0", "i1")]
        assert at.running.gateway.metrics.upstream_errors == {("i1", "handover"): 1}


async def test_who_cannot_fetch_from_a_dead_instance_answers_alone_where_nobody_else_can(
    tmp_path: Path,
) -> None:
    async with fake_instances(2) as fakes:
        fakes[0].fault, fakes[1].fault = says(), {"status": 500}
        urls = [fake.url for fake in fakes]
        async with split(tmp_path, urls, (PROMPTS, ANSWERS)) as at:
            fakes[1].runs.clear()
            body = body_for(CHAT_COMPLETIONS)
            answering = asyncio.ensure_future(at.client.post(CHAT_COMPLETIONS, json=body))
            await eventually(lambda: bool(fakes[1].bodies))
            await fakes[0].kill()
            fakes[1].fault = {}
            fakes[1].runs.set()
            answer = await answering
            assert answer.status_code == 200
            assert answer.headers["x-hetero-gateway-instance"] == "i1"
            assert await at.results() == {"handed_over": 1, "decode_failed": 1}


async def test_a_stream_that_breaks_off_after_its_hand_over_goes_on_elsewhere(
    tmp_path: Path,
) -> None:
    # The head comes by itself.
    breaks = {"die": "after_events", "events": 5, "delay_s": 0.1, "first_delay_s": 0.1}
    async with faked(tmp_path, says(), breaks) as (at, fakes):
        body = body_for(CHAT_COMPLETIONS, stream=True, temperature=0)
        posted = asyncio.ensure_future(at.client.post(CHAT_COMPLETIONS, json=body))
        await eventually(lambda: bool(fakes[1].bodies))
        fakes[0].fault = {}
        answer = await posted
        assert b"[DONE]" in answer.content
        assert b"continued by" in answer.content
        assert await at.results() == {"handed_over": 1}


async def test_requests_are_split_only_where_that_is_configured_and_as_of_a_reload(
    tmp_path: Path,
) -> None:
    async with faked(tmp_path, says(), {}, scheduler={"split_requests": "never"}) as (at, fakes):
        legs = at.running.gateway.fleet.scheduler.legs
        assert legs.pairs is None
        assert at.running.gateway.dataplane.rooms.handovers is None
        at.running.gateway.take_up(changed(at, "each"))
        assert legs.pairs is not None
        answer = await at.client.post(CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS))
        assert answer.status_code == 200
        assert [len(fake.bodies) for fake in fakes] == [1, 1, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_kills_who_computes_it_and_the_next_is_not_given_to_a_third(
    stream: bool, tmp_path: Path
) -> None:
    dies = {"die": "before_head"}
    async with faked(tmp_path, dies, dies) as (at, fakes):
        fakes[2].fault = dies
        for fake in fakes[1:]:
            fake.runs.clear()
        body = body_for(CHAT_COMPLETIONS, stream=stream)
        answering = asyncio.ensure_future(at.client.post(CHAT_COMPLETIONS, json=body))
        await eventually(lambda: bool(fakes[0].bodies))
        await fakes[0].kill()  # as who died: /health is not answered either
        await eventually(lambda: not at.running.gateway.fleet.instances["i0"].up)
        for fake in fakes[1:]:
            fake.runs.set()
        answer = await answering
        assert answer.status_code == 502
        assert sum(len(fake.bodies) for fake in fakes) == 2
        assert await at.results() == {"prefill_failed": 1}


async def test_what_is_being_split_when_that_is_turned_off_is_served(tmp_path: Path) -> None:
    async with faked(tmp_path, {"hang": True}, {}) as (at, fakes):
        body = body_for(CHAT_COMPLETIONS)
        posts = [asyncio.ensure_future(at.client.post(CHAT_COMPLETIONS, json=body))]
        await eventually(lambda: bool(fakes[0].bodies))
        at.running.gateway.take_up(changed(at, "never"))
        fakes[0].reset_connections()
        (answer,) = await asyncio.gather(*posts)
        assert answer.status_code == 200
        assert at.running.gateway.fleet.scheduler.legs.pairs is None


def changed(at: Split, mode: str) -> Any:
    gateway = at.running.gateway
    scheduler = gateway.config.scheduler.model_copy(update={"split_requests": mode})
    return gateway.settings.prepare(gateway.config.model_copy(update={"scheduler": scheduler}))
