"""Listens to what engines report of their prefix caches, beside the traffic.

An engine that publishes KV events is found by asking it (``GET /kv_event_sources``, once for each
start); nothing has to be configured. A task for each of its ranks then reads the events as they
come, over ZMQ, and puts them in the index (``core/prefixes/engine_blocks``). No request waits for
any of this.

    a number is missing    missed events are requested again; if they cannot be had, nothing from
                           that engine is believed any more, and its part grows from what is sent
                           there and reported from then on
    numbers restart        the engine has restarted: its cache is empty
    it was out of sight    its events are read again, from the beginning
    nothing is reported    although prompts were computed: its part is kept as placements are

Each rank has its own cache. Ranks that are places of their own are listened to separately;
otherwise what any of them has counts for the engine, and its trust learns how often that is the
rank that a request reaches.

An engine's messages are bounded and checked (``engines/vllm/kv_events``), take a fifth of a core at
most, and affect only what is believed of itself. It is listened to on its own host, whatever
address it names. Needs pyzmq, the extra ``kv-events``; without it no engine is asked.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import paths
from hetero_gateway.engines.vllm.kv_events import (
    GPU,
    MOST_PAYLOAD_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    KvEventError,
    KvEvents,
    KvEventSource,
    host_of,
    read_kv_event_sources,
    read_kv_events,
)
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.fleet.probe import Probe
from hetero_gateway.http.failures import InstanceError

if TYPE_CHECKING:
    import zmq.asyncio

_log = logging.getLogger(__name__)

_MOST_SOURCES_BYTES = 1 << 16
# Between two looks at new or restarted instances; and between two questions to one that does not
# publish, or whose publisher was lost.
_LOOK_S, _LOOK_FOR_NEW_S, _ASK_AGAIN_S = 5.0, 1.0, 60.0
_MOST_WAITING = 10_000  # messages of one engine, unread
_REPLAY_S = 5.0  # without an answer, a replay is given up
_MOST_REPLAYED = 20_000
_MOST_SHARE = 1 / 5
# Shorter pauses are not worth it, and no more messages are taken at a time.
_LEAST_S, _AT_ONCE = 0.0002, 64
_MOST_RANKS = 64
# Limit of blocks of an engine that does not report how many it has.
_ASSUMED_KV_TOKENS, _BLOCK_TOKENS, _ROOM = 400_000, 16, 4


def available() -> bool:
    """Whether events can be listened to here."""
    return importlib.util.find_spec("zmq") is not None


class KvEventReaders:
    """Listens to all instances that publish.

    Args:
        fleet: its scheduler has prefix caches.
        timeout_s: of a question to an instance.
        tasks: runs its tasks.

    Attributes:
        counts: of events by kind (``stored``, ``removed``, ``cleared``), and of problems:
            ``gaps``, those of them that were ``lost``, ``restarts``, messages ``rejected``.
    """

    def __init__(self, fleet: Fleet, timeout_s: float, tasks: asyncio.TaskGroup) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._tasks = tasks
        self._context: zmq.asyncio.Context | None = None
        self._followed: dict[InstanceId, _Followed] = {}
        self._asked: dict[InstanceId, tuple[float | None, float]] = {}  # start, when
        self._looking: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        self._looking = self._tasks.create_task(self._look_for_ever())

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        for instance_id in list(self._followed):
            await self._leave(instance_id)
        if self._context is not None:
            self._context.destroy(linger=0)

    def __iter__(self) -> Iterator[InstanceId]:
        """The instances that are listened to."""
        return iter(self._followed)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                # The background loop's boundary: a bug here must not end all listening.
                _log.exception("looking for KV events failed")
            # An instance that has never been up may be up any moment.
            new = self._fleet.instances.keys() - self._asked.keys()
            await asyncio.sleep(_LOOK_FOR_NEW_S if new else _LOOK_S)

    async def _look(self) -> None:
        instances = self._fleet.instances
        for instance_id, followed in list(self._followed.items()):
            if followed.blocks.nameless and followed.instance.names_prompts:
                followed.instance.names_prompts = False
                self._fleet.publish(followed.instance)
            if instances.get(instance_id) is not followed.instance or followed.is_over:
                await self._leave(instance_id)
            elif followed.blocks.is_doubted and followed.instance.up:
                await followed.stop()
                followed.blocks.cleared()
                followed.blocks.is_doubted = False
                followed.start(self._tasks)
        for instance_id in self._asked.keys() - instances.keys():
            del self._asked[instance_id]
        now_s = time.monotonic()
        due = []
        for instance in instances.values():
            if not instance.up or instance.id in self._followed:
                continue
            start, asked_s = self._asked.get(instance.id, (None, -_ASK_AGAIN_S))
            if now_s - asked_s >= _ASK_AGAIN_S or start != instance.engine_started_s:
                self._asked[instance.id] = instance.engine_started_s, now_s
                due.append(instance)
        if due:
            await asyncio.gather(*map(self._ask, due))

    async def _ask(self, instance: Instance) -> None:
        probe = Probe(instance, self._timeout_s, self._fleet.hops)
        try:
            answer = await probe.get(paths.KV_EVENT_SOURCES, _MOST_SOURCES_BYTES)
            if not answer.good or answer.problem:
                return  # an engine without events, or without this path
            sources = read_kv_event_sources(answer.body)
        except (InstanceError, KvEventError) as error:
            _log.debug("instance %s publishes no KV events: %s", instance.id, error)
            return
        finally:
            probe.close()
        rank = instance.config.data_parallel_rank
        if rank is not None:
            sources = sources[rank : rank + 1]
        if sources and self._fleet.instances.get(instance.id) is instance:
            self._follow(instance, sources)

    def _follow(self, instance: Instance, sources: list[KvEventSource]) -> None:
        import zmq.asyncio

        caches = self._fleet.scheduler.caches
        assert caches is not None
        if self._context is None:
            self._context = zmq.asyncio.Context()
        spec = self._fleet.scheduler.members.specs[instance.id]
        tokens = spec.kv_capacity_tokens or _ASSUMED_KV_TOKENS
        most_blocks = _ROOM * len(sources) * tokens // _BLOCK_TOKENS
        blocks = EngineBlocks(caches.index, instance.id, most_blocks)
        followed = _Followed(
            self._fleet, instance, sources[:_MOST_RANKS], blocks, self._context, self.counts
        )
        followed.start(self._tasks)
        self._followed[instance.id] = followed
        caches.listen(instance.id, blocks)
        self._fleet.publish(instance)
        instance.engine_blocks, instance.names_prompts = blocks, True
        _log.info("instance %s publishes its KV events", instance.id)

    async def _leave(self, instance_id: InstanceId) -> None:
        followed = self._followed.pop(instance_id)
        followed.instance.engine_blocks, followed.instance.names_prompts = None, False
        caches = self._fleet.scheduler.caches
        if caches is not None and instance_id in caches.index:
            caches.listen_no_more(instance_id)
        await followed.stop()


class _Followed:
    """One instance that publishes."""

    def __init__(
        self,
        fleet: Fleet,
        instance: Instance,
        sources: list[KvEventSource],
        blocks: EngineBlocks,
        context: zmq.asyncio.Context,
        counts: Counter[str],
    ) -> None:
        self._fleet = fleet
        self.instance = instance
        self._sources = sources
        self._latest_s: dict[int, float] = {}  # when each rank said what was taken last
        self._tasks: list[asyncio.Task[None]] = []
        self.blocks = blocks
        self._context = context
        self._counts = counts

    @property
    def is_over(self) -> bool:
        return any(task.done() for task in self._tasks)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Receive everything it reports, and has reported."""
        self._tasks = [tasks.create_task(self.listen(source)) for source in self._sources]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def listen(self, source: KvEventSource) -> None:
        """Until it is cancelled, or the connection cannot be made."""
        import zmq

        address = f"tcp://{host_of(self.instance.config.base_url)}:{source.port}"
        socket = self._context.socket(zmq.SUB)
        try:
            _set_up(socket)
            socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            socket.connect(address)
            await self._read(socket, source)
        except zmq.ZMQError as error:
            _log.warning("instance %s: no KV events from %s: %s", self.instance.id, address, error)
        except Exception:
            # The background loop's boundary: this instance's, and no other's.
            _log.exception("instance %s: reading KV events failed", self.instance.id)
        finally:
            socket.close(linger=0)

    async def _read(self, socket: Any, source: KvEventSource) -> None:
        # Earlier events are useful, too: chains of blocks that will get their names.
        due, _ = await self._replay(source, 0)
        while True:
            waiting = [await socket.recv_multipart()]
            begun_s = time.process_time()
            # Messages that already wait cost a fraction of one that is waited for.
            waiting += _at_once(socket)
            for frames in waiting:
                number = _number_in(frames)
                if number is None:
                    self._counts["rejected"] += 1
                    continue
                if number != due:
                    if number < due and self._was_taken(source, frames[2]):
                        continue  # it came with a replay, too
                    await self._catch_up(source, due, number)
                self._take(source, frames[2])
                due = number + 1
            took_s = time.process_time() - begun_s
            if took_s > _LEAST_S:
                await asyncio.sleep(took_s / _MOST_SHARE)

    @property
    def _is_here(self) -> bool:
        """Otherwise another instance may have its name, and its part of the index."""
        return self._fleet.instances.get(self.instance.id) is self.instance

    def _forget(self) -> None:
        if self._is_here:
            self.blocks.cleared()

    async def _catch_up(self, source: KvEventSource, due: int, number: int) -> None:
        """This number has arrived, while that one was due."""
        if number < due:
            self._counts["restarts"] += 1
            self._forget()
            due = 0
            if not number:
                return
        self._counts["gaps"] += 1
        _, whole = await self._replay(source, due, number)
        if not whole and due:
            # Missed events may be anything: nothing reported before is believed any more.
            self._counts["lost"] += 1
            self._forget()
            name = self.instance.id
            _log.info("instance %s: KV events were lost: its part of the index starts over", name)

    async def _replay(
        self, source: KvEventSource, first: int, end: int | None = None
    ) -> tuple[int, bool]:
        """Take the events from ``first`` on, up to ``end``.

        Returns the number that is due then, and whether nothing is missing.
        """
        if source.replay_port is None:
            return first, False
        import zmq

        host = host_of(self.instance.config.base_url)
        socket = self._context.socket(zmq.DEALER)
        due, whole, took_s = first, True, 0.0
        try:
            _set_up(socket)
            # If it is bound on the engine's loopback, it can only be reached from there.
            socket.connect(f"tcp://{host}:{source.replay_port}")
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            for seen in range(_MOST_REPLAYED):
                if seen % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                async with asyncio.timeout(_REPLAY_S):
                    _, *frames = await socket.recv_multipart()
                number = _number_in(frames)
                if number is None:
                    break  # -1: the end
                if number < due or (end is not None and number >= end):
                    continue
                if number > due:
                    whole = False  # older ones are kept no longer
                    if first:
                        break
                begun_s = time.process_time()
                self._take(source, frames[2])
                due = number + 1
                took_s += time.process_time() - begun_s
                if took_s > _LEAST_S:
                    await asyncio.sleep(took_s / _MOST_SHARE)
                    took_s = 0.0
        except (zmq.ZMQError, TimeoutError, ValueError, OverflowError):
            whole = False
        finally:
            socket.close(linger=0)
        return due, whole and (end is None or due == end)

    def _take(self, source: KvEventSource, payload: bytes) -> None:
        told = self._told_by(payload)
        if told is not None and self._is_here:
            self._latest_s[source.rank] = told.at_s
            self._apply(told)

    def _was_taken(self, source: KvEventSource, payload: bytes) -> bool:
        """Whether a message was taken already, by when it was written; or is invalid."""
        told = self._told_by(payload)
        return told is None or told.at_s <= self._latest_s.get(source.rank, -math.inf)

    def _told_by(self, payload: bytes) -> KvEvents | None:
        try:
            return read_kv_events(payload)
        except KvEventError as error:
            if not self._counts["rejected"]:
                _log.warning("instance %s: a KV event is ignored: %s", self.instance.id, error)
            self._counts["rejected"] += 1
            return None

    def _apply(self, told: KvEvents) -> None:
        blocks, counts = self.blocks, self._counts
        for event in told.events:
            if isinstance(event, AllBlocksCleared):
                counts["cleared"] += 1
                blocks.cleared()
            elif event.medium != GPU:
                continue  # it has to be loaded first, and may be gone by then
            elif isinstance(event, BlockRemoved):
                counts["removed"] += len(event.hashes)
                blocks.removed(event.hashes)
            else:
                counts["stored"] += len(event.hashes)
                blocks.stored(event.hashes, event.parent, event.block_tokens, event.session)


def _at_once(socket: Any) -> list[list[bytes]]:
    """What is available without waiting."""
    import zmq

    plain: Any = zmq.Socket.shadow(socket)
    found: list[list[bytes]] = []
    try:
        while len(found) < _AT_ONCE:
            found.append(plain.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return found


def _set_up(socket: Any) -> None:
    import zmq

    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_PAYLOAD_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    # A connection that was cut silently is detected, and made again.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)


def _number_in(frames: list[bytes]) -> int | None:
    """Topic, number and payload of a message; None: invalid, or an end."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    number = int.from_bytes(frames[1], "big", signed=True)
    return number if number >= 0 else None
