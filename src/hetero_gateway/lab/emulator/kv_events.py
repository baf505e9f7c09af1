"""An emulated instance publishes events of its prefix cache as vLLM does: ``--kv-events-config``.

After each step the changes of the cache are published over ZMQ, in one message
(``engines/vllm/kv_events`` has the format), as maps; late listeners can request the latest messages
again. One difference: token ids are zeros. Needs pyzmq.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.emulator.event_settings import KVEventsConfig
from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS
from hetero_gateway.sim import block_cache
from hetero_gateway.sim.engine import Engine

_END = (-1).to_bytes(8, "big", signed=True)
# Limit of requested blocks that are not cached (yet), per block of the cache.
_MOST_KNOWN_SHARE = 8


class WatchedKeys(list[int]):
    """The keys of an engine's blocks, with the changes since the last look."""

    def __init__(self, keys: Sequence[int]) -> None:
        super().__init__(keys)
        self.counts: dict[int, int] = {}
        self.changes: list[tuple[int, bool]] = []

    def __setitem__(self, at: Any, key: Any) -> None:
        before, counts = self[at], self.counts
        super().__setitem__(at, key)
        if before:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
            self.changes.append((before, False))
        if key:
            counts[key] = counts.get(key, 0) + 1
            self.changes.append((key, True))


class KVEventPublisher:
    """Publishes one engine's cache events. ``open`` needs a running event loop.

    Args:
        config: with the addresses of rank 0; those of the others follow.
        engine, rank: the source.
    """

    def __init__(self, config: KVEventsConfig, engine: Engine[Any], rank: int = 0) -> None:
        self._config = config
        self._rank = rank
        self._keys = watch(engine)
        self._most_known = _MOST_KNOWN_SHARE * engine.total_blocks
        # For each requested key: the one before it, and the request's session.
        self._known: dict[int, tuple[int | None, str | None]] = {}
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._sockets: list[Any] = []
        self._replaying: asyncio.Task[None] | None = None
        self._ports: list[int] = []
        # For tests: messages that are published to nobody.
        self.drops = False

    def asked(self, keys: Sequence[int], session: str | None) -> None:
        """A request's blocks will have these keys."""
        known, before = self._known, None
        for key in keys:
            known[key] = before, session
            before = key
        if len(known) > self._most_known:
            counts = self._keys.counts
            latest = set(keys)
            self._known = {k: v for k, v in known.items() if k in counts or k in latest}

    async def open(self) -> None:
        import zmq
        import zmq.asyncio

        self._context = zmq.asyncio.Context()
        published: Any = zmq.Context.shadow(self._context).socket(zmq.PUB)
        self._sockets.append(published)
        self._ports.append(_bind(published, self._config.endpoint, self._rank))
        if self._config.replay_endpoint is not None:
            replays = self._context.socket(zmq.ROUTER)
            self._sockets.append(replays)
            self._ports.append(_bind(replays, self._config.replay_endpoint, self._rank))
            self._replaying = asyncio.create_task(self._replay(replays))

    def close(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.destroy(linger=0)

    def sources(self) -> dict[str, Any]:
        """The answer of /kv_event_sources."""
        told = self._config.model_dump()
        for name, port in zip(("endpoint", "replay_endpoint"), self._ports, strict=False):
            told[name] = f"{told[name].rpartition(':')[0]}:{port}"
        return {str(self._rank): told}

    def cleared(self) -> None:
        """The cache was reset."""
        self._keys.changes = []
        self._publish([{"type": "AllBlocksCleared"}])

    def after_step(self) -> None:
        """Publish the step's changes."""
        changes, self._keys.changes = self._keys.changes, []
        if not changes:
            return
        events: list[dict[str, Any]] = []
        last: int | None = None
        for key, is_there in changes:
            if not is_there:
                if key not in self._keys.counts:
                    self._known.pop(key, None)
                gone = {"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU"}
                events.append({**gone, "group_idx": 0})
                last = None
                continue
            parent, session = self._known.get(key, (None, None))
            if last is not None and parent == last and events[-1]["session_id"] == session:
                events[-1]["block_hashes"].append(key)
                events[-1]["token_ids"] += [0] * BLOCK_TOKENS
            else:
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [key],
                        "parent_block_hash": parent,
                        "token_ids": [0] * BLOCK_TOKENS,
                        "block_size": BLOCK_TOKENS,
                        "lora_id": None,
                        "medium": "GPU",
                        "lora_name": None,
                        "group_idx": 0,
                        "kv_cache_spec_kind": "full_attention",
                        "session_id": session,
                    }
                )
            last = key
        self._publish(events)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, self._rank])
        self._kept.append((self._number, payload))
        if not self.drops and self._sockets:
            self._sockets[0].send_multipart(
                [self._config.topic.encode(), self._number.to_bytes(8, "big"), payload]
            )
        self._number += 1

    async def _replay(self, socket: Any) -> None:
        topic = self._config.topic.encode()
        while True:
            client, *frames = await socket.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != 8:
                continue
            first = int.from_bytes(frames[1], "big")
            for number, payload in list(self._kept):
                if number >= first:
                    head = [client, b"", topic, number.to_bytes(8, "big")]
                    await socket.send_multipart([*head, payload])
            await socket.send_multipart([client, b"", topic, _END, b""])


def watch(engine: Engine[Any]) -> WatchedKeys:
    """Record the changes of an engine's prefix cache."""
    assert engine._c is not None
    rows = engine._c[0]
    keys = WatchedKeys(rows[block_cache.KEY])
    rows[block_cache.KEY] = keys
    return keys


def _bind(socket: Any, endpoint: str, rank: int) -> int:
    """Returns the port. Raises ConfigError."""
    import zmq

    host, _, port = endpoint.rpartition(":")
    try:
        socket.bind(f"{host}:{int(port) + rank if int(port) else '*'}")
    except zmq.ZMQError as error:
        raise ConfigError(f"--kv-events-config: {endpoint}: {error}") from error
    return int(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").rpartition(b":")[2])
