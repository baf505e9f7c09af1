"""The metric families of an instance and of the view of other gateways, and what makes families.

Written on a scrape, from what is so at that moment; what is counted is in ``metrics``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from hetero_gateway.core.histogram import Histogram
from hetero_gateway.core.instances.snapshot import InstanceSnapshot
from hetero_gateway.core.sharing.exchange import Mode

PREFIX = "hetero_gateway_"


@dataclass(frozen=True, slots=True)
class InstanceGauges:
    """An instance as a scrape sees it; None: unknown, and no series is shown."""

    snapshot: InstanceSnapshot
    up: bool
    kv_usage_engine: float | None
    profile_age_s: float | None
    ejected: bool = False
    prefix_trust: float | None = None
    prefix_bytes: int | None = None
    models: frozenset[str] = frozenset()


class SharedView(Protocol):
    """The view of other gateways, as a scrape sees it."""

    outcomes: Counter[str]
    news: Counter[str]
    exchange_s: Histogram

    @property
    def mode(self) -> Mode: ...
    @property
    def replicas(self) -> int: ...
    @property
    def unmatched(self) -> int: ...
    def age_s(self) -> float | None: ...


def counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], Histogram]
) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for key, histogram in values.items():
        family.add_metric(key, histogram.buckets(), histogram.sum)
    return family


def instance_families(every: Iterable[InstanceGauges]) -> Iterator[Metric]:
    up = GaugeMetricFamily(PREFIX + "instance_up", "1 while it gets requests.", labels=["backend"])
    ejected = GaugeMetricFamily(
        PREFIX + "instance_ejected",
        "1 while it gets no requests, or one that tries it, because its requests failed.",
        labels=["backend"],
    )
    in_flight = GaugeMetricFamily(
        PREFIX + "in_flight_requests", "Outstanding requests.", labels=["backend"]
    )
    load = GaugeMetricFamily(
        PREFIX + "instance_workload",
        "Outstanding workload, in the policy's unit.",
        labels=["backend"],
    )
    kv = GaugeMetricFamily(
        PREFIX + "instance_kv_usage_ratio",
        "KV-cache usage: estimated from outstanding requests, or reported by the engine.",
        labels=("backend", "source"),
    )
    speed = GaugeMetricFamily(
        PREFIX + "instance_speed_factor",
        "Observed over modelled time of a decode step; above 1 it is slower than modelled.",
        labels=["backend"],
    )
    unseen = GaugeMetricFamily(
        PREFIX + "instance_waiting_first_token",
        "Sequences that were sent and have no first token yet.",
        labels=["backend"],
    )
    drift = GaugeMetricFamily(
        PREFIX + "profile_drift_ratio",
        "Observed over modelled time, over minutes of traffic; 1: the profile is right.",
        labels=("backend", "phase"),
    )
    age = GaugeMetricFamily(
        PREFIX + "profile_age_seconds",
        "Since the day that the instance's profile names.",
        labels=["backend"],
    )
    cached = CounterMetricFamily(
        PREFIX + "prompt_cached_tokens",
        "Tokens of completed prompts that were in the engine's prefix cache: as predicted when "
        "they were sent, and as the engine reported.",
        labels=("backend", "source"),
    )
    trust = GaugeMetricFamily(
        PREFIX + "instance_prefix_trust",
        "Of the tokens that it should have cached, the share that its engine finds; 1: all.",
        labels=["backend"],
    )
    known = GaugeMetricFamily(
        PREFIX + "instance_prefix_bytes",
        "Text of prompts that it should have cached, by the gateway's index.",
        labels=["backend"],
    )
    for gauges in every:
        seen = gauges.snapshot
        name = seen.instance_id
        up.add_metric([name], float(gauges.up))
        ejected.add_metric([name], float(gauges.ejected))
        in_flight.add_metric([name], seen.in_flight)
        load.add_metric([name], seen.load_s)
        cached.add_metric((name, "predicted"), seen.predicted_cached_tokens)
        cached.add_metric((name, "engine"), seen.cached_tokens)
        for family, labels, value in (
            (kv, (name, "estimated"), seen.kv_usage),
            (kv, (name, "engine"), gauges.kv_usage_engine),
            (speed, (name,), seen.speed_factor),
            (unseen, (name,), seen.waiting_first_token),
            (drift, (name, "decode"), seen.drift.decode),
            (drift, (name, "prefill"), seen.drift.prefill),
            (age, (name,), gauges.profile_age_s),
            (trust, (name,), gauges.prefix_trust),
            (known, (name,), gauges.prefix_bytes),
        ):
            if value is not None:
                family.add_metric(labels, value)
    yield from (up, ejected, in_flight, load, kv, speed, unseen, drift, age, cached)
    yield from (trust, known)


def following_families(
    types: Iterable[tuple[tuple[str, str, str], int, int | None]], failures: int
) -> Iterator[Metric]:
    """Of (model, accelerator, tensor parallelism): instances that are ready, and the load needs.

    None: not known yet.
    """
    labels = ("model", "accelerator", "tensor_parallel")
    desired = GaugeMetricFamily(
        PREFIX + "desired_instances",
        "Instances of a type that the load needs, by the section `following`.",
        labels=labels,
    )
    ready = GaugeMetricFamily(
        PREFIX + "ready_instances", "Instances of such a type that get requests.", labels=labels
    )
    for key, there, wanted in types:
        ready.add_metric(key, there)
        if wanted is not None:
            desired.add_metric(key, wanted)
    yield from (desired, ready)
    yield counter("following_failures", "Answers of `following` that failed; the last one stays.",
                   (), {(): failures})  # fmt: skip


def sharing_families(sharing: SharedView) -> Iterator[Metric]:
    mode = GaugeMetricFamily(
        PREFIX + "sharing_mode",
        "1 for what the view of other gateways is: shared, stale (kept) or local (none).",
        labels=["mode"],
    )
    for each in Mode:
        mode.add_metric([each.value], float(sharing.mode is each))
    yield mode
    replicas = GaugeMetricFamily(
        PREFIX + "sharing_replicas", "Other gateways that were heard of within the lease."
    )
    replicas.add_metric([], sharing.replicas)
    yield replicas
    age = GaugeMetricFamily(
        PREFIX + "sharing_age_seconds", "Since the oldest message of them was new."
    )
    if (age_s := sharing.age_s()) is not None:
        age.add_metric([], age_s)
    yield age
    unmatched = GaugeMetricFamily(
        PREFIX + "sharing_unmatched_instances",
        "Instances with load of others that are not here by the same id and base_url.",
    )
    unmatched.add_metric([], sharing.unmatched)
    yield unmatched
    yield counter("sharing_exchanges", "Exchanges with the store, and messages rejected.",
                   ("outcome",), {(k,): v for k, v in sharing.outcomes.items()})  # fmt: skip
    yield counter("sharing_news", "News of where requests went: told, and heard of others.",
                   ("direction",), {(k,): v for k, v in sharing.news.items()})  # fmt: skip
    yield histogram(
        "sharing_exchange_seconds", "One exchange with the store.", (), {(): sharing.exchange_s}
    )
