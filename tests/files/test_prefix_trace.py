"""Traces with prefixes: what is read, and what is refused with one line."""

import gzip
import json

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.prefix_trace import read_prefix_trace
from hetero_gateway.files.trace import read_trace, schedule

HEADER = {"block_tokens": 64, "output_blocks": True, "source": "made up"}
ROW = {"t": 0.5, "in": 200, "out": 60, "s": 3, "k": 2, "b": [[7, 2], 11, [20, 9]]}


def written(tmp_path, *lines, name="trace.jsonl.gz"):
    path = tmp_path / name
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl"])
def test_a_request_has_its_lengths_and_its_text(tmp_path, name):
    (row,) = read_prefix_trace(written(tmp_path, HEADER, ROW, name=name))
    assert row[:3] == (0.5, 200, 60)
    assert (row.text.session, row.text.turn) == (3, 2)
    # 260 tokens are four full blocks of 64; the rest of the ids does not count.
    assert row.text.runs == ((7, 2), (11, 1), (20, 1))
    (request,) = read_trace(written(tmp_path, HEADER, ROW, name=name))
    assert (request.arrival_s, request.input_tokens, request.output_tokens) == (0.5, 200, 60)
    assert request.text == row.text
    (load,) = schedule([request], None, 0)
    assert load.text == row.text


def test_without_the_answers_blocks_only_the_prompts_count(tmp_path):
    (row,) = read_prefix_trace(written(tmp_path, {"block_tokens": 64}, ROW))
    assert row.text.runs == ((7, 2), (11, 1))


def test_a_request_without_a_session_is_one_by_itself(tmp_path):
    bare = {"t": 1, "in": 5, "out": 1}
    rows = read_prefix_trace(written(tmp_path, HEADER, bare, bare))
    assert len({row.text.session for row in rows}) == 2
    assert [row.text.turn for row in rows] == [1, 1]
    assert rows[0].text.runs == ()


def test_only_the_first_are_read_where_so_many_are_wanted(tmp_path):
    path = written(tmp_path, HEADER, ROW, ROW, {"t": "broken"})
    assert len(read_prefix_trace(path, 2)) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1 (the header): must be a JSON object"),
        ([{}], "line 1 (the header): block_tokens is missing"),
        ([{"block_tokens": 0}], "line 1 (the header): block_tokens is 0"),
        ([{"block_tokens": 64, "output_blocks": 1}], "output_blocks must be true or false"),
        ([HEADER], "no requests in it"),
        ([HEADER, []], "line 2: must be a JSON object"),
        ([HEADER, ROW, {**ROW, "t": 0.4}], "line 3: t is 0.4, before the line above's 0.5"),
        ([HEADER, {**ROW, "t": "1"}], "line 2: t is '1'"),
        ([HEADER, {**ROW, "t": -1}], "line 2: t is -1"),
        ([HEADER, {**ROW, "in": 0}], "line 2: in is 0"),
        ([HEADER, {**ROW, "out": 1.5}], "line 2: out is 1.5"),
        ([HEADER, {**ROW, "out": True}], "line 2: out is True"),
        ([HEADER, {**ROW, "k": 0}], "line 2: k is 0"),
        ([HEADER, {**ROW, "b": 5}], "line 2: b must be a list"),
        ([HEADER, {**ROW, "b": [[1, 0]]}], "line 2: b has [1, 0]"),
        ([HEADER, {**ROW, "b": [-1]}], "line 2: b has -1"),
        ([HEADER, {**ROW, "b": [[1, 2, 3]]}], "line 2: b has [1, 2, 3]"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where(tmp_path, lines, message):
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        read_prefix_trace(path)
    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b broken", gzip.compress(b"{}" * 999, mtime=0)[:-9], b"\xff\xfe{"]
)
def test_what_is_no_such_file_is_refused(tmp_path, content):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.jsonl\.gz"):
        read_prefix_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prefix_trace(tmp_path / "none.jsonl")
