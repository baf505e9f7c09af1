"""What batches may have beside others' requests."""

import itertools
import math

import pytest

from hetero_gateway.core.batches.others import InstanceCounts, Others
from hetero_gateway.core.batches.shares import BatchShare, Interactive, most_there, shares, spread
from hetero_gateway.core.types import InstanceId
from tests.core.builders import FAST, SLOW, scheduler, spec


def test_requests_are_spread_for_the_lowest_mean_latency():
    alone, capacities, rate = [2.0, 5.0, 6.0], [10.0, 8.0, 3.0], 9.0
    used, latency_s = spread(alone, capacities, rate)
    assert sum(u * c for u, c in zip(used, capacities, strict=True)) == pytest.approx(rate)

    def mean(split):
        return (
            sum(r * b / (1 - r / c) for r, b, c in zip(split, alone, capacities, strict=True))
            / rate
        )

    steps = [i * rate / 60 for i in range(61)]
    splits = [(a, b, rate - a - b) for a, b in itertools.product(steps, steps)]
    possible = [s for s in splits if all(0 <= r < c for r, c in zip(s, capacities, strict=True))]
    best = min(map(mean, possible))
    assert latency_s <= best + 1e-9
    assert latency_s == pytest.approx(best, rel=0.01)


def test_what_batches_have_of_an_instance_others_do_elsewhere():
    alone, capacities = [2.0, 3.0], [10.0, 8.0]
    free, _ = spread(alone, capacities, 6.0)
    (fast, slow), latency_s = spread(alone, capacities, 6.0, [0.0, 0.5])
    assert fast > free[0]
    assert slow < free[1]
    assert fast * 10 + slow * 8 == pytest.approx(6.0)
    took_s = fast * 10 * 2 / (1 - fast) + slow * 8 * 3 / (1 - slow - 0.5)
    assert latency_s == pytest.approx(took_s / 6)
    assert spread(alone, capacities, 14.5, [0.0, 0.5])[1] == math.inf


def test_the_ends_of_it():
    assert spread([2.0, 3.0], [4.0, 4.0], 0.0) == ([0.0, 0.0], 2.0)
    assert spread([2.0, 3.0], [4.0, 4.0], 8.0)[1] == math.inf


def pool(*profiles):
    there = scheduler(*(spec(str(i), p) for i, p in enumerate(profiles)), policy="finish-time")
    return there.members.pool("m")


def test_where_nobody_asks_all_are_given():
    both = pool(FAST, SLOW)
    assert (
        shares(both.states, both.members, Interactive(0.0, 500, 200), 1.1) == [BatchShare(True)] * 2
    )


def test_the_slow_ones_are_given_as_far_as_the_others_bear_it():
    four = pool(FAST, FAST, FAST, SLOW)
    few = shares(four.states, four.members, Interactive(0.5, 500, 200), 1.1)
    assert [each.given for each in few] == [False, True, True, True]
    more = shares(four.states, four.members, Interactive(20.0, 500, 200), 1.1)
    assert [each.given for each in more] == [False, False, False, True]
    many = shares(four.states, four.members, Interactive(45.0, 500, 200), 1.1)
    assert not any(each.given for each in many)
    # One is shared: the slowest, to which the others' requests go least.
    assert [each.part > 0 for each in many] == [False, False, False, True]
    assert many[3].busy < many[0].busy


def test_what_is_left_of_the_margin_is_for_batches():
    two = pool(FAST, FAST)
    low, high = (
        shares(two.states, two.members, Interactive(8.0, 500, 200), slowdown)[1]
        for slowdown in (1.05, 1.3)
    )
    counts = [most_there(each, two.states[0], two.members[0], 500, 200) for each in (low, high)]
    assert 0 < counts[0] < counts[1] < 60
    assert most_there(BatchShare(True), two.states[0], two.members[0], 500, 200) == math.inf
    assert most_there(BatchShare(False, 0.0, 0.9), two.states[0], two.members[0], 500, 200) == 0


def test_overload_leaves_nothing():
    two = pool(FAST, SLOW)
    told = shares(two.states, two.members, Interactive(1e6, 500, 200), 1.1)
    assert [most_there(s, two.states[0], two.members[0], 500, 200) for s in told] == [0, 0]


def test_others_are_counted_by_what_is_new():
    others, a, b = Others(), InstanceId("a"), InstanceId("b")
    assert others.on([a, b], 0.0).rate_per_s == math.inf  # nobody knows yet
    for second in range(200):
        counts = {
            a: InstanceCounts(5 * second, 5 * second, 500 * second, 50 * second, 1),
            b: InstanceCounts(second, second, 400 * second, 20 * second, 0),
        }
        others.look(counts, float(second))
        if second == 2:
            assert others.on([a, b], 2.0).rate_per_s == pytest.approx(6, rel=0.01)
    rate, prompt, output = others.on([a, b], 199.0)
    assert rate == pytest.approx(6, rel=0.05)
    assert (prompt, output) == (pytest.approx(150), pytest.approx(70 / 6))
    assert others.on([b], 199.0).rate_per_s == pytest.approx(1, rel=0.05)
    # An instance that begins anew counts from 0 again.
    others.look({a: InstanceCounts(0, 0, 0, 0, 0)}, 200.0)
    assert others.on([a], 200.0).rate_per_s >= 0
    assert others.on([a, b], 330.0).rate_per_s == 0


def test_what_is_chance_moves_no_rate_and_what_is_more_does():
    others, a = Others(), InstanceId("a")
    sent = 0
    for second in range(300):
        sent += 20 + (second % 2)
        others.look({a: InstanceCounts(sent, 0, 0, 0, 1)}, float(second))
    for second in range(300, 304):
        sent += 30
        others.look({a: InstanceCounts(sent, 0, 0, 0, 1)}, float(second))
    assert others.on([a], 303.0).rate_per_s < 22
    for second in range(304, 330):
        sent += 60
        others.look({a: InstanceCounts(sent, 0, 0, 0, 1)}, float(second))
    assert others.on([a], 329.0).rate_per_s > 50
