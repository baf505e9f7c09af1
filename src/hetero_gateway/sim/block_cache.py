"""One instance's KV blocks with a prefix cache, on tables of numbers: look up, take, keep, free.

vLLM's rules (vllm/v1/core/block_pool.py, kv_cache_manager.py, single_type_kv_cache_manager.py):

- A full block has a key: the hash of its tokens and of the key before it, so that equal keys mean
  equal text up to the block's end. Here keys are given from outside, as integers; 0 is none.
- A lookup takes blocks from the front as long as their keys are cached, but never the whole prompt:
  its last token has to be computed for the first one of the answer.
- Sequences share blocks and count their references. Unreferenced blocks are free, and stay cached
  until they are reused. Free blocks are taken from the front of a queue; released ones go to its
  end, a sequence's last block first, so that a prefix outlives its continuation. Blocks without a
  key go to the front.
- Equal blocks that were computed twice are both kept; the older one is found first.

Different from vLLM: the blocks of an answer get their keys when the sequence leaves the batch, not
one by one. Only a prompt with a part of an answer that is still running could see the difference.

    c[field]  of one instance: a number for each block, the fields KEY, …; and the buckets of
              the table from keys to blocks, which are chained through CHAIN
    keys      of one sequence: the keys of its blocks, as many as are known
    held      of one sequence: its blocks, in order

As in ``kernel.py``, everything runs on lists as plain Python, and on arrays compiled by numba.
"""

Row = list[int]
Rows = list[list[int]]

# Fields of a block. The free ones form a ring through NEXT_FREE and PREVIOUS_FREE; its head has the
# number of blocks as its index. SPARE is a stack: blocks in use by decoding sequences, whose owners
# do not matter until one leaves.
KEY, REFERENCES, NEXT_FREE, PREVIOUS_FREE, CHAIN, BUCKET, SPARE = range(7)

NOTHING = -1


def cache_rows(total_blocks: int) -> Rows:
    """The rows of one instance's empty cache."""
    following = [*range(1, total_blocks + 1), 0]
    previous = [total_blocks, *range(total_blocks)]
    empty = [0] * total_blocks
    buckets = [NOTHING] * (bucket_mask(total_blocks) + 1)
    return [empty, empty[:], following, previous, [NOTHING] * total_blocks, buckets, empty[:]]


def bucket_mask(total_blocks: int) -> int:
    """One less than the number of buckets, which is a power of two."""
    return (1 << total_blocks.bit_length()) - 1


def find(c: Rows, mask: int, key: int) -> int:
    """The earliest cached block with this key; NOTHING if there is none."""
    block = c[BUCKET][key & mask]
    while block != NOTHING and c[KEY][block] != key:
        block = c[CHAIN][block]
    return block


def look_up(c: Rows, mask: int, keys: Row, held: Row, most: int) -> int:
    """How many of the first ``most`` keys are cached; their blocks are written into ``held``."""
    buckets, stored, chain = c[BUCKET], c[KEY], c[CHAIN]
    for hits in range(most):  # ``find``, without a call for each block
        key = keys[hits]
        block = buckets[key & mask]
        while block != NOTHING and stored[block] != key:
            block = chain[block]
        if block == NOTHING:
            return hits
        held[hits] = block
    return most


def count_free(c: Rows, held: Row, hits: int) -> int:
    """How many of the first ``hits`` blocks are unreferenced."""
    free, references = 0, c[REFERENCES]
    for i in range(hits):
        if references[held[i]] == 0:
            free += 1
    return free


def share(c: Rows, held: Row, hits: int) -> None:
    """Reference the first ``hits`` blocks; free ones no longer are."""
    references, next_free, previous_free = c[REFERENCES], c[NEXT_FREE], c[PREVIOUS_FREE]
    for i in range(hits):
        block = held[i]
        if references[block] == 0:
            following, previous = next_free[block], previous_free[block]
            next_free[previous] = following
            previous_free[following] = previous
        references[block] += 1


def take(c: Rows, mask: int, head: int) -> int:
    """The first free block; its cached content is forgotten."""
    next_free = c[NEXT_FREE]
    block = next_free[head]
    following = next_free[block]
    next_free[head] = following
    c[PREVIOUS_FREE][following] = head
    c[REFERENCES][block] = 1
    if c[KEY][block] != 0:
        forget(c, mask, block)
    return block


def forget(c: Rows, mask: int, block: int) -> None:
    chain = c[CHAIN]
    bucket = c[KEY][block] & mask
    at = c[BUCKET][bucket]
    if at == block:
        c[BUCKET][bucket] = chain[block]
    else:
        while chain[at] != block:
            at = chain[at]
        chain[at] = chain[block]
    chain[block] = NOTHING
    c[KEY][block] = 0


def keep(c: Rows, mask: int, block: int, key: int) -> None:
    """A block of a running sequence is full: others may find it from now on."""
    c[KEY][block] = key
    at = c[BUCKET][key & mask]
    if at == NOTHING:
        c[BUCKET][key & mask] = block
        return
    chain = c[CHAIN]
    while chain[at] != NOTHING:
        at = chain[at]
    chain[at] = block


def release(c: Rows, head: int, held: Row, count: int) -> int:
    """Dereference ``count`` blocks, the last one first; returns how many became free."""
    references, next_free, previous_free = c[REFERENCES], c[NEXT_FREE], c[PREVIOUS_FREE]
    freed, stored = 0, c[KEY]
    for i in range(count - 1, -1, -1):
        block = held[i]
        references[block] -= 1
        if references[block] > 0:
            continue
        freed += 1
        before = head if stored[block] != 0 else next_free[head]
        previous = previous_free[before]
        next_free[block] = before
        previous_free[block] = previous
        next_free[previous] = block
        previous_free[before] = block
    return freed


def clear(c: Rows, mask: int, total_blocks: int) -> None:
    """Forget everything cached. Blocks in use stay in use, but are no longer found."""
    for block in range(total_blocks):
        c[KEY][block] = 0
        c[CHAIN][block] = NOTHING
    for bucket in range(mask + 1):
        c[BUCKET][bucket] = NOTHING
