"""The traces that are made: what they say is so, and equal blocks have equal text."""

from pathlib import Path

import pytest

from benchmarks.scheduling.prefix_traces import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    KINDS,
    Blocks,
    Segment,
    in_runs,
    main,
    make_rows,
)
from hetero_gateway.files.prefix_trace import read_prefix_trace


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_read_as_it_was_made(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, again = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    for each in (path, again):
        assert main([kind, "-o", str(each), "--requests", "300", "--seed", "7"]) == 0
    assert path.read_bytes() == again.read_bytes()
    assert "300 requests" in capsys.readouterr().out
    rows = read_prefix_trace(path)
    assert len(rows) == 300
    turns: dict[int, int] = {}
    for row in rows:
        text = row.text
        assert row.input_tokens + row.output_tokens <= CONTEXT_TOKENS
        assert sum(count for _, count in text.runs) == (
            (row.input_tokens + row.output_tokens) // BLOCK_TOKENS
        )
        assert text.turn == turns.get(text.session, 0) + 1, "a session's turns come in order"
        turns[text.session] = text.turn


def test_the_next_turn_begins_with_the_last_one_and_its_answer() -> None:
    rows, share = make_rows("chat", 300, 1.0, 0)
    last: dict[int, list[int]] = {}
    for row in rows:
        ids = [first + i for first, count in row["b"] for i in range(count)]
        before = last.get(row["s"])
        if before is not None:
            assert ids[: len(before)] == before
        last[row["s"]] = ids
    assert 0.5 < share < 1


def test_kinds_differ_as_they_do_in_the_field() -> None:
    made = {kind: make_rows(kind, 400, 1.0, 0) for kind in KINDS}
    shares = {kind: share for kind, (_, share) in made.items()}
    assert shares["retrieval"] < shares["chat"] < shares["agents"]
    mean = {k: sum(row["in"] for row in rows) / len(rows) for k, (rows, _) in made.items()}
    assert mean["chat"] < mean["retrieval"] < mean["agents"]
    assert made["chat"][0] != make_rows("chat", 400, 1.0, 1)[0]


def test_blocks_are_equal_where_the_text_is_and_all_in_front_of_it() -> None:
    blocks = Blocks()
    a, b, c = Segment(0, 100), Segment(1, 100), Segment(2, 100)
    first = blocks.of((a, b))
    assert len(first) == 200 // BLOCK_TOKENS
    assert blocks.of((a, b, c))[: len(first)] == first
    other = blocks.of((a, c))
    assert (other[0], other[1] == first[1]) == (first[0], False)
    assert not set(blocks.of((b, a))) & set(first), "the same pieces in another order"
    assert in_runs([3, 4, 5, 9, 1, 2]) == [[3, 3], [9, 1], [1, 2]]
