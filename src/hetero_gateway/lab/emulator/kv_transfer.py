"""One emulated instance computes a prompt, another one fetches its blocks: NIXL's pull and push.

As in vLLM 0.32 with nixl 1.5.1: the fields of requests and answers (``engines.vllm.kv_transfer``),
blocks pinned until they are fetched or their lease ends, cached blocks not fetched again, the
refusal of another model, dtype, backend or version, and the failures. The blocks go over a socket
between the two, as their keys, so that a dead instance really is dead; a transfer takes ``start_s``
and its bytes over the bandwidth, one at a time in each direction.

Two lines of JSON each way. The fetching side sends its request and identity, and gets the keys of
the blocks' current contents; after the transfer time it confirms that it has them.

Different from vLLM: a transfer moves whole blocks and the rest of the prompt is computed (15 tokens
at most), for several prompts or choices the first one's blocks are fetched, and a decode instance
takes its blocks as soon as they are free, ahead of requests that wait for their prefill.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero_gateway.core.histogram import Histogram
from hetero_gateway.lab.emulator.loop import EngineLoop
from hetero_gateway.lab.emulator.reply import EmulatedReply, ReplyChoice
from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS, EmulatorSettings
from hetero_gateway.lab.emulator.text import Json
from hetero_gateway.lab.emulator.transfer_settings import KVTransferSettings
from hetero_gateway.sim import kernel
from hetero_gateway.sim.pinned_blocks import PinnedBlocks, keys_in, pin

_MOST_LINE_BYTES = 1 << 24
# After this time a peer that does not answer counts as dead.
_HANDSHAKE_TIMEOUT_S = 5.0
_MOST_EXPIRED = 4096
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class _Pin:
    """A prefill's blocks for another instance."""

    __slots__ = ("blocks", "timer")

    def __init__(self, blocks: PinnedBlocks) -> None:
        self.blocks = blocks
        self.timer: asyncio.TimerHandle | None = None


class _Failed(Exception):
    """A transfer that failed."""


class KVTransfer(Collector):
    """The transfers of one instance, in both directions.

    Args:
        version: of the engine; others refuse a different one.
        spawn: starts tasks beside the requests.
        die: called where a real engine crashes, on a request that nobody should send.
    """

    def __init__(
        self,
        settings: EmulatorSettings,
        wanted: KVTransferSettings,
        loop: EngineLoop,
        version: str,
        die: Callable[[], None],
    ) -> None:
        self._wanted = wanted
        self._config = wanted.config
        self._extra = wanted.config.kv_connector_extra_config
        self._engine = loop.engine
        self._loop = loop
        self._die = die
        self._scale = settings.time_scale
        self._spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        facts = (version, settings.profile.model, settings.dtype, settings.attention_backend)
        told = "\0".join((*facts, self._config.mode, str(wanted.bytes_per_token)))
        self._compatibility = hashlib.sha256(told.encode()).hexdigest()
        digest = hashlib.blake2b(f"{told}\0{id(self)}".encode(), digest_size=16)
        self.engine_id = self._config.engine_id or digest.hexdigest()
        self.port = wanted.port
        self._numbers = itertools.count()
        self._pins: dict[str, _Pin] = {}
        self._expired: dict[str, None] = {}
        self._sending, self._receiving = asyncio.Lock(), asyncio.Lock()
        # Fetched, and not admitted yet: the blocks of each, and how many were there before.
        self._fetched: dict[ReplyChoice, tuple[PinnedBlocks, int]] = {}
        self._tasks: dict[EmulatedReply, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()
        loop.on_steps.append(self._after_step)
        loop.metrics.add(self)
        self.external_tokens = 0
        self.failed = self.expired = self.late = 0
        self._bytes = Histogram(tuple(float(1 << power) for power in range(20, 36, 2)))
        self._time_s = Histogram((0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0))
        self._blocks = Histogram((10.0, 30.0, 50.0, 100.0, 250.0, 500.0, 1000.0))

    async def open(self, spawn: Callable[..., asyncio.Task[None]]) -> None:
        """Listen for fetching instances."""
        self._spawn = spawn
        self._server = await asyncio.start_server(
            self._serve, self._wanted.host, self._wanted.port, limit=_MOST_LINE_BYTES
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """End all transfers in both directions."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.close()
        for task in list(self._tasks.values()):
            task.cancel()
        for each in self._pins.values():
            if each.timer is not None:
                each.timer.cancel()

    # -- requests

    def submit(self, reply: EmulatedReply, parameters: Json) -> None:
        """A request that has ``kv_transfer_params``."""
        if not isinstance(parameters, dict):
            parameters = {}
        if parameters.get("do_remote_decode"):
            reply.on_end = self._pin
        self._loop.open(reply)
        if parameters.get("do_remote_prefill"):
            self._begin(reply, parameters)
        else:
            self._loop.enqueue(reply)

    def _begin(self, reply: EmulatedReply, parameters: dict[str, Any]) -> None:
        """Fetch the blocks of a reply's prompt, then give it to the engine."""
        groups = parameters.get("remote_block_ids")
        groups = [g for g in groups if isinstance(g, list)] if isinstance(groups, list) else []
        if groups and not all(name in parameters for name in _NEEDED):
            # vLLM waits for blocks that it has requested from nobody.
            reply.on_leave = self._die
            return
        if max(map(len, groups), default=0) * BLOCK_TOKENS < reply.choices[0].prompt_tokens:
            self._die()
            return
        self._count_waiting(1)
        reply.on_leave = lambda: self._leave(reply, parameters)
        self._tasks[reply] = self._spawn(self._fetch(reply, parameters))

    def _count_waiting(self, count: int) -> None:
        self._loop.metrics.fetching += count

    def refuse(self, parameters: Json) -> None:
        """A decode request was refused: tell the prefill instance that nobody will come."""
        wanted = isinstance(parameters, dict) and parameters.get("do_remote_prefill")
        if wanted and all(name in parameters for name in _NEEDED):
            self._spawn(self._tell_freed(parameters))

    def _leave(self, reply: EmulatedReply, parameters: dict[str, Any]) -> None:
        task = self._tasks.pop(reply, None)
        if task is not None:
            task.cancel()
            self._spawn(self._tell_freed(parameters))

    # -- the prefill instance

    def _pin(self, choice: ReplyChoice) -> None:
        """A prefill has ended: its blocks have just become free, and are pinned."""
        reply = choice.reply
        if choice.index:
            return  # the answer can name only one
        blocks = pin(self._engine, choice.prompt_keys, choice.prompt_tokens)
        if blocks is None:
            return
        # A client may repeat its own id.
        request_id = f"{reply.id}-0-{next(self._numbers):08x}"
        pinned = self._pins[request_id] = _Pin(blocks)
        self._arm(request_id, pinned)
        reply.handed_over = msgspec.json.encode(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [blocks.blocks],
                "remote_engine_id": self.engine_id,
                "remote_request_id": request_id,
                "remote_host": self._wanted.host,
                "remote_port": self.port,
                "tp_size": 1,
                "dcp_size": 1,
                "pp_size": 1,
                "remote_num_tokens": choice.prompt_tokens,
                "remote_blocks_expiry_time": None,
                "transfer_mode": self._config.mode,
                "remote_prefill_cached_tokens": choice.cached_tokens,
            }
        )

    def _arm(self, request_id: str, pinned: _Pin) -> None:
        lease_s = self._extra.kv_lease_duration / self._scale
        pinned.timer = asyncio.get_running_loop().call_later(lease_s, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        self.expired += 1
        self._unpin(request_id)
        self._expired[request_id] = None
        if len(self._expired) > _MOST_EXPIRED:
            del self._expired[next(iter(self._expired))]

    def _unpin(self, request_id: str) -> None:
        pinned = self._pins.pop(request_id, None)
        if pinned is None:
            if request_id in self._expired:
                self.late += 1
            return
        if pinned.timer is not None:
            pinned.timer.cancel()
        pinned.blocks.free()
        self._freed.set()
        self._loop.wake()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One instance fetches, or says that it will not."""
        self._connections.add(writer)
        try:
            await self._hand_over(reader, writer)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it died, or is a stranger
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _hand_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await _read(reader)
        if self._extra.enforce_handshake_compat and asked["compatibility"] != self._compatibility:
            writer.write(_line({"error": "NIXL compatibility hash mismatch"}))
            return
        if asked["engine_id"] != self.engine_id:
            writer.write(_line({"error": "there is no such engine here"}))
            return
        request_id = str(asked["request_id"])
        pinned = self._pins.get(request_id)
        if pinned is not None and pinned.timer is not None:
            pinned.timer.cancel()  # the fetching side renews the lease
        try:
            if not asked["freed"]:
                keys = keys_in(self._engine, [int(block) for block in asked["block_ids"]])
                async with self._sending:
                    writer.write(_line({"keys": keys}))
                    lease_s = self._extra.kv_lease_duration / self._scale
                    if not (await asyncio.wait_for(_read(reader), lease_s))["fetched"]:
                        return
            self._unpin(request_id)
        finally:
            if pinned is not None and self._pins.get(request_id) is pinned:
                self._arm(request_id, pinned)

    # -- the decode instance

    async def _fetch(self, reply: EmulatedReply, parameters: dict[str, Any]) -> None:
        choice = reply.choices[0]
        keys = choice.prompt_keys
        blocks: PinnedBlocks | None = None
        try:
            while (blocks := self._take_blocks(keys, choice)) is None:
                self._freed.clear()
                await self._freed.wait()
            there = blocks.hits
            remote = max(parameters["remote_block_ids"], key=len)
            right = await self._pull(parameters, remote[there : len(blocks.blocks)], keys[there:])
        except (_Failed, OSError, ValueError, TypeError, KeyError):
            self._give_up(reply, blocks)
        except asyncio.CancelledError:
            self._count_waiting(-1)
            if blocks is not None:
                blocks.free()
            raise
        else:
            self._submit(reply, keys, blocks, parameters, right)
        finally:
            self._tasks.pop(reply, None)

    def _take_blocks(self, keys: list[int], choice: ReplyChoice) -> PinnedBlocks | None:
        """Room for the prompt, and for fetched ones that will be admitted."""
        spare = int(0.01 * self._engine.total_blocks) + len(self._fetched)
        if not (self._engine.num_running or self._fetched):
            spare = 0
        return pin(self._engine, keys, choice.prompt_tokens, spare)

    async def _pull(
        self, parameters: dict[str, Any], block_ids: list[int], keys: list[int]
    ) -> bool:
        """Fetch these blocks; returns whether they have the right contents. Raises _Failed and
        others."""
        async with self._receiving:
            reader, writer = await _connect(parameters)
            try:
                writer.write(self._asking(parameters, block_ids=block_ids, freed=False))
                lease_s = self._extra.kv_lease_duration / self._scale
                answer = await asyncio.wait_for(_read(reader), lease_s)
                if "error" in answer:
                    raise _Failed(answer["error"])
                wanted = self._wanted
                moved = len(block_ids) * BLOCK_TOKENS * wanted.bytes_per_token
                time_s = wanted.start_s + moved * 8 / (wanted.gbit_per_s * 1e9)
                if block_ids:
                    await self._carry(reader, time_s / self._scale)
                    self._bytes.observe(moved)
                    self._time_s.observe(time_s / self._scale)
                    self._blocks.observe(len(block_ids))
                writer.write(_line({"fetched": True}))
            finally:
                writer.close()
        told = answer["keys"]
        # A block that is not full has no key; its contents are unknown.
        return bool(told[: len(keys)] == keys)

    async def _carry(self, reader: asyncio.StreamReader, time_s: float) -> None:
        """Wait for the time of a transfer. Raises _Failed: the other side died meanwhile."""
        try:
            async with asyncio.timeout(time_s):
                await reader.read(1)
        except TimeoutError:
            return
        raise _Failed("the prefill instance has gone")

    def _asking(self, parameters: dict[str, Any], **more: Any) -> bytes:
        asked = {
            "compatibility": self._compatibility,
            "engine_id": parameters["remote_engine_id"],
            "request_id": parameters["remote_request_id"],
        }
        return _line(asked | more)

    async def _tell_freed(self, parameters: dict[str, Any]) -> None:
        try:
            _, writer = await _connect(parameters)
            writer.write(self._asking(parameters, freed=True))
            writer.close()
        except (OSError, ValueError, TypeError, TimeoutError):
            pass  # an absent instance pins nothing

    def _give_up(self, reply: EmulatedReply, blocks: PinnedBlocks | None) -> None:
        self.failed += 1
        self._count_waiting(-1)
        if blocks is not None:
            blocks.free()
            self._freed.set()
        if self._config.kv_load_failure_policy == "recompute":
            self._loop.enqueue(reply)
        else:
            self._loop.fail(reply)

    def _submit(
        self,
        reply: EmulatedReply,
        keys: list[int],
        blocks: PinnedBlocks,
        parameters: dict[str, Any],
        right: bool,
    ) -> None:
        """The whole prompt is there: the engine continues, with the prefill's figures."""
        self._count_waiting(-1)
        choice, there = reply.choices[0], blocks.hits
        blocks.keep(keys)
        blocks.free(len(keys))
        cached = parameters.get("remote_prefill_cached_tokens")
        if isinstance(cached, int):
            reply.remote_cached_tokens = cached
        if not right:
            reply.garble()  # like an engine with another prompt's cache
        self._fetched[choice] = blocks, there * BLOCK_TOKENS
        self._loop.enqueue(reply)

    def _after_step(self) -> None:
        """Admitted sequences have their blocks themselves; and some may have become free."""
        for choice in [c for c in self._fetched if c.state != kernel.WAITING]:
            blocks, there = self._fetched.pop(choice)
            blocks.free()
            if choice.cached_tokens:
                self.external_tokens += choice.prompt_tokens - there
                self._loop.metrics.found_tokens += choice.cached_tokens - there
        self._freed.set()

    # -- metrics

    def by_source(self) -> dict[str, int]:
        """Prompt tokens by their source."""
        engine = self._engine
        local = engine.prefix_hits_total - self._loop.metrics.found_tokens
        computed = engine.prompt_tokens_total - local - self.external_tokens
        return {
            "local_compute": max(0, computed),
            "local_cache_hit": local,
            "external_kv_transfer": self.external_tokens,
        }

    def collect(self) -> Iterator[Metric]:
        labels = self._loop.metrics.labels
        counters = {
            "num_failed_transfers": (self.failed, "Number of failed NIXL KV Cache transfers."),
            "num_kv_expired_reqs": (self.expired, "Prefills that nobody fetched within the lease."),
            "num_notifications_after_expiry": (self.late, "Prefills fetched after their lease."),
        }
        for name, (count, text) in counters.items():
            family = CounterMetricFamily(f"vllm:nixl_{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), count)
            yield family
        histograms = {
            "bytes_transferred": (self._bytes, "Bytes transferred by each NIXL transfer."),
            "xfer_time_seconds": (self._time_s, "Time of each NIXL transfer in seconds."),
            "num_descriptors": (self._blocks, "Blocks moved by each NIXL transfer."),
        }
        for name, (histogram, text) in histograms.items():
            told = HistogramMetricFamily(f"vllm:nixl_{name}", text, labels=list(labels))
            told.add_metric(list(labels.values()), histogram.buckets(), histogram.sum)
            yield told
        text = "Prompt tokens by where they came from."
        names = [*labels, "source"]
        family = CounterMetricFamily("vllm:prompt_tokens_by_source", text, labels=names)
        for source, count in self.by_source().items():
            family.add_metric([*labels.values(), source], count)
        yield family


async def _connect(
    parameters: dict[str, Any],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the prefill instance. Raises OSError, ValueError, TypeError, TimeoutError: it cannot."""
    opening = asyncio.open_connection(
        str(parameters["remote_host"]), int(parameters["remote_port"]), limit=_MOST_LINE_BYTES
    )
    return await asyncio.wait_for(opening, _HANDSHAKE_TIMEOUT_S)


def _line(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document) + b"\n"


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """One line. Raises ValueError and OSError: there is none."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the other side has gone")
    document = msgspec.json.decode(line)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    return document
