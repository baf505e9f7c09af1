"""A prompt computed by one real engine and answered by another: as if one had done both.

``scripts/real-vllm --pair`` starts the two. The bodies are those of ``engines/vllm/kv_transfer``,
sent by hand first, and then by a gateway.
"""

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.engines.vllm.kv_transfer import (
    Beginning,
    NoHandover,
    beginning_of,
    decode_body,
)
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS, RESPONSES
from tests.real_vllm.kv_pair import (
    NIXL,
    OUTPUT_TOKENS,
    PATHS,
    TRANSFER,
    Pair,
    body_for,
    said,
    served,
)

pytestmark = pytest.mark.real_vllm

REQUESTS = int(os.environ.get("HETERO_GATEWAY_REAL_VLLM_REQUESTS", "200"))
_IDS = itertools.count()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
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
        (CHAT_COMPLETIONS, {"prompt_logprobs": 1}),
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


@pytest.mark.parametrize("path", PATHS)
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
    before, wrong = pair.computed(), []
    async with served(pair, tmp_path) as at:
        for number in range(REQUESTS):
            path, stream = PATHS[number % 4], number % 8 >= 4
            body = body_for(path, stream=stream).replace(b"def main", b"def f%d" % number)
            alone = await asyncio.to_thread(pair.whole, path, body)
            computed = await asyncio.to_thread(pair.computed)
            answer = await at.ask(path, body)
            after = await asyncio.to_thread(pair.computed)
            if "x-hetero-gateway-prefill-instance" not in answer.headers:
                decisions = (await at.client.get("/admin/decisions?limit=1")).json()
                reason = decisions["decisions"][0]["reason"]
                wrong.append(f"{number}: {path} was not split: {at.results}, {reason}")
            if after["local_compute"] != computed["local_compute"]:
                wrong.append(f"{number}: {path} was computed twice")
            if said(answer.content, stream=stream) != said(alone, stream=stream):
                wrong.append(f"{number}: {path} {answer.text}, not {alone!r}")
        assert wrong == []
        assert at.results == {"handed_over": REQUESTS}
    fetched = pair.computed()["external_kv_transfer"] - before["external_kv_transfer"]
    assert fetched > REQUESTS * 100
