"""Reads the fields of a request's body that scheduling needs.

A request's body is passed on byte for byte; only a few fields are examined, with the prompt left as
raw JSON. engines/vllm knows what an engine's paths and answers mean.

The fields are read as the engine reads them: the last of equal keys, numbers as pydantic accepts
them (``whole_numbers``), and what Python's ``json`` accepts beyond JSON (NaN, lone surrogates,
UTF-16). Numbers that no engine accepts are refused, and so are guarded fields
(``engines/vllm/fields``); everything unread is left to the engine. ``prompts`` and
``prompt_shapes`` measure prompts; ``forms`` finds the fields of a form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import msgspec

from hetero_gateway.core.lengths.speech import seconds_of
from hetero_gateway.core.types import PrefixKeys
from hetero_gateway.engines.vllm import (
    CUTS_PROMPTS,
    GENERATE,
    GUARDED_FIELDS,
    INVOCATIONS,
    RESPONSES,
    Prompts,
    guarded_at,
    limits_of,
)
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request import whole_numbers
from hetero_gateway.gateway.request.body_fields import (
    DECODE_ERRORS,
    LEAST_BYTES,
    MOST_MODEL_BYTES,
    NOTHING,
    SAMPLING,
    BodyReaders,
    Extent,
    itself,
    no_model,
    not_allowed,
    read_fields,
    top_level,
)
from hetero_gateway.gateway.request.forms import Form, is_form, read_form
from hetero_gateway.gateway.request.prompt_shapes import PromptSize, measure_body
from hetero_gateway.gateway.request.prompts import (
    head_of,
    keys_after,
    keys_of_fields,
    keys_of_long,
    measure,
    measure_items,
    measure_prompt,
    messages_of,
)
from hetero_gateway.gateway.turns import Steps, finish

# OpenAI's own limit is 64 characters.
_MOST_SESSION_BYTES = 512
# Fields that refer to something stored in an engine, or name what it should store.
_REFERENCES = ("previous_response_id", "conversation", "request_id")
# Where a body may refer to something stored in an engine.
_STORING = frozenset((RESPONSES, RESPONSES + "/render"))
# vLLM's own have 21 characters; a client may choose longer ones.
_MOST_RESPONSE_ID_BYTES = 256
_SPACE = b" \t\r\n"
_TEXT = Prompts.TEXT


class ParsedRequest(msgspec.Struct, array_like=True, gc=False):
    """The contents of a body. ``text_bytes``: of the prompt beside ``exact_prompt_tokens``, if any.

    ``truncates``: the engine cuts the prompt to a length that the client gives. ``prefix``: the
    keys of its prompt; None if not wanted, or if its beginning is not in the body. ``cache_salt``:
    its JSON, by which the client keeps caches apart; b"" without one. ``session``: the beginning of
    JSON that names a conversation, or else a user; b"" without one. Only on /v1/responses:
    ``previous``: the response it continues, b"" for none; then ``prefix`` covers what it adds.
    ``head``: from ``prompts.head_of``. ``stored``: a field that names what is stored, or refers to
    it otherwise; "" for none. ``asked``: the name that the client asked for, if that is an alias of
    ``model``. ``most_prompt_tokens``: to which each prompt is cut; 0: not cut. ``speech_s``: the
    playing time of a recording, in seconds. ``wordy``: probabilities are requested, which make an
    answer longer than its tokens. ``form``: the body is a form.
    """

    model: str | None
    stream: bool
    max_output_tokens: int | None
    sequences: int
    text_bytes: int
    media_parts: int
    exact_prompt_tokens: int | None
    prompt_count: int
    truncates: bool = False
    prefix: PrefixKeys | None = None
    cache_salt: bytes = b""
    session: bytes = b""
    previous: bytes = b""
    head: int = 0
    asked: str = ""
    stored: str = ""
    most_prompt_tokens: int = 0
    speech_s: float = 0.0
    wordy: bool = False
    form: bool = False


# For clients that may set no guarded fields; and to read what has been read before.
_NOTHING_ALLOWED = BodyReaders()
_ALL_ALLOWED = BodyReaders(GUARDED_FIELDS)


def parse_body(
    body: bytes | bytearray,
    content_type: bytes,
    path: str = INVOCATIONS,
    seed: int | None = None,
    readers: BodyReaders = _NOTHING_ALLOWED,
) -> ParsedRequest:
    """Read the fields that scheduling needs from a request's body.

    Args:
        seed: the start of its prompt's keys; None: no keys are wanted.
        readers: how bodies are read, and what clients may set.

    Raises:
        Refusal: 400 for broken JSON, a body that is not an object, a ``model`` that is not a
            string, a number that no engine accepts, a guarded field; 404 for a name that is no
            model's. Everything else is left to the engine.
    """
    if len(body) < LEAST_BYTES:
        reader = readers[path]
        try:
            fields = reader.decode(body)
        except DECODE_ERRORS:
            pass  # the engine may still find what it reads
        else:
            measured = None
            if reader.shape is not _TEXT:
                measured = measure_body(reader.shape, fields, itself)
            parsed = _describe(fields, itself, path, measured, body)
            if path in _STORING:
                _continue(parsed, fields, itself, seed)
            if seed is not None and fields.truncate_prompt_tokens is None:
                if parsed.previous:
                    parsed.prefix = keys_after(fields, parsed.head, parsed.previous)
                else:
                    parsed.prefix = keys_of_fields(fields, seed)
            return parsed
    return finish(parse_in_steps(body, content_type, path, seed, readers))


def parse_in_steps(
    body: bytes | bytearray,
    content_type: bytes,
    path: str = INVOCATIONS,
    seed: int | None = None,
    readers: BodyReaders = _NOTHING_ALLOWED,
) -> Steps[ParsedRequest]:
    """``parse_body`` for a long body, so that the caller can do other work in between."""
    if is_form(path, content_type):
        form = yield from read_form(body, content_type)
        return _describe_form(body, form, guarded_at(path) - readers.allowed)
    reader = readers[path]
    fields, extent = yield from read_fields(body, reader)
    yield
    measured = None
    if reader.shape is not _TEXT:
        measured = measure_body(reader.shape, fields, extent)
    parsed = _describe(fields, extent, path, measured)
    if path in _STORING:
        _continue(parsed, fields, extent, seed)
    if seed is not None and fields.truncate_prompt_tokens is None:
        yield
        parsed.prefix = yield from keys_of_long(fields, extent, seed, parsed.previous)
    return parsed


def _continue(
    parsed: ParsedRequest,
    fields: Any,
    extent: Callable[[msgspec.Raw], Extent],
    seed: int | None,
) -> None:
    """The response it continues, and whether it begins as that does."""
    if seed is not None:
        parsed.head = head_of(fields, extent, seed)
    if (previous := _given(fields.previous_response_id, extent)) is not None:
        parsed.previous = _response_id(previous)
    for name in _REFERENCES[1:]:
        if _given(getattr(fields, name), extent) is not None:
            parsed.stored = name
            break


def _given(raw: msgspec.Raw, extent: Callable[[msgspec.Raw], Extent]) -> bytes | None:
    """A field's JSON, or the beginning of a long one; None: it is missing, or null."""
    if not raw:
        return None
    data, start, end = extent(raw)
    value = bytes(data[start : min(end, start + _MOST_RESPONSE_ID_BYTES + len('""'))])
    return None if value == b"null" else value


def _response_id(value: bytes) -> bytes:
    """The id that a JSON text stands for, with escapes resolved; or the text itself."""
    try:
        return msgspec.json.decode(value, type=str).encode() or value
    except (msgspec.MsgspecError, ValueError):
        return value


# Transcribing servers cut a recording into pieces of this many seconds, each a sequence of its own.
_SPEECH_PIECE_S = 30.0


# Where the text of a prompt may be, beside ``prompt`` and ``messages``.
_texts_of = attrgetter(
    "input", "system", "instructions", "tools", "documents", "previous_input_messages"
)


def _describe(
    fields: Any,
    extent: Callable[[msgspec.Raw], Extent],
    path: str,
    measured: PromptSize | None,
    body: bytes | bytearray = b"",
) -> ParsedRequest:
    """``measured``: its prompts; None: they are one text, or ``prompt``. ``body``: its messages are
    a list, unless they must be examined as written.
    """
    model = fields.model
    if model is not None and len(model) > MOST_MODEL_BYTES:
        raise no_model(len(model))
    n, limit = _counts(fields, path)
    if measured is None:
        tokens, prompts, text_bytes, media_parts = None, 1, 0, 0
        data: bytes | bytearray
        if fields.prompt:
            tokens, prompts, text_bytes = measure_prompt(*extent(fields.prompt))
        texts = _texts_of(fields)
        if type(fields.messages) is not list:
            texts = (fields.messages, *texts)
        elif (conversation := measure_items(body, fields.messages)) is not None:
            media_parts, size = conversation
            text_bytes += size
        else:
            fields.messages = messages_of(body).messages
            texts = (fields.messages, *texts)
        for field in texts:
            if field is NOTHING:
                continue
            # The usual case: without a call.
            if extent is itself:
                data = bytes(field)
                start, end = 0, len(data)
            else:
                data, start, end = extent(field)
            found, size = measure(data, start, end) if end > start else (0, 0)
            media_parts += found
            text_bytes += size
    else:
        tokens, prompts, text_bytes, media_parts = measured
    stream = fields.stream
    parsed = ParsedRequest(
        model,
        stream is True or not (stream is None or stream is False or not _true(stream)),
        limit,
        min(prompts * n, whole_numbers.MOST_SEQUENCES),
        text_bytes,
        media_parts,
        tokens,
        prompts,
    )
    # Rare fields, which cost all other requests one look.
    if fields.cache_salt is not NOTHING:
        data, start, end = extent(fields.cache_salt)
        parsed.cache_salt = bytes(data[start:end])
    session = fields.prompt_cache_key or fields.user
    if session:
        parsed.session = _beginning(*extent(session))
    cut = fields.truncate_prompt_tokens
    if cut is not None:
        parsed.truncates = True
        if type(cut) is int and cut > 0 and path in CUTS_PROMPTS:
            parsed.most_prompt_tokens = cut
    if fields.logprobs is not NOTHING or fields.prompt_logprobs is not NOTHING:
        parsed.wordy = True
    return parsed


def _describe_form(body: bytes | bytearray, form: Form, guarded: frozenset[str]) -> ParsedRequest:
    """A recording and its parameters."""
    for name, (start, end) in form.items():
        # No engine is known to look at a name's contents, which say nothing about the next one.
        own = name.replace("[", ".").partition(".")[0].strip()
        if own in guarded and body[start : min(end, start + 8)].strip() not in (b"", b"null", b"0"):
            raise not_allowed(own)

    def text(name: str) -> str | None:
        start, end = form.get(name, (0, 0))
        if end - start > MOST_MODEL_BYTES:
            raise no_model(end - start)
        return body[start:end].decode("utf-8", "replace") or None

    speech_s = seconds_of(body, *form.get("file", (0, 0)))
    pieces = max(1, math.ceil(speech_s / _SPEECH_PIECE_S))
    limit = text("max_completion_tokens")
    start, end = form.get("prompt", (0, 0))
    return ParsedRequest(
        text("model"),
        _true(text("stream") or ""),
        whole_numbers.read(limit, "max_completion_tokens"),
        pieces,
        (end - start) * pieces,
        1,
        None,
        pieces,
        speech_s=speech_s,
        form=True,
    )


def _beginning(data: bytes | bytearray, start: int, end: int) -> bytes:
    return bytes(data[start : min(end, start + _MOST_SESSION_BYTES)])


def with_model(body: bytes | bytearray, content_type: bytes, name: str) -> bytes:
    """A usable body with another model's name in place of its own, if any, else byte for byte.

    Of equal keys the last one is replaced, which is the one that is read.

    Raises:
        Refusal: 400 for a body without a name to replace.
    """
    if body.startswith(b"--"):  # no JSON does
        start, end = finish(read_form(body, content_type)).get("model", (0, 0))
        if start == end:
            detail = (
                "The request body has no `model` that can be replaced by the one it stands for."
            )
            raise Refusal(400, "invalid_json", detail, param="model")
        return b"".join((body[:start], name.encode(), body[end:]))
    raw, extent = finish(top_level(body))
    body, start, end = extent(raw.get("model", NOTHING))
    if start == end:  # it has none: the only served model is meant
        start = end = body.index(b"{") + 1
        comma = b"" if body[start:].lstrip(_SPACE).startswith(b"}") else b","
        field = b'"model":' + msgspec.json.encode(name) + comma
        return b"".join((body[:start], field, body[end:]))
    return b"".join((body[:start], msgspec.json.encode(name), body[end:]))


def prompt_field(body: bytes | bytearray) -> bytes:
    """The raw JSON of ``messages``, or of ``prompt`` if there are none, in a usable body."""
    fields, extent = finish(read_fields(body, _ALL_ALLOWED[INVOCATIONS]))
    data, start, end = extent(fields.messages or fields.prompt)
    return bytes(data[start:end])


def _counts(fields: Any, path: str) -> tuple[int, int | None]:
    """(``n``, the client's maximum of output tokens) as a path's engine reads them."""
    chats = fields.messages is not NOTHING
    takes_n, limits = limits_of(path, chats=chats)
    within = ""
    if path == GENERATE:
        fields, within = fields.sampling_params, SAMPLING + "."
        if fields is None:
            return 1, None
    elif path == INVOCATIONS and not (chats or fields.prompt):
        return 1, 1  # for a pooling model, treated as a prefill
    n = limit = None
    if takes_n and fields.n is not None:
        n = whole_numbers.read(fields.n, within + "n")
        if n is not None:
            whole_numbers.check(n, within + "n", 1, whole_numbers.MOST_SEQUENCES)
    for name, least in limits:
        value = getattr(fields, name)
        if value is None:
            continue
        if type(value) is not int:
            value = whole_numbers.read(value, within + name)
        if limit is None and value is not None:
            # Of two limits the engine obeys the first one.
            if not least <= value <= whole_numbers.MOST_TOKENS:
                whole_numbers.check(value, within + name, least, whole_numbers.MOST_TOKENS)
            limit = value or None
    return n or 1, limit


def _true(value: Any) -> bool:
    """Whether pydantic accepts a value as true."""
    if isinstance(value, str):
        return value.lower() in ("1", "true", "t", "yes", "y", "on")
    return isinstance(value, (int, float)) and value == 1


# The text of a prompt, on demand


def prompt_text(body: bytes | bytearray) -> str:
    """All text of a request's prompt, a line per message or part; "" if it has none.

    For predictors that ask: it decodes the body again. Token ids, media and tools are not text.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # multipart, say
    if not isinstance(fields, dict):
        return ""
    keys = ("system", "instructions", "messages", "prompt", "input")
    return "\n".join(text for key in keys for text in _texts(fields.get(key)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        # A message has content, a part of one has text, an item of /v1/responses either.
        yield from _texts(value.get("content"))
        yield from _texts(value.get("text"))
