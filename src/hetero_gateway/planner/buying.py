"""Sets of machines near one that holds a rate, and cheaper than it.

The search's first answer is the best where what machines hold adds up. It does not quite: a queue
in front of several evens out what one alone cannot. So sets are tried that have a few machines
more, fewer or others, by the simulation of each whole system (``search``), until none is left that
is cheaper, could be enough, and is not part of a set that was too little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Counts = tuple[int, ...]  # machines taken, by group

# So many machines are added or taken away at a time; fewer where the catalogue is long.
_CHANGES, _FEW_CHANGES = 4, 2
_LONG_CATALOGUE = 8
# Two prices are one: sums of floats in another order.
_SAME = 1e-9


def cheaper_sets(
    counts: Counts,
    most: Sequence[int],
    prices: Sequence[float],
    worths: Sequence[float],
    *,
    least_worth: float,
    least_price: float,
) -> list[Counts]:
    """Sets near ``counts`` that cost less: what holds most by its machines alone comes first.

    Args:
        most: machines that there are, by group.
        prices: of one machine, USD per hour.
        worths: requests/s that one machine holds alone.
        least_worth: what a set must hold by its machines alone to be worth a try.
        least_price: no set below it can hold the rate (``bound``).
    """
    changes = _CHANGES if len(counts) <= _LONG_CATALOGUE else _FEW_CHANGES
    limit = _sum(prices, counts) - _SAME
    found = []
    for near in _near(counts, most, changes):
        price, worth = _sum(prices, near), _sum(worths, near)
        if least_price - _SAME <= price < limit and worth >= least_worth:
            found.append((-worth, price, near))
    return [near for _, _, near in sorted(found)]


def is_part_of(counts: Counts, others: Sequence[Counts]) -> bool:
    """Whether one of the others has all of these machines: if that is too little, this is."""
    return any(all(n <= m for n, m in zip(counts, other, strict=True)) for other in others)


def _near(counts: Counts, most: Sequence[int], changes: int) -> Iterator[Counts]:
    def extend(taken: Counts, left: int) -> Iterator[Counts]:
        g = len(taken)
        if g == len(counts):
            yield taken
            return
        for n in range(max(0, counts[g] - left), min(most[g], counts[g] + left) + 1):
            yield from extend((*taken, n), left - abs(n - counts[g]))

    return extend((), changes)


def _sum(values: Sequence[float], counts: Counts) -> float:
    return sum(value * n for value, n in zip(values, counts, strict=True) if n)
