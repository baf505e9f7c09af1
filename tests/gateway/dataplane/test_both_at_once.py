"""Requests whose answer is asked for while another instance computes the prompt (Mooncake)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import eventually
from tests.fakes.vllm import FakeInstance
from tests.gateway.dataplane import test_two_legs as two_legs
from tests.gateway.dataplane.test_two_legs import ANSWERS, PROMPTS, SLOW, Split, body_for, split


class Bootstrapped(FakeInstance):
    """With Mooncake's bootstrap server on its own port."""

    engines: Any = {"0": {"engine_id": "e-0"}}  # noqa: RUF012

    def _get(self, path: str) -> tuple[int, bytes]:
        return (200, json.dumps(self.engines).encode()) if path == "/query" else super()._get(path)


@contextlib.asynccontextmanager
async def pair(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefill: dict[str, Any],
    decode: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[Split, list[Bootstrapped]]]:
    async with contextlib.AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Bootstrapped()) for _ in range(3)]
        fakes[0].fault, fakes[1].fault = prefill, decode or {}
        transfer = {"connector": "MooncakeConnector", "bootstrap_url": fakes[0].url}
        monkeypatch.setattr(two_legs, "TRANSFER", transfer | {"gbit_per_s": 100, "start_s": 0.001})
        urls = [fake.url for fake in fakes]
        at = await stack.enter_async_context(split(folder, urls, (PROMPTS, ANSWERS, SLOW)))
        await eventually(lambda: all(i.up for i in at.running.gateway.fleet.instances.values()))
        yield at, fakes


def parameters(fake: FakeInstance, number: int = -1) -> Any:
    return json.loads(fake.bodies[number]).get("kv_transfer_params")


@pytest.mark.parametrize("stream", [False, True])
async def test_both_are_asked_at_once_for_one_transfer(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"first_delay_s": 0.2}
    async with pair(tmp_path, monkeypatch, slow, {"first_delay_s": 0.4}) as (at, fakes):
        body = body_for(CHAT_COMPLETIONS, stream=stream)
        asking = asyncio.ensure_future(at.client.post(CHAT_COMPLETIONS, json=body))
        await eventually(lambda: bool(fakes[0].bodies and fakes[1].bodies))
        assert fakes[0].open == 1  # and has not answered yet
        answer = await asking
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] == "i1"
        assert answer.headers["x-hetero-gateway-prefill-instance"] == "i0"
        first, second = parameters(fakes[0]), parameters(fakes[1])
        assert first.pop("transfer_id") == second.pop("transfer_id")
        assert first == {"do_remote_decode": True, "do_remote_prefill": False}
        assert second == {
            "do_remote_decode": False, "do_remote_prefill": True,
            "remote_bootstrap_addr": fakes[0].url, "remote_engine_id": "e-0",
        }  # fmt: skip
        assert await at.results() == {"handed_over": 1}
        # The engine is asked for once, and each transfer has an id of its own.
        fakes[0].engines = {}
        answer = await at.client.post(CHAT_COMPLETIONS, json=body)
        assert answer.headers["x-hetero-gateway-prefill-instance"] == "i0"
        assert parameters(fakes[1], 0)["transfer_id"] != parameters(fakes[1])["transfer_id"]


async def test_where_the_prompt_fails_the_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, monkeypatch, {"status": 500}, {"first_delay_s": 20}) as (at, fakes):
        asking = asyncio.ensure_future(
            at.client.post(CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS))
        )
        await eventually(lambda: fakes[1].aborted == 1)
        fakes[1].fault = {}
        answer = await asking
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] != "i0"
        assert (await at.results())["prefill_failed"] == 1


async def test_who_cannot_fetch_makes_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, monkeypatch, {"first_delay_s": 1}, {"status": 500}) as (at, _):
        answer = await at.client.post(CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS))
        assert answer.status_code == 200
        assert (await at.results())["decode_failed"] == 1
        refused = at.running.gateway.fleet.scheduler.legs.refused(0.0)
        assert [tuple(map(str, pair)) for pair in refused] == [("i0", "i1")]
        assert not at.running.gateway.fleet.instances["i1"].outcomes.ejected


@pytest.mark.parametrize("engines", [{}, {"0": {"engine_id": "a"}, "1": {"engine_id": "b"}}])
async def test_without_one_engine_at_its_bootstrap_server_requests_go_whole(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, monkeypatch, {}) as (at, fakes):
        fakes[0].engines = engines
        for _ in range(2):
            answer = await at.client.post(CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS))
            assert answer.status_code == 200
            assert "x-hetero-gateway-prefill-instance" not in answer.headers
        # And they are asked for some minutes later, at the soonest.
        assert await at.results() == {"no_handover": 1}


async def test_log_probabilities_of_a_prompt_come_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, monkeypatch, {}) as (at, _):
        asked = body_for(CHAT_COMPLETIONS)
        await at.client.post(CHAT_COMPLETIONS, json=asked | {"prompt_logprobs": 1})
        assert await at.results() == {"no_handover": 1}
        answer = await at.client.post(CHAT_COMPLETIONS, json=asked)
        assert "x-hetero-gateway-prefill-instance" in answer.headers


async def test_a_client_that_leaves_ends_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"first_delay_s": 400}
    async with pair(tmp_path, monkeypatch, slow, slow) as (at, fakes):
        asking = asyncio.ensure_future(
            at.client.post(CHAT_COMPLETIONS, json=body_for(CHAT_COMPLETIONS))
        )
        await eventually(lambda: fakes[0].open == fakes[1].open == 1)
        asking.cancel()
        await eventually(lambda: fakes[0].aborted == fakes[1].aborted == 1)
