"""Combinations of layouts: against trying all."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.planner.allocation import best_sums, holding, least_cost
from hetero_gateway.planner.goals import price_per_hour_usd
from hetero_gateway.planner.layouts import Group

A = Group("a", 2, 1.0, ("a0", "a1"))
B = Group("b", 4, 3.0, ("b0",))
C = Group("c", 1, 0.5, ("c0", "c1", "c2"))
WORTHS = {
    A: {(2,): 10.0, (1, 1): 9.0},
    B: {(4,): 50.0, (2, 2): 70.0, (2, 1, 1): 69.0},
    C: {(1,): 3.0},
}


def worth_of(groups, allocation, worths):
    return sum(
        n * worths[g][x] for g, parts in zip(groups, allocation, strict=True) for x, n in parts
    )


def test_the_best_sums_are_those_of_trying_all():
    groups = (A, B, C)
    every = sorted(
        (
            sum(g.machines * WORTHS[g][x] for g, x in zip(groups, chosen, strict=True))
            for chosen in itertools.product(*(WORTHS[g] for g in groups))
        ),
        reverse=True,
    )
    found = [worth_of(groups, a, WORTHS) for a in best_sums(groups, WORTHS, 4)]
    assert found == pytest.approx(every[:4])


def test_a_group_that_can_hold_nothing_is_left_out():
    (best, *_) = best_sums((A, B), {A: {}, B: WORTHS[B]}, 4)
    assert best == ((), (((2, 2), 1),))


def test_the_least_cost_comes_first():
    groups = (A, B, C)
    found = least_cost(groups, WORTHS, 20)
    costs = [
        sum(price_per_hour_usd(g, n) for g, parts in zip(groups, a, strict=True) for _, n in parts)
        / worth_of(groups, a, WORTHS)
        for a in found
    ]
    assert costs == sorted(costs)
    # c costs 0.5 / 3, b 12 / 70, a 2 / 10 per worth: c alone is the cheapest.
    assert found[0] == ((), (), (((1,), 3),))


@given(
    st.dictionaries(st.sampled_from([1, 2, 4]), st.floats(0.5, 9), min_size=1),
    st.dictionaries(st.sampled_from([1, 2, 4]), st.floats(0.5, 9), min_size=1),
    st.floats(1, 40),
)
def test_the_fewest_accelerators_are_those_of_trying_all(on_a, on_b, rate):
    groups = (A, B)
    goodput = {("a", t): v for t, v in on_a.items()} | {("b", t): v for t, v in on_b.items()}

    def options(group, worth):
        """(used, worth) of one machine, used in any way or not at all."""
        found = {(0, 0.0)}
        for n in range(1, group.count + 1):
            for chosen in itertools.combinations_with_replacement(sorted(worth), n):
                if sum(chosen) <= group.count:
                    found.add((sum(chosen), sum(worth[t] for t in chosen)))
        return found

    one_a, one_b = options(A, on_a), options(B, on_b)
    fewest = min(
        (x[0] + y[0] + z[0] for x in one_a for y in one_a for z in one_b
         if x[1] + y[1] + z[1] >= rate * (1 - 1e-12)),
        default=None,
    )  # fmt: skip
    found = [
        (worth, sum(sum(x) * n for parts in allocation for x, n in parts))
        for worth, allocation in holding(groups, goodput, rate, by_price=False)
    ]
    assert [used for _, used in found] == sorted(used for _, used in found)
    enough = [used for worth, used in found if worth >= rate * (1 - 1e-12)]
    assert (enough[0] if enough else None) == fewest


def test_the_least_price_leaves_the_dear_machines_out():
    goodput = {("a", 2): 10.0, ("b", 2): 35.0}
    (less, _), (worth, enough), *_ = holding((A, B), goodput, 15.0, by_price=True)
    assert enough == ((((2,), 2),), ())  # two of a at $4 hold 20; b at $12 would hold 70
    assert (less, worth) == (10.0, 20.0)


def test_what_all_machines_together_cannot_hold_has_no_allocation():
    assert holding((A, B), {("a", 2): 1.0, ("b", 2): 1.0}, 50.0, by_price=False) == []
