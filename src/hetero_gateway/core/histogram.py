"""Bucketed counts as Prometheus defines them, without depending on Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# The count in each bin, and the sum; None: empty.
Taken = tuple[list[int], float] | None


class Histogram:
    """Counts by bucket, and the sum of the observed values.

    ``note``: a value that the next ``count_noted`` counts; callers of ``note`` call that now and
    then, and before they read ``counts`` and ``sum``. ``zeros``: a number of zeros noted likewise.
    """

    __slots__ = ("bounds", "counts", "note", "noted", "sum", "zeros")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.zeros = 0
        self.noted: list[float] = []
        self.note = self.noted.append  # bound once: saves a Python call per value

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value, or ``weight`` equal ones at once."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.sum += value * weight

    def count_noted(self) -> None:
        """Count the values that were noted."""
        count_noted((self,))

    def take(self) -> Taken:
        """Return all that was counted, and start over at 0."""
        self.count_noted()
        if not any(self.counts):
            return None
        taken = self.counts, self.sum
        self.counts, self.sum = [0] * len(self.counts), 0.0
        return taken

    def add(self, taken: Taken) -> None:
        """Add another histogram of the same bounds. ValueError: the bounds differ."""
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
    """Count the values noted in some histograms."""
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
