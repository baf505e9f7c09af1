"""Simulated throughput in its stride: neither the start nor the end of a run counts."""

import math

import pytest

from hetero_gateway.planner.trials import System, hold, hold_alone, reduced, saturate
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths
from tests.fakes.planning import LENGTHS, instance_type

ENGINES = Engines()
MIX = Mix.of(LENGTHS, 0)


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
