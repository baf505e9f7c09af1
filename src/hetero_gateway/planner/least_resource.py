"""The goals ``cost`` and ``fewest`` at a rate: the least money, or accelerators, that hold it.

docs/design/search.md explains which sets of machines are tried, and in which order.
"""

from collections.abc import Callable, Iterator, Sequence

from hetero_gateway.planner import allocation
from hetero_gateway.planner.allocation import Allocation
from hetero_gateway.planner.bound import lower_bound
from hetero_gateway.planner.goals import price_per_hour_usd
from hetero_gateway.planner.layouts import Group, best_by_use
from hetero_gateway.planner.plan import Layout, PlanCandidate
from hetero_gateway.planner.question import NoPlan
from hetero_gateway.planner.reasons import nothing_holds
from hetero_gateway.planner.shortlist import rates_alone
from hetero_gateway.planner.systems import Systems

Counts = tuple[int, ...]  # machines taken, by group

# This many machines are added or removed at a time; fewer with a long catalogue.
_CHANGES, _FEW_CHANGES = 4, 2
_LONG_CATALOGUE = 8
# Tolerance of equal prices: sums of floats in another order.
_SAME = 1e-9
# At most this many cheaper sets of machines are simulated.
_TRIES = 16


def _first_that_holds(holds: Callable[[int], bool], likely: int, last: int) -> int | None:
    """The first index of 0 to ``last`` that holds, near ``likely``; None: the last does not.

    If one holds, all above it are assumed to hold.
    """
    low, high, step = -1, likely, 1  # low does not hold, high should hold
    while not holds(high):
        if high == last:
            return None
        low, high = high, min(high + step, last)
        step *= 2
    while high - low > 1:
        # Near the expected one first: few below it hold.
        middle = high - 1 if low < 0 else (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


class LeastSets:
    """One search among sets of machines, at the goals' rate."""

    def __init__(self, systems: Systems, on_progress: Callable[[str], None]) -> None:
        self._q = systems.question
        self._shortlist = systems.shortlist
        self._groups = systems.shortlist.groups
        # Rates that instances hold alone, by type.
        self._rates_per_s = rates_alone(self._q, self._shortlist, on_progress)
        self._on_progress = on_progress
        self._systems = systems
        self._rate_per_s = self._q.goals.rate_per_s or 0.0
        self._by_price = self._q.goals.name == "cost"

    def find(self) -> tuple[list[PlanCandidate], float | None]:
        """Sets that hold the rate, the least first, then all others tried; the lower bound.

        Raises:
            NoPlan: nothing holds it.
        """
        options = allocation.holding(
            self._groups, self._rates_per_s, self._rate_per_s, by_price=self._by_price
        )
        if not options:
            raise NoPlan(nothing_holds(self._q, self._shortlist, self._rates_per_s))
        tried: dict[int, PlanCandidate] = {}

        def holds(position: int) -> bool:
            if position not in tried:
                tried[position] = self._try(options[position][1])
            return bool(tried[position].holds)

        last = len(options) - 1
        enough = (i for i, (worth, _) in enumerate(options) if worth >= self._rate_per_s)
        found = _first_that_holds(holds, next(enough, last), last)
        if found is None:
            raise NoPlan(nothing_holds(self._q, self._shortlist, self._rates_per_s, tried[last]))
        bound = self._lower_bound()
        pairs = [(options[i][1], candidate) for i, candidate in tried.items() if i != found]
        if self._by_price:
            nearby = self._cheaper(options[found][1], tried[found], pairs, bound or 0.0)
        else:
            nearby = [tried[found]]
        others = [candidate for _, candidate in pairs] + nearby[1:]
        return [nearby[0], *sorted(others, key=self._q.goals.rank)], bound

    def _try(self, each: Allocation) -> PlanCandidate:
        self._on_progress(f"at the rate: {self._systems.name(each)}")
        return self._systems.tried(each, self._rate_per_s)

    def _lower_bound(self) -> float | None:
        """Its capacities assume prompts computed in full: with caches, less may do."""
        if self._q.in_order:
            return None
        return lower_bound(
            self._groups,
            {key: found.profile for key, found in self._q.types.items()},
            self._shortlist.mix,
            self._q.goals,
            self._rate_per_s,
            by_price=self._by_price,
        )

    def _cheaper(
        self,
        found: Allocation,
        holding: PlanCandidate,
        tried: Sequence[tuple[Allocation, PlanCandidate]],
        least_price: float,
    ) -> list[PlanCandidate]:
        """The cheapest near a holding set that also holds the rate, then all others tried."""
        best = [self._best_layout(group) for group in self._groups]
        prices = [price_per_hour_usd(group) for group in self._groups]
        most = [
            g.machines if worth else 0 for g, (worth, _) in zip(self._groups, best, strict=True)
        ]
        failed = [_counts(each) for each, candidate in tried if not candidate.holds]
        counts, seen = _counts(found), [holding]
        for _ in range(_TRIES):
            near = cheaper_sets(
                counts,
                most,
                prices,
                [worth for worth, _ in best],
                least_worth=allocation.POOLING * self._rate_per_s,
                least_price=least_price,
            )
            each = next((each for each in near if not is_part_of(each, failed)), None)
            if each is None:
                break
            candidate = self._try(
                tuple(
                    ((layout, n),) if n else () for n, (_, layout) in zip(each, best, strict=True)
                )
            )
            if candidate.holds:
                counts, seen = each, [candidate, *seen]
            else:
                failed.append(each)
                seen.append(candidate)
        return seen

    def _best_layout(self, group: Group) -> tuple[float, Layout]:
        """The most requests/s that a machine of a group holds, and its layout; (0, ()): none."""
        worth = {t: value for (a, t), value in self._rates_per_s.items() if a == group.accelerator}
        return max(best_by_use(group.count, worth), default=(0.0, ()))


def _counts(each: Allocation) -> Counts:
    """Machines by group."""
    return tuple(sum(machines for _, machines in parts) for parts in each)


def cheaper_sets(
    counts: Counts,
    most: Sequence[int],
    prices: Sequence[float],
    worths: Sequence[float],
    *,
    least_worth: float,
    least_price: float,
) -> list[Counts]:
    """Sets near ``counts`` that cost less: the highest sum of its machines alone comes first.

    Args:
        most: available machines, by group.
        prices: of one machine, USD per hour.
        worths: requests/s that one machine holds alone.
        least_worth: the least sum of its machines alone for which a set is tried.
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
    """Whether one of the others has all of these machines: if that is too little, so is this."""
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
