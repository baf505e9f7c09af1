"""A stream that breaks off anywhere, told to its end by another engine: one stream, exact sums."""

import json

import pytest

from hetero_gateway.engines.vllm import DONE, continuations
from hetero_gateway.engines.vllm.continuations import (
    NOTHING_TOLD,
    Fidelity,
    NotContinuable,
    Splice,
    Told,
    continuing_body,
    missing_end,
    told_by,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = [" the", ' "quoted"', " line\n", " é", " end"]


def event(data: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(data).encode()


def chunk(
    path: str, name: str, text: str | None, finish: str | None = None, **more: object
) -> dict:
    if path == CHAT:
        delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    else:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {"id": name, "created": len(name), "model": "m", "choices": [choice | more]}


def usage(name: str, prompt: int, output: int) -> dict:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"id": name, "created": len(name), "model": "m", "choices": [], "usage": counts}


def stream(path: str, name: str, words: list[str], prompt_tokens: int) -> list[bytes]:
    """As an engine tells it, an event a word."""
    events = [chunk(path, name, None)] if path == CHAT else []
    events += [chunk(path, name, word) for word in words[:-1]]
    events += [chunk(path, name, words[-1], "stop"), usage(name, prompt_tokens, len(words))]
    return [*map(event, events), b"data: [DONE]\n\n"]


def read(events: bytes) -> list[dict]:
    assert events.endswith(b"data: [DONE]\n\n")
    lines = [line[6:] for line in events.split(b"\n\n") if line]
    return [json.loads(line) for line in lines[:-1]]


def texts(path: str, events: list[dict]) -> list[str]:
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [
        c["text"] if path == COMPLETIONS else c["delta"].get("content")
        for c in choices
        if path == COMPLETIONS or "content" in c["delta"]
    ]


BODIES = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Say."}], "stream": True},
    COMPLETIONS: {"model": "m", "prompt": "Say:", "stream": True},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("cut", range(1, 5))
@pytest.mark.parametrize("read_bytes", [7, 100_000])
def test_wherever_it_breaks_the_client_sees_one_stream(path, cut, read_bytes) -> None:
    whole = stream(path, "first", WORDS, 10)
    told = told_by(path, b"".join(whole[:cut]))
    said = len([word for word in texts(path, [json.loads(e[6:]) for e in whole[:cut]]) if word])
    assert (told.text, told.tokens) == ("".join(WORDS[:said]), said)
    rest = b"".join(stream(path, "second", WORDS[said:], 10 + said))
    splice = Splice(path, told)
    passed = b"".join(
        splice.feed(rest[i : i + read_bytes]) for i in range(0, len(rest), read_bytes)
    )
    events = read(b"".join(whole[:cut]) + passed)
    assert {(e["id"], e["created"]) for e in events} == {("first", 5)}
    assert "".join(filter(None, texts(path, events))) == "".join(WORDS)
    if path == CHAT:
        roles = [e for e in events if e["choices"] and "role" in e["choices"][0]["delta"]]
        assert len(roles) == 1
    assert events[-1]["usage"] == usage("", 10, len(WORDS))["usage"]
    assert splice.usage == (10, len(WORDS))
    assert splice.told.finished
    assert splice.told.text == "".join(WORDS)
    assert splice.done


def told(text: str = " the cat", tokens: int = 2, **more: object) -> Told:
    return Told({"id": "x", "created": 1, "model": "m"}, text, tokens, **more)


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        (BODIES[COMPLETIONS], {"prompt": "Say: the cat", "max_tokens": 14}),
        (
            BODIES[COMPLETIONS] | {"max_tokens": 30, "min_tokens": 1, "prompt": ["Say:"]},
            {"prompt": "Say: the cat", "max_tokens": 28, "min_tokens": 0},
        ),
        (
            BODIES[CHAT] | {"max_completion_tokens": 9, "temperature": 0, "seed": 4},
            {
                "messages": [
                    {"role": "user", "content": "Say."},
                    {"role": "assistant", "content": " the cat"},
                ],
                "max_completion_tokens": 7,
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (
            BODIES[CHAT]
            | {"messages": [{"role": "assistant", "content": "Once"}]}
            | {"continue_final_message": True, "add_generation_prompt": False},
            {"messages": [{"role": "assistant", "content": "Once the cat"}]},
        ),
    ],
)
def test_what_the_client_has_is_a_part_of_the_prompt(fields, changed) -> None:
    path = CHAT if "messages" in fields else COMPLETIONS
    body = continuing_body(path, json.dumps(fields).encode(), told(), Fidelity.TEXT_SAFE)
    assert json.loads(body) == fields | changed


def test_ids_that_were_returned_continue_exactly() -> None:
    first = chunk(COMPLETIONS, "a", " x", token_ids=[7], prompt_token_ids=[1, 2])
    held = chunk(COMPLETIONS, "a", "", token_ids=[8])
    second = chunk(COMPLETIONS, "a", "é", token_ids=[9])
    seen = told_by(COMPLETIONS, b"".join(map(event, (first, held, second))))
    assert (seen.tokens, seen.token_ids, seen.prompt_ids) == (3, (7, 8, 9), (1, 2))
    fields = BODIES[COMPLETIONS] | {"return_token_ids": True, "max_tokens": 10}
    body = continuing_body(COMPLETIONS, json.dumps(fields).encode(), seen, Fidelity.TEXT_SAFE)
    assert json.loads(body)["prompt"] == [1, 2, 7, 8, 9]
    assert json.loads(body)["max_tokens"] == 7


def test_half_a_character_is_made_anew_and_told_once() -> None:
    first = chunk(COMPLETIONS, "a", " x", token_ids=[7], prompt_token_ids=[1, 2])
    held = chunk(COMPLETIONS, "a", "", token_ids=[8])
    whole = chunk(COMPLETIONS, "b", "é", token_ids=[9])
    seen = told_by(COMPLETIONS, event(first) + event(held))
    fields = BODIES[COMPLETIONS] | {"return_token_ids": True, "max_tokens": 10}
    asked = continuing_body(COMPLETIONS, json.dumps(fields).encode(), seen, Fidelity.TEXT_SAFE)
    assert json.loads(asked)["prompt"] == [1, 2, 7]
    assert json.loads(asked)["max_tokens"] == 9
    splice = Splice(COMPLETIONS, seen)
    assert splice.feed(event(held)) == b""
    passed = json.loads(splice.feed(event(whole))[6:])
    assert passed["choices"][0]["token_ids"] == [9]
    assert splice.told.token_ids == (7, 8, 9)
    other = Splice(COMPLETIONS, seen)
    assert b'"token_ids":[5]' in other.feed(event(chunk(COMPLETIONS, "b", "", token_ids=[5])))


def test_before_the_first_token_the_request_is_sent_as_it_was() -> None:
    seen = told_by(CHAT, event(chunk(CHAT, "a", None)))
    body = json.dumps(BODIES[CHAT]).encode()
    assert continuing_body(CHAT, body, seen, Fidelity.TEXT_SAFE) == body
    assert seen.opened


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": 2}, "`n`"),
        ({"tools": [{"type": "function"}]}, "`tools`"),
        ({"response_format": {"type": "json_object"}}, "`response_format`"),
        ({"guided_json": {}}, "`guided_json`"),
        ({"echo": True}, "`echo`"),
        ({"seed": 4}, "`seed`"),
        ({"logprobs": True}, "`logprobs`"),
        ({"presence_penalty": 0.5}, "`presence_penalty`"),
        ({"max_tokens": 2}, "all of its tokens"),
        ({"stop": ["cats"]}, "a stop string"),
        ({"stop": "t!"}, "a stop string"),
        ({"add_generation_prompt": False}, "generation prompt"),
        ({"messages": "hello"}, "no messages"),
    ],
)
def test_what_would_not_be_exact_is_not_continued(more, why) -> None:
    body = json.dumps(BODIES[CHAT] | more).encode()
    with pytest.raises(NotContinuable, match=why):
        continuing_body(CHAT, body, told(), Fidelity.TEXT_SAFE)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (BODIES[COMPLETIONS], "all of its tokens"),
        (BODIES[COMPLETIONS] | {"prompt": [1, 2], "max_tokens": 99}, "token ids"),
        (BODIES[COMPLETIONS] | {"prompt": ["a", "b"], "max_tokens": 99}, "several prompts"),
    ],
)
def test_nor_is_a_completion_without_tokens_left_or_with_an_unknown_prompt(fields, why) -> None:
    with pytest.raises(NotContinuable, match=why):
        continuing_body(
            COMPLETIONS, json.dumps(fields).encode(), told(tokens=16), Fidelity.TEXT_SAFE
        )


@pytest.mark.parametrize("more", [{"seed": 4}, {"presence_penalty": 0.5}, {"stop": ["cats"]}])
def test_all_continues_what_is_well_formed(more) -> None:
    body = json.dumps(BODIES[CHAT] | more).encode()
    assert json.loads(continuing_body(CHAT, body, told(), Fidelity.ALL))["continue_final_message"]
    tools = json.dumps(BODIES[CHAT] | {"tools": [{}]}).encode()
    with pytest.raises(NotContinuable):
        continuing_body(CHAT, tools, told(), Fidelity.ALL)


BROKEN = {
    "within an event": b'data: {"id": "a"',
    "no JSON": b"data: nonsense\n\n",
    "failed in words": event({"error": {"message": "EngineCore died"}}),
    "several sequences": event({"choices": [{}, {}]}),
    "more than text": event({"choices": [{"index": 1, "delta": {"content": "x"}}]}),
}
TOOLS = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}
REASONS = {"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}
PROBABLE = {"choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": {"content": []}}]}


@pytest.mark.parametrize(
    ("why", "events"),
    [
        *BROKEN.items(),
        *(("more than text", event(e)) for e in (TOOLS, REASONS, PROBABLE)),
    ],
)
def test_an_answer_that_is_more_than_one_text_is_not_continued(why, events) -> None:
    with pytest.raises(NotContinuable, match=why):
        told_by(CHAT, events)


def test_what_is_finished_has_nothing_to_continue() -> None:
    seen = told_by(CHAT, event(chunk(CHAT, "a", "x", "stop")))
    assert seen.finished
    assert not seen.closed
    with pytest.raises(NotContinuable):
        continuing_body(CHAT, json.dumps(BODIES[CHAT]).encode(), seen, Fidelity.ALL)


def test_an_engine_that_never_ends_its_event_is_left(monkeypatch) -> None:
    monkeypatch.setattr(continuations, "_MOST_EVENT_BYTES", 1000)
    splice = Splice(CHAT, NOTHING_TOLD)
    assert splice.feed(b": keep alive\n\n") == b": keep alive\n\n"
    with pytest.raises(NotContinuable, match="no end"):
        splice.feed(b"data: " + b"x" * 1000)


def test_continuous_usage_counts_the_whole() -> None:
    splice = Splice(CHAT, told())
    counted = chunk(CHAT, "b", " sat") | {
        "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    }
    passed = json.loads(splice.feed(event(counted))[6:])
    assert passed["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


FINISHED = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
COUNTED = FINISHED.replace(b"}]}", b'}],"usage":{"completion_tokens":3}}')
CLOSING = b'data: {"id":"c","choices":[],"usage":{"completion_tokens":3}}\n\n'


@pytest.mark.parametrize(
    ("tail", "sequences", "missing"),
    [
        (FINISHED, 1, DONE),
        (b"\r\n4e\r\n" + FINISHED + b"\r\n", 1, DONE),
        (COUNTED, 1, CLOSING + DONE),
        (COUNTED + CLOSING, 1, DONE),
        (FINISHED + DONE, 1, b""),
        (FINISHED * 2, 2, DONE),
        (FINISHED, 2, None),
        (FINISHED[:-1], 1, None),
        (FINISHED + b"data: {", 1, None),
        (FINISHED.replace(b"stop", b"abort"), 1, None),
        (FINISHED.replace(b'"stop"', b"null"), 1, None),
        (FINISHED + b'data: {"error": {}}\n\n', 1, None),
        (rb'data: {"choices":[{"text":"\"finish_reason\":\"stop\""}]}' + b"\n\n", 1, None),
        (b"", 1, None),
    ],
)
def test_what_a_stream_lacks_that_broke_off_at_its_end(
    tail: bytes, sequences: int, missing: bytes | None
) -> None:
    assert missing_end(tail, sequences) == missing
