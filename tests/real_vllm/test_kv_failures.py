"""What goes wrong with a request that two real engines share, made to go wrong, behind a gateway.

``scripts/real-vllm --pair`` starts the two. Whatever is done to them, a client gets what one engine
would have answered, or one clear error; the gateway's loads are 0 afterwards, and no engine has
a request or a block left when the lease is over (``served`` looks).
"""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS, RESPONSES
from tests.fakes.between import with_parameters
from tests.fakes.running import eventually
from tests.real_vllm.kv_pair import (
    PATHS,
    PATIENCE_S,
    PROMPT,
    Pair,
    Served,
    fresh,
    served,
    text_of,
)

pytestmark = pytest.mark.real_vllm

# Some 3 300 tokens, which an engine is busy with for a while.
LONG = PROMPT * 25
LONG_ANSWER = {"max_tokens": 150, "ignore_eos": True}


def without_parameters(answer: dict[str, Any]) -> object:
    return answer | {"kv_transfer_params": None}


def short_of_a_block(answer: dict[str, Any]) -> object:
    (blocks,) = answer["kv_transfer_params"]["remote_block_ids"]
    return with_parameters(remote_block_ids=[blocks[:-1]])(answer)


SPOILT: dict[str, Callable[[dict[str, Any]], object]] = {
    "no parameters": without_parameters,
    "no port": with_parameters(remote_port=None),
    "no blocks": with_parameters(remote_block_ids=[]),
    "a block too few": short_of_a_block,
    "no engine": with_parameters(remote_engine_id=None),
    "a push": with_parameters(transfer_mode="push"),
    "not for a decode instance": with_parameters(do_remote_prefill=False),
    "no JSON": lambda answer: b'{"choices": [',
}


async def test_what_is_handed_over_and_is_not_whole_reaches_no_engine(
    pair: Pair, tmp_path: Path
) -> None:
    """Two of these would end the engine that is given them, and a third one let it wait."""
    async with served(pair, tmp_path, through=("prefill", "decode")) as at:
        await facts_are_known(at)
        for number, spoil in enumerate(SPOILT.values(), 1):
            at.between["prefill"].answered = spoil
            answer = await at.answers(PATHS[number % 4], stream=number > 4)
            assert "x-hetero-gateway-prefill-instance" not in answer.headers
            assert at.results == {"no_handover": number}
        assert not at.between["decode"].bodies
        assert not at.refused


async def facts_are_known(at: Served) -> None:
    instance = at.running.gateway.fleet.instances["prefill"]
    await eventually(lambda: instance.engine_block_tokens is not None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_cache_that_cannot_be_fetched_is_the_pairs_failure(
    path: str, stream: bool, pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path, through=("prefill",)) as at:
        changes: dict[str, object] = {"remote_port": 1}
        if stream:
            changes = {"remote_engine_id": "another"}
        at.between["prefill"].answered = with_parameters(**changes)
        answer = await at.answers(path, stream=stream)
        assert answer.headers["x-hetero-gateway-instance"] == "prefill"
        assert at.results == {"handed_over": 1, "decode_failed": 1}
        assert at.refused
        instances = at.running.gateway.fleet.instances
        assert not any(each.outcomes.ejected for each in instances.values())
        # The next one goes whole.
        answer = await at.answers(path, stream=stream)
        assert "x-hetero-gateway-prefill-instance" not in answer.headers


async def test_engines_that_refuse_each_other_are_no_pair(pair: Pair, tmp_path: Path) -> None:
    """Of another dtype: another compatibility hash. Their texts may differ."""
    other = "float32" if "bfloat16" in pair.engines["prefill"].argv else "bfloat16"
    await asyncio.to_thread(pair.engines["prefill"].restart, "--dtype", other)
    await asyncio.to_thread(pair.engines["prefill"].wait_ready)
    try:
        async with served(pair, tmp_path) as at:
            for stream in (False, True):
                body = fresh(CHAT_COMPLETIONS, stream=stream)
                answer = await at.ask(CHAT_COMPLETIONS, body)
                assert answer.status_code == 200
                name = answer.headers["x-hetero-gateway-instance"]
                url = pair.engines[name].base_url
                alone = await asyncio.to_thread(pair.post, url, CHAT_COMPLETIONS, body, name)
                told = text_of(CHAT_COMPLETIONS, answer.content, stream=stream)
                assert told == text_of(CHAT_COMPLETIONS, alone.content, stream=stream)
                assert at.results == {"handed_over": 1, "decode_failed": 1}
                assert at.refused
        log = pair.engines["decode"].log.read_text(errors="replace")
        assert "NIXL compatibility hash mismatch" in log
    finally:
        await asyncio.to_thread(pair.engines["prefill"].restart)
        await asyncio.to_thread(pair.engines["prefill"].wait_ready)


async def test_what_is_older_than_its_lease_is_computed_again(pair: Pair, tmp_path: Path) -> None:
    """The gateway is told of a lease that is over when the answer has come."""
    async with served(pair, tmp_path, lease_s=1e-9) as at:
        expired = await asyncio.to_thread(pair.counted, "prefill", "nixl_num_kv_expired_reqs_total")
        for number in range(1, 3):
            answer = await at.answers(CHAT_COMPLETIONS, stream=number == 2)
            assert "x-hetero-gateway-prefill-instance" not in answer.headers
            assert at.results == {"no_handover": number}
    now = await asyncio.to_thread(pair.counted, "prefill", "nixl_num_kv_expired_reqs_total")
    assert now == expired + 2


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_decode_instance_that_takes_nothing(
    status: int, pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path, through=("decode",)) as at:

        async def refuse(body: bytes) -> bytes | int:
            return status

        at.between["decode"].asked = refuse
        for stream in (False, True):
            body = fresh(CHAT_COMPLETIONS, stream=stream)
            alone = await asyncio.to_thread(pair.whole, CHAT_COMPLETIONS, body)
            answer = await at.ask(CHAT_COMPLETIONS, body)
            assert answer.status_code == 200
            assert answer.headers["x-hetero-gateway-instance"] == "prefill"
            told = text_of(CHAT_COMPLETIONS, answer.content, stream=stream)
            assert told == text_of(CHAT_COMPLETIONS, alone, stream=stream)
        assert at.refused == (status == 500)


async def test_what_a_decode_instance_refuses_of_a_request_its_client_hears(
    pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path, through=("decode",)) as at:

        async def spoil(body: bytes) -> bytes:
            return body.replace(b'"temperature": 0', b'"temperature":99')

        at.between["decode"].asked = spoil
        answer = await at.ask(COMPLETIONS, fresh(COMPLETIONS))
        assert answer.status_code == 400
        assert "temperature" in answer.json()["error"]["message"]
        assert at.results == {"handed_over": 1}
        # What the prefill instance refuses, somebody refuses whole.
        answer = await at.ask(COMPLETIONS, fresh(COMPLETIONS, temperature=98))
        assert answer.status_code == 400
        assert at.results == {"handed_over": 1, "no_handover": 1}


@pytest.mark.parametrize("when", ["in prefill", "between the legs", "in decode"])
async def test_a_client_that_leaves(when: str, pair: Pair, tmp_path: Path) -> None:
    async with served(pair, tmp_path, through=("decode",)) as at:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def hold(body: bytes) -> bytes:
            asked.set()
            if when == "between the legs":
                await go_on.wait()
            return body

        at.between["decode"].asked = hold
        long = when == "in prefill"
        fields = LONG_ANSWER | {"prompt": LONG if long else PROMPT}
        body = fresh(COMPLETIONS, stream=True, **fields)
        request = at.client.build_request("POST", COMPLETIONS, content=body)
        posted = asyncio.ensure_future(at.client.send(request, stream=True))
        if long:
            await at.computing()
            assert not asked.is_set()
            posted.cancel()
            await asyncio.wait([posted])
        elif when == "in decode":
            answer = await posted
            await anext(answer.aiter_bytes())
            await answer.aclose()
        else:
            async with asyncio.timeout(PATIENCE_S):
                await asked.wait()
            posted.cancel()
            await asyncio.wait([posted])
            await eventually(at.running.settled)
            go_on.set()
        await eventually(at.running.settled)
        assert len(at.between["decode"].bodies) == (not long)
        # It was not finished.
        await asyncio.sleep(0.2)
        left = await asyncio.to_thread(pair.left)
        assert not any("running" in each or "waiting" in each for each in left)


async def test_a_clients_own_parameters_change_nothing(pair: Pair, tmp_path: Path) -> None:
    own = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [],
        "remote_engine_id": "x", "remote_request_id": "x", "remote_host": "127.0.0.1",
    }  # fmt: skip
    async with served(pair, tmp_path, through=("prefill", "decode")) as at:
        for path in PATHS:
            for name in ("kv_transfer_params", "vllm_xargs"):
                value = own if name == "kv_transfer_params" else {"kv_transfer_params": own}
                answer = await at.ask(path, fresh(path, **{name: value}))
                assert answer.status_code == 400
                assert name in answer.text
        assert not at.between["prefill"].bodies
        assert not at.between["decode"].bodies
        # What says nothing is allowed, and is not what the engines are told.
        for stream in (False, True):
            answer = await at.answers(CHAT_COMPLETIONS, stream=stream, kv_transfer_params=None)
            assert answer.headers["x-hetero-gateway-prefill-instance"] == "prefill"
        assert at.results == {"handed_over": 2}


# Stopped: SIGSTOP, to the server and its engine


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_instance_that_is_stopped_before_a_prompt(
    stream: bool, pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path) as at:
        body = fresh(CHAT_COMPLETIONS, stream=stream)
        alone = await asyncio.to_thread(pair.whole, CHAT_COMPLETIONS, body)
        await at.signal("prefill", signal.SIGSTOP)
        answer = await at.ask(CHAT_COMPLETIONS, body)
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] == "decode"
        told = text_of(CHAT_COMPLETIONS, answer.content, stream=stream)
        assert told == text_of(CHAT_COMPLETIONS, alone, stream=stream)
        assert not at.running.gateway.fleet.instances["decode"].outcomes.ejected
        await at.signal("prefill", signal.SIGCONT)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_instance_that_is_stopped_with_a_prompt(
    stream: bool, pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path) as at:
        body = fresh(COMPLETIONS, stream=stream, prompt=LONG)
        alone = await asyncio.to_thread(pair.whole, COMPLETIONS, body)
        posted = asyncio.ensure_future(at.ask(COMPLETIONS, body))
        await at.computing()
        await at.signal("prefill", signal.SIGSTOP)
        answer = await posted
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] == "decode"
        told = text_of(COMPLETIONS, answer.content, stream=stream)
        assert told == text_of(COMPLETIONS, alone, stream=stream)
        assert at.results == {"prefill_failed": 1}
        await at.signal("prefill", signal.SIGCONT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT_COMPLETIONS, RESPONSES])
async def test_a_prefill_instance_that_is_stopped_before_it_is_fetched_from(
    path: str, stream: bool, pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path, through=("decode",)) as at:
        body = fresh(path, stream=stream)
        alone = await asyncio.to_thread(pair.whole, path, body)

        async def stop(body: bytes) -> bytes:
            await at.signal("prefill", signal.SIGSTOP)
            return body

        at.between["decode"].asked = stop
        answer = await at.ask(path, body)
        await at.signal("prefill", signal.SIGCONT)
        assert answer.status_code == 200
        told = text_of(path, answer.content, stream=stream)
        assert told == text_of(path, alone, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_instance_that_is_stopped_before_it_answers(
    stream: bool, pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path, through=("decode",)) as at:
        body = fresh(CHAT_COMPLETIONS, stream=stream)
        alone = await asyncio.to_thread(pair.whole, CHAT_COMPLETIONS, body)

        async def stop(body: bytes) -> bytes:
            await at.signal("decode", signal.SIGSTOP)
            return body

        at.between["decode"].asked = stop
        answer = await at.ask(CHAT_COMPLETIONS, body)
        await at.signal("decode", signal.SIGCONT)
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] == "prefill"
        told = text_of(CHAT_COMPLETIONS, answer.content, stream=stream)
        assert told == text_of(CHAT_COMPLETIONS, alone, stream=stream)


# Killed: SIGKILL, to the server and its engine


async def test_a_prefill_instance_that_is_killed_with_a_prompt(pair: Pair, tmp_path: Path) -> None:
    async with served(pair, tmp_path) as at:
        body = fresh(COMPLETIONS, stream=True, prompt=LONG)
        alone = await asyncio.to_thread(pair.whole, COMPLETIONS, body)
        posted = asyncio.ensure_future(at.ask(COMPLETIONS, body))
        await at.computing()
        await at.signal("prefill", signal.SIGKILL)
        # And one that comes while it is dead, before a probe has said so.
        for answer in (await posted, await at.ask(COMPLETIONS, body)):
            assert answer.status_code == 200
            assert answer.headers["x-hetero-gateway-instance"] == "decode"
            told = text_of(COMPLETIONS, answer.content, stream=True)
            assert told == text_of(COMPLETIONS, alone, stream=True)
        assert at.results == {"prefill_failed": 1}


@pytest.mark.parametrize("path", [CHAT_COMPLETIONS, RESPONSES])
async def test_a_prefill_instance_that_is_killed_before_it_is_fetched_from(
    path: str, pair: Pair, tmp_path: Path
) -> None:
    async with served(pair, tmp_path, through=("decode",)) as at:
        body = fresh(path, stream=True)
        alone = await asyncio.to_thread(pair.whole, path, body)

        async def kill(body: bytes) -> bytes:
            await asyncio.to_thread(pair.engines["prefill"].kill)
            return body

        at.between["decode"].asked = kill
        answer = await at.ask(path, body)
        # Who could not fetch is the only one who is left.
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] == "decode"
        told = text_of(path, answer.content, stream=True)
        assert told == text_of(path, alone, stream=True)
        # The one is told by the other, or by a probe.
        assert at.results in (
            {"handed_over": 1, "decode_failed": 1},
            {"handed_over": 1, "prefill_failed": 1},
        )


@pytest.mark.parametrize("when", ["before it answers", "in its answer"])
async def test_a_decode_instance_that_is_killed(when: str, pair: Pair, tmp_path: Path) -> None:
    async with served(pair, tmp_path, through=("decode",)) as at:
        # By ids: the prompt ends with a space, which as text is one token with what is told.
        fields = LONG_ANSWER | {"return_token_ids": True}
        body = fresh(COMPLETIONS, stream=True, **fields)
        alone = await asyncio.to_thread(pair.whole, COMPLETIONS, body)

        async def kill(body: bytes) -> bytes:
            if when == "before it answers":
                await asyncio.to_thread(pair.engines["decode"].kill)
            return body

        at.between["decode"].asked = kill
        request = at.client.build_request("POST", COMPLETIONS, content=body)
        answer = await at.client.send(request, stream=True)
        assert answer.status_code == 200
        told = b""
        async for part in answer.aiter_bytes():
            if not told and when == "in its answer":
                await at.signal("decode", signal.SIGKILL)
            told += part
        assert (b": continued by prefill" in told) == (when == "in its answer")
        expected = json.dumps(text_of(COMPLETIONS, alone, stream=True))
        assert json.dumps(text_of(COMPLETIONS, told, stream=True)) == expected
        assert at.results == {"handed_over": 1}
        assert not at.refused
