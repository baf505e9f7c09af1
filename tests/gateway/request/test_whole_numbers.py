"""Whole numbers are read as pydantic reads them, which is what an engine validates bodies with."""

import json
import random

import pydantic
import pytest

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request import whole_numbers
from hetero_gateway.gateway.request.openai import parse_body

PYDANTIC = pydantic.TypeAdapter(int | None)
ODD = [
    None, True, False, 0, 5, -1, 2.0, 2.5, -0.0, 1e18, 1e19, 1e300, float("inf"), float("nan"),
    2**63, 10**310, "", ".", "5", " 5 ", "+5", "5.0", "5.", "1_000", "1__0", "1e3", "0x10", "٣",
    "NaN", "9" * 4300, "9" * 5000, "1 2", "\x0b5", "\u20035",
]  # fmt: skip
PIECES = ["+", "-", "0", "1", "5", "_", ".", "00", " ", "e", "\t", "x", "٣", "\u2003", "9" * 30]


def values() -> list[object]:
    rng = random.Random(1)
    return [*ODD, *("".join(rng.choices(PIECES, k=rng.randrange(1, 6))) for _ in range(4000))]


def test_what_pydantic_takes_is_read_alike_and_never_refused() -> None:
    taken = 0
    for value in values():
        try:
            expected = PYDANTIC.validate_python(value)
        except pydantic.ValidationError:
            continue
        if expected is not None and expected <= 0:
            continue  # nobody may ask for so many
        taken += 1
        assert whole_numbers.read(value, "n") == expected
    assert taken > 300


@pytest.mark.parametrize(
    "raw",
    [b"x", b"[]", b"{}", b"[" * 9999, b"9" * 5000, b"1e400x", b'"' + b"9" * 9000 + b'"', b""],
)
def test_what_is_no_number_is_decoded_without_harm(raw: bytes) -> None:
    assert whole_numbers.decode(raw) is ...


def body(path: str, fields: str) -> bytes:
    key = '"prompt":"a"' if path == "/v1/completions" else '"messages":[]'
    return b'{"model":"m",%b,%b}' % (key.encode(), fields.encode())


UNACCEPTABLE = [
    "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", '"x"', '""', "[]", "[1]", "{}", '"1e3"',
    "1" + "0" * 310, "1" + "0" * 5000, "1e300", '"' + "9" * 5000 + '"', "9" * 19 + "9",
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "n"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "n"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/invocations", "n"),
    ],
)
@pytest.mark.parametrize("value", UNACCEPTABLE)
@pytest.mark.parametrize("padding", [0, 100_000], ids=["short", "long"])
def test_a_number_that_no_engine_accepts_is_refused_by_name(
    path: str, name: str, value: str, padding: int
) -> None:
    for fields in (f'"{name}":{value}', f'"x":"{"x" * padding}","{name}":{value}'):
        with pytest.raises(Refusal) as caught:
            parse_body(body(path, fields), b"", path)
        refusal = caught.value
        assert (refusal.status, refusal.param) == (400, name), (refusal.message, value)
        assert len(refusal.message) < 100


@pytest.mark.parametrize(
    ("path", "fields", "sequences", "limit"),
    [
        ("/v1/chat/completions", '"n":"2","max_tokens":"5"', 2, 5),
        ("/v1/chat/completions", '"n":2.0,"max_tokens":5e0', 2, 5),
        ("/v1/chat/completions", '"n":true,"max_tokens":null', 1, None),
        ("/v1/chat/completions", '"n":null', 1, None),
        ("/v1/chat/completions", '"n":20000', 20_000, None),  # VLLM_MAX_N_SEQUENCES may say so
        ("/v1/chat/completions", '"n":1,"n":3', 3, None),
        ("/v1/chat/completions", '"\\u006e":3', 3, None),
        ("/v1/chat/completions", '"max_tokens":9223372036854775807', 1, 2**63 - 1),
        ("/v1/chat/completions", '"max_completion_tokens":7,"max_tokens":-1', 1, 7),
        ("/v1/chat/completions", '"max_completion_tokens":0', 1, None),
        ("/v1/completions", '"max_tokens":0', 1, None),  # with echo
        ("/v1/completions", '"max_completion_tokens":-1,"max_tokens":3', 1, 3),
        ("/v1/responses", '"n":-5,"max_tokens":"x","max_output_tokens":4', 1, 4),
        ("/v1/embeddings", f'"n":1e400,"max_tokens":-1,"x":{10**310}', 1, None),
        ("/v1/chat/completions", f'"seed":{"9" * 4000},"best_of":-1,"logprobs":1e400', 1, None),
        ("/v1/chat/completions", '"temperature":NaN,"n":2', 2, None),
        ("/v1/chat/completions", '"x":"\\ud800","n":2', 2, None),
    ],
)
def test_what_some_engine_accepts_is_read_as_it_does(
    path: str, fields: str, sequences: int, limit: int | None
) -> None:
    for raw in (body(path, fields), body(path, fields + f',"x":"{"y" * 100_000}"')):
        parsed = parse_body(raw, b"", path)
        assert (parsed.model, parsed.sequences, parsed.max_output_tokens) == ("m", sequences, limit)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_an_encoding_that_pythons_json_finds_out_is_read(encoding: str, size: int) -> None:
    document = {"model": "größe", "prompt": "x" * size, "n": 2}
    raw = json.dumps(document, ensure_ascii=False).encode(encoding)
    parsed = parse_body(raw, b"", "/v1/completions")
    assert (parsed.model, parsed.sequences) == ("größe", 2)
    assert parsed.text_bytes >= size
