import math
from pathlib import Path

import numpy as np
import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.trace import TraceRequest, read_trace, schedule, synthetic_trace


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_with_arrivals_is_read_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,input_tokens,output_tokens\n0.5,10,20\n1.25,30,40\n")
    assert read_trace(path) == [TraceRequest(0.5, 10, 20), TraceRequest(1.25, 30, 40)]


def test_a_trace_without_arrivals_has_none(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffinput_tokens, output_tokens, note\r\n10,20,x\r\n")
    assert read_trace(path) == [TraceRequest(None, 10, 20)]


def test_the_limit_cuts_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path, "input_tokens,output_tokens\n" + "1,1\n" * 5)
    assert len(read_trace(path, limit=3)) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "row 1: the header has no column input_tokens"),
        ("input_tokens\n1\n", "row 1: the header has no column output_tokens"),
        ("input_tokens,output_tokens\n", "no requests in it"),
        ("input_tokens,output_tokens\n1,2\n1,x\n", "row 3: output_tokens is 'x'"),
        ("input_tokens,output_tokens\n1\n", "row 2: output_tokens is None"),
        ("input_tokens,output_tokens\n0,2\n", "row 2: input_tokens is 0"),
        ("arrival_s,input_tokens,output_tokens\n,1,2\n", "row 2: arrival_s is ''"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,2\n", "row 2: arrival_s is nan"),
        ("arrival_s,input_tokens,output_tokens\n-1,1,2\n", "row 2: arrival_s is -1"),
    ],
)
def test_a_bad_trace_is_one_line_with_file_and_row(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: {said}")
    assert "\n" not in str(error.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such\.csv: cannot be read"):
        read_trace(tmp_path / "no-such.csv")
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(binary)


def test_a_trace_keeps_its_times_counted_from_the_first_arrival() -> None:
    trace = [TraceRequest(7.0, 1, 1), TraceRequest(5.0, 2, 2)]
    assert [(r.due_s, r.input_tokens) for r in schedule(trace, None, 0)] == [(0.0, 2), (2.0, 1)]


def test_an_infinite_rate_and_a_trace_without_times_send_all_at_once() -> None:
    with_times = [TraceRequest(7.0, 1, 1), TraceRequest(9.0, 2, 2)]
    without = [TraceRequest(None, 1, 1), TraceRequest(None, 2, 2)]
    assert {r.due_s for r in schedule(with_times, math.inf, 0)} == {0.0}
    assert {r.due_s for r in schedule(without, None, 0)} == {0.0}


def test_a_rate_makes_seeded_poisson_arrivals() -> None:
    trace = [TraceRequest(None, k + 1, 1) for k in range(4000)]
    requests = schedule(trace, 20.0, seed=3)
    gaps_s = np.diff([r.due_s for r in requests])
    assert requests[0].due_s == 0.0
    assert [r.input_tokens for r in requests] == [r.input_tokens for r in trace]
    assert gaps_s.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps_s.std() == pytest.approx(1 / 20, rel=0.1)
    assert schedule(trace, 20.0, seed=3) == requests
    assert schedule(trace, 20.0, seed=4) != requests


def test_the_synthetic_mix_has_its_medians_and_bounds() -> None:
    trace = synthetic_trace(4000, seed=1)
    inputs = np.array([r.input_tokens for r in trace])
    outputs = np.array([r.output_tokens for r in trace])
    assert np.median(inputs) == pytest.approx(256, rel=0.1)
    assert np.median(outputs) == pytest.approx(160, rel=0.1)
    assert 1 <= inputs.min()
    assert inputs.max() <= 3072
    assert outputs.max() <= 1024
    assert synthetic_trace(4000, seed=1) == trace


def test_the_model_and_the_limit_are_read_where_a_trace_tells_them(tmp_path: Path) -> None:
    header = "arrival_s,input_tokens,output_tokens,model,max_tokens,sequences\n"
    path = write(tmp_path, header + "0.0,10,20,a,64,1\n1.0,30,40,,,2\n")
    assert read_trace(path) == [
        TraceRequest(0.0, 10, 20, "a", 64),
        TraceRequest(1.0, 30, 40, "", None),
    ]
    with pytest.raises(ConfigError, match=r"row 2: max_tokens is '0\.5', not a whole number"):
        read_trace(write(tmp_path, header + "0.0,10,20,a,0.5,1\n"))
