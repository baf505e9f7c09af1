"""The emulated prefix cache: on real text, as vLLM's clients and metrics see it."""

import pytest

from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.lab.emulator.text import (
    answer_tokens,
    block_keys,
    chat_tokens,
    escape,
    id_tokens,
    text_tokens,
    tokenize,
    words,
)

HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
SYSTEM = {"role": "system", "content": "You are a careful clerk. " * 40}
CHAT = "/v1/chat/completions"


def chat(instance, messages, **fields):
    body = {"messages": messages, "max_tokens": 80, "ignore_eos": True, **fields}
    return instance.ask(CHAT, body)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_next_turn_finds_its_prompt_and_the_answer(emulate):
    one = emulate(prompt_tokens_details=True)
    messages = [SYSTEM, {"role": "user", "content": "How much is it?"}]
    first = chat(one, messages)
    assert cached(first) == 0
    reply = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And now?"}]
    second = chat(one, messages)
    # All that has KV: prompt and answer but for its newest token, in blocks of 16.
    total = first["usage"]["total_tokens"] - 1
    assert cached(second) == total // 16 * 16
    assert one.metric(HITS) == cached(second)
    assert one.metric(QUERIES) == sum(a["usage"]["prompt_tokens"] for a in (first, second))
    assert one.metric("vllm:prompt_tokens_cached_total") == cached(second)


def test_a_stream_says_it_in_its_closing_usage(emulate):
    one = emulate(prompt_tokens_details=True)
    body = {"messages": [SYSTEM], "max_tokens": 2, "stream_options": {"include_usage": True}}
    for expected in (0, 256):
        *_, last = one.chunks(CHAT, body)
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": expected}


@pytest.mark.parametrize(("caching", "hits"), [(True, 256), (False, 0)])
def test_the_counters_say_what_usage_says_only_with_the_flag(emulate, caching, hits):
    one = emulate(prefix_caching=caching)
    for _ in range(2):
        assert chat(one, [SYSTEM])["usage"]["prompt_tokens_details"] is None
    assert one.metric(HITS) == hits
    assert (one.metric(QUERIES) > 0) == caching
    assert f'enable_prefix_caching="{caching}"' in one.http.get("/metrics").text


def test_an_instance_without_one_says_that_nothing_was_cached(emulate):
    one = emulate(prefix_caching=False, prompt_tokens_details=True)
    assert [cached(chat(one, [SYSTEM])) for _ in range(2)] == [0, 0]


def test_salts_and_adapters_share_nothing(emulate):
    one = emulate(prompt_tokens_details=True, models=("tiny", "alias"), lora_modules=("lora",))
    chat(one, [SYSTEM])
    for fields, first in (
        ({"cache_salt": "a"}, 0),
        ({"model": "lora"}, 0),
        ({"model": "alias"}, 256),
    ):
        assert [cached(chat(one, [SYSTEM], **fields)) for _ in range(2)] == [first, 256], fields
    models = one.http.get("/v1/models").json()["data"]
    assert [(m["id"], m["parent"]) for m in models] == [
        ("tiny", None), ("alias", None), ("lora", "tiny"),
    ]  # fmt: skip


def test_a_reset_forgets(emulate):
    one = emulate(prompt_tokens_details=True)
    chat(one, [SYSTEM])
    assert one.http.post("/reset_prefix_cache").json() == {"success": True}
    assert cached(chat(one, [SYSTEM])) == 0
    assert one.http.get("/reset_prefix_cache").status_code == 405


def test_a_cached_prompt_is_quick(emulate):
    slow = Constants(p1=2e-4, p2=0, p3=0, p4=0, p5=0, p6=0, p7=0, p8=1e-3)
    one = emulate(slow)
    body = {"prompt": [7] * 4000, "max_tokens": 1}
    times_s = []
    for _ in range(2):
        before_s = one.metric("vllm:time_to_first_token_seconds_sum")
        one.post("/v1/completions", body)
        times_s.append(one.metric("vllm:time_to_first_token_seconds_sum") - before_s)
    # 0.8 s of prefill, and 3 ms for the last 16 tokens.
    assert times_s[0] > 0.75
    assert times_s[1] < times_s[0] / 2


TEXT = "The quick brown fox. " * 30


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
        ("/v1/responses", {"input": TEXT, "instructions": "Be short.", "max_output_tokens": 2}),
    ],
)
def test_every_endpoint_that_generates_has_it(emulate, path, body):
    one = emulate(prompt_tokens_details=True)
    _, again = [one.ask(path, body) for _ in range(2)]
    assert one.metric(HITS) >= 140
    if path == "/v1/responses":  # which says it always, as vLLM's does
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 160


@pytest.mark.parametrize("text", ["abcd" * 5, "a", "é" * 7, ""])
def test_ids_of_a_text_are_its_tokens(text):
    assert id_tokens(tokenize(text)) == text_tokens(text)


def test_an_answer_that_comes_back_is_the_same_tokens():
    pieces = words(7, 50)
    told = chat_tokens([("user", "Hi")]) + answer_tokens(pieces)
    again = chat_tokens([("user", "Hi"), ("assistant", b"".join(pieces).decode()), ("user", "?")])
    assert again.startswith(told)
    odd = [escape(part) for part in ('a"b\n', "\u00e9x", "z")]
    assert answer_tokens(odd) == b'a"b\n' + "\u00e9x".encode() + b"\xffz\xff\xff\xff"


def test_roles_and_tools_are_part_of_the_text():
    keys = {
        tuple(block_keys(chat_tokens(messages, tools) * 20, namespace))
        for messages in ([("user", "Hi")], [("system", "Hi")])
        for tools in (None, [{"name": "f"}])
        for namespace in ((None, None), (None, "salt"))
    }
    assert len(keys) == 8
