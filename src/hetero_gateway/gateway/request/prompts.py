"""A request's prompt by the raw JSON of its fields: its length, and its keys.

Length (docs/design/scheduling.md, "Prompt length"):

- Token-id prompts are exact: the numbers are counted.
- Otherwise the raw JSON bytes of messages (or prompt, input, system) and tools are counted, a
  ``\\uXXXX`` escape as three bytes, and divided by the model's learnt bytes-per-token ratio.
- Each image, audio clip or video counts ``image_tokens``, and the base64 data none.

Keys (``core/request``):

Nothing is decoded: a part of the text is the JSON of a message, a tool or a content block as the
client wrote it, byte for byte. A client repeats its earlier messages in the same form, and an
answer that it echoes is one message in its own form in this turn and all later ones; so raw spans
are stable where it matters. What stands between them (commas, white space) and beside them
(``max_tokens``, the order of the body's fields) is in no key.

In the order of chat templates: tools come first, and with other tools nothing matches. Whatever
makes an engine read or cache equal text differently begins the keys: the model's name (a LoRA
adapter has its own), ``cache_salt``, template arguments. Images count as the text of their data.

Cost: benchmarks/dataplane/prefix_keys.py. Of a hostile body, at most this many messages are parts
of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol, cast

import msgspec

from hetero_gateway.core.request import Buffer, keys_in_steps, keys_of, namespace
from hetero_gateway.core.types import PrefixKeys
from hetero_gateway.gateway.request.body_fields import LEAST_BYTES, Extent
from hetero_gateway.gateway.request.byte_counts import (
    count,
    count_below,
    count_byte,
    places,
)
from hetero_gateway.gateway.request.items import items_of, places_of
from hetero_gateway.gateway.turns import Steps

# Length

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
# The start of a part of the text if each item of an array is one.
_KEYED = b"[{"
# The types of this many parts are examined; the rest is assumed to be alike.
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
    view = memoryview(data)[start:end]
    return count_below(view, _ABOVE_NUMBERS) == len(view) and data.find(b'"', start, end) < 0


def _commas(data: bytes | bytearray, start: int, end: int) -> int:
    if end - start < LEAST_BYTES:
        return data.count(b",", start, end)
    return count_byte(memoryview(data)[start:end], _COMMA)


def _measure_lists(data: bytes | bytearray, start: int, end: int) -> tuple[int, int] | None:
    """(tokens, prompts) of lists of numbers; None: they contain something else."""
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
    # A list has one more number than commas, if any; one comma stands between two lists.
    return count_byte(view, _COMMA) + 1 - count(view, b"[]"), max(1, lists - 1)


def count_strings(data: bytes | bytearray, start: int, end: int) -> int:
    """The number of strings in a list of strings."""
    view: Buffer = memoryview(data)[start:end]
    if data.find(b"\\", start, end) >= 0 and count(view, b"\\\\"):
        view = bytes(view).replace(b"\\\\", b"")
    return (count_byte(view, _QUOTE) - count(view, b'\\"')) // 2


def measure(data: bytes | bytearray, start: int, end: int) -> tuple[int, int]:
    """(media parts, text bytes) of a field that may have both."""
    if end - start < LEAST_BYTES:
        found = len(_MEDIA_PART.findall(data, start, end))
    else:
        parts = places(data, start, end, _TYPE, _MOST_PARTS)
        found = sum(_MEDIA_PART.match(data, at, end) is not None for at in parts)
        if len(parts) == _MOST_PARTS:
            found = found * (end - start) // (parts[-1] + len(_TYPE) - start)
    text_bytes = _text_bytes(data, start, end)
    if found:
        text_bytes -= _base64_bytes(data, start, end)
    return found, text_bytes


class _Messages(msgspec.Struct):
    messages: msgspec.Raw


# Of a body, as written.
messages_of = msgspec.json.Decoder(_Messages).decode
# Enough of a message to find where it begins or ends: its role, and some of its text.
_FOUND_BY_BYTES = 64


def measure_items(data: bytes | bytearray, items: Sequence[msgspec.Raw]) -> tuple[int, int] | None:
    """``measure`` for the messages of a short body, by its items, which are keyed as they are.

    None if the array must be examined: it is empty, has thousands of items, begins with something
    other than a message, or has more white space than writers of JSON leave.
    """
    place = _place_of(data, items) if 0 < len(items) <= _MOST_KEYED_PARTS else None
    if place is None or data[place[0] + 1] not in _KEYED:
        return None
    start, end = place
    if data.find(b"[", start + 1, end) < 0:  # present if messages have parts
        return 0, _text_bytes(data, start, end)
    return measure(data, start, end)


def _place_of(data: bytes | bytearray, items: Sequence[msgspec.Raw]) -> tuple[int, int] | None:
    """The position of an array in its source. None: not obvious."""
    gaps = len(items) - 1
    size = sum(map(len, items)) + len("[]") + gaps
    # Brackets or items may stand elsewhere, too, but not as far apart.
    start, end = data.find(b"["), data.rfind(b"]") + 1
    if end - start not in (size, size + gaps):
        first, last = (memoryview(items[i]) for i in (0, -1))
        start = data.find(first[:_FOUND_BY_BYTES]) - 1
        end = data.rfind(last[-_FOUND_BY_BYTES:]) + min(len(last), _FOUND_BY_BYTES) + 1
        if end - start not in (size, size + gaps):
            return None
        if data[start] != _OPENING or not data.startswith(b"]", end - 1):
            return None
    return start, end


def _text_bytes(data: bytes | bytearray, start: int, end: int) -> int:
    size = end - start
    # A search for one byte is many times faster than one for two, and long prompts are text.
    if data.find(b"\\", start, end) < 0:
        return size
    if size < LEAST_BYTES:
        return size - 3 * data.count(b"\\u", start, end)
    return size - 3 * count(memoryview(data)[start:end], b"\\u")


def _base64_bytes(data: bytes | bytearray, start: int, end: int) -> int:
    """Bytes of base64 data in data URLs; of at most ``_MOST_PARTS``."""
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


# Keys

# Of one field; the rest is one part.
_MOST_KEYED_PARTS = 1024
# A parser makes an object of each item: at most this many without a look at their number.
_MOST_COMMAS = 2048
# Of each end of what begins the keys.
_LOOKED_AT = 2048
# In less than 0.3 ms; in steps it takes half as long again.
_HASHED_AT_ONCE = 1 << 22

_ITEMS = re.compile(rb"\[[ \t\r\n]*+[\[{]")
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class PromptFields(Protocol):
    """The relevant fields of a body; empty if they are missing."""

    model: str | None
    previous_response_id: msgspec.Raw
    add_special_tokens: msgspec.Raw
    cache_salt: msgspec.Raw
    chat_template: msgspec.Raw
    chat_template_kwargs: msgspec.Raw
    mm_processor_kwargs: msgspec.Raw
    reasoning: msgspec.Raw
    reasoning_effort: msgspec.Raw
    tools: msgspec.Raw
    documents: msgspec.Raw
    system: msgspec.Raw
    instructions: msgspec.Raw
    messages: msgspec.Raw
    prompt: msgspec.Raw
    input: msgspec.Raw


_identity = attrgetter(
    "cache_salt", "chat_template", "chat_template_kwargs", "reasoning_effort", "reasoning",
    "mm_processor_kwargs", "add_special_tokens",
)  # fmt: skip
_text = attrgetter(
    "tools", "documents", "system", "instructions", "messages", "prompt", "input"
)  # fmt: skip


def _head(fields: PromptFields) -> tuple[msgspec.Raw, ...]:
    """The part of a response's prompt that precedes the responses it continues."""
    return (fields.tools, fields.documents, fields.system, fields.instructions)


def head_of(fields: PromptFields, extent: Callable[[msgspec.Raw], Extent], seed: int) -> int:
    """Two responses of which one continues the other begin alike if this is the same."""
    start = namespace(seed, (fields.model or "").encode())
    for place, raw in enumerate((*_identity(fields), *_head(fields))):
        if raw:
            start = namespace(start, *_excerpt(place, *extent(raw)))
    return start


def keys_after(fields: PromptFields, head: int, previous: bytes) -> PrefixKeys:
    """For a short body: the keys of what it adds to the response that it continues."""
    parts = _short_parts(fields.input) if fields.input else ()
    return keys_of(parts, namespace(head, previous))


def keys_of_fields(fields: PromptFields, seed: int) -> PrefixKeys:
    """For a short body; ``seed``: of its namespace's owner.

    ``messages`` may be a list of them.
    """
    parts: list[Buffer] = []
    for raw in filter(None, _text(fields)):
        parts += cast(list[Buffer], raw) if type(raw) is list else _short_parts(raw)
    start = namespace(seed, (fields.model or "").encode())
    identity = _identity(fields)
    if any(identity):
        for place, raw in enumerate(identity):
            if raw:
                data = bytes(raw)
                start = namespace(start, *_excerpt(place, data, 0, len(data)))
    return keys_of(parts, start)


def keys_of_long(
    fields: PromptFields, extent: Callable[[msgspec.Raw], Extent], seed: int, previous: bytes = b""
) -> Steps[PrefixKeys]:
    """For a long body, in steps. ``extent``: the position of a field in it.

    ``previous``: the response that it continues; then only for what it adds.
    """
    if previous:
        text: tuple[msgspec.Raw, ...] = (fields.input,)
        start = namespace(head_of(fields, extent, seed), previous)
    else:
        text = _text(fields)
        start = namespace(seed, (fields.model or "").encode())
        for place, raw in enumerate(_identity(fields)):
            if raw:
                start = namespace(start, *_excerpt(place, *extent(raw)))
    parts: list[Buffer] = []
    for raw in text:
        if raw:
            data, low, high = extent(raw)
            parts += _long_parts(raw, memoryview(data)[low:high])
            yield
    if sum(map(len, parts)) < _HASHED_AT_ONCE:
        return keys_of(parts, start)
    return (yield from keys_in_steps(parts, start))


def _excerpt(place: int, data: bytes | bytearray, start: int, end: int) -> tuple[bytes, bytes]:
    """The field, its length, and its ends: longer ones differ in one of these."""
    ends = bytes(data[start : min(end, start + _LOOKED_AT)])
    if end - start > _LOOKED_AT:
        ends += data[max(start + _LOOKED_AT, end - _LOOKED_AT) : end]
    return b"%d %d" % (place, end - start), ends


def _short_parts(raw: msgspec.Raw) -> Sequence[Buffer]:
    """The parts of one field's JSON."""
    data = bytes(raw)
    first = data[0]
    if first == _OPENING and _ITEMS.match(data):
        if len(data) <= _MOST_COMMAS or data.count(b",") <= _MOST_COMMAS:
            items = _decode_items(data)
            if len(items) <= _MOST_KEYED_PARTS:
                return cast(Sequence[Buffer], items)  # buffers: no copies are made
        return _long_parts(raw, data)
    return [data[1:-1] if first in (_QUOTE, _OPENING) else data]


def _long_parts(raw: msgspec.Raw, data: bytes | memoryview) -> Sequence[Buffer]:
    """The parts of one field; ``data``: written in its place."""
    first = data[0]
    if first == _OPENING and _ITEMS.match(data):
        places = places_of(raw, items_of(raw)[: _MOST_KEYED_PARTS + 1])
        if len(places) > _MOST_KEYED_PARTS:
            places[_MOST_KEYED_PARTS] = (places[_MOST_KEYED_PARTS - 1][1], len(data) - 1)
        return [data[start:end] for start, end in places]
    return [data[1:-1] if first in (_QUOTE, _OPENING) else data]
