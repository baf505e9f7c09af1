"""Probes and scrapes: which instances are alive, what they serve, how full their engine says it is.

Each instance has one loop. It asks /health often, and /v1/models and /metrics less often; a
connection that fails while serving makes the next probe come at once. What an engine reports is
seconds old, so it is shown beside the gateway's own accounting and never decides alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import paths, read_metrics, read_models
from hetero_gateway.files.gateway_config import HealthConfig
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.plain_httpx import httpx

_log = logging.getLogger(__name__)


class HealthMonitor:
    """Runs one probe loop per instance, inside the task group that it is given."""

    def __init__(self, fleet: Fleet, config: HealthConfig, tasks: asyncio.TaskGroup) -> None:
        self._fleet = fleet
        self._config = config
        self._tasks = tasks
        self._loops: dict[InstanceId, asyncio.Task[None]] = {}
        self._wake: dict[InstanceId, asyncio.Event] = {}

    async def start(self) -> None:
        """Probe every instance once, at the same time, and then go on in the background."""
        async with asyncio.TaskGroup() as first:
            for instance in self._fleet.instances.values():
                first.create_task(self._first_probe(instance))

    async def _first_probe(self, instance: Instance) -> None:
        async with self._client(instance) as client:
            await self._probe(instance, client)
        if not instance.up:
            _log.warning("instance %s is not reachable: %s", instance.id, instance.down_reason)
        self.watch(instance)

    def watch(self, instance: Instance) -> None:
        """Begin to probe an instance."""
        self._wake[instance.id] = asyncio.Event()
        self._loops[instance.id] = self._tasks.create_task(self._loop(instance))

    def unwatch(self, instance_id: InstanceId) -> None:
        self._wake.pop(instance_id, None)
        if (task := self._loops.pop(instance_id, None)) is not None:
            task.cancel()

    def stop(self) -> None:
        for instance_id in list(self._loops):
            self.unwatch(instance_id)

    def suspect(self, instance: Instance, reason: str, *, down: bool) -> None:
        """A request met a failure: mark the instance down if that is certain, and probe it now."""
        if down:
            self._fleet.mark_down(instance, reason)
        if (event := self._wake.get(instance.id)) is not None:
            event.set()

    def _client(self, instance: Instance) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {instance.api_key}"} if instance.api_key else {}
        return httpx.AsyncClient(
            base_url=instance.config.base_url,
            headers=headers,
            timeout=self._config.probe_timeout_s,
            # Without https no certificate is read: a store of them is megabytes and 40 ms each.
            verify=instance.ssl_context or False,
            trust_env=False,
        )

    async def _loop(self, instance: Instance) -> None:
        config = self._config
        wake = self._wake[instance.id]
        scraped_s = time.monotonic()
        async with self._client(instance) as client:
            while True:
                try:
                    async with asyncio.timeout(config.probe_interval_s):
                        await wake.wait()
                    wake.clear()
                except TimeoutError:
                    pass
                try:
                    await self._probe(instance, client)
                    due = time.monotonic() - scraped_s >= config.scrape_interval_s
                    if instance.up and due:
                        scraped_s = time.monotonic()
                        await self._scrape(instance, client)
                except Exception:
                    # The background loop's boundary: a bug here must not end health checking.
                    _log.exception("probing instance %s failed", instance.id)

    async def _probe(self, instance: Instance, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.get(paths.HEALTH)
            problem = "" if answer.is_success else f"{paths.HEALTH} answered {answer.status_code}"
        except httpx.HTTPError as error:
            problem = f"{paths.HEALTH}: {type(error).__name__}: {error}".rstrip(": ")
        if not problem:
            if not instance.up:
                # Before it opens: it may have been started anew, with other models.
                await self._scrape(instance, client)
            self._fleet.mark_up(instance)
            return
        instance.failed_probes += 1
        instance.down_reason = problem
        if instance.failed_probes >= self._config.unhealthy_after:
            self._fleet.mark_down(instance, problem)

    async def _scrape(self, instance: Instance, client: httpx.AsyncClient) -> None:
        """Read models and engine facts; an engine without them is served all the same."""
        try:
            answer = await client.get(paths.MODELS)
            models = read_models(answer.content) if answer.is_success else None
            if models is not None:
                _note_models(instance, models)
            elif not instance.models:
                _log.warning(
                    "instance %s: %s answered %d", instance.id, paths.MODELS, answer.status_code
                )
            metrics = await client.get(paths.METRICS)
            if metrics.is_success:
                told = read_metrics(metrics.text)
                instance.engine_kv_usage = told.kv_usage
                if told.cache.capacity_tokens is not None:
                    instance.engine_kv_capacity_tokens = told.cache.capacity_tokens
        except httpx.HTTPError as error:
            _log.debug("instance %s: scrape failed: %s", instance.id, error)
        self._fleet.publish(instance)


def _note_models(instance: Instance, models: Mapping[str, int | None]) -> None:
    """Which of these it serves, where the configuration does not say, and its context window."""
    if not instance.config.models:
        instance.models = frozenset(models)
    lengths = [length for name, length in models.items() if length and name in instance.models]
    if lengths:
        instance.max_model_len = max(lengths)
