"""How much an engine computes for a request, by the fields of its body: tokens, prompts, media.

``engines/vllm/paths`` says where the prompts are on each path; ``prompt_length`` how long a
field's raw JSON is. Here the two meet: what is computed several times counts as often (a query
with each of its documents, a state with each of its questions), and lists are so many prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.engines.vllm import DOCUMENTS, QUERIES, Prompts
from hetero_gateway.gateway.request.folding import Extent, Steps, count_byte, fold
from hetero_gateway.gateway.request.prompt_length import count_strings, measure, measure_prompt

_SPACE = rb"[ \t\r\n]*+"
# Messages rather than texts or token ids: one conversation, or a list of them.
_MESSAGES = re.compile(rb"\[%b\{" % _SPACE)
_CONVERSATIONS = re.compile(rb"\[%b\[%b\{" % (_SPACE, _SPACE))
_STRINGS = re.compile(rb'\[%b"' % _SPACE)
# A parser makes an object of each item: 1 ms for so many. Of more, marks are counted.
_MOST_COMMAS = 1 << 14
_QUOTE, _COMMA, _OPENING = b'",{'
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_INPUTS = ("input", "texts", "inputs", "images", "data")
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Where = Callable[[msgspec.Raw], Extent]


class Measured(NamedTuple):
    """What the prompts of a body consist of.

    Args:
        tokens: those that are given as ids; None: none is.
        prompts: how many there are.
        text_bytes: of raw JSON text beside them.
        media: images, recordings and videos.
    """

    tokens: int | None = None
    prompts: int = 1
    text_bytes: int = 0
    media: int = 0


def measure_texts(fields: Iterable[msgspec.Raw], extent: Where) -> tuple[int, int]:
    """(media parts, text bytes) of fields that become one prompt together."""
    media = text_bytes = 0
    for field in fields:
        if field:
            found, size = measure(*extent(field))
            media += found
            text_bytes += size
    return media, text_bytes


def measure_body(shape: Prompts, fields: Any, extent: Where) -> Steps[Measured]:
    """The prompts of a body of this shape; of chats and completions, its reader knows itself.

    Args:
        fields: an object with the fields that the shape has; those that are missing are empty.
        extent: where in the body one of them stands.
    """
    if shape is Prompts.CHATS:
        media, text_bytes = measure_texts((fields.messages,), extent)
        prompts = yield from _count(fields.messages, extent)
        return Measured(None, prompts, text_bytes, media)
    if shape is Prompts.TOKENS:
        return Measured(*_one(fields.token_ids, extent))
    if shape is Prompts.INPUTS:
        return (yield from _inputs(fields, (*_INPUTS, "messages"), extent))
    if shape is Prompts.PAIRS:
        return (yield from _pairs(fields, extent))
    if shape is Prompts.ITEMS:
        return (yield from _times(fields.query, fields.items, extent))
    if shape is Prompts.QUESTIONS:
        return (yield from _questions(fields, extent))
    assert shape is Prompts.ANY
    return (yield from _any(fields, extent))


def _one(field: msgspec.Raw, extent: Where) -> Measured:
    """Of texts, token ids, or lists of them."""
    return Measured(*measure_prompt(*extent(field))) if field else Measured()


def _inputs(fields: Any, names: Iterable[str], extent: Where) -> Steps[Measured]:
    """Of fields that each have several inputs; of none, one prompt without anything in it."""
    parts: list[Measured] = []
    for name in names:
        field = getattr(fields, name)
        if not field:
            continue
        data, start, end = extent(field)
        messages = _MESSAGES.match(data, start, end) is not None
        if name == "images":  # each is one, whatever its URL or data
            number = yield from _count(field, extent)
            parts.append(Measured(None, number, 0, number))
        elif _CONVERSATIONS.match(data, start, end) or (messages and name == "inputs"):
            media, text_bytes = measure(data, start, end)
            parts.append(Measured(None, (yield from _count(field, extent)), text_bytes, media))
        elif messages:
            media, text_bytes = measure(data, start, end)
            parts.append(Measured(None, 1, text_bytes, media))
        else:
            parts.append(_one(field, extent))
    return _sum(parts)


def _sum(parts: Sequence[Measured]) -> Measured:
    given = [part.tokens for part in parts if part.tokens is not None]
    return Measured(
        sum(given) if given else None,
        max(1, sum(part.prompts for part in parts)),
        sum(part.text_bytes for part in parts),
        sum(part.media for part in parts),
    )


def _pairs(fields: Any, extent: Where) -> Steps[Measured]:
    """Of several spellings of a side the longest, since which one is read depends on the others."""

    def length_bytes(field: msgspec.Raw) -> int:
        _, start, end = extent(field)
        return end - start

    queries, documents = (
        max((getattr(fields, name) for name in names), key=length_bytes)
        for names in (QUERIES, DOCUMENTS)
    )
    return (yield from _times(queries, documents, extent))


def _times(one: msgspec.Raw, others: msgspec.Raw, extent: Where) -> Steps[Measured]:
    """One text with each of the others, or each with each in turn."""
    first, second = _side(one, extent), _side(others, extent)
    queries = 1 if first.tokens is not None else (yield from _count(one, extent))
    prompts = yield from _count(others, extent)
    times = prompts if queries == 1 else 1
    tokens = None
    if first.tokens is not None or second.tokens is not None:
        tokens = (first.tokens or 0) * times + (second.tokens or 0)
    return Measured(
        tokens,
        max(queries, prompts),
        first.text_bytes * times + second.text_bytes,
        first.media * times + second.media,
    )


def _side(field: msgspec.Raw, extent: Where) -> Measured:
    if not field:
        return Measured()
    data, start, end = extent(field)
    if _MESSAGES.match(data, start, end) or data[start : start + 1] == b"{":
        media, text_bytes = measure(data, start, end)
        return Measured(None, 1, text_bytes, media)
    return _one(field, extent)


def _questions(fields: Any, extent: Where) -> Steps[Measured]:
    media, shared_bytes = measure_texts((fields.state, fields.instructions), extent)
    for field in (fields.images, fields.audio, fields.videos):
        if field:
            media += yield from _count(field, extent)
    found, own_bytes = measure_texts((fields.questions,), extent)
    questions = yield from _count(fields.questions, extent)
    text_bytes = shared_bytes * questions + own_bytes
    return Measured(None, questions, text_bytes, media * questions + found)


def _any(fields: Any, extent: Where) -> Steps[Measured]:
    """All that there is, since what an engine reads depends on whether it is right."""
    pairs = any(getattr(fields, name) for name in QUERIES)
    chat = (fields.messages, fields.system, fields.instructions, fields.tools)
    media, text_bytes = measure_texts(chat if pairs else (*chat, fields.documents), extent)
    parts = [Measured(None, 0, text_bytes, media)]
    if fields.prompt:
        parts.append(_one(fields.prompt, extent))
    if pairs:
        parts.append((yield from _pairs(fields, extent)))
    if any(getattr(fields, name) for name in _INPUTS):
        parts.append((yield from _inputs(fields, _INPUTS, extent)))
    return _sum(parts)


def _count(field: msgspec.Raw, extent: Where) -> Steps[int]:
    """How many items an array has, or an object; 1 for anything else, and for none."""
    if not field:
        return 1
    data, start, end = extent(field)
    opening = data[start : start + 1]
    if opening not in (b"[", b"{"):
        return 1
    if _STRINGS.match(data, start, end):
        return max(1, count_strings(data, start, end))
    short = bytes(data[start:end])
    if len(short) > _MOST_COMMAS:
        short = bytes((yield from fold(short)).short)
    if len(short) <= _MOST_COMMAS or count_byte(short, _COMMA) <= _MOST_COMMAS:
        try:
            items = _decode_items(short) if opening == b"[" else _decode_names(short)
        except _ERRORS:
            pass  # the engine refuses it
        else:
            return max(1, len(items))
    # An object has a pair of braces, and as a rule two pairs of quotation marks.
    return max(1, count_byte(short, _OPENING), count_byte(short, _QUOTE) // 4)
