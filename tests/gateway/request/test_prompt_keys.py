"""A prompt's keys: the next turn begins with those of the last one, and with nothing else's."""

import json
import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from benchmarks.dataplane.parse_body import hostile_bodies
from hetero_gateway.core.request import keys_in_steps, keys_of, namespace, seed_of
from hetero_gateway.core.types import PrefixKeys
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request import openai
from hetero_gateway.gateway.request.items import MOST_ITEMS, items_of, places_of
from hetero_gateway.gateway.request.openai import parse_body
from hetero_gateway.gateway.turns import finish

SEED = seed_of(b"tests")
SAYINGS = [
    "words and ",
    "größe ",
    "漢字かな",
    "😀",
    "\n\t",
    "\\",
    '"quoted", ',
    "{[",
    "]}",
    '{"role":',
]


def keys(body: dict[str, Any] | bytes, path: str = "/v1/chat/completions") -> PrefixKeys:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    result = parse_body(raw, b"application/json", path, SEED).prefix
    assert result is not None
    return result


def in_long(body: bytes, monkeypatch: pytest.MonkeyPatch) -> PrefixKeys | None:
    """As if it were long."""
    with monkeypatch.context() as patch:
        patch.setattr(openai, "LEAST_BYTES", 0)
        return parse_body(body, b"", "/v1/chat/completions", SEED).prefix


def begins(long: PrefixKeys, short: PrefixKeys) -> bool:
    return long.hashes[: len(short.hashes)] == short.hashes and bool(short.hashes)


def said(rng: random.Random, size: int) -> str:
    return "".join(rng.choice(SAYINGS) * rng.randrange(1, 20) for _ in range(size // 60 + 1))


def message(rng: random.Random, size: int) -> dict[str, Any]:
    content: Any = said(rng, size)
    if rng.random() < 0.3:
        content = [{"type": "text", "text": content}, {"type": "text", "text": ["", {}]}]
    fields = [("role", rng.choice(["user", "assistant"])), ("content", content)]
    if rng.random() < 0.3:
        fields.append(("tool_calls", [{"function": {"name": "f", "arguments": "{}"}}]))
    rng.shuffle(fields)
    return dict(fields)


@pytest.mark.parametrize("seed", range(30))
def test_each_turn_begins_as_the_one_before_whatever_it_is_written_with(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    style: dict[str, Any] = rng.choice(
        [{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}]
    )
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(rng.randrange(4))]
    messages = [message(rng, 500)]
    turns = []
    for _ in range(6):
        fields = [
            ("model", "m"),
            ("messages", messages),
            ("max_tokens", rng.randrange(1, 99)),
            ("temperature", rng.random()),
            ("tools", tools),
        ]
        rng.shuffle(fields)
        raw = json.dumps(dict(fields), **style).encode()
        turns.append(keys(raw))
        assert turns[-1] == in_long(raw, monkeypatch)
        messages = [*messages, message(rng, 4000), message(rng, 300)]
    for before, after in pairwise(turns):
        assert begins(after, before)
        assert after.text_bytes > before.text_bytes
        covered = before.ends[-1] / before.text_bytes
        assert covered > 0.9, "a turn's own end is a key, but for a scrap"


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ({"prompt": "one two " * 900}, {"prompt": "one two " * 1900}, "/v1/completions"),
        ({"prompt": [*range(2000)]}, {"prompt": [*range(4000)]}, "/v1/completions"),
        (
            {"instructions": "be brief", "input": "hello " * 400},
            {"instructions": "be brief", "input": "hello " * 900},
            "/v1/responses",
        ),
        (
            {"instructions": "i" * 99, "input": [{"role": "user", "content": "a" * 50}]},
            {
                "instructions": "i" * 99,
                "input": [
                    {"role": "user", "content": "a" * 50},
                    {"type": "message", "role": "assistant", "content": "b"},
                ],
            },
            "/v1/responses",
        ),
        (
            {"system": "s" * 99, "messages": [{"role": "user", "content": "a" * 50}]},
            {
                "messages": [{"role": "user", "content": "a" * 50}, {"role": "user"}],
                "system": "s" * 99,
            },
            "/v1/messages",
        ),
    ],
)
def test_every_path_that_generates_has_keys(
    first: dict[str, Any], second: dict[str, Any], path: str
) -> None:
    short, long = (keys({"model": "m", **body}, path) for body in (first, second))
    shared = sum(a == b for a, b in zip(short.hashes, long.hashes, strict=False))
    assert shared >= len(short.hashes) - 1 >= 1


SAME = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m-lora"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"chat_template": "a"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False, "x": "y" * 9000 + "1" + "y" * 9000}},
        {"reasoning_effort": "high"},
        {"documents": [{"text": "a"}]},
        {"mm_processor_kwargs": {"x": 1}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"system": "you are"},
        {"messages": [{"role": "user", "content": [IMAGE, "x" * 5000]}]},
    ],
)
def test_what_makes_a_prompt_another_one_changes_all_its_keys(change: dict[str, Any]) -> None:
    ours, theirs = keys(SAME), keys({**SAME, **change})
    assert not set(ours.hashes) & set(theirs.hashes)
    assert keys({**SAME, **change}) == theirs


def test_what_is_no_part_of_a_prompt_changes_nothing() -> None:
    other = {"stream": True, "max_tokens": 7, "user": "u", **SAME, "temperature": 0, "x": [{}]}
    assert keys(other) == keys(SAME)


def test_a_secret_of_ones_own_shares_nothing() -> None:
    raw = json.dumps(SAME).encode()
    ours = parse_body(raw, b"", seed=SEED).prefix
    theirs = parse_body(raw, b"", seed=namespace(SEED, b"tenant")).prefix
    assert ours is not None
    assert theirs is not None
    assert not set(ours.hashes) & set(theirs.hashes)


def test_a_prompt_that_is_cut_off_has_none() -> None:
    for size in (10, 100_000):
        raw = json.dumps({"model": "m", "input": "x" * size, "truncate_prompt_tokens": 5}).encode()
        assert parse_body(raw, b"", "/v1/responses", SEED).prefix is None


@pytest.mark.parametrize("size", [100, 100_000])
def test_what_continues_a_response_has_the_keys_of_what_it_adds_to_that_one(size: int) -> None:
    def parsed(**more: Any) -> openai.ParsedRequest:
        raw = json.dumps({"model": "m", "input": "x" * size, **more}).encode()
        return parse_body(raw, b"", "/v1/responses", SEED)

    first, plain = parsed(previous_response_id="resp_1"), parsed()
    assert (first.previous, plain.previous) == (b"resp_1", b"")
    assert first.head == plain.head == parsed(previous_response_id="resp_2").head != 0
    assert first.head != parsed(previous_response_id="resp_1", instructions="be kind").head
    found = [
        each.prefix.hashes
        for each in (
            first,
            plain,
            parsed(previous_response_id="resp_2"),
            parsed(previous_response_id="resp_1", instructions="be kind"),
        )
        if each.prefix is not None
    ]
    assert len(set(found)) == 4
    assert parsed(previous_response_id="resp_1", max_output_tokens=4).prefix == first.prefix
    # Elsewhere the field means nothing.
    raw = b'{"model":"m","messages":[],"previous_response_id":"resp_1"}'
    assert parse_body(raw, b"", "/v1/chat/completions", SEED).previous == b""
    assert parsed(previous_response_id=None).previous == b""
    # What is no id is nobody's response, and not no reference: it is refused where these are owned.
    for odd in (7, ["resp_1"], {"id": "resp_1"}, "x" * 300, ""):
        assert parsed(previous_response_id=odd).previous not in (b"", b"resp_1")


def test_nobody_who_does_not_ask_gets_any() -> None:
    assert parse_body(json.dumps(SAME).encode(), b"").prefix is None
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nw\r\n--b--'
    kind, path = b"multipart/form-data; boundary=b", "/v1/audio/transcriptions"
    assert parse_body(form, kind, path, SEED).prefix is None


def test_hostile_bodies_have_few_keys_and_the_same_ones_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind, body in hostile_bodies(60_000):
        if kind in ("UTF-16", "no JSON", "random"):
            continue
        try:
            found = parse_body(body, b"", "/v1/completions", SEED).prefix
        except Refusal:
            continue
        assert found is not None, kind
        assert found == in_long(body, monkeypatch), kind
        assert len(found.hashes) <= 200, kind


@pytest.mark.parametrize("unit", [b"{},", b"[[]],", b'{"":""},', b'"",', b"0,"])
def test_a_million_tiny_messages_are_a_few_hundred_keys(unit: bytes) -> None:
    body = b'{"model":"m","messages":[' + unit * 1_000_000 + b"{}]}"
    steps = openai.parse_in_steps(body, b"", "/v1/chat/completions", SEED)
    parsed = finish(steps)
    assert parsed.prefix is not None
    assert 10 < len(parsed.prefix.hashes) < 320


@pytest.mark.parametrize("sizes", [[6 << 20], [3 << 20, 10, 0, 31, 1 << 20, 5000], [70] * 60_000])
def test_what_is_hashed_in_steps_has_the_keys_of_what_is_hashed_at_once(sizes: list[int]) -> None:
    data, end, parts = memoryview(random.Random(1).randbytes(sum(sizes))), 0, []
    for size in sizes:
        parts.append(data[end : end + size])
        end += size
    steps = keys_in_steps(parts, 7)
    assert sum(1 for _ in keys_in_steps(parts, 7)) > 4
    assert finish(steps) == keys_of(parts, 7)


def test_deep_nesting_is_one_message() -> None:
    for depth in (500, 200_000):
        body = b'{"model":"m","messages":[' + b"[" * depth + b"]" * depth + b"]}"
        assert keys(body).text_bytes == 2 * depth


@pytest.mark.parametrize("seed", range(20))
def test_the_items_of_an_array_are_found_where_they_stand(seed: int) -> None:
    rng = random.Random(seed)
    style: dict[str, Any] = rng.choice([{}, {"separators": (",", ":")}, {"indent": 1}])
    items = [message(rng, rng.choice([10, 3000, 90_000])) for _ in range(rng.randrange(1, 60))]
    field = json.dumps(items, **style).encode()
    found = places_of(msgspec.Raw(field), items_of(msgspec.Raw(field)))
    assert [json.loads(field[start:end]) for start, end in found] == items


def test_of_a_million_items_the_first_are_made() -> None:
    field = msgspec.Raw(b"[" + b"[ ], {}," * 500_000 + b"0]")
    found = items_of(field)
    assert [bytes(item) for item in found[:2]] == [b"[ ]", b"{}"]
    assert len(found) == MOST_ITEMS
    assert places_of(field, found)[-2:] == [
        (4 * MOST_ITEMS - 7, 4 * MOST_ITEMS - 4),
        (4 * MOST_ITEMS - 2, 4 * MOST_ITEMS),
    ]
