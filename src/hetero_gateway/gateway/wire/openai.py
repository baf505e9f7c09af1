"""What the gateway reads of a request's body, and the errors that it makes itself.

A request's body is passed on byte for byte; only the few fields that scheduling needs are looked
at, with the prompt left as raw JSON. What an engine's paths and answers mean is in engines/vllm.

What is read is what the engine reads: the last one of equal keys, numbers as pydantic takes them
(``whole_numbers``), and what Python's ``json`` takes beyond JSON (NaN, lone surrogates, UTF-16).
Numbers that no engine accepts are refused; what is not read is the engine's to judge. How long a
prompt is, ``prompt_length`` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from hetero_gateway.core.prefixes.keys import PrefixKeys
from hetero_gateway.engines.vllm import CHAT_COMPLETIONS, RESPONSES, limits_of
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.wire import whole_numbers
from hetero_gateway.gateway.wire.folding import (
    LEAST_BYTES,
    Buffer,
    Cut,
    Extent,
    Spans,
    Steps,
    finish,
    fold,
    place,
)
from hetero_gateway.gateway.wire.prompt_keys import (
    head_of,
    keys_after,
    keys_in_steps,
    keys_of_fields,
)
from hetero_gateway.gateway.wire.prompt_length import measure, measure_prompt

_MULTIPART_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
# A longer name is not of any model, and an error message would repeat it.
_MOST_MODEL_BYTES = 4096
# OpenAI's own limit is 64 characters.
_MOST_SESSION_BYTES = 512
# vLLM's own have 21 characters; a client may choose longer ones.
_MOST_RESPONSE_ID_BYTES = 256
# Python's json makes objects of all that it reads: 0.3 ms for so much.
_MOST_ODD_BYTES = 1 << 14

# A body's own fields are a few dozen: so much without their insides has thousands.
_MOST_SHORT_BYTES = 1 << 18

_Scalar = int | float | str | bool | None
_NONE = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The fields that scheduling looks at; everything else is skipped.

    Where a plain value belongs, an array or an object is an error at its first byte.
    """

    model: str | None = None
    stream: _Scalar = None
    n: _Scalar = None
    max_tokens: _Scalar = None
    max_completion_tokens: _Scalar = None
    max_output_tokens: _Scalar = None
    truncate_prompt_tokens: _Scalar = None
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    # For the keys of the prompt alone:
    add_special_tokens: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    chat_template: msgspec.Raw = _NONE
    chat_template_kwargs: msgspec.Raw = _NONE
    documents: msgspec.Raw = _NONE
    mm_processor_kwargs: msgspec.Raw = _NONE
    previous_response_id: msgspec.Raw = _NONE
    reasoning: msgspec.Raw = _NONE
    reasoning_effort: msgspec.Raw = _NONE
    # Which session it belongs to:
    prompt_cache_key: msgspec.Raw = _NONE
    user: msgspec.Raw = _NONE


_PLAIN = _Body.__struct_fields__[:7]
_NESTED = _Body.__struct_fields__[7:]
# The same fields, and none of them looked into.
_RawBody = msgspec.defstruct(
    "_RawBody", [(name, msgspec.Raw, _NONE) for name in _Body.__struct_fields__]
)

_decode_body = msgspec.json.Decoder(_Body).decode
_decode_raw = msgspec.json.Decoder(_RawBody).decode
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ParsedRequest(msgspec.Struct, array_like=True, gc=False):
    """What a body says. ``text_bytes`` is 0 when the prompt is exact.

    ``truncates``: the engine cuts the prompt down to a length that the client gives. ``prefix``:
    the keys of its prompt; None where nobody asked, or its beginning is not in the body.
    ``cache_salt``: its JSON, with which the client keeps caches apart; b"" without one.
    ``session``: JSON that names a conversation, or else a user: its beginning; b"" without one.
    On /v1/responses alone: ``previous``: which response it continues, b"" for none; then ``prefix``
    is of what it adds. ``head``: what ``prompt_keys.head_of`` says. ``asked``: the name that the
    client asked for, where that stands for ``model``.
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


def parse_body(
    body: bytes | bytearray,
    content_type: bytes,
    path: str = CHAT_COMPLETIONS,
    seed: int | None = None,
) -> ParsedRequest:
    """Read what scheduling needs from a request's body.

    Args:
        seed: what the keys of its prompt begin with; None: none are wanted.

    Raises:
        Refusal: 400 for broken JSON, a body that is not an object, a ``model`` that is no
            string, a number that no engine accepts; 404 for a name that is no model's.
            Everything else is the engine's to judge.
    """
    if content_type.startswith(b"multipart/"):
        match = _MULTIPART_MODEL.search(body)
        model = match.group(1).decode("utf-8", "replace") if match else None
        return ParsedRequest(model, False, None, 1, 0, 1, None, 1)
    if len(body) < LEAST_BYTES:
        try:
            fields = _decode_body(body)
        except _ERRORS:
            pass  # what the engine would read may be there all the same
        else:
            parsed = _describe(fields, _itself, path)
            if path == RESPONSES:
                _continue(parsed, fields, _itself, seed)
            if seed is not None and fields.truncate_prompt_tokens is None:
                if parsed.previous:
                    parsed.prefix = keys_after(fields, parsed.head, parsed.previous)
                else:
                    parsed.prefix = keys_of_fields(fields, seed)
            return parsed
    return finish(parse_in_steps(body, content_type, path, seed))


def parse_in_steps(
    body: bytes | bytearray,
    content_type: bytes,
    path: str = CHAT_COMPLETIONS,
    seed: int | None = None,
) -> Steps[ParsedRequest]:
    """``parse_body`` for a long one, for who has something else to do meanwhile."""
    if content_type.startswith(b"multipart/"):
        return parse_body(body, content_type, path)
    fields, extent, items = yield from _fields(body)
    yield
    parsed = _describe(fields, extent, path)
    if path == RESPONSES:
        _continue(parsed, fields, extent, seed)
    if seed is not None and fields.truncate_prompt_tokens is None:
        yield
        parsed.prefix = yield from keys_in_steps(fields, extent, items, seed, parsed.previous)
    return parsed


def _continue(
    parsed: ParsedRequest,
    fields: _Body,
    extent: Callable[[msgspec.Raw], Extent],
    seed: int | None,
) -> None:
    """Which response one continues, and whether it begins as that does."""
    if seed is not None:
        parsed.head = head_of(fields, extent, seed)
    if fields.previous_response_id:
        data, start, end = extent(fields.previous_response_id)
        if end - start <= _MOST_RESPONSE_ID_BYTES and data[start : start + 1] == b'"':
            parsed.previous = bytes(data[start + 1 : end - 1])


def _describe(fields: _Body, extent: Callable[[msgspec.Raw], Extent], path: str) -> ParsedRequest:
    model = fields.model
    if model is not None and len(model) > _MOST_MODEL_BYTES:
        raise _no_model(len(model))
    tokens: int | None = None
    prompts, text_bytes = 1, 0
    if fields.prompt:
        tokens, prompts, text_bytes = measure_prompt(*extent(fields.prompt))
    media_parts = 0
    for field in (
        fields.messages, fields.input, fields.system, fields.instructions, fields.tools
    ):  # fmt: skip
        if field is _NONE:
            continue
        data, start, end = extent(field)
        found, size = measure(data, start, end) if end > start else (0, 0)
        media_parts += found
        text_bytes += size
    salt = b""
    if fields.cache_salt:
        data, start, end = extent(fields.cache_salt)
        salt = bytes(data[start:end])
    session = fields.prompt_cache_key or fields.user
    n, limit = _counts(fields, path)
    stream = fields.stream
    return ParsedRequest(
        model=model,
        stream=stream is True or (stream is not None and _true(stream)),
        max_output_tokens=limit,
        sequences=min(prompts * n, whole_numbers.MOST_SEQUENCES),
        text_bytes=text_bytes,
        media_parts=media_parts,
        exact_prompt_tokens=tokens,
        prompt_count=prompts,
        truncates=fields.truncate_prompt_tokens is not None,
        cache_salt=salt,
        session=_beginning(*extent(session)) if session else b"",
    )


def _beginning(data: bytes | bytearray, start: int, end: int) -> bytes:
    return bytes(data[start : min(end, start + _MOST_SESSION_BYTES)])


class _Model(msgspec.Struct):
    model: msgspec.Raw = _NONE


_decode_model = msgspec.json.Decoder(_Model).decode


def with_model(body: bytes | bytearray, content_type: bytes, name: str) -> bytes:
    """A usable body with another model's name in place of its own, if any, else byte for byte.

    Of equal keys the last one is replaced, which is the one that is read. What only Python's
    ``json`` can read is written anew.

    Raises:
        Refusal: 400 for one in which there is no name to replace.
    """
    if content_type.startswith(b"multipart/"):
        match = _MULTIPART_MODEL.search(body)
        if match is None:
            raise _nothing_to_rewrite()
        return b"".join((body[: match.start(1)], name.encode(), body[match.end(1) :]))
    short, cuts, _ = finish(fold(body))
    try:
        start, end = place(short, cuts, _decode_model(short).model)
    except _ERRORS:
        return _with_model_slowly(body, name)
    if start == end:  # it has none: the only one that is served was meant
        start = end = body.index(b"{") + 1
        comma = b"" if body[start:].lstrip(b" \t\r\n").startswith(b"}") else b","
        field = b'"model":' + msgspec.json.encode(name) + comma
        return b"".join((body[:start], field, body[end:]))
    return b"".join((body[:start], msgspec.json.encode(name), body[end:]))


def _with_model_slowly(body: bytes | bytearray, name: str) -> bytes:
    if len(body) > _MOST_ODD_BYTES:
        raise _nothing_to_rewrite()
    try:
        found = json.loads(body)
        return json.dumps(found | {"model": name}).encode()
    except (ValueError, TypeError, RecursionError):
        raise _nothing_to_rewrite() from None


def _nothing_to_rewrite() -> Refusal:
    detail = "The request body has no `model` that can be replaced by the one it stands for."
    return Refusal(400, "invalid_json", detail, param="model")


def prompt_field(body: bytes | bytearray) -> bytes:
    """The raw JSON of ``messages``, or of ``prompt`` where there are none, in a usable body."""
    fields, extent, _ = finish(_fields(body))
    data, start, end = extent(fields.messages or fields.prompt)
    return bytes(data[start:end])


# The fields of a body


_Found = tuple[_Body, Callable[[msgspec.Raw], Extent], Spans]


def _fields(body: bytes | bytearray) -> Steps[_Found]:
    """A body's fields, a function that knows where in the body one of them stands, their items."""
    short, cuts, items = yield from fold(body)
    if len(short) > _MOST_SHORT_BYTES:
        detail = "The request body has too many fields."
        raise Refusal(400, "too_many_fields", detail)
    extent = partial(_extent, body, short, cuts)
    try:
        raw = _decode_raw(short)
    except _ERRORS as error:
        return (yield from _odd_fields(body, short, error))
    fields = _Body()
    for name in _PLAIN:
        value = getattr(raw, name)
        if value:
            data, start, end = extent(value)
            known = whole_numbers.decode(bytes(data[start : min(end, start + _LOOKED_AT)]))
            if known is ... and name == "model" and data[start : start + 1] == b'"':
                raise _no_model(end - start)
            setattr(fields, name, known)
    for name in _NESTED:
        setattr(fields, name, getattr(raw, name))
    return _with_a_model(fields), extent, items


# Enough to see that a plain value is too long.
_LOOKED_AT = whole_numbers.MOST_BYTES + 1


def _itself(field: msgspec.Raw) -> Extent:
    raw = bytes(field)
    return raw, 0, len(raw)


def _extent(body: bytes | bytearray, short: Buffer, cuts: list[Cut], field: msgspec.Raw) -> Extent:
    return body, *place(short, cuts, field)


def _odd_fields(
    body: bytes | bytearray, short: bytes | bytearray, error: Exception
) -> Steps[_Found]:
    """The fields of what is no JSON, where Python's reads it; its prompt is all of the body."""
    encoding = json.detect_encoding(bytes(body[:4]))
    try:
        if encoding != "utf-8":
            text = body.decode(encoding, "surrogatepass")
            return (yield from _fields(text.encode("utf-8", "surrogatepass")))
        found = json.loads(short) if len(short) <= _MOST_ODD_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refusal(
            400, "invalid_json", f"The request body is not usable JSON: {error}"
        ) from None
    fields = _Body()
    for name in _PLAIN:
        value = found.get(name)
        setattr(fields, name, ... if isinstance(value, (list, dict)) else value)
    if any(found.get(name) for name in _NESTED):
        fields.messages = msgspec.Raw(b"{}")
    return _with_a_model(fields), lambda field: (body, 0, len(body) if field else 0), []


def _with_a_model(fields: _Body) -> _Body:
    model = fields.model
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "invalid_type", "`model` must be a string.", param="model")
    if model is not None:
        # A lone surrogate is in no name, and in no answer of ours.
        fields.model = model.encode("utf-8", "replace").decode()
    return fields


def _no_model(size: int) -> Refusal:
    if size <= _MOST_MODEL_BYTES:
        return Refusal(400, "invalid_json", "`model` is not a string in UTF-8.", param="model")
    detail = f"No model has a name of {size} characters."
    return Refusal(404, "model_not_found", detail, param="model")


def _counts(fields: _Body, path: str) -> tuple[int, int | None]:
    """(``n``, the most output tokens that the client wants) as a path's engine reads them."""
    takes_n, limits = limits_of(path, chats=bool(fields.messages))
    n = limit = None
    if takes_n and fields.n is not None:
        n = whole_numbers.read(fields.n, "n")
        if n is not None:
            whole_numbers.check(n, "n", 1, whole_numbers.MOST_SEQUENCES)
    for name, least in limits:
        value = getattr(fields, name)
        if value is None:
            continue
        if type(value) is not int:
            value = whole_numbers.read(value, name)
        if limit is None and value is not None:
            # Of two limits the engine minds the first one.
            if not least <= value <= whole_numbers.MOST_TOKENS:
                whole_numbers.check(value, name, least, whole_numbers.MOST_TOKENS)
            limit = value or None
    return n or 1, limit


def _true(value: Any) -> bool:
    """Whether pydantic takes a value for true."""
    if isinstance(value, str):
        return value.lower() in ("1", "true", "t", "yes", "y", "on")
    return isinstance(value, (int, float)) and value == 1


# The text of a prompt, for those who ask


def prompt_text(body: bytes | bytearray) -> str:
    """All text of a request's prompt, a line per message or part; "" where it has none.

    For predictors that ask: it decodes the body once more. Token ids, media and tools are no text.
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


# Errors


def error_body(error: Refusal, path: str = "") -> bytes:
    """OpenAI's error body (Anthropic's on /v1/messages, as vLLM answers there)."""
    if path.startswith("/v1/messages"):
        return msgspec.json.encode(
            {"type": "error", "error": {"type": error.kind, "message": error.message}}
        )
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def sse_error_event(error: Refusal, path: str = "") -> bytes:
    """The event that ends a broken stream; no ``[DONE]`` follows."""
    prefix = b"event: error\n" if path.startswith(("/v1/messages", "/v1/responses")) else b""
    return prefix + b"data: " + error_body(error, path) + b"\n\n"
