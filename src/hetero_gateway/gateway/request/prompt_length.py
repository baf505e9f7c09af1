"""How long a prompt is, by the raw JSON of its fields (docs/design/scheduling.md, "Prompt length").

- Token-id prompts are exact: the numbers are counted.
- Otherwise the raw JSON bytes of messages (or prompt, input, system) and tools are counted, a
  ``\\uXXXX`` escape as three bytes, and divided by the model's learnt bytes-per-token ratio.
- Each image, audio clip or video counts ``image_tokens``, and the base64 data none.
"""

from __future__ import annotations

import re
from itertools import islice

from hetero_gateway.gateway.request.body_fields import LEAST_BYTES
from hetero_gateway.gateway.request.byte_counts import (
    Buffer,
    count,
    count_below,
    count_byte,
    highest,
    places,
)

_SPACE = rb"[ \t\r\n]*+"
_TYPE = b'"type"'
_MEDIA_PART = re.compile(
    rb'%b%b:%b"(?:image_url|image|input_image|input_audio|audio_url|video_url)"'
    % (_TYPE, _SPACE, _SPACE)
)
_BASE64_MARK = b";base64,"
_JSON_NUMBERS = re.compile(rb"\[%b[\d-]" % _SPACE)
_JSON_LIST_OF_NUMBERS = re.compile(rb"\[%b\[" % _SPACE)
_JSON_STRINGS = re.compile(rb'\[%b"' % _SPACE)
_ABOVE_NUMBERS = b":"[0]
_ABOVE_SPACES = b"!"[0]
_QUOTE, _COMMA, _OPENING = b'",['
# Of this many parts the types are looked at, and what follows is taken to be alike.
_MOST_PARTS = 4096


def measure_prompt(data: bytes | bytearray, start: int, end: int) -> tuple[int | None, int, int]:
    """(exact tokens of all prompts or None, number of prompts, text bytes) of ``prompt``."""
    if _JSON_NUMBERS.match(data, start):
        if _only_numbers(data, start + 1, end - 1):
            return _commas(data, start, end) + 1, 1, 0
    elif _JSON_LIST_OF_NUMBERS.match(data, start):
        counted = _measure_lists(data, start, end)
        if counted is not None:
            return *counted, 0
    elif _JSON_STRINGS.match(data, start):
        return None, max(1, count_strings(data, start, end)), _text_bytes(data, start, end)
    return None, 1, _text_bytes(data, start, end)


def _only_numbers(data: bytes | bytearray, start: int, end: int) -> bool:
    return highest(memoryview(data)[start:end]) < _ABOVE_NUMBERS and data.find(b'"', start, end) < 0


def _commas(data: bytes | bytearray, start: int, end: int) -> int:
    if end - start < LEAST_BYTES:
        return data.count(b",", start, end)
    return count_byte(memoryview(data)[start:end], _COMMA)


def _measure_lists(data: bytes | bytearray, start: int, end: int) -> tuple[int, int] | None:
    """(tokens, prompts) of lists of numbers; None: there is something else in them."""
    view = memoryview(data)[start:end]
    spaces = count_below(view, _ABOVE_SPACES)
    if spaces and any(count(view, pair) for pair in (b"[ ", b"[\n", b"[\r", b"[\t")):
        data = bytes(view).translate(None, b" \t\r\n")
        start, end = 0, len(data)
        view = memoryview(data)
    lists = count_byte(view, _OPENING)
    # As many brackets close: it is JSON, and has no strings.
    if (
        data.find(b'"', start, end) >= 0
        or len(view) - count_below(view, _ABOVE_NUMBERS) != 2 * lists
    ):
        return None
    # A list has one number more than it has commas, if any; one comma stands between two lists.
    return count_byte(view, _COMMA) + 1 - count(view, b"[]"), max(1, lists - 1)


def count_strings(data: bytes | bytearray, start: int, end: int) -> int:
    """How many strings there are in a list of strings."""
    view: Buffer = memoryview(data)[start:end]
    if data.find(b"\\", start, end) >= 0 and count(view, b"\\\\"):
        view = bytes(view).replace(b"\\\\", b"")
    return (count_byte(view, _QUOTE) - count(view, b'\\"')) // 2


def measure(data: bytes | bytearray, start: int, end: int) -> tuple[int, int]:
    """(media parts, text bytes) of a field that may have both."""
    if end - start < LEAST_BYTES:
        found = len(_MEDIA_PART.findall(data, start, end))
    else:
        parts = list(islice(places(data, start, end, _TYPE), _MOST_PARTS))
        found = sum(_MEDIA_PART.match(data, at, end) is not None for at in parts)
        if len(parts) == _MOST_PARTS:
            found = found * (end - start) // (parts[-1] + len(_TYPE) - start)
    text_bytes = _text_bytes(data, start, end)
    if found:
        text_bytes -= _base64_bytes(data, start, end)
    return found, text_bytes


def _text_bytes(data: bytes | bytearray, start: int, end: int) -> int:
    size = end - start
    # A search for one byte is many times faster than one for two, and long prompts are text.
    if data.find(b"\\", start, end) < 0:
        return size
    if size < LEAST_BYTES:
        return size - 3 * data.count(b"\\u", start, end)
    return size - 3 * count(memoryview(data)[start:end], b"\\u")


def _base64_bytes(data: bytes | bytearray, start: int, end: int) -> int:
    """Bytes of base64 data in data URLs; of no more than ``_MOST_PARTS``."""
    size = 0
    for _ in range(_MOST_PARTS):
        start = data.find(_BASE64_MARK, start, end)
        if start < 0:
            break
        stop = data.find(b'"', start, end)
        stop = end if stop < 0 else stop
        size += stop - start
        start = stop
    return size
