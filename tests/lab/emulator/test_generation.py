"""Answers, streamed and not, in the shapes that a real vLLM was seen to use."""

import json

import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def f(x): return x"}]}
FORCED = {"max_tokens": 4, "ignore_eos": True}
CHAT_TOKENS = 5 + 4 + 3  # 18 bytes, one message, the answer's header
USAGE = {"prompt_tokens": CHAT_TOKENS, "total_tokens": CHAT_TOKENS + 4, "completion_tokens": 4}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_a_plain_chat(instance):
    body = instance.ask(CHATS, {**CHAT, **FORCED})
    (choice,) = body["choices"]
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"].split()) == 4
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert body["usage"] == {
        **USAGE,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_a_chat_stream(instance):
    role, *deltas = instance.chunks(CHATS, {**CHAT, **FORCED})
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {(delta["id"], delta["object"]) for delta in deltas} == {
        (role["id"], "chat.completion.chunk")
    }
    assert [d["choices"][0]["finish_reason"] for d in deltas] == [None, None, None, "length"]
    assert all("usage" not in delta for delta in deltas)


def test_a_completion_stream_has_no_role_chunk(instance):
    chunks = instance.chunks(COMPLETIONS, {"prompt": "a b", **FORCED})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == 4
    assert all(texts)


def test_include_usage_adds_a_last_chunk_without_choices(instance):
    asked = {**CHAT, **FORCED, "stream_options": {"include_usage": True}}
    *_, last = instance.chunks(CHATS, asked)
    assert (last["choices"], last["usage"]) == ([], USAGE)


@pytest.mark.parametrize(("path", "before"), [(CHATS, [0]), (COMPLETIONS, [])])
def test_continuous_usage_counts_every_chunk(instance, path, before):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = instance.chunks(path, {**CHAT, "prompt": "x", **FORCED, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*before, 1, 2, 3, 4, 4]


def test_n_and_prompt_lists_interleave_by_index(instance):
    asked = {"prompt": ["def f(x):", "import os"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    plain = instance.ask(COMPLETIONS, asked)
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    assert plain["usage"]["prompt_tokens"] == 3 + 3
    assert plain["usage"]["completion_tokens"] == 12
    choices = [chunk["choices"][0] for chunk in instance.chunks(COMPLETIONS, asked)]
    indices = [choice["index"] for choice in choices]
    assert indices != sorted(indices) == [i for i in range(4) for _ in range(3)]
    assert sum(choice["finish_reason"] == "length" for choice in choices) == 4


def test_token_ids_are_counted_exactly(instance):
    for prompt, tokens, choices in (([5] * 37, 37, 1), ([[5] * 37, [6] * 3], 40, 2)):
        body = instance.ask(COMPLETIONS, {"prompt": prompt, **FORCED})
        assert (body["usage"]["prompt_tokens"], len(body["choices"])) == (tokens, choices)


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        (COMPLETIONS, {"prompt": "x"}, 16),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1}, 1),
        (CHATS, {**CHAT, "max_completion_tokens": 7, "max_tokens": 9}, 7),
        # Prompt and max_tokens beyond the window: silently clamped.
        (COMPLETIONS, {"prompt": [1] * 4000, "max_tokens": 4096}, 96),
    ],
)
def test_limits_and_defaults(instance, path, asked, told):
    body = instance.ask(path, {**asked, "ignore_eos": True})
    assert body["usage"]["completion_tokens"] == told
    assert body["choices"][0]["finish_reason"] == "length"


def test_an_answer_ends_itself_after_its_least_tokens(instance):
    body = instance.ask(COMPLETIONS, {"prompt": "x", "min_tokens": 300, "max_tokens": 4000})
    assert body["usage"]["completion_tokens"] >= 300
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_ends_it_even_with_ignore_eos(instance):
    asked = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stop": ["e"]}
    body = instance.ask(COMPLETIONS, asked)
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "e")
    assert "e" not in choice["text"]
    assert body["usage"]["completion_tokens"] < 200


def test_answers_of_one_seed_say_the_same(emulate):
    first, second, other = (
        emulate(seed=seed).ask(COMPLETIONS, {"prompt": "once", "max_tokens": 9})["choices"]
        for seed in (0, 0, 1)
    )
    assert first == second != other


def test_no_model_is_accepted_and_an_alias_is_echoed(instance):
    assert instance.ask(COMPLETIONS, {"prompt": "x"})["model"] == "tiny"
    assert instance.ask(COMPLETIONS, {"prompt": "x", "model": "alias"})["model"] == "alias"


def test_a_request_id_becomes_the_suffix(instance):
    answer = instance.ask(CHATS, {**CHAT, **FORCED}, headers={"X-Request-Id": "gw-123"})
    assert answer["id"] == "chatcmpl-gw-123"


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


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
    (answer,) = instance.ask(CHATS, asked)["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == finish
    _, *chunks = instance.chunks(CHATS, asked)
    parts = [chunk["choices"][0]["delta"]["tool_calls"][0]["function"] for chunk in chunks]
    streamed = {**parts[0], "arguments": "".join(part["arguments"] for part in parts)}
    for function in (call["function"], streamed):
        assert function["name"] == "weather"
        assert json.loads(function["arguments"]) == {"city": "text"}


def test_a_tool_result_is_answered_in_words(instance):
    messages = [*CHAT["messages"], {"role": "tool", "content": "5 degrees", "tool_call_id": "x"}]
    asked = {"messages": messages, "tools": [TOOL], "max_tokens": 5}
    (choice,) = instance.ask(CHATS, asked)["choices"]
    assert choice["message"]["content"]


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "json_object"}, {"text": "text"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBER}}, {"n": 1}),
    ],
)
def test_response_format_gives_json(instance, response_format, expected):
    (choice,) = instance.ask(CHATS, {**CHAT, "response_format": response_format})["choices"]
    assert json.loads(choice["message"]["content"]) == expected
    assert choice["finish_reason"] == "stop"


def test_messages(instance):
    asked = {**CHAT, "max_tokens": 4, "ignore_eos": True}
    plain = instance.ask("/v1/messages", asked)
    assert (plain["type"], plain["stop_reason"]) == ("message", "max_tokens")
    assert plain["content"][0]["type"] == "text"
    assert plain["usage"] == {"input_tokens": CHAT_TOKENS, "output_tokens": 4}
    events = [json.loads(data) for data in instance.stream("/v1/messages", asked)]
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", *["content_block_delta"] * 4),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[-2]["usage"]["output_tokens"] == 4


def test_responses(instance):
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 3, "ignore_eos": True}
    plain = instance.ask("/v1/responses", asked)
    assert (plain["object"], plain["status"]) == ("response", "incomplete")
    assert plain["output"][0]["content"][0]["type"] == "output_text"
    events = [json.loads(data) for data in instance.stream("/v1/responses", asked)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events][4:8] == [
        *["output_text.delta"] * 3,
        "output_text.done",
    ]
    assert events[-1]["type"] == "response.completed"
    whole = events[-1]["response"]
    assert whole["usage"]["output_tokens"] == 3
    text = "".join(event["delta"] for event in events if "delta" in event)
    assert whole["output"][0]["content"][0]["text"] == text


def test_embeddings_depend_on_the_input_alone(instance):
    def vectors(given):
        return [
            row["embedding"] for row in instance.ask("/v1/embeddings", {"input": given})["data"]
        ]

    assert vectors("a") == vectors(["a"])
    assert vectors(["a", "b"]) == vectors("a") + vectors("b")
    assert vectors("a") != vectors("b")
