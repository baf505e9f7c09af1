"""The body fields that scheduling uses, read as the engine reads them, and their positions.

There are two ways. A short body in plain JSON is decoded at once, and unused fields are skipped.
For everything else the top level is read as raw JSON (``top_level``), and its fields are examined
one by one: long bodies, bodies with a field of a wrong type, and those that are JSON only for
Python. No value within a field becomes an object, whatever it consists of.

Guarded fields (``engines/vllm/fields``) may only be null: by the first way they have the type null,
which costs nothing if they are missing, and the second way names a violation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from hetero_gateway.engines.vllm import FIELDS_OF, GUARDED_FIELDS, Prompts, guarded_at, prompts_at
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request import whole_numbers
from hetero_gateway.gateway.request.byte_counts import Buffer
from hetero_gateway.gateway.turns import Steps

# Shorter bodies are read at once: it takes less than 0.1 ms.
LEAST_BYTES = 1 << 16
# No model has a longer name, and an error message would repeat it.
MOST_MODEL_BYTES = 4096
# A body's own fields are a few dozen. This many take 3 ms; a short body has no more.
_MOST_FIELDS = 12_000

# The position of a field, as two offsets into the bytes.
Extent = tuple[bytes | bytearray, int, int]
_Scalar = int | float | str | bool | None
NOTHING = msgspec.Raw(b"")


class BodyFields(msgspec.Struct):
    """The fields that scheduling uses; everything else is skipped.

    An array or an object in place of a plain value is an error at its first byte.
    """

    model: str | None = None
    stream: _Scalar = None
    n: _Scalar = None
    max_tokens: _Scalar = None
    max_completion_tokens: _Scalar = None
    max_output_tokens: _Scalar = None
    truncate_prompt_tokens: _Scalar = None
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    instructions: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    # Only for the keys of the prompt:
    add_special_tokens: msgspec.Raw = NOTHING
    cache_salt: msgspec.Raw = NOTHING
    chat_template: msgspec.Raw = NOTHING
    chat_template_kwargs: msgspec.Raw = NOTHING
    documents: msgspec.Raw = NOTHING
    mm_processor_kwargs: msgspec.Raw = NOTHING
    previous_response_id: msgspec.Raw = NOTHING
    reasoning: msgspec.Raw = NOTHING
    reasoning_effort: msgspec.Raw = NOTHING
    # References to something stored, or a name to store something under:
    conversation: msgspec.Raw = NOTHING
    request_id: msgspec.Raw = NOTHING
    # The session it belongs to:
    prompt_cache_key: msgspec.Raw = NOTHING
    user: msgspec.Raw = NOTHING
    # Fields that make an answer longer than its text:
    logprobs: msgspec.Raw = NOTHING
    prompt_logprobs: msgspec.Raw = NOTHING


class Sampling(msgspec.Struct):
    """``sampling_params`` of /inference/v1/generate."""

    n: _Scalar = None
    max_tokens: _Scalar = None


_PLAIN = BodyFields.__struct_fields__[:7]
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# The empty values of guarded fields: such bodies are read as fast as others.
_HARMLESS: dict[str, Any] = {"priority": Literal[0] | None}
SAMPLING = "sampling_params"


class BodyReader(NamedTuple):
    """How bodies on a path are read.

    Args:
        shape: where its prompts are.
        make, decode: make an object with the fields; decode a body into one, or raise
            ``DECODE_ERRORS``. Where a chat is possible, ``messages`` of a body are a list.
        nested: names of fields that stay raw.
        guarded: names of guarded fields; some within ``sampling_params``.
    """

    shape: Prompts
    make: Callable[[], Any]
    decode: Callable[[bytes | bytearray], Any]
    nested: tuple[str, ...]
    guarded: frozenset[str]


class BodyReaders(dict[str, BodyReader]):
    """How bodies are read, by their path: one of a few.

    ``allowed``: guarded fields that clients may set.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        super().__init__()
        self.allowed = frozenset(allowed)

    def __missing__(self, path: str) -> BodyReader:
        reader = self[path] = _reader_of(path, self.allowed)
        return reader


def _reader_of(path: str, allowed: frozenset[str]) -> BodyReader:
    shape = prompts_at(path)
    guarded = guarded_at(path) - allowed
    top = [name for name in guarded if "." not in name]
    extra = FIELDS_OF.get(shape, ())
    fields: list[tuple[str, Any, Any]] = [(name, msgspec.Raw, NOTHING) for name in extra]
    fields += [(name, _HARMLESS.get(name), None) for name in sorted(top)]
    if shape is Prompts.TOKENS:
        within = [
            (name.partition(".")[2], None, None)
            for name in sorted(guarded)
            if name.startswith(SAMPLING + ".")
        ]
        sampling = msgspec.defstruct("GuardedSampling", within, bases=(Sampling,))
        fields.append((SAMPLING, sampling | None, None))
    make = msgspec.defstruct("PathBody", fields, bases=(BodyFields,))
    nested = (*BodyFields.__struct_fields__[len(_PLAIN) :], *extra)
    decoded = make
    if shape is Prompts.TEXT:
        decoded = msgspec.defstruct(
            "Chat", [("messages", list[msgspec.Raw], NOTHING)], bases=(make,)
        )
    return BodyReader(shape, make, msgspec.json.Decoder(decoded).decode, nested, guarded)


Found = tuple[Any, Callable[[msgspec.Raw], Extent]]


def read_fields(body: bytes | bytearray, reader: BodyReader) -> Steps[Found]:
    """A body's fields, and a function that gives the position of one of them in the body.

    Raises Refusal, as ``top_level`` does, and for guarded fields.
    """
    raw, extent = yield from top_level(body)
    fields = reader.make()
    for name in _PLAIN:
        if name in raw:
            data, start, end = extent(raw[name])
            known = _plain(data, start, end)
            if known is ... and name == "model" and data[start : start + 1] == b'"':
                raise no_model(end - start)
            setattr(fields, name, known)
    for name in reader.nested:
        setattr(fields, name, raw.get(name, NOTHING))
    for name in reader.guarded & raw.keys():
        check_guarded(name, _plain(*extent(raw[name])))
    if reader.shape is Prompts.TOKENS and SAMPLING in raw:
        data, start, end = extent(raw[SAMPLING])
        if data[start : start + 1] == b"{":  # otherwise the engine refuses it
            fields.sampling_params = yield from _sampling(reader, bytes(data[start:end]))
    return _with_a_model(fields), extent


def _plain(data: bytes | bytearray, start: int, end: int) -> Any:
    return whole_numbers.decode(bytes(data[start : min(end, start + _LOOKED_AT)]))


def check_guarded(name: str, value: Any) -> None:
    """Raises Refusal: 400 for a guarded field, unless it is empty."""
    if value is None:
        return
    if name == "priority":
        try:
            if whole_numbers.read(value, name) == 0:
                return
        except Refusal:
            pass
    raise not_allowed(name)


def _sampling(reader: BodyReader, body: bytes) -> Steps[Sampling]:
    """``sampling_params``, read like the body. Raises Refusal."""
    raw, extent = yield from top_level(body)
    result = Sampling()
    for name, value in raw.items():
        inner = f"{SAMPLING}.{name}"
        if name in Sampling.__struct_fields__:
            setattr(result, name, _plain(*extent(value)))
        elif inner in reader.guarded:
            check_guarded(inner, _plain(*extent(value)))
    return result


# Enough to see that a plain value is too long.
_LOOKED_AT = whole_numbers.MOST_BYTES + 1


def itself(field: msgspec.Raw) -> Extent:
    raw = bytes(field)
    return raw, 0, len(raw)


class _Name(str):
    """A field's name; or, if longer than any relevant one, its number."""

    __slots__ = ()


_MOST_NAME = 1 << 8


def top_level(
    body: bytes | bytearray,
) -> Steps[tuple[dict[str, msgspec.Raw], Callable[[msgspec.Raw], Extent]]]:
    """An object's fields, the last of equal names, and their positions in it.

    It accepts what Python's json accepts: a text of equal length that a stricter parser accepts is
    substituted, with everything in its place. A field's value must be read from the original.

    Raises:
        Refusal: 400: it is no JSON for Python either, or has thousands of fields.
    """
    encoding = json.detect_encoding(bytes(body[:4]))
    if encoding != "utf-8":
        try:
            body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        except ValueError as error:
            raise _no_json(error) from None
        yield
    text = body
    ways = [_stricter, _flatter]
    while True:
        try:
            return fields_of(text), partial(_extent, body, text)
        except DECODE_ERRORS as error:
            way = _flatter if isinstance(error, RecursionError) else _stricter
            if way not in ways:
                raise _no_json(error) from None
        ways.remove(way)
        yield
        text = yield from way(text)
        yield


def fields_of(text: Buffer) -> dict[str, msgspec.Raw]:
    """An object's fields. Raises Refusal: 400 for thousands; else an error of ``DECODE_ERRORS``."""
    names = 0

    def name(_: type, text: str) -> _Name:
        nonlocal names
        names += 1
        if names > _MOST_FIELDS:
            raise Refusal(400, "too_many_fields", "The request body has too many fields.")
        return _Name(names if text[_MOST_NAME : _MOST_NAME + 1] else text)

    fields: dict[str, msgspec.Raw] = msgspec.json.decode(
        text, type=dict[_Name, msgspec.Raw], dec_hook=name
    )
    return fields


def _extent(body: bytes | bytearray, text: bytes | bytearray, field: msgspec.Raw) -> Extent:
    size = memoryview(field).nbytes
    if not size:
        return body, 0, 0
    from hetero_gateway.gateway.request.addresses import address

    start = address(field) - address(text)
    return body, start, start + size


# What Python's json accepts as a number; and in a string what is no character: half of a pair,
# escaped or not, and invalid UTF-8, which the engine judges. The replacements are in no name that
# is looked for, nor make one. (bytes.replace takes five times as long for six bytes: Infinity is
# replaced in two halves.)
_STRICTER = (
    (b"NaN", b"0  "), (b"Infin", b"0    "), (b"  ity", b"     "),
    (b"\\ud", b"\\ue"), (b"\\uD", b"\\uE"),
)  # fmt: skip
_IN_ASCII = bytes(range(128)) + b"?" * 128


def _stricter(text: bytes | bytearray) -> Steps[bytes | bytearray]:
    """A text of equal length with everything in its place, without Python's extensions."""
    for found, instead in _STRICTER:
        text = text.replace(found, instead)
        yield
    return text.translate(_IN_ASCII)


# A parser uses the interpreter's stack, which is 1000 calls deep.
_MOST_DEPTH = 1 << 8
_BLOCK_BYTES = 1 << 16
_QUOTE, _OPENING, _CLOSING, _SPACE, _ZERO = b'"{} 0'
# Brackets and braces differ by one bit, which is set in no other character that gives these.
_CASE_BIT = 0x20


def _flatter(text: bytes | bytearray) -> Steps[bytes | bytearray]:
    """A text of equal length with everything in its place, and 0 for what is nested too deeply."""
    plain = text.replace(b"\\\\", b"  ")
    yield
    plain = plain.replace(b'\\"', b"  ")
    yield
    # Only attacks on a parser have such bodies, and it is 13 MB of memory.
    import numpy as np

    result = bytearray(text)
    read, written = np.frombuffer(plain, np.uint8), np.frombuffer(result, np.uint8)
    depth, in_string = 0, False
    for start in range(0, len(text), _BLOCK_BYTES):
        block = read[start : start + _BLOCK_BYTES]
        within = np.logical_xor.accumulate(block == _QUOTE) ^ in_string
        lower = block | _CASE_BIT
        opens, closes = (lower == _OPENING) & ~within, (lower == _CLOSING) & ~within
        depths = np.cumsum(opens.astype(np.int32) - closes, dtype=np.int32) + depth
        target = written[start : start + _BLOCK_BYTES]
        target[depths + closes > _MOST_DEPTH] = _SPACE
        target[opens & (depths == _MOST_DEPTH + 1)] = _ZERO
        depth, in_string = int(depths[-1]), bool(within[-1])
        yield
    return result


def _no_json(error: Exception) -> Refusal:
    return Refusal(400, "invalid_json", f"The request body is not usable JSON: {error}")


def not_allowed(name: str) -> Refusal:
    """The refusal of a guarded field."""
    detail = (
        f"`{name}` is not for clients to set: {GUARDED_FIELDS[name]}. Leave it out; an operator "
        "can allow it (server.allow_engine_fields)."
    )
    return Refusal(400, "field_not_allowed", detail, param=name)


def _with_a_model(fields: BodyFields) -> BodyFields:
    model = fields.model
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "invalid_type", "`model` must be a string.", param="model")
    if model is not None:
        # A lone surrogate is in no name, and in no answer of ours.
        fields.model = model.encode("utf-8", "replace").decode()
    return fields


def no_model(size: int) -> Refusal:
    if size <= MOST_MODEL_BYTES:
        return Refusal(400, "invalid_json", "`model` is not a string in UTF-8.", param="model")
    detail = f"No model has a name of {size} characters."
    return Refusal(404, "model_not_found", detail, param="model")
