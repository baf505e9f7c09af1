"""Probes and scrapes: which instances are alive, what they serve, how full their engine says it is.

Each instance has one loop. It asks /health often, and /v1/models and /metrics less often; a
connection that fails while serving makes the next probe come at once. What an engine reports is
seconds old, so it is shown beside the gateway's own accounting and never decides alone.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

import httpx

from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.gateway_config import HealthConfig
from hetero_gateway.gateway.fleet.instances import Fleet, Instance

_log = logging.getLogger(__name__)

# A few lines out of 50 KB; a full parse of the exposition would hold the event loop for 10 ms.
_KV_USAGE = re.compile(r"^vllm:(?:kv|gpu)_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def kv_usage_in_metrics(text: str) -> float | None:
    """Engine-told KV usage, 0 to 1: the mean over data-parallel engines; None where not told."""
    values = [float(value) for value in _KV_USAGE.findall(text)]
    return sum(values) / len(values) if values else None


def kv_capacity_in_metrics(text: str) -> int | None:
    """Engine-told KV capacity in tokens: its own figure, or blocks × block size."""
    match = _CACHE_CONFIG.search(text)
    if match is None:
        return None
    labels = dict(_LABEL.findall(match.group(1)))
    for product in (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")):
        factors = [labels.get(name, "") for name in product]
        if all(factor.isdigit() and factor != "0" for factor in factors):
            capacity = 1
            for factor in factors:
                capacity *= int(factor)
            return capacity
    return None


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
            # False: plain HTTP. True would load the authorities of the world, which takes 40 ms.
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
            response = await client.get("/health")
            problem = "" if response.is_success else f"/health answered {response.status_code}"
        except httpx.HTTPError as error:
            problem = f"/health: {type(error).__name__}: {error}".rstrip(": ")
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
            models = await client.get("/v1/models")
            if models.is_success:
                self._read_models(instance, models.json())
            elif not instance.models:
                _log.warning("instance %s: /v1/models answered %d", instance.id, models.status_code)
            metrics = await client.get("/metrics")
            if metrics.is_success:
                instance.engine_kv_usage = kv_usage_in_metrics(metrics.text)
                instance.engine_kv_capacity_tokens = (
                    kv_capacity_in_metrics(metrics.text) or instance.engine_kv_capacity_tokens
                )
        except (httpx.HTTPError, ValueError) as error:
            _log.debug("instance %s: scrape failed: %s", instance.id, error)
        self._fleet.publish(instance)

    def _read_models(self, instance: Instance, document: Any) -> None:
        cards = [card for card in document.get("data", []) if isinstance(card.get("id"), str)]
        if not instance.config.models:
            instance.models = frozenset(card["id"] for card in cards)
        lengths = [
            card["max_model_len"]
            for card in cards
            if isinstance(card.get("max_model_len"), int) and card["id"] in instance.models
        ]
        if lengths:
            instance.max_model_len = max(lengths)
