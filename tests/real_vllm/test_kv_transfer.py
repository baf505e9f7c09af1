"""A prompt computed by one real engine and answered by another: as if one had done both.

``scripts/real-vllm --pair`` starts the two. The bodies are those of ``engines/vllm/kv_transfer``,
sent by hand first, and then by a gateway.
"""

import asyncio
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_vllm import servers

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.engines.vllm.kv_transfer import (
    CONNECTORS,
    Beginning,
    NoHandover,
    PrefillAnswer,
    Transfer,
    beginning_of,
    decode_body,
    mended_body,
    mended_events,
    mending_of,
    prefill_body,
    read_answer,
    reason_against,
)
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.profile_file import profile_document, write_profile_file
from tests.fakes.running import eventually, running_gateway

pytestmark = pytest.mark.real_vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NIXL = CONNECTORS["NixlConnector"]
# vLLM's CPU engine has blocks of 128 tokens.
TRANSFER = Transfer(block_tokens=128)
PROMPT = "def main(self): import os, sys; return the value of this class " * 8
OUTPUT_TOKENS = 24
# What the gateway is told of them, so that it splits.
PROMPTS = Constants(p1=1e-5, p2=0, p3=0, p4=0.01, p5=0, p6=0, p7=0, p8=0.2)
ANSWERS = Constants(p1=0.1, p2=0, p3=0, p4=0.01, p5=0, p6=0, p7=0, p8=0.01)
_IDS = itertools.count()


class Pair:
    """The two engines, asked by hand."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.http = httpx.Client(timeout=120)
        self.prefill, self.decode = prefill, decode

    def post(self, base_url: str, path: str, body: bytes, request_id: str) -> httpx.Response:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        answer = self.http.post(base_url + path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def forget(self) -> None:
        for base_url in (self.prefill, self.decode):
            self.http.post(base_url + "/reset_prefix_cache").raise_for_status()

    def whole(self, path: str, body: bytes) -> bytes:
        """By one engine, which has no part of the prompt."""
        self.forget()
        answer = self.post(self.decode, path, body, f"whole-{next(_IDS)}").content
        self.forget()
        return answer

    def prefilled(self, path: str, body: bytes, request_id: str) -> PrefillAnswer:
        assert reason_against(path, body) == ""
        asked = prefill_body(path, body, NIXL.for_prefill(TRANSFER))
        return read_answer(path, self.post(self.prefill, path, asked, request_id).content)

    def split(self, path: str, body: bytes, *, stream: bool) -> bytes:
        """By both, as the client is to see it."""
        request_id = f"split-{next(_IDS)}"
        answer = self.prefilled(path, body, request_id)
        parameters = NIXL.for_decode(TRANSFER, answer)
        decoded = self.post(self.decode, path, decode_body(body, parameters), request_id).content
        mend = mended_events if stream else mended_body
        return mend(path, decoded, mending_of(answer))

    def computed(self) -> dict[str, float]:
        """Prompt tokens of the decode engine by where they came from, and tokens of its steps."""
        text = self.http.get(self.decode + "/metrics").text
        found = re.findall(
            r'^vllm:prompt_tokens_by_source_total{.*source="(\w+)"} (\S+)$', text, re.M
        )
        found += re.findall(r"^vllm:(iteration_tokens_total_sum){.*} (\S+)$", text, re.M)
        return {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    directory = Path(os.environ.get("HETERO_GATEWAY_REAL_VLLM", "-"))
    states = [directory / f"{name}.json" for name in servers.PAIR]
    if not all(state.is_file() for state in states):
        pytest.skip("scripts/real-vllm --pair runs these")
    found = Pair(*(servers.load_server(state).base_url for state in states))
    yield found
    found.http.close()


def body_for(path: str, *, stream: bool = False, **fields: Any) -> bytes:
    limit = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]}
    if path in (COMPLETIONS, RESPONSES):
        prompt = {"prompt" if path == COMPLETIONS else "input": PROMPT}
    body = {"model": "tiny", "temperature": 0, limit: OUTPUT_TOKENS, **prompt, "stream": stream}
    if stream and path in (CHAT, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body | fields).encode()


def said(answer: bytes, *, stream: bool) -> object:
    """What does not differ from one time to another: of a stream its text, usages and ends."""
    if not stream:
        text = re.sub(rb'"(created|created_at)":\d+', rb'"\1":0', answer)
        return json.loads(re.sub(rb'"(chatcmpl|cmpl|resp|msg)[-_][^"]*"', b'"id"', text))
    text, rest = "", []
    for line in answer.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        delta = event.get("delta")
        text += (delta if isinstance(delta, str) else (delta or {}).get("text")) or ""
        for choice in event.get("choices", []):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            rest.append(choice["finish_reason"])
        parts = (event, event.get("response") or {}, event.get("message") or {})
        rest += [part["usage"] for part in parts if "usage" in part]
        rest.append((delta or {}).get("stop_reason") if isinstance(delta, dict) else None)
    assert b'kv_transfer_params":{' not in answer
    return text, [each for each in rest if each]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
def test_two_engines_answer_as_one_and_compute_nothing_twice(
    pair: Pair, path: str, stream: bool
) -> None:
    body = body_for(path, stream=stream)
    expected = said(pair.whole(path, body), stream=stream)
    before = pair.computed()
    assert said(pair.split(path, body, stream=stream), stream=stream) == expected
    grown = {name: value - before[name] for name, value in pair.computed().items()}
    assert grown["external_kv_transfer"] > 128
    assert grown["local_compute"] == grown["local_cache_hit"] == 0
    assert grown["iteration_tokens_total_sum"] == OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1}),
        (CHAT, {"prompt_logprobs": 1}),
        (COMPLETIONS, {"logprobs": 2, "temperature": 1, "seed": 7}),
        (COMPLETIONS, {"logit_bias": {"1": 100}}),  # its first token is the end
        (COMPLETIONS, {"kv_transfer_params": None, "min_tokens": 3, "ignore_eos": True}),
        (COMPLETIONS, {"prompt": "hi there"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_whatever_is_asked_for(pair: Pair, path: str, fields: dict[str, Any]) -> None:
    body = body_for(path, **fields)
    expected = said(pair.whole(path, body), stream=False)
    assert said(pair.split(path, body, stream=False), stream=False) == expected


def test_what_is_short_of_a_block_is_not_handed_over(pair: Pair) -> None:
    body, request_id = body_for(COMPLETIONS), f"short-{next(_IDS)}"
    answer = pair.prefilled(COMPLETIONS, body, request_id)
    parameters = json.loads(answer.parameters)
    parameters["remote_block_ids"] = [parameters["remote_block_ids"][0][:-1]]
    fewer = answer._replace(parameters=json.dumps(parameters).encode())
    with pytest.raises(NoHandover, match="1 blocks of 128"):
        NIXL.for_decode(TRANSFER, fewer)
    # So that nothing stays pinned.
    fetching = decode_body(body, NIXL.for_decode(TRANSFER, answer))
    pair.post(pair.decode, COMPLETIONS, fetching, request_id)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
def test_a_prefill_instance_that_has_gone_fails_the_stream_before_it_tells_anything(
    pair: Pair, path: str
) -> None:
    body, request_id = body_for(path, stream=True), f"gone-{next(_IDS)}"
    given = NIXL.for_decode(TRANSFER, pair.prefilled(path, body, request_id))
    gone = json.dumps(json.loads(given) | {"remote_port": 1, "remote_engine_id": "gone"}).encode()
    for parameters, expected in ((gone, Beginning.FAILED), (given, Beginning.BEGUN)):
        pair.http.post(pair.decode + "/reset_prefix_cache").raise_for_status()
        begun, broken = b"", False
        asked = decode_body(body, parameters)
        headers = {"content-type": "application/json"}
        with pair.http.stream("POST", pair.decode + path, content=asked, headers=headers) as answer:
            assert answer.status_code == 200
            try:
                for part in answer.iter_raw():
                    begun += part
                    if beginning_of(path, begun) is not Beginning.OPENING:
                        break
            except httpx.RemoteProtocolError:
                broken = True
        if broken:
            assert (path, beginning_of(path, begun)) == (RESPONSES, Beginning.OPENING)
        else:
            assert beginning_of(path, begun) is expected


# Through the gateway


async def test_the_gateway_splits_two_hundred_requests_and_each_is_as_one_engines(
    pair: Pair, tmp_path: Path
) -> None:
    config = gateway_over(pair, tmp_path)
    before, wrong = pair.computed(), []
    async with running_gateway(config) as gateway:
        client = await asyncio.to_thread(httpx.Client, base_url=gateway.url, timeout=120)
        await eventually(lambda: all(i.up for i in gateway.gateway.fleet.instances.values()))
        for number in range(200):
            path = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)[number % 4]
            stream = number % 8 >= 4
            body = body_for(path, stream=stream).replace(b"def main", b"def f%d" % number)
            alone = await asyncio.to_thread(pair.whole, path, body)
            computed = await asyncio.to_thread(pair.computed)
            headers = {"content-type": "application/json"}
            answer = await asyncio.to_thread(client.post, path, content=body, headers=headers)
            after = await asyncio.to_thread(pair.computed)
            assert answer.headers["x-hetero-gateway-prefill-instance"] == "prefill"
            if after["local_compute"] != computed["local_compute"]:
                wrong.append(f"{number}: {path} was computed twice")
            if said(answer.content, stream=stream) != said(alone, stream=stream):
                wrong.append(f"{number}: {path} {answer.text}, not {alone!r}")
        await eventually(gateway.settled)
        assert gateway.gateway.metrics.handovers == {"handed_over": 200}
        await asyncio.to_thread(client.close)
    assert wrong == []
    fetched = pair.computed()["external_kv_transfer"] - before["external_kv_transfer"]
    assert fetched > 200 * 100


def gateway_over(pair: Pair, folder: Path) -> GatewayConfig:
    """One engine is thought to be quick with prompts, the other one with answers."""
    rows = []
    for name, url in (("prefill", pair.prefill), ("decode", pair.decode)):
        constants = PROMPTS if name == "prefill" else ANSWERS
        file = folder / f"{name}.yaml"
        made = Profile("CPU", "tiny", 1, constants, 100_000, 64)
        write_profile_file(file, profile_document(made, {"how": "derived"}))
        row = {"id": name, "base_url": url, "profile": str(file), "model": "tiny"}
        rows.append(row | {"kv_transfer": {"connector": "NixlConnector"}})
    document = {
        "server": {"port": 0},
        "scheduler": {"split_requests": "each"},
        "instances": rows,
    }
    return GatewayConfig.model_validate(document)
