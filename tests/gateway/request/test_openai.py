"""What is read from a request's body and from a response's tail."""

import json
import time
from typing import Any

import pytest

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request.openai import parse_body, parse_in_steps, prompt_text
from hetero_gateway.gateway.turns import finish
from hetero_gateway.http.errors import error_body, sse_error_event


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [
        ([1, 2, 3], 3, 1),
        ([7], 1, 1),
        ([[1, 2], [3, 4, 5]], 5, 2),
        ([[1]], 1, 1),
        ([[], [1, 2], []], 2, 3),
        ([1, "a"], None, 1),
        ([[1], ["a", "b"]], None, 1),
        ([1, [2]], None, 1),
        (['a"b\\', "\\\\", '\\"', ""], None, 4),
        ("text", None, 1),
        (["one", "two, three [4]", "[5]"], None, 3),
        ([], None, 1),
        (None, None, 1),
    ],
)
def test_token_id_prompts_are_counted_exactly(
    prompt: object, tokens: int | None, prompts: int
) -> None:
    for indent in (None, 2):
        body = {"prompt": prompt, "x": [prompt] * 2}
        for raw in (json.dumps(body, indent=indent), json.dumps(body | {"y": "z" * 70_000})):
            parsed = parse_body(raw.encode(), b"")
            assert (parsed.exact_prompt_tokens, parsed.prompt_count) == (tokens, prompts)


def test_sequences_are_prompts_times_n() -> None:
    body = json.dumps({"prompt": ["a", "b"], "n": 3}).encode()
    assert parse_body(body, b"").sequences == 6


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        ("/v1/chat/completions", {"max_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ("/v1/chat/completions", {"max_output_tokens": 9}, None),  # no field of this path
        ("/v1/responses", {"max_output_tokens": 9, "max_tokens": 5}, 9),
        ("/v1/messages", {"max_tokens": 5}, 5),
        ("/invocations", {"messages": [], "max_completion_tokens": 7}, 7),
        ("/invocations", {"prompt": "", "max_completion_tokens": 7, "max_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_tokens": None}, None),
        ("/v1/embeddings", {"max_tokens": 5}, None),
        ("/v1/chat/completions", {}, None),
    ],
)
def test_the_output_limit_is_the_one_that_the_path_minds(
    path: str, fields: dict[str, object], limit: int | None
) -> None:
    assert parse_body(json.dumps(fields).encode(), b"", path).max_output_tokens == limit


def test_bytes_of_messages_tools_and_system_count() -> None:
    messages, tools = [{"role": "user", "content": "hello"}], [{"type": "function"}]
    alone = parse_body(json.dumps({"messages": messages}).encode(), b"")
    both = parse_body(json.dumps({"messages": messages, "tools": tools}).encode(), b"")
    assert alone.text_bytes == len(json.dumps(messages))
    assert both.text_bytes == alone.text_bytes + len(json.dumps(tools))


_SAID = [
    {"role": "system", "content": 'Sei höflich und "kurz" [1]'},
    {"role": "user", "content": "why? " * 40},
]
_SHOWN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]


@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"indent": 1}])
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": _SAID},
        {"messages": _SAID[1:]},
        {"stop": ["]"], "messages": _SAID, "tools": [{"type": "function"}], "n": 1},
        {"metadata": {"messages": _SAID}, "messages": _SAID},
        {"messages": _SAID, "metadata": {"messages": _SAID}},
        {"messages": _SAID * 3},
        {"messages": _SHOWN},
        {"tools": [{"type": "image"}], "messages": _SAID + _SHOWN * 2},
        {"messages": [{}] * 2000},
        {"messages": []},
        {"messages": ["said"]},
        {"messages": [[1], {}]},
        {"messages": "said"},
        {"messages": None},
    ],
)
def test_messages_that_are_split_at_once_are_read_as_a_long_body_is(
    fields: dict[str, object], style: dict[str, Any]
) -> None:
    path = "/v1/chat/completions"
    body = json.dumps({"model": "m", **fields}, **style).encode()
    for spaced in (body, body.replace(b"[", b" [ ")):
        in_steps = finish(parse_in_steps(spaced, b"", path, 7))
        assert parse_body(spaced, b"", path, 7) == in_steps


def test_escapes_count_as_the_characters_that_they_are() -> None:
    text = "größe 漢字" * 10
    escaped = parse_body(json.dumps({"prompt": text}).encode(), b"")
    plain = parse_body(json.dumps({"prompt": text}, ensure_ascii=False).encode(), b"")
    assert escaped.text_bytes == pytest.approx(plain.text_bytes, rel=0.2)


@pytest.mark.parametrize("size", [0, 100, 3_000_000])
def test_images_count_by_number_and_not_by_size(size: int) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
    content = [{"type": "text", "text": 'a "type": "image" in words'}, image, image]
    parsed = parse_body(
        json.dumps({"messages": [{"role": "user", "content": content}]}).encode(), b""
    )
    assert parsed.media_parts == 2
    assert parsed.text_bytes < 400


def test_unknown_and_odd_fields_are_left_alone() -> None:
    parsed = parse_body(b'{"model":"m","stream":[],"best_of":"x","zzz":{"a":[1]}}', b"")
    assert (parsed.model, parsed.stream, parsed.sequences) == ("m", False, 1)


@pytest.mark.parametrize(
    ("value", "streams"),
    [(True, True), (1, True), (1.0, True), ("true", True), ("On", True), (False, False),
     (None, False), (0, False), ("no", False), (2, False), ({}, False)],
)  # fmt: skip
def test_a_stream_is_what_an_engine_takes_for_one(value: object, streams: bool) -> None:
    assert parse_body(json.dumps({"stream": value}).encode(), b"").stream is streams


@pytest.mark.parametrize("size", [5000, 200_000])
def test_a_name_that_no_model_can_have_is_not_repeated(size: int) -> None:
    with pytest.raises(Refusal) as caught:
        parse_body(b'{"model":"%b"}' % (b"m" * size), b"")
    assert caught.value.param == "model"
    assert len(caught.value.message) < 100


def test_a_prompt_that_the_engine_truncates_is_known_for_it() -> None:
    body = {"prompt": [1] * 9, "truncate_prompt_tokens": 5}
    assert parse_body(json.dumps(body).encode(), b"").truncates


def test_the_model_of_a_multipart_upload_is_found() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n--b--'
    )
    kind, path = b"multipart/form-data; boundary=b", "/v1/audio/transcriptions"
    assert parse_body(body, kind, path).model == "whisper"
    assert parse_body(b"--b--", kind, path).model is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b'{"model": 5}', b"{\xff}"])
def test_unusable_bodies_are_the_clients_error(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        parse_body(body, b"")
    assert caught.value.status == 400


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "Infinity", '"\\ud800"', '"\ud800"'])
@pytest.mark.parametrize("size", [10, 5000, 70_000])
def test_what_only_pythons_json_reads_hides_no_prompt(odd: str, size: int) -> None:
    for fields in (
        {"prompt": "é" * size},
        {"prompt": ["a", "b\\"] * size},
        {"prompt": list(range(size))},
        {"messages": [{"role": "user", "content": 'NaN "' * size}]},
    ):
        plain = json.dumps(fields | {"model": "m", "max_tokens": 3})
        expected = parse_body(plain.encode(), b"", seed=7)
        spoilt = f'{plain[:-1]},"temperature":{odd}}}'.encode("utf-8", "surrogatepass")
        assert parse_body(spoilt, b"", seed=7) == expected


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        (b"", b"\xef\xbb\xbf"),
        (b'{"t":NaN,"x":"', b'\\"'),
        (b'{"t":NaN,"x":"', b"\\"),
        (b'{"t":NaN,', b'"'),
        (b'{"t":NaN,', b"NaN,"),
    ],
)
def test_what_is_nearly_json_is_read_in_linear_time(start: bytes, repeated: bytes) -> None:
    def least_s(size: int) -> float:
        body, spent_s = start + repeated * (size // len(repeated)), []
        for _ in range(5):
            began_s = time.process_time()
            with pytest.raises(Refusal):
                parse_body(body, b"", seed=7)
            spent_s.append(time.process_time() - began_s)
        return min(spent_s)

    # Eight times as much; quadratic it would be 64 times as long.
    assert least_s(16_000) < 24 * least_s(2_000)


def test_deeply_nested_bodies_do_no_harm() -> None:
    for opening in (b"[", b'{"a":'):
        with pytest.raises(Refusal):
            parse_body(b'{"messages":' + opening * 200_000, b"")


@pytest.mark.parametrize("depth", [2000, 200_000])
def test_a_body_deeper_than_a_stack_is_the_engines_to_judge(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    parsed = parse_body(b'{"model":"m","messages":%b,"n":2}' % nested, b"")
    assert (parsed.model, parsed.sequences, parsed.text_bytes) == ("m", 2, 2 * depth)


def test_errors_have_openais_shape_and_anthropics_where_that_is_spoken() -> None:
    error = Refusal(502, "upstream_error", "it broke", kind="server_error")
    assert json.loads(error_body(error)) == {
        "error": {
            "message": "it broke", "type": "server_error", "param": None, "code": "upstream_error",
        }
    }  # fmt: skip
    assert json.loads(error_body(error, "/v1/messages"))["type"] == "error"
    assert sse_error_event(error).startswith(b'data: {"error"')
    assert sse_error_event(error, "/v1/messages").startswith(b"event: error\ndata: ")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "one"}, "one"),
        ({"prompt": ["one", "two"]}, "one\ntwo"),
        ({"prompt": [1, 2, 3]}, ""),
        (
            {
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what is this? \u00e9"},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                        ],
                    },
                    {"role": "assistant", "content": None},
                ],
                "tools": [{"type": "function", "function": {"name": "f", "description": "no"}}],
            },
            "be brief\nwhat is this? \u00e9",
        ),
        ({"instructions": "be brief", "input": "one"}, "be brief\none"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, "a"),
        ({"system": [{"type": "text", "text": "s"}], "messages": 7}, "s"),
        ({}, ""),
    ],
)
def test_the_text_of_a_prompt_is_all_that_a_person_wrote(fields: object, text: str) -> None:
    assert prompt_text(json.dumps(fields).encode()) == text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"--b\r\nname=model\r\n", b"[" * 9999])
def test_a_body_without_text_has_none(body: bytes) -> None:
    assert prompt_text(body) == ""
