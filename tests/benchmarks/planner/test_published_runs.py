"""Published runs: each is of an accelerator and a model that there are, and simulated as made."""

import numpy as np
import pytest

from benchmarks.planner import published_runs
from benchmarks.planner.published_runs import RUNS, measured, read, run_engine, simulated
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files.accelerator_catalogue import accelerator

ROWS = read(RUNS)
# 10 ms a step, whatever is in it; and a server that takes 5 ms.
STEP_S, SERVER_S = 0.01, 0.005
PROFILE = Profile(
    "G", "m", 1, Constants(0, 0, 0, STEP_S, 0, 0, 0, STEP_S), 10_000, 64, first_token_s=SERVER_S
)


def test_every_run_has_an_accelerator_a_model_a_load_and_a_source():
    text = RUNS.read_text("utf-8")
    for row in ROWS:
        assert accelerator(row["accelerator"]).name == row["accelerator"]
        assert published_runs.shape_of(row["model"], row["stored"]).layers > 0
        assert row["load"].split()[0] in ("rate", "streams", "all")
        assert np.isfinite(measured(row)).any()
        assert f"\n# {row['source']}: " in text
    assert len({row["accelerator"] for row in ROWS}) >= 10


def test_streams_are_as_many_at_any_time():
    size, tokens = 12, 11
    prompt, output = np.full(size, 50), np.full(size, tokens)
    found = run_engine(PROFILE, 2048, prompt, output, np.zeros(size), 3, cached=False)
    # Four waves of three: a prefill and ten decode steps each.
    assert found.requests_per_s == pytest.approx(size / (4 * tokens * STEP_S + SERVER_S))
    assert found.ttft_s == pytest.approx(STEP_S + SERVER_S)
    assert found.tpot_s == pytest.approx(STEP_S)


def test_arrivals_are_served_as_they_come():
    arrival_s = np.array([0.0, 1.0, 2.0])
    found = run_engine(PROFILE, 2048, np.full(3, 50), np.full(3, 6), arrival_s, 3, cached=True)
    assert found.requests_per_s == pytest.approx(3 / (2.0 + 6 * STEP_S + SERVER_S))


def test_a_card_alone_is_right_within_a_quarter():
    """docs/evidence/planner.md: by its data sheet alone."""
    row = next(r for r in ROWS if r["accelerator"] == "H100-80GB-PCIe" and r["load"] == "rate 8")
    ratio = simulated(row).tpot_s / measured(row).tpot_s
    assert 0.8 < ratio < 1.25


def test_the_table_has_a_line_for_each_accelerator(capsys, monkeypatch):
    monkeypatch.setattr(published_runs, "SEEDS", 1)
    assert published_runs.main(["--only", "MI300X-192GB"]) == 0
    assert published_runs.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Qwen3-8B | MI300X-192GB | streams 32 | ")
    assert len(lines) == 3 + len({(r["accelerator"], r["cards"]) for r in ROWS})
