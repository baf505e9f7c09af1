"""A long body made short: what is nested in its fields is taken out before it is parsed.

What scheduling wants to know of a prompt is its length and whether it has media in it. A JSON
parser walks through every byte of it, and makes objects of what a hostile body is full of: 20 MB of
``[]`` held the event loop for 14 s. So the inside of the top level's long arrays, objects and
strings is found block by block with numpy, whatever it is made of, and left out: what is parsed
then is small, and has the same fields. Where they stand in the whole body is known from the cuts.

A cut takes away whole values only, so that no field comes or goes. What was left out was not
checked: whether it is right is for the engine to say, as everything else in a prompt. In a body
that is no JSON the cuts are anywhere; the engine refuses it.

On the way the walk notes where the items of those fields stand (a prompt's messages), for their
keys (``prompt_keys``): this many, and no more.

Time is linear in the body's bytes, whatever they are (benchmarks/dataplane/parse_body.py); and it
is taken in steps of a block, between which the event loop may have its turn.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

# Shorter bodies are parsed at once: it takes less than 0.1 ms.
LEAST_BYTES = 1 << 16
# What is shorter stays: a cut costs as much as parsing that much. Longer than the longest way of
# writing any field's name, all its letters escaped.
_LEAST_CUT_BYTES = 1 << 9
_BLOCK_BYTES = 1 << 16
# This many bytes are walked through one by one sooner than with arrays.
_SHORT_BYTES = 1 << 8
_TOKENS = re.compile(rb'\\.|["\[\]{}]', re.DOTALL)
_QUOTE, _BACKSLASH = b'"\\'
# Brackets and braces differ by one bit, which is set in no other character that gives these.
_CASE_BIT = 0x20
_OPENING, _CLOSING = b"{}"
_OPENING_BIT = 2
# Digits, commas, white space and quotation marks are below; brackets and letters are not.
_ABOVE_NUMBERS = b":"[0]
# Items of fields that are minded: a conversation has some hundreds.
MOST_ITEMS = 1 << 12
# This many sorted searches cost as much as a running sum over a block.
_MANY = 1 << 8


# Something that is worked out step by step, so that its driver can pause: it returns the result.
Result = TypeVar("Result")
Steps = Generator[None, None, Result]

_NOWHERE: NDArray[np.intp] = np.empty(0, np.intp)

Buffer = bytes | bytearray | memoryview | msgspec.Raw
# Where a field stands: between the two places of the bytes.
Extent = tuple[bytes | bytearray, int, int]
# (start, end) in order, none within another.
Spans = list[tuple[int, int]]
_Places = NDArray[np.intp]


class Cut(NamedTuple):
    """What was left out at ``offset`` of the short body: ``start`` to ``end`` of the whole one."""

    offset: int
    start: int
    end: int


class Folded(NamedTuple):
    """The body without the long insides of its fields, and where they were.

    ``items``: the first ``MOST_ITEMS`` objects and arrays that its fields' arrays consist of.
    """

    short: bytes | bytearray
    cuts: list[Cut]
    items: Spans


def fold(body: bytes | bytearray) -> Steps[Folded]:
    """Fold a body, in steps."""
    cuts: list[Cut] = []
    parts: list[Buffer] = []
    kept_to = offset = 0
    view = memoryview(body)
    walk = _Walk(body)
    for spans in walk.insides():
        for start, end in spans:
            offset += start - kept_to
            parts.append(view[kept_to:start])
            cuts.append(Cut(offset, start, end))
            kept_to = end
        yield
    if not cuts:
        return Folded(body, cuts, walk.items)
    parts.append(view[kept_to:])
    return Folded(b"".join(parts), cuts, walk.items)


def items_of(field: bytes) -> Spans:
    """The items of an array, by itself; as ``Folded.items``."""
    head = b'{"":'
    folded = finish(fold(head + field + b"}"))
    return [(start - len(head), end - len(head)) for start, end in folded.items]


def finish(steps: Steps[Result]) -> Result:
    """Take all steps at once."""
    result = advance(steps, math.inf)
    assert result is not None
    return result


def advance(steps: Steps[Result], for_s: float) -> Result | None:
    """Take steps for so long, in seconds; None: there are more."""
    until_s = time.perf_counter() + for_s
    try:
        next(steps)
        while time.perf_counter() < until_s:
            next(steps)
    except StopIteration as end:
        result: Result = end.value
        return result
    return None


def place(short: Buffer, cuts: list[Cut], field: msgspec.Raw) -> tuple[int, int]:
    """(start, end) in the whole body of a field of the short one; ``field`` is a view into that."""
    size = memoryview(field).nbytes
    if not size:
        return 0, 0
    start = _address(field) - _address(short)
    return _unfold(cuts, start), _unfold(cuts, start + size)


def _unfold(cuts: list[Cut], offset: int) -> int:
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if cuts[middle].offset < offset:
            low = middle + 1
        else:
            high = middle
    return offset if not low else offset - cuts[low - 1].offset + cuts[low - 1].end


def _address(data: Buffer) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def count(data: Buffer, pair: bytes) -> int:
    """How often two bytes stand side by side: in a long text faster than ``bytes.count``."""
    return sum(int(np.count_nonzero(found)) for _, found in _pairs(data, pair))


def count_byte(data: Buffer, byte: int) -> int:
    """How often a byte is there: for what is full of it faster than ``bytes.count``."""
    return sum(int(np.count_nonzero(block == byte)) for block in _blocks(data))


def count_below(data: Buffer, byte: int) -> int:
    """How many bytes are below this one."""
    return sum(int(np.count_nonzero(block < byte)) for block in _blocks(data))


def highest(data: Buffer) -> int:
    """The highest byte; ``data`` is not empty."""
    return int(np.frombuffer(data, np.uint8).max())


def positions(
    data: bytes | bytearray, start: int, end: int, text: bytes, most: int
) -> tuple[list[int], int]:
    """(where a text of two bytes at least stands, how far was looked: ``end``, or as for ``most``).

    In a long one it is faster than ``bytes.find``.
    """
    array = np.frombuffer(data, np.uint8)
    first, second = text[:2]
    result: list[int] = []
    last = end - len(text) + 1
    low = data.find(text[:1], start, last)
    while low >= 0:
        high = min(low + _BLOCK_BYTES, last)
        found = array[low:high] == first
        found &= array[low + 1 : high + 1] == second
        if np.count_nonzero(found):
            at = np.flatnonzero(found) + low
            for i in range(2, len(text)):
                at = at[array[at + i] == text[i]]
            result += at[: most - len(result)].tolist()
            if len(result) == most:
                return result, result[-1] + len(text)
        low = data.find(text[:1], high, last)
    return result, end


def _blocks(data: Buffer) -> Iterator[NDArray[np.uint8]]:
    # Fresh memory for a whole megabyte costs more than looking at it.
    array = np.frombuffer(data, np.uint8)
    for start in range(0, array.size, _BLOCK_BYTES):
        yield array[start : start + _BLOCK_BYTES]


def _pairs(data: Buffer, pair: bytes) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    array = np.frombuffer(data, np.uint8)
    for start in range(0, array.size - 1, _BLOCK_BYTES):
        block = array[start : start + _BLOCK_BYTES + 1]
        yield start, (block[:-1] == pair[0]) & (block[1:] == pair[1])


class _Walk:
    """A walk through a body that knows, at each block's start, where it is.

    ``_in_string``; ``_depth``: how many brackets are open; ``_inside_from``: where the inside of
    the present field's array or object begins; ``_string_from``: where the present string does,
    and whether it is a value or a key of the top level: ``_at_top``; ``_backslashes``: how many
    stand right in front of the block; ``_item_from``: where the present item begins.
    """

    def __init__(self, body: bytes | bytearray) -> None:
        self._body = body
        self._array = np.frombuffer(body, np.uint8)
        self._in_string = False
        self._depth = 0
        self._inside_from = -1
        self._string_from = -1
        self._at_top = False
        self._backslashes = 0
        self._item_from = -1
        self.items: Spans = []

    def insides(self) -> Iterator[list[tuple[int, int]]]:
        """(start, end) of what can be left out, in order, none within another; block by block."""
        body, size = self._body, self._array.size
        start = 0
        while start < size:
            if self._in_string:
                # Most of what is long is text: go on where the next string may end.
                mark = body.find(b'"', start)
                if mark < 0:
                    break
                if mark > start:
                    self._backslashes = self._run_before(start, mark)
                    start = mark
            # Small blocks at first, where the names of fields are, and at the end.
            end = min(start + max(_SHORT_BYTES, min(start, _BLOCK_BYTES)), size)
            short = end - start <= _SHORT_BYTES
            yield self._short_block(start, end) if short else self._block(start, end)
            if self._in_string:
                self._backslashes = self._run_before(start, end)
            start = end

    def _run_before(self, start: int, end: int) -> int:
        """Backslashes right in front of ``end``, those in front of ``start`` being known."""
        if self._body[end - 1] != _BACKSLASH:
            return 0
        high = end
        while high > start:
            low = max(start, high - (64 if high == end else _BLOCK_BYTES))
            others = np.flatnonzero(self._array[low:high] != _BACKSLASH)
            if others.size:
                return end - low - int(others[-1]) - 1
            high = low
        return end - start + self._backslashes

    def _short_block(self, start: int, end: int) -> list[tuple[int, int]]:
        """What ``_block`` does, one by one."""
        spans = []
        body = self._body
        if self._in_string and self._backslashes % 2:
            start += 1
        for match in _TOKENS.finditer(body, start, end):
            at = match.start()
            byte = body[at]
            if byte == _BACKSLASH:
                continue
            if self._in_string:
                if byte == _QUOTE:
                    self._in_string = False
                    if self._at_top and at - self._string_from >= _LEAST_CUT_BYTES:
                        spans.append((self._string_from, at))
            elif byte == _QUOTE:
                self._in_string = True
                self._string_from, self._at_top = at + 1, self._depth == 1
            elif byte & _OPENING_BIT:
                self._depth += 1
                if self._depth == 2:
                    self._inside_from = at + 1
                elif self._depth == 3:
                    self._item_from = at
            else:
                self._depth -= 1
                if self._depth == 2 and self._item_from >= 0:
                    self._add_items([(self._item_from, at + 1)])
                    self._item_from = -1
                elif self._depth == 1 and self._inside_from >= 0:
                    if at - self._inside_from >= _LEAST_CUT_BYTES:
                        spans.append((self._inside_from, at))
                    self._inside_from = -1
        return spans

    def _block(self, start: int, end: int) -> list[tuple[int, int]]:
        block = self._array[start:end]
        marks = self._marks(block, start, end)
        if not marks.size and (self._in_string or int(block.max()) < _ABOVE_NUMBERS):
            return []
        in_string, depth = self._in_string, self._depth
        where, depths, opens = self._brackets(block, marks)
        where_in_body = where + start
        spans = self._arrays(where_in_body, depths, opens)
        if where.size and len(self.items) < MOST_ITEMS:
            self._note_items(where_in_body, depths, opens)
        if marks.size:
            spans += self._strings(marks, where, depths, start, in_string, depth)
            spans.sort()
        return spans

    def _marks(self, block: NDArray[np.uint8], start: int, end: int) -> _Places:
        """Where strings begin and end."""
        if self._body.find(b'"', start, end) < 0:
            return _NOWHERE
        quotes = block == _QUOTE
        if self._body.find(b"\\", max(0, start - 1), end) < 0:
            return np.flatnonzero(quotes)
        behind = np.empty(block.size, np.bool_)  # a backslash
        behind[0] = start and self._array[start - 1] == _BACKSLASH
        np.equal(block[:-1], _BACKSLASH, out=behind[1:])
        escaped = quotes & behind
        if escaped[0]:
            escaped[0] = self._backslashes % 2
        if np.count_nonzero(escaped[1:] & behind[:-1]):
            # An even number of backslashes are characters of the string, and no escape.
            at = np.flatnonzero(quotes & behind)
            others = np.flatnonzero(block != _BACKSLASH)
            before = np.searchsorted(others, at) - 1
            last = np.where(before >= 0, others[before], -1 - self._backslashes)
            escaped[at] = (at - 1 - last) % 2 == 1
        quotes ^= escaped
        return np.flatnonzero(quotes) if np.count_nonzero(quotes) else _NOWHERE

    def _brackets(
        self, block: NDArray[np.uint8], marks: _Places
    ) -> tuple[_Places, _Places, NDArray[np.bool_]]:
        """(where, depth behind it, whether it opens) of the brackets outside of strings."""
        lower = block | _CASE_BIT
        where = np.flatnonzero((lower == _OPENING) | (lower == _CLOSING))
        if where.size and (marks.size or self._in_string):
            if where.size < _MANY:
                inside = np.searchsorted(marks, where) & 1
            else:
                # In 32 bits: numpy adds up smaller numbers three times as slowly.
                flips = np.zeros(block.size, np.int32)
                flips[marks] = 1
                inside = np.cumsum(flips)[where] & 1
            where = where[inside == self._in_string]
        if marks.size % 2:
            self._in_string = not self._in_string
        opens = (block[where] & _OPENING_BIT) != 0
        depths = np.cumsum(np.where(opens, 1, -1)) + self._depth
        if where.size:
            self._depth = int(depths[-1])
        return where, depths, opens

    def _arrays(
        self, where: _Places, depths: _Places, opens: NDArray[np.bool_]
    ) -> list[tuple[int, int]]:
        """The insides of arrays and objects that are fields of the top level and end here."""
        starts = where[opens & (depths == 2)] + 1
        ends = where[~opens & (depths == 1)]
        if self._inside_from >= 0:
            starts = np.append(self._inside_from, starts)
        self._inside_from = int(starts[-1]) if starts.size > ends.size else -1
        starts = starts[: ends.size]
        ends = ends[: starts.size]
        long = ends - starts >= _LEAST_CUT_BYTES
        return list(zip(starts[long].tolist(), ends[long].tolist(), strict=True))

    def _note_items(self, where: _Places, depths: _Places, opens: NDArray[np.bool_]) -> None:
        """The items that end here, and the one that does not."""
        # Those that open and close items take turns, as none is within another.
        places = where[depths + ~opens == 3].tolist()
        if self._item_from >= 0:
            places.insert(0, self._item_from)
        self._item_from = places.pop() if len(places) % 2 else -1
        self._add_items([(a, b + 1) for a, b in zip(places[::2], places[1::2], strict=True)])

    def _add_items(self, items: Spans) -> None:
        self.items += items[: MOST_ITEMS - len(self.items)]

    def _strings(
        self,
        marks: _Places,
        where: _Places,
        depths: _Places,
        start: int,
        in_string: bool,
        depth: int,
    ) -> list[tuple[int, int]]:
        """The insides of the top level's strings that end here."""
        spans = []
        if in_string:
            end = start + int(marks[0])
            if self._at_top and end - self._string_from >= _LEAST_CUT_BYTES:
                spans.append((self._string_from, end))
        first = 1 if in_string else 0  # of those that open a string
        long = np.flatnonzero(np.diff(marks) > _LEAST_CUT_BYTES)
        opening = long[long % 2 == first] if long.size else long
        last = marks.size - 1
        if self._in_string:
            opening = np.append(opening, last)
        for i in opening.tolist():
            at = int(np.searchsorted(where, marks[i]))
            at_top = (int(depths[at - 1]) if at else depth) == 1
            if i == last:
                self._string_from, self._at_top = start + int(marks[i]) + 1, at_top
            elif at_top:
                spans.append((start + int(marks[i]) + 1, start + int(marks[i + 1])))
        return spans
