"""How much an engine computes for a request, by the fields of its body: tokens, prompts, media.

``engines/vllm/paths`` knows where the prompts are on each path; ``prompts`` measures a field's raw
JSON. This module combines them: what is computed several times counts as often (a query with each
of its documents, a state with each of its questions), and a list is that many prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.engines.vllm import DOCUMENTS, QUERIES, Prompts
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request.body_fields import Extent, fields_of
from hetero_gateway.gateway.request.byte_counts import count_byte
from hetero_gateway.gateway.request.items import MOST_ITEMS, items_of
from hetero_gateway.gateway.request.prompts import count_strings, measure, measure_prompt

_SPACE = rb"[ \t\r\n]*+"
# Messages rather than texts or token ids: one conversation, or a list of them.
_MESSAGES = re.compile(rb"\[%b\{" % _SPACE)
_CONVERSATIONS = re.compile(rb"\[%b\[%b\{" % (_SPACE, _SPACE))
_STRINGS = re.compile(rb'\[%b"' % _SPACE)
_QUOTE, _OPENING = b'"{'
_INPUTS = ("input", "texts", "inputs", "images", "data")

Where = Callable[[msgspec.Raw], Extent]


class PromptSize(NamedTuple):
    """The contents of a body's prompts.

    Args:
        tokens: given as ids; None: none.
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


def measure_body(shape: Prompts, fields: Any, extent: Where) -> PromptSize:
    """The prompts of a body of this shape; chats and completions are measured by their reader.

    Args:
        fields: an object with the fields of the shape; missing ones are empty.
        extent: the position of one of them in the body.
    """
    if shape is Prompts.CHATS:
        media, text_bytes = measure_texts((fields.messages,), extent)
        prompts = _count(fields.messages, extent)
        return PromptSize(None, prompts, text_bytes, media)
    if shape is Prompts.TOKENS:
        return PromptSize(*_one(fields.token_ids, extent))
    if shape is Prompts.INPUTS:
        return _inputs(fields, (*_INPUTS, "messages"), extent)
    if shape is Prompts.PAIRS:
        return _pairs(fields, extent)
    if shape is Prompts.ITEMS:
        return _times(fields.query, fields.items, extent)
    if shape is Prompts.QUESTIONS:
        return _questions(fields, extent)
    assert shape is Prompts.ANY
    return _any(fields, extent)


def _one(field: msgspec.Raw, extent: Where) -> PromptSize:
    """Texts, token ids, or lists of them."""
    return PromptSize(*measure_prompt(*extent(field))) if field else PromptSize()


def _inputs(fields: Any, names: Iterable[str], extent: Where) -> PromptSize:
    """Fields that each have several inputs; without any, one empty prompt."""
    parts: list[PromptSize] = []
    for name in names:
        field = getattr(fields, name)
        if not field:
            continue
        data, start, end = extent(field)
        messages = _MESSAGES.match(data, start, end) is not None
        if name == "images":  # each counts as one, whatever its URL or data
            number = _count(field, extent)
            parts.append(PromptSize(None, number, 0, number))
        elif _CONVERSATIONS.match(data, start, end) or (messages and name == "inputs"):
            media, text_bytes = measure(data, start, end)
            parts.append(PromptSize(None, _count(field, extent), text_bytes, media))
        elif messages:
            media, text_bytes = measure(data, start, end)
            parts.append(PromptSize(None, 1, text_bytes, media))
        else:
            parts.append(_one(field, extent))
    return _sum(parts)


def _sum(parts: Sequence[PromptSize]) -> PromptSize:
    given = [part.tokens for part in parts if part.tokens is not None]
    return PromptSize(
        sum(given) if given else None,
        max(1, sum(part.prompts for part in parts)),
        sum(part.text_bytes for part in parts),
        sum(part.media for part in parts),
    )


def _pairs(fields: Any, extent: Where) -> PromptSize:
    """Of several spellings of a side the longest, since which one is read depends on the others."""

    def length_bytes(field: msgspec.Raw) -> int:
        _, start, end = extent(field)
        return end - start

    queries, documents = (
        max((getattr(fields, name) for name in names), key=length_bytes)
        for names in (QUERIES, DOCUMENTS)
    )
    return _times(queries, documents, extent)


def _times(one: msgspec.Raw, others: msgspec.Raw, extent: Where) -> PromptSize:
    """One text with each of the others, or each with each in turn."""
    first, second = _side(one, extent), _side(others, extent)
    queries = 1 if first.tokens is not None else _count(one, extent)
    prompts = _count(others, extent)
    times = prompts if queries == 1 else 1
    tokens = None
    if first.tokens is not None or second.tokens is not None:
        tokens = (first.tokens or 0) * times + (second.tokens or 0)
    return PromptSize(
        tokens,
        max(queries, prompts),
        first.text_bytes * times + second.text_bytes,
        first.media * times + second.media,
    )


def _side(field: msgspec.Raw, extent: Where) -> PromptSize:
    if not field:
        return PromptSize()
    data, start, end = extent(field)
    if _MESSAGES.match(data, start, end) or data[start : start + 1] == b"{":
        media, text_bytes = measure(data, start, end)
        return PromptSize(None, 1, text_bytes, media)
    return _one(field, extent)


def _questions(fields: Any, extent: Where) -> PromptSize:
    media, shared_bytes = measure_texts((fields.state, fields.instructions), extent)
    for field in (fields.images, fields.audio, fields.videos):
        if field:
            media += _count(field, extent)
    found, own_bytes = measure_texts((fields.questions,), extent)
    questions = _count(fields.questions, extent)
    text_bytes = shared_bytes * questions + own_bytes
    return PromptSize(None, questions, text_bytes, media * questions + found)


def _any(fields: Any, extent: Where) -> PromptSize:
    """Everything there is, since what an engine reads depends on whether it is valid."""
    pairs = any(getattr(fields, name) for name in QUERIES)
    chat = (fields.messages, fields.system, fields.instructions, fields.tools)
    media, text_bytes = measure_texts(chat if pairs else (*chat, fields.documents), extent)
    parts = [PromptSize(None, 0, text_bytes, media)]
    if fields.prompt:
        parts.append(_one(fields.prompt, extent))
    if pairs:
        parts.append(_pairs(fields, extent))
    if any(getattr(fields, name) for name in _INPUTS):
        parts.append(_inputs(fields, _INPUTS, extent))
    return _sum(parts)


def _count(field: msgspec.Raw, extent: Where) -> int:
    """The number of items of an array, or of an object; 1 for anything else, and for none."""
    if not field:
        return 1
    data, start, end = extent(field)
    opening = data[start : start + 1]
    if opening not in (b"[", b"{"):
        return 1
    if _STRINGS.match(data, start, end):
        return max(1, count_strings(data, start, end))
    try:
        items = len(items_of(field) if opening == b"[" else fields_of(field))
    except Refusal:
        items = MOST_ITEMS
    if items < MOST_ITEMS:
        return max(1, items)
    # More are not made. An object has a pair of braces, and usually two pairs of quotation marks.
    return max(items, count_byte(field, _OPENING), count_byte(field, _QUOTE) // 4)
