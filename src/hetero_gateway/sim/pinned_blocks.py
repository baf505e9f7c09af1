"""KV blocks of an engine that none of its sequences has: kept for another engine, or filled by one.

A prefill computed for another instance stays pinned after it has ended, until that instance has
fetched it. There, the blocks are taken before they are fetched, and the sequence that waits for
them finds them as if they had been computed there (``block_cache``). So the rules of ``kernel``
need not know of transfers: pinned blocks are missing from the free ones, and that is all.

Only for engines with a prefix cache: others do not know the content of blocks.
"""

from typing import Any

from hetero_gateway.sim import block_cache, kernel
from hetero_gateway.sim.engine import Engine


class PinnedBlocks:
    """Blocks of an engine, each referenced until it is freed.

    Args:
        blocks: in the order of their tokens.
        hits: how many of them were in the cache already.
    """

    def __init__(self, engine: Engine[Any], blocks: list[int], hits: int) -> None:
        self._engine = engine
        self.blocks = blocks
        self.hits = hits

    def keep(self, keys: list[int]) -> None:
        """The first ``len(keys)`` blocks are filled, and others may find them."""
        cache, mask = _cache_of(self._engine)
        for block, key in zip(self.blocks, keys, strict=False):
            if cache[block_cache.KEY][block] == 0:
                block_cache.keep(cache, mask, block, key)

    def free(self, first: int = 0) -> None:
        """Dereference the blocks from the ``first`` one on; it may be called again."""
        cache, _ = _cache_of(self._engine)
        n = self._engine._row
        left = self.blocks[first:]
        del self.blocks[first:]
        n[kernel.FREE_BLOCKS] += block_cache.release(cache, n[kernel.TOTAL_BLOCKS], left, len(left))


def pin(
    engine: Engine[Any], keys: list[int], tokens: int, spare_blocks: int = 0
) -> PinnedBlocks | None:
    """Take the blocks for so many tokens: the cached ones, and others. None: no room.

    Args:
        keys: of the first of them, as far as they are known.
        spare_blocks: how many must stay free besides them.
    """
    n = engine._row
    cache, mask = _cache_of(engine)
    count = kernel.blocks(n, tokens)
    blocks = [0] * count
    hits = block_cache.look_up(cache, mask, keys, blocks, min(count, len(keys)))
    taken = count - hits + block_cache.count_free(cache, blocks, hits)
    if taken + spare_blocks > n[kernel.FREE_BLOCKS]:
        return None
    n[kernel.FREE_BLOCKS] -= taken
    block_cache.share(cache, blocks, hits)
    for i in range(hits, count):
        blocks[i] = block_cache.take(cache, mask, n[kernel.TOTAL_BLOCKS])
    return PinnedBlocks(engine, blocks, hits)


def keys_in(engine: Engine[Any], blocks: list[int]) -> list[int]:
    """The keys of these blocks' contents; 0: unknown. Raises ValueError: no such block."""
    cache, _ = _cache_of(engine)
    if not all(0 <= block < engine.total_blocks for block in blocks):
        raise ValueError("there is no such block")
    return [cache[block_cache.KEY][block] for block in blocks]


def _cache_of(engine: Engine[Any]) -> tuple[block_cache.Rows, int]:
    if engine._c is None:
        raise ValueError("the engine has no prefix cache")
    return engine._c[0], engine._row[kernel.BUCKET_MASK]
