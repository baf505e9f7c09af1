"""Every policy against what its name promises, most of them on random cases."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.policies import (
    POLICY_NAMES,
    Candidates,
    Policy,
    PolicyOptions,
    View,
    make_policy,
)
from hetero_gateway.core.policies.base import Figures
from hetero_gateway.core.types import InstanceId
from tests.core.builders import MANY_TOKENS, attributes, candidates

# Few distinct values, so that ties are common, and some that swallow the others.
loads = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 1e3, 1e20])
times = st.sampled_from([0.5, 1.0, 2.0, 7.0])
usages = st.sampled_from([0.0, 0.25, 1.0, 3.0])
rows = st.lists(st.tuples(loads, times, usages), min_size=1, max_size=7)


def of_rows(values: list[tuple[float, float, float]]) -> View:
    load, request_time_s, kv_usage = (list(column) for column in zip(*values, strict=True))
    return candidates(load, request_time_s, kv_usage)


def position(policy: Policy, c: View, rng: np.random.Generator) -> int:
    choice = policy.choose(c, rng)
    return choice.position


def choose(name: str, c: View, seed: int = 0, **options: Any) -> int:
    policy = make_policy(name, PolicyOptions(**options))
    return position(policy, c, np.random.default_rng(seed))


def workloads(c: View) -> list[float]:
    """w_r^s of Eq. (7), by candidate."""
    shown = Candidates(c)
    pairs = zip(shown.request_time_s, shown.kv_usage, strict=True)
    return [workload(time_s, usage, c.theta) for time_s, usage in pairs]


def loads_after(c: View) -> list[float]:
    return [load + w for load, w in zip(Candidates(c).load, workloads(c), strict=True)]


def literal_maxima(c: View) -> list[float]:
    """What each choice would make the highest load: Algorithm 2's inner loop, literally."""
    load, w = Candidates(c).load, workloads(c)
    return [
        max(load[j] + (w[j] if j == s else 0.0) for j in range(len(load))) for s in range(len(load))
    ]


def turns(name: str, weight: list[float], count: int) -> list[int]:
    policy, rng = make_policy(name), np.random.default_rng(0)
    c = candidates([0.0] * len(weight), weight=weight)
    return [position(policy, c, rng) for _ in range(count)]


# Algorithm 2


@given(rows, st.integers(0, 100))
def test_min_max_is_algorithm_2_with_ties_to_the_lowest_own_load(values, seed):
    c = of_rows(values)
    maxima, own = literal_maxima(c), loads_after(c)
    best = min((maxima[s], own[s]) for s in range(len(values)))
    position = choose("min-max", c, seed)
    assert (maxima[position], own[position]) == best


@given(rows)
def test_min_max_reaches_every_one_of_equal_choices(values):
    c = of_rows(values)
    own = loads_after(c)
    equal = {s for s in range(len(own)) if own[s] == min(own)}
    assert {choose("min-max", c, seed) for seed in range(60)} == equal


@given(rows)
def test_paper_is_algorithm_2_as_printed_with_the_start_value_mended(values):
    c = of_rows(values)
    lowest, choice = math.inf, 0  # the print starts at 0, which `>` never beats
    for s, highest in enumerate(literal_maxima(c)):
        if lowest > highest:
            lowest, choice = highest, s
    assert choose("paper", c) == choice


def test_paper_sends_ties_to_the_lowest_index_and_min_max_to_the_idle_instance() -> None:
    # A third instance holds the maximum, so the first two tie whatever their own load is.
    c = candidates([5.0, 0.0, 9.0])
    assert choose("paper", c) == 0
    assert choose("min-max", c) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["min-max", "least-work", "memory-based", "least-requests"])
def test_shuffling_the_instances_changes_no_distribution(name: str) -> None:
    # Two pairs of equals: each of the best pair must get half, wherever it stands.
    ids = ["a", "b", "c", "d"]
    load = {"a": 1.0, "b": 1.0, "c": 4.0, "d": 4.0}
    draws = 2000
    for order in itertools.permutations(ids):
        values = [load[i] for i in order]
        c = candidates(values, in_flight=[int(value) for value in values])
        policy, rng = make_policy(name), np.random.default_rng(1)
        counts = Counter(order[position(policy, c, rng)] for _ in range(draws))
        assert set(counts) == {"a", "b"}
        assert abs(counts["a"] - draws / 2) < 4 * math.sqrt(draws / 4)


@given(rows, st.randoms(use_true_random=False))
def test_without_ties_shuffling_the_instances_changes_no_choice(values, rng):
    distinct = [(i + 0.1 * load, t, u) for i, (load, t, u) in enumerate(values) if load < 10]
    own = [load + t * math.exp(2 * u) for load, t, u in distinct]
    if len(set(own)) < len(own) or not own:
        return
    order = list(range(len(distinct)))
    rng.shuffle(order)
    straight = choose("min-max", of_rows(distinct))
    shuffled = choose("min-max", of_rows([distinct[i] for i in order]))
    assert order[shuffled] == straight


# What the relatives weigh


@given(rows)
def test_memory_based_takes_every_request_time_as_one(values):
    c = of_rows([(load, 1.0, usage) for load, _, usage in values])
    own = loads_after(c)
    choice = make_policy("memory-based").choose(of_rows(values), np.random.default_rng(0))
    assert choice.charge == workloads(c)[choice.position]
    assert own[choice.position] == min(own)


@given(rows)
def test_least_work_is_the_lowest_load_plus_request_time(values):
    sums = [load + time_s for load, time_s, _ in values]
    choice = make_policy("least-work").choose(of_rows(values), np.random.default_rng(0))
    assert choice.charge == values[choice.position][1]
    assert sums[choice.position] == min(sums)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_least_requests_is_the_fewest_in_flight(in_flight: list[int]) -> None:
    c = candidates([0.0] * len(in_flight), in_flight=in_flight)
    assert in_flight[choose("least-requests", c)] == min(in_flight)


def test_capacity_weighted_fills_instances_in_the_ratio_of_their_capacities() -> None:
    policy, rng = make_policy("capacity-weighted"), np.random.default_rng(0)
    in_flight = [0, 0]
    for _ in range(500):
        c = candidates([0.0, 0.0], in_flight=in_flight, capacity=[4.0, 1.0])
        in_flight[position(policy, c, rng)] += 1
    assert in_flight == [400, 100]


def test_capacity_weighted_gives_an_idle_cluster_to_the_faster_instance() -> None:
    c = candidates([0.0, 0.0], capacity=[1.0, 4.0])
    assert {choose("capacity-weighted", c, seed) for seed in range(20)} == {1}


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([1.0, 2.0, 5.0])), min_size=2, max_size=2
    ),
    st.integers(0, 1000),
)
def test_power_of_two_never_takes_the_worse_of_the_two_it_drew(pair, seed):
    # With two candidates both are drawn.
    scores = [(n + 1) / capacity for n, capacity in pair]
    in_flight, capacity = (list(column) for column in zip(*pair, strict=True))
    c = candidates([0.0, 0.0], in_flight=in_flight, capacity=capacity)
    assert scores[choose("power-of-two", c, seed)] == min(scores)


def test_power_of_two_never_takes_the_worst_and_draws_every_pair() -> None:
    c = candidates([0.0] * 5, in_flight=[0, 1, 2, 3, 4])
    policy, rng, draws = make_policy("power-of-two"), np.random.default_rng(0), 4000
    counts = Counter(position(policy, c, rng) for _ in range(draws))
    # Of ten pairs of five, i is the better one in 4 − i.
    for i in range(5):
        share = (4 - i) / 10
        bound = 4 * math.sqrt(draws * share * (1 - share))
        assert abs(counts[i] - draws * share) <= bound


# Turns


def test_turns_are_taken_in_order_and_weighted_ones_are_smooth() -> None:
    assert turns("round-robin", [1.0, 1.0, 1.0], 7) == [0, 1, 2, 0, 1, 2, 0]
    assert turns("weighted-round-robin", [5.0, 1.0, 1.0], 7) == [0, 0, 1, 0, 2, 0, 0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_weighted_shares_are_exact_after_every_full_round(weight: list[int]) -> None:
    order = turns("weighted-round-robin", [float(w) for w in weight], 3 * sum(weight))
    for end in (1, 2, 3):
        counts = Counter(order[: end * sum(weight)])
        assert [counts[i] for i in range(len(weight))] == [end * w for w in weight]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_weighted_shares_are_never_off_by_more_than_the_number_of_instances(weight):
    order = turns("weighted-round-robin", [float(w) for w in weight], 2 * sum(weight))
    for end in range(1, len(order) + 1):
        counts = Counter(order[:end])
        for i, w in enumerate(weight):
            assert abs(counts[i] - end * w / sum(weight)) < len(weight)


def test_turns_go_on_when_an_instance_is_missing_for_a_while() -> None:
    policy, rng = make_policy("round-robin"), np.random.default_rng(0)
    everyone, without_one = candidates([0.0] * 3), candidates([0.0] * 3)
    for entries in ("ids", "states", "members"):
        setattr(without_one, entries, getattr(everyone, entries)[::2])
    for _ in range(31):
        position(policy, without_one, rng)
    counts = Counter(position(policy, everyone, rng) for _ in range(30))
    # The one that was away gets its share from now on, and no burst for what it missed.
    assert all(9 <= counts[i] <= 11 for i in range(3))


def test_a_change_of_the_weights_scale_takes_effect_within_a_round() -> None:
    # Whatever was owed in the old unit must not go to one instance in a row.
    policy, rng = make_policy("weighted-round-robin"), np.random.default_rng(0)
    for _ in range(2):
        position(policy, candidates([0.0] * 2, weight=[4000.0, 3000.0]), rng)
    c = candidates([0.0] * 2, weight=[4.0, 1.0])
    order = [position(policy, c, rng) for _ in range(50)]
    assert order.count(0) == pytest.approx(40, abs=5)


@pytest.mark.parametrize(
    ("name", "weight", "shares"),
    [
        ("round-robin", [1.0, 5.0, 2.0], [1 / 3, 1 / 3, 1 / 3]),
        ("weighted-round-robin", [1.0, 5.0, 2.0], [1 / 8, 5 / 8, 2 / 8]),
    ],
)
def test_randomised_shares_lie_within_the_binomial_bound(name, weight, shares):
    policy, rng = make_policy(name, PolicyOptions(randomised=True)), np.random.default_rng(5)
    c, draws = candidates([0.0] * 3, weight=weight), 6000
    order = [position(policy, c, rng) for _ in range(draws)]
    counts = Counter(order)
    for i, share in enumerate(shares):
        assert abs(counts[i] - draws * share) < 4 * math.sqrt(draws * share * (1 - share))
    # It draws; it does not take turns.
    pairs = Counter(itertools.pairwise(order))
    assert all(pairs[i, i] > 0 for i in range(3))


def test_a_single_instance_gets_everything_while_it_can_take_it() -> None:
    c = candidates([9.0, 0.0, 0.0])
    assert choose("single-instance", c) == 0
    assert choose("single-instance", c, single_instance=InstanceId("i2")) == 2
    # One that is gone is replaced by the first candidate.
    assert choose("single-instance", c, single_instance=InstanceId("elsewhere")) == 0


# What they share


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(values=rows, seed=st.integers(0, 2**32))
def test_every_policy_returns_a_position_and_a_charge_for_each_candidate(name, values, seed):
    c = of_rows(values)
    policy, rng = make_policy(name), np.random.default_rng(seed)
    for _ in range(3):
        assert 0 <= position(policy, c, rng) < len(values)
    shown = Candidates(c)
    for time_s, usage in zip(shown.request_time_s, shown.kv_usage, strict=True):
        assert 0 < policy.charge(time_s, usage, c.theta) < math.inf


def told(c: View) -> list[dict[str, object]]:
    """All that is known of the candidates."""
    return [{name: repr(v) for name, v in attributes(state).items()} for state in c.states]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_policy_writes_to_what_it_sees(name: str) -> None:
    c = candidates([1.0, 0.0, 2.0], [1.0, 2.0, 3.0], [0.1, 0.2, 0.3], [1, 0, 2])
    before = told(c)
    policy, rng = make_policy(name), np.random.default_rng(0)
    positions = [position(policy, c, rng) for _ in range(10)]
    assert all(0 <= position < 3 for position in positions)
    assert told(c) == before


def test_what_other_gateways_sent_there_is_looked_at_too() -> None:
    c = candidates([1.0, 1.0], in_flight=[3, 3])
    c.states[0].set_peer("other", PeerLoad(load_s=2.0, kv_tokens=5 * MANY_TOKENS, in_flight=4))
    shown = Candidates(c)
    assert (shown.load, shown.in_flight, shown.kv_usage) == ([3.0, 1.0], [7, 3], [5.0, 0.0])
    assert (choose("min-max", c), choose("least-requests", c)) == (1, 1)


def test_one_figure_is_that_of_its_column() -> None:
    figures = Figures(("load_s", "in_flight", "kv_usage"), [1.5, 2, 0.25, 3, 0, 0.5])
    assert figures.column("load_s") == [1.5, 3.0]
    assert figures.column("kv_usage") == [0.25, 0.5]
    for name in figures.names:
        assert [figures.at(name, candidate) for candidate in range(2)] == figures.column(name)


def test_a_policy_that_does_not_exist_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="finish-line"):
        make_policy("finish-line")
