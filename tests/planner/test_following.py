"""How many instances the load needs: up at once, down slowly, never to and fro."""

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.planner.following import (
    Arrivals,
    Follower,
    FollowingRules,
    LoadSample,
    ScaledType,
)
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.held_rates import HeldRates

BIG, SMALL = ("A800-80GB-PCIe", 1), ("A10G-24GB", 1)
# Rates of an instance, requests/s; the big one is cheaper for what it holds.
RATES = HeldRates({BIG: 10.0, SMALL: 2.0}, 100.0, 100.0, {}, Goals())
TYPES = (ScaledType(BIG, 0, 4, 4.0), ScaledType(SMALL, 1, 6, 1.0))
RULES = FollowingRules(startup_s=180, hold_s=600, utilisation=0.8)


class Load:
    """Minutes of a load, and instances that are ready as soon as they are wanted, or later."""

    def __init__(self, types=TYPES, rules=RULES, ready=None, rates=RATES) -> None:
        self.follower = Follower(types, rules)
        self.arrivals = Arrivals()
        self.rates = rates
        self.now_s = self.arrived = 0.0
        self.arrivals.note(0.0, 0.0)
        self.ready = {BIG: 0, SMALL: 1} if ready is None else dict(ready)
        self.seen = []

    def minutes(self, number, rate_per_s, *, queued=0, missed=False, obeys=True):
        for _ in range(number):
            self.now_s += 60
            self.arrived += 60 * rate_per_s
            self.arrivals.note(self.now_s, self.arrived)
            sample = LoadSample(self.now_s, self.arrivals.points(), queued, self.ready, missed)
            proposal = self.follower.follow(sample, self.rates)
            self.seen.append(proposal)
            if obeys:
                self.ready = dict(proposal.desired)
        return proposal


def test_it_wants_the_cheapest_that_hold_the_load_with_room():
    # 12 requests/s at 80 % are 15: one big (4 USD) and three small (3 USD) for 16.
    proposal = Load().minutes(15, 12.0)
    assert proposal.desired == {BIG: 1, SMALL: 3}
    assert proposal.held_per_s == 16
    assert proposal.rate_per_s == pytest.approx(12)
    assert not proposal.short
    assert "12 requests/s" in proposal.reason


def test_it_goes_up_at_once_and_down_only_after_a_while_and_little_by_little():
    load = Load()
    load.minutes(5, 1.0)
    up = load.minutes(2, 30.0)  # the last two minutes are all that counts
    assert RATES.of(up.desired) >= 30 / 0.8
    load.minutes(9, 1.0)
    assert RATES.of(load.seen[-1].desired) >= 30 / 0.8
    sums = [sum(p.desired.values()) for p in load.seen]
    load.minutes(20, 1.0)
    down = [sum(p.desired.values()) for p in load.seen[len(sums) :]]
    assert all(before - after <= 2 for before, after in itertools.pairwise(down))
    assert load.seen[-1].desired == {BIG: 0, SMALL: 1}


def test_a_load_that_wavers_changes_nothing():
    load = Load()
    load.minutes(20, 9.0)
    steady = load.seen[-1].desired
    for i in range(60):
        load.minutes(1, 9.0 + (0.6 if i % 7 < 3 else -0.6))
    assert len({tuple(p.desired.items()) for p in load.seen[40:]}) == 1
    assert RATES.of(load.seen[-1].desired) <= RATES.of(steady) + 2


def test_a_rise_is_met_ahead_of_its_time_and_what_waits_is_worked_off_within_a_minute():
    waits = Load()
    waits.minutes(10, 4.0)
    proposal = waits.minutes(1, 4.0, queued=600)
    assert proposal.rate_per_s == pytest.approx(14)
    assert "600 that wait" in proposal.reason
    load = Load()
    load.minutes(10, 4.0)
    for minute in range(15):
        load.minutes(1, 4.0 + 0.5 * minute)
    # 11 requests/s now; four minutes on it is 13.
    assert load.seen[-1].rate_per_s == pytest.approx(13, abs=0.7)
    assert "expected in 240 s" in load.seen[-1].reason


def test_missed_goals_make_the_need_larger_only_where_all_that_is_wanted_is_there():
    load = Load()
    load.minutes(20, 8.0)
    before = RATES.of(load.seen[-1].desired)
    load.minutes(4, 8.0, missed=True)
    assert RATES.of(load.seen[-1].desired) > before
    assert "goals were missed" in load.seen[-1].reason
    late = Load()
    late.minutes(20, 8.0)
    late.ready = {BIG: 0, SMALL: 1}
    late.minutes(4, 8.0, missed=True, obeys=False)
    assert late.follower.strain == 1.0


def test_one_kind_goes_only_when_what_takes_its_place_is_ready():
    load = Load(
        ready={BIG: 0, SMALL: 6}, types=(ScaledType(BIG, 0, 4, 4.0), ScaledType(SMALL, 0, 6, 3.0))
    )
    load.minutes(16, 8.0, obeys=False)
    # One big one for 4 USD in the place of five small ones for 15.
    assert load.seen[-1].desired == {BIG: 1, SMALL: 5}  # which hold it alone
    load.ready = {BIG: 1, SMALL: 6}
    load.minutes(15, 8.0)
    assert load.seen[-1].desired == {BIG: 1, SMALL: 0}


def test_after_a_start_what_is_there_is_taken_to_be_needed():
    load = Load(ready={BIG: 3, SMALL: 1})
    load.minutes(9, 0.1)
    assert load.seen[-1].desired == {BIG: 3, SMALL: 1}
    load.minutes(10, 0.1)
    assert load.seen[-1].desired == {BIG: 0, SMALL: 1}


def test_more_than_may_run_is_said_and_a_type_that_cannot_keep_the_goals_gets_its_least():
    proposal = Load().minutes(5, 100.0)
    assert proposal.desired == {BIG: 4, SMALL: 6}
    assert proposal.short
    assert "more is not allowed to run" in proposal.reason
    rates = HeldRates({BIG: 10.0, SMALL: 0.0}, 1, 1, {}, Goals())
    assert Load(rates=rates).minutes(5, 12.0).desired == {BIG: 2, SMALL: 1}


def test_other_bounds_hold_from_the_next_answer_on_and_what_was_learnt_stays():
    load = Load()
    load.minutes(20, 20.0)
    other = Follower((ScaledType(BIG, 0, 1, 4.0), ScaledType(SMALL, 2, 6, 1.0)), RULES)
    other.go_on_from(pickle.loads(pickle.dumps(load.follower)))
    load.follower = other
    assert load.minutes(1, 20.0).desired == {BIG: 1, SMALL: 6}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 60), st.integers(0, 100), st.booleans()), min_size=1, max_size=25
    ),
    st.integers(0, 3),
)
def test_whatever_comes_the_bounds_are_kept(minutes, more):
    types = (ScaledType(BIG, 0, 1 + more, 4.0), ScaledType(SMALL, 1, 6, 1.0))
    load = Load(types)
    for rate, queued, missed in minutes:
        proposal = load.minutes(1, rate, queued=queued, missed=missed)
        for each in types:
            assert each.least <= proposal.desired[each.key] <= each.most
        need = proposal.rate_per_s / 0.8
        assert proposal.short == (proposal.held_per_s + 1e-6 < need * load.follower.strain)


def test_the_same_load_gives_the_same_answer():
    one, other = Load(), Load()
    for load in (one, other):
        load.minutes(5, 3.0)
        load.minutes(5, 17.0, queued=3)
    assert [p.desired for p in one.seen] == [p.desired for p in other.seen]
