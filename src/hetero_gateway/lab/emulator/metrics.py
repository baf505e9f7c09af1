"""vLLM's own series in /metrics, with vLLM's names, labels and bucket bounds.

``series.csv`` has their names, help texts and bounds, in order, as vLLM 0.32 exports them
(vllm/v1/metrics/loggers.py); if a histogram has no bounds there, they go up to the context window.
Times are wall-clock seconds, as a scraper of this instance would measure them: at
``--time-scale 10`` a tenth of the emulated hardware's.
"""

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from hetero_gateway.lab.emulator.reply import EmulatedReply, ReplyChoice
from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS, EmulatorSettings
from hetero_gateway.sim.engine import Engine

with Path(__file__).with_name("series.csv").open(encoding="utf-8", newline="") as _file:
    _SERIES = tuple(csv.DictReader(_file))
_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _token_bounds(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to the context window."""
    steps = (step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5))
    return tuple(float(bound) for bound in steps if bound <= largest)


class EmulatedMetrics(Collector):
    """Counts of finished requests; gauges are read from the engine at each scrape."""

    def __init__(self, settings: EmulatorSettings, engine: Engine[ReplyChoice]) -> None:
        self._settings = settings
        self._engine = engine
        tokens = _token_bounds(settings.context_tokens)
        self._histograms = {
            row["name"]: Histogram(tuple(map(float, row["bounds"].split())) or tokens)
            for row in _SERIES
            if row["kind"] == "histogram"
        }
        (
            self.inter_token_s,
            self.first_token_s,
            self._per_token_s,
            self._latency_s,
            self._prompt_tokens,
            self._output_tokens,
        ) = self._histograms.values()
        # vLLM does not count client disconnects under "abort" (seen on 0.32).
        self._finished = {"stop": 0, "length": 0, ABORT: 0, "error": 0}
        self._started_s = time.time()
        self.rejections = 0
        # Requests waiting for a transfer of KV cache, and tokens cached by one.
        self.fetching = self.found_tokens = 0
        self.lost_s = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def finished(self, choice: ReplyChoice, now_s: float) -> None:
        """A sequence has emitted its last token."""
        reason = choice.finish_reason
        self._finished["stop" if reason == "tool_calls" else reason] += 1
        self._latency_s.observe(now_s - choice.reply.arrived_s)
        self._prompt_tokens.observe(choice.prompt_tokens)
        self._output_tokens.observe(choice.output_tokens)
        if choice.output_tokens > 1:
            self._per_token_s.observe((now_s - choice.first_token_s) / (choice.output_tokens - 1))

    def failed(self, reply: EmulatedReply) -> None:
        """A reply ended in an error of the engine."""
        self._finished["error"] += reply.unfinished

    def add(self, collector: Collector) -> None:
        """Further series."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """The exposition, in Prometheus' text format."""
        return generate_latest(self._registry)

    @property
    def labels(self) -> dict[str, str]:
        """Of every series of the engine."""
        return {"engine": str(self._settings.rank), "model_name": self._settings.model_names[0]}

    def collect(self) -> Iterator[Metric]:
        labels = self.labels
        values = self._values(labels)
        for row in _SERIES:
            value = values[row["name"]]
            samples = value if isinstance(value, list) else [(labels, value)]
            family = _FAMILIES[row["kind"]](row["name"], row["help"], labels=list(samples[0][0]))
            for named, value in samples:
                parts = (value.buckets(), value.sum) if isinstance(value, Histogram) else (value,)
                family.add_metric(list(named.values()), *parts)
            yield family

    def _values(self, labels: dict[str, str]) -> dict[str, Any]:
        """Each series' value by name; a list of (labels, value) if it has labels of its own."""
        engine = self._engine
        blocks = engine.total_blocks
        cache = {
            "block_size": str(BLOCK_TOKENS),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(engine.prefix_caching),
            "engine": str(self._settings.rank),
            "kv_cache_size_tokens": str(blocks * BLOCK_TOKENS),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(blocks),
            "num_gpu_blocks_override": str(self._settings.num_gpu_blocks),
        }
        rejected = {"model_name": labels["model_name"], "reason": "max_num_queued_reqs"}
        return {
            series.RUNNING: engine.num_running,
            series.WAITING: engine.num_waiting + self.fetching,
            series.KV_USAGE: engine.kv_usage,
            series.CACHE_CONFIG: [(cache, 1.0)],
            series.PROCESS_START: [({}, self._started_s)],
            series.PREEMPTIONS: engine.preemptions_total,
            series.PROMPT_TOKENS: engine.prompt_tokens_total,
            series.GENERATION_TOKENS: engine.generation_tokens_total,
            "vllm:prompt_tokens_cached": engine.prefix_hits_total,
            # An engine without a prefix cache counts 0.
            series.PREFIX_CACHE_QUERIES: engine.prefix_queries_total,
            series.PREFIX_CACHE_HITS: engine.prefix_hits_total - self.found_tokens,
            "vllm:request_success": [
                ({**labels, "finished_reason": reason}, count)
                for reason, count in self._finished.items()
            ],
            "vllm:admission_rejections": [(rejected, self.rejections)],
            "hetero_gateway_emulator_lost_seconds": [({}, self.lost_s)],
            **self._histograms,
        }
