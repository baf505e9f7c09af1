"""What /metrics shows. Recording is plain arithmetic; prometheus-client writes it out on a scrape.

A request touches a dozen series; through prometheus-client's own counters and histograms that
costs as much as relaying it (a lock and a label look-up each). So the counts live here, in one
object per (model, instance), and a scrape turns them into metric families, part by part.

Labels are bounded: instances come from the configuration, models from what instances serve. The
series of a removed instance go away, and those of a model that an instance no longer serves (an
adapter that was unloaded) once nothing has come to them for ``KEPT_S``: long enough for a rate over
its last requests to be scraped. Bucket bounds are vLLM's own (vllm/v1/metrics/loggers.py), so
that panels overlay.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample

from hetero_gateway import __version__
from hetero_gateway.core.histogram import Histogram
from hetero_gateway.core.types import DEFAULT_CLASS
from hetero_gateway.gateway.records.families import (
    PREFIX,
    InstanceGauges,
    SharedView,
    counter,
    histogram,
    instance_families,
    sharing_families,
)
from hetero_gateway.http.failures import Blame, Failure

_log = logging.getLogger(__name__)

# Instances of which series are written at a time: some milliseconds.
_PART = 4
_PART_OF_COUNTERS = 64
# Series of a model that an instance no longer serves are kept for so long after their last request,
# and no more of them than this: those that were used last.
KEPT_S, MOST_KEPT = 900.0, 1000
# Parts that are sent together: of many clients, a hundred kilobytes.
_PARTS_SENT = 8
# Counters are there, at 0, before anything is counted: of one that appears with its first event
# Prometheus shows no rate for that event. Of an instance that serves many names (a base and its
# adapters) the first few; the others appear as they are asked for.
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
_RETRIED = tuple(str(failure.value) for failure in Failure if failure.retryable)
_FAILURES = tuple(str(failure.value) for failure in Failure)
_PHASES = ("idle", "head", "body", "closing")
_QUEUE_REJECTIONS = ("queue_full", "queue_timeout", "wait_too_long")
_RELOAD_OUTCOMES = ("applied", "unchanged", "refused")

_T = TypeVar("_T")

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


_RELOADED = (
    ("config_last_reload_successful", "0 while the file is refused whole, and the old one stays."),
    ("config_last_reload_success_timestamp_seconds", "When the file was last taken up."),
    ("config_settings_needing_restart", "Settings of it that take effect at the next start."),
)


class Series:
    """What is counted per model and instance."""

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
        self.outcomes: Counter[str] = Counter()
        self.duration = Histogram(LATENCY_BOUNDS_S)
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.tpot = Histogram(TPOT_BOUNDS_S)
        self.input_tokens = 0
        self.cached_tokens = 0.0
        self.output_tokens = 0


class Metrics:
    """All of the gateway's own series.

    Args:
        policy: name of the policy, a label.
        gauges: called on each scrape for the instances' present state.
        queued: called on each scrape for how many requests wait now.
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
        # (name, instances, whether it cannot be asked now) of each source of instances.
        self.sources: Callable[[], Iterable[tuple[str, int, bool]]] = lambda: ()
        self.reloads: Counter[str] = Counter()
        # Of the configuration: (the last reload was taken up, Unix time of the last that was,
        # settings that need a restart).
        self.reloaded = (True, time.time(), 0)
        # Called ahead of whatever shows counts: some wait to be made together.
        self.catch_up: Callable[[], None] = lambda: None
        # The series of clients that have names.
        self.clients: Callable[[], Iterable[list[Metric]]] = lambda: ()
        # Those of the instances that the load needs.
        self.following: Callable[[], Iterable[Metric]] = lambda: ()
        self._policy = policy
        self._gauges = gauges
        self._queued = queued
        # By (model, instance).
        self.every_series: dict[tuple[str, str], Series] = {}
        # (requests, since when there were as many) of series whose model is not served.
        self._unserved: dict[tuple[str, str], tuple[int, float]] = {}
        self.decisions: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        # By the name asked for, and the fallback that was asked.
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.upstream_errors: Counter[tuple[str, str]] = Counter()
        self.ejections: Counter[tuple[str, str]] = Counter()
        self.client_disconnects: Counter[str] = Counter()
        # By what clients got: an HTTP status; 499: they left before an answer.
        self.statuses: Counter[int] = Counter()
        # Requests that reached an instance, by (class, outcome).
        self.classes: Counter[tuple[str, str]] = Counter()
        # Set and counted by the server, where there is one.
        self.client_connections: Callable[[], int] = lambda: 0
        # The processes that serve clients, where it is not this one.
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
        self._process = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)

    def set_policy(self, policy: str) -> None:
        """The policy's name, from now on."""
        self._policy = policy

    def series(self, model: str, instance_id: str) -> Series:
        """The counts of one model on one instance; "" where no instance was reached."""
        self.catch_up()
        return self.counts(model, instance_id)

    def count_noted(self) -> None:
        """Count what was only noted of requests on their way."""
        for noted in (self.queue_wait_s, self.decision_s, self.overhead_s):
            noted.count_noted()

    def counts(self, model: str, instance_id: str) -> Series:
        """The same, to count there: what waits to be counted goes on waiting."""
        key = (model, instance_id)
        series = self.every_series.get(key)
        if series is None:
            series = self.every_series[key] = Series()
        return series

    def take_outcomes(self) -> list[tuple[str, str, str, int]]:
        """(model, instance, outcome, number) of all series, which begin at 0 again."""
        self.catch_up()
        taken = []
        for key, series in self.every_series.items():
            taken += [(*key, outcome, n) for outcome, n in series.outcomes.items() if n]
        self.every_series.clear()
        return taken

    def forget_unserved(self, served: Callable[[str, str], bool], now_s: float) -> None:
        """Drop the series of models that are gone; to be called now and then.

        Args:
            served: whether an instance serves a model, or any where it is "".
        """
        self.catch_up()
        known, self._unserved = self._unserved, {}
        for key, series in self.every_series.items():
            if key[0] in _NO_MODELS or served(*key):
                continue
            requests = series.outcomes.total()
            before, since_s = known.get(key, (-1, now_s))
            self._unserved[key] = (requests, since_s if requests == before else now_s)
        by_age = sorted(self._unserved, key=lambda key: self._unserved[key][1])
        too_many = len(by_age) - MOST_KEPT
        for number, key in enumerate(by_age):
            if number < too_many or now_s - self._unserved[key][1] >= KEPT_S:
                del self.every_series[key], self._unserved[key]

    def models(self) -> set[str]:
        """Those that any series is of."""
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

    def parts(self) -> Iterator[list[Metric]]:
        """All families, and those of many series in parts that are soon made.

        Between two parts the instances and their series may change.
        """
        for model, outcome in _UNPLACED:
            self.counts(model, "").outcomes.setdefault(outcome, 0)
        yield _made(self._request_families(()))
        known: list[str] = []
        for gauges in _batches(self._gauges):
            known += _as_far_as(self._begin_at_zero(gauges))
            yield _made(instance_families(gauges))
        for entries in _batches(lambda: tuple(self.every_series.items())):
            yield _made(self._request_families(entries))
        for ids in _batches(lambda: known, _PART_OF_COUNTERS):
            yield _made(self._instance_counters(ids, others=False))
        yield _made(self._instance_counters(frozenset(known), others=True))
        yield _made(self._gateway_families())
        yield from _as_far_as(self.clients())
        yield _made(self.following())

    def _begin_at_zero(self, every: Iterable[InstanceGauges]) -> Iterator[str]:
        """Have the series that there will be; the ids of the instances."""
        for gauges in every:
            instance_id = gauges.snapshot.instance_id
            for model in sorted(gauges.models)[:_MOST_MODELS_AT_ZERO]:
                outcomes = self.counts(model, instance_id).outcomes
                for outcome in _OUTCOMES:
                    outcomes.setdefault(outcome, 0)
            yield str(instance_id)

    def _instance_counters(self, known: Collection[str], *, others: bool) -> Iterator[Metric]:
        """Of these instances; or of what else was counted."""
        for name, text, labels, values, reasons in (
            ("upstream_errors", "Failed attempts.", ("backend", "reason"),
             self.upstream_errors, _FAILURES),
            ("instance_ejections", "Ejections of instances whose requests failed.",
             ("backend", "reason"), self.ejections, _BLAMED),
        ):  # fmt: skip
            pairs: Iterable[tuple[str, str]] = itertools.product(known, reasons)
            if others:
                pairs = [pair for pair in values if pair[0] not in known or pair[1] not in reasons]
            yield counter(name, text, labels, {pair: values.get(pair, 0) for pair in pairs})
        for name, text, label, counts in (
            ("routing_decisions", "Requests sent, by policy.", {"policy": self._policy},
             self.decisions),
            ("client_disconnects", "Clients that left early.", {}, self.client_disconnects),
        ):  # fmt: skip
            ids = [each for each in counts if each not in known] if others else known
            numbers = {(*label.values(), each): counts.get(each, 0) for each in ids}
            yield counter(name, text, (*label, "backend"), numbers)

    def _request_families(
        self, entries: Iterable[tuple[tuple[str, str], Series]]
    ) -> Iterator[Metric]:
        labels = ("model", "backend")
        requests = CounterMetricFamily(
            PREFIX + "requests", "Finished requests by outcome.", labels=(*labels, "outcome")
        )
        duration = HistogramMetricFamily(
            PREFIX + "request_duration_seconds", "From the request to its last byte.", labels=labels
        )
        ttft = HistogramMetricFamily(
            PREFIX + "time_to_first_token_seconds", "To the first body byte.", labels=labels
        )
        tpot = HistogramMetricFamily(
            PREFIX + "time_per_output_token_seconds",
            "Mean time per output token after the first.",
            labels=labels,
        )
        tokens_in = CounterMetricFamily(
            PREFIX + "input_tokens", "Prompt tokens, as the engine reported them.", labels=labels
        )
        tokens_cached = CounterMetricFamily(
            PREFIX + "input_tokens_cached",
            "Of them, what was in a prefix cache and not computed, as engines reported.",
            labels=labels,
        )
        tokens_out = CounterMetricFamily(
            PREFIX + "output_tokens", "Output tokens, as reported or counted.", labels=labels
        )
        for key, series in entries:
            for outcome, count in series.outcomes.items():
                requests.add_metric((*key, outcome), count)
            if not key[1]:
                continue  # refused before any instance was chosen: there is nothing else
            duration.add_metric(key, series.duration.buckets(), series.duration.sum)
            ttft.add_metric(key, series.ttft.buckets(), series.ttft.sum)
            tpot.add_metric(key, series.tpot.buckets(), series.tpot.sum)
            tokens_in.add_metric(key, series.input_tokens)
            tokens_cached.add_metric(key, series.cached_tokens)
            tokens_out.add_metric(key, series.output_tokens)
        yield from (requests, duration, ttft, tpot, tokens_in, tokens_cached, tokens_out)

    def _gateway_families(self) -> Iterator[Metric]:
        yield from self._prefix_families()
        yield from self._outcome_families()
        yield from self._client_families()
        yield from self._scheduling_families()
        yield from self._process_families()
        yield from self._source_families()
        if self.sharing is not None:
            yield from sharing_families(self.sharing)
        yield from self._worker_families()
        info = GaugeMetricFamily(PREFIX + "build_info", "Always 1.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info

    def _prefix_families(self) -> Iterator[Metric]:
        if self.prefix_index is not None:
            keys, memory_bytes = self.prefix_index()
            for name, told, value in (
                ("prefix_index_keys", "Beginnings of prompts in the prefix index.", keys),
                ("prefix_index_memory_bytes", "What the prefix index takes.", memory_bytes),
            ):
                family = GaugeMetricFamily(PREFIX + name, told)
                family.add_metric([], value)
                yield family

    def _outcome_families(self) -> Iterator[Metric]:
        """What came of requests, and of their attempts."""
        yield counter("retries", "Attempts after a failed one.", ("reason",),
                      _keyed(dict.fromkeys(_RETRIED, 0) | self.retries))  # fmt: skip
        yield counter("fallbacks", "Requests that went to a fallback, as nothing could take them.",
                      ("model", "fallback"), dict(self.fallbacks))  # fmt: skip
        yield counter("responses", "Requests on an engine's paths that were answered, by the HTTP "
                      "status that the client got; 499: it left before there was one.", ("status",),
                      _keyed({200: 0} | self.statuses))  # fmt: skip
        yield counter("class_requests", "Requests that reached an instance and are over, by the "
                      "class of the queue that they stood in.", ("class", "outcome"),
                      {(DEFAULT_CLASS, "completed"): 0} | self.classes)  # fmt: skip

    def _client_families(self) -> Iterator[Metric]:
        """Connections of clients, and what ended them."""
        clients = GaugeMetricFamily(
            PREFIX + "client_connections", "Connections of clients that are served."
        )
        clients.add_metric([], self.client_connections())
        yield clients
        yield counter("client_timeouts", "Clients' connections that ended by a time-out, by what "
                       "was waited for.", ("phase",),
                      _keyed(dict.fromkeys(_PHASES, 0) | self.client_timeouts))  # fmt: skip
        yield counter("client_refusals", "Requests whose head or framing was refused, and "
                       "connections above the limit (503).", ("status",),
                      _keyed({400: 0, 503: 0} | self.client_refusals))  # fmt: skip

    def _scheduling_families(self) -> Iterator[Metric]:
        """The queue, how long placing takes, and how right predictions are."""
        depth = GaugeMetricFamily(PREFIX + "queue_depth", "Requests that wait for an instance.")
        depth.add_metric([], self._queued())
        yield depth
        yield counter("queue_rejections", "Requests that the queue turned away.", ("reason",),
                      _keyed(dict.fromkeys(_QUEUE_REJECTIONS, 0) | self.queue_rejections),
                      )  # fmt: skip
        yield histogram(
            "queue_wait_seconds", "From the request to its place on an instance, per attempt.", (),
            {(): self.queue_wait_s},
        )  # fmt: skip
        yield histogram("scheduler_decision_seconds", "One decision.", (), {(): self.decision_s})
        yield histogram(
            "overhead_seconds",
            "From the request's last byte in to sending it on, less its wait in the queue.", (),
            {(): self.overhead_s},
        )  # fmt: skip
        yield histogram(
            "prediction_error", "Actual over predicted; 1 is right.", ("quantity",),
            {("output_tokens",): self.output_prediction, ("latency",): self.latency_prediction},
        )  # fmt: skip
        yield counter(
            "predictor_failures", "What an installed length predictor failed to do.",
            ("reason",), {(k,): v for k, v in self.predictor_failures.items()},
        )  # fmt: skip

    def _process_families(self) -> Iterator[Metric]:
        """What the process is short of, and how often its configuration was read."""
        tasks = GaugeMetricFamily(
            PREFIX + "event_loop_tasks", "Tasks of the event loop; back where it was when idle."
        )
        tasks.add_metric([], _task_count())
        yield tasks
        yield counter("probes_late", "Probes that say nothing, as the gateway was short of CPU.",
                       (), {(): self.late_probes()})  # fmt: skip
        yield counter("config_reloads", "Looks at the configuration's file, by what came of them.",
                      ("outcome",),
                      _keyed(dict.fromkeys(_RELOAD_OUTCOMES, 0) | self.reloads))  # fmt: skip

    def _source_families(self) -> Iterator[Metric]:
        """What sources name, and what became of the configuration when it was last read."""
        found = GaugeMetricFamily(
            PREFIX + "source_instances", "Instances that a source has named.", labels=["source"]
        )
        failing = GaugeMetricFamily(
            PREFIX + "source_failing",
            "1 while a source cannot be asked, or its answer not read; what it named stays.",
            labels=["source"],
        )
        for source, count, fails in self.sources():
            found.add_metric([source], count)
            failing.add_metric([source], float(fails))
        yield from (found, failing)
        for (name, told), figure in zip(_RELOADED, self.reloaded, strict=True):
            family = GaugeMetricFamily(PREFIX + name, told)
            family.add_metric([], float(figure))
            yield family

    def _worker_families(self) -> Iterator[Metric]:
        if self.workers is not None:
            workers = GaugeMetricFamily(
                PREFIX + "workers", "Processes that serve clients and are connected."
            )
            workers.add_metric([], self.workers())
            yield workers
            yield histogram(
                "worker_round_trip_seconds",
                "From a worker's question to the answer that places its request at once.", (),
                {(): self.round_trip_s},
            )  # fmt: skip

    async def exposition(self) -> AsyncIterator[bytes]:
        """The body of /metrics.

        Writing it takes about a millisecond for each instance: between two parts, other requests
        have their turn. What cannot be written (a number beyond a float, a label that is no text)
        is left out and logged, and the rest is shown: one bad figure must not hide all others for
        good.
        """
        self.catch_up()
        written: dict[str, list[bytes]] = {}
        for part in self.parts():
            for family in part:
                lines = _exposed(family)
                if family.name in written:
                    lines = lines.split(b"\n", 2)[2]  # its help and type are there
                written.setdefault(family.name, []).append(lines)
            await asyncio.sleep(0)
        parts = itertools.chain.from_iterable(written.values())
        while some := list(itertools.islice(parts, _PARTS_SENT)):
            yield b"".join(some)
        yield b"".join(map(_exposed, self._process.collect()))


def _batches(make: Callable[[], Iterable[_T]], size: int = _PART) -> Iterator[list[_T]]:
    """An empty one first: families are named also where nothing is to be said of them."""
    yield []
    try:
        remaining = iter(make())
        while batch := list(itertools.islice(remaining, size)):
            yield batch
    except Exception:
        _log.exception("some series cannot be shown")


def _as_far_as(items: Iterable[_T]) -> Iterator[_T]:
    """Those that can be made."""
    try:
        yield from items
    except Exception:
        _log.exception("some series cannot be shown")


def _keyed(values: Mapping[Any, int]) -> dict[tuple[str], int]:
    return {(str(k),): v for k, v in values.items()}


def _made(families: Iterable[Metric]) -> list[Metric]:
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


class _One:
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _exposed(family: Metric) -> bytes:
    """What can be shown of a family, sample by sample if need be."""
    try:
        return generate_latest(_One(family))
    except Exception:
        _log.exception("a series of %s cannot be shown", family.name)
        family.samples = [sample for sample in family.samples if _can_be_shown(family, sample)]
    return generate_latest(_One(family))


def _can_be_shown(family: Metric, sample: Sample) -> bool:
    alone = Metric(family.name, family.documentation, family.type, family.unit)
    alone.samples = [sample]
    try:
        generate_latest(_One(alone))
    except Exception:
        return False
    return True
