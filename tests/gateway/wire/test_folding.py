"""A long body without its long runs is read as the whole one is."""

import json
import random
from typing import Any

import pytest

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.wire import openai
from hetero_gateway.gateway.wire.folding import fold
from hetero_gateway.gateway.wire.openai import ParsedRequest, parse_body, prompt_field

WORDS = [
    "words and ",
    "größe ",
    "漢字かな",
    "😀",
    "\n\t",
    "\\",
    '"quoted", ',
    "1, 2, 3, ",
    "[x]",
]


def whole(body: bytes, monkeypatch: pytest.MonkeyPatch) -> ParsedRequest:
    """What a body says when nothing is left out."""
    with monkeypatch.context() as patch:
        patch.setattr(openai, "LEAST_BYTES", 1 << 60)
        return parse_body(body, b"")


def text(rng: random.Random, size: int) -> str:
    """Long stretches of one kind, each now and then broken by another."""
    parts: list[str] = []
    while size > 0:
        part = rng.choice(WORDS) * rng.randrange(1, 4000)
        parts.append(part)
        size -= len(part)
    return "".join(parts)


def field(rng: random.Random) -> Any:
    numbers = [rng.randrange(128_000) for _ in range(rng.choice([3, 3000, 20_000]))]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A8/+" * 9000}}
    said = {"type": "text", "text": text(rng, 9000)}
    return rng.choice(
        [
            text(rng, 50_000),
            numbers,
            [numbers, numbers[::-1]],
            [[1, 2]] * 9000,
            [text(rng, 5000), text(rng, 5000)],
            [{"role": "user", "content": [said, image, said]}],
            [0.5] * 9000,
            [True, None] * 9000,
            None,
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_folded_body_says_what_the_whole_one_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    names = ["prompt", "messages", "input", "system", "tools", "metadata", "unknown"]
    document: dict[str, Any] = {name: field(rng) for name in rng.sample(names, 4)}
    document |= {"model": "m", "stream": True, "max_tokens": 7, "n": 2}
    items = list(document.items())
    rng.shuffle(items)
    style = rng.choice([{}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}])
    body = json.dumps(dict(items), **style).encode()
    assert parse_body(body, b"") == whole(body, monkeypatch)


@pytest.mark.parametrize(
    ("prompt", "share"),
    [("words " * 40_000, 0.1), ("漢字" * 40_000, 0.1), (list(range(40_000)), 0.2)],
)
def test_long_runs_are_left_out(prompt: object, share: float) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    short, runs = fold(body)
    assert runs
    assert len(short) < share * len(body)
    assert len(short) + sum(run.size_bytes for run in runs) == len(body)


@pytest.mark.parametrize("end", [b"", b"}", b'", "model": 5}'])
def test_a_long_body_that_is_no_json_is_refused_as_a_short_one_is(end: bytes) -> None:
    with pytest.raises(Refusal):
        parse_body(b'{"model": "m", "prompt": "' + b"x" * 200_000 + end, b"")


def test_the_tokenizer_gets_the_whole_prompt() -> None:
    words = "words " * 40_000
    body = json.dumps({"model": "m", "prompt": words}).encode()
    assert json.loads(prompt_field(body)) == words
