"""The metric families: a table of names, types, labels and help texts, and what fills them.

They are made on a scrape, from rows of (family, labels, value): here those of instances and of the
view of other gateways, with present values; ``metrics`` has the counts.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

from hetero_gateway.core.histogram import Histogram
from hetero_gateway.core.instances.snapshot import InstanceSnapshot
from hetero_gateway.core.prefixes.sources import CacheSource
from hetero_gateway.gateway.records.exposition import Family, labels_text

if TYPE_CHECKING:
    from hetero_gateway.core.sharing.exchange import Mode

_PREFIX = "hetero_gateway_"
_FAMILIES = {
    row["name"]: row
    for row in csv.DictReader(
        resources.files(__package__).joinpath("families.csv").read_text("utf-8").splitlines()
    )
}

# A family's name without its prefix, the values of its labels, and its value; None: unknown, and no
# series is shown.
Row = tuple[str, tuple[str, ...], float | Histogram | None]


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
    prefix_source: CacheSource | None = None
    refused_pairs: int | None = None
    models: frozenset[str] = frozenset()
    problems: frozenset[str] = frozenset()


# Problems of an instance that is served all the same: its reports cannot be read, it serves other
# models than it should, its steps take less than half or more than twice as long as they should.
PROBLEMS = ("metrics_unreadable", "models_unreadable", "other_model", "speed")
KV_EVENTS = ("stored", "removed", "cleared", "gaps", "lost", "restarts", "rejected")


class PlacementsView(Protocol):
    """Shared placements of prompts, as a scrape sees them."""

    said_bytes: int

    @property
    def counts(self) -> Mapping[str, int]: ...


class SharedView(Protocol):
    """The view of other gateways, as a scrape sees it."""

    outcomes: Counter[str]
    news: Counter[str]
    exchange_s: Histogram

    @property
    def placements(self) -> PlacementsView | None: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def replicas(self) -> int: ...
    @property
    def unmatched(self) -> int: ...
    def age_s(self) -> float | None: ...


def families_of(names: Iterable[str], rows: Iterable[Row]) -> Iterator[Family]:
    """These families, without series if there are no rows."""
    made = {name: _empty(name) for name in names}
    add = {name: each.add for name, each in made.items()}
    for name, labels, value in rows:
        add[name](labels, value)
    yield from made.values()


def family(name: str, values: Mapping[Any, float | Histogram | None]) -> Family:
    """One family, by its labels' values."""
    (made,) = families_of((name,), ((name, labels, value) for labels, value in values.items()))
    return made


def single(name: str, value: float | Histogram | None) -> Family:
    """A family without labels."""
    return family(name, {(): value})


def _empty(name: str) -> Family:
    row = _FAMILIES[name]
    return Family(_PREFIX + name, row["type"], row["help"], row["labels"].split())


def instance_families(every: Iterable[InstanceGauges], *, basic: bool = False) -> Iterator[Family]:
    """``basic``: only those needed to judge an instance."""
    made = {name: _empty(name) for name in _OF_INSTANCES}
    add = {name: each.add_labelled for name, each in made.items() if not basic or name in _BASIC}
    for gauges in every:
        labelled = backend_text(str(gauges.snapshot.instance_id))
        for name, more, value in _instance_rows(gauges):
            if name in add:
                add[name](labelled + more, value)
    yield from made.values()


def backend_text(instance_id: str) -> str:
    """The label of an instance; the configuration has checked that ids are text."""
    return labels_text(("backend",), (instance_id,))


_OF_INSTANCES = (
    "instance_up", "instance_ejected", "in_flight_requests", "instance_workload",
    "instance_kv_usage_ratio", "instance_speed_factor", "instance_waiting_first_token",
    "profile_drift_ratio", "profile_age_seconds", "prompt_cached_tokens", "instance_prefix_trust",
    "instance_prefix_bytes", "instance_prefix_source", "instance_refused_pairs",
    "instance_problem",
)  # fmt: skip


_BASIC = frozenset(
    ("instance_up", "instance_ejected", "in_flight_requests", "instance_kv_usage_ratio",
     "instance_speed_factor", "instance_problem")
)  # fmt: skip


def _instance_rows(gauges: InstanceGauges) -> Iterator[tuple[str, str, float | None]]:
    """Families, further labels, values."""
    seen = gauges.snapshot
    yield "instance_up", "", gauges.up
    yield "instance_ejected", "", gauges.ejected
    yield "in_flight_requests", "", seen.in_flight
    yield "instance_workload", "", seen.load_s
    yield "prompt_cached_tokens", ',source="predicted"', seen.predicted_cached_tokens
    yield "prompt_cached_tokens", ',source="engine"', seen.cached_tokens
    yield "instance_kv_usage_ratio", ',source="estimated"', seen.kv_usage
    yield "instance_kv_usage_ratio", ',source="engine"', gauges.kv_usage_engine
    yield "instance_speed_factor", "", seen.speed_factor
    yield "instance_waiting_first_token", "", seen.waiting_first_token
    yield "profile_drift_ratio", ',phase="decode"', seen.drift.decode
    yield "profile_drift_ratio", ',phase="prefill"', seen.drift.prefill
    yield "profile_age_seconds", "", gauges.profile_age_s
    yield "instance_prefix_trust", "", gauges.prefix_trust
    yield "instance_prefix_bytes", "", gauges.prefix_bytes
    if gauges.prefix_source is not None:
        for source in CacheSource:
            yield (
                "instance_prefix_source",
                f',source="{source.value}"',
                gauges.prefix_source is source,
            )
    yield "instance_refused_pairs", "", gauges.refused_pairs
    for problem in PROBLEMS:
        yield "instance_problem", f',problem="{problem}"', problem in gauges.problems


def following_families(
    types: Iterable[tuple[tuple[str, str, str], int, int | None]], failures: int
) -> Iterator[Family]:
    """By (model, accelerator, tensor parallelism): instances that are ready, and that the load
    needs.

    None: not known yet.
    """
    rows = tuple(types)
    yield family("desired_instances", {key: wanted for key, _, wanted in rows})
    yield family("ready_instances", {key: there for key, there, _ in rows})
    yield single("following_failures", failures)


def batch_families(
    running: int,
    late: int,
    paused: bool,
    lines: Mapping[str, int],
    out: Mapping[str, int],
    answered: Mapping[str, int],
) -> Iterator[Family]:
    """Batches: how many run and will be late; lines that wait or run, where they run, and how many
    were answered, by outcome."""
    yield single("batches_running", running)
    yield single("batches_late", late)
    yield single("batches_paused", paused)
    yield family("batch_lines", {(state,): lines.get(state, 0) for state in ("waiting", "out")})
    yield family("batch_lines_out", {(each,): n for each, n in out.items()})
    results = ("completed", "failed", "retried")
    yield family("batch_lines_done", {(each,): answered.get(each, 0) for each in results})


def sharing_families(sharing: SharedView) -> Iterator[Family]:
    yield family(
        "sharing_mode", {(mode.value,): sharing.mode is mode for mode in type(sharing.mode)}
    )
    yield single("sharing_replicas", sharing.replicas)
    yield single("sharing_age_seconds", sharing.age_s())
    yield single("sharing_unmatched_instances", sharing.unmatched)
    yield family("sharing_exchanges", {(k,): v for k, v in sharing.outcomes.items()})
    yield family("sharing_news", {(k,): v for k, v in sharing.news.items()})
    yield single("sharing_exchange_seconds", sharing.exchange_s)
    if sharing.placements is not None:
        counts = sharing.placements.counts
        results = ("said", "heard", "left_out", "rejected", "foreign")
        yield family("sharing_placements", {(each,): counts.get(each, 0) for each in results})
        yield single("sharing_placements_bytes", sharing.placements.said_bytes)
