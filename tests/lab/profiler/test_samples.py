"""Files of samples: what is written is read, a crash is survived, a mistake is named."""

import json
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.fitting import Sample
from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.profiler.samples import (
    append,
    discarded_counts,
    kept_samples,
    read_csv,
    read_json_lines,
    read_samples,
    record_of,
    write_csv,
)

HEADER = "batch_size,prompt_tokens,output_tokens,prefill_s,decode_s\n"
ONE = Sample(4, 512, 65, 0.25, 1.5)


def csv_file(tmp_path, text: str) -> Path:
    path = tmp_path / "samples.csv"
    path.write_text(text, "utf-8")
    return path


# CSV


def test_a_csv_file_is_read_and_an_empty_cell_was_not_measured(tmp_path) -> None:
    path = csv_file(tmp_path, HEADER + "4,512,65,0.25,1.5\n1,64,9,,0.2\n2.5,64,9, ,\n")
    others = [Sample(1, 64, 9, None, 0.2), Sample(2.5, 64, 9, None, None)]
    assert read_csv(path) == [ONE, *others]


def test_columns_may_stand_in_any_order_and_others_are_ignored(tmp_path) -> None:
    path = csv_file(
        tmp_path,
        "\ufeffgpu, decode_s,prefill_s, output_tokens,prompt_tokens,batch_size\n"
        "A100,1.5,0.25,65,512,4\n",
    )
    assert read_csv(path) == [ONE]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: the header has no column batch_size"),
        ("batch_size,prompt_tokens,output_tokens,prefill_s\n", "line 1: the header has no column "
         "decode_s; it needs batch_size,prompt_tokens,output_tokens,prefill_s,decode_s"),
        (HEADER, "no samples in it"),
        (HEADER + "4,512,65,0.25,1.5\n4,many,65,0.25,1.5\n", "line 3: prompt_tokens is 'many'"),
        (HEADER + "4,512,65,0.25 s,1.5\n", "line 2: prefill_s is '0.25 s', not a number"),
        (HEADER + "4,512,65,0.25,-1\n", "line 2: decode_s is -1: it must be 0 or more"),
        (HEADER + "4,512,65,nan,1\n", "line 2: prefill_s is nan: it must be finite"),
        (HEADER + "4,512,65,inf,1\n", "line 2: prefill_s is inf: it must be finite"),
        (HEADER + "0,512,65,1,1\n", "line 2: batch_size is 0: it must be at least 1"),
        (HEADER + ",512,65,1,1\n", "line 2: batch_size is missing"),
        (HEADER + "4,512\n", "line 2: output_tokens is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_csv_file_is_named(tmp_path, text: str, said: str) -> None:
    path = csv_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_csv(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.csv", r"nowhere\.csv: cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        ("binary.csv", "it is not UTF-8 text"),
    ],
)
def test_files_that_are_no_csv_are_named(tmp_path, name: str, said: str) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=said):
        read_csv(tmp_path / name)


times = st.none() | st.floats(0, 1e4)
samples = st.builds(
    Sample, st.floats(1, 1e4), st.integers(1, 10**6), st.integers(1, 10**6), times, times
)


@given(st.lists(samples, min_size=1, max_size=5))
@settings(max_examples=30, derandomize=True, deadline=None)
def test_what_is_written_as_csv_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, written: list[Sample]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "s.csv"
    write_csv(path, written)
    for before, after in zip(written, read_csv(path), strict=True):
        for a, b in zip(astuple(before), astuple(after), strict=True):
            assert b is None if a is None else b == pytest.approx(a, rel=1e-8)


# JSON lines


def test_records_are_appended_and_read_with_what_the_measurement_added(tmp_path) -> None:
    path = tmp_path / "s.jsonl"
    append(path, record_of(ONE, cell="4x512", repeat=0, at=1.5))
    append(path, record_of(ONE, discarded="a request was preempted", cell="4x512", repeat=1))
    first, second = read_json_lines(path)
    assert kept_samples([first]) == [ONE]
    assert (first["cell"], first["repeat"], first["at"]) == ("4x512", 0, 1.5)
    assert first["discarded"] is None
    assert second["discarded"] == "a request was preempted"
    assert kept_samples([first, second]) == [ONE]


def test_discarded_samples_are_counted_by_reason_most_first_and_may_lack_their_lengths(
    tmp_path,
) -> None:
    path = tmp_path / "s.jsonl"
    for reason in (None, "waited", "preempted", "waited"):
        append(path, record_of(ONE, discarded=reason))
    append(path, {"batch_size": 4, "discarded": "waited"})
    counts = discarded_counts(read_json_lines(path))
    assert list(counts.items()) == [("waited", 3), ("preempted", 1)]


WHOLE = json.dumps(record_of(ONE, repeat=0)).encode() + b"\n"


@pytest.mark.parametrize("left", [WHOLE[:-1], *(WHOLE + WHOLE[:cut] for cut in range(1, 60, 7))])
def test_a_torn_last_line_is_left_out_and_one_that_lacks_only_its_line_break_kept(
    tmp_path, left: bytes
) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(left)
    assert [r["repeat"] for r in read_json_lines(path)] == [0]
    append(path, record_of(ONE, repeat=1))
    assert [r["repeat"] for r in read_json_lines(path)] == [0, 1]
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("rest", [b"", WHOLE])
def test_a_line_torn_in_the_middle_is_an_error_that_names_it(tmp_path, rest: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(WHOLE + WHOLE[:20] + b"\n" + rest)
    with pytest.raises(ConfigError, match=r"s\.jsonl: line 2: not a JSON document"):
        read_json_lines(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([1, 2], "must be a JSON object, not list"),
        ({"batch_size": 4}, "prompt_tokens is missing"),
        (record_of(ONE) | {"batch_size": "4"}, "batch_size is '4', not a number"),
        (record_of(ONE) | {"batch_size": True}, "batch_size is True, not a number"),
        (record_of(ONE) | {"decode_s": -2}, "decode_s is -2: it must be 0 or more"),
        (record_of(ONE) | {"discarded": 3}, "discarded must be null or a reason"),
    ],
)
def test_what_is_wrong_in_a_record_is_named(tmp_path, line: object, said: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text("\n" + json.dumps(line) + "\n")
    with pytest.raises(ConfigError) as caught:
        read_json_lines(path)
    assert str(caught.value).startswith(f"{path}: line 2: {said}")


def test_an_empty_file_has_no_records(tmp_path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"")
    assert read_json_lines(path) == []
    append(path, record_of(ONE))
    assert len(read_json_lines(path)) == 1


def test_the_suffix_says_which_kind_of_file_it_is(tmp_path) -> None:
    lines = tmp_path / "s.jsonl"
    append(lines, record_of(ONE))
    append(lines, record_of(ONE, discarded="waited"))
    assert read_samples(lines) == ([ONE], {"waited": 1})
    assert read_samples(csv_file(tmp_path, HEADER + "4,512,65,0.25,1.5\n")) == ([ONE], {})


def test_a_place_that_cannot_be_written_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"s\.jsonl: cannot be written"):
        append(tmp_path / "nowhere" / "s.jsonl", record_of(ONE))
    with pytest.raises(ConfigError, match=r"s\.csv: cannot be written"):
        write_csv(tmp_path / "nowhere" / "s.csv", [ONE])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json_lines(tmp_path / "nowhere.jsonl")
