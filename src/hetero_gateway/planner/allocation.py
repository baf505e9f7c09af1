"""How all machines are used together: combinations of their groups' layouts.

An allocation gives every group of equal machines a list of (layout, machines); remaining machines
are unused. Throughput is assumed to be additive here (``worth``); the simulator judges the best
few.

For the most throughput all machines of a group get one layout. For the least money or the fewest
accelerators some are unused, and one of them may be used in part.
"""

import heapq
import itertools
from collections.abc import Mapping, Sequence

from hetero_gateway.planner.goals import price_per_hour_usd
from hetero_gateway.planner.layouts import Group, best_by_use, stretches, together
from hetero_gateway.planner.plan import Key, Layout

Allocation = tuple[tuple[tuple[Layout, int], ...], ...]
# The value of a layout on one machine of a group; larger is better.
Worths = Mapping[Group, Mapping[Layout, float]]
# (resource, worth, parts by group)
_State = tuple[float, float, Allocation]

# An allocation whose instances' sum is below the rate by at most this may still hold it: a
# gateway's queue evens out differences that single instances cannot.
POOLING = 0.85
# Points of the frontier that are kept while groups are joined.
_FRONTIER = 1500


def best_sums(groups: Sequence[Group], worths: Worths, keep: int) -> list[Allocation]:
    """One layout for all machines of each group: the best combinations, best first."""
    best: list[tuple[float, tuple[Layout, ...]]] = [(0.0, ())]
    for group in groups:
        options = _by_worth(worths[group])[:keep] or [(0.0, ())]
        joined = [
            (total + _machines(group, layout) * worth, (*chosen, layout))
            for (total, chosen), (worth, layout) in itertools.product(best, options)
        ]
        best = heapq.nsmallest(keep, joined, key=lambda pair: (-pair[0], pair[1]))
    return [_whole(groups, chosen) for _, chosen in best]


def least_cost(groups: Sequence[Group], worths: Worths, keep: int) -> list[Allocation]:
    """Which groups to use at all, best layout each: least money per token first.

    Adding a dearer group never makes a token cheaper, so the groups are added in the order of
    their price per token; the others are listed alone, for comparison.
    """
    offers = []
    for group in groups:
        if options := _by_worth(worths[group]):
            worth, layout = options[0]
            offers.append((price_per_hour_usd(group) / worth, group, layout))
    offers.sort(key=lambda offer: (offer[0], offer[1].accelerator, offer[1].ids))
    chosen = {group: layout for _, group, layout in offers[:1]}
    result = [dict(chosen)]
    for _, group, layout in offers[1:]:
        chosen[group] = layout
        result.append(dict(chosen))
    result += [{group: layout} for _, group, layout in offers[1:]]
    first = offers[0][1]
    result += [{first: layout} for _, layout in _by_worth(worths[first])[1:]]

    def price_of_worth(of: Mapping[Group, Layout]) -> float:
        worth = sum(_machines(g, layout) * worths[g][layout] for g, layout in of.items())
        price = sum(price_per_hour_usd(g, _machines(g, x)) for g, x in of.items())
        return price / worth

    ranked = sorted(range(len(result)), key=lambda i: (price_of_worth(result[i]), i))
    found = [_whole(groups, [result[i].get(g, ()) for g in groups]) for i in ranked]
    return list(dict.fromkeys(found))[:keep]


def holding(
    groups: Sequence[Group],
    goodput: Mapping[Key, float],
    rate_per_s: float,
    *,
    by_price: bool,
) -> list[tuple[float, Allocation]]:
    """Allocations that may hold a rate, least resource first; each holds more than the one before.

    Args:
        goodput: requests/s that an instance of a type holds alone, by (accelerator, t).
        by_price: the resource is USD per hour of used machines; else accelerators.

    Returns:
        (requests/s by the instances alone, allocation), starting with one that is surely too
        little; empty if all together are too little.
    """
    frontier: list[_State] = [(0.0, 0.0, ())]
    for group in groups:
        states = _group_states(group, goodput, by_price)
        joined = [
            (used + more, worth + gain, (*parts, part))
            for used, worth, parts in frontier
            for more, gain, part in states
        ]
        frontier = _pareto(joined)
    enough = [i for i, state in enumerate(frontier) if state[1] >= POOLING * rate_per_s]
    if not enough:
        return []
    # The previous one shows what less would miss; the very first is empty.
    return [(worth, parts) for _, worth, parts in frontier[max(1, enough[0] - 1) :]]


def _group_states(
    group: Group, goodput: Mapping[Key, float], by_price: bool
) -> list[tuple[float, float, tuple[tuple[Layout, int], ...]]]:
    """(resource, worth, parts): a number of machines with one layout, and perhaps one of
    another."""
    worth = {t: value for (a, t), value in goodput.items() if a == group.accelerator}
    options = best_by_use(group.count, worth)
    states: list[tuple[float, float, tuple[tuple[Layout, int], ...]]] = [(0.0, 0.0, ())]
    for t, value in worth.items():
        if stretches(t) and int(t) == group.count:
            step = together((t,))
            for n in range(step, group.machines + 1, step):
                used = price_per_hour_usd(group) * n if by_price else float(group.count * n)
                states.append((used, value * n / step, (((t,), n),)))
    if not options:
        return states
    if by_price:
        value, layout = options[-1]
        price = price_per_hour_usd(group)
        return states + [
            (n * price, n * value, ((layout, n),)) for n in range(1, group.machines + 1)
        ]
    thriftiest = max(options, key=lambda o: (o[0] / sum(o[1]), sum(o[1])))
    for (value, layout), n in itertools.product(
        dict.fromkeys((options[-1], thriftiest)), range(group.machines + 1)
    ):
        whole = ((layout, n),) if n else ()
        states.append((n * sum(layout), n * value, whole))
        if n < group.machines:
            states += [
                (n * sum(layout) + sum(part), n * value + more, (*whole, (part, 1)))
                for more, part in options
                if part != layout
            ]
    return states


def _pareto(states: list[_State]) -> list[_State]:
    """The Pareto front of worth and resource; evenly thinned if it is long."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s[0], -s[1], s[2])):
        if not kept or state[1] > kept[-1][1]:
            kept.append(state)
    if len(kept) <= _FRONTIER:
        return kept
    step = (len(kept) - 1) / (_FRONTIER - 1)
    return [kept[round(i * step)] for i in range(_FRONTIER)]


def _by_worth(worths: Mapping[Layout, float]) -> list[tuple[float, Layout]]:
    """The layouts worth most first; of equal ones, the one with fewer instances."""
    return sorted(
        ((worth, layout) for layout, worth in worths.items()),
        key=lambda pair: (-pair[0], len(pair[1]), pair[1]),
    )


def _machines(group: Group, layout: Layout) -> int:
    """Machines that can have this layout: all, unless instances span several and leave a rest."""
    return group.machines - group.machines % together(layout)


def _whole(groups: Sequence[Group], layouts: Sequence[Layout]) -> Allocation:
    return tuple(
        ((layout, _machines(group, layout)),) if layout else ()
        for group, layout in zip(groups, layouts, strict=True)
    )
