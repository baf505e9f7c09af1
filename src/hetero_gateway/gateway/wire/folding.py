"""A long body made short: long runs that nobody reads are taken out before it is parsed.

What scheduling wants to know of a prompt is its length and whether it has media in it. A JSON
parser walks through every byte of it, and one megabyte of escaped text or of token ids would hold
the event loop for 2 ms (benchmarks/dataplane/parse_body.py). So stretches without a quotation mark,
which are the inside of one string or of one list of numbers, are found with memchr, counted with
numpy, and left out: what is parsed then has the same fields, and their lengths are made up from
``Run``.

A cut is made between two commas of a list of numbers, or between two characters of a string, and
never takes a quotation mark, so that no field comes or goes. What was left out is not checked:
whether it is right is for the engine to say, as everything else in a prompt. If the short body is
no JSON, the whole one is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

# Shorter bodies are parsed at once: it takes less than 0.1 ms.
LEAST_BYTES = 1 << 16
# A stretch of so many bytes without a quotation mark is worth a cut; text has one every few lines.
_WINDOW_BYTES = 1 << 11
# At each end of a cut this much is looked at for a place between characters or numbers.
_MARGIN_BYTES = 64
_BLOCK_BYTES = 1 << 15
_BACKSLASH, _COMMA, _U = b"\\,u"
# Digits, commas and white space are below; letters, brackets and the backslash are not.
_ABOVE_NUMBERS = b":"[0]
# A quotation mark that has one of these behind it, white space aside, ends a string.
_BEHIND_A_STRING = b",:]}"
_SPACE = b" \t\r\n"
_BASE64_MARK = b";base64,"
_LOW_HALVES = frozenset((b"dc", b"dd", b"de", b"df"))
# The longest escape is \uXXXX, and two of them make one character.
_LONGEST_ESCAPE = 12


Buffer = bytes | memoryview | msgspec.Raw


class Run(NamedTuple):
    """What was left out at ``offset`` of the short body.

    ``escapes``: its backslashes in front of a u. ``base64``: it was a part of a data URL.
    """

    offset: int
    size_bytes: int
    commas: int
    escapes: int
    base64: bool


class Fold(NamedTuple):
    """What was left out of one field. ``text_bytes``: an escape counts as three bytes."""

    text_bytes: int
    base64_bytes: int
    commas: int


NO_FOLD = Fold(0, 0, 0)


def fold_of(short: bytes, runs: list[Run], field: msgspec.Raw) -> Fold:
    """What was left out of a field of the short body; ``field`` is a view into that."""
    start = _address(field) - _address(short)
    size = memoryview(field).nbytes
    inside = [run for run in runs if start < run.offset < start + size]
    return Fold(
        sum(run.size_bytes - 3 * run.escapes for run in inside),
        sum(run.size_bytes for run in inside if run.base64),
        sum(run.commas for run in inside),
    )


def _address(data: Buffer) -> int:
    if not memoryview(data).nbytes:
        return 0
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def positions(data: Buffer, pair: bytes) -> list[int]:
    """Where two bytes stand side by side: in a long text some times as fast as ``bytes.find``."""
    return [
        start + at for start, found in _pairs(data, pair) for at in np.flatnonzero(found).tolist()
    ]


def count(data: Buffer, pair: bytes) -> int:
    """How often two bytes stand side by side."""
    return sum(int(np.count_nonzero(found)) for _, found in _pairs(data, pair))


def _pairs(data: Buffer, pair: bytes) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    # Block by block: fresh memory for a whole megabyte costs more than looking at it.
    array = np.frombuffer(data, np.uint8)
    for start in range(0, array.size - 1, _BLOCK_BYTES):
        block = array[start : start + _BLOCK_BYTES + 1]
        yield start, (block[:-1] == pair[0]) & (block[1:] == pair[1])


def fold(body: bytes) -> tuple[bytes, list[Run]]:
    """The body without its long runs, and what they were; the body itself where it has none."""
    parts: list[bytes] = []
    runs: list[Run] = []
    kept_to = offset = 0
    for start, end in _stretches(body):
        cut = _cut(body, start, end)
        if cut is None:
            continue
        first, last = cut
        parts.append(body[kept_to:first])
        offset += first - kept_to
        runs.append(_run(body, first, last, offset))
        kept_to = last
    if not runs:
        return body, runs
    parts.append(body[kept_to:])
    return b"".join(parts), runs


def _stretches(body: bytes) -> list[tuple[int, int]]:
    """(start, end) of what has no quotation mark, in whole windows."""
    result = []
    find, size = body.find, len(body)
    position = 0
    while position + _WINDOW_BYTES <= size:
        if find(b'"', position, position + _WINDOW_BYTES) >= 0:
            position += _WINDOW_BYTES
            continue
        end = find(b'"', position)
        if end < 0:
            end = size
        result.append((position, end))
        position = end
    return result


def _cut(body: bytes, start: int, end: int) -> tuple[int, int] | None:
    """Where to cut within a stretch; None: nowhere."""
    closing = body.find(b"]", start, end)
    list_end = end if closing < 0 else closing
    if list_end - start >= _WINDOW_BYTES and _numbers(body, start, list_end):
        first = body.find(b",", start, list_end)
        last = body.rfind(b",", start, list_end)
        return (first, last) if 0 <= first < last else None
    if not _in_a_string(body, start):
        return None
    tail_start = end - _MARGIN_BYTES
    opening = _between_characters(body[start : start + _MARGIN_BYTES])
    ending = _between_characters(body[tail_start:end])
    return None if opening is None or ending is None else (start + opening, tail_start + ending)


def _numbers(body: bytes, start: int, end: int) -> bool:
    return int(np.frombuffer(body, np.uint8, end - start, start).max()) < _ABOVE_NUMBERS


def _in_a_string(body: bytes, start: int) -> bool:
    """Whether the last quotation mark opened a string, or was a character of one."""
    mark = body.rfind(b'"', 0, start)
    behind = body[mark + 1 : start + _MARGIN_BYTES].lstrip(_SPACE)[:1]
    return mark >= 0 and behind != b"" and behind not in _BEHIND_A_STRING


def _between_characters(text: bytes) -> int | None:
    """A place in a string's text that is within neither an escape nor a character."""
    for i in range(_LONGEST_ESCAPE, len(text) - 4):
        byte = text[i]
        if byte == _BACKSLASH:
            opens = text[i - 1] != _BACKSLASH
            second = text[i + 1] == _U and text[i + 2 : i + 4].lower() in _LOW_HALVES
            if opens and not second:
                return i
        elif not 0x80 <= byte < 0xC0 and b"\\" not in text[i - _LONGEST_ESCAPE : i]:
            return i  # ASCII, or the first byte of a character
    return None


def _run(body: bytes, first: int, last: int, offset: int) -> Run:
    run = np.frombuffer(body, np.uint8, last - first, first)
    commas = escapes = 0
    if body.find(b"\\", first, last) >= 0:
        escapes = count(memoryview(body)[first:last], b"\\u")
    elif _numbers(body, first, last):
        commas = int(np.count_nonzero(run == _COMMA))
    base64 = body.find(_BASE64_MARK, body.rfind(b'"', 0, first), first) >= 0
    return Run(offset, last - first, commas, escapes, base64)
