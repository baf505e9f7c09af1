"""The items of a JSON array as written, without an object for each of millions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hetero_gateway.gateway.request.body_fields import NOTHING
from hetero_gateway.gateway.request.byte_counts import count_byte

# With this many commas there may be as many items; of more, only this many are made.
MOST_ITEMS = 1 << 12
_COMMA = b","[0]
_GAP = re.compile(rb"[ \t\r\n,]*+")
_decode_all = msgspec.json.Decoder(list[msgspec.Raw]).decode


@functools.cache
def _first_decoder() -> Callable[[msgspec.Raw], Any]:
    """Made when the first long array comes: it is 2 MB of memory."""
    names = [(f"item_{i}", msgspec.Raw, NOTHING) for i in range(MOST_ITEMS)]
    # Anything after the fields of an array-like struct is skipped.
    return msgspec.json.Decoder(msgspec.defstruct("FirstItems", names, array_like=True)).decode


def items_of(array: msgspec.Raw) -> Sequence[msgspec.Raw]:
    """The first ``MOST_ITEMS`` items of an array that has been read as JSON already."""
    if memoryview(array).nbytes <= MOST_ITEMS or count_byte(array, _COMMA) < MOST_ITEMS:
        return _decode_all(array)
    first = msgspec.structs.astuple(_first_decoder()(array))
    return [item for item in first if item is not NOTHING]


def places_of(array: msgspec.Raw, items: Sequence[msgspec.Raw]) -> list[tuple[int, int]]:
    """(start, end) of an array's first items within it."""
    result, end = [], 1
    for item in items:
        gap = _GAP.match(array, end)
        assert gap is not None
        start = gap.end()
        end = start + memoryview(item).nbytes
        result.append((start, end))
    return result
