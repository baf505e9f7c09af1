"""The last fifteen minutes, in steps of five seconds: rates, first tokens, errors, the queue.

Nothing is added to a request's way: each step reads the counts that ``metrics`` keeps and remembers
what has come to them. Memory is bounded: a ring of counts and histograms for all requests and one
for each of the first models (some 70 KB each), and a minute of plain counts for each instance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_gateway.gateway.records.metrics import TPOT_BOUNDS_S, TTFT_BOUNDS_S, Metrics, Series

STEP_S = 5.0
STEPS = 180
# What "now" means on the page: enough requests for a percentile at moderate rates.
NOW_STEPS = 6
MINUTE_STEPS = 12
# Models with a ring of their own; all others are in the sum alone.
MOST_MODELS = 16

_FAILED = ("upstream_error", "timed_out", "unavailable", "internal_error")
_NOT_OURS = "unknown"
# Columns of a step: requests, failed, tokens in, out, cached; then both histograms.
_REQUESTS, _FAILURES, _IN, _OUT, _CACHED = range(5)
_TTFT = slice(5, 5 + len(TTFT_BOUNDS_S) + 1)
_TPOT = slice(_TTFT.stop, _TTFT.stop + len(TPOT_BOUNDS_S) + 1)
_WIDTH = _TPOT.stop

_Counts = npt.NDArray[np.int64]


class Trend:
    """See above. ``step`` is called every ``STEP_S`` seconds.

    Args:
        metrics: whose counts are read.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before: dict[tuple[str, str], tuple[Series, _Counts]] = {}
        self._all = np.zeros((STEPS, _WIDTH), dtype=np.int64)
        self._models: dict[str, npt.NDArray[np.int64]] = {}
        # Of an instance, by step of the last minute: requests, failed, output tokens.
        self._instances: dict[str, npt.NDArray[np.int64]] = {}
        self._queue = np.zeros(STEPS, dtype=np.int64)
        self._in_flight = np.zeros(STEPS, dtype=np.int64)
        self.steps = 0  # that ever came

    def step(self, queued: int, in_flight: int) -> None:
        """Remember what has come since the last time. ``queued``, ``in_flight``: now."""
        self._metrics.catch_up()
        place, minute = self.steps % STEPS, self.steps % MINUTE_STEPS
        self._all[place] = 0
        for ring in self._models.values():
            ring[place] = 0
        for counts in self._instances.values():
            counts[minute] = 0
        series = self._metrics.every_series
        for key in [key for key in self._before if key not in series]:
            del self._before[key]
        served = {model for model, _ in series}
        for gone in [model for model in self._models if model not in served]:
            del self._models[gone]
        known = {instance_id for _, instance_id in series}
        for gone in [name for name in self._instances if name not in known]:
            del self._instances[gone]
        for (model, instance_id), each in series.items():
            self._add(place, minute, model, instance_id, each)
        self._queue[place] = queued
        self._in_flight[place] = in_flight
        self.steps += 1

    def _add(self, place: int, minute: int, model: str, instance_id: str, series: Series) -> None:
        key = (model, instance_id)
        before = self._before.get(key)
        requests = sum(series.outcomes.values())
        if before is not None and before[0] is series and before[1][_REQUESTS] == requests:
            return  # nothing has come to it
        counts = _counts_of(series, requests, model)
        self._before[key] = series, counts
        # What one began with, it may have had when the gateway first looked.
        came = counts if before is None or before[0] is not series else counts - before[1]
        if not came.any():
            return
        self._all[place] += came
        ring = self._models.get(model)
        if ring is None and instance_id and len(self._models) < MOST_MODELS:
            ring = self._models[model] = np.zeros((STEPS, _WIDTH), dtype=np.int64)
        if ring is not None:
            ring[place] += came
        if instance_id:
            of_one = self._instances.get(instance_id)
            if of_one is None:
                of_one = self._instances[instance_id] = np.zeros((MINUTE_STEPS, 3), np.int64)
            of_one[minute] += came[[_REQUESTS, _FAILURES, _OUT]]

    def figures(self, steps: int, model: str | None = None) -> dict[str, Any]:
        """Rates, percentiles and errors over the last ``steps``; of all models, or one."""
        ring = self._all if model is None else self._models.get(model)
        had = max(1, min(steps, self.steps))
        total = np.zeros(_WIDTH, np.int64) if ring is None else ring[self._last(had)].sum(axis=0)
        span_s, requests = had * STEP_S, int(total[_REQUESTS])
        found: dict[str, Any] = {
            "requests_per_s": short(requests / span_s),
            "input_tokens_per_s": short(total[_IN] / span_s),
            "output_tokens_per_s": short(total[_OUT] / span_s),
            "errors": short(total[_FAILURES] / requests) if requests else None,
            "failed": int(total[_FAILURES]),
            "cached": short(total[_CACHED] / total[_IN]) if total[_IN] else None,
            "ttft_s": _percentiles(total[_TTFT], TTFT_BOUNDS_S),
            "tpot_s": _percentiles(total[_TPOT], TPOT_BOUNDS_S),
        }
        if model is None:
            last = self._last(had)
            found["queue"] = {
                "now": int(self._queue[last[-1]]) if self.steps else 0,
                "most": int(self._queue[last].max()),
            }
        return found

    def models(self) -> list[str]:
        """Those with figures of their own."""
        return sorted(self._models)

    def points(self, number: int = STEPS) -> list[list[float | int | None]]:
        """The last steps, oldest first: requests/s, output tokens/s, TTFT p50 and p99, TPOT p50
        and p99, share of errors, queue."""
        had = min(number, self.steps)
        return [self._point(place) for place in (self._last(had) if had else ())]

    def _point(self, place: int) -> list[float | int | None]:
        row = self._all[place]
        requests = int(row[_REQUESTS])
        ttft = _percentiles(row[_TTFT], TTFT_BOUNDS_S)
        tpot = _percentiles(row[_TPOT], TPOT_BOUNDS_S)
        return [
            short(requests / STEP_S),
            short(row[_OUT] / STEP_S),
            *(ttft or (None, None)),
            *(tpot or (None, None)),
            short(row[_FAILURES] / requests) if requests else None,
            int(self._queue[place]),
        ]

    def of_instance(self, instance_id: str) -> tuple[float, float, float]:
        """(requests/s, output tokens/s, share of them that failed) over the last minute."""
        counts = self._instances.get(instance_id)
        if counts is None:
            return 0.0, 0.0, 0.0
        requests, failed, tokens = counts.sum(axis=0)
        span_s = STEP_S * max(1, min(MINUTE_STEPS, self.steps))
        return requests / span_s, tokens / span_s, failed / requests if requests else 0.0

    def queue_grows(self) -> bool:
        """Requests wait, and clearly more than half a minute ago."""
        if self.steps < 2 * NOW_STEPS:
            return False
        places = self._last(2 * NOW_STEPS)
        earlier = float(self._queue[places[:NOW_STEPS]].mean())
        now = self._queue[places[NOW_STEPS:]]
        return bool(now.min() > 0 and now.mean() > max(1.0, 1.25 * earlier))

    def _last(self, number: int) -> npt.NDArray[np.intp]:
        """Places of the last steps, oldest first."""
        return (self.steps - number + np.arange(number)) % STEPS


def _counts_of(series: Series, requests: int, model: str) -> _Counts:
    counts = np.zeros(_WIDTH, dtype=np.int64)
    counts[_REQUESTS] = requests
    if model != _NOT_OURS:
        counts[_FAILURES] = sum(series.outcomes.get(name, 0) for name in _FAILED)
    counts[_IN] = _bounded(series.input_tokens)
    counts[_OUT] = _bounded(series.output_tokens)
    counts[_CACHED] = _bounded(series.cached_tokens)
    counts[_TTFT] = series.ttft.counts
    counts[_TPOT] = series.tpot.counts
    return counts


def _bounded(tokens: float) -> int:
    return int(min(tokens, 2**62))


def _percentiles(counts: npt.NDArray[Any], bounds: Sequence[float]) -> tuple[float, float] | None:
    """(p50, p99), as Prometheus' histogram_quantile reads them; None: there is none."""
    total = int(counts.sum())
    if not total:
        return None
    edges = np.concatenate(([0.0], bounds))
    cumulative = np.cumsum(counts)
    found = []
    for share in (0.5, 0.99):
        place = int(np.searchsorted(cumulative, share * total))
        if place >= len(bounds):
            found.append(float(bounds[-1]))
            continue
        below = int(cumulative[place - 1]) if place else 0
        part = (share * total - below) / int(counts[place])
        found.append(short(edges[place] + part * (edges[place + 1] - edges[place])))
    return found[0], found[1]


def short(value: float, digits: int = 3) -> float:
    """With this many digits that count: more say nothing, and cost bytes."""
    if not value or not math.isfinite(value):
        return 0.0
    return float(f"{value:.{digits}g}")
