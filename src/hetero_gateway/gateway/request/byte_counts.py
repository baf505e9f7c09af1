"""How often bytes are in what may be megabytes, and where a text is.

With numpy, block by block: where they are many, it is many times faster than ``bytes.count``
or ``bytes.find``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | msgspec.Raw
# Fresh memory for a whole megabyte costs more than looking at it.
_BLOCK_BYTES = 1 << 16


def count(data: Buffer, pair: bytes) -> int:
    """How often two bytes stand side by side, of equal ones each pair that overlaps, too."""
    array = np.frombuffer(data, np.uint8)
    total = 0
    for start in range(0, array.size - 1, _BLOCK_BYTES):
        block = array[start : start + _BLOCK_BYTES + 1]
        total += int(np.count_nonzero((block[:-1] == pair[0]) & (block[1:] == pair[1])))
    return total


def count_byte(data: Buffer, byte: int) -> int:
    """How often a byte is there."""
    return sum(int(np.count_nonzero(block == byte)) for block in _blocks(data))


def count_below(data: Buffer, byte: int) -> int:
    """How many bytes are below this one."""
    return sum(int(np.count_nonzero(block < byte)) for block in _blocks(data))


def highest(data: Buffer) -> int:
    """The highest byte; ``data`` is not empty."""
    return int(np.frombuffer(data, np.uint8).max())


def places(data: Buffer, start: int, end: int, text: bytes) -> Iterator[int]:
    """Where a text of two bytes at least stands."""
    array = np.frombuffer(data, np.uint8)
    for low in range(start, end - len(text) + 1, _BLOCK_BYTES):
        high = min(low + _BLOCK_BYTES, end - len(text) + 1)
        found = (array[low:high] == text[0]) & (array[low + 1 : high + 1] == text[1])
        if np.count_nonzero(found):
            at = np.flatnonzero(found) + low
            for i in range(2, len(text)):
                at = at[array[at + i] == text[i]]
            yield from at.tolist()


def _blocks(data: Buffer) -> Iterator[NDArray[np.uint8]]:
    array = np.frombuffer(data, np.uint8)
    for start in range(0, array.size, _BLOCK_BYTES):
        yield array[start : start + _BLOCK_BYTES]
