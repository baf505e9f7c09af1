"""An engine's answers come through byte for byte; the gateway's own errors have OpenAI's form."""

import json
import re
from typing import Any

import httpx
import pytest
from real_vllm.cluster import Cluster, chat
from real_vllm.servers import ALIASES

pytestmark = pytest.mark.real_vllm

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NAME = ALIASES["small"]
# An engine's own headers; the gateway may add some, and each connection has its own.
HEADERS = ("content-type", "content-length")


def two_ways(cluster: Cluster, path: str, body: object) -> tuple[httpx.Response, httpx.Response]:
    """What the engine answers directly, and through the gateway."""
    return cluster.post(path, body, cluster.engines["small"].base_url), cluster.post(path, body)


LONG = [{"role": "user", "content": "x = 1\n" * 3000}]
REFUSED_BY_THE_ENGINE: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": (CHAT, chat(2, NAME, temperature=-1)),
    "temperature-type": (CHAT, chat(2, NAME, temperature="warm")),
    "top_p": (CHAT, chat(2, NAME, top_p=7)),
    "max_tokens-beyond-context": (CHAT, chat(5000, NAME)),
    "no-messages": (CHAT, {"model": NAME, "max_tokens": 2}),
    "no-prompt": (COMPLETIONS, {"model": NAME, "max_tokens": 2}),
    "prompt-too-long": (CHAT, chat(2, NAME, messages=LONG)),
    "prompt-too-long-streamed": (CHAT, chat(2, NAME, messages=LONG, stream=True)),
    "token-id-out-of-range": (COMPLETIONS, {"model": NAME, "prompt": [9999], "max_tokens": 2}),
    "embeddings": ("/v1/embeddings", {"model": NAME, "input": "hello"}),
}


@pytest.mark.parametrize("case", REFUSED_BY_THE_ENGINE)
def test_an_engine_s_refusal_is_passed_through_byte_for_byte(cluster: Cluster, case: str) -> None:
    path, body = REFUSED_BY_THE_ENGINE[case]
    direct, through = two_ways(cluster, path, body)
    assert direct.status_code >= 400
    assert (through.status_code, through.content) == (direct.status_code, direct.content)
    for name in HEADERS:
        assert through.headers.get(name) == direct.headers.get(name)
    assert through.headers["x-hetero-gateway-instance"] == "small"


# Numbers that the gateway reads itself, and no engine accepts.
REFUSED_BY_BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "max_tokens": ("max_tokens", chat(0, NAME)),
    "max_tokens-negative": ("max_tokens", chat(-1, NAME)),
    "n": ("n", chat(2, NAME, n=0)),
}


@pytest.mark.parametrize("case", REFUSED_BY_BOTH)
def test_what_the_gateway_refuses_itself_the_engine_would_refuse(cluster, case):
    parameter, body = REFUSED_BY_BOTH[case]
    direct, through = two_ways(cluster, CHAT, body)
    assert direct.status_code == 400
    assert (through.status_code, through.json()["error"]["param"]) == (400, parameter)


def test_a_prompt_that_is_known_not_to_fit_is_refused_by_the_gateway(cluster: Cluster) -> None:
    """Token ids are counted, not estimated, so there is nothing for the engine to judge."""
    answer = cluster.post(COMPLETIONS, {"model": NAME, "prompt": [7] * 4097, "max_tokens": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    fits = cluster.post(COMPLETIONS, {"model": NAME, "prompt": [7] * 4095, "max_tokens": 1})
    assert fits.status_code == 200


# return_token_ids is vLLM's own and unknown to OpenAI: unknown fields must arrive.
GREEDY = chat(30, NAME, temperature=0, return_token_ids=True)


def test_an_answer_is_the_engine_s_own_but_for_id_and_time(cluster: Cluster) -> None:
    def without_identity(response: httpx.Response) -> str:
        return re.sub(r'"id":"[^"]*"|"created":\d+', "", response.text)

    direct, through = two_ways(cluster, CHAT, GREEDY)
    assert through.status_code == direct.status_code == 200
    assert '"token_ids":[' in through.text
    assert without_identity(through) == without_identity(direct)
    assert through.headers["content-type"] == direct.headers["content-type"]


def test_a_stream_is_the_engine_s_own(cluster: Cluster) -> None:
    """Token by token: how many of them share a chunk is chance."""

    def tokens(response: httpx.Response) -> tuple[list[int], str, object]:
        *events, done = [event for event in response.text.split("\n\n") if event]
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ids = [token for choice in choices for token in choice.get("token_ids") or []]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return ids, text, chunks[-1]["usage"]

    body = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    direct, through = two_ways(cluster, CHAT, body)
    assert len(tokens(through)[0]) == 30
    assert tokens(through) == tokens(direct)
    assert through.headers["content-type"] == direct.headers["content-type"]


def test_paths_beside_v1_are_routed_too(cluster: Cluster) -> None:
    direct, through = two_ways(cluster, "/tokenize", {"model": NAME, "prompt": "import os"})
    assert direct.status_code == 200
    assert through.content == direct.content


@pytest.mark.parametrize("streamed", [False, True])
def test_an_unknown_model_is_answered_by_the_gateway(cluster: Cluster, streamed: bool) -> None:
    answer = cluster.post(CHAT, chat(2, "nobody-serves-this", stream=streamed))
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert "nobody-serves-this" in error["message"]
    assert "x-hetero-gateway-instance" not in answer.headers


@pytest.mark.parametrize(
    "body",
    [b'{"model": "tiny", "messages": [', b"[]", b"", b'{"messages": []}'],
    ids=["broken", "array", "empty", "no-model"],
)
def test_a_body_that_cannot_be_routed_is_a_400_of_the_gateway(cluster, body):
    answer = cluster.post(CHAT, body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_the_client_s_request_id_comes_back(cluster: Cluster) -> None:
    answer = cluster.http.post(
        cluster.url + CHAT, json=chat(2), headers={"x-request-id": "mine-123"}
    )
    assert answer.headers["x-request-id"] == "mine-123"
    assert answer.json()["id"].endswith("mine-123")
