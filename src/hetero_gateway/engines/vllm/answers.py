"""What vLLM's answers say: of the models it serves, of a request's usage, of its own failure.

Nothing here parses an answer that passes through: usage and failures are found in the last bytes of
its body, framing and all. A quote or a newline within a text is escaped in JSON, so none of the
marks below can match what a model wrote.

Seen on vLLM 0.32, and not to be relied on: that ``[DONE]`` means success (a dead engine sends an
error event and then ``[DONE]``, under status 200), or that an event is a token (deltas merge, and
some are empty).
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
# The finish_reason of a sequence that the engine gave up.
ABORT = "abort"
# At most this many events end a stream and are no tokens: usage, where asked for, and ``[DONE]``.
CLOSING_EVENTS = 2

# Digits of the longest count that is taken for one: int() refuses 4 300 and more.
_COUNT = rb"\s*:\s*(\d{1,15})(?!\d)"
# Of the prompt: in its details, or beside it on /v1/messages, where the tokens that were read from
# the cache or written to it are not in ``input_tokens``. Details that are null match nothing.
_USAGE = re.compile(rb'"(prompt|input|completion|output|cached)_tokens"' + _COUNT)
_USAGE_READ = re.compile(rb'"cache_read_input_tokens"' + _COUNT)
_USAGE_CREATED = re.compile(rb'"cache_creation_input_tokens"' + _COUNT)
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"' + _COUNT)
_DELTA = re.compile(rb'"choices":\s*\[\s*\{')
# A client may choose it (``request_id``): visible ASCII, nothing escaped.
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"([!#-\[\]-~]{1,256})"')
_ID_WITHIN_BYTES = 1024
# Events that are no deltas: of a whole stream of /v1/responses, the one that has most of them, and
# of each of its sequences (the role chunk, a finish reason by itself).
_FRAME_EVENTS = 10
_FRAME_EVENTS_EACH = 2
# Of an answer that is no stream: its own document's and each choice's, beside the text; and the
# longest that a token is, escaped, in that.
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


# A server with a thousand adapters has as many models, and vLLM's card of one 25 commas.
MOST_MODELS = 1024
_MOST_COMMAS = 1 << 16
_LONGEST_NAME = 256
# Of a context window in tokens.
_MOST_WINDOW_DIGITS = 9
_LONGEST_ROOT = 1024
_MOST_FIELD_BYTES = 2048
_LATEST_CREATED_S = 2**53
_Permission = list[dict[str, bool | int | str | None]]
_Value = TypeVar("_Value")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class _Usage(msgspec.Struct):
    """The usual one of vLLM, with no other counts in it or behind it: found at a third of the
    price."""

    prompt_tokens: _Count
    total_tokens: _Count
    completion_tokens: _Count


_USUAL_COUNTS = 3
_usual = msgspec.json.Decoder(_Usage).decode


def usage_in_tail(tail: bytes) -> tuple[int | None, int | None, int | None]:
    """(prompt tokens, output tokens, cached prompt tokens) of the last ``usage`` object in a
    response's tail; None: not told, which of cached tokens is not 0.
    """
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None, None, None
    rest = tail[start:]
    if rest.count(b'_tokens"') == _USUAL_COUNTS and rest.count(b"{") == 1:
        try:
            usual = _usual(rest[rest.find(b"{") : rest.find(b"}") + 1])
        except (msgspec.MsgspecError, ValueError):
            pass  # something else that has as many counts
        else:
            return usual.prompt_tokens, usual.completion_tokens, None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    for name, count in _USAGE.findall(tail, start):  # the first of each
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
    """Whether a stream that ended well in HTTP says that the engine failed.

    A killed engine sends an error event and then ``[DONE]`` under status 200; one that is stopped
    may end its streams with finish_reason "abort".
    """
    return tail.startswith(_FAILURES[1][1:]) or any(mark in tail for mark in _FAILURES)


def lacks_model(body: bytes) -> bool:
    """Whether a 404 is for the model that was asked for, and not for a path or a response."""
    return b"The model" in body and b"does not exist" in body


def tokens_of_events(path: str, events: int) -> int:
    """Output tokens of a whole stream that has no usage: one per event that may carry one.

    ``[DONE]`` does not, nor does the role chunk that opens a chat.
    """
    return max(0, events - (1 if path == COMPLETIONS else 2))


def least_tokens_of_events(sequences: int, events: int) -> int:
    """Output tokens that a stream of so many events has at least, whatever its usage says.

    Each delta is of a token or more, but for those that open and close each sequence, each block
    and each item, and for a token whose text is told in two parts (reasoning and what follows it).
    """
    return max(0, events - _FRAME_EVENTS - _FRAME_EVENTS_EACH * sequences) // 2


def least_tokens_of_bytes(path: str, sequences: int, body_bytes: int, asked_bytes: int) -> int:
    """Output tokens that a whole answer of this size has at least, where it has no probabilities.

    Args:
        asked_bytes: of the prompt, of which an answer may repeat parts (instructions, tools).
    """
    if path not in _ANSWERS_OF_TEXT:
        return 0
    frame_bytes = _FRAME_BYTES * (1 + sequences) + 2 * asked_bytes
    return max(0, body_bytes - frame_bytes) // _MOST_BYTES_PER_TOKEN


def deltas_in(events: bytes) -> int:
    """Events with a choice: the role chunk, text, or both; not the closing usage."""
    return len(_DELTA.findall(events))


def completion_counts_in(events: bytes) -> list[int]:
    """Tokens so far, by every event that says: with ``continuous_usage_stats`` each of them."""
    return [int(count) for count in _COMPLETION_TOKENS.findall(events)]


def response_id_in(beginning: bytes) -> bytes:
    """The id of a response on /v1/responses, streamed or not; b"" where it is not in there.

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
    """What an engine says of a model; None or nothing: it does not say, or not in this shape.

    Args:
        max_model_len: its context window in tokens, at most 10^9.
        created: in seconds since 1970.
        owned_by: by whom.
        root: where its weights are from: a name or a path, of at most 1 024 characters.
        parent: of an adapter, the model that it adapts.
        permission: objects of plain values, of at most 2 048 bytes together.
    """

    max_model_len: int | None = None
    created: int | None = None
    owned_by: str | None = None
    root: str | None = None
    parent: str | None = None
    permission: tuple[Mapping[str, bool | int | str | None], ...] = ()


class Listing(NamedTuple):
    """What /v1/models lists. ``left_out``: models whose names cannot be used, or too many."""

    models: dict[str, ModelCard]
    left_out: int


def read_models(body: bytes) -> dict[str, ModelCard] | None:
    """The models that /v1/models lists, in its order, each with its card; see ``read_listing``."""
    listing = read_listing(body)
    return None if listing is None else listing.models


def read_listing(body: bytes) -> Listing | None:
    """The models that /v1/models lists, in its order, each with its card.

    None for what is no list of models. Names that are no printable text of at most 256 characters
    are left out, and so is what comes after the 1 024th. Never raises, and takes at most 10 ms a
    megabyte.
    """
    # What is skipped is not built, but each element of the list is.
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
    """A value of a card; None where it is of another kind, or longer than any is."""
    return None if memoryview(raw).nbytes > _MOST_FIELD_BYTES else _decoded(raw, kind)


def _decoded(data: bytes | msgspec.Raw, kind: type[_Value]) -> _Value | None:
    """None where it is no JSON, or of another kind."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _text(raw: msgspec.Raw, longest: int) -> str | None:
    text = _plain(raw, str)
    return text if text is not None and len(text) <= longest and text.isprintable() else None


def is_model_name(name: str) -> bool:
    """Whether a text can be a model's name: it becomes a label, a line of a log and of a table."""
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable()
