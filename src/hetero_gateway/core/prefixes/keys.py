"""Names of texts' beginnings.

Two texts that begin alike have their first keys in common.

A text is a sequence of parts (tools, a system prompt, messages). It is cut into pieces, and a
piece's key depends on all that is in front of it, so that one key stands for a whole beginning:

    h_0 = namespace,   h_i = xxh3(piece_i, seed = h_{i-1}),   key_i = h_i without its lowest 4 bits

Where it is cut depends on nothing behind the cut, or a text that goes on would have other keys:
at every part's end, since the next turn of a conversation goes on there; and within a part every
``PIECE_BYTES``. After each ``PIECES_PER_LENGTH`` pieces the length doubles, and a part that is
shorter than a 32nd of it shares a piece with the next one. So a text of B bytes has at most
16·(2 + log2(B / 512)) keys whatever it is made of (64 MiB: 304), and what is lost between two cuts
is a sixteenth of what is in front of them, or a piece.

A key is only ever compared. Texts that collide cost a wrong guess at what an instance has in its
cache, no more: nothing is served from here. The namespace begins with a secret (``seed_of``), so
that nobody can choose texts that collide, or tell a text from its keys; all the same, they are
neither logged nor shown.

xxh3 because a megabyte takes 20 µs, where blake2b takes 1700 and Python's own ``hash`` 700
(benchmarks/dataplane/prefix_keys.py), and ``hash`` differs from process to process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_64_intdigest

from hetero_gateway.core.types import PrefixKeys

# The length of the first pieces: some 250 tokens, a few blocks of an engine.
PIECE_BYTES: Final = 1024
# After this many pieces their length doubles.
PIECES_PER_LENGTH: Final = 16
# A part shorter than this fraction of a piece does not end one.
_LEAST_SHARE_BITS: Final = 5
# Of 60 bits, an int takes 32 bytes; of 64, 48. At a million keys, one in 10^6 indexes has a pair
# that collides.
_DROPPED_BITS: Final = 4

Buffer = bytes | bytearray | memoryview


NO_KEYS: Final = PrefixKeys((), (), 0)
# Of a text that was put together; beyond it, every second key of its beginning is left out.
_MOST_JOINED: Final = 512


def joined(before: PrefixKeys, after: PrefixKeys) -> PrefixKeys:
    """The keys of a text that goes on from another; those of ``after`` must know that it does."""
    hashes, ends, size = before
    if len(hashes) > _MOST_JOINED:
        hashes, ends = hashes[::-2][::-1], ends[::-2][::-1]
    shifted = tuple([size + end for end in after.ends])
    return PrefixKeys(hashes + after.hashes, ends + shifted, size + after.text_bytes)


def key_of_one(start: int, text_bytes: int) -> PrefixKeys:
    """The keys of a text that nobody has seen: one, by what it is known as."""
    return PrefixKeys((start >> _DROPPED_BITS,), (text_bytes,), text_bytes)


def seed_of(secret: bytes) -> int:
    """What the namespaces of one gateway, or of several with the same secret, begin with."""
    return int.from_bytes(hashlib.blake2b(secret, digest_size=8).digest(), "little")


def namespace(seed: int, *identity: Buffer) -> int:
    """The hash that a text's keys begin with.

    Args:
        seed: from ``seed_of``.
        identity: what makes equal texts different for an engine (model, salt, template arguments),
            in a fixed order, with b"" for what is not there.
    """
    for part in identity:
        seed = xxh3_64_intdigest(part, seed)
    return seed


def keys_of(parts: Iterable[Buffer], start: int) -> PrefixKeys:
    """The keys of a text of these parts in the namespace ``start``."""
    # In one loop: every request passes here.
    digest, value, at, in_piece = xxh3_64_intdigest, start, 0, 0
    hashes: list[int] = []
    ends: list[int] = []
    piece_bytes, left = PIECE_BYTES, PIECES_PER_LENGTH  # pieces until they are longer
    for part in parts:
        size, begin = len(part), 0
        if in_piece + size >= piece_bytes:
            view = memoryview(part)
            stop = piece_bytes - in_piece
            in_piece = 0
            while stop <= size:
                # All pieces of one length: what can be said of them together costs once.
                count = (size - stop) // piece_bytes + 1
                if count > left:
                    count = left
                cuts = range(stop, stop + count * piece_bytes, piece_bytes)
                ends += range(at + stop, at + cuts.stop, piece_bytes)
                for stop in cuts:
                    value = digest(view[begin:stop], value)
                    hashes.append(value >> _DROPPED_BITS)
                    begin = stop
                left -= count
                if not left:
                    left = PIECES_PER_LENGTH
                    piece_bytes *= 2
                stop = begin + piece_bytes
            at += begin
            part = view[begin:]
        if begin < size:
            value = digest(part, value)
            in_piece += size - begin
            at += size - begin
        # A part ends a piece, unless there is too little since the last cut.
        if in_piece >= piece_bytes >> _LEAST_SHARE_BITS:
            in_piece = 0
            hashes.append(value >> _DROPPED_BITS)
            ends.append(at)
            left -= 1
            if not left:
                left = PIECES_PER_LENGTH
                piece_bytes *= 2
    return PrefixKeys(tuple(hashes), tuple(ends), at)
