"""What engines tell of their caches and gateways of their placements, spoilt, against the index.

What must hold: it is read or refused in words; memory is bounded; what is known of another instance
stays as it is; and what is told right afterwards counts again.
"""

import random
import tracemalloc

import msgspec
import numpy as np

from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.request import keys_of
from hetero_gateway.core.sharing.placements import PlacementExchange, mark_of
from hetero_gateway.core.types import InstanceId, InstanceSpec
from hetero_gateway.engines.vllm.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KvEventError,
    read_kv_event_sources,
    read_kv_events,
)
from tests.core.sharing.test_placements import Gateway, text
from tests.fuzz.fuzzing import Findings
from tests.fuzz.mutation import mutated_bytes

_MOST_MEMORY_BYTES = 64 * 2**20
_MOST_BLOCKS = 500
_HASHES = (0, 1, -1, 2**63, 2**64 - 1, 7, 8, 9)
_ODD = (None, True, "", "x" * 300, [], {}, 1.5, float("nan"), b"", b"\xff" * 40, [[]] * 50)
_SOURCES = (
    b'{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    b'"replay_endpoint":"tcp://127.0.0.1:5558","buffer_steps":10000,"topic":"kv"}}'
)


def _event(rng: random.Random) -> object:
    hashes = [rng.choice(_HASHES) if rng.random() < 0.3 else rng.getrandbits(64)]
    hashes *= rng.choice((0, 1, 1, 3, 200))
    kind = rng.choice(("BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"))
    parent = rng.choice((None, *_HASHES))
    if rng.random() < 0.3:
        return [kind, hashes, parent, [1] * 16, 16, None, "GPU"]
    event: dict[str, object] = {
        "type": kind, "block_hashes": hashes, "parent_block_hash": parent, "block_size": 16,
        "medium": rng.choice(("GPU", "CPU", None)), "session_id": rng.choice(("a", "b", None)),
        "group_idx": rng.choice((0, 0, 1, None)), "token_ids": [1] * 16,
    }  # fmt: skip
    if rng.random() < 0.2:
        event[rng.choice(list(event))] = rng.choice(_ODD)
    return event


def _payload(rng: random.Random) -> bytes:
    events = [_event(rng) for _ in range(rng.choice((0, 1, 1, 5)))]
    data = msgspec.msgpack.encode([1.0, events, rng.choice((0, 1, None, -1, 2**40))])
    return mutated_bytes(rng, data) if rng.random() < 0.5 else data


async def fuzz_cache_news(seed: int, count: int) -> Findings:
    """``count`` payloads, lists of sources and entries of other gateways."""
    findings, rng = Findings(), random.Random(seed)
    caches = PrefixCaches()
    for slot, name in enumerate(("one", "other")):
        caches.join(InstanceSpec(InstanceId(name), frozenset({"m"})), slot)
    blocks = EngineBlocks(caches.index, InstanceId("one"), _MOST_BLOCKS)
    caches.listen(InstanceId("one"), blocks)
    keys = keys_of([np.random.default_rng(0).bytes(4096)], 7)
    caches.index.insert(InstanceId("other"), keys)
    mine = caches.index.held(InstanceId("other"))
    one, other = Gateway(1), Gateway(2)
    one.send(text(1))
    (entry,) = one.placements.say(0.0)
    tracemalloc.start()
    while findings.sent < count:
        findings.sent += 1
        data = _payload(rng)
        try:
            for event in read_kv_events(data).events:
                if isinstance(event, AllBlocksCleared):
                    blocks.cleared()
                elif isinstance(event, BlockStored):
                    blocks.stored(event.hashes, event.parent, event.block_tokens, event.session)
                else:
                    blocks.removed(event.hashes)
            blocks.ended(rng.choice("abc"), keys, rng.choice((0, 1, 1024, 10**9)), 64.0)
            read_kv_event_sources(mutated_bytes(rng, _SOURCES))
            findings.statuses[200] += 1
        except KvEventError:
            findings.statuses[400] += 1
        except Exception as error:
            findings.add(f"{type(error).__name__}: {error}", data)
        _hear(rng, findings, other.placements, entry)
        if len(blocks) > _MOST_BLOCKS or blocks.bound_keys > len(keys.hashes):
            findings.add("more blocks than are kept", data)
        if caches.index.held(InstanceId("other")) != mine:
            findings.add("another instance's part has changed", data)
    blocks.cleared()
    blocks.stored(range(1, 65), None, 16, "good")
    blocks.ended("good", keys, 1024)
    if caches.index.levels(keys) != [(0b11, 4096)]:
        findings.add("what is told right does not count", b"")
    other.placements.hear(entry, 1e9)
    if other.matched(text(1)) != {"a": 4096}:
        findings.add("what is said right does not count", entry)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if peak_bytes > _MOST_MEMORY_BYTES:
        findings.add(f"{peak_bytes / 1e6:.0f} MB of memory", b"")
    return findings


def _hear(
    rng: random.Random, findings: Findings, placements: PlacementExchange, entry: bytes
) -> None:
    data = mutated_bytes(rng, entry)
    try:
        assert placements.mark == mark_of(b"a secret of all")
        placements.hear(data, float(findings.sent))
        placements.recall([data])
    except Exception as error:
        findings.add(f"{type(error).__name__}: {error}", data)
