"""Simulated throughput in its stride: neither the start nor the end of a run counts."""

import dataclasses
import math

import numpy as np
import pytest

from hetero_gateway.planner.trials import (
    Engines,
    Mix,
    System,
    hold,
    hold_alone,
    reduced,
    run_alone,
    saturate,
)
from hetero_gateway.sim.fleet import Fleet
from hetero_gateway.sim.kernel import GENERATION_TOTAL
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths
from tests.fakes.planning import LENGTHS, instance_type

ENGINES = Engines()
MIX = Mix.of(LENGTHS, 0)


def long_run_tokens_per_s(profile, lengths, seed):
    """Output tokens per s by the engine's own counter, over the middle of 16 000 requests."""
    fleet = Fleet([profile])
    prompt, output = lengths.draw(16_000, np.random.default_rng(seed))
    for i, o in zip(prompt.tolist(), output.tolist(), strict=True):
        fleet.submit(0, fleet.new_slot(), i, o, 0.0)
    whole_s = float(output.sum()) / run_alone(profile, MIX, ENGINES).output_tokens_per_s
    counts = []
    for share in (0.2, 0.8):
        while not fleet.advance(share * whole_s, False):
            pass
        counts.append(fleet._n[0][GENERATION_TOTAL])
    return (counts[1] - counts[0]) / (0.6 * whole_s)


@pytest.mark.parametrize("t", [1, 4])
def test_a_short_run_says_what_a_long_one_does(t):
    profile = instance_type(t=t).profile
    short = run_alone(profile, MIX, ENGINES).output_tokens_per_s
    assert short == pytest.approx(long_run_tokens_per_s(profile, LENGTHS, 99), rel=0.03)


def test_half_done_requests_are_parts_of_whole_ones():
    prompt, output = MIX.requests(3000, 0)
    whole = set((MIX.prompt_pool + MIX.output_pool).tolist())
    assert set((prompt + output).tolist()) <= whole
    assert output.min() >= 1
    # What is left of a request that is met at random: E[O²] / 2E[O].
    expected = float((MIX.output_pool.astype(float) ** 2).mean()) / (2 * MIX.mean_output)
    assert output.mean() == pytest.approx(expected, rel=0.05)


def test_all_get_the_same_new_requests():
    few, many = MIX.requests(5, 100), MIX.requests(50, 200)
    assert (few[0][5:] == many[0][50:150]).all()
    assert (few[1][5:] == many[1][50:150]).all()


def test_twice_as_fast_is_twice_the_throughput():
    profile = instance_type().profile
    fast = dataclasses.replace(profile, constants=profile.constants.scaled(0.5))
    assert run_alone(fast, MIX, ENGINES).tokens_per_s == pytest.approx(
        2 * run_alone(profile, MIX, ENGINES).tokens_per_s, rel=1e-6
    )


def test_what_keeps_the_batch_small_is_told():
    assert run_alone(instance_type(kv_tokens=4000).profile, MIX, ENGINES).limit == "KV"
    many = instance_type(kv_tokens=400_000, max_num_seqs=16).profile
    alone = run_alone(many, MIX, ENGINES)
    assert alone.limit == "max_num_seqs"
    assert alone.batch == pytest.approx(16, rel=0.05)
    short = Mix.of(LogNormalLengths(LogNormal(1000, 0.3, 2000), LogNormal(8, 0.3, 20)), 0)
    assert run_alone(instance_type(kv_tokens=400_000).profile, short, ENGINES).limit == "prefill"


def test_nothing_fits_a_cache_that_is_too_small():
    lengths = LogNormalLengths(LogNormal(500, 0.0, 500), LogNormal(20, 0.0, 20))
    assert run_alone(instance_type(kv_tokens=64).profile, Mix.of(lengths, 0), ENGINES) is None


def test_equal_instances_do_as_much_as_one_does_times_their_number():
    profile = instance_type().profile
    alone = run_alone(profile, MIX, ENGINES)
    system = System(((profile, 4),), 4 * alone.batch)
    together = saturate(system, "round-robin", MIX, ENGINES, 3000, False)
    assert together.tokens_per_s == pytest.approx(4 * alone.tokens_per_s, rel=0.04)


def test_instances_that_prefill_most_of_the_time_are_not_counted_twice():
    lengths = LogNormalLengths(LogNormal(1000, 0.5, 4000), LogNormal(8, 0.5, 40))
    mix, profile = Mix.of(lengths, 0), instance_type(kv_tokens=400_000).profile
    alone = run_alone(profile, mix, ENGINES)
    assert alone.batch < 0.5 * mix.batch(profile)
    system = reduced({profile: 4}, {profile: alone}, 2400)
    together = saturate(system, "round-robin", mix, ENGINES, 2400, False)
    assert together.tokens_per_s == pytest.approx(4 * alone.tokens_per_s, rel=0.04)


def test_a_smaller_system_stands_for_a_large_one():
    slow, fast = instance_type().profile, instance_type("fast", speed=3.0).profile
    alone = {p: run_alone(p, MIX, ENGINES) for p in (slow, fast)}
    system = reduced({slow: 40, fast: 80}, alone, 2000)
    counts = dict(system.instances)
    assert 1 <= counts[slow] < 40
    assert counts[fast] == pytest.approx(2 * counts[slow], abs=1)
    told = saturate(system, "finish-time", MIX, ENGINES, 2000, False)
    expected = 40 * alone[slow].tokens_per_s + 80 * alone[fast].tokens_per_s
    assert told.tokens_per_s == pytest.approx(expected, rel=0.1)


def test_round_robin_wastes_the_faster_instances():
    slow, fast = instance_type().profile, instance_type("fast", speed=4.0).profile
    system = System(((slow, 1), (fast, 1)), 2 * MIX.batch(slow))
    both = {
        policy: saturate(system, policy, MIX, ENGINES, 2000, False).tokens_per_s
        for policy in ("round-robin", "finish-time")
    }
    assert both["round-robin"] < 0.85 * both["finish-time"]


def test_at_a_low_rate_everything_that_comes_is_done_at_once():
    profile = instance_type().profile
    rate = 0.2 * run_alone(profile, MIX, ENGINES).tokens_per_s
    rate /= MIX.mean_prompt + MIX.mean_output
    alone = hold_alone(profile, MIX, ENGINES, rate)
    system = hold(
        System(((profile, 1),), MIX.batch(profile)), "finish-time", MIX, ENGINES, rate, 1000, False
    )
    for figures in (alone, system):
        assert figures.tokens_per_s == pytest.approx(
            rate * (MIX.mean_prompt + MIX.mean_output), rel=0.25
        )
        assert 0 < figures.ttft_mean_s <= figures.ttft_p99_s < figures.latency_p99_s
        assert math.isfinite(figures.tpot_p99_s)
    # One instance behind the gateway is one instance.
    assert system.latency_mean_s == pytest.approx(alone.latency_mean_s, rel=0.25)


def test_latency_rises_with_the_rate():
    profile = instance_type().profile
    most = run_alone(profile, MIX, ENGINES).tokens_per_s / (MIX.mean_prompt + MIX.mean_output)
    latencies = [
        hold_alone(profile, MIX, ENGINES, share * most).latency_mean_s for share in (0.2, 0.6, 1.2)
    ]
    assert latencies == sorted(latencies)
    assert latencies[2] > 1.5 * latencies[0]
