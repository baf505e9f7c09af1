"""``profile --from``: from a file of samples to a profile that loads."""

import dataclasses
from pathlib import Path

import pytest

from hetero_gateway.core.costs.fitting import Fit, Sample
from hetero_gateway.errors import ConfigError, ProfileError
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.lab.profiler.document import ProfiledInstance, fit_recorded
from hetero_gateway.lab.profiler.samples import append, record_of, write_csv

from .builders import PLANTED, measured


def run(samples_file: Path, output: Path, plot: Path | None = None, seed: int = 0) -> Fit:
    instance = ProfiledInstance("A100", "m", 1, 10_000, 64)
    return fit_recorded(samples_file, output, instance, plot=plot, seed=seed).fit


def test_recorded_samples_become_a_profile_and_a_plot(tmp_path: Path) -> None:
    write_csv(tmp_path / "s.csv", measured(noise=1e-6))
    fit = run(tmp_path / "s.csv", tmp_path / "p.yaml", tmp_path / "p.svg")
    profile = load_profile("p.yaml", tmp_path)
    assert profile.name == "A100/m/tp1"
    assert dataclasses.astuple(profile.constants) == pytest.approx(
        dataclasses.astuple(PLANTED), rel=0.01
    )
    assert profile.source["error"]["prefill"] == pytest.approx(fit.prefill.mean_error, rel=1e-3)
    assert profile.source["note"] == "fitted to s.csv"
    assert (tmp_path / "p.svg").stat().st_size > 1000


def test_json_lines_and_csv_give_the_same_profile_and_discarded_samples_no_say(tmp_path) -> None:
    samples = measured()
    write_csv(tmp_path / "s.csv", samples)
    for sample in samples:
        append(tmp_path / "s.jsonl", record_of(sample))
        late = dataclasses.replace(sample, prefill_s=99.0)
        append(tmp_path / "s.jsonl", record_of(late, discarded="a request waited"))
    lines = run(tmp_path / "s.jsonl", tmp_path / "a.yaml")
    table = run(tmp_path / "s.csv", tmp_path / "b.yaml")
    assert lines.prefill.constants == pytest.approx(table.prefill.constants, rel=1e-6)
    discarded = load_profile("a.yaml", tmp_path).source["discarded"]
    assert discarded == {"a request waited": len(samples)}


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "s.csv", measured())
    for name in ("a.yaml", "b.yaml"):
        run(tmp_path / "s.csv", tmp_path / name, seed=3)
    assert (tmp_path / "a.yaml").read_text() == (tmp_path / "b.yaml").read_text()


def test_nothing_is_written_when_the_samples_cannot_be_fitted(tmp_path: Path) -> None:
    write_csv(tmp_path / "s.csv", [Sample(1, 64, 9, 0.1, 0.2)])
    with pytest.raises(ProfileError, match="only 1 of the 4 prefill cells"):
        run(tmp_path / "s.csv", tmp_path / "p.yaml")
    assert [p.name for p in tmp_path.iterdir()] == ["s.csv"]


def test_a_plot_that_cannot_be_made_is_found_out_first(tmp_path: Path) -> None:
    write_csv(tmp_path / "s.csv", measured())
    with pytest.raises(ConfigError, match="--plot"):
        run(tmp_path / "s.csv", tmp_path / "p.yaml", tmp_path / "p.txt")
    assert not (tmp_path / "p.yaml").exists()
