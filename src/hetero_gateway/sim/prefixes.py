"""Which prompts begin alike: for an engine's cache, and for the gateway. Pure.

A workload's text is known by block: block i of a request covers its tokens from i·block_tokens on,
prompt and answer together, and equal ids mean equal text up to the block's end. Text after the last
known block is unique to its request.

    engine    a key for each of its blocks (``block_cache.py``), made from the id of the block that
              the last token lies in
    gateway   ``core/request``, over a text of 4 bytes per token that represents the prompt; its
              parts end where a prompt or a run of blocks does in any request, as messages do
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.core.request import keys_of
from hetero_gateway.core.types import PrefixKeys

BYTES_PER_TOKEN = 4
# 64-bit constants of splitmix64 (Steele, Lea, Flood 2014): they spread differences in a few bits.
_STEP, _MIX_1, _MIX_2 = (
    np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_KEY_MASK = np.uint64((1 << 62) - 1)
# Ids of a request's own text begin here; a trace's are smaller.
FIRST_OWN_ID = 1 << 40


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks with the ids first, first + 1, …"""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class KnownText:
    """The known part of one request's text: its blocks, in order; only full ones."""

    runs: tuple[Run, ...]

    @property
    def blocks(self) -> int:
        return sum(run.count for run in self.runs)

    def ids(self) -> Integers:
        parts = [np.arange(run.first, run.first + run.count) for run in self.runs]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class Prefixes:
    """The texts of a workload's requests, in its order.

    Args:
        texts: one per request; ids are 0 to ``FIRST_OWN_ID``.
        prompt_tokens, output_tokens: (N,) of the requests.
        block_tokens: tokens of a block of the texts, at least 1.

    Raises:
        ValueError: lengths that differ, or a text that is longer than its request.
    """

    def __init__(
        self,
        texts: Sequence[KnownText],
        prompt_tokens: Integers,
        output_tokens: Integers,
        block_tokens: int,
    ) -> None:
        if not len(texts) == len(prompt_tokens) == len(output_tokens):
            raise ValueError("there must be a text for each request")
        self.block_tokens = block_tokens
        self.texts = tuple(texts)
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        for i, text in enumerate(texts):
            if text.blocks * block_tokens > int(prompt_tokens[i] + output_tokens[i]):
                raise ValueError(f"request {i}: its text is longer than prompt and output")
        self._part_ends: set[int] = set()
        for text, tokens in zip(texts, prompt_tokens.tolist(), strict=True):
            self._part_ends.update(run.first + run.count - 1 for run in text.runs)
            self._part_ends.update(text.ids()[: tokens // block_tokens][-1:].tolist())
        self._keys: list[PrefixKeys | None] = [None] * len(texts)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def most_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        return int((self._prompt_tokens + self._output_tokens).max())

    def engine_keys(self, request: int, block_tokens: int) -> Integers:
        """The keys of a request's full blocks, in an engine with blocks of this many tokens."""
        tokens = int(self._prompt_tokens[request] + self._output_tokens[request])
        numbers = np.arange(tokens // block_tokens)
        ids = self.texts[request].ids()
        at = ((numbers + 1) * block_tokens - 1) // self.block_tokens
        own = np.full(max(0, int(at[-1]) + 1 - ids.size) if at.size else 0, FIRST_OWN_ID + request)
        return _keys(np.concatenate((ids, own))[at], numbers)

    def gateway_keys(self, request: int) -> PrefixKeys:
        """The keys of a request's prompt; made once."""
        keys = self._keys[request]
        if keys is None:
            keys = self._keys[request] = keys_of(self._parts(request), 0)
        return keys

    def _parts(self, request: int) -> Iterator[bytes]:
        prompt_tokens = int(self._prompt_tokens[request])
        ids = self.texts[request].ids()[: prompt_tokens // self.block_tokens]
        words = -(-self.block_tokens * BYTES_PER_TOKEN // 8)
        start = 0
        for i, block in enumerate(ids.tolist()):
            if block in self._part_ends:
                yield self._text(ids[start : i + 1], words)
                start = i + 1
        if start < ids.size:
            yield self._text(ids[start:], words)
        own_bytes = (prompt_tokens - ids.size * self.block_tokens) * BYTES_PER_TOKEN
        if own_bytes:
            yield (FIRST_OWN_ID + request).to_bytes(8, "little").ljust(own_bytes, b"\0")[:own_bytes]

    def _text(self, ids: Integers, words: int) -> bytes:
        text = np.repeat(ids, words).view(np.uint8).reshape(ids.size, words * 8)
        return text[:, : self.block_tokens * BYTES_PER_TOKEN].tobytes()


def _keys(ids: Integers, numbers: Integers) -> Integers:
    x = (ids.astype(np.uint64) << np.uint64(20)) + numbers.astype(np.uint64) + np.uint64(1)
    mixed: NDArray[np.uint64] = x * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return ((mixed & _KEY_MASK) | np.uint64(1)).astype(np.int64)
