"""Counts bytes in what may be megabytes, and finds texts.

By ``bytes``' own methods; for a long body by numpy's (``byte_scans``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import msgspec

Buffer = bytes | bytearray | memoryview | msgspec.Raw
# numpy is 13 MB of memory. From this many bytes on it saves a third of a millisecond.
LEAST_SCANNED_BYTES = 1 << 18
_SCANS = "hetero_gateway.gateway.request.byte_scans"
# A copy of a whole view would not stay in the cache.
_BLOCK_BYTES = 1 << 16


def lacks_scans(size_bytes: int) -> bool:
    """Whether a body of this size needs what is not loaded yet."""
    return size_bytes >= LEAST_SCANNED_BYTES and _SCANS not in sys.modules


def load_scans() -> ModuleType:
    """Takes a tenth of a second the first time: ``LongBodies`` does it in a thread."""
    from hetero_gateway.gateway.request import byte_scans

    return byte_scans


def count(data: Buffer, pair: bytes) -> int:
    """How often two bytes are adjacent; of equal ones, whether they are (0: nowhere)."""
    if _is_scanned(data):
        return int(load_scans().count(data, pair))
    return sum(block.count(pair) for block in _blocks(data, overlap=1))


def count_byte(data: Buffer, byte: int) -> int:
    """How often a byte occurs."""
    if _is_scanned(data):
        return int(load_scans().count_byte(data, byte))
    return sum(block.count(byte) for block in _blocks(data))


def count_below(data: Buffer, byte: int) -> int:
    """How many bytes are below this one."""
    if _is_scanned(data):
        return int(load_scans().count_below(data, byte))
    others = bytes(range(byte, 256))
    return sum(len(block.translate(None, others)) for block in _blocks(data))


def places(data: bytes | bytearray, start: int, end: int, text: bytes, most: int) -> list[int]:
    """The first positions of a text of at least two bytes; none overlaps another."""
    if end - start >= LEAST_SCANNED_BYTES:
        return list(load_scans().places(data, start, end, text, most))
    found: list[int] = []
    at = data.find(text, start, end)
    while at >= 0 and len(found) < most:
        found.append(at)
        at = data.find(text, at + len(text), end)
    return found


def _is_scanned(data: Buffer) -> bool:
    return memoryview(data).nbytes >= LEAST_SCANNED_BYTES


def _blocks(data: Buffer, overlap: int = 0) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), _BLOCK_BYTES):
        yield bytes(view[start : start + _BLOCK_BYTES + overlap])
