"""``checkpoints``: a plan for each, and the one that serves the goal best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.cli import main
from hetero_gateway.planner import search
from hetero_gateway.sim import alone

PLAN = """
model: Llama-3.1-8B
checkpoints: [{name: Llama-3.1-8B, quantization: fp8}, Llama-3.1-8B-AWQ]
max_model_len: 1024
policy: capacity-weighted
engine: {max_num_seqs: 16}
machines: [{id: box, accelerator: L4, count: 1}]
workload:
  prompt: {median: 64, sigma: 0.5, max: 256}
  output: {median: 16, sigma: 0.5, max: 64}
"""


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_REQUESTS", 600)
    monkeypatch.setattr(search, "_SYSTEMS", 3)


def document(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> dict[str, Any]:
    assert main(["plan", "-c", str(path), "--json", *flags]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_best_for_the_goal_is_taken(tmp_path, capsys):
    told = document(capsys, written(tmp_path, PLAN), "-o", str(tmp_path / "out"))
    rows = told["checkpoints"]
    assert [row["storage"] for row in rows] == ["bfloat16", "fp8", "awq"]
    (chosen,) = [row for row in rows if row["chosen"]]
    most = max(row["throughput_tokens_per_s"] for row in rows)
    assert chosen["throughput_tokens_per_s"] == most
    assert chosen["storage"] != "bfloat16"
    assert told["best"]["throughput_tokens_per_s"] == most
    assert any("yours to judge" in note for note in told["notes"])
    # Whichever it is, clients ask for the model's name.
    command = (tmp_path / "out" / "commands" / "box.sh").read_text()
    assert "--served-model-name Llama-3.1-8B " in command


def test_one_that_has_no_plan_says_why(tmp_path, capsys):
    old = PLAN.replace("accelerator: L4", "accelerator: V100-32GB")
    rows = document(capsys, written(tmp_path, old))["checkpoints"]
    by_storage = {row["storage"]: row for row in rows}
    assert "fits no machine" in by_storage["fp8"]["reason"]
    assert not by_storage["fp8"]["chosen"]
    assert sum(row["chosen"] for row in rows) == 1


def test_without_any_plan_the_error_is_the_models(tmp_path, capsys):
    small = PLAN.replace("Llama-3.1-8B", "Llama-3.1-405B")
    assert main(["plan", "-c", str(written(tmp_path, small))]) == 2
    assert "fits no machine" in capsys.readouterr().err
