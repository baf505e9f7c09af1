"""The fields of a body that scheduling looks at, as the engine reads them, and their places.

Two ways lead to them. A short body in plain JSON is decoded at once, and what is not looked at is
skipped. Everything else is folded first (``folding``), and its fields are looked at one by one:
long bodies, those in which a field is not of its type, and those that are JSON to Python alone.

Fields that are not for clients (``engines/vllm/fields``) may say nothing: by the first way they
have the type null, which costs nothing where they are missing, and what fails there is told by name
on the second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from hetero_gateway.engines.vllm import FIELDS_OF, GUARDED_FIELDS, Prompts, guarded_at, prompts_at
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.wire import whole_numbers
from hetero_gateway.gateway.wire.folding import Buffer, Cut, Extent, Spans, Steps, fold, place

# A longer name is not of any model, and an error message would repeat it.
MOST_MODEL_BYTES = 4096
# What is JSON only to Python is read more slowly: 4 ms for so much at worst, 0.3 ms mostly.
MOST_ODD_BYTES = 1 << 14
_QUOTE = b'"'[0]

# A body's own fields are a few dozen: so much without their insides has thousands.
_MOST_SHORT_BYTES = 1 << 18

_Scalar = int | float | str | bool | None
NOTHING = msgspec.Raw(b"")


class Body(msgspec.Struct):
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
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    instructions: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    # For the keys of the prompt alone:
    add_special_tokens: msgspec.Raw = NOTHING
    cache_salt: msgspec.Raw = NOTHING
    chat_template: msgspec.Raw = NOTHING
    chat_template_kwargs: msgspec.Raw = NOTHING
    documents: msgspec.Raw = NOTHING
    mm_processor_kwargs: msgspec.Raw = NOTHING
    previous_response_id: msgspec.Raw = NOTHING
    reasoning: msgspec.Raw = NOTHING
    reasoning_effort: msgspec.Raw = NOTHING
    # What is a reference to something stored, or the name to store something under:
    conversation: msgspec.Raw = NOTHING
    request_id: msgspec.Raw = NOTHING
    # Which session it belongs to:
    prompt_cache_key: msgspec.Raw = NOTHING
    user: msgspec.Raw = NOTHING
    # With which an answer is longer than its text:
    logprobs: msgspec.Raw = NOTHING
    prompt_logprobs: msgspec.Raw = NOTHING


class Sampling(msgspec.Struct):
    """``sampling_params`` of /inference/v1/generate."""

    n: _Scalar = None
    max_tokens: _Scalar = None


_PLAIN = Body.__struct_fields__[:7]
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Of fields that clients may not set, what says nothing: such bodies are read as fast as others.
_HARMLESS: dict[str, Any] = {"priority": Literal[0] | None}
SAMPLING = "sampling_params"


class Reader(NamedTuple):
    """How bodies on a path are read.

    Args:
        shape: where its prompts are.
        make, decode: an object with the fields; one of a body, or an error of ``DECODE_ERRORS``.
        decode_raw: the same fields, and none of them looked into.
        nested: names of those that stay raw.
        guarded: names of those that must say nothing; of some, within ``sampling_params``.
        make_sampling, decode_sampling: of these, the same; None: the path has none.
    """

    shape: Prompts
    make: Callable[[], Any]
    decode: Callable[[bytes | bytearray], Any]
    decode_raw: Callable[[bytes | bytearray], Any]
    nested: tuple[str, ...]
    guarded: frozenset[str]
    decode_sampling: Callable[[bytes | bytearray], Any] | None


class BodyReaders(dict[str, Reader]):
    """How bodies are read, by their path: of the few that there are.

    ``allowed``: of the fields that are not for clients, those that they may set.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        super().__init__()
        self.allowed = frozenset(allowed)

    def __missing__(self, path: str) -> Reader:
        reader = self[path] = _reader_of(path, self.allowed)
        return reader


def _reader_of(path: str, allowed: frozenset[str]) -> Reader:
    shape = prompts_at(path)
    guarded = guarded_at(path) - allowed
    top = [name for name in guarded if "." not in name]
    extra = FIELDS_OF.get(shape, ())
    fields: list[tuple[str, Any, Any]] = [(name, msgspec.Raw, NOTHING) for name in extra]
    fields += [(name, _HARMLESS.get(name), None) for name in sorted(top)]
    decode_sampling = None
    if shape is Prompts.TOKENS:
        within = [
            (name.partition(".")[2], None, None)
            for name in sorted(guarded)
            if name.startswith(SAMPLING + ".")
        ]
        sampling = msgspec.defstruct("GuardedSampling", within, bases=(Sampling,))
        fields.append((SAMPLING, sampling | None, None))
        decode_sampling = _raw_decoder(sampling)
    make = msgspec.defstruct("PathBody", fields, bases=(Body,))
    nested = (*Body.__struct_fields__[len(_PLAIN) :], *extra)
    return Reader(
        shape,
        make,
        msgspec.json.Decoder(make).decode,
        _raw_decoder(make),
        nested,
        guarded,
        decode_sampling,
    )


def _raw_decoder(fields: type[msgspec.Struct]) -> Callable[[bytes | bytearray], Any]:
    raw = [(name, msgspec.Raw, NOTHING) for name in fields.__struct_fields__]
    return msgspec.json.Decoder(msgspec.defstruct("RawBody", raw)).decode


Found = tuple[Any, Callable[[msgspec.Raw], Extent], Spans]


def read_fields(body: bytes | bytearray, reader: Reader, *, recoded: bool = False) -> Steps[Found]:
    """A body's fields, a function that knows where in the body one of them stands, their items.

    ``recoded``: it came in another encoding, of which there is one (Python's json says so, too).
    """
    short, cuts, items = yield from fold(body)
    if len(short) > _MOST_SHORT_BYTES:
        raise _too_many_fields()
    try:
        raw = reader.decode_raw(short)
    except DECODE_ERRORS as error:
        encoding = json.detect_encoding(bytes(body[:4]))
        if encoding != "utf-8":
            if recoded:
                raise _no_json(error) from None
            return (yield from read_fields(_in_utf8(body, encoding, error), reader, recoded=True))
        short, raw = _decode_odd(short, reader.decode_raw, error)
    extent = partial(_extent, body, short, cuts)
    fields = reader.make()
    for name in _PLAIN:
        value = getattr(raw, name)
        if value:
            known = _plain(*extent(value))
            if known is ... and name == "model":
                data, start, end = extent(value)
                if data[start : start + 1] == b'"':
                    raise no_model(end - start)
            setattr(fields, name, known)
    for name in reader.nested:
        setattr(fields, name, getattr(raw, name))
    for name in reader.guarded:
        value = getattr(raw, name, None)
        if value:
            check_guarded(name, _plain(*extent(value)))
    if reader.decode_sampling is not None and raw.sampling_params:
        fields.sampling_params = yield from _sampling(reader, *extent(raw.sampling_params))
    return _with_a_model(fields), extent, items


def _plain(data: bytes | bytearray, start: int, end: int) -> Any:
    return whole_numbers.decode(bytes(data[start : min(end, start + _LOOKED_AT)]))


def check_guarded(name: str, value: Any) -> None:
    """Raises Refusal: 400 for a field that is not for clients, unless it says nothing."""
    if value is None:
        return
    if name == "priority":
        try:
            if whole_numbers.read(value, name) == 0:
                return
        except Refusal:
            pass
    raise not_allowed(name)


def _sampling(
    reader: Reader, data: bytes | bytearray, start: int, end: int
) -> Steps[Sampling | None]:
    """``sampling_params``, which is read as the body is. Raises Refusal."""
    assert reader.decode_sampling is not None
    inner = bytes(data[start:end])
    short, cuts, _ = yield from fold(inner)
    if len(short) > _MOST_SHORT_BYTES:
        raise _too_many_fields()
    try:
        raw = reader.decode_sampling(short)
    except DECODE_ERRORS as error:
        if inner[:1] != b"{":
            return None  # the engine refuses it
        short, raw = _decode_odd(short, reader.decode_sampling, error)
    result = Sampling()
    for name in raw.__struct_fields__:
        value = getattr(raw, name)
        if not value:
            continue
        known = _plain(inner, *place(short, cuts, value))
        if name in Sampling.__struct_fields__:
            setattr(result, name, known)
        else:
            check_guarded(f"{SAMPLING}.{name}", known)
    return result


# Enough to see that a plain value is too long.
_LOOKED_AT = whole_numbers.MOST_BYTES + 1


def itself(field: msgspec.Raw) -> Extent:
    raw = bytes(field)
    return raw, 0, len(raw)


def _extent(body: bytes | bytearray, short: Buffer, cuts: list[Cut], field: msgspec.Raw) -> Extent:
    return body, *place(short, cuts, field)


def _in_utf8(body: bytes | bytearray, encoding: str, error: Exception) -> bytes:
    """A body in another encoding, as Python's json detects it. Raises Refusal."""
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except ValueError:
        raise _no_json(error) from None


# A string, or what Python's json takes for a number; and in a string what is no character: half of
# a pair, escaped or in UTF-8. A string that does not end is one as well, so that no byte is looked
# at twice.
_ODD = re.compile(rb'"(?:[^"\\]+|\\.)*"?|NaN|Infinity', re.DOTALL)
_HALVES = re.compile(rb"\\(?:u[dD][89a-fA-F]..|.)|\xed[\xa0-\xbf].", re.DOTALL)


def _decode_odd(
    short: Buffer, decode: Callable[[bytes | bytearray], Any], error: Exception
) -> tuple[bytes, Any]:
    """(a folded body with all in its place, which a stricter parser than Python's reads as that
    does; its fields). What these are is read in the body itself.

    Raises:
        Refusal: 400: it is too long for that, or no JSON to Python either.
    """
    if len(short) > MOST_ODD_BYTES:
        raise _no_json(error)
    plain = _ODD.sub(_strict, short)
    try:
        return plain, decode(plain)
    except DECODE_ERRORS:
        raise _no_json(error) from None


def _strict(match: re.Match[bytes]) -> bytes:
    token = match[0]
    if token[0] != _QUOTE:
        return b"0".ljust(len(token))
    if b"\\" not in token and b"\xed" not in token:
        return token
    return _HALVES.sub(_whole_character, token)


def _whole_character(match: re.Match[bytes]) -> bytes:
    text = match[0]
    return {6: b"\\ufffd", 3: b"\xef\xbf\xbd"}.get(len(text), text)


def _no_json(error: Exception) -> Refusal:
    return Refusal(400, "invalid_json", f"The request body is not usable JSON: {error}")


def _too_many_fields() -> Refusal:
    return Refusal(400, "too_many_fields", "The request body has too many fields.")


def not_allowed(name: str) -> Refusal:
    """A client set a field that is not for clients."""
    detail = (
        f"`{name}` is not for clients to set: {GUARDED_FIELDS[name]}. Leave it out; an operator "
        "can allow it (server.allow_engine_fields)."
    )
    return Refusal(400, "field_not_allowed", detail, param=name)


def _with_a_model(fields: Body) -> Body:
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
