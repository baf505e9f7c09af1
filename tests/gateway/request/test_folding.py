"""A long body without its long runs is read as the whole one is."""

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
from hetero_gateway.gateway.request import folding, openai
from hetero_gateway.gateway.request.folding import advance, finish, fold
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
    short, cuts, _ = finish(fold(body))
    assert cuts
    assert len(short) < share * len(body)
    assert len(short) + sum(cut.end - cut.start for cut in cuts) == len(body)


def insides(body: bytes) -> list[tuple[int, int]]:
    """What can be left out of a body, found byte by byte."""
    spans, depth, in_string, escaped = [], 0, False, False
    inside_from = string_from = 0
    for at, byte in enumerate(body):
        if in_string:
            if escaped:
                escaped = False
            elif byte == b"\\"[0]:
                escaped = True
            elif byte == b'"'[0]:
                in_string = False
                if depth == 1:
                    spans.append((string_from, at))
        elif byte == b'"'[0]:
            in_string, string_from = True, at + 1
        elif byte in b"[{":
            depth += 1
            if depth == 2:
                inside_from = at + 1
        elif byte in b"]}":
            depth -= 1
            if depth == 1:
                spans.append((inside_from, at))
    return [(start, end) for start, end in spans if end - start >= 512]


PIECES = [
    "\\", "\\\\", '"', '\\"', "{", "}", "[", "]", ",", "x", "漢", "{}[]", "\\" * 63, '""', "7, ",
]  # fmt: skip


def nested(rng: random.Random, depth: int) -> str:
    if depth == 0:
        text = "".join(rng.choice(PIECES) * rng.randrange(1, 90) for _ in range(rng.randrange(9)))
        return json.dumps(text, ensure_ascii=rng.random() < 0.5)
    parts = [nested(rng, rng.randrange(depth)) for _ in range(rng.randrange(6))]
    if rng.random() < 0.5:
        return "[" + ", ".join(parts) + "]"
    return "{" + ",".join(f"{json.dumps(rng.choice(PIECES))}:{part}" for part in parts) + "}"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("block_bytes", [300, 1 << 10, 1 << 16])
def test_the_insides_are_found_wherever_the_blocks_end(
    seed: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "_BLOCK_BYTES", block_bytes)
    rng = random.Random(seed)
    fields = [f"{json.dumps(rng.choice(PIECES))}:{nested(rng, 5)}" for _ in range(20)]
    body = ("{" + ",".join(fields) + "}").encode()
    _, cuts, _ = finish(fold(body))
    assert [(cut.start, cut.end) for cut in cuts] == insides(body)


@pytest.mark.parametrize(
    "body", [b"]" * 900 + b'{"a":' * 200, b'"' * 5000, b"\\" * 5000, b"}{" * 999]
)
def test_what_is_no_json_folds_to_something(body: bytes) -> None:
    short, _, _ = finish(fold(body))
    assert len(short) <= len(body)


def test_reading_can_stop_after_each_block() -> None:
    body = b'{"model":"m","n":[' + b"[]," * 500_000 + b"0]}"
    steps = fold(body)
    count = 0
    while (result := advance(steps, 0.0)) is None:
        count += 1
    assert count > len(body) / (1 << 17)
    assert len(result[0]) < 100


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
