"""What reading KV events costs: CPU time for decoding messages of one event, and for the index.

    python benchmarks/dataplane/kv_events.py [--events 20000]

A steady state: each store is of one block behind another one, each is followed by the removal of
one, and every eighth is named by a request that ends then. Printed: µs an event, and the share of a
core that 10 000 events a second take.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetero_gateway.core.prefixes.caches import PrefixIndex
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.request import keys_of
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm.kv_events import BlockRemoved, BlockStored, read_kv_events

BLOCK_TOKENS, CHAIN, CACHED = 16, 64, 20_000


def payloads(count: int) -> list[bytes]:
    """Stores and removals in turn."""
    result = []
    for number in range(count // 2):
        first = number % CHAIN == 0
        stored = {
            "type": "BlockStored", "block_hashes": [2**60 + number],
            "parent_block_hash": None if first else 2**60 + number - 1,
            "token_ids": [40_000 + i for i in range(BLOCK_TOKENS)], "block_size": BLOCK_TOKENS,
            "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None],
            "group_idx": 0, "kv_cache_spec_kind": "full_attention",
            "session_id": f"hetero-{number // CHAIN:015x}",
        }  # fmt: skip
        gone = {
            "type": "BlockRemoved", "block_hashes": [2**60 + number - CACHED], "medium": "GPU",
            "group_idx": 0,
        }  # fmt: skip
        result += [msgspec.msgpack.encode([1.0, [event], 0]) for event in (stored, gone)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=20_000)
    args = parser.parse_args()
    index = PrefixIndex()
    index.join(InstanceId("one"), 2.0**30)
    blocks = EngineBlocks(index, InstanceId("one"), 10**6)
    messages = payloads(args.events + 2 * CACHED)
    texts = [keys_of([b"%d" % n * 600], n) for n in range(len(messages) // 2 // CHAIN + 1)]
    took_s = 0.0
    for number, message in enumerate(messages):
        begun_s = time.process_time()
        for event in read_kv_events(message).events:
            if isinstance(event, BlockStored):
                blocks.stored(event.hashes, event.parent, event.block_tokens, event.session)
            elif isinstance(event, BlockRemoved):
                blocks.removed(event.hashes)
        stored = number // 2
        if number % 2 == 0 and stored % CHAIN == CHAIN - 1:
            at = stored // CHAIN
            blocks.ended(f"hetero-{at:015x}", texts[at], CHAIN * BLOCK_TOKENS)
        if number >= 2 * CACHED:
            took_s += time.process_time() - begun_s
    each_s = took_s / args.events
    print(
        f"{args.events} events: {1e6 * each_s:.1f} µs each; 10 000 a second take "
        f"{10_000 * each_s:.2f} of a core; {len(blocks)} blocks, {blocks.bound_keys} keys bound"
    )


if __name__ == "__main__":
    main()
