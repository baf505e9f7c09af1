"""Lengths, words and token counts: seeded, and by the documented rules."""

import math
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.emulator.bodies import Ask
from hetero_gateway.lab.emulator.reply import make_answer
from hetero_gateway.lab.emulator.settings import LogNormalOutputs, TraceOutputs
from hetero_gateway.lab.emulator.text import SchemaError, sample_json, token_text, tokenize, words

LENGTHS = LogNormalOutputs(100, 1.0)


def answer(limit=200, seed=1, **asked):
    return make_answer(Ask(prompts=(b"word" * 5,), **asked), limit, LENGTHS, Random(seed))


def test_log_normal_lengths_have_the_mean_and_spread_asked_for():
    n = 20_000
    drawn = [LENGTHS.draw((i + 0.5) / n) for i in range(n)]
    assert fmean(drawn) == pytest.approx(100, rel=0.02)
    assert pstdev(drawn) == pytest.approx(100, rel=0.05)
    assert {LogNormalOutputs(50, 0).draw(u) for u in (0.01, 0.5, 0.99)} == {50}


def test_trace_lengths_come_from_the_column(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,7\n1,10,90\n")
    lengths = TraceOutputs.read(path)
    assert [lengths.draw(u) for u in (0.0, 0.49, 0.5, 0.999)] == [7, 7, 90, 90]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column output_tokens"),
        ("output_tokens\n", "has no rows"),
        ("output_tokens\n5\nx\n", "line 3"),
        (None, "cannot be read"),
    ],
)
def test_a_broken_trace_names_the_file(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        TraceOutputs.read(path)
    assert "trace.csv" in str(caught.value)


@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 60), st.integers(60, 300))
def test_an_answer_keeps_within_its_limits(seed, ignore_eos, min_tokens, limit):
    got = answer(limit, seed, ignore_eos=ignore_eos, min_tokens=min_tokens)
    assert max(1, min_tokens) <= len(got.pieces) <= limit
    if ignore_eos:
        assert (len(got.pieces), got.finish_reason) == (limit, "length")
    if got.finish_reason == "stop":
        assert not ignore_eos


def test_a_seed_decides_the_answer():
    assert answer(seed=3) == answer(seed=3)
    assert answer(seed=3).pieces != answer(seed=4).pieces


def test_a_stop_string_cuts_the_text_and_counts_its_tokens():
    pieces = answer(ignore_eos=True).pieces
    whole = b"".join(pieces).decode()
    stop = whole[40:46]
    got = answer(ignore_eos=True, stop=("never there", stop))
    assert b"".join(got.pieces).decode() == whole[: whole.index(stop)]
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    end = whole.index(stop) + len(stop)
    lengths = [len(piece) for piece in pieces]
    assert sum(lengths[: len(got.pieces) - 1]) < end <= sum(lengths[: len(got.pieces)])


def test_min_tokens_keeps_a_stop_string_from_ending_it_early():
    got = answer(ignore_eos=True, stop=("e",), min_tokens=100)
    assert 100 <= len(got.pieces) < 120
    assert got.finish_reason == "stop"


def test_forced_json_is_cut_only_by_the_limit():
    text = '{"some": "json text"}'
    assert b"".join(answer(forced_text=text).pieces).decode().replace("\\", "") == text
    assert answer(forced_text=text).finish_reason == "stop"
    cut = answer(limit=2, forced_text=text)
    assert (len(cut.pieces), cut.finish_reason) == (2, "length")


@given(st.text())
def test_a_text_survives_tokenizing(text):
    tokens = tokenize(text)
    assert len(tokens) == math.ceil(len(text.encode("utf-8", "replace")) / 4)
    back = b"".join(map(token_text, tokens))
    assert back == text.encode("utf-8", "replace")


@given(st.integers(0, 2**40), st.integers(1, 10_000))
def test_words_are_ascii_and_as_many_as_asked(offset, count):
    got = words(offset, count)
    assert len(got) == count
    assert all(word.isascii() and word.startswith(b" ") for word in got[:50])


def test_a_schema_gives_a_value_of_its_types():
    schema = {
        "type": "object",
        "$defs": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2}},
        "properties": {
            "name": {"type": "string"},
            "size": {"type": "integer", "minimum": 3},
            "kind": {"enum": ["a", "b"]},
            "at": {"$ref": "#/$defs/point"},
            "maybe": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "left_out": {"type": "string"},
        },
        "required": ["name", "size", "kind", "at", "maybe"],
    }
    assert sample_json(schema) == {
        "name": "text",
        "size": 3,
        "kind": "a",
        "at": [1, 1],
        "maybe": None,
    }
    with pytest.raises(SchemaError, match="Invalid type: zzz"):
        sample_json({"type": "zzz"})
    recursive = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    assert "x" in sample_json(recursive)
