"""Probes and scrapes: which instances are alive, what they serve, how full their engine says it is.

Each instance has one loop, and no loop waits for another. It asks /health often, and /v1/models and
/metrics less often; a connection that fails while serving makes the next probe come at once. What
an engine reports is seconds old, so it is shown beside the gateway's own accounting and never
decides alone.

What an instance answers is bounded (``fleet.probe``) and may be anything: one that cannot be
understood is down, and says why. Only two things are needed: that /health succeeds, and that
somebody names the models, the configuration or /v1/models. A probe that fails for a reason of the
gateway's own (``Failure.LOCAL``) counts for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import (
    EngineMetrics,
    Sample,
    metrics_of,
    paths,
    read_models,
    samples_in,
)
from hetero_gateway.files.gateway_config import GatewayConfig, HealthConfig
from hetero_gateway.gateway.failures import Failure, InstanceError
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.fleet.probe import Probe
from hetero_gateway.gateway.settings import Prepared, Settings

_log = logging.getLogger(__name__)

# A card has half a kilobyte, and a rank's metrics are 70 KB.
_MOST_MODELS_BYTES = 1 << 20
_MOST_METRICS_BYTES = 1 << 23
# Metrics are read in parts of this size, with a turn of the event loop after each.
_PART_BYTES = 1 << 16
# What is late by so much is not put off any more: there are no streams to be looked at.
_LONGEST_WAIT_S = 1.5


class HealthMonitor:
    """Runs one probe loop per instance, inside the task group that it is given."""

    def __init__(self, fleet: Fleet, config: HealthConfig, tasks: asyncio.TaskGroup) -> None:
        self._fleet = fleet
        self._config = config
        self._tasks = tasks
        self._loops: dict[InstanceId, asyncio.Task[None]] = {}
        self._wake: dict[InstanceId, asyncio.Event] = {}
        self._probed: dict[InstanceId, asyncio.Event] = {}  # at least once
        self._scraped_s: dict[InstanceId, float] = {}
        self._scrape_now: set[InstanceId] = set()
        fleet.on_look = self._after_look

    def settings(self, settings: Settings) -> None:
        """Have this part take up what can change of it."""
        settings.add(("health",), self._prepare)

    def _prepare(self, fresh: GatewayConfig) -> Prepared:
        def apply() -> None:
            self._config = fresh.health
            for wake in self._wake.values():
                wake.set()

        return Prepared(apply)

    async def start(self) -> None:
        """Begin to probe every instance; returns once each was probed, or had the time for it."""
        for instance in self._fleet.instances.values():
            self.watch(instance)
        await self.probed(self._fleet.instances)
        for instance in self._fleet.instances.values():
            if not instance.up:
                _log.warning("instance %s is not reachable: %s", instance.id, instance.down_reason)

    async def probed(self, instances: Iterable[InstanceId]) -> None:
        """Returns once each of these was probed, or had the time for it."""
        first = [
            asyncio.ensure_future(self._probed[instance_id].wait())
            for instance_id in instances
            if instance_id in self._probed
        ]
        if first:
            _, late = await asyncio.wait(first, timeout=self._config.probe_timeout_s)
            for waiter in late:
                waiter.cancel()

    def watch(self, instance: Instance) -> None:
        """Begin to probe an instance."""
        self._wake[instance.id] = asyncio.Event()
        self._probed[instance.id] = asyncio.Event()
        self._scraped_s[instance.id] = time.monotonic()
        self._loops[instance.id] = self._tasks.create_task(self._loop(instance))

    def unwatch(self, instance_id: InstanceId) -> None:
        self._wake.pop(instance_id, None)
        self._probed.pop(instance_id, None)
        self._scraped_s.pop(instance_id, None)
        self._scrape_now.discard(instance_id)
        if (task := self._loops.pop(instance_id, None)) is not None:
            task.cancel()

    def _after_look(self) -> None:
        """Rows of observation end now: the counters of those that are due are best read here, so
        that what they count is of whole rows.
        """
        now_s, instances = time.monotonic(), self._fleet.instances
        for instance_id, scraped_s in self._scraped_s.items():
            due = now_s - scraped_s >= self._config.scrape_interval_s
            if due and instance_id in instances and instances[instance_id].up:
                self._scrape_now.add(instance_id)
                self._wake[instance_id].set()

    def _is_due(self, instance_id: InstanceId) -> bool:
        """Whether to scrape now; what is due waits a little for the end of its row."""
        if instance_id in self._scrape_now:
            return True
        interval_s = self._config.scrape_interval_s
        waited_s = time.monotonic() - self._scraped_s[instance_id] - interval_s
        return waited_s >= min(_LONGEST_WAIT_S, interval_s)

    def stop(self) -> None:
        for instance_id in list(self._loops):
            self.unwatch(instance_id)

    def suspect(self, instance: Instance, reason: str, *, down: bool) -> None:
        """A request met a failure: mark the instance down if that is certain, and probe it now."""
        if down:
            self._fleet.mark_down(instance, reason)
        if (event := self._wake.get(instance.id)) is not None:
            event.set()

    async def _loop(self, instance: Instance) -> None:
        wake, probed = self._wake[instance.id], self._probed[instance.id]
        probe = Probe(
            instance.config.base_url,
            instance.api_key,
            self._config.probe_timeout_s,
            instance.ssl_context,
        )
        try:
            while True:
                wake.clear()
                probe.timeout_s = self._config.probe_timeout_s
                try:
                    await self._look(instance, probe)
                    if instance.up and self._is_due(instance.id):
                        self._scrape_now.discard(instance.id)
                        self._scraped_s[instance.id] = time.monotonic()
                        await self._scrape(instance, probe)
                except Exception:
                    # The background loop's boundary: a bug here must not end health checking.
                    _log.exception("probing instance %s failed", instance.id)
                probed.set()
                try:
                    async with asyncio.timeout(self._config.probe_interval_s):
                        await wake.wait()
                except TimeoutError:
                    pass
        finally:
            probe.close()

    async def _look(self, instance: Instance, probe: Probe) -> None:
        """Ask /health; one that was down is opened only with what it serves."""
        try:
            answer = await probe.get(paths.HEALTH)
            problem = "" if answer.good else f"{paths.HEALTH} answered {answer.status}"
            if not problem and not instance.up:
                # Before it opens: it may have been started anew, with other models.
                await self._scrape(instance, probe)
                problem = "" if instance.models else instance.scrape_problem or "it lists no model"
        except InstanceError as error:
            if error.failure is Failure.LOCAL:
                _log.warning("instance %s could not be probed: %s", instance.id, error)
                return
            problem = f"{paths.HEALTH}: {error}"
        if not problem:
            self._fleet.mark_up(instance)
            return
        instance.failed_probes += 1
        instance.down_reason = problem
        if instance.failed_probes >= self._config.unhealthy_after:
            self._fleet.mark_down(instance, problem)

    async def _scrape(self, instance: Instance, probe: Probe) -> None:
        """Read models and engine facts; an engine without metrics is served all the same.

        Raises InstanceError: LOCAL.
        """
        problems = [await self._scrape_models(instance, probe)]
        problems.append(await self._scrape_metrics(instance, probe))
        instance.scrape_problem = "; ".join(filter(None, problems))
        if instance.up and not instance.models:
            self._fleet.mark_down(instance, instance.scrape_problem)
        self._fleet.publish(instance)

    async def _scrape_models(self, instance: Instance, probe: Probe) -> str:
        """What is wrong with them."""
        body, problem = await _body(probe, paths.MODELS, _MOST_MODELS_BYTES)
        models = None if body is None else read_models(body)
        if models is None:
            return problem or f"{paths.MODELS}: not a list of models"
        _note_models(instance, models)
        return "" if models else f"{paths.MODELS}: lists no model"

    async def _scrape_metrics(self, instance: Instance, probe: Probe) -> str:
        body, problem = await _body(probe, paths.METRICS, _MOST_METRICS_BYTES)
        told = None if body is None else await _read_metrics(body)
        self._tell_cache(instance, told)
        if told is not None:
            instance.engine_kv_usage = told.kv_usage
            self._tell_queue(instance, told)
            if told.cache.capacity_tokens is not None:
                instance.engine_kv_capacity_tokens = told.cache.capacity_tokens
        return problem

    def _tell_cache(self, instance: Instance, told: EngineMetrics | None) -> None:
        """What its prefix cache has served; an engine that does not tell is not believed to have
        none, nor to be as it was.
        """
        if self._fleet.instances.get(instance.id) is not instance:
            return
        caching, counters = instance.engine_prefix_caching, None
        if told is not None:
            caching = instance.engine_prefix_caching = told.cache.prefix_caching
            queries, hits = told.prefix_cache_queries, told.prefix_cache_hits
            if queries is not None and hits is not None:
                counters = queries, hits
            self._tell_renewal(instance, told)
        self._fleet.scheduler.observe_cache(instance.id, caching, counters, time.monotonic())

    def _tell_renewal(self, instance: Instance, told: EngineMetrics) -> None:
        """It was started anew although no probe failed meanwhile, or it sleeps: what it had cached
        is gone. That its counters fell says so too; a new one's may be ahead of the old one's.
        """
        before, started_s = instance.engine_started_s, told.started_s
        instance.engine_started_s = started_s
        if told.asleep or (before is not None and started_s is not None and started_s != before):
            self._fleet.scheduler.forget_cache(instance.id)

    def _tell_queue(self, instance: Instance, told: EngineMetrics) -> None:
        running, waiting = told.running, told.waiting
        if running is None or waiting is None:
            return
        if self._fleet.instances.get(instance.id) is instance:
            scheduler = self._fleet.scheduler
            scheduler.observe_queue(instance.id, int(running), int(waiting), time.monotonic())


async def _body(probe: Probe, path: str, most_bytes: int) -> tuple[bytes | None, str]:
    """(body, what is wrong). Raises InstanceError: LOCAL."""
    try:
        answer = await probe.get(path, most_bytes)
    except InstanceError as error:
        if error.failure is Failure.LOCAL:
            raise
        return None, f"{path}: {error}"
    if not answer.good:
        return None, f"{path} answered {answer.status}"
    if answer.problem:
        return None, f"{path}: {answer.problem}"
    return answer.body, ""


async def _read_metrics(body: bytes) -> EngineMetrics:
    """Read metrics without holding the event loop: part by part, each of whole lines."""
    # Every byte is a character of latin-1, and what we read of it is ASCII.
    text = body.decode("latin-1")
    samples: list[Sample] = []
    start, size = 0, len(text)
    while start < size:
        end = start + _PART_BYTES
        if end < size:
            end = text.rfind("\n", start, end) + 1
            if end == 0:  # a line that is none of ours
                end = text.find("\n", start + _PART_BYTES) + 1 or size
        samples += samples_in(text[start:end])
        start = end
        await asyncio.sleep(0)
    return metrics_of(samples)


def _note_models(instance: Instance, models: Mapping[str, int | None]) -> None:
    """Which of these it serves, where the configuration does not say, and its context window."""
    if not instance.config.models:
        instance.models = frozenset(models)
    lengths = [length for name, length in models.items() if length and name in instance.models]
    if lengths:
        instance.max_model_len = max(lengths)
