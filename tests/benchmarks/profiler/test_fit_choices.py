"""What docs/design/profiling.md says of the ways to fit, on few engines."""

import pytest

from benchmarks.profiler import fit_choices as choices


def worst(name: str, noise: str) -> float:
    fitter = choices.FITTERS[name]
    return float(choices.worst_errors(fitter, choices.NOISES[noise], engines=15).mean())


OURS = "soft L1 of relative residuals (ours)"


def test_outliers_hurt_every_other_loss_more() -> None:
    ours = worst(OURS, "and 5 % of times × 3")
    assert ours < 0.03
    assert worst("relative squares", "and 5 % of times × 3") > 1.5 * ours
    assert worst("squares of seconds (the paper's)", "and 5 % of times × 3") > 10 * ours


def test_the_minimum_of_each_cell_is_too_low_where_noise_goes_both_ways() -> None:
    assert worst("the same, minimum of each cell", "3 % normal") > 2 * worst(OURS, "3 % normal")


def test_the_table_has_a_row_per_fitter(capsys: pytest.CaptureFixture[str]) -> None:
    assert choices.main(["--engines", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(choices.FITTERS)
    assert {line.count("|") for line in lines} == {2 + len(choices.NOISES)}
