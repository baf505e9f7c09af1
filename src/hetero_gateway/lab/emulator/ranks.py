"""Several data-parallel ranks behind one address, as with vLLM's ``--data-parallel-size``.

Each has its own engine, cache and series (label ``engine``), and publishes its own cache events. A
request goes to the rank named in its ``X-data-parallel-rank``, or else to the least loaded one.
Questions to the server concern them all.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hetero_gateway.engines.vllm import paths
from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.emulator.app import EmulatedVLLM, Receive, Scope, header_of
from hetero_gateway.lab.emulator.errors import refused
from hetero_gateway.lab.emulator.reply import Send
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.emulator.text import Json

_RANK = b"x-data-parallel-rank"


class EmulatedRanks(EmulatedVLLM):
    """The first rank, and the address of all of them.

    Args:
        settings: of each.
        size: number of ranks.

    Raises:
        ConfigError: they cannot be emulated together.
    """

    def __init__(self, settings: EmulatorSettings, size: int) -> None:
        if settings.kv_transfer is not None:
            raise ConfigError("--data-parallel-size: not with --kv-transfer-config")
        super().__init__(settings)
        self.ranks: list[EmulatedVLLM] = [self]
        for rank in range(1, size):
            other = EmulatedVLLM(replace(settings, rank=rank))
            other._replies, other._adapters = self._replies, self._adapters
            other.on_death = self.die
            self.ranks.append(other)
        self._merged = CollectorRegistry(auto_describe=False)
        self._merged.register(_Merged(self.ranks))
        self._pages[paths.METRICS] = lambda: generate_latest(self._merged)
        self._pages[paths.KV_EVENT_SOURCES] = self._sources

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(super()._running())
            for rank in self.ranks[1:]:
                await stack.enter_async_context(rank._running())
            yield

    def abort_all(self) -> None:
        for rank in self.ranks:
            rank.loop.abort_all()

    def reset_prefix_cache(self) -> bool:
        resets = [super().reset_prefix_cache()]
        resets += [rank.reset_prefix_cache() for rank in self.ranks[1:]]
        return all(resets)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        rank = self._asked_for(scope)
        if rank is None:
            engines = [each.loop.engine for each in self.ranks]
            loads = [engine.num_running + engine.num_waiting for engine in engines]
            rank = loads.index(min(loads))
        if rank:
            await self.ranks[rank]._generate(scope, receive, send)
        else:
            await super()._generate(scope, receive, send)

    def _asked_for(self, scope: Scope) -> int | None:
        """Raises RefusedRequest: there is no such rank."""
        told = header_of(scope, _RANK)
        try:
            rank = None if told is None else int(told)
        except ValueError:
            return None
        if rank is not None and not 0 <= rank < len(self.ranks):
            raise refused("no_rank", rank=rank, size=len(self.ranks))
        return rank

    def _sources(self) -> Json:
        told: dict[str, Any] = {}
        for rank in self.ranks:
            told |= {} if rank.events is None else rank.events.sources()
        return told

    def _slow_down(self, body: Json) -> Json:
        answer = super()._slow_down(body)
        for rank in self.ranks[1:]:
            rank.loop.engine.slowdown = self.loop.engine.slowdown
        return answer


class _Merged(Collector):
    """The series of all ranks; those of the server are the first one's."""

    def __init__(self, ranks: list[EmulatedVLLM]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        for first, *others in zip(*(r.loop.metrics.collect() for r in self._ranks), strict=True):
            if "engine" in first.samples[0].labels:
                for other in others:
                    first.samples += other.samples
            yield first
