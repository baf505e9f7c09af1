"""The contents of /metrics. Recording is plain arithmetic; a scrape writes it out (``exposition``).

A request touches a dozen series; through prometheus-client's own counters and histograms that costs
as much as relaying it (a lock and a label look-up each). So the counts live here, in one object per
(model, instance), and a scrape turns them into metric families, part by part. The process's own
series are prometheus-client's.

``per_backend: basic`` shows fewer series of each instance: of its requests only sums over all
instances, under ``backend=""``.

Labels are bounded: instances come from the configuration, models from what instances serve. The
series of a removed instance go away, and those of a model that an instance no longer serves (an
unloaded adapter) once they are unused for ``KEPT_S``: long enough for a rate over its last requests
to be scraped. Bucket bounds are vLLM's own (vllm/v1/metrics/loggers.py), so that panels overlay.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from hetero_gateway import __version__
from hetero_gateway.core.histogram import Histogram, Taken
from hetero_gateway.core.types import DEFAULT_CLASS
from hetero_gateway.gateway.records.exposition import Family, labels_text
from hetero_gateway.gateway.records.families import (
    KV_EVENTS,
    InstanceGauges,
    SharedView,
    families_of,
    family,
    instance_families,
    sharing_families,
    single,
)
from hetero_gateway.gateway.records.series import Series
from hetero_gateway.gateway.turns import batches
from hetero_gateway.http.failures import Blame, Failure

_log = logging.getLogger(__name__)

# Instances whose series are written at a time: a millisecond or two.
_PART = 12
_PART_OF_COUNTERS = 64
# Bytes compressed and sent at a time, and the level: a higher one takes twice the time for a tenth
# less.
_SENT_BYTES, _LEVEL = 1 << 16, 1
# Series of a model that an instance no longer serves are kept for this long after their last
# request, and at most this many: the most recently used.
KEPT_S, MOST_KEPT = 900.0, 1000
# Counters are there, at 0, before anything is counted: for one that appears with its first event,
# Prometheus shows no rate for that event. For an instance that serves many names (a base and its
# adapters), the first few; the others appear when they are asked for.
_MOST_MODELS_AT_ZERO = 4
_OUTCOMES = ("completed", "client_error", "client_disconnected", "timed_out", "upstream_error")
_UNPLACED = (
    ("unknown", "rejected"),
    ("", "internal_error"),
)
_NO_MODELS = tuple(model for model, _ in _UNPLACED)
_BLAMED = tuple(
    str(failure.value) for failure in Failure if failure.blame in (Blame.FAULT, Blame.SILENCE)
)
_HANDED_OVER = ("handed_over", "no_handover", "prefill_failed", "decode_failed")
_CONTINUED = ("continued", "not_continuable", "no_budget")
_RETRIED = tuple(str(failure.value) for failure in Failure if failure.retryable)
_FAILURES = tuple(str(failure.value) for failure in Failure)
_PHASES = ("idle", "head", "body", "closing")
_QUEUE_REJECTIONS = ("queue_full", "queue_timeout", "wait_too_long")
_RELOAD_OUTCOMES = ("applied", "unchanged", "refused")

_T = TypeVar("_T")

OVERHEAD_BOUNDS_S = (
    2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0,
)  # fmt: skip
DECISION_BOUNDS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
QUEUE_WAIT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0,
    600.0, 1800.0,
)  # fmt: skip
# Actual over predicted: 1 is right.
PREDICTION_BOUNDS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


_OF_REQUESTS = (
    "requests", "request_duration_seconds", "time_to_first_token_seconds",
    "time_per_output_token_seconds", "input_tokens", "input_tokens_cached", "output_tokens",
)  # fmt: skip


class SeriesRow(NamedTuple):
    """A ``Series`` as it passes between processes. (Compiled, msgspec would not see its types.)"""

    model: str
    instance_id: str
    outcomes: dict[str, int]
    duration: Taken
    ttft: Taken
    tpot: Taken
    input_tokens: int
    cached_tokens: float
    output_tokens: int


class Metrics:
    """All of the gateway's own series.

    Args:
        policy: name of the policy, a label.
        gauges: called on each scrape for the instances' present state.
        queued: called on each scrape for the number of waiting requests.
    """

    def __init__(
        self,
        policy: str,
        gauges: Callable[[], Iterable[InstanceGauges]],
        queued: Callable[[], int] = lambda: 0,
    ) -> None:
        self.sharing: SharedView | None = None  # None: the gateway is alone
        # (different keys, bytes of memory) of the prefix index; None: there is none.
        self.prefix_index: Callable[[], tuple[int, int]] | None = None
        self.late_probes: Callable[[], int] = lambda: 0
        # Of engines that report their caches; None: none can be received.
        self.kv_events: Mapping[str, int] | None = None
        # (name, instances, whether it cannot be read now) of each source of instances.
        self.sources: Callable[[], Iterable[tuple[str, int, bool]]] = lambda: ()
        self.reloads: Counter[str] = Counter()
        # Of the configuration: (whether the last reload succeeded, Unix time of the last that did,
        # settings that need a restart).
        self.reloaded = (True, time.time(), 0)
        # Called before counts are shown: some wait to be made together.
        self.catch_up: Callable[[], None] = lambda: None
        # The series of named clients.
        self.clients: Callable[[], Iterable[list[Family]]] = lambda: ()
        # Those of the instances that the load needs.
        self.following: Callable[[], Iterable[Family]] = lambda: ()
        # Those of batches.
        self.batches: Callable[[], Iterable[Family]] = lambda: ()
        # Whether each instance has all series, or "basic".
        self.per_backend: Literal["full", "basic"] = "full"
        self._policy = policy
        self._gauges = gauges
        self._queued = queued
        # By (model, instance). Per-request counts are no Counter, whose look-ups are Python code.
        self.every_series: dict[tuple[str, str], Series] = {}
        # (requests, since when they are unchanged) of series whose model is not served.
        self._unserved: dict[tuple[str, str], tuple[int, float]] = {}
        self.decisions: defaultdict[str, int] = defaultdict(int)
        self.retries: Counter[str] = Counter()
        self.streams_continued: Counter[str] = Counter()
        self.handovers: Counter[str] = Counter()
        # By the name asked for, and the fallback that was asked.
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.upstream_errors: Counter[tuple[str, str]] = Counter()
        self.ejections: Counter[tuple[str, str]] = Counter()
        self.client_disconnects: Counter[str] = Counter()
        # By clients' HTTP status; 499: they left before an answer.
        self.statuses: defaultdict[int, int] = defaultdict(int)
        # Requests that reached an instance, by (class, outcome).
        self.classes: defaultdict[tuple[str, str], int] = defaultdict(int)
        # Set and counted by the server, if there is one.
        self.client_connections: Callable[[], int] = lambda: 0
        # The processes that serve clients, if not this one.
        self.workers: Callable[[], int] | None = None
        self.round_trip_s = Histogram(DECISION_BOUNDS_S)
        self.client_timeouts: Counter[str] = Counter()
        self.client_refusals: Counter[int] = Counter()
        self.queue_rejections: Counter[str] = Counter()
        self.predictor_failures: Counter[str] = Counter()
        self.queue_wait_s = Histogram(QUEUE_WAIT_BOUNDS_S)
        self.decision_s = Histogram(DECISION_BOUNDS_S)
        self.overhead_s = Histogram(OVERHEAD_BOUNDS_S)
        self.output_prediction = Histogram(PREDICTION_BOUNDS)
        self.latency_prediction = Histogram(PREDICTION_BOUNDS)
        # Histograms with noted values, besides those of series.
        self.noted = (
            *(self.queue_wait_s, self.decision_s, self.overhead_s),
            *(self.output_prediction, self.latency_prediction),
        )
        self._process = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)

    def set_policy(self, policy: str) -> None:
        """The policy's name, from now on."""
        self._policy = policy

    def series(self, model: str, instance_id: str) -> Series:
        """The counts of one model on one instance; "" if no instance was reached."""
        self.catch_up()
        return self.counts(model, instance_id)

    def counts(self, model: str, instance_id: str) -> Series:
        """The same, for counting: waiting counts go on waiting."""
        key = (model, instance_id)
        series = self.every_series.get(key)
        if series is None:
            series = self.every_series[key] = Series()
        return series

    def take_series(self) -> list[SeriesRow]:
        """Take all series and start over: for a process whose series another one adds
        (``add_series``)."""
        self.catch_up()
        taken = [
            SeriesRow(
                *key,
                {outcome: n for outcome, n in series.outcomes.items() if n},
                series.duration.take(),
                series.ttft.take(),
                series.tpot.take(),
                series.input_tokens,
                series.cached_tokens,
                series.output_tokens,
            )
            for key, series in self.every_series.items()
        ]
        self.every_series.clear()
        return taken

    def add_series(self, row: SeriesRow) -> None:
        """Add another process's counts."""
        series = self.counts(row.model, row.instance_id)
        for outcome, number in row.outcomes.items():
            series.outcomes[outcome] += number
        series.duration.add(row.duration)
        series.ttft.add(row.ttft)
        series.tpot.add(row.tpot)
        series.input_tokens += row.input_tokens
        series.cached_tokens += row.cached_tokens
        series.output_tokens += row.output_tokens

    def forget_unserved(self, served: Callable[[str, str], bool], now_s: float) -> None:
        """Drop the series of models that are gone; call it now and then.

        Args:
            served: whether an instance serves a model, or any if it is "".
        """
        self.catch_up()
        known, self._unserved = self._unserved, {}
        for key, series in self.every_series.items():
            if key[0] in _NO_MODELS or served(*key):
                continue
            requests = sum(series.outcomes.values())
            before, since_s = known.get(key, (-1, now_s))
            self._unserved[key] = (requests, since_s if requests == before else now_s)
        by_age = sorted(self._unserved, key=lambda key: self._unserved[key][1])
        too_many = len(by_age) - MOST_KEPT
        for number, key in enumerate(by_age):
            if number < too_many or now_s - self._unserved[key][1] >= KEPT_S:
                del self.every_series[key], self._unserved[key]

    def models(self) -> set[str]:
        """The models that have series."""
        return {model for model, _ in self.every_series}

    def forget(self, instance_id: str) -> None:
        """Drop every series of a removed instance."""
        for key in [key for key in self.every_series if key[1] == instance_id]:
            del self.every_series[key]
        for counts in (self.upstream_errors, self.ejections):
            for pair in [pair for pair in counts if pair[0] == instance_id]:
                del counts[pair]
        self.decisions.pop(instance_id, None)
        self.client_disconnects.pop(instance_id, None)

    def parts(self) -> Iterator[list[Family]]:
        """All families; those with many series in parts that are quickly made.

        Between two parts the instances and their series may change.
        """
        for model, outcome in _UNPLACED:
            self.counts(model, "").outcomes.setdefault(outcome, 0)
        yield _made(families_of(_OF_REQUESTS, ()))
        known: list[str] = []
        basic = self.per_backend == "basic"
        for gauges in _batches(self._gauges):
            known += _as_far_as(self._begin_at_zero(gauges))
            yield _made(instance_families(gauges, basic=basic))
        every: dict[tuple[str, str], Series] = {}
        for entries in _batches(lambda: tuple(self.every_series.items())):
            if basic:
                _add_up(every, entries)
                yield []
            else:
                yield _made(_request_families(entries))
        for entries in batches(every.items(), _PART):
            yield _made(_request_families(entries))
        for ids in _batches(lambda: [""] if basic else known, _PART_OF_COUNTERS):
            yield _made(self._instance_counters(ids, others=False))
        if not basic:
            yield _made(self._instance_counters(frozenset(known), others=True))
        yield _made(self._gateway_families())
        yield from _as_far_as(self.clients())
        yield _made(self.following())
        yield _made(self.batches())

    def _begin_at_zero(self, every: Iterable[InstanceGauges]) -> Iterator[str]:
        """Create the expected series; returns the ids of the instances."""
        for gauges in every:
            instance_id = gauges.snapshot.instance_id
            for model in sorted(gauges.models)[:_MOST_MODELS_AT_ZERO]:
                outcomes = self.counts(model, instance_id).outcomes
                for outcome in _OUTCOMES:
                    outcomes.setdefault(outcome, 0)
            yield str(instance_id)

    def _instance_counters(self, known: Collection[str], *, others: bool) -> Iterator[Family]:
        """The counters of these instances; or other counts. "" is all of them together."""
        together = "" in known
        for name, values, reasons in (
            ("upstream_errors", self.upstream_errors, _FAILURES),
            ("instance_ejections", self.ejections, _BLAMED),
        ):
            values = _together(values) if together else values
            if others:
                pairs = [pair for pair in values if pair[0] not in known or pair[1] not in reasons]
                yield family(name, {pair: values[pair] for pair in pairs})
                continue
            made = family(name, {})
            failed = {instance_id for instance_id, _ in values}
            for instance_id in known:
                if instance_id in failed:
                    for reason in reasons:
                        made.add((instance_id, reason), values.get((instance_id, reason), 0))
                else:  # the usual case
                    made.add_zeros(instance_id, reasons)
            yield made
        for name, labels, counts in (
            ("routing_decisions", (self._policy,), self.decisions),
            ("client_disconnects", (), self.client_disconnects),
        ):
            seen: Mapping[str, int] = {"": sum(counts.values())} if together else counts
            ids = [each for each in seen if each not in known] if others else known
            yield family(name, {(*labels, each): seen.get(each, 0) for each in ids})

    def _gateway_families(self) -> Iterator[Family]:
        if self.prefix_index is not None:
            keys, memory_bytes = self.prefix_index()
            yield single("prefix_index_keys", keys)
            yield single("prefix_index_memory_bytes", memory_bytes)
        # Outcomes of requests, and of their attempts
        yield family("retries", _from_zero(_RETRIED, self.retries))
        yield family("streams_continued", _from_zero(_CONTINUED, self.streams_continued))
        yield family("handovers", _from_zero(_HANDED_OVER, self.handovers))
        yield family("fallbacks", dict(self.fallbacks))
        yield family("responses", _from_zero((200,), self.statuses))
        yield family("class_requests", {(DEFAULT_CLASS, "completed"): 0} | self.classes)
        # Connections of clients, and how they ended
        yield single("client_connections", self.client_connections())
        yield family("client_timeouts", _from_zero(_PHASES, self.client_timeouts))
        yield family("client_refusals", _from_zero((400, 503), self.client_refusals))
        # The queue, the time of placements, and the accuracy of predictions
        yield single("queue_depth", self._queued())
        yield family("queue_rejections", _from_zero(_QUEUE_REJECTIONS, self.queue_rejections))
        yield single("queue_wait_seconds", self.queue_wait_s)
        yield single("scheduler_decision_seconds", self.decision_s)
        yield single("overhead_seconds", self.overhead_s)
        errors = {("output_tokens",): self.output_prediction, ("latency",): self.latency_prediction}
        yield family("prediction_error", errors)
        yield family("predictor_failures", _from_zero((), self.predictor_failures))
        # The process's shortages, the sources, and the configuration
        yield single("event_loop_tasks", _task_count())
        yield single("probes_late", self.late_probes())
        if self.kv_events is not None:
            yield family("kv_events", {(e,): self.kv_events.get(e, 0) for e in KV_EVENTS})
        yield family("config_reloads", _from_zero(_RELOAD_OUTCOMES, self.reloads))
        sources = tuple(self.sources())
        yield family("source_instances", {(name,): count for name, count, _ in sources})
        yield family("source_failing", {(name,): fails for name, _, fails in sources})
        successful, unix_s, needing_restart = self.reloaded
        yield single("config_last_reload_successful", successful)
        yield single("config_last_reload_success_timestamp_seconds", unix_s)
        yield single("config_settings_needing_restart", needing_restart)
        if self.sharing is not None:
            yield from sharing_families(self.sharing)
        if self.workers is not None:
            yield single("workers", self.workers())
            yield single("worker_round_trip_seconds", self.round_trip_s)
        yield family("build_info", {(__version__,): 1})

    async def exposition(self, *, gzipped: bool = False) -> AsyncIterator[bytes]:
        """The body of /metrics; ``gzipped``: as a client accepts it.

        It is written a millisecond or two at a time: other requests have turns in between.
        """
        self.catch_up()
        written: dict[str, list[str]] = {}
        for part in self.parts():
            for made in part:
                lines = written.get(made.name)
                if lines is None:
                    lines = written[made.name] = [made.head()]
                lines.append(made.lines())
            await asyncio.sleep(0)
        texts = itertools.chain.from_iterable(written.values())
        packer = zlib.compressobj(_LEVEL, wbits=31) if gzipped else None
        for some in _pieces(texts):
            if packer is None:
                yield some
            elif packed := packer.compress(some):
                yield packed
            await asyncio.sleep(0)
        process = generate_latest(self._process)
        yield process if packer is None else packer.compress(process) + packer.flush()


def _pieces(texts: Iterable[str]) -> Iterator[bytes]:
    """Join to pieces of about ``_SENT_BYTES``."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= _SENT_BYTES:
            yield "".join(some).encode()
            some, size = [], 0
    yield "".join(some).encode()


def _add_up(
    sums: dict[tuple[str, str], Series], entries: Iterable[tuple[tuple[str, str], Series]]
) -> None:
    """Add series up over instances, by model, including refusals before any was chosen."""
    for (model, _), series in entries:
        total = sums.get((model, ""))
        if total is None:
            total = sums[model, ""] = Series()
        total.add(series)


def _together(values: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
    """Counts by (instance, reason), added up over instances."""
    sums: Counter[tuple[str, str]] = Counter()
    for (_, reason), number in values.items():
        sums["", reason] += number
    return sums


def _batches(make: Callable[[], Iterable[_T]], size: int = _PART) -> Iterator[list[_T]]:
    """An empty one first: families are named even if they have no series."""
    yield []
    try:
        yield from batches(make(), size)
    except Exception:
        _log.exception("some series cannot be shown")


def _as_far_as(items: Iterable[_T]) -> Iterator[_T]:
    """Those that can be made."""
    try:
        yield from items
    except Exception:
        _log.exception("some series cannot be shown")


def _request_families(entries: Iterable[tuple[tuple[str, str], Series]]) -> list[Family]:
    made = list(families_of(_OF_REQUESTS, ()))
    requests, duration, ttft, tpot, read, cached, written = (each.add_labelled for each in made)
    for key, series in entries:
        try:
            labelled = labels_text(("model", "backend"), key)
        except ValueError:
            _log.exception("the series of a model cannot be shown")
            continue
        for outcome, count in series.outcomes.items():
            requests(f'{labelled},outcome="{outcome}"', count)
        if not key[1] and not any(series.duration.counts):
            continue  # refused before any instance was chosen: nothing else
        duration(labelled, series.duration)
        ttft(labelled, series.ttft)
        tpot(labelled, series.tpot)
        read(labelled, series.input_tokens)
        cached(labelled, series.cached_tokens)
        written(labelled, series.output_tokens)
    return made


def _from_zero(keys: Iterable[Any], values: dict[Any, int]) -> dict[tuple[str], int]:
    """By one label: counts, and 0 for what is always there."""
    return {(str(key),): number for key, number in (dict.fromkeys(keys, 0) | values).items()}


def _made(families: Iterable[Family]) -> list[Family]:
    try:
        return list(families)
    except Exception:
        _log.exception("some series cannot be shown")
        return []


def _task_count() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs: nothing is being served
        return 0
