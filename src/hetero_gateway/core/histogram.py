"""Counts by bucket, as Prometheus has them, with nothing of Prometheus in them."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts by bucket, and the sum of what was observed."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value, or ``weight`` equal ones at once."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.sum += value * weight

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative (upper bound, count) pairs, the last one +Inf."""
        total = 0
        result = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append((str(float(bound)) if bound != float("inf") else "+Inf", float(total)))
        return result
