"""The last fifteen minutes, in steps of five seconds: rates, first tokens, errors, the queue; and
the last six hours, in steps of two minutes, of all requests together.

Requests cost nothing extra: each step reads the counts that ``metrics`` keeps and stores the
differences. Memory is bounded: counts and histograms of each step, for all requests and for each
of the first models (some 70 KB each), and a minute of plain counts for each instance.
"""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import add, sub
from typing import Any

from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.records.series import TPOT_BOUNDS_S, TTFT_BOUNDS_S, Series

STEP_S = 5.0
STEPS = 180
# "Now" on the page: enough requests for a percentile at moderate rates.
NOW_STEPS = 6
MINUTE_STEPS = 12
# Steps per point of the last hours; the same number of points is kept.
LONG_STEPS = 24
# Models with a ring of their own; the others are only in the sum.
MOST_MODELS = 16

_FAILED = ("upstream_error", "timed_out", "unavailable", "internal_error")
_NOT_OURS = "unknown"
# Columns of a step: requests, failed, tokens in, out, cached; then both histograms.
_REQUESTS, _FAILURES, _IN, _OUT, _CACHED = range(5)
_TTFT = slice(5, 5 + len(TTFT_BOUNDS_S) + 1)
_TPOT = slice(_TTFT.stop, _TTFT.stop + len(TPOT_BOUNDS_S) + 1)
_WIDTH = _TPOT.stop
# More tokens are not counted: sums over all instances stay within 64 bits.
_MOST_TOKENS = 1 << 48

# The columns of a step, or of several.
_Columns = Sequence[int]


class _Ring:
    """The last steps, and their sum."""

    __slots__ = ("rows", "total")

    def __init__(self) -> None:
        self.rows: deque[_Columns] = deque()
        self.total: _Columns = _NOTHING

    def push(self, row: _Columns) -> None:
        if len(self.rows) == STEPS and (oldest := self.rows.popleft()) is not _NOTHING:
            self.total = list(map(sub, self.total, oldest))
        self.rows.append(row)
        if row is not _NOTHING:
            self.total = list(map(add, self.total, row))

    def last(self, steps: int) -> _Columns:
        if steps >= len(self.rows):
            return self.total
        return [sum(column) for column in zip(*islice(reversed(self.rows), steps), strict=True)]


_NOTHING: _Columns = array("q", bytes(8 * _WIDTH))


class Trend:
    """See above. ``step`` is called every ``STEP_S`` seconds.

    Args:
        metrics: the source of the counts.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before: dict[tuple[str, str], tuple[Series, _Columns]] = {}
        self._all = _Ring()
        self._models: dict[str, _Ring] = {}
        # Per instance and step of the last minute: requests, failed attempts that were retried, all
        # failed attempts, output tokens.
        self._instances: dict[str, deque[tuple[int, int, int, int]]] = {}
        self._errors: dict[str, int] = {}  # failed attempts of each since the start
        self._queue: deque[int] = deque(maxlen=STEPS)
        self._long: deque[list[float | int | None]] = deque(maxlen=STEPS)
        self.steps = 0  # ever made

    def step(self, queued: int) -> None:
        """Store the differences since the last step. ``queued``: now."""
        self._metrics.catch_up()
        series = self._metrics.every_series
        for key in [key for key in self._before if key not in series]:
            del self._before[key]
        errors = self._errors_since()
        served, known = {model for model, _ in series}, {instance for _, instance in series}
        known |= self._errors.keys()
        for gone in self._models.keys() - served:
            del self._models[gone]
        for gone in self._instances.keys() - known:
            del self._instances[gone]
        everything = _NOTHING
        of_models: dict[str, _Columns] = {}
        of_instances: dict[str, _Columns] = {}
        for (model, instance_id), each in series.items():
            came = self._came(model, instance_id, each)
            if came is None:
                continue
            everything = _sum(everything, came)
            if instance_id or model in of_models or model in self._models:
                of_models[model] = _sum(of_models.get(model, _NOTHING), came)
            if instance_id:
                of_instances[instance_id] = _sum(of_instances.get(instance_id, _NOTHING), came)
        self._all.push(everything)
        for model in of_models:
            if model not in self._models and len(self._models) < MOST_MODELS:
                self._models[model] = _Ring()
        for model, ring in self._models.items():
            ring.push(of_models.get(model, _NOTHING))
        for instance_id in of_instances:
            self._instances.setdefault(instance_id, deque(maxlen=MINUTE_STEPS))
        for instance_id in errors:
            self._instances.setdefault(instance_id, deque(maxlen=MINUTE_STEPS))
        for instance_id, minute in self._instances.items():
            row = of_instances.get(instance_id, _NOTHING)
            failed = max(row[_FAILURES], errors.get(instance_id, 0))
            minute.append((row[_REQUESTS], failed - row[_FAILURES], failed, row[_OUT]))
        self._queue.append(queued)
        self.steps += 1
        if self.steps % LONG_STEPS == 0:
            longest = max(islice(reversed(self._queue), LONG_STEPS))
            self._long.append(_point(self._all.last(LONG_STEPS), longest, LONG_STEPS))

    def _errors_since(self) -> dict[str, int]:
        """Failed attempts on each instance since the last step."""
        before, self._errors = self._errors, {}
        for (instance_id, _), count in self._metrics.upstream_errors.items():
            self._errors[instance_id] = self._errors.get(instance_id, 0) + count
        came = {each: count - before.get(each, 0) for each, count in self._errors.items()}
        return {each: count for each, count in came.items() if count > 0}

    def _came(self, model: str, instance_id: str, series: Series) -> _Columns | None:
        """The increase of a series since the last step; None: nothing."""
        key = (model, instance_id)
        before = self._before.get(key)
        requests = sum(series.outcomes.values())
        # Initial counts may be from before the gateway first looked.
        known = before is not None and before[0] is series
        if before is not None and known and before[1][_REQUESTS] == requests:
            return None
        counts = _counts_of(series, requests, model)
        self._before[key] = series, counts
        came = counts if before is None or not known else array("q", map(sub, counts, before[1]))
        return came if any(came) else None

    def figures(self, steps: int, model: str | None = None) -> dict[str, Any]:
        """Rates, percentiles and errors over the last ``steps``; of all models, or one."""
        ring = self._all if model is None else self._models.get(model)
        had = max(1, min(steps, self.steps))
        total = _NOTHING if ring is None else ring.last(had)
        span_s, requests = had * STEP_S, total[_REQUESTS]
        found: dict[str, Any] = {
            "requests_per_s": short(requests / span_s),
            "input_tokens_per_s": short(total[_IN] / span_s),
            "output_tokens_per_s": short(total[_OUT] / span_s),
            "errors": short(total[_FAILURES] / requests) if requests else None,
            "failed": total[_FAILURES],
            "cached": short(total[_CACHED] / total[_IN]) if total[_IN] else None,
            "ttft_s": _percentiles(total[_TTFT], TTFT_BOUNDS_S),
            "tpot_s": _percentiles(total[_TPOT], TPOT_BOUNDS_S),
        }
        if model is None:
            queue = list(self._queue)[-had:] or [0]
            found["queue"] = {"now": queue[-1], "most": max(queue)}
        return found

    def models(self) -> list[str]:
        """The models with figures of their own."""
        return sorted(self._models)

    def points(self, number: int = STEPS) -> list[list[float | int | None]]:
        """The last steps, oldest first: requests/s, output tokens/s, TTFT p50 and p99, TPOT p50
        and p99, share of errors, queue."""
        steps = list(zip(self._all.rows, self._queue, strict=True))
        return [_point(row, queued) for row, queued in steps[-number:]]

    def long_points(self) -> list[list[float | int | None]]:
        """The same in steps of ``LONG_STEPS``, over hours; the queue's maximum in each."""
        return list(self._long)

    def of_instance(self, instance_id: str) -> tuple[float, float, float]:
        """(requests/s, output tokens/s, share of failed attempts) over the last minute."""
        failed, attempts = self.failed_on(instance_id)
        minute = self._instances.get(instance_id, ())
        span_s = STEP_S * max(1, min(MINUTE_STEPS, self.steps))
        requests, tokens = (sum(row[column] for row in minute) for column in (0, 3))
        return requests / span_s, tokens / span_s, failed / attempts if failed else 0.0

    def failed_on(self, instance_id: str) -> tuple[int, int]:
        """(failed attempts, all attempts) on an instance over the last minute."""
        minute = self._instances.get(instance_id, ())
        requests, again, failed = (sum(row[column] for row in minute) for column in range(3))
        return failed, requests + again

    def queue_grows(self) -> bool:
        """Requests wait, and clearly more than half a minute ago."""
        if self.steps < 2 * NOW_STEPS:
            return False
        last = list(self._queue)[-2 * NOW_STEPS :]
        earlier, now = sum(last[:NOW_STEPS]) / NOW_STEPS, last[NOW_STEPS:]
        return min(now) > 0 and sum(now) / NOW_STEPS > max(1.0, 1.25 * earlier)


def _point(row: _Columns, queued: int, steps: int = 1) -> list[float | int | None]:
    requests, span_s = row[_REQUESTS], steps * STEP_S
    ttft = _percentiles(row[_TTFT], TTFT_BOUNDS_S)
    tpot = _percentiles(row[_TPOT], TPOT_BOUNDS_S)
    return [
        short(requests / span_s),
        short(row[_OUT] / span_s),
        *(ttft or (None, None)),
        *(tpot or (None, None)),
        short(row[_FAILURES] / requests) if requests else None,
        queued,
    ]


def _sum(one: _Columns, other: _Columns) -> _Columns:
    return other if one is _NOTHING else array("q", map(add, one, other))


def _counts_of(series: Series, requests: int, model: str) -> _Columns:
    failed = 0
    if model != _NOT_OURS:
        failed = sum(series.outcomes.get(name, 0) for name in _FAILED)
    tokens = series.input_tokens, series.output_tokens, series.cached_tokens
    bounded = [int(min(each, _MOST_TOKENS)) for each in tokens]
    return array("q", [requests, failed, *bounded, *series.ttft.counts, *series.tpot.counts])


def _percentiles(counts: _Columns, bounds: Sequence[float]) -> tuple[float, float] | None:
    """(p50, p99), computed as Prometheus' histogram_quantile does; None: there is none."""
    cumulative = list(accumulate(counts))
    total = cumulative[-1]
    if not total:
        return None
    edges = (0.0, *bounds)
    found = []
    for share in (0.5, 0.99):
        place = bisect_left(cumulative, share * total)
        if place >= len(bounds):
            found.append(float(bounds[-1]))
            continue
        below = cumulative[place - 1] if place else 0
        part = (share * total - below) / counts[place]
        found.append(short(edges[place] + part * (edges[place + 1] - edges[place])))
    return found[0], found[1]


def short(value: float, digits: int = 3) -> float:
    """Rounded to this many significant digits: more say nothing, and cost bytes."""
    if not value or not math.isfinite(value):
        return 0.0
    return float(f"{value:.{digits}g}")
