"""vLLM's own series in /metrics, with vLLM's names, labels and bucket bounds.

Times are wall-clock seconds, as whoever scrapes this instance would measure them: at
``--time-scale 10`` a tenth of the emulated hardware's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hetero_gateway.core.histogram import Histogram
from hetero_gateway.engines.vllm import ABORT
from hetero_gateway.engines.vllm import metrics as series
from hetero_gateway.lab.emulator.reply import Choice
from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS, Settings
from hetero_gateway.sim.engine import Engine

# Bounds as vLLM 0.32 exports them (vllm/v1/metrics/loggers.py).
_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)


def _token_bounds(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to the context window."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > largest:
                return tuple(bounds)
            bounds.append(float(step * scale))
        scale *= 10


class _Histogram(Histogram):
    """With the name and the help text that vLLM has for it."""

    __slots__ = ("name", "text")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        super().__init__(bounds)
        self.name = name
        self.text = text


class Metrics(Collector):
    """Counts of what has finished; gauges are read off the engine at each scrape."""

    def __init__(self, settings: Settings, engine: Engine[Choice]) -> None:
        self._settings = settings
        self._engine = engine
        tokens = _token_bounds(settings.context_tokens)
        self.inter_token_s = _Histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _TOKEN_S
        )
        self._first_token_s = _Histogram(
            "time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            _FIRST_TOKEN_S,
        )
        self._per_token_s = _Histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _TOKEN_S,
        )
        self._latency_s = _Histogram(
            "e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            _LATENCY_S,
        )
        self._prompt_tokens = _Histogram(
            "request_prompt_tokens", "Number of prefill tokens processed.", tokens
        )
        self._output_tokens = _Histogram(
            "request_generation_tokens", "Number of generation tokens processed.", tokens
        )
        # vLLM counts no client's disconnect under "abort" (seen on 0.32).
        self._finished = {"stop": 0, "length": 0, ABORT: 0, "error": 0}
        self._started_s = time.time()
        self.rejections = 0
        self.lost_s = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def first_token(self, wait_s: float) -> None:
        self._first_token_s.observe(wait_s)

    def finished(self, choice: Choice, now_s: float) -> None:
        """A sequence has emitted its last token."""
        reason = choice.finish_reason
        self._finished["stop" if reason == "tool_calls" else reason] += 1
        self._latency_s.observe(now_s - choice.reply.arrived_s)
        self._prompt_tokens.observe(choice.prompt_tokens)
        self._output_tokens.observe(choice.output_tokens)
        if choice.output_tokens > 1:
            self._per_token_s.observe((now_s - choice.first_token_s) / (choice.output_tokens - 1))

    def render(self) -> bytes:
        """The exposition, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        names = ["engine", "model_name"]
        for histogram in (
            self.inter_token_s,
            self._first_token_s,
            self._per_token_s,
            self._latency_s,
            self._prompt_tokens,
            self._output_tokens,
        ):
            family = HistogramMetricFamily(
                series.PREFIX + histogram.name, histogram.text, labels=names
            )
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    @property
    def _labels(self) -> list[str]:
        return ["0", self._settings.model_names[0]]

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        for name, text, value in (
            (
                series.RUNNING,
                "Number of requests in model execution batches.",
                engine.num_running,
            ),
            (
                series.WAITING,
                "Number of requests waiting to be processed.",
                engine.num_waiting,
            ),
            (
                series.KV_USAGE,
                "KV-cache usage. 1 means 100 percent usage.",
                engine.kv_usage,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["engine", "model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        blocks = engine.total_blocks
        info = {
            "block_size": str(BLOCK_TOKENS),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(engine.prefix_caching),
            "engine": "0",
            "kv_cache_size_tokens": str(blocks * BLOCK_TOKENS),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(blocks),
            "num_gpu_blocks_override": str(self._settings.num_gpu_blocks),
        }
        cache = GaugeMetricFamily(
            series.CACHE_CONFIG, "Information of the LLMEngine CacheConfig", labels=list(info)
        )
        cache.add_metric(list(info.values()), 1.0)
        yield cache
        started = GaugeMetricFamily(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
        )
        started.add_metric([], self._started_s)
        yield started

    def _counters(self) -> Iterator[Metric]:
        engine = self._engine
        for name, text, value in (
            (
                series.PREEMPTIONS,
                "Cumulative number of preemption from the engine.",
                engine.preemptions_total,
            ),
            (
                series.PROMPT_TOKENS,
                "Number of prefill tokens processed.",
                engine.prompt_tokens_total,
            ),
            (
                series.GENERATION_TOKENS,
                "Number of generation tokens processed.",
                engine.generation_tokens_total,
            ),
            (
                series.PREFIX + "prompt_tokens_cached",
                "Number of cached prompt tokens (local + external).",
                engine.prefix_hits_total,
            ),
            # An engine without a prefix cache counts 0.
            (
                series.PREFIX_CACHE_QUERIES,
                "Prefix cache queries, in terms of number of queried tokens.",
                engine.prefix_queries_total,
            ),
            (
                series.PREFIX_CACHE_HITS,
                "Prefix cache hits, in terms of number of cached tokens.",
                engine.prefix_hits_total,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=["engine", "model_name"])
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            series.PREFIX + "request_success",
            "Count of successfully processed requests.",
            labels=["engine", "finished_reason", "model_name"],
        )
        for reason, count in self._finished.items():
            success.add_metric(["0", reason, self._labels[1]], count)
        yield success
        rejections = CounterMetricFamily(
            series.PREFIX + "admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            labels=["model_name", "reason"],
        )
        rejections.add_metric([self._labels[1], "max_num_queued_reqs"], self.rejections)
        yield rejections
        lost = CounterMetricFamily(
            "hetero_gateway_emulator_lost_seconds",
            "Wall-clock time by which steps ended too late because this process had no CPU.",
        )
        lost.add_metric([], self.lost_s)
        yield lost
