"""vLLM's /metrics: the names of its series, and the few figures that we read from them.

Names and labels are those of vLLM 0.32, seen on the wire; older ones are read if the new ones are
missing (gpu_cache_usage_perc and gpu_prefix_cache_* until vLLM 0.10, which for a while exported
both). Similar longer names (num_requests_waiting_by_reason) are other series.

A server may run several data-parallel ranks, each with its own KV cache and batch, marked by the
label ``engine``. If they form one instance, counts and capacities are summed, and the usage is the
mean over ranks weighted by capacity, which is the used share of the whole. If each is a place of
its own, each has its own figures (``of_place``).

What an engine reports is seconds old, and may be any text: unusable numbers count as missing, and
no text raises or takes more than linear time.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

PREFIX = "vllm:"

# Gauges.
RUNNING = PREFIX + "num_requests_running"
WAITING = PREFIX + "num_requests_waiting"
KV_USAGE = PREFIX + "kv_cache_usage_perc"  # a fraction of 1, despite its name
# Counters, as exposed.
PREEMPTIONS = PREFIX + "num_preemptions_total"
PROMPT_TOKENS = PREFIX + "prompt_tokens_total"
GENERATION_TOKENS = PREFIX + "generation_tokens_total"
PREFIX_CACHE_QUERIES = PREFIX + "prefix_cache_queries_total"
PREFIX_CACHE_HITS = PREFIX + "prefix_cache_hits_total"
# 1 for its current state, 0 for the others; absent without --enable-sleep-mode.
SLEEP_STATE = PREFIX + "engine_sleep_state"
# About the server's process, by Prometheus' own client; the only name that is not vLLM's.
PROCESS_START = "process_start_time_seconds"
# Always 1; the data is in its labels, those of vLLM's CacheConfig.
CACHE_CONFIG = PREFIX + "cache_config_info"

_OLDER = {
    KV_USAGE: PREFIX + "gpu_cache_usage_perc",
    PREFIX_CACHE_QUERIES: PREFIX + "gpu_prefix_cache_queries_total",
    PREFIX_CACHE_HITS: PREFIX + "gpu_prefix_cache_hits_total",
}
_COUNTS = (
    *(RUNNING, WAITING, PREEMPTIONS, PROMPT_TOKENS, GENERATION_TOKENS),
    *(PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS),
)
_USAGES = (KV_USAGE, _OLDER[KV_USAGE])

# A search for ten names in 70 KB takes 0.12 ms, and a walk over its lines three times as long; a
# full parse would block the event loop for 10 ms. The pattern is fast because it begins with a
# literal, the newline. Possessive quantifiers never backtrack; groups have none, as Python below
# 3.11.5 matches those wrongly (CPython 106052), and need none: no text matches in two ways.
_SERIES = re.compile(
    "\n("
    + "|".join((*_COUNTS, KV_USAGE, CACHE_CONFIG, SLEEP_STATE, *_OLDER.values()))
    + r')(?:[ \t]*+\{((?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*"){0,512})\})?[ \t]++(\S++)'
)
_PROCESS_START_LINE = f"\n{PROCESS_START} "
_LABEL = re.compile(r'(?:^|,)[ \t]*+(\w++)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*)"')
# Ten series of each of some hundred ranks; more is not believed.
_MOST_SAMPLES = 1024
_LONGEST_LABELS = 4096
# Far above what any engine counts, and small enough for sums to stay finite.
_MOST_VALUE = 1e15
_LONGEST_NUMBER = 32
# Limit of the KV cache, in tokens: a rank has some millions.
_MOST_CAPACITY_TOKENS = 10**10
_LONGEST_DTYPE = 32
# Digits of the longest accepted number; floats are exact this far.
_MOST_DIGITS = 15

_Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The KV cache that an engine was started with; None: not stated.

    Args:
        capacity_tokens: of all ranks together.
        block_tokens: of one block.
        utilisation: ``--gpu-memory-utilization``, in (0, 1].
        dtype: ``--kv-cache-dtype``.
        prefix_caching: whether blocks of finished prompts are reused.
    """

    capacity_tokens: int | None = None
    block_tokens: int | None = None
    utilisation: float | None = None
    dtype: str | None = None
    prefix_caching: bool | None = None


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine's load and totals at one scrape, over all its ranks; None: not exported.

    Args:
        running, waiting: requests now.
        preemptions, prompt_tokens, generation_tokens: since it started.
        prefix_cache_hits, prefix_cache_queries: tokens found in the prefix cache, and looked
            up.
        kv_usage: share of the KV cache in use, 0 to 1.
        started_s: when its server's process began, as Unix time.
        asleep: it sleeps, and has no KV cache.
        wakeable: it sleeps with its weights in the host's memory.
        cache: the cache's configuration.
    """

    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_cache_hits: float | None = None
    prefix_cache_queries: float | None = None
    kv_usage: float | None = None
    started_s: float | None = None
    asleep: bool | None = None
    wakeable: bool | None = None
    cache: CacheFacts = field(default_factory=CacheFacts)


class MetricSample(NamedTuple):
    """One line of an exposition that we read."""

    series: str
    labels: str
    value: str


def samples_in(text: str) -> list[MetricSample]:
    """The lines we need from whole lines of an exposition."""
    text = "\n" + text
    found = islice(_SERIES.finditer(text), _MOST_SAMPLES)
    samples = [MetricSample(*match.groups("")) for match in found]
    # A separate search: the pattern is fast because all of its names begin alike.
    start = text.find(_PROCESS_START_LINE)
    if start >= 0:
        value = text[start + len(_PROCESS_START_LINE) :][: _LONGEST_NUMBER + 1].split(None, 1)
        samples.append(MetricSample(PROCESS_START, "", value[0] if value else ""))
    return samples


def read_metrics(text: str) -> EngineMetrics:
    """Read a Prometheus exposition of vLLM's; never raises."""
    return metrics_of(samples_in(text))


def of_place(samples: Iterable[MetricSample], place: int) -> list[MetricSample]:
    """The figures of one rank, by its position among them, and those about them all.

    By position: a server with only part of the ranks numbers them as its cluster does.
    """
    told = [
        (sample, None if sample.series == PROCESS_START else _rank_of(sample))
        for sample in islice(samples, _MOST_SAMPLES)
    ]
    ranks = sorted({rank for _, rank in told if rank is not None})
    own = ranks[place] if place < len(ranks) else -1
    return [sample for sample, rank in told if rank is None or rank == own]


def _rank_of(sample: MetricSample) -> int | None:
    if len(sample.labels) > _LONGEST_LABELS:
        return None
    told = dict(_LABEL.findall(sample.labels)).get("engine", "")
    return int(told) if told.isascii() and told.isdecimal() and len(told) <= _MOST_DIGITS else None


def metrics_of(samples: Iterable[MetricSample]) -> EngineMetrics:
    """Read these samples of one exposition; never raises."""
    totals: dict[str, float] = {}
    usages: dict[str, list[tuple[str, float]]] = {}  # by series: (rank, share)
    configs: list[_Labels] = []
    sleeps: list[tuple[str, float]] = []  # (state, 1 if it is the current one)
    for name, label_text, value_text in islice(samples, _MOST_SAMPLES):
        if len(label_text) > _LONGEST_LABELS:
            continue
        if name == CACHE_CONFIG:
            configs.append(dict(_LABEL.findall(label_text)))
            continue
        value = _number(value_text)
        if value is None:
            continue
        if name == SLEEP_STATE:
            sleeps.append((dict(_LABEL.findall(label_text)).get("sleep_state", ""), value))
        elif name in _USAGES:
            rank = dict(_LABEL.findall(label_text)).get("engine", "")
            usages.setdefault(name, []).append((rank, value))
        else:
            totals[name] = totals.get(name, 0.0) + value

    def count(name: str) -> float | None:
        return totals.get(name, totals.get(_OLDER.get(name, "")))

    return EngineMetrics(
        running=count(RUNNING),
        waiting=count(WAITING),
        preemptions=count(PREEMPTIONS),
        prompt_tokens=count(PROMPT_TOKENS),
        generation_tokens=count(GENERATION_TOKENS),
        prefix_cache_hits=count(PREFIX_CACHE_HITS),
        prefix_cache_queries=count(PREFIX_CACHE_QUERIES),
        kv_usage=_usage(next((usages[n] for n in _USAGES if n in usages), []), configs),
        started_s=totals.get(PROCESS_START),
        asleep=any(value and state != "awake" for state, value in sleeps) if sleeps else None,
        wakeable=(
            all(not value for state, value in sleeps if state == "discard_all") if sleeps else None
        ),
        cache=_cache(configs),
    )


def _cache(configs: list[_Labels]) -> CacheFacts:
    """The ranks of one server are started alike: only their capacities are summed."""
    first: _Labels = configs[0] if configs else {}
    utilisation = _number(first.get("gpu_memory_utilization", ""))
    caching = {"True": True, "False": False}
    capacity_tokens = sum(_capacity_tokens(labels) or 0 for labels in configs)
    dtype = first.get("cache_dtype", "")
    return CacheFacts(
        capacity_tokens=capacity_tokens if 0 < capacity_tokens <= _MOST_CAPACITY_TOKENS else None,
        block_tokens=_positive(first.get("block_size")),
        utilisation=utilisation if utilisation and utilisation <= 1 else None,
        dtype=dtype if 0 < len(dtype) <= _LONGEST_DTYPE and dtype.isprintable() else None,
        prefix_caching=caching.get(first.get("enable_prefix_caching", "")),
    )


def _capacity_tokens(labels: _Labels) -> int | None:
    """One rank's capacity: its own figure, or its blocks times their size."""
    if (tokens := _positive(labels.get("kv_cache_size_tokens"))) is not None:
        return tokens
    blocks, size = _positive(labels.get("num_gpu_blocks")), _positive(labels.get("block_size"))
    return None if blocks is None or size is None else blocks * size


def _usage(shares: list[tuple[str, float]], configs: list[_Labels]) -> float | None:
    """The mean, weighted if the capacities of all ranks are stated."""
    if not shares:
        return None
    tokens = {labels.get("engine", ""): _capacity_tokens(labels) for labels in configs}
    weights = [tokens.get(rank) or 0 for rank, _ in shares]
    if not all(weights):
        weights = [1] * len(shares)
    mean = sum(w * share for w, (_, share) in zip(weights, shares, strict=True)) / sum(weights)
    return min(mean, 1.0)


def _number(text: str) -> float | None:
    """A number from 0 to the most that an engine may count."""
    try:
        value = float(text if len(text) <= _LONGEST_NUMBER else "")
    except ValueError:
        return None
    return value if 0 <= value <= _MOST_VALUE else None


def _positive(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS:
        return None
    return int(text) or None
