"""A recorded run again: what was simulated and then recorded comes out the same."""

import json
from pathlib import Path

import numpy as np
import pytest

from hetero_gateway.cli import main
from hetero_gateway.core.lengths.predictors import ConstantPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.sim.cluster import simulate
from hetero_gateway.sim.recorded import Placements, Recording, replay, run_as_placed
from tests.sim.builders import FAST, SLOW, instances, random_workload

CLUSTER = instances(FAST, SLOW, SLOW)


def recorded(policy: str) -> Recording:
    """A simulated run as if it had been recorded."""
    load = random_workload(300, 10.0)
    means = float(load.prompt_tokens.mean()), float(load.output_tokens.mean())
    scheduler = Scheduler(
        make_policy(policy), np.random.default_rng(0), reference=means, prefix_cache=False
    )
    predictions = load.output_tokens * 1.1
    records = simulate(
        CLUSTER, load, scheduler, ConstantPredictor(means[1]), predictions=predictions
    )
    where = Placements(records.instance, records.placed_s, load.prompt_tokens, load.output_tokens)
    times_s = records.first_token_s, records.finish_s
    return Recording(where, load.arrival_s, predictions, *times_s, np.ones(300, bool))


@pytest.mark.parametrize("policy", ["finish-time", "min-max"])
def test_engines_do_the_same_where_all_is_placed_the_same(policy):
    recording = recorded(policy)
    replayed = replay(recording, CLUSTER, policy)
    assert replayed.as_placed == replayed.measured
    assert replayed.by_policy == replayed.measured
    assert next(figures.requests for figures in replayed.measured) == 300
    assert sum(figures.requests for figures in replayed.measured[1:]) == 300


def test_other_placements_come_out_otherwise():
    recording = recorded("finish-time")
    replayed = replay(recording, CLUSTER, "round-robin")
    assert replayed.by_policy is not None
    assert replayed.by_policy[0].latency_s.mean > 1.2 * replayed.as_placed[0].latency_s.mean


def test_what_an_engine_can_never_hold_has_no_times():
    placements = Placements(np.array([1, 1]), np.zeros(2), np.array([13_000, 10]), np.array([5, 5]))
    records = run_as_placed([FAST, SLOW], placements)
    assert np.isnan(records.finish_s).tolist() == [True, False]


RECORDED = Path(__file__).parents[2] / "benchmarks/recorded"


@pytest.mark.parametrize("rate", [10, 22])
def test_a_run_on_an_h100_simulates_as_it_was_measured(rate, capsys):
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
