"""The functions of ``byte_counts`` for long bodies: by numpy, three to five times faster there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Fresh memory for a whole megabyte costs more than scanning it.
_BLOCK_BYTES = 1 << 16


def count(data: Any, pair: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    total = 0
    for start in range(0, array.size - 1, _BLOCK_BYTES):
        block = array[start : start + _BLOCK_BYTES + 1]
        total += int(np.count_nonzero((block[:-1] == pair[0]) & (block[1:] == pair[1])))
    return total


def count_byte(data: Any, byte: int) -> int:
    return sum(int(np.count_nonzero(block == byte)) for block in _blocks(data))


def count_below(data: Any, byte: int) -> int:
    return sum(int(np.count_nonzero(block < byte)) for block in _blocks(data))


def places(data: Any, start: int, end: int, text: bytes, most: int) -> list[int]:
    array, places = np.frombuffer(data, np.uint8), []
    for low in range(start, end - len(text) + 1, _BLOCK_BYTES):
        high = min(low + _BLOCK_BYTES, end - len(text) + 1)
        found = (array[low:high] == text[0]) & (array[low + 1 : high + 1] == text[1])
        if np.count_nonzero(found):
            at = np.flatnonzero(found) + low
            for i in range(2, len(text)):
                at = at[array[at + i] == text[i]]
            places += at.tolist()
            if len(places) >= most:
                break
    return places[:most]


def _blocks(data: Any) -> Iterator[NDArray[np.uint8]]:
    array = np.frombuffer(data, np.uint8)
    for start in range(0, array.size, _BLOCK_BYTES):
        yield array[start : start + _BLOCK_BYTES]
