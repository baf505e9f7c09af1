"""A request as the scheduler sees it, and the keys that name the beginnings of its text.

Two texts with the same beginning have their first keys in common.

A text is a sequence of parts (tools, a system prompt, messages). It is cut into pieces, and a
piece's key depends on everything before it, so that one key stands for a whole beginning:

    h_0 = namespace,   h_i = xxh3(piece_i, seed = h_{i-1}),   key_i = h_i without its lowest 4 bits

A cut must not depend on anything after it, or a continued text would have other keys. So cuts are
at every part's end, since the next turn of a conversation continues there, and within a part every
``PIECE_BYTES``. After each ``PIECES_PER_LENGTH`` pieces the length doubles, and a part shorter than
a 32nd of it shares a piece with the next one. So a text of B bytes has at most 16·(2 + log2(B /
512)) keys whatever it consists of (64 MiB: 304), and the loss between two cuts is a sixteenth of
what precedes them, or a piece.

Keys are only ever compared. Texts that collide cost a wrong guess about an instance's cache, no
more: nothing is served from here. The namespace begins with a secret (``seed_of``), so that nobody
can construct texts that collide, or recognise a text by its keys; even so, keys are neither logged
nor shown.

xxh3, because a megabyte takes 20 µs, where blake2b takes 1700 and Python's own ``hash`` 700
(benchmarks/dataplane/prefix_keys.py), and ``hash`` differs from process to process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from hetero_gateway.core.types import (
    DEFAULT_CLASS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    InstanceId,
    PrefixKeys,
)

_FIELDS = (
    "model", "prompt_tokens", "predicted_output_tokens", "sequences", "streams", "client",
    "priority", "prefix", "only", "certain_tokens", "session", "request_class", "whole",
)  # fmt: skip


class Request:
    """A request as the scheduler sees it.

    Immutable by convention: ``replace`` makes another.

    Args:
        model: the name that the client asked for.
        prompt_tokens: I_r, tokens of one sequence's prompt (estimated, at least 1).
        predicted_output_tokens: Õ_r, predicted output tokens of one sequence (0 for embeddings).
        sequences: how many sequences the engine will run: prompts × ``n``.
        streams: whether its first token will be seen when it is made.
        client: whom it counts for if clients have shares; "" if they have none.
        priority: a higher one goes first, for queue disciplines that use it.
        prefix: keys of its prompt's beginnings, for the prefix caches; None: not wanted.
        only: the one instance that can take it (it continues something there); None: any.
        certain_tokens: tokens of one sequence that it needs whatever the estimates say; only these
            can get it refused; None: all of its tokens, if nothing is estimated.
        session: the conversation or user it belongs to, as a hash of 64 bits; None: not known.
        request_class: its class in a queue of classes, by name.
        whole: one instance has to do all of it, prompt and answer.
    """

    __slots__ = _FIELDS

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        predicted_output_tokens: float,
        sequences: int = 1,
        streams: bool = True,
        client: str = "",
        priority: int = 0,
        prefix: PrefixKeys | None = None,
        only: InstanceId | None = None,
        certain_tokens: int | None = None,
        session: int | None = None,
        request_class: str = DEFAULT_CLASS,
        whole: bool = False,
    ) -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.predicted_output_tokens = predicted_output_tokens
        self.sequences = sequences
        self.streams = streams
        self.client = client
        self.priority = priority
        self.prefix = prefix
        self.only = only
        self.certain_tokens = certain_tokens
        self.session = session
        self.request_class = request_class
        self.whole = whole

    def replace(self, **changes: Any) -> Request:
        """Make another one, with these fields changed."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return Request(**(fields | changes))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _FIELDS)
        return f"Request({fields})"

    @property
    def kv_tokens(self) -> int:
        """Tokens that the request will hold in the KV cache when it is finished."""
        return self.sequences * (self.prompt_tokens + round(self.predicted_output_tokens))

    def what_is_wrong(self) -> str:
        """Which number is negative, not finite or absurd; "" if none is."""
        for name, low, high in (
            ("prompt_tokens", 0, MOST_TOKENS),
            ("predicted_output_tokens", 0, MOST_TOKENS),
            ("sequences", 1, MOST_SEQUENCES),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                # A number of many digits cannot be printed, and would not help.
                shown = value if -MOST_TOKENS <= value <= MOST_TOKENS else "out of all bounds"
                return f"a request's {name} must be within {low} and {high}, and is {shown}"
        return ""


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
# Limit for a joined text; beyond it, every second key of its beginning is dropped.
_MOST_JOINED: Final = 512


def joined(before: PrefixKeys, after: PrefixKeys) -> PrefixKeys:
    """The keys of a text that continues another; those of ``after`` must be made for that."""
    hashes, ends, size = before
    if len(hashes) > _MOST_JOINED:
        hashes, ends = hashes[::-2][::-1], ends[::-2][::-1]
    shifted = tuple([size + end for end in after.ends])
    return PrefixKeys(hashes + after.hashes, ends + shifted, size + after.text_bytes)


def key_of_one(start: int, text_bytes: int) -> PrefixKeys:
    """The single key of an unseen text, from its identifier."""
    return PrefixKeys((start >> _DROPPED_BITS,), (text_bytes,), text_bytes)


def seed_of(secret: bytes) -> int:
    """The start of all namespaces of one gateway, or of several with the same secret."""
    return int.from_bytes(hashlib.blake2b(secret, digest_size=8).digest(), "little")


def namespace(seed: int, *identity: Buffer) -> int:
    """The hash that a text's keys begin with.

    Args:
        seed: from ``seed_of``.
        identity: what makes equal texts different for an engine (model, salt, template arguments),
            in a fixed order, with b"" for absent values.
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
                # Pieces of equal length: their common work is done once.
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
        # A part ends a piece, unless too little has come since the last cut.
        if in_piece >= piece_bytes >> _LEAST_SHARE_BITS:
            in_piece = 0
            hashes.append(value >> _DROPPED_BITS)
            ends.append(at)
            left -= 1
            if not left:
                left = PIECES_PER_LENGTH
                piece_bytes *= 2
    return PrefixKeys(tuple(hashes), tuple(ends), at)


# Bytes of a long text hashed at a time: less than 0.1 ms.
_STEP_BYTES: Final = 1 << 19


def keys_in_steps(parts: Iterable[Buffer], start: int) -> Generator[None, None, PrefixKeys]:
    """``keys_of`` for long texts, piece by piece, so that the caller can do other work in
    between."""
    value, at, in_piece, hashed = start, 0, 0, 0
    hashes: list[int] = []
    ends: list[int] = []
    piece_bytes, left = PIECE_BYTES, PIECES_PER_LENGTH
    for part in parts:
        view, begin, size = memoryview(part), 0, len(part)
        while begin < size:
            end = min(size, begin + piece_bytes - in_piece)
            value = xxh3_64_intdigest(view[begin:end], value)
            in_piece += end - begin
            hashed += end - begin
            at += end - begin
            begin = end
            least = piece_bytes >> _LEAST_SHARE_BITS if end == size else piece_bytes
            if in_piece >= least:
                in_piece = 0
                hashes.append(value >> _DROPPED_BITS)
                ends.append(at)
                left -= 1
                if not left:
                    left = PIECES_PER_LENGTH
                    piece_bytes *= 2
            if hashed >= _STEP_BYTES:
                hashed = 0
                yield
    return PrefixKeys(tuple(hashes), tuple(ends), at)
