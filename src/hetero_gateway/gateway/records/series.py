"""Counts per model and instance."""

from __future__ import annotations

from collections import defaultdict

from hetero_gateway.core.histogram import Histogram

LATENCY_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
# Buckets that /metrics shows per model and instance: half of the lines, and panels still overlay
# vLLM's.
SHOWN_BOUNDS: dict[tuple[float, ...], tuple[float, ...]] = {
    LATENCY_BOUNDS_S: (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 240.0, 960.0),
    TTFT_BOUNDS_S: (0.01, 0.04, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 40.0),
    TPOT_BOUNDS_S: (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 2.5),
}


class Series:
    """The counts of a model on an instance.

    ``outcomes``: requests by how they ended.
    """

    __slots__ = (
        "cached_tokens",
        "duration",
        "input_tokens",
        "outcomes",
        "output_tokens",
        "tpot",
        "ttft",
    )

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, int] = defaultdict(int)
        self.duration = Histogram(LATENCY_BOUNDS_S)
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.tpot = Histogram(TPOT_BOUNDS_S)
        self.input_tokens = 0
        self.cached_tokens = 0.0
        self.output_tokens = 0

    def add(self, more: Series) -> None:
        """Add another one's counts; it stays unchanged."""
        for outcome, number in more.outcomes.items():
            self.outcomes[outcome] += number
        for own, other in (
            (self.duration, more.duration),
            (self.ttft, more.ttft),
            (self.tpot, more.tpot),
        ):
            other.count_noted()
            own.add((other.counts, other.sum))
        self.input_tokens += more.input_tokens
        self.cached_tokens += more.cached_tokens
        self.output_tokens += more.output_tokens
