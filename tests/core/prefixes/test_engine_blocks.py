"""What engines tell of their blocks, and which beginnings of prompts they have by that."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.prefixes.caches import PrefixIndex
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.request import keys_of
from hetero_gateway.core.types import InstanceId, PrefixKeys

ONE = InstanceId("one")
BLOCK = 16


class Engine:
    """A cache of so many blocks, the least recently used going first, that tells what it does.

    A token is four bytes of text, a block's hash says all in front of it.
    """

    def __init__(self, blocks: EngineBlocks, size: int) -> None:
        self.told = blocks
        self.size = size
        self.cache: dict[int, None] = {}
        self.number = 0

    def serve(self, text: list[bytes], *, named: bool = True) -> tuple[PrefixKeys, int]:
        """Returns the keys and how many tokens were cached."""
        keys = keys_of(text, 7)
        data = b"".join(text)
        tokens = len(data) // 4
        hashes = [hash(data[: 4 * BLOCK * (i + 1)]) & (2**64 - 1) for i in range(tokens // BLOCK)]
        hits = 0
        while hits < len(hashes) and hashes[hits] in self.cache:
            hits += 1
        for each in hashes[hits - 1 :: -1] if hits else ():
            self.cache[each] = self.cache.pop(each)
        fresh = hashes[hits:]
        gone = []
        while self.cache and len(self.cache) + len(fresh) > self.size:
            gone.append(next(iter(self.cache)))
            del self.cache[gone[-1]]
        self.told.removed(gone)
        self.number += 1
        session = f"r{self.number}" if named else ""
        if fresh:
            self.told.stored(fresh, hashes[hits - 1] if hits else None, BLOCK, session)
        for each in reversed(fresh):
            self.cache[each] = None
        if named:
            self.told.ended(session, keys, tokens)
        return keys, hits * BLOCK

    def has(self, text: list[bytes]) -> int:
        """Bytes of a text's beginning, in whole blocks."""
        data, at = b"".join(text), 0
        while at + 4 * BLOCK <= len(data):
            if hash(data[: at + 4 * BLOCK]) & (2**64 - 1) not in self.cache:
                break
            at += 4 * BLOCK
        return at


def made(size: int = 1000, most: int = 10**5) -> tuple[PrefixIndex, EngineBlocks, Engine]:
    index = PrefixIndex()
    index.join(ONE, 2**30)
    blocks = EngineBlocks(index, ONE, most)
    return index, blocks, Engine(blocks, size)


def matched(index: PrefixIndex, keys: PrefixKeys) -> int:
    return max((depth for _, depth in index.levels(keys)), default=0)


def message(number: int, kilobytes: int = 2) -> bytes:
    return np.random.default_rng(number).bytes(1024 * kilobytes)


def test_a_conversation_is_known_and_what_is_removed_is_not() -> None:
    index, blocks, engine = made()
    first = [message(1), message(2)]
    keys, _ = engine.serve(first)
    assert matched(index, keys) == 4096
    more = [*first, message(3)]
    assert matched(index, keys_of(more, 7)) == 4096
    longer, hits = engine.serve(more)
    assert hits == 1024
    assert matched(index, longer) == 6144
    assert blocks.bound_keys == 6
    blocks.removed([hash(b"".join(more)) & (2**64 - 1)])  # its last block
    assert matched(index, longer) == 5120
    blocks.cleared()
    assert matched(index, longer) == 0
    assert len(blocks) == blocks.bound_keys == 0


def test_what_is_there_twice_is_there_until_both_are_gone() -> None:
    """An engine that computes a block once more keeps both, and tells of each that goes."""
    index, blocks, _ = made()
    keys = keys_of([message(1)], 7)
    blocks.stored(range(32), None, BLOCK, "a")
    blocks.ended("a", keys, 512)
    blocks.stored([30, 31], 29, BLOCK, "b")
    blocks.removed([31, 30])
    assert len(blocks) == 32
    assert matched(index, keys) == 2048
    blocks.removed([31])
    assert matched(index, keys) == 1024
    blocks.stored([31], 30, BLOCK)
    blocks.removed([31])
    assert len(blocks) == 31


def test_what_went_past_the_gateway_counts_once_a_text_is_known() -> None:
    index, _, engine = made()
    past = [message(1), message(2)]
    engine.serve(past, named=False)
    assert matched(index, keys_of(past, 7)) == 0
    keys, hits = engine.serve([*past, message(3)])
    assert hits == 1024
    assert matched(index, keys) == 6144, "bound along the chain, to its beginning"
    engine.size = 0
    engine.serve([message(9)], named=False)
    assert matched(index, keys) == 0


def test_what_is_gone_before_its_request_is_over_is_not_believed() -> None:
    """As where a cache is short: others need the room in the step in which it is over."""
    index, blocks, _ = made()
    keys = keys_of([message(1)], 7)
    for there, left in ((16, 1024), (0, 0)):
        index.insert(ONE, keys)
        blocks.stored(range(32), None, BLOCK, "a")
        blocks.removed(range(31, there - 1, -1))
        blocks.ended("a", keys, 512)
        assert matched(index, keys) == left
        blocks.cleared()
    # Behind a block that nobody has heard of: nothing is known of the beginning.
    index.insert(ONE, keys)
    blocks.stored([100, 101], 99, BLOCK, "b")
    blocks.removed([101, 100])
    blocks.ended("b", keys, 512)
    assert matched(index, keys) == 2048


def test_blocks_that_are_told_after_the_end_are_bound_all_the_same() -> None:
    index, blocks, _ = made()
    keys = keys_of([message(1)], 7)
    blocks.ended("late", keys, 512)
    blocks.stored(range(1, 17), None, BLOCK, "late")
    assert matched(index, keys) == 1024
    blocks.stored(range(17, 33), 16, BLOCK, "late")
    assert matched(index, keys) == 2048


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3), st.booleans()), min_size=1, max_size=25
    ),
    st.integers(150, 500),
)
def test_of_what_is_bound_the_index_is_what_the_engine_has(
    requests: list[tuple[int, int, bool]], size: int
) -> None:
    """Conversations that come back in any order, some of them past the gateway."""
    index, blocks, engine = made(size)
    turns: dict[int, int] = {}
    for session, growth, named in requests:
        turns[session] = turns.get(session, 0) + growth
        text = [message(100 * session + i, 1) for i in range(turns[session])]
        if sum(map(len, text)) > 64 * size:
            continue
        engine.serve(text, named=named)
        assert set(blocks.hashes()) == set(engine.cache)
        for other, turn in turns.items():
            whole = [message(100 * other + i, 1) for i in range(turn)]
            assert matched(index, keys_of(whole, 7)) <= engine.has(whole)
        if named:
            assert matched(index, keys_of(text, 7)) == engine.has(text)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 40), max_size=8)), max_size=40)
)
def test_whatever_is_told_is_bounded_and_harms_nobody(told: list[tuple[int, list[int]]]) -> None:
    index, blocks, _ = made(most=20)
    keys = keys_of([message(1)], 7)
    for kind, hashes in told:
        calls: list[Any] = [
            lambda h=hashes: blocks.stored(h, h[-1] if h else None, BLOCK, "r"),
            lambda h=hashes: blocks.removed(h),
            lambda: blocks.ended("r", keys, 512),
            lambda h=hashes: blocks.stored(h, 99, BLOCK),
        ]
        calls[kind]()
        assert len(blocks) <= 20
        assert blocks.bound_keys <= len(keys.hashes)
        assert index.keys_on(ONE) <= len(keys.hashes)
    blocks.cleared()
    assert index.keys_on(ONE) == 0
