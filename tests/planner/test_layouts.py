"""How machines are cut: every layout worth looking at, and equal machines as one case."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.planner.layouts import best_by_use, describe, group_machines, machine_layouts
from hetero_gateway.planner.plan import Machine

sizes = st.sets(st.integers(1, 8), min_size=1, max_size=4)


def multisets(accelerators, feasible):
    """Every one with a sum of at most the machine, largest t first."""
    return {
        tuple(sorted(chosen, reverse=True))
        for n in range(1, accelerators + 1)
        for chosen in itertools.combinations_with_replacement(sorted(feasible), n)
        if sum(chosen) <= accelerators
    }


def test_eight_accelerators_have_the_papers_layouts_and_six_unequal_ones():
    layouts = machine_layouts(8, {1, 2, 4, 8})
    assert len(layouts) == 10
    assert {(8,), (4, 4), (2,) * 4, (1,) * 8} <= set(layouts)
    assert (4, 2, 1, 1) in layouts


@given(st.integers(1, 9), sizes)
def test_a_layout_fits_its_machine_and_only_an_equal_one_leaves_room(accelerators, feasible):
    every = multisets(accelerators, feasible)
    listed = set(machine_layouts(accelerators, feasible))
    assert listed <= every
    full = {x for x in every if accelerators - sum(x) < min(feasible)}
    assert full <= listed
    assert all(len(set(layout)) == 1 for layout in listed - full)


def test_accelerators_stay_idle_where_t_does_not_divide_them():
    assert machine_layouts(6, {4}) == [(4,)]
    assert set(machine_layouts(6, {2, 4})) == {(4,), (4, 2), (2, 2, 2)}
    assert machine_layouts(3, {4}) == []


@given(
    st.integers(1, 9),
    st.dictionaries(st.integers(1, 6), st.integers(1, 100), min_size=1, max_size=4),
)
def test_the_best_for_what_it_uses_is_that_of_trying_all(accelerators, worth):
    found = best_by_use(accelerators, worth)
    best = 0
    expected = []
    for used in range(1, accelerators + 1):
        values = [
            sum(worth[t] for t in x) for x in multisets(accelerators, worth) if sum(x) == used
        ]
        if values and max(values) > best:
            best = max(values)
            expected.append((best, used))
    assert [(value, sum(layout)) for value, layout in found] == expected
    assert all(value == sum(worth[t] for t in layout) for value, layout in found)


@given(st.permutations(range(6)))
def test_equal_machines_are_one_group_in_whatever_order(order):
    machines = [
        Machine("a", "x", 8),
        Machine("b", "x", 8),
        Machine("c", "x", 4),
        Machine("d", "y", 8),
        Machine("e", "x", 8, 1.0),
        Machine("f", "x", 8),
    ]
    groups = group_machines([machines[i] for i in order])
    assert groups == group_machines(machines)
    assert {g.ids for g in groups} == {("a", "b", "f"), ("c",), ("d",), ("e",)}


def test_a_layout_is_told_by_how_many_of_each():
    assert describe((4, 2, 1, 1)) == "tp4 + tp2 + 2×tp1"
    assert describe((2, 2)) == "2×tp2"
    assert describe(()) == "–"
