"""Answers, streamed and not, in the shapes that a real vLLM was seen to use."""

import json

import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def f(x): return x"}]}
FORCED = {"max_tokens": 4, "ignore_eos": True}
CHAT_TOKENS = 5 + 4 + 3  # 18 bytes, one message, the answer's header


def test_a_plain_chat(instance):
    body = instance.post("/v1/chat/completions", {**CHAT, **FORCED}).json()
    (choice,) = body["choices"]
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"].split()) == 4
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert body["usage"] == {
        "prompt_tokens": CHAT_TOKENS,
        "total_tokens": CHAT_TOKENS + 4,
        "completion_tokens": 4,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_a_chat_stream(instance):
    *chunks, done = instance.stream("/v1/chat/completions", {**CHAT, **FORCED})
    assert done == "[DONE]"
    role, *deltas = (json.loads(chunk) for chunk in chunks)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(deltas) == 4
    assert all(delta["object"] == "chat.completion.chunk" for delta in deltas)
    assert len({delta["id"] for delta in deltas}) == 1
    assert [d["choices"][0]["finish_reason"] for d in deltas] == [None, None, None, "length"]
    assert all("usage" not in delta for delta in deltas)
    plain = instance.post("/v1/chat/completions", {**CHAT, **FORCED}).json()
    assert len(plain["choices"]) == 1


def test_a_completion_stream_has_no_role_chunk(instance):
    *chunks, done = instance.stream("/v1/completions", {"prompt": "a b", **FORCED})
    assert done == "[DONE]"
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == 4
    assert all(texts)


def test_include_usage_adds_a_last_chunk_without_choices(instance):
    asked = {**CHAT, **FORCED, "stream_options": {"include_usage": True}}
    *_, usage, done = instance.stream("/v1/chat/completions", asked)
    assert done == "[DONE]"
    last = json.loads(usage)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": CHAT_TOKENS,
        "total_tokens": CHAT_TOKENS + 4,
        "completion_tokens": 4,
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_continuous_usage_counts_every_chunk(instance, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**CHAT, "prompt": "x", **FORCED, "stream_options": options}
    *chunks, _ = instance.stream(path, asked)
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == ([0] if "chat" in path else []) + [1, 2, 3, 4, 4]


def test_n_and_prompt_lists_interleave_by_index(instance):
    asked = {"prompt": ["def f(x):", "import os"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    plain = instance.post("/v1/completions", asked).json()
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    assert plain["usage"]["prompt_tokens"] == 3 + 3
    assert plain["usage"]["completion_tokens"] == 12
    *chunks, _ = instance.stream("/v1/completions", asked)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert sorted(choice["index"] for choice in choices) == [i for i in range(4) for _ in range(3)]
    assert [choice["index"] for choice in choices] != sorted(c["index"] for c in choices)
    assert sum(choice["finish_reason"] == "length" for choice in choices) == 4


def test_token_ids_are_counted_exactly(instance):
    one = instance.post("/v1/completions", {"prompt": [5] * 37, **FORCED}).json()
    two = instance.post("/v1/completions", {"prompt": [[5] * 37, [6] * 3], **FORCED}).json()
    assert one["usage"]["prompt_tokens"] == 37
    assert two["usage"]["prompt_tokens"] == 40
    assert len(two["choices"]) == 2


def test_limits_and_defaults(instance):
    def tokens(path, **asked):
        body = instance.post(path, asked).json()
        return body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]

    assert tokens("/v1/completions", prompt="x", ignore_eos=True) == (16, "length")
    assert tokens("/v1/completions", prompt="x", max_tokens=1) == (1, "length")
    messages = CHAT["messages"]
    limited = tokens(
        "/v1/chat/completions", messages=messages, max_completion_tokens=7, max_tokens=9,
        ignore_eos=True,
    )  # fmt: skip
    assert limited == (7, "length")
    # Prompt and max_tokens beyond the window: silently clamped.
    clamped = tokens("/v1/completions", prompt=[1] * 4000, max_tokens=4096, ignore_eos=True)
    assert clamped == (96, "length")
    count, reason = tokens("/v1/completions", prompt="x", min_tokens=300, max_tokens=4000)
    assert count >= 300
    assert reason == "stop"


def test_a_stop_string_ends_it_even_with_ignore_eos(instance):
    body = instance.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stop": ["e"]}
    ).json()
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "e")
    assert "e" not in choice["text"]
    assert body["usage"]["completion_tokens"] < 200


def test_streamed_and_plain_answers_of_one_seed_say_the_same(emulate):
    first, second = emulate(), emulate()
    asked = {"prompt": "once", "max_tokens": 9}
    assert (
        first.post("/v1/completions", asked).json()["choices"]
        == second.post("/v1/completions", asked).json()["choices"]
    )
    other = emulate(seed=1)
    assert (
        first.post("/v1/completions", asked).json()["choices"]
        != other.post("/v1/completions", asked).json()["choices"]
    )


def test_no_model_is_accepted_and_an_alias_is_echoed(instance):
    assert instance.post("/v1/completions", {"prompt": "x"}).json()["model"] == "tiny"
    answer = instance.post("/v1/completions", {"prompt": "x", "model": "alias"}).json()
    assert answer["model"] == "alias"


def test_a_request_id_becomes_the_suffix(instance):
    headers = {"X-Request-Id": "gw-123"}
    answer = instance.post("/v1/chat/completions", {**CHAT, **FORCED}, headers=headers)
    assert answer.json()["id"] == "chatcmpl-gw-123"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
        ("auto", "tool_calls"),
    ],
)
def test_tools_are_called(instance, choice, finish):
    asked = {**CHAT, "tools": [TOOL], "tool_choice": choice}
    (answer,) = instance.post("/v1/chat/completions", asked).json()["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == finish
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "text"}
    *chunks, _ = instance.stream("/v1/chat/completions", asked)
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[1:]]
    calls = [delta["tool_calls"][0] for delta in deltas]
    assert calls[0]["function"]["name"] == "weather"
    text = "".join(part["function"]["arguments"] for part in calls)
    assert json.loads(text) == {"city": "text"}


def test_a_tool_result_is_answered_in_words(instance):
    messages = [*CHAT["messages"], {"role": "tool", "content": "5 degrees", "tool_call_id": "x"}]
    asked = {"messages": messages, "tools": [TOOL], "max_tokens": 5}
    (choice,) = instance.post("/v1/chat/completions", asked).json()["choices"]
    assert choice["message"]["content"]


def test_response_format_gives_json(instance):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for response_format, expected in (
        ({"type": "json_object"}, {"text": "text"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, {"n": 1}),
    ):
        asked = {**CHAT, "response_format": response_format}
        (choice,) = instance.post("/v1/chat/completions", asked).json()["choices"]
        assert json.loads(choice["message"]["content"]) == expected
        assert choice["finish_reason"] == "stop"


def test_messages(instance):
    asked = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 4, "ignore_eos": True}
    plain = instance.post("/v1/messages", asked).json()
    assert (plain["type"], plain["stop_reason"]) == ("message", "max_tokens")
    assert plain["content"][0]["type"] == "text"
    assert plain["usage"] == {"input_tokens": CHAT_TOKENS, "output_tokens": 4}
    events = [json.loads(data) for data in instance.stream("/v1/messages", asked)]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["usage"]["output_tokens"] == 4


def test_responses(instance):
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 3, "ignore_eos": True}
    plain = instance.post("/v1/responses", asked).json()
    assert (plain["object"], plain["status"]) == ("response", "incomplete")
    assert plain["output"][0]["content"][0]["type"] == "output_text"
    events = [json.loads(data) for data in instance.stream("/v1/responses", asked)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events][4:8] == [
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
    ]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["output_tokens"] == 3
    text = "".join(event["delta"] for event in events if "delta" in event)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text


def test_embeddings_depend_on_the_input_alone(instance):
    def vectors(given):
        data = instance.post("/v1/embeddings", {"input": given}).json()["data"]
        return [row["embedding"] for row in data]

    assert vectors("a") == vectors(["a"])
    assert vectors(["a", "b"]) == vectors("a") + vectors("b")
    assert vectors("a") != vectors("b")
