"""The keys of a request's prompt (``core/prefixes/keys``), from its raw JSON.

Nothing is decoded: a part of the text is the JSON of a message, a tool or a content block as the
client wrote it, byte for byte. A client writes what it has said before in the same way again, and
an answer that it echoes is one message of its own making in this turn and in all that follow; so
raw spans are stable where it matters. What stands between them (commas, white space) and beside
them (``max_tokens``, the order of the body's fields) is in no key.

In the order of chat templates: tools come first, and with other tools nothing matches. What makes
an engine read or cache equal text differently begins the keys: the model's name (a LoRA adapter
has its own), ``cache_salt``, template arguments. Images count as the text of their data.

Cost: benchmarks/dataplane/prefix_keys.py. Of a hostile body this many messages are parts of their
own and no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol, cast

import msgspec

from hetero_gateway.core.prefixes.keys import (
    Buffer,
    KeyChain,
    namespace,
)
from hetero_gateway.core.types import PrefixKeys
from hetero_gateway.gateway.request.body_fields import Extent
from hetero_gateway.gateway.request.items import items_of, places_of

# Of one field; what follows is one part.
_MOST_PARTS = 1024
# A parser makes an object of each item: this many at most without a look at how many there are.
_MOST_COMMAS = 2048
# Of each end of what begins the keys.
_LOOKED_AT = 2048

_QUOTE, _OPENING = b'"['
_ITEMS = re.compile(rb"\[[ \t\r\n]*+[\[{]")
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class PromptFields(Protocol):
    """The fields of a body that are here of interest; empty where they are missing."""

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
    """What of a response's prompt comes in front of the ones that it continues."""
    return (fields.tools, fields.documents, fields.system, fields.instructions)


def head_of(fields: PromptFields, extent: Callable[[msgspec.Raw], Extent], seed: int) -> int:
    """Two responses of which one continues the other begin alike where this is the same."""
    start = namespace(seed, (fields.model or "").encode())
    for place, raw in enumerate((*_identity(fields), *_head(fields))):
        if raw:
            start = namespace(start, *_excerpt(place, *extent(raw)))
    return start


def keys_after(fields: PromptFields, head: int, previous: bytes) -> PrefixKeys:
    """Of a short body: the keys of what it adds to the response that it continues."""
    chain = KeyChain(namespace(head, previous))
    if fields.input:
        chain.extend(_short_parts(fields.input))
    return chain.keys()


def keys_of_fields(fields: PromptFields, seed: int) -> PrefixKeys:
    """Of a short body; ``seed``: of whoever's namespace it is."""
    start = namespace(seed, (fields.model or "").encode())
    for place, raw in enumerate(_identity(fields)):
        if raw:
            data = bytes(raw)
            start = namespace(start, *_excerpt(place, data, 0, len(data)))
    chain = KeyChain(start)
    for raw in _text(fields):
        if raw:
            chain.extend(_short_parts(raw))
    return chain.keys()


def keys_of_long(
    fields: PromptFields, extent: Callable[[msgspec.Raw], Extent], seed: int, previous: bytes = b""
) -> PrefixKeys:
    """Of a long body. ``extent``: where a field stands in it.

    ``previous``: the response that it continues; then of what it adds alone.
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
    chain = KeyChain(start)
    for raw in text:
        if raw:
            data, low, high = extent(raw)
            chain.extend(_long_parts(raw, memoryview(data)[low:high]))
    return chain.keys()


def _excerpt(place: int, data: bytes | bytearray, start: int, end: int) -> tuple[bytes, bytes]:
    """Which field it is and how long, and its ends: what is longer differs in one of these."""
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
            if len(items) <= _MOST_PARTS:
                return cast(Sequence[Buffer], items)  # they are buffers: no copies are made
        return _long_parts(raw, data)
    return [data[1:-1] if first in (_QUOTE, _OPENING) else data]


def _long_parts(raw: msgspec.Raw, data: bytes | memoryview) -> Sequence[Buffer]:
    """The parts of one field; ``data``: what is written in its place."""
    first = data[0]
    if first == _OPENING and _ITEMS.match(data):
        places = places_of(raw, items_of(raw)[: _MOST_PARTS + 1])
        if len(places) > _MOST_PARTS:
            places[_MOST_PARTS] = (places[_MOST_PARTS - 1][1], len(data) - 1)
        return [data[start:end] for start, end in places]
    return [data[1:-1] if first in (_QUOTE, _OPENING) else data]
