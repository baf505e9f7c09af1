"""Simulated throughput in its stride: neither the start nor the end of a run counts."""

import math

import pytest

from hetero_gateway.planner.question import System, Trials, reduced
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths
from tests.fakes.planning import LENGTHS, instance_type

ENGINES = Engines()
MIX = Mix.of(LENGTHS, 0)


def test_equal_instances_do_as_much_as_one_does_times_their_number():
    profile = instance_type().profile
    alone = run_alone(profile, MIX, ENGINES)
    system = System(((profile, 4),), 4 * alone.batch)
    together = Trials("round-robin", ENGINES, 3000).saturate(system, MIX)
    assert together.tokens_per_s == pytest.approx(4 * alone.tokens_per_s, rel=0.04)


def test_instances_that_prefill_most_of_the_time_are_not_counted_twice():
    lengths = LogNormalLengths(LogNormal(1000, 0.5, 4000), LogNormal(8, 0.5, 40))
    mix, profile = Mix.of(lengths, 0), instance_type(kv_tokens=400_000).profile
    alone = run_alone(profile, mix, ENGINES)
    assert alone.batch < 0.5 * mix.batch(profile)
    system = reduced({profile: 4}, {profile: alone}, 2400)
    together = Trials("round-robin", ENGINES, 2400).saturate(system, mix)
    assert together.tokens_per_s == pytest.approx(4 * alone.tokens_per_s, rel=0.04)


def test_a_smaller_system_stands_for_a_large_one():
    slow, fast = instance_type().profile, instance_type("fast", speed=3.0).profile
    alone = {p: run_alone(p, MIX, ENGINES) for p in (slow, fast)}
    system = reduced({slow: 40, fast: 80}, alone, 2000)
    counts = dict(system.instances)
    assert 1 <= counts[slow] < 40
    assert counts[fast] == pytest.approx(2 * counts[slow], abs=1)
    told = Trials("finish-time", ENGINES, 2000).saturate(system, MIX)
    expected = 40 * alone[slow].tokens_per_s + 80 * alone[fast].tokens_per_s
    assert told.tokens_per_s == pytest.approx(expected, rel=0.1)


def test_round_robin_wastes_the_faster_instances():
    slow, fast = instance_type().profile, instance_type("fast", speed=4.0).profile
    system = System(((slow, 1), (fast, 1)), 2 * MIX.batch(slow))
    both = {
        policy: Trials(policy, ENGINES, 2000).saturate(system, MIX).tokens_per_s
        for policy in ("round-robin", "finish-time")
    }
    assert both["round-robin"] < 0.85 * both["finish-time"]


def test_at_a_low_rate_everything_that_comes_is_done_at_once():
    profile = instance_type().profile
    rate = 0.2 * run_alone(profile, MIX, ENGINES).tokens_per_s
    rate /= MIX.mean_tokens
    trials = Trials("finish-time", ENGINES, 1000)
    alone = trials.hold_alone(profile, MIX, rate)
    system = trials.hold(System(((profile, 1),), MIX.batch(profile)), MIX, rate)
    for figures in (alone, system):
        assert figures.tokens_per_s == pytest.approx(rate * MIX.mean_tokens, rel=0.25)
        assert 0 < figures.ttft_mean_s <= figures.ttft_p99_s < figures.latency_p99_s
        assert math.isfinite(figures.tpot_p99_s)
    # One instance behind the gateway is one instance.
    assert system.latency_mean_s == pytest.approx(alone.latency_mean_s, rel=0.25)


def test_latency_rises_with_the_rate():
    profile = instance_type().profile
    most = run_alone(profile, MIX, ENGINES).tokens_per_s / MIX.mean_tokens
    trials = Trials("finish-time", ENGINES)
    latencies = [
        trials.hold_alone(profile, MIX, share * most).latency_mean_s for share in (0.2, 0.6, 1.2)
    ]
    assert latencies == sorted(latencies)
    assert latencies[2] > 1.5 * latencies[0]
