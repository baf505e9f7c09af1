"""A long body is read as a short one is, and whatever it is made of takes little."""

import contextlib
import functools
import json
import random
import sys
from types import FrameType
from typing import Any

import pytest

from benchmarks.dataplane.parse_body import hostile_bodies, memory_bytes
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request import openai
from hetero_gateway.gateway.request.byte_counts import load_scans
from hetero_gateway.gateway.request.openai import ParsedRequest, parse_body, prompt_field

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


def at_once(body: bytes, monkeypatch: pytest.MonkeyPatch) -> ParsedRequest:
    """What a body says that is read as if it were short."""
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
def test_a_long_body_says_what_a_short_one_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    names = ["prompt", "messages", "input", "system", "tools", "metadata", "unknown"]
    document: dict[str, Any] = {name: field(rng) for name in rng.sample(names, 4)}
    document |= {"model": "m", "stream": True, "max_tokens": 7, "n": 2}
    items = list(document.items())
    rng.shuffle(items)
    style = rng.choice([{}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}])
    body = json.dumps(dict(items), **style).encode()
    assert parse_body(body, b"") == at_once(body, monkeypatch)


def test_a_body_of_nothing_but_fields_is_refused() -> None:
    with pytest.raises(Refusal) as caught:
        parse_body(b'{"model":"m",' + b'"n":[],' * 100_000 + b'"n":1}', b"")
    assert (caught.value.status, caught.value.code) == (400, "too_many_fields")


HOSTILE_BYTES = 1 << 18


@functools.cache
def hostile() -> dict[str, bytes]:
    return dict(hostile_bodies(HOSTILE_BYTES))


@pytest.mark.parametrize("kind", dict(hostile_bodies(100)))
def test_no_body_takes_long_or_much_memory(kind: str) -> None:
    """In calls and bytes, which no busy machine changes; in seconds by the benchmark."""
    body = hostile()[kind]
    load_scans()  # as ``LongBodies`` has done
    calls = 0

    def trace(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(trace)
    try:
        with contextlib.suppress(Refusal):
            parse_body(body, b"", "/v1/completions")
    finally:
        sys.setprofile(None)
    assert calls < 15_000  # what looks at each value would need 20 000 and more
    assert memory_bytes(body) < 3 * len(body) + 2_000_000


@pytest.mark.parametrize("end", [b"", b"}", b'", "model": 5}'])
def test_a_long_body_that_is_no_json_is_refused_as_a_short_one_is(end: bytes) -> None:
    with pytest.raises(Refusal):
        parse_body(b'{"model": "m", "prompt": "' + b"x" * 200_000 + end, b"")


def test_the_tokenizer_gets_the_whole_prompt() -> None:
    words = "words " * 40_000
    body = json.dumps({"model": "m", "prompt": words}).encode()
    assert json.loads(prompt_field(body)) == words
