"""How to read vLLM's answers: served models, a request's usage, the engine's failures.

An answer that passes through is never parsed: usage and failures are found in the last bytes of its
body, framing included. Quotes and newlines within a text are escaped in JSON, so none of the marks
below can match what a model wrote.

As seen on vLLM 0.32, do not assume that ``[DONE]`` means success (a dead engine sends an error
event and then ``[DONE]``, under status 200), or that an event is a token (deltas merge, and some
are empty).
"""

import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from hetero_gateway.engines.vllm.paths import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    INVOCATIONS,
    MESSAGES,
    RESPONSES,
)

DONE = b"data: [DONE]\n\n"  # not on /v1/messages and /v1/responses
# The finish_reason of a sequence that the engine aborted.
ABORT = "abort"
# At most this many final events are not tokens: usage, if asked for, and ``[DONE]``.
CLOSING_EVENTS = 2

# Digits of the longest accepted count: int() refuses 4 300 and more.
_COUNT = rb"\s*:\s*(\d{1,15})(?!\d)"
# Of the prompt: in its details, or beside it on /v1/messages, where tokens read from the cache or
# written to it are not in ``input_tokens``. Null details match nothing.
_USAGE = re.compile(rb'"(prompt|input|completion|output|cached)_tokens"' + _COUNT)
_USAGE_READ = re.compile(rb'"cache_read_input_tokens"' + _COUNT)
_USAGE_CREATED = re.compile(rb'"cache_creation_input_tokens"' + _COUNT)
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"' + _COUNT)
_DELTA = re.compile(rb'"choices":\s*\[\s*\{')
# Clients may choose it (``request_id``): visible ASCII, nothing escaped.
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"([!#-\[\]-~]{1,256})"')
_ID_WITHIN_BYTES = 1024
# Events that are not deltas: per stream of /v1/responses, which has the most, and per sequence (the
# role chunk, a finish reason by itself).
_FRAME_EVENTS = 10
_FRAME_EVENTS_EACH = 2
# Bytes of an answer that is not a stream: the document's and each choice's, besides the text; and
# the longest that an escaped token can be there.
_FRAME_BYTES = 4096
_MOST_BYTES_PER_TOKEN = 64
_ANSWERS_OF_TEXT = frozenset(
    (CHAT_COMPLETIONS, CHAT_COMPLETIONS + "/batch", COMPLETIONS, RESPONSES, MESSAGES, INVOCATIONS)
)
_FAILURES = (
    b'data: {"error"',
    b"\nevent: error",
    b'"finish_reason":"%b"' % ABORT.encode(),
    b'"finish_reason": "%b"' % ABORT.encode(),
)


# A server with a thousand adapters has as many models, and vLLM's card of each has 25 commas.
MOST_MODELS = 1024
_MOST_COMMAS = 1 << 16
_LONGEST_NAME = 256
# Limit of a context window, in tokens.
_MOST_WINDOW_DIGITS = 9
_LONGEST_ROOT = 1024
_MOST_FIELD_BYTES = 2048
_LATEST_CREATED_S = 2**53
_Permission = list[dict[str, bool | int | str | None]]
_Value = TypeVar("_Value")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class _Usage(msgspec.Struct):
    """vLLM's usual form, with no other counts in it or behind it: found at a third of the
    cost."""

    prompt_tokens: _Count
    total_tokens: _Count
    completion_tokens: _Count


_USUAL_COUNTS = 3
_usual = msgspec.json.Decoder(_Usage).decode


def usage_in_tail(tail: bytes) -> tuple[int | None, int | None, int | None]:
    """(prompt tokens, output tokens, cached prompt tokens) of the last ``usage`` object in a
    response's tail; None: not stated, which for cached tokens differs from 0.
    """
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None, None, None
    rest = tail[start:]
    if rest.count(b'_tokens"') == _USUAL_COUNTS and rest.count(b"{") == 1:
        try:
            usual = _usual(rest[rest.find(b"{") : rest.find(b"}") + 1])
        except (msgspec.MsgspecError, ValueError):
            pass  # something else with as many counts
        else:
            return usual.prompt_tokens, usual.completion_tokens, None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    for name, count in _USAGE.findall(tail, start):  # the first of each counts
        if name == b"cached":
            if cached_tokens is None:
                cached_tokens = int(count)
        elif name in (b"prompt", b"input"):
            if prompt_tokens is None:
                prompt_tokens = int(count)
        elif output_tokens is None:
            output_tokens = int(count)
    if cached_tokens is None and tail.find(b'_input_tokens"', start) >= 0:
        cached_tokens = _count(_USAGE_READ, tail, start)
        if prompt_tokens is not None:
            created_tokens = _count(_USAGE_CREATED, tail, start)
            prompt_tokens += (cached_tokens or 0) + (created_tokens or 0)
    return prompt_tokens, output_tokens, cached_tokens


def _count(pattern: re.Pattern[bytes], tail: bytes, start: int) -> int | None:
    found = pattern.search(tail, start)
    return None if found is None else int(found[1])


def failed_in_tail(tail: bytes) -> bool:
    """Whether a stream that ended well in HTTP reports that the engine failed.

    A killed engine sends an error event and then ``[DONE]`` under status 200; one that is
    stopped may end its streams with finish_reason "abort".
    """
    return tail.startswith(_FAILURES[1][1:]) or any(mark in tail for mark in _FAILURES)


def lacks_model(body: bytes) -> bool:
    """Whether a 404 is about the requested model, and not about a path or a response."""
    return b"The model" in body and b"does not exist" in body


def tokens_of_events(path: str, events: int) -> int:
    """Output tokens of a whole stream without usage: one per event that may carry one.

    ``[DONE]`` does not, nor does the role chunk that opens a chat.
    """
    return max(0, events - (1 if path == COMPLETIONS else 2))


def least_tokens_of_events(sequences: int, events: int) -> int:
    """The minimum of output tokens in a stream of so many events, whatever its usage says.

    Each delta has at least a token, except those that open and close each sequence, block and
    item, and a token whose text is split in two (reasoning and what follows it).
    """
    return max(0, events - _FRAME_EVENTS - _FRAME_EVENTS_EACH * sequences) // 2


def least_tokens_of_bytes(path: str, sequences: int, body_bytes: int, asked_bytes: int) -> int:
    """The minimum of output tokens in a whole answer of this size without probabilities.

    Args:
        asked_bytes: of the prompt, parts of which an answer may repeat (instructions, tools).
    """
    if path not in _ANSWERS_OF_TEXT:
        return 0
    frame_bytes = _FRAME_BYTES * (1 + sequences) + 2 * asked_bytes
    return max(0, body_bytes - frame_bytes) // _MOST_BYTES_PER_TOKEN


def deltas_in(events: bytes) -> int:
    """The number of events with a choice: the role chunk, text, or both; not the closing usage."""
    return len(_DELTA.findall(events))


def completion_counts_in(events: bytes) -> list[int]:
    """Tokens so far in every event that says; with ``continuous_usage_stats`` each of them does."""
    return [int(count) for count in _COMPLETION_TOKENS.findall(events)]


def response_id_in(beginning: bytes) -> bytes:
    """The id of a response on /v1/responses, streamed or not; b"" if absent.

    In both it is the first ``id``: of the document, or of the ``response`` in its first event.
    """
    found = _RESPONSE_ID.search(beginning, 0, _ID_WITHIN_BYTES)
    return b"" if found is None else found[1]


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


_NULL = msgspec.Raw(b"null")


class _Card(msgspec.Struct):
    id: str
    max_model_len: msgspec.Raw = _NULL
    created: msgspec.Raw = _NULL
    owned_by: msgspec.Raw = _NULL
    root: msgspec.Raw = _NULL
    parent: msgspec.Raw = _NULL
    permission: msgspec.Raw = _NULL


class ModelCard(NamedTuple):
    """What an engine says about a model; None or empty: not stated, or not in this form.

    Args:
        max_model_len: its context window in tokens, at most 10^9.
        created: in seconds since 1970.
        owned_by: the owner.
        root: source of its weights: a name or a path, of at most 1 024 characters.
        parent: of an adapter, the model that it adapts.
        permission: objects of plain values, at most 2 048 bytes together.
    """

    max_model_len: int | None = None
    created: int | None = None
    owned_by: str | None = None
    root: str | None = None
    parent: str | None = None
    permission: tuple[Mapping[str, bool | int | str | None], ...] = ()


class Listing(NamedTuple):
    """The models of /v1/models. ``left_out``: how many have unusable names, or are too many."""

    models: dict[str, ModelCard]
    left_out: int


def read_models(body: bytes) -> dict[str, ModelCard] | None:
    """The models of /v1/models in its order, each with its card; see ``read_listing``."""
    listing = read_listing(body)
    return None if listing is None else listing.models


def read_listing(body: bytes) -> Listing | None:
    """The models of /v1/models in its order, each with its card.

    None if it is not a list of models. Names that are not printable text of at most 256
    characters are left out, as is everything after the 1 024th. Never raises, and takes at most
    10 ms a megabyte.
    """
    # Skipped values are not built, but each element of the list is.
    if body.count(b",") > _MOST_COMMAS:
        return None
    listed = _decoded(body, _Models)
    if listed is None:
        return None
    left_out = max(0, len(listed.data) - MOST_MODELS)
    models: dict[str, ModelCard] = {}
    for raw in listed.data[:MOST_MODELS]:
        card = _decoded(raw, _Card)
        if card is not None and is_model_name(card.id):
            models[card.id] = _model_card(card)
        else:
            left_out += 1
    return Listing(models, left_out)


def _model_card(card: _Card) -> ModelCard:
    window, created = bytes(card.max_model_len), _plain(card.created, int)
    parent = _plain(card.parent, str)
    return ModelCard(
        int(window) or None if window.isdigit() and len(window) <= _MOST_WINDOW_DIGITS else None,
        created if created is not None and 0 <= created <= _LATEST_CREATED_S else None,
        _text(card.owned_by, _LONGEST_NAME),
        _text(card.root, _LONGEST_ROOT),
        parent if parent is not None and is_model_name(parent) else None,
        tuple(_plain(card.permission, _Permission) or ()),
    )


def _plain(raw: msgspec.Raw, kind: type[_Value]) -> _Value | None:
    """A value of a card; None if it has another type, or is too long."""
    return None if memoryview(raw).nbytes > _MOST_FIELD_BYTES else _decoded(raw, kind)


def _decoded(data: bytes | msgspec.Raw, kind: type[_Value]) -> _Value | None:
    """None if it is not JSON, or of another type."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _text(raw: msgspec.Raw, longest: int) -> str | None:
    text = _plain(raw, str)
    return text if text is not None and len(text) <= longest and text.isprintable() else None


def is_model_name(name: str) -> bool:
    """Whether a text can be a model's name: it becomes a label, and part of log and table lines."""
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable()
