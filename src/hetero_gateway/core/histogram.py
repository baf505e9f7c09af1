"""Counts by bucket, as Prometheus has them, with nothing of Prometheus in them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# The count in each bin, and the sum; None: there are none.
Taken = tuple[list[int], float] | None


class Histogram:
    """Counts by bucket, and the sum of what was observed.

    ``note``: have a value counted by the next ``count_noted``, which whoever notes calls now and
    then, and before ``counts`` and ``sum`` are read. ``zeros``: so many of 0 are noted, too.
    """

    __slots__ = ("bounds", "counts", "note", "noted", "sum", "zeros")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.zeros = 0
        self.noted: list[float] = []
        self.note = self.noted.append  # bound once: it costs no call of a Python function

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value, or ``weight`` equal ones at once."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.sum += value * weight

    def count_noted(self) -> None:
        """Count the values that were noted."""
        count_noted((self,))

    def take(self) -> Taken:
        """All that was counted, which begins at 0 again."""
        self.count_noted()
        if not any(self.counts):
            return None
        taken = self.counts, self.sum
        self.counts, self.sum = [0] * len(self.counts), 0.0
        return taken

    def add(self, taken: Taken) -> None:
        """What another histogram of the same bounds has seen. ValueError: of other bounds."""
        if taken is None:
            return
        counts, total = taken
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.sum += total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative (upper bound, count) pairs, the last one +Inf."""
        self.count_noted()
        total = 0
        result = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append((str(float(bound)) if bound != float("inf") else "+Inf", float(total)))
        return result


def count_noted(histograms: Iterable[Histogram]) -> None:
    """Count the values that were noted in some histograms."""
    bin_of = bisect_left
    for histogram in histograms:
        bounds, counts = histogram.bounds, histogram.counts
        for value in histogram.noted:
            counts[bin_of(bounds, value)] += 1
            histogram.sum += value
        histogram.noted.clear()
        if histogram.zeros:
            counts[bin_of(bounds, 0.0)] += histogram.zeros
            histogram.zeros = 0
