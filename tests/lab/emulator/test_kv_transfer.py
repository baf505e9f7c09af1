"""Emulated instances that hand KV caches over: as real ones do it, and as it goes wrong there."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.engines.vllm.kv_transfer import (
    CONNECTORS,
    Beginning,
    PrefillAnswer,
    Transfer,
    beginning_of,
    decode_body,
    mended_body,
    mended_events,
    mending_of,
    prefill_body,
    read_answer,
)
from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.emulator.transfer_settings import KVTransferSettings, read_config
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NIXL = CONNECTORS["NixlConnector"]
# A step takes 20 ms and each token of a prompt 0.1 ms.
CONSTANTS = Constants(p1=1e-4, p2=0, p3=0, p4=0.02, p5=0, p6=0, p7=0, p8=0.02)
PROMPT_TOKENS, BLOCKS = 800, 200
TEXT = " fox" * PROMPT_TOKENS


def settings(*, model: str = "tiny", link: dict[str, Any] | None = None, **config: Any) -> Any:
    told = json.dumps({"kv_connector": "NixlConnector", **config})
    return EmulatorSettings(
        Profile("GPU", model, 1, CONSTANTS, BLOCKS * 16, 16),
        models=("m",),
        prompt_tokens_details=True,
        kv_transfer=KVTransferSettings(read_config(told), **(link or {})),
    )


@dataclass
class Emulated:
    url: str
    app: EmulatedVLLM
    http: httpx.AsyncClient

    async def post(self, path: str, body: bytes) -> httpx.Response:
        headers = {"content-type": "application/json", "x-request-id": "r"}
        return await self.http.post(self.url + path, content=body, headers=headers)

    async def metric(self, name: str) -> float:
        text = (await self.http.get(self.url + "/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"vllm:{name}")]
        return float(line.rpartition(" ")[2])

    async def source(self, name: str) -> float:
        labels = f'engine="0",model_name="m",source="{name}"'
        return await self.metric(f"prompt_tokens_by_source_total{{{labels}}}")

    @property
    def pinned_blocks(self) -> int:
        engine = self.app.loop.engine
        return engine.total_blocks - engine.free_blocks

    async def prefill(self, path: str, body: bytes) -> PrefillAnswer:
        answer = await self.post(path, prefill_body(path, body, NIXL.for_prefill(Transfer())))
        assert answer.status_code == 200, answer.text
        return read_answer(path, answer.content)


@asynccontextmanager
async def pair(*each: EmulatorSettings, **config: Any) -> AsyncIterator[tuple[Emulated, Emulated]]:
    """A prefill instance and a decode instance, which are equal where nothing else is said."""
    of_each = each or (settings(**config), settings(**config))
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=600))
        found = [await stack.enter_async_context(emulated(one)) for one in of_each]
        first, second = (Emulated(*one, http) for one in found)
        yield first, second
        for one in (first, second):
            if not one.app.is_dead:
                assert await one.metric("num_requests_waiting") == 0


def body_for(path: str = COMPLETIONS, text: str = TEXT, **fields: Any) -> bytes:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path in (COMPLETIONS, RESPONSES):
        prompt = {"prompt" if path == COMPLETIONS else "input": text}
    body = {"model": "m", limit: 10, "ignore_eos": True, **prompt, **fields}
    if body.get("stream") and path in (CHAT, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


def parameters_of(answer: PrefillAnswer, **changed: Any) -> bytes:
    given = NIXL.for_decode(Transfer(block_tokens=16), answer)
    fields = json.loads(given) | changed
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode()


def without_times(answer: bytes) -> bytes:
    return b"".join(part.partition(b",")[2] for part in answer.split(b'"created'))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
async def test_two_instances_answer_as_one(path: str, stream: bool) -> None:
    body = body_for(path, stream=stream)
    async with pair() as (first, second):
        async with emulated(settings()) as (url, app):
            whole = (await Emulated(url, app, first.http).post(path, body)).content
        answer = await first.prefill(path, body)
        tokens = answer.prompt_tokens or 0
        assert first.pinned_blocks == -(-tokens // 16)
        decoded = await second.post(path, decode_body(body, parameters_of(answer)))
        mend = mended_events if stream else mended_body
        told = mend(path, decoded.content, mending_of(answer))
        assert without_times(told) == without_times(whole)
        assert len(told) == len(whole)
        # The prefill instance computed the prompt, the other one its answer alone.
        assert await second.source("external_kv_transfer") == tokens
        assert await second.source("local_compute") == 0
        assert await first.source("local_compute") == tokens
        assert await second.metric("nixl_bytes_transferred_sum") == -(-tokens // 16) * 16 * 131072
        assert await second.metric("prefix_cache_hits_total") == 0
        assert first.pinned_blocks == second.pinned_blocks == 0


async def test_a_transfer_takes_its_time_and_no_step() -> None:
    # 800 tokens of 125 000 bytes are 0.8 Gbit.
    link = {"gbit_per_s": 4.0, "start_s": 0.05, "bytes_per_token": 125_000}
    async with pair(settings(link=link), settings(link=link)) as (first, second):
        body = body_for(max_tokens=2, min_tokens=2)
        given = [parameters_of(await first.prefill(COMPLETIONS, body)) for _ in range(2)]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answers = [second.post(COMPLETIONS, decode_body(body, one)) for one in given]
        await asyncio.wait_for(asyncio.gather(*answers), 10)
        # One after the other, though both are for the same prompt. Then a step for the rest of the
        # prompt, and one for the other token.
        assert loop.time() - began_s == pytest.approx(2 * (0.05 + 0.8 / 4) + 0.04, abs=0.03)
        assert await second.metric("nixl_xfer_time_seconds_sum") == pytest.approx(0.5)
        assert first.pinned_blocks == 0


async def test_what_a_decode_instance_has_is_not_fetched() -> None:
    async with pair() as (first, second):
        await second.post(COMPLETIONS, body_for(text=TEXT[: 4 * 480]))
        answer = await first.prefill(COMPLETIONS, body_for())
        await second.post(COMPLETIONS, decode_body(body_for(), parameters_of(answer)))
        assert await second.metric("nixl_num_descriptors_sum") == (PROMPT_TOKENS - 480) / 16
        assert await second.source("external_kv_transfer") == PROMPT_TOKENS - 480
        assert await second.source("local_cache_hit") == 480


async def test_a_prefill_that_nobody_fetches_is_pinned_for_its_lease() -> None:
    extra = {"kv_lease_duration": 12}
    async with pair(kv_connector_extra_config=extra) as (first, second):
        answer = await first.prefill(COMPLETIONS, body_for())
        await asyncio.sleep(11.5)
        assert first.pinned_blocks == PROMPT_TOKENS / 16
        await asyncio.sleep(1)
        assert first.pinned_blocks == 0
        assert await first.metric("nixl_num_kv_expired_reqs_total") == 1
        whole = (await first.post(COMPLETIONS, body_for())).json()["choices"]
        # Its blocks have not been used again yet: all is well. Then they have.
        late = decode_body(body_for(), parameters_of(answer))
        assert (await second.post(COMPLETIONS, late)).json()["choices"] == whole
        assert await first.metric("nixl_num_notifications_after_expiry_total") == 1
        for i in range(6):
            await first.post(COMPLETIONS, body_for(text=f" {i:03}" * PROMPT_TOKENS))
        await second.http.post(second.url + "/reset_prefix_cache")
        wrong = (await second.post(COMPLETIONS, late)).json()["choices"]
        assert wrong[0]["finish_reason"] == "length"
        assert wrong != whole


async def test_a_streamed_prefill_hands_nothing_over() -> None:
    asked = body_for(max_tokens=1, stream=True, kv_transfer_params={"do_remote_decode": True})
    async with pair() as (first, _):
        answer = await first.post(COMPLETIONS, asked)
        assert b"remote_" not in answer.content
        assert first.pinned_blocks == PROMPT_TOKENS / 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_prefill_instance_that_is_dead(policy: str, stream: bool) -> None:
    body = body_for(stream=stream)
    async with pair(kv_load_failure_policy=policy) as (first, second):
        whole = (await first.post(COMPLETIONS, body)).content
        given = parameters_of(await first.prefill(COMPLETIONS, body), remote_port=1)
        answer = await second.post(COMPLETIONS, decode_body(body, given))
        assert await second.metric("nixl_num_failed_transfers_total") == 1
        if policy == "recompute":
            assert without_times(answer.content) == without_times(whole)
            assert await second.source("local_compute") == PROMPT_TOKENS
            return
        errors = 'request_success_total{engine="0",finished_reason="error",model_name="m"}'
        assert await second.metric(errors) == 1
        assert answer.status_code == (200 if stream else 500)
        assert b'{"error":{"message":"Internal server error"' in answer.content
        assert answer.content.endswith(b"data: [DONE]\n\n") == stream
        assert second.pinned_blocks == 0
        assert (await second.post(COMPLETIONS, body)).status_code == 200  # the engine lives


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
async def test_a_stream_that_fails_has_told_nothing(path: str) -> None:
    body = body_for(path, stream=True)
    async with pair() as (first, second):
        given = parameters_of(await first.prefill(path, body), remote_engine_id="gone")
        for asked, expected in ((given, Beginning.FAILED), (b"{}", Beginning.BEGUN)):
            begun = b""
            try:
                decoded = decode_body(body, asked)
                headers = {"content-type": "application/json"}
                async with second.http.stream(
                    "POST", second.url + path, content=decoded, headers=headers
                ) as answer:
                    assert answer.status_code == 200
                    async for part in answer.aiter_raw():
                        begun += part
            except httpx.RemoteProtocolError:
                assert (path, asked) == (RESPONSES, given)
                expected = Beginning.OPENING  # it breaks off
            assert beginning_of(path, begun) is expected
        assert second.pinned_blocks == 0
        whole = await second.post(path, decode_body(body_for(path), given))
        assert (whole.status_code, "Internal server error" in whole.text) == (500, True)
        # The prefill instance has never heard of it: its blocks wait for the end of their lease.
        await asyncio.sleep(30)
        assert first.pinned_blocks == 0


async def test_a_prefill_instance_that_dies_while_it_is_read() -> None:
    link = {"gbit_per_s": 0.1}
    async with pair(settings(link=link), settings(link=link)) as (first, second):
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()))
        answer = asyncio.create_task(second.post(COMPLETIONS, decode_body(body_for(), given)))
        await asyncio.sleep(1)
        assert await second.metric("num_requests_waiting") == 1
        assert second.pinned_blocks == PROMPT_TOKENS / 16
        assert first.app.transfer is not None
        first.app.transfer.close()
        assert (await answer).status_code == 500
        assert second.pinned_blocks == 0


async def test_a_client_that_leaves_while_its_prompt_is_fetched() -> None:
    link = {"gbit_per_s": 0.1}
    async with pair(settings(link=link), settings(link=link)) as (first, second):
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()))
        answer = asyncio.create_task(second.post(COMPLETIONS, decode_body(body_for(), given)))
        await asyncio.sleep(1)
        answer.cancel()
        await asyncio.sleep(1)
        assert first.pinned_blocks == second.pinned_blocks == 0


async def test_a_refused_decode_request_frees_the_prefill() -> None:
    async with pair() as (first, second):
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()))
        answer = await second.post(COMPLETIONS, decode_body(body_for(temperature=99), given))
        assert answer.status_code == 400
        await asyncio.sleep(1)
        assert first.pinned_blocks == 0


@pytest.mark.parametrize(
    ("other", "status"),
    [
        ({"model": "large"}, 500),
        ({"dtype": "float32"}, 500),
        ({"attention_backend": "TRITON_ATTN"}, 500),
        ({"kv_connector": "NixlPushConnector"}, 500),
        ({}, 200),
    ],
)
async def test_unequal_instances_refuse_each_other(other: dict[str, Any], status: int) -> None:
    of_settings = {k: other[k] for k in other if k not in ("model", "kv_connector")}
    second_settings = replace(
        settings(**{k: v for k, v in other.items() if k not in of_settings}), **of_settings
    )
    async with pair(settings(), second_settings) as (first, second):
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()))
        answer = await second.post(COMPLETIONS, decode_body(body_for(), given))
        assert answer.status_code == status


async def test_an_operator_may_let_unequal_ones_pair() -> None:
    extra = {"enforce_handshake_compat": False}
    of_each = [settings(model=model, kv_connector_extra_config=extra) for model in ("a", "b")]
    async with pair(*of_each) as (first, second):
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()))
        answer = await second.post(COMPLETIONS, decode_body(body_for(), given))
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("changed", "text_is_right"),
    [({"remote_request_id": "x"}, True), ({"remote_block_ids": [list(range(100, 150))]}, False)],
)
async def test_a_wrong_object(changed: dict[str, Any], text_is_right: bool) -> None:
    async with pair() as (first, second):
        whole = (await first.post(COMPLETIONS, body_for())).json()["choices"]
        answer = await first.prefill(COMPLETIONS, body_for())
        given = parameters_of(answer, **changed)
        decoded = await second.post(COMPLETIONS, decode_body(body_for(), given))
        assert decoded.status_code == 200
        assert (decoded.json()["choices"] == whole) == text_is_right


@pytest.mark.parametrize("blocks", [[], [[]], [[1, 2, 3]]])
async def test_too_few_blocks_end_the_engine_and_its_streams(blocks: list[Any]) -> None:
    async with pair() as (first, second):
        other = asyncio.create_task(second.post(COMPLETIONS, body_for(max_tokens=99, stream=True)))
        await asyncio.sleep(0.5)
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()), remote_block_ids=blocks)
        assert (await second.post(COMPLETIONS, decode_body(body_for(), given))).status_code == 500
        assert b'data: {"error"' in (await other).content
        assert second.app.is_dead


async def test_an_object_without_a_port_is_never_answered() -> None:
    async with pair() as (first, second):
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()), remote_port=...)
        answer = asyncio.create_task(second.post(COMPLETIONS, decode_body(body_for(), given)))
        await asyncio.sleep(100)
        assert not answer.done()
        assert not second.app.is_dead
        answer.cancel()
        await asyncio.sleep(1)
        assert second.app.is_dead


async def test_a_decode_instance_without_room_fetches_when_it_has_some() -> None:
    async with pair() as (first, second):
        text = " cat" * (BLOCKS * 16 - 400)
        running = asyncio.create_task(second.post(COMPLETIONS, body_for(text=text, max_tokens=100)))
        await asyncio.sleep(0.5)
        given = parameters_of(await first.prefill(COMPLETIONS, body_for()))
        answer = await second.post(COMPLETIONS, decode_body(body_for(), given))
        assert (running.done(), answer.status_code) == (True, 200)
        assert first.pinned_blocks == second.pinned_blocks == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--kv-transfer-config: Invalid JSON"),
        ("{}", "kv_connector: Field required"),
        ('{"kv_connector": "MooncakeConnector"}', "kv_connector: Input should be 'NixlConnector'"),
        ('{"kv_connector": "NixlConnector", "x": 1}', "x: Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_emulated_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config: ") as caught:
        read_config(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
