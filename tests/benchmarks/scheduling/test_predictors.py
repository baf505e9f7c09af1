"""The benchmark of predictors: its tables, on a small trace and few requests."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduling import predictors


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [f"{p},{20 if p <= 700 else 400}" for p in rng.integers(1, 2000, 400)]
    path = tmp_path / "steps.csv"
    path.write_text("input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_every_table_has_its_rows(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predictors, "CALLS", 100)
    monkeypatch.setattr(predictors, "POLICIES", ("min-max", "capacity-weighted"))
    argv = ["predictors.py", f"name={trace}", "--count", "60", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    predictors.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| name |") for line in lines) == 1 + 2 * 2
    # Nothing that capacity-weighted does depends on a prediction.
    blind = [line for line in lines if "capacity-weighted" in line]
    assert [line.count("1.000 ± 0.000") for line in blind] == [8, 4]
    assert any(line.startswith("| trained (2 leaves) |") for line in lines)


def test_a_cell_is_the_mean_of_the_ratios_seed_by_seed() -> None:
    assert predictors.ratio_cell([2.0, 9.0], [1.0, 3.0]) == "2.500 ± 0.707"
