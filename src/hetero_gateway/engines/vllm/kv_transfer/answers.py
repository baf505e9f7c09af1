"""How to read the prefill instance's answer, and how it corrects the decode instance's.

The client should get what one instance would have answered. The decode instance's answer lacks only
what the prefill instance alone knows: how much of the prompt it read from its cache and wrote into
it (vLLM 0.32 passes on the former, by ``remote_prefill_cached_tokens``, and not the latter, which
on /v1/messages changes ``input_tokens``), and the prompt's log probabilities. And
``kv_transfer_params`` and ``ec_transfer_params`` name hosts and blocks, which clients must not see;
some connectors put them in a decode answer, and in a stream's last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec

from hetero_gateway.engines.vllm.paths import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
)

# The log probabilities of a long prompt, read in 20 ms; without them it is some kilobytes.
_MOST_ANSWER_BYTES = 8 << 20
_NULL = msgspec.Raw(b"null")
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]
_HIDDEN = ("kv_transfer_params", "ec_transfer_params")
_HIDDEN_MARK = b"_transfer_params"
_USAGE_MARK = b'"usage"'
_Change = Callable[[msgspec.Raw], msgspec.Raw]


class NoHandover(Exception):
    """A prefill that hands nothing over; the message gives the reason in a few words.

    ``ended``: its first token was its last. The prefill instance is then the best one for the
        whole
    request: it has the prompt cached.
    """

    def __init__(self, reason: str, *, ended: bool = False) -> None:
        super().__init__(reason)
        self.ended = ended


class PrefillAnswer(NamedTuple):
    """The prefill instance's answer.

    Args:
        parameters: its ``kv_transfer_params``, byte for byte; b"": none.
        prompt_tokens: from its usage; None: not stated.
        cached_tokens: part of these; None: not stated.
        ended: its one token was the end of the answer (an EOS, a stop), not a limit.
        prompt_logprobs: JSON; b"": none.
        counts: from its usage, how the prompt's tokens divide, by vLLM's names.
    """

    parameters: bytes = b""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ended: bool = False
    prompt_logprobs: bytes = b""
    counts: tuple[tuple[str, int], ...] = ()


class Mending(NamedTuple):
    """Values to insert into the decode instance's answer; hidden fields are removed in any case.

    Args:
        counts: of usage, if the decode instance states these too.
        prompt_logprobs: JSON; b"": none were asked for.
    """

    counts: tuple[tuple[str, int], ...] = ()
    prompt_logprobs: bytes = b""


_NOTHING_LACKS = Mending()


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None
    created_cache_tokens: _Count | None = None
    cache_write_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    input_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None


# Where usage divides a prompt's tokens: in an object of its own, or, on /v1/messages, in itself.
_DETAILS = {
    CHAT_COMPLETIONS: "prompt_tokens_details",
    COMPLETIONS: "prompt_tokens_details",
    RESPONSES: "input_tokens_details",
}
_IN_DETAILS = _Details.__struct_fields__
_IN_MESSAGES = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    prompt_logprobs: msgspec.Raw = _NULL


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL
    usage: _Usage | None = None
    choices: list[_Choice] = []
    prompt_logprobs: msgspec.Raw = _NULL
    stop_reason: str | None = None  # of /v1/messages
    status: str | None = None  # of /v1/responses


_answer = msgspec.json.Decoder(_Answer).decode


def read_answer(path: str, body: bytes) -> PrefillAnswer:
    """Read a prefill's whole answer.

    Args:
        body: under status 200.

    Raises:
        NoHandover: it is not an answer.
    """
    if len(body) > _MOST_ANSWER_BYTES:
        raise NoHandover(f"its answer has {len(body)} bytes")
    try:
        answer = _answer(body)
    except _ERRORS as error:
        raise NoHandover(f"its answer cannot be read: {error}") from None
    counts = dict(_counts_of(path, answer.usage))
    if path == MESSAGES:
        cached_tokens = counts.get("cache_read_input_tokens")
        prompt_tokens = sum(counts.values()) if "input_tokens" in counts else None
    else:
        cached_tokens, usage = counts.get("cached_tokens"), answer.usage or _Usage()
        prompt_tokens = usage.input_tokens if path == RESPONSES else usage.prompt_tokens
    logprobs = answer.prompt_logprobs
    if path == COMPLETIONS and answer.choices:
        logprobs = answer.choices[0].prompt_logprobs
    return PrefillAnswer(
        _said(answer.kv_transfer_params),
        prompt_tokens,
        cached_tokens,
        _ended(path, answer),
        _said(logprobs),
        tuple(counts.items()),
    )


def _said(raw: msgspec.Raw) -> bytes:
    text = bytes(raw)
    return b"" if text == b"null" else text


def _ended(path: str, answer: _Answer) -> bool:
    if path == MESSAGES:
        return answer.stop_reason not in (None, "max_tokens")
    if path == RESPONSES:
        return answer.status == "completed"
    return bool(answer.choices) and answer.choices[0].finish_reason not in (None, "length")


def _counts_of(path: str, usage: _Usage | None) -> Iterator[tuple[str, int]]:
    told: _Usage | _Details | None = usage
    if usage is not None and path in _DETAILS:
        told = getattr(usage, _DETAILS[path])
    for name in _IN_MESSAGES if path == MESSAGES else _IN_DETAILS:
        count = getattr(told, name, None)
        if count is not None:
            yield name, count


def mending_of(answer: PrefillAnswer) -> Mending:
    """What the decode instance's answer to this one's parameters will lack."""
    return Mending(answer.counts, answer.prompt_logprobs)


def mended_body(path: str, body: bytes, mending: Mending = _NOTHING_LACKS) -> bytes:
    """The whole answer as one instance would have given it; unchanged if it is that already.

    Anything but a JSON object stays as it is.
    """
    if _HIDDEN_MARK not in body and mending == _NOTHING_LACKS:
        return body
    changes: dict[str, _Change] = dict.fromkeys(_HIDDEN, _hide)
    if mending.counts:
        changes["usage"] = _usage_with(path, dict(mending.counts))
    if mending.prompt_logprobs:
        logprobs = msgspec.Raw(mending.prompt_logprobs)
        if path == CHAT_COMPLETIONS:
            changes["prompt_logprobs"] = lambda _: logprobs
        elif path == COMPLETIONS:
            changes["choices"] = lambda choices: _in_each(choices, "prompt_logprobs", logprobs)
    return _changed(body, changes)


def mended_events(path: str, events: bytes, mending: Mending = _NOTHING_LACKS) -> bytes:
    """Whole server-sent events as one instance would have sent them; see ``mended_body``.

    Only a stream's last events need it: those with usage, and the last one of each choice.
    """
    parts = events.split(b"\n\n")
    return b"\n\n".join(_mended_event(path, part, mending) for part in parts)


def _mended_event(path: str, event: bytes, mending: Mending) -> bytes:
    counts = mending.counts if _USAGE_MARK in event else ()
    if not counts and _HIDDEN_MARK not in event:
        return event
    before, mark, data = event.partition(b"data: ")
    if not mark or b"\n" in data:  # vLLM's events have one line of data, their last
        return event
    inner = Mending(counts)
    for name in ("response", "message"):  # of /v1/responses and /v1/messages
        if b'"%b":' % name.encode() in data:
            whole = {name: lambda raw: msgspec.Raw(mended_body(path, bytes(raw), inner))}
            data = _changed(data, whole)
    return before + mark + mended_body(path, data, inner)


def _hide(_: msgspec.Raw) -> msgspec.Raw:
    return _NULL


def _in_each(raw: msgspec.Raw, name: str, value: msgspec.Raw) -> msgspec.Raw:
    """A list of objects, each with a new value under this name."""
    try:
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except _ERRORS:
        return raw
    changed = [msgspec.Raw(_changed(bytes(item), {name: lambda _: value})) for item in items]
    return msgspec.Raw(msgspec.json.encode(changed))


def _usage_with(path: str, counts: Mapping[str, int]) -> _Change:
    numbers = {name: msgspec.Raw(b"%d" % count) for name, count in counts.items()}

    def put(raw: msgspec.Raw) -> msgspec.Raw:
        found = _fields_of(bytes(raw))
        # What the decode instance does not state is not stated to its clients either.
        told = {name for name, value in found.items() if bytes(value) != b"null"}
        # A stream of /v1/messages begins with all of the prompt's tokens as its input.
        if path == MESSAGES and not told.intersection(_IN_MESSAGES[1:]):
            return raw
        changes = {name: numbers[name] for name in numbers if name in told}
        return msgspec.Raw(msgspec.json.encode(found | changes)) if changes else raw

    if path == MESSAGES:
        return put
    return lambda raw: msgspec.Raw(_changed(bytes(raw), {_DETAILS[path]: put}))


def _fields_of(document: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    except _ERRORS:
        return {}


def _changed(document: bytes, changes: Mapping[str, _Change]) -> bytes:
    """A JSON object with some of its fields changed; all others byte for byte."""
    fields = _fields_of(document)
    found = {name: changes[name](fields[name]) for name in changes if name in fields}
    if all(bytes(fields[name]) == bytes(value) for name, value in found.items()):
        return document
    return msgspec.json.encode(fields | found)
