"""What vLLM's answers say: usage, failures, models."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.engines.vllm import (
    ModelCard,
    completion_counts_in,
    deltas_in,
    failed_in_tail,
    read_models,
    response_id_in,
    tokens_of_events,
    usage_in_tail,
)

# The end of a stream that was under way when the engine was killed, chunk sizes and all.
KILLED = (
    b'b6\r\ndata: {"id":"cmpl-1","choices":[{"index":0,"text":"ies\\n","finish_reason":null}]}\n\n'
    b'\r\na9\r\ndata: {"error": {"message": "EngineCore encountered an issue.", '
    b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
    b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
# How a stream of /v1/messages fails.
MESSAGES_FAILED = (
    b'\n\n\r\n5f\r\nevent: error\ndata: {"type":"error","error":{"message":"gone"}}\n\n'
)
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
COUNTED = b'data: {"choices":[{"index":0,"text":"a"}],"usage":{"completion_tokens":%d}}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\n'


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'"usage":{"prompt_tokens":14,"total_tokens":20,"completion_tokens":6}}', (14, 6, None)),
        (b'"usage": {"completion_tokens": 6, "prompt_tokens": 14}', (14, 6, None)),
        (b'"usage":{"input_tokens":10,"output_tokens":5,"output_tokens_details":{}}',
         (10, 5, None)),
        (b'"usage":{"prompt_tokens":1,"completion_tokens":1}}\n"usage":{"prompt_tokens":2,'
         b'"completion_tokens":3}}', (2, 3, None)),
        (b'"usage":null', (None, None, None)),
        (b'"usage":null,"x":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}',
         (1, 1, None)),
        (b'"usage":{"prompt_tokens":1,"prompt_tokens":2,"completion_tokens":3}', (1, 3, None)),
        (b'"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":-1}', (1, None, None)),
        (b'"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1},"cached_tokens":7',
         (1, 1, 7)),
        (b'{"content":"\\"usage\\":{\\"prompt_tokens\\":9}"}', (None, None, None)),
        (b'"usage":{"prompt_tokens":%b,"completion_tokens":3}' % (b"9" * 5000), (None, 3, None)),
        (b"", (None, None, None)),
        # chat and completions, with and without --enable-prompt-tokens-details
        (b'"usage":{"prompt_tokens":600,"total_tokens":601,"completion_tokens":1,'
         b'"prompt_tokens_details":{"cached_tokens":512,"created_cache_tokens":null}',
         (600, 1, 512)),
        (b'"usage":{"prompt_tokens":600,"total_tokens":601,"completion_tokens":1,'
         b'"prompt_tokens_details":{"cached_tokens":0,"multimodal_tokens":null}}', (600, 1, 0)),
        (b'"usage":{"prompt_tokens":600,"completion_tokens":1,"prompt_tokens_details":null}',
         (600, 1, None)),
        # responses
        (b'"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":8,'
         b'"cached_tokens_per_turn":[]},"output_tokens":4}', (10, 4, 8)),
        # messages, whose input_tokens are without what the cache had
        (b'"usage":{"input_tokens":88,"output_tokens":4,"cache_read_input_tokens":512}',
         (600, 4, 512)),
        (b'"usage":{"input_tokens":80,"output_tokens":4,"cache_creation_input_tokens":8,'
         b'"cache_read_input_tokens":0}', (88, 4, 0)),
        (b'"usage":{"prompt_tokens":5,"completion_tokens":1,"cached_tokens":%b}' % (b"9" * 5000),
         (5, 1, None)),
    ],
)  # fmt: skip
def test_usage_is_read_from_the_tail(tail: bytes, usage: tuple[int | None, ...]) -> None:
    assert usage_in_tail(tail) == usage


WRITTEN = json.dumps({"delta": '\nevent: error\ndata: {"error": 1}\n'}).encode()


@pytest.mark.parametrize(
    ("tail", "failed"),
    [
        (b'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n', True),
        (b'"finish_reason":"abort"', True),
        (KILLED, True),  # in spite of its [DONE]
        (MESSAGES_FAILED, True),
        (b'event: error\ndata: {"type":"error"}\n\n', True),
        # What a client or a model writes of events is no failure.
        (KILLED.replace(b'{"error"', b'{"choices"'), False),
        (b'data: {"content":"data: {\\"error\\""}\n\n', False),
        (b"data: " + WRITTEN + b"\n\n", False),
    ],
)
def test_an_engines_failure_is_seen_and_a_text_about_one_is_not(tail: bytes, failed: bool) -> None:
    assert failed_in_tail(tail) is failed


@pytest.mark.parametrize(
    ("path", "events", "tokens"),
    [
        ("/v1/chat/completions", 10, 8),  # the role chunk and [DONE]
        ("/v1/completions", 10, 9),  # [DONE]
        ("/v1/chat/completions", 1, 0),
    ],
)
def test_events_that_can_carry_no_token_are_not_counted(
    path: str, events: int, tokens: int
) -> None:
    assert tokens_of_events(path, events) == tokens


def test_a_stream_that_counts_says_its_tokens_with_every_event() -> None:
    events = ROLE + COUNTED % 1 + COUNTED % 2 + USAGE
    assert deltas_in(events) == 3
    assert completion_counts_in(events) == [1, 2, 2]


def test_models_are_read_in_their_order_with_their_context_windows() -> None:
    cards = [
        {"id": "tiny", "max_model_len": 4096},
        {"id": "lora", "max_model_len": None},
        {"id": "odd", "max_model_len": True},
        {"id": 7, "max_model_len": 4096},
        "no card",
    ]
    models = read_models(json.dumps({"object": "list", "data": cards}).encode())
    assert models is not None
    windows = [(name, card.max_model_len) for name, card in models.items()]
    assert windows == [("tiny", 4096), ("lora", None), ("odd", None)]
    assert read_models(b'{"data": []}') == {}


def test_a_card_is_kept_as_far_as_it_is_one() -> None:
    permission = [{"id": "p", "allow_view": True, "group": None, "created": 1}]
    whole = {
        "id": "lora", "object": "model", "created": 1700000000, "owned_by": "vllm",
        "root": "/models/lora", "parent": "base", "max_model_len": 9, "permission": permission,
    }  # fmt: skip
    odd = {
        "id": "odd", "created": -1, "owned_by": ["x"], "root": "a" * 1025, "parent": "a\nb",
        "max_model_len": "9", "permission": [{"id": {"deep": 1}}],
    }  # fmt: skip
    long = {
        "id": "long",
        "permission": [{"id": "x" * 2048}],
        "owned_by": "\x1b[31m",
        "created": 1.5,
    }
    models = read_models(json.dumps({"data": [whole, odd, long]}).encode())
    assert models is not None
    assert models["lora"] == ModelCard(
        9, 1700000000, "vllm", "/models/lora", "base", tuple(permission)
    )
    assert models["odd"] == models["long"] == ModelCard()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["data", "id", "x"]), inner),
)


@given(JSON)
def test_no_document_is_too_odd_to_be_no_list_of_models(document: object) -> None:
    models = read_models(json.dumps(document).encode())
    listed = isinstance(document, dict) and isinstance(document.get("data"), list)
    assert (models is not None) is listed


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b'{"data": [}', b"\xff", b"[" * 200_000, b'{"data":' * 50_000, b"9" * 5000],
)
def test_what_is_no_json_is_no_list_of_models(body: bytes) -> None:
    assert read_models(body) is None


@given(
    st.lists(
        st.sampled_from(
            [b'"usage"', b'{"', b'"prompt_tokens"', b'"output_tokens"', b" : ", b"9" * 4301, b"7"]
        )
        | st.binary(max_size=8)
    ).map(b"".join)
)
def test_no_tail_is_too_odd_to_be_read(tail: bytes) -> None:
    assert all(count is None or count >= 0 for count in usage_in_tail(tail))
    assert failed_in_tail(tail) in (True, False)
    assert all(count < 10**15 for count in completion_counts_in(tail))


def test_the_id_of_a_response_is_in_its_first_bytes() -> None:
    plain = b'{"id":"resp_9af","created_at":1,"output":[{"id":"msg_1"}]}'
    event = b'2df\r\nevent: response.created\ndata: {"response":{"id": "resp_a42","object":""}'
    assert response_id_in(plain) == b"resp_9af"
    assert response_id_in(event) == b"resp_a42"
    for odd in (b"", b'{"id":7}', b'{"id":"a\\u0020b"}', b'{"id":"%b"}' % (b"x" * 300)):
        assert response_id_in(odd) == b""
    assert response_id_in(b" " * 1024 + plain) == b""
