"""The search: what it finds, what it says, and what must never change its answer."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.instance_types import instance_types
from hetero_gateway.planner.memory import EngineOptions
from hetero_gateway.planner.plan import Machine, Unfit
from hetero_gateway.planner.question import NoPlan, Question
from hetero_gateway.planner.search import search
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from tests.fakes.planning import (
    LENGTHS,
    RUNS,
    changed,
    instance_type,
    short_runs,  # noqa: F401 - a fixture
    types_of,
)

# What two runs of one system may differ by, with other events in them.
NOISE = 0.03
ONE_MACHINE = (Machine("m", "gpu", 4),)


def plan(types, machines=ONE_MACHINE, lengths=LENGTHS, **options):
    options = {"requests": 250, "policy": "capacity-weighted"} | options
    return search(Question(tuple(machines), types, lengths, **options))


def best_alone(types):
    """The most that equal instances of one machine do, by the types alone."""
    mix = Mix.of(LENGTHS, 0)
    return max(
        (4 // t) * run_alone(found.profile, mix, Engines()).tokens_per_s
        for (_, t), found in types.items()
    )


# What it finds


def test_the_best_is_no_worse_than_any_equal_layout():
    types = types_of("gpu")
    found = plan(types)
    assert found.best.simulated.tokens_per_s >= (1 - NOISE) * best_alone(types)
    assert found.best.why_not == ""
    assert all(c.why_not for c in found.candidates[1:])


def test_little_kv_on_one_accelerator_makes_two_share_an_instance():
    roomy = {("gpu", 1): instance_type(t=1, kv_tokens=40_000), ("gpu", 2): instance_type(t=2)}
    tight = {("gpu", 1): instance_type(t=1, kv_tokens=1_000), ("gpu", 2): instance_type(t=2)}
    assert plan(roomy).best.layouts["m"] == (1, 1, 1, 1)
    assert plan(tight).best.layouts["m"] == (2, 2)
    loser = next(c for c in plan(tight, estimator="paper").candidates if c.layouts["m"][-1] == 1)
    assert "KV" in loser.why_not or "Algorithm 1" in loser.why_not


def test_an_unequal_layout_wins_where_the_best_t_does_not_divide_the_machine():
    types = {("gpu", 1): instance_type(t=1, kv_tokens=2_000), ("gpu", 2): instance_type(t=2)}
    found = plan(types, [Machine("m", "gpu", 3)])
    assert found.best.layouts["m"] == (2, 1)
    assert found.best.idle_accelerators == 0


def test_accelerators_that_stay_idle_and_types_that_are_tight_are_said():
    tight = {("gpu", 2): instance_type(t=2, tight=True)}
    found = plan(tight, [Machine("m", "gpu", 3), Machine("toy", "small", 1)])
    assert found.best.layouts == {"m": (2,), "toy": ()}
    assert found.best.idle_accelerators == 1
    for said in ("1 of 3 accelerators stay idle", "no instance fits toy", "is tight"):
        assert any(said in note for note in found.notes)


def test_what_algorithm_1_drops_is_listed_with_its_estimate():
    slow = {("gpu", 1): instance_type(t=1), ("gpu", 4): instance_type(t=4, all_reduce_s=0.5)}
    found = plan(slow)
    dropped = found.candidates[-1]
    assert dropped.layouts["m"] == (4,)
    assert dropped.simulated is None
    assert "Algorithm 1 gives it 0." in dropped.why_not


def test_twice_the_machines_do_twice_as_much():
    types = types_of("gpu")
    one = plan(types).best
    two = plan(types, [Machine("a", "gpu", 4), Machine("b", "gpu", 4)]).best
    assert two.layouts["a"] == two.layouts["b"] == one.layouts["m"]
    assert two.simulated.tokens_per_s == pytest.approx(2 * one.simulated.tokens_per_s, rel=0.06)


def test_a_hundred_machines_are_planned_as_their_kinds():
    types = types_of("gpu", "other")
    machines = [Machine(f"m{i}", ("gpu", "other")[i % 2], 4) for i in range(100)]
    found = plan(types, machines)
    assert len({found.best.layouts[f"m{i}"] for i in range(0, 100, 2)}) == 1
    few = plan(types, machines[:2]).best.simulated.tokens_per_s
    assert found.best.simulated.tokens_per_s == pytest.approx(50 * few, rel=0.06)


def test_a_policy_that_gives_every_instance_as_much_is_told_what_it_loses():
    types = {("gpu", 1): instance_type(), ("fast", 1): instance_type("fast", speed=4.0)}
    machines = [Machine("a", "gpu", 1), Machine("b", "fast", 1)]
    fair = plan(types, machines).best.simulated.tokens_per_s
    equal = plan(types, machines, policy="round-robin").best.simulated.tokens_per_s
    assert equal < 0.85 * fair


def test_no_candidate_of_the_pareto_table_is_beaten_in_both():
    found = plan(types_of("gpu"))
    assert found.pareto
    told = [c for c in found.candidates if c.at_rate is not None]
    points, every = (
        [(c.simulated.tokens_per_s, c.at_rate.latency_mean_s) for c in candidates]
        for candidates in (found.pareto, told)
    )
    for throughput, latency in every:
        assert any(t >= throughput and x <= latency for t, x in points)
    assert all(not (a[0] > b[0] and a[1] < b[1]) for a in points for b in points)


# What is uncertain


def test_a_lead_within_the_uncertainty_is_said():
    close = types_of("gpu", sizes=(1, 2), uncertainty=0.5)
    assert any("either may win" in note for note in plan(close).notes)
    sure = {key: dataclasses.replace(t, time_uncertainty=0.0) for key, t in close.items()}
    sure = {
        key: dataclasses.replace(t, memory=dataclasses.replace(t.memory, uncertainty=0.0))
        for key, t in sure.items()
    }
    assert not any("either may win" in note for note in plan(sure).notes)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_the_whole_systems_figures(seed):
    # Types that make about as much: what is first hangs on the simulation, not on an estimate.
    close = {
        ("gpu", 1): instance_type(t=1, kv_tokens=6_000, all_reduce_s=0.0),
        ("gpu", 2): instance_type(t=2, kv_tokens=12_000, all_reduce_s=0.0),
    }
    found = plan(close, [Machine("m", "gpu", 6)], seed=seed)
    told = [c.simulated.tokens_per_s for c in found.candidates if c.simulated is not None]
    assert len(told) > 2
    assert told == sorted(told, reverse=True)
    for c in found.candidates:
        if c.simulated is not None:
            assert c.simulated.tokens_per_s <= c.alone_tokens_per_s * (1 + 1e-3)
    said = [*found.notes, *(c.why_not for c in found.candidates)]
    assert not any("leads the next by -" in text or "+0." in text for text in said)


def test_a_simulation_that_disagrees_with_the_sum_of_instances_decides():
    # Round-robin wastes the fast instance of the unequal layout, whatever it does alone.
    types = {
        ("gpu", 1): instance_type(t=1, kv_tokens=8_000),
        ("gpu", 3): instance_type(t=3, kv_tokens=90_000, all_reduce_s=0.0),
    }
    found = plan(types, [Machine("m", "gpu", 6)], policy="round-robin")
    by_sum = max(found.candidates, key=lambda c: c.alone_tokens_per_s)
    simulated = [c for c in found.candidates if c.simulated is not None]
    assert found.best == max(simulated, key=lambda c: c.simulated.tokens_per_s)
    assert by_sum.simulated is not None
    assert by_sum.simulated.tokens_per_s <= found.best.simulated.tokens_per_s


# Goals


def test_the_least_cost_leaves_the_dear_machine_out():
    types = types_of("cheap", "dear")
    machines = [Machine("a", "cheap", 4, 1.0), Machine("b", "dear", 4, 9.0)]
    found = plan(types, machines, goals=Goals("cost"))
    at_a_rate = plan(types, machines, goals=Goals("cost", rate_per_s=2.0))
    assert found.best.layouts["b"] == at_a_rate.best.layouts["b"] == ()
    expected = 4 * 1.0 / (found.best.simulated.tokens_per_s * 3600) * 1e6
    assert found.best.usd_per_million_tokens == pytest.approx(expected)
    # A rate is what is paid for where there is one.
    expected = 4.0 / (2.0 * Mix.of(LENGTHS, 0).mean_tokens * 3600) * 1e6
    assert at_a_rate.best.usd_per_million_tokens == pytest.approx(expected)
    costs = [c.usd_per_million_tokens for c in found.candidates if c.simulated]
    assert costs == sorted(costs)


def test_the_fewest_accelerators_hold_the_rate_and_one_less_does_not():
    types = {("gpu", 1): instance_type()}
    mix = Mix.of(LENGTHS, 0)
    alone = run_alone(types["gpu", 1].profile, mix, Engines())
    one = alone.tokens_per_s / mix.mean_tokens
    found = plan(types, goals=Goals("fewest", rate_per_s=1.6 * one))
    assert found.best.accelerators == 2
    assert found.best.holds
    assert found.best.at_rate.tokens_per_s == pytest.approx(1.6 * alone.tokens_per_s, rel=0.15)


def test_a_latency_goal_takes_a_larger_t_than_throughput_does():
    types = types_of("gpu", kv_tokens=60_000, all_reduce_s=5e-4)
    rate = 2.0
    free = plan(types, goals=Goals("fewest", rate_per_s=rate))
    slowest = free.best.at_rate.tpot_p99_s
    bound = plan(types, goals=Goals("fewest", rate_per_s=rate, tpot_p99_s=0.7 * slowest))
    assert max(bound.best.layouts["m"]) > max(free.best.layouts["m"])
    assert bound.best.at_rate.tpot_p99_s <= 0.7 * slowest


def test_with_limits_the_most_throughput_is_that_of_what_keeps_them():
    types = types_of("gpu", kv_tokens=60_000, all_reduce_s=5e-4)
    rate = 2.0
    free = plan(types, goals=Goals("throughput", rate_per_s=rate))
    limit = 0.8 * free.best.at_rate.tpot_p99_s
    bound = plan(types, goals=Goals("throughput", rate_per_s=rate, tpot_p99_s=limit))
    assert bound.best.holds
    assert bound.best.at_rate.tpot_p99_s <= limit
    assert bound.best.simulated.tokens_per_s < free.best.simulated.tokens_per_s
    missed = [c for c in bound.candidates if c.holds is False and c.at_rate is not None]
    assert missed
    assert all("TPOT p99" in c.why_not for c in missed)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_can_be_planned_for(policy):
    found = plan(types_of("gpu"), policy=policy, engines=Engines("prefill-first"))
    assert found.best.simulated.tokens_per_s > 0
    assert found.policy == policy


# What cannot be planned


UNFIT = (
    Unfit("gpu", 1, "far too small", 9e9, ("more t",)),
    Unfit("gpu", 2, "a little too small", 1e9, ("fp8 weights",)),
    Unfit("gpu", 3, "heads do not divide"),
)
TWO_KINDS = (Machine("a", "gpu", 4, 1.0), Machine("b", "dear", 4))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"machines": ()}, ConfigError, "none"),
        ({"types": {}, "unfit": UNFIT}, ConfigError, "tp2: a little too small; try fp8 weights"),
        ({"machines": TWO_KINDS, "goals": Goals("cost")}, ConfigError, "dear"),
        ({"goals": Goals("fewest")}, ConfigError, "rate"),
        ({"goals": Goals("fewest", slo=Slo(2.0, 0.015))}, ConfigError, "rate"),
        ({"goals": Goals("throughput", ttft_p99_s=1.0)}, ConfigError, "rate"),
        ({"goals": Goals("throughput", slo=Slo(2.0, 0.015))}, ConfigError, "goodput"),
        ({"goals": Goals("goodput")}, ConfigError, "needs limits"),
        ({"goals": Goals("fewest", rate_per_s=1e5)}, NoPlan,
         r"nothing holds 100000 requests/s: .* hold about \d"),
        ({"goals": Goals("fewest", rate_per_s=1.0, tpot_p99_s=1e-5)}, NoPlan,
         r"TPOT p99 ≤ 0\.01 ms"),
        ({"goals": Goals("throughput", rate_per_s=1e5)}, NoPlan,
         r"nothing holds 100000 requests/s: .* hold about \d"),
        ({"goals": Goals("throughput", rate_per_s=1.0, tpot_p99_s=1e-5)}, NoPlan,
         r"TPOT p99 ≤ 0\.01 ms"),
        ({"machines": (Machine("a", "gpu", 4, 1.0),), "goals": Goals("cost", rate_per_s=1e5)},
         NoPlan, r"nothing holds 100000 requests/s: .* hold about \d"),
        ({"goals": Goals("goodput", rate_per_s=1e5, slo=Slo(20.0, 1.0))}, NoPlan,
         r"nothing holds 100000 requests/s within .* holds the most, \d"),
        ({"goals": Goals("goodput", slo=Slo(2.0, 1e-5))}, NoPlan,
         r"95 % within TTFT 2 s, TPOT 0\.01 ms"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line(changes, error, message):
    with pytest.raises(error, match=message):
        plan(**{"types": types_of("gpu", "dear")} | changes)


# What must not change the answer


@settings(max_examples=3, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 3))
def test_the_order_of_machines_changes_nothing(order, seed):
    types = types_of("gpu", "other", speed=1.5)
    machines = [
        Machine("a", "gpu", 4),
        Machine("b", "other", 2),
        Machine("c", "gpu", 4),
        Machine("d", "gpu", 2),
    ]
    first = plan(types, machines, seed=seed)
    shuffled = plan(types, [machines[i] for i in order], seed=seed)
    assert len(first.candidates) == len(shuffled.candidates)
    for one, other in zip(first.candidates, shuffled.candidates, strict=True):
        assert dict(one.layouts) == dict(other.layouts)
        assert repr(one.simulated) == repr(other.simulated)  # nan is equal to itself in words
        assert repr(one.at_rate) == repr(other.at_rate)
        assert one.why_not == other.why_not


@settings(max_examples=3, deadline=None)
@given(
    st.floats(0.2, 1.0),
    st.sets(st.sampled_from([f"p{i}" for i in range(1, 9)]), min_size=1),
    st.integers(0, 100),
)
def test_a_faster_accelerator_never_lowers_the_best_throughput(factor, which, seed):
    """Up to the simulator's noise: the same requests, but other steps, in the two runs."""
    rng = np.random.default_rng(seed)
    types = types_of("gpu", all_reduce_s=float(rng.uniform(0, 4e-3)))
    types = changed(types, kv=float(rng.uniform(0.3, 2)))
    faster = changed(types, times=dict.fromkeys(which, factor))
    before, after = plan(types).best, plan(faster).best
    assert after.simulated.tokens_per_s >= (1 - NOISE) * before.simulated.tokens_per_s


@settings(max_examples=3, deadline=None)
@given(st.floats(1.0, 4.0), st.integers(0, 100))
def test_more_kv_never_lowers_the_best_throughput(factor, seed):
    rng = np.random.default_rng(seed)
    types = changed(types_of("gpu"), kv=float(rng.uniform(0.2, 1)))
    before, after = plan(types).best, plan(changed(types, kv=factor)).best
    assert after.simulated.tokens_per_s >= (1 - NOISE) * before.simulated.tokens_per_s


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["Llama-3-8B", "Qwen2.5-14B", "Llama-3-70B"]),
    st.sampled_from(["V100-32GB-NVLink2", "A10G-24GB", "T4-16GB", "H100-80GB-SXM"]),
    st.floats(0.5, 0.98),
    st.floats(0.5, 0.98),
    st.integers(512, 8192),
    st.sampled_from(["fitted", "paper"]),
)
def test_more_memory_never_makes_a_feasible_plan_infeasible(
    model, card, one, other, needed, method
):
    machine = Machine("m", card, 8)
    less, more = (
        instance_types(
            model_card(model), [machine], [], EngineOptions(utilisation=share),
            needed_tokens=needed, method=method, find=accelerator,
        )[0]
        for share in sorted((one, other))
    )  # fmt: skip
    assert set(less) <= set(more)
    for key, found in less.items():
        assert found.memory.kv_capacity_tokens <= more[key].memory.kv_capacity_tokens


def test_one_seed_gives_one_plan_and_another_about_the_same():
    types = types_of("gpu")
    first = plan(types)
    RUNS.clear()
    again, other = plan(types), plan(types, seed=1)
    assert repr(first.best) == repr(again.best)
    assert math.isclose(
        first.best.simulated.tokens_per_s, other.best.simulated.tokens_per_s, rel_tol=0.1
    )
