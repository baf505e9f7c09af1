import json
from typing import Any

import pytest

from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool


def make(kind: PromptKind, *, stream: bool = True, bytes_per_token: float = 4.0) -> BodyMaker:
    return BodyMaker("m", kind, stream, bytes_per_token, filler_pool())


def decode(maker: BodyMaker, index: int, inputs: int, outputs: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(maker.body(index, inputs, outputs))
    return document


@pytest.mark.parametrize("tokens", [1, 2, 100, 40_000])
def test_a_text_prompt_has_the_documented_bytes(tokens: int) -> None:
    chat = decode(make(PromptKind.CHAT), 12345, tokens, 9)["messages"][0]["content"]
    text = decode(make(PromptKind.COMPLETION, bytes_per_token=3.5), 12345, tokens, 9)["prompt"]
    assert len(chat.encode()) == 4 * tokens
    assert len(text.encode()) == round(3.5 * tokens)


def test_a_token_id_prompt_is_exact() -> None:
    prompt = decode(make(PromptKind.TOKEN_IDS), 3, 777, 9)["prompt"]
    assert len(prompt) == 777
    assert all(isinstance(token, int) and token > 0 for token in prompt)


def test_the_output_length_is_forced() -> None:
    body = decode(make(PromptKind.CHAT), 0, 10, 9)
    assert body.pop("messages")
    assert body == {
        "model": "m", "max_tokens": 9, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_an_output_length_can_be_kept_from_who_reads_max_tokens() -> None:
    maker = BodyMaker("m", PromptKind.TOKEN_IDS, True, 4.0, filler_pool(), max_tokens=512)
    body = decode(maker, 0, 10, 9)
    assert (body["max_tokens"], body["min_tokens"]) == (512, 9)
    assert "ignore_eos" not in body


def test_a_plain_request_does_not_ask_for_stream_options() -> None:
    body = decode(make(PromptKind.CHAT, stream=False), 0, 10, 9)
    assert not {"stream", "stream_options"} & body.keys()


@pytest.mark.parametrize("kind", list(PromptKind))
def test_prompts_differ_early_so_that_no_prefix_is_shared(kind: PromptKind) -> None:
    maker = make(kind)
    bodies = [decode(maker, k, 64, 1) for k in range(200)]
    starts = {str(b.get("prompt") or b["messages"][0]["content"])[:32] for b in bodies}
    assert len(starts) == 200


def test_no_two_token_id_prompts_begin_alike() -> None:
    maker = make(PromptKind.TOKEN_IDS)
    beginnings = {tuple(decode(maker, i, 16, 9)["prompt"]) for i in range(0, 200_000, 500)}
    assert len(beginnings) == 400
