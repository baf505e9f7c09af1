"""A recorded run again: what was simulated and then recorded comes out the same."""

import json

import numpy as np
import pytest

from benchmarks.simulator.recorded import (
    PROFILE,
    RECORDS,
    beside,
    over_http,
    read,
    simulated,
)
from hetero_gateway.cli import main
from hetero_gateway.core.lengths.predictors import ConstantPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.sim.cluster import simulate
from hetero_gateway.sim.recorded import Placements, Recording, replay, run_as_placed
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
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
    replayed = replay(recording, CLUSTER, [policy])
    assert replayed.as_placed == replayed.measured
    assert replayed.by_policy == {policy: replayed.measured}
    assert next(figures.requests for figures in replayed.measured) == 300
    assert sum(figures.requests for figures in replayed.measured[1:]) == 300


def test_other_placements_come_out_otherwise():
    recording = recorded("finish-time")
    replayed = replay(recording, CLUSTER, ["round-robin", "finish-time"])
    in_turn, ours = (found[0].latency_s.mean for found in replayed.by_policy.values())
    assert in_turn > 1.2 * replayed.as_placed[0].latency_s.mean
    assert ours == replayed.as_placed[0].latency_s.mean


def test_what_an_engine_can_never_hold_has_no_times():
    placements = Placements(np.array([1, 1]), np.zeros(2), np.array([13_000, 10]), np.array([5, 5]))
    records = run_as_placed([FAST, SLOW], placements)
    assert np.isnan(records.finish_s).tolist() == [True, False]


@pytest.mark.parametrize("rate", RECORDS)
def test_a_run_on_an_h100_simulates_as_it_was_measured(rate, capsys):
    arguments = ["--policy", "finish-time", "--max-batched-tokens", "8192", "--json"]
    assert main(["simulate", "--against", str(RECORDS[rate]), *arguments]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    measured, simulated = run["measured"], run["by_policy"]
    assert measured["requests"] == simulated["requests"] >= 250
    # docs/evidence/h100.md: what the server adds to a request and to each of its tokens is not in
    # the profile that the gateway had, so the simulation is somewhat early, and never late.
    assert 1.0 < measured["latency_s"]["mean"] / simulated["latency_s"]["mean"] < 1.12
    assert 1.0 < measured["tpot_s"]["mean"] / simulated["tpot_s"]["mean"] < 1.12
    assert 0.97 < measured["output_tokens_per_s"] / simulated["output_tokens_per_s"] < 1.01


@pytest.mark.parametrize("rate", RECORDS)
def test_half_of_an_h100s_requests_are_as_simulated_with_what_the_other_half_shows(rate):
    """docs/evidence/h100.md: within 3 % of the throughput, 6 % of the mean latency, 8 % of its
    p99, 15 % of the mean TTFT, and each request's TTFT within a quarter in the mean."""
    recording = read(RECORDS[rate])
    assert beside(recording, simulated(recording, load_profile(str(PROFILE))), 1).within


@pytest.mark.parametrize("rate", RECORDS)
async def test_emulated_over_http_it_takes_as_long_as_simulated_and_measured(rate):
    """The whole records, as streams in virtual time; docs/evidence/h100.md has the table."""
    recording, profile = read(RECORDS[rate]), load_profile(str(PROFILE))
    found, alone = await over_http(recording, profile), simulated(recording, profile)
    assert beside(recording, found, 1).within
    # Each request, and not only the mean.
    assert found.first_s == pytest.approx(alone.first_s, abs=1e-3)
    assert found.end_s == pytest.approx(alone.end_s, abs=1e-3)
