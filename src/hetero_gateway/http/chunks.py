"""Decodes the body of a chunked request: drops extensions and trailers.

A chunk of one byte takes six on the wire and a microsecond here, so a step takes a bounded number
of chunks, and what follows waits for the next step.

    state     next is                          then
    --------  -------------------------------  -----------------------------------
    size      a line with a chunk's size       data; trailer after a size of 0
    data      this many bytes of it            line end
    line end  CR LF                            size
    trailer   a field, or an empty line        trailer; complete at the empty line
"""

import enum
import re

from hetero_gateway.http.heads import MAX_FIELDS, bad_request, read_field

# A size and its extensions, which nobody uses; and a trailer field.
_MAX_LINE_BYTES = 4096
# Limit of all framing, beyond a line of 16 bytes and twice the data for each chunk: a body may not
# consist of extensions (Go's net/http has the same rule).
_MAX_EXCESS_BYTES = 16384
_MAX_TRAILER_BYTES = 16384
_CHUNKS_PER_STEP = 512
_OTHERS_PER_STEP = 128

# ``int`` accepts hexadecimal forms that HTTP does not (0x1, 1_0, +1).
_HEX_DIGITS = b"0123456789abcdefABCDEF"
# Extensions begin with a semicolon; whitespace before it, which RFC 9112 (7.1.1) calls bad, is
# refused.
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t -~\x80-\xff]*)?\r\n")


class _State(enum.Enum):
    SIZE = enum.auto()
    DATA = enum.auto()
    LINE_END = enum.auto()
    TRAILER = enum.auto()
    COMPLETE = enum.auto()


class ChunkDecoder:
    """Removes the framing of one body."""

    __slots__ = ("_excess", "_left", "_part", "_state", "_trailer_bytes", "_trailers")

    def __init__(self) -> None:
        self._state = _State.SIZE
        self._left = 0  # of the chunk's data
        self._part = b""  # of an incomplete line
        self._excess = 0
        self._trailers = 0
        self._trailer_bytes = 0

    @property
    def complete(self) -> bool:
        return self._state is _State.COMPLETE

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """(body bytes, the rest of ``data``): what follows the body, or is left for the next step.

        Raises:
            Refusal: 400 or 431; nothing after it can be read.
        """
        if self._part:
            data, self._part = self._part + data, b""
        parts: list[bytes] = []
        at = self._take_whole(data, parts)
        # The exceptions: a chunk in parts, with extensions, or the last one.
        for _ in range(_OTHERS_PER_STEP if len(parts) < _CHUNKS_PER_STEP else 0):
            if self._state is _State.SIZE:
                line = self._line(data, at)
                at += len(line)
                if not line:
                    break
                self._begin_chunk(line)
            if self._state is _State.DATA:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
                self._state = _State.LINE_END
            if self._state is _State.LINE_END:
                if len(data) - at < 2:
                    self._part, at = data[at:], len(data)
                    break
                if data[at : at + 2] != b"\r\n":
                    raise bad_request("A chunk doesn't end where its size says.")
                at += 2
                self._state = _State.SIZE
            elif self._state is _State.TRAILER:
                line = self._line(data, at)
                at += len(line)
                if not line:
                    break
                self._take_trailer(line)
                if self.complete:
                    break
        if self._part:
            at = len(data)
        return b"".join(parts), data[at:]

    def _take_whole(self, data: bytes, parts: list[bytes]) -> int:
        """Take complete chunks without extensions; returns where they end.

        A shorter way for them: a microsecond each instead of six. It is not taken after extensions,
        whose excess is computed with each chunk.
        """
        at = 0
        if self._state is not _State.SIZE or self._excess:
            return at
        for _ in range(_CHUNKS_PER_STEP):
            line_end = data.find(b"\r\n", at, at + 10)
            line = data[at:line_end]
            if line_end <= at or line.strip(_HEX_DIGITS):
                break
            end = line_end + 2 + int(line, 16)
            if end == line_end + 2 or data[end : end + 2] != b"\r\n":
                break
            parts.append(data[line_end + 2 : end])
            at = end + 2
        return at

    def _line(self, data: bytes, at: int) -> bytes:
        """The line at ``at``, including its end; empty while it is incomplete."""
        end = data.find(b"\n", at, at + _MAX_LINE_BYTES)
        if end >= 0:
            return data[at : end + 1]
        if len(data) - at >= _MAX_LINE_BYTES:
            raise bad_request("A line between the request's chunks is too long.")
        self._part = data[at:]
        return b""

    def _begin_chunk(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise bad_request("A chunk's size is malformed.")
        size = self._left = int(match[1], 16)
        self._excess = max(0, self._excess + len(line) - 16 - 2 * size)
        if self._excess > _MAX_EXCESS_BYTES:
            raise bad_request("The request has more chunk extensions than data.")
        self._state = _State.DATA if size else _State.TRAILER

    def _take_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self._state = _State.COMPLETE
            return
        self._trailers += 1
        self._trailer_bytes += len(line)
        if self._trailers > MAX_FIELDS or self._trailer_bytes > _MAX_TRAILER_BYTES:
            raise bad_request("The request has too many trailer fields.")
        if not line.endswith(b"\r\n"):
            raise bad_request("A trailer field is malformed.")
        read_field(line[:-2])
