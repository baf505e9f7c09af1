"""The recorded times are mended and discarded as the script says, and every group has a row."""

import csv
from itertools import product
from pathlib import Path

import pytest

from benchmarks.profiler import recorded_fit
from hetero_gateway.lab.profiler.samples import read_csv

COLUMNS = (
    *("model", "hardware", "prompt_size", "batch_size", "token_size", "prompt_time"),
    *("token_time", "e2e_time", "tensor_parallel"),
)


def row(
    batch: int, prompt: int, asked: int, steps: float | None = None, hardware: str = "a100"
) -> dict[str, object]:
    """An engine with 0.1 ms per prompt token, and 30 ms and 1 ms per sequence in a step."""
    prompt_ms, step_ms = 20 + 0.1 * batch * prompt, 30 + batch
    e2e_ms = prompt_ms + step_ms * (asked - 1 if steps is None else steps)
    values = ("m", hardware, prompt, batch, asked, prompt_ms, step_ms, e2e_ms, 2)
    return dict(zip(COLUMNS, values, strict=True))


GRID = [row(b, i, 128) for b, i in product((1, 4, 16), (128, 1024))]


def file_of(tmp_path: Path, rows: list[dict[str, object]]) -> Path:
    path = tmp_path / "measured.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_milliseconds_become_seconds_and_the_prefill_has_the_first_token(tmp_path: Path) -> None:
    group = recorded_fit.read_groups(file_of(tmp_path, GRID))["m/a100/tp2"]
    first = group.samples[0]
    assert (first.batch_size, first.prompt_tokens, first.output_tokens) == (1, 128, 128)
    assert first.prefill_s == pytest.approx(0.0328)
    assert first.decode_s == pytest.approx(127 * 0.031)
    assert (group.mended, group.discarded.total()) == (0, 0)


def test_a_lonely_sequence_that_stopped_early_gets_its_true_length(tmp_path: Path) -> None:
    rows = [*GRID, row(1, 512, 1024, steps=300)]
    group = recorded_fit.read_groups(file_of(tmp_path, rows))["m/a100/tp2"]
    assert group.samples[-1].output_tokens == 301
    assert group.as_asked[-1].output_tokens == 1024
    assert group.mended == 1


def test_batches_that_stopped_early_or_ran_in_turns_are_discarded(tmp_path: Path) -> None:
    rows = [*GRID, row(16, 512, 128, steps=100), row(64, 512, 128, steps=2000)]
    group = recorded_fit.read_groups(file_of(tmp_path, rows))["m/a100/tp2"]
    assert len(group.samples) == len(GRID)
    assert group.discarded == {recorded_fit.SHORT: 1, recorded_fit.TURNS: 1}


def test_scaled_copies_of_other_hardware_are_left_out(tmp_path: Path) -> None:
    rows = [*GRID, row(1, 128, 128, hardware="a100-pcap")]
    assert list(recorded_fit.read_groups(file_of(tmp_path, rows))) == ["m/a100/tp2"]


def test_the_table_has_a_row_per_group_and_its_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = GRID + [row(b, i, 128, hardware="h100") for b, i in product((1, 4, 16), (128, 1024))]
    assert recorded_fit.main([str(file_of(tmp_path, rows))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["m/a100/tp2", "m/h100/tp2"]
    assert len({line.count("|") for line in lines}) == 1
    cells = [cell.strip() for cell in lines[2].split("|")]
    # Of this form, so next to no error: R² of prefill, then of decode.
    assert cells[5:7] == ["1.000", "0.0%"]
    assert cells[10:12] == ["1.000", "0.0%"]


def test_another_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for name, said in (("other.csv", "not splitwise-sim's table"), ("no.csv", "cannot be read")):
        assert recorded_fit.main([str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert len(err.splitlines()) == 1


def test_a_group_can_be_exported_for_the_command(tmp_path: Path) -> None:
    path = file_of(tmp_path, GRID)
    out = tmp_path / "out.csv"
    assert recorded_fit.main([str(path), "--export", "m/a100/tp2", str(out)]) == 0
    assert len(read_csv(out)) == len(GRID)
    with pytest.raises(SystemExit, match="2"):
        recorded_fit.main([str(path), "--export", "m/b200/tp2", str(out)])
