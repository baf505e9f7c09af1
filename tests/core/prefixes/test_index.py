"""The index: as a naive one of sets, whatever comes; bounded; what leaves, leaves nothing."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.prefixes.caches import PrefixIndex
from hetero_gateway.core.types import InstanceId, PrefixKeys

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def text(*keys: int, piece: int = 1000) -> PrefixKeys:
    """A text whose beginnings have these keys."""
    return PrefixKeys(keys, tuple(piece * (i + 1) for i in range(len(keys))), piece * len(keys))


def lookup(i: PrefixIndex, keys: PrefixKeys) -> dict[InstanceId, int]:
    """Matched bytes of each instance that has any of the text."""
    levels = i.levels(keys)
    return {who: n for who in i._members for mask, n in levels if mask >> i.slot(who) & 1}


def index(**capacities: float) -> PrefixIndex:
    result = PrefixIndex()
    for name, capacity in capacities.items():
        result.join(InstanceId(name), capacity)
    return result


def test_each_instance_has_its_deepest_match() -> None:
    i = index(a=1e6, b=1e6, c=1e6)
    i.insert(A, text(1, 2, 3, 4))
    i.insert(B, text(1, 2))
    assert lookup(i, text(1, 2, 3, 9)) == {A: 3000, B: 2000}
    assert lookup(i, text(9, 2, 3)) == {}
    assert lookup(i, text()) == {}
    assert i.levels(text(1, 2, 3, 9)) == [(0b10, 2000), (0b01, 3000)]


# Texts of a small tree, so that many begin alike.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def tree_text(path: list[int]) -> PrefixKeys:
    key, keys = 1, []
    for branch in path:
        key = key * 3 + branch
        keys.append(key)
    return text(*keys)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 40), paths), max_size=60), paths)
def test_lookup_finds_what_a_walk_along_the_keys_would(inserted, asked):
    i = PrefixIndex()
    have: dict[InstanceId, set[int]] = {}
    for n in range(41):
        i.join(InstanceId(str(n)), 1e9)
    for n, path in inserted:
        keys = tree_text(path)
        there = have.setdefault(InstanceId(str(n)), set())
        assert i.insert(InstanceId(str(n)), keys) == sum(key in there for key in keys.hashes)
        there.update(keys.hashes)
    keys = tree_text(asked)
    expected = {}
    for instance_id, there in have.items():
        matched = 0
        for key, end in zip(keys.hashes, keys.ends, strict=True):
            if key not in there:
                break
            matched = end
        if matched:
            expected[instance_id] = matched
    assert lookup(i, keys) == expected


@settings(max_examples=100)
@given(st.data())
def test_whatever_comes_it_is_bounded_and_whole(data: Any) -> None:
    i = index(a=20_000, b=5_000, c=0)
    added: list[tuple[InstanceId, PrefixKeys, int]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        who = data.draw(st.sampled_from([A, B, C]))
        what = data.draw(st.sampled_from(["insert", "touch", "withdraw", "forget", "resize"]))
        if what == "insert":
            keys = tree_text(data.draw(paths))
            added.append((who, keys, i.insert(who, keys)))
        elif what == "touch" and added:
            i.touch(who, added[-1][1])
        elif what == "withdraw" and added:
            i.withdraw(*added.pop())
        elif what == "forget":
            i.forget(who)
        elif what == "resize":
            i.resize(who, data.draw(st.floats(0, 30_000)))
            i.insert(who, text(1))
        used, capacity = i.bytes_on(who)
        assert used <= capacity
    check(i)
    for who in (A, B, C):
        i.leave(who)
    assert len(i) == 0


def check(i: PrefixIndex) -> None:
    """Masks and dicts say the same, and nobody has more than he may."""
    masks: dict[int, int] = {}
    for member in i._members.values():
        held = [each for part in member.parts for each in part.items()]
        assert member.parts[-1] is member.newest
        assert member.used == sum(size for _, size in held)
        assert len({key for key, _ in held}) == len(held)
        for key, _ in held:
            masks[key] = masks.get(key, 0) | member.bit
    assert masks == {key: mask for part in i._masks for key, mask in part.items()}


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), paths), max_size=60))
def test_what_is_there_at_once_is_counted_as_a_naive_count_would(events):
    i, there = index(a=1e6), []
    for begins, pick, path in events:
        if begins:
            keys = tree_text(path)
            there.append(keys)
            shared = i.begin(A, keys)
        elif there:
            shared = i.end(A, there.pop(pick % len(there)))
        else:
            continue
        counts = Counter(key for keys in there for key in keys.hashes)
        assert shared == sum(1000 * (count - 1) for count in counts.values())
    for keys in there:
        shared = i.end(A, keys)
    assert not there or shared == 0


def test_a_text_longer_than_the_cache_keeps_its_beginning() -> None:
    i = index(a=5_000)
    i.insert(A, text(*range(1, 100)))
    assert 3000 <= lookup(i, text(*range(1, 100)))[A] <= 5000


def test_what_was_not_computed_is_taken_back_and_no_more() -> None:
    i = index(a=1e6)
    i.insert(A, text(1, 2))
    known = i.insert(A, text(1, 2, 3, 4))
    assert known == 2
    i.withdraw(A, text(1, 2, 3, 4), known)
    assert lookup(i, text(1, 2, 3, 4)) == {A: 2000}
    i.leave(A)
    i.withdraw(A, text(1, 2, 3, 4), 0)


def test_a_restarted_instance_has_nothing_and_the_others_all() -> None:
    i = index(a=1e6, b=1e6)
    i.insert(A, text(1, 2))
    i.insert(B, text(1, 2))
    i.forget(A)
    assert lookup(i, text(1, 2)) == {B: 2000}
    assert i.bytes_on(A) == (0, 999968 + 32)
    i.insert(A, text(1, 2))
    assert lookup(i, text(1, 2)) == {A: 2000, B: 2000}


def test_much_is_forgotten_at_once_and_goes_in_steps() -> None:
    i, rng = index(a=32 * 20_000, b=32 * 20_000), random.Random(0)
    talks = [text(*(rng.getrandbits(60) for _ in range(20)), piece=32) for _ in range(1000)]
    for who in (A, B):
        for talk in talks:
            i.insert(who, talk)
    i.forget(A)
    assert i.keys_on(A) == 0
    assert all(lookup(i, talk) == {B: 640} for talk in talks)
    steps = 0
    while i._hidden:  # by those of the other
        i.insert(B, talks[steps])
        steps += 1
    assert 30 <= steps <= 50
    check(i)
    i.forget(B)  # and it has something again before all has gone
    assert i.insert(B, talks[0]) == 0
    check(i)
    assert (lookup(i, talks[0]), lookup(i, talks[1])) == ({B: 640}, {})
    i.leave(B)
    i.join(InstanceId("d"), 1e6)
    assert len(i) == 0


def test_a_slot_is_used_again_and_has_nothing_of_the_one_before() -> None:
    i = index(a=1e6, b=1e6, c=1e6)
    i.insert(B, text(1))
    i.leave(B)
    i.join(InstanceId("d"), 1e6)
    assert i.slot(InstanceId("d")) == 1
    assert lookup(i, text(1)) == {}
    with pytest.raises(ValueError, match="there already"):
        i.join(A, 1e6)
    with pytest.raises(ValueError, match="there already"):
        i.join(InstanceId("e"), 1e6, slot=2)
    i.join(InstanceId("e"), 1e6, slot=70)
    i.insert(InstanceId("e"), text(1))
    assert i.levels(text(1)) == [(1 << 70, 1000)]


@pytest.mark.parametrize("comes_back", [0.0, 0.5, 0.95])
def test_what_is_kept_is_what_one_ordered_dict_would_keep(comes_back: float) -> None:
    i, rng, naive = index(a=32 * 6000), random.Random(3), dict[int, int]()
    talks: list[tuple[int, ...]] = []
    room, steps = 6000 - 6000 // 32, 0
    for n in range(1500):
        keys: tuple[int, ...] = ()
        if talks and rng.random() < comes_back:
            keys = talks.pop(rng.randrange(len(talks)))
        keys += tuple(rng.getrandbits(60) for _ in range(rng.randrange(1, 12)))
        if len(keys) < 200:
            talks.append(keys)
        i.insert(A, text(*keys, piece=32))
        for key in reversed(keys):
            naive.pop(key, None)
            naive[key] = 1
        if len(naive) > 6000:
            naive = dict(list(naive.items())[-room:])
        if n % 3 == 0:  # some are used again, or go
            one = rng.choice(talks)[: rng.randrange(1, 60)]
            i.use(A, text(*one, piece=32))
            for key in reversed(one):
                if naive.pop(key, 0):
                    naive[key] = 1
            i.drop(A, keys[-1])
            naive.pop(keys[-1], None)
        steps = max(steps, max(map(len, i._members[A].parts)))
    assert i.held(A) == list(naive.items())
    assert steps <= 6000 // 4  # none is as large as to take long
    check(i)
    # Another process knows the same, in front of what it had itself.
    other = index(a=32 * 6000)
    other.insert(A, text(1, 2, piece=32))
    other.hold(A, i.held(A))
    assert other.held(A) == [*i.held(A), (2, 1), (1, 1)]
    check(other)


def test_what_is_too_much_at_once_goes_in_steps() -> None:
    i, rng = index(a=32 * 10_000), random.Random(0)
    for _ in range(1000):
        i.insert(A, text(*(rng.getrandbits(60) for _ in range(10)), piece=32))
    i.resize(A, 32 * 1000)
    kept = [i.keys_on(A)]
    while kept[-1] > 1000:
        i.insert(A, text(1, piece=32))
        kept.append(i.keys_on(A))
        assert kept[-1] < kept[-2] <= kept[-1] + 2500
    check(i)


def test_a_million_keys_take_130_mb_also_when_all_have_gone_twice() -> None:
    i, rng = index(a=32 * 62_500, b=32 * 62_500), random.Random(0)
    for n in range(18_750):
        one = text(*(rng.getrandbits(60) for _ in range(20)), piece=32)
        i.insert((A, B)[n % 2], one)
        if n % 3 == 0:
            i.touch((A, B)[n % 2], one)
        if n in (6_240, 12_500, 18_749):
            assert i.memory_bytes() / len(i) <= 130
    assert len(i) > 124_000
