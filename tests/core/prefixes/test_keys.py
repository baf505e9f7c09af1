"""Keys of beginnings: equal for texts that begin alike, different where they differ, and few."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from hetero_gateway.core.request import (
    NO_KEYS,
    PIECE_BYTES,
    PIECES_PER_LENGTH,
    keys_of,
    namespace,
    seed_of,
)
from hetero_gateway.core.types import PrefixKeys

SEED = seed_of(b"a secret")
HERE = namespace(SEED, b"model")

texts = st.lists(st.binary(max_size=2500), max_size=12)


def common(a: PrefixKeys, b: PrefixKeys) -> int:
    """How many first keys two texts share."""
    return next(
        (i for i, (x, y) in enumerate(zip(a.hashes, b.hashes, strict=False)) if x != y),
        min(len(a.hashes), len(b.hashes)),
    )


@given(texts, texts)
def test_a_text_that_goes_on_keeps_its_keys(first: list[bytes], more: list[bytes]) -> None:
    short, long = keys_of(first, HERE), keys_of(first + more, HERE)
    assert long.hashes[: len(short.hashes)] == short.hashes
    assert long.ends[: len(short.ends)] == short.ends
    assert long.text_bytes == sum(map(len, first + more))


@given(texts)
def test_ends_rise_and_reach_all_but_a_scrap(parts: list[bytes]) -> None:
    keys = keys_of(parts, HERE)
    assert all(low < high for low, high in pairwise((0, *keys.ends)))
    assert len(keys.hashes) == len(keys.ends)
    covered = keys.ends[-1] if keys.ends else 0
    assert keys.text_bytes - covered < max(PIECE_BYTES // 32, keys.text_bytes / 16)


@given(texts, st.integers(0, 11), st.integers(0, 2499))
def test_a_byte_that_differs_changes_its_key_and_all_behind_it(parts, at, where):
    if at >= len(parts) or where >= len(parts[at]):
        return
    changed = [*parts]
    changed[at] = parts[at][:where] + bytes([parts[at][where] ^ 1]) + parts[at][where + 1 :]
    before = sum(map(len, parts[:at])) + where
    ours, theirs = keys_of(parts, HERE), keys_of(changed, HERE)
    assert ours.ends == theirs.ends
    shared = common(ours, theirs)
    assert shared == sum(end <= before for end in ours.ends)
    assert not set(ours.hashes[shared:]) & set(theirs.hashes[shared:])


def test_namespaces_and_secrets_have_nothing_in_common() -> None:
    text = [b"You are helpful. " * 100]
    starts = [
        namespace(SEED, b"model"),
        namespace(SEED, b"model", b"salt"),
        namespace(SEED, b"modelsalt", b""),
        namespace(SEED, b"", b"modelsalt"),
        namespace(seed_of(b"another secret"), b"model"),
    ]
    keys = [set(keys_of(text, start).hashes) for start in starts]
    assert len(set.union(*keys)) == sum(map(len, keys))


def test_the_same_secret_gives_the_same_keys_in_every_process() -> None:
    # Replicas that share an index rely on these very numbers.
    keys = keys_of([b"x" * 1500, b"y" * 40], namespace(seed_of(b"shared"), b"model"))
    assert keys.ends == (1024, 1500, 1540)
    assert keys.hashes == (354648081834702349, 87691367909835627, 793381514082980672)


def test_a_turn_that_comes_back_matches_to_its_end_and_short_messages_share_a_piece() -> None:
    turn = [b"system " * 300, b"question " * 20]
    following = [*turn, b"answer " * 50, b"and then?" * 5]
    first, second = keys_of(turn, HERE), keys_of(following, HERE)
    assert common(first, second) == len(first.hashes)
    assert first.ends[-1] == first.text_bytes
    keys = keys_of([b"hi"] * 100, HERE)
    assert keys.ends[:2] == (32, 64)
    assert common(keys, keys_of([b"hi"] * 50, HERE)) > 0


def test_keys_are_few_whatever_a_text_is_made_of() -> None:
    def most(size: int) -> int:
        return PIECES_PER_LENGTH * (2 + (size // 512).bit_length())

    for unit in (1, 31, 32, 33, 1000, 1024, 1 << 16):
        for size in (1 << 12, 1 << 17):
            keys = keys_of([b"x" * unit] * -(-size // unit), HERE)
            assert len(keys.hashes) <= most(max(size, unit))
            assert len(keys.hashes) >= 4
    assert len(keys_of([bytes(1 << 26)], HERE).hashes) <= 304


def piece_by_piece(parts: list[bytes], start: int) -> PrefixKeys:
    """As the module says it: each part up to the next cut, and to its end."""
    value, at, in_piece, length = start, 0, 0, PIECE_BYTES
    hashes: list[int] = []
    ends: list[int] = []
    for part in parts:
        while part:
            taken, part = part[: length - in_piece], part[length - in_piece :]
            value = xxh3_64_intdigest(taken, value)
            at, in_piece = at + len(taken), in_piece + len(taken)
            if in_piece == length or (not part and in_piece >= length // 32):
                hashes.append(value >> 4)
                ends.append(at)
                in_piece, length = 0, PIECE_BYTES * 2 ** (len(hashes) // PIECES_PER_LENGTH)
    return PrefixKeys(tuple(hashes), tuple(ends), at)


def test_a_part_that_is_taken_in_steps_has_the_same_keys() -> None:
    parts = [bytes([i]) * (3000 * i) for i in range(40)]
    assert piece_by_piece(parts, HERE) == keys_of(parts, HERE)
    mixed = [bytes([i]) * (i * i % 2100) for i in range(200)]
    assert piece_by_piece(mixed, HERE) == keys_of(mixed, HERE)
    # A text of nothing has no keys.
    assert keys_of([], HERE) == keys_of([b"", b""], HERE) == NO_KEYS
