"""An engine's reports about its prefix cache: vLLM's KV events, and where it publishes them.

An engine that was started with ``--kv-events-config`` publishes messages over ZMQ: a topic, a
number (8 bytes, big-endian, from 0 at each start) and a payload, MessagePack:

    [time, [event, …], data_parallel_rank]

An event is a map with its kind as ``type``; in older versions an array that begins with it.
Both are read here; unknown parts are skipped, and so are tokens, which are never looked at.

    BlockStored       blocks are full and cached from now on: their hashes, and the hash of the one
                      before the first; ``session_id``, if the request had one
    BlockRemoved      they are no longer cached
    AllBlocksCleared  the cache is empty

Hashes are numbers of 64 bits, or in some versions bytes, of which the last eight count. Models with
several kinds of attention have a group of blocks for each; the first group, or the one marked as
full attention, counts for all.

A payload comes from an instance, which may be broken or hostile: inconsistent data raises
``KvEventError``. Pure.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

# A step that fills thousands of blocks, with their tokens. Larger ones are refused by their length
# prefix, before any objects are made.
MOST_PAYLOAD_BYTES = 1 << 22
_MOST_EVENTS = 1 << 14
_MOST_HASHES = 1 << 14
_MOST_HASHES_AT_ONCE = 1 << 16
_MOST_FIELDS = 64
_MOST_SESSION = 256
_MOST_BLOCK_TOKENS = 1 << 16
_MOST_RANKS = 1024
_HASH_BYTES = 8
_MASK = 2**64 - 1
FULL_ATTENTION = "full_attention"
# The medium of blocks that can be used directly.
GPU = "GPU"

_FIRST_ARRAYS = (range(0x90, 0xA0), range(0xDC, 0xDE))
_HOST = re.compile(r"[A-Za-z0-9.:_*\[\]-]{1,255}")


class KvEventError(ValueError):
    """Not a message of an engine, or an inconsistent one."""


class BlockStored(NamedTuple):
    """Args:
    hashes: of the blocks, in the order of the text.
    parent: hash of the block before them; None: they begin the text.
    block_tokens: tokens of each.
    session: the request's ``session_id``; "": it had none.
    medium: where they are; see ``GPU``.
    """

    hashes: tuple[int, ...]
    parent: int | None
    block_tokens: int
    session: str = ""
    medium: str = GPU


class BlockRemoved(NamedTuple):
    """Args:
    hashes: of removed blocks.
    medium: where they were.
    """

    hashes: tuple[int, ...]
    medium: str = GPU


class AllBlocksCleared(NamedTuple):
    """The cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEvents(NamedTuple):
    """One message. ``rank``: the data-parallel rank it is about. ``at_s``: when it was written, by
    the engine's clock.
    """

    events: list[KvEvent]
    rank: int = 0
    at_s: float = 0.0


_Hashes = Annotated[list[int | bytes], msgspec.Meta(max_length=_MOST_HASHES)]


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Hashes
    block_size: int
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    session_id: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: Any = None
    medium: str | None = None

    session_id: None = None
    group_idx: None = None
    kv_cache_spec_kind: None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: _Hashes
    medium: str | None = None

    group_idx: None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_EVENTS)]
    data_parallel_rank: int | None = None


_batch = msgspec.msgpack.Decoder(_Batch).decode
_of_map = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode
_of_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_Fields = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_FIELDS)]
_kind_of_array = msgspec.msgpack.Decoder(_Fields).decode
_kind = msgspec.msgpack.Decoder(str).decode


class _Kind(msgspec.Struct, gc=False):
    type: str


_kind_of_map = msgspec.msgpack.Decoder(_Kind).decode
_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def read_kv_events(payload: bytes) -> KvEvents:
    """The events of one message, without those of unknown kinds. Raises KvEventError."""
    if len(payload) > MOST_PAYLOAD_BYTES:
        raise KvEventError(f"a message of {len(payload)} bytes")
    try:
        batch = _batch(payload)
        rank = batch.data_parallel_rank or 0
        if not 0 <= rank < _MOST_RANKS:
            raise KvEventError(f"a rank {rank}")
        events, hashes = [], 0
        for raw in batch.events:
            event = _read(raw)
            if event is None:
                continue
            if not isinstance(event, AllBlocksCleared):
                hashes += len(event.hashes)
            if hashes > _MOST_HASHES_AT_ONCE:
                raise KvEventError("too many blocks")
            events.append(event)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KvEventError(f"not a message of KV events: {error}") from error
    return KvEvents(events, rank, batch.ts)


def _read(raw: msgspec.Raw) -> KvEvent | None:
    data = bytes(raw)
    first = data[0]
    is_array = any(first in each for each in _FIRST_ARRAYS)
    try:
        told = _of_array(data) if is_array else _of_map(data)
    except msgspec.ValidationError:
        if (_kind(_kind_of_array(data)[0]) if is_array else _kind_of_map(data).type) in _KNOWN:
            raise
        return None
    if isinstance(told, _Cleared | _ClearedArray):
        return AllBlocksCleared()
    hashes = told.block_hashes
    if told.group_idx and getattr(told, "kv_cache_spec_kind", None) != FULL_ATTENTION:
        return None
    medium = told.medium or GPU
    if isinstance(told, _Removed | _RemovedArray):
        return BlockRemoved(tuple(map(_hash, hashes)), medium)
    if not 0 < told.block_size <= _MOST_BLOCK_TOKENS:
        raise KvEventError("a block of no length")
    parent = told.parent_block_hash
    session = told.session_id or ""
    return BlockStored(
        tuple(map(_hash, hashes)),
        None if parent is None else _hash(parent),
        told.block_size,
        session if len(session) <= _MOST_SESSION else "",
        medium,
    )


def _hash(told: int | bytes) -> int:
    if isinstance(told, bytes):
        return int.from_bytes(told[-_HASH_BYTES:], "big")
    return told & _MASK


class KvEventSource(NamedTuple):
    """Where one rank of an engine publishes, by its own statement.

    Args:
        rank: of data parallelism.
        port: on the engine's host.
        replay_port: where missed messages can be requested; None: nowhere, or only on the
            engine's own host.
        topic: of its messages.
        loopback_replay: ``replay_port`` is on the engine's own loopback address.
    """

    rank: int
    port: int
    replay_port: int | None
    topic: str
    loopback_replay: bool = False


class _Config(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None


_sources = msgspec.json.Decoder(dict[str, _Config]).decode


def read_kv_event_sources(body: bytes) -> list[KvEventSource]:
    """The sources that ``GET /kv_event_sources`` lists and a reader can connect to, by rank.

    An engine binds an address with ``*``, ``0.0.0.0`` or ``::``; to any other it connects
    itself, so nobody can read there. Only the port of an address counts: an instance must not
    be able to send us to a host of its choice.

    Raises KvEventError: that is not such an answer.
    """
    try:
        told = _sources(body)
        ranks = {int(rank): config for rank, config in told.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KvEventError(f"not a list of KV event sources: {error}") from error
    sources = []
    for rank, config in sorted(ranks.items()):
        if not 0 <= rank < _MOST_RANKS:
            raise KvEventError(f"a rank {rank}")
        if not config.enable_kv_cache_events or config.publisher not in (None, "zmq"):
            continue
        bound, _, port = _address(config.endpoint)
        if port is None or not bound:
            continue
        anywhere, loopback, replay_port = _address(config.replay_endpoint)
        usable = anywhere or loopback
        topic = config.topic or ""
        sources.append(
            KvEventSource(rank, port, replay_port if usable else None, topic[:256], loopback)
        )
    return sources


def _address(endpoint: str | None) -> tuple[bool, bool, int | None]:
    """(bound on all addresses, on loopback, the port) of a ZMQ address."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return False, False, None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not _HOST.fullmatch(host) or not port.isascii() or not port.isdecimal():
        return False, False, None
    number = int(port[:6])
    if not 0 < number < 2**16:
        return False, False, None
    host = host.strip("[]")
    return host in ("*", "0.0.0.0", "::"), host in ("127.0.0.1", "localhost", "::1"), number


def session_field(key: int) -> bytes:
    """The addition to a body that makes the events of its blocks name its prompt.

    Args:
        key: of the prompt's longest prefix (``core/prefixes``).
    """
    return b'"session_id":"%b"' % session_of(key).encode()


def session_of(key: int) -> str:
    return f"hetero-{key:015x}"


def host_of(base_url: str) -> str:
    """The host of an instance's address, in ZMQ's notation."""
    host = urlsplit(base_url).hostname or "127.0.0.1"
    return f"[{host}]" if ":" in host else host
