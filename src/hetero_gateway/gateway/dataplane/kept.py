"""The reads kept of a stream that may have to continue elsewhere.

A read costs only its place in a deque. The total is checked now and then; if all streams together
keep much, the older reads of each are compressed: events repeat each other, and then take a
twentieth of the memory.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable

# Of a response that has ended, or is too long: the closing usage, ``[DONE]`` and the last chunk may
# come in reads of their own.
TAIL_READS = 6
# A read is an event or more; this is the size of an event without text.
_MOST_READS = 4096
_FIRST_LOOK_READS = 256
# Of all streams, about 350 bytes a read; of one, enough to contain repetition.
_MOST_LOOSE_BYTES = 12_000_000
_LEAST_SQUEEZED_BYTES = 8192
_OBJECT_BYTES = 41  # a read's own, and its place
# Reads repeat content from some hundred bytes before: a small, cheap window is enough.
_WINDOW_BITS, _MEMORY_LEVEL = 12, 5


class KeptReads:
    """The reads of one stream.

    Args:
        most_bytes: kept of it.

    Attributes:
        reads: each is appended; the last few stay uncompressed.
    """

    __slots__ = ("_look_at_reads", "_most_bytes", "_squeezed", "_squeezed_bytes", "reads")

    def __init__(self, most_bytes: int) -> None:
        self.reads: deque[bytes] = deque(maxlen=_MOST_READS)
        self._most_bytes = most_bytes
        self._look_at_reads = _FIRST_LOOK_READS
        self._squeezed: list[bytes] = []
        self._squeezed_bytes = 0  # as they came

    def is_too_long(self, more_bytes: int = 0) -> bool:
        """Whether it is longer than what is kept, checked now and then, or including a long read
        that is coming.
        """
        reads = self.reads
        if not more_bytes and len(reads) < self._look_at_reads:
            return False
        self._look_at_reads = 2 * len(reads) or 1
        size_bytes = self._squeezed_bytes + sum(map(len, reads)) + more_bytes
        return len(reads) == _MOST_READS or size_bytes > self._most_bytes

    def body(self) -> bytes | None:
        """The whole stream so far, as it came; None: there were too many reads."""
        if len(self.reads) == _MOST_READS:
            return None
        parts = [zlib.decompress(part, -_WINDOW_BITS) for part in self._squeezed]
        return b"".join((*parts, *self.reads))

    @property
    def loose_bytes(self) -> int:
        """Approximate memory of the reads that may be compressed."""
        reads = self.reads
        return len(reads) * (len(reads[-1]) + _OBJECT_BYTES) if len(reads) > TAIL_READS else 0

    def squeeze(self) -> None:
        """Compress all but the last few."""
        reads = self.reads
        body = b"".join([reads.popleft() for _ in range(len(reads) - TAIL_READS)])
        compressor = zlib.compressobj(1, zlib.DEFLATED, -_WINDOW_BITS, _MEMORY_LEVEL)
        self._squeezed.append(compressor.compress(body) + compressor.flush())
        self._squeezed_bytes += len(body)
        self._look_at_reads = 1


class Squeezing:
    """Compresses streams, one in each turn of the event loop."""

    __slots__ = ("_loop", "_queue")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: list[KeptReads] = []

    def look_at(self, streams: Iterable[KeptReads]) -> None:
        """Compress them if together they take too much; call it now and then."""
        if self._queue:
            return
        sizes = [(kept.loose_bytes, kept) for kept in streams]
        if sum(size_bytes for size_bytes, _ in sizes) > _MOST_LOOSE_BYTES:
            self._queue = [
                kept for size_bytes, kept in sizes if size_bytes >= _LEAST_SQUEEZED_BYTES
            ]
            self._step()

    def _step(self) -> None:
        if self._queue:
            self._queue.pop().squeeze()
            self._loop.call_soon(self._step)
