"""Runs of vLLM on an H100, recorded by the gateway: simulated again, they take as long as then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_gateway.cli import main

RECORDED = Path(__file__).parents[2] / "benchmarks/recorded"


@pytest.mark.parametrize("rate", [10, 22])
def test_a_run_on_an_h100_simulates_as_it_was_measured(
    rate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RECORDED / f"h100-llama-3.1-8b-{rate}.jsonl"
    arguments = ["--policy", "finish-time", "--max-batched-tokens", "8192", "--json"]
    assert main(["simulate", "--against", str(record), *arguments]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    measured, simulated = run["measured"], run["by_policy"]
    assert measured["requests"] == simulated["requests"] >= 250
    # docs/evidence/h100.md: what the server adds to a request and to each of its tokens is in no
    # profile, so the simulation is somewhat early, and never late.
    assert 1.0 < measured["latency_s"]["mean"] / simulated["latency_s"]["mean"] < 1.12
    assert 1.0 < measured["tpot_s"]["mean"] / simulated["tpot_s"]["mean"] < 1.12
    assert 0.97 < measured["output_tokens_per_s"] / simulated["output_tokens_per_s"] < 1.01
