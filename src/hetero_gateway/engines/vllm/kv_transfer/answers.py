"""What the prefill instance answers, and what that makes of the decode instance's answer.

The client is to get what one instance would have answered. The decode instance's answer is that
but for what only the prefill instance knows: how much of the prompt was cached, where the decode
instance does not say so itself (vLLM's NIXL does since ``remote_prefill_cached_tokens``), and the
prompt's log probabilities. And ``kv_transfer_params`` and ``ec_transfer_params`` name hosts and
blocks, which are no client's business; some connectors have them in a decode answer, and in a
stream's last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from hetero_gateway.engines.vllm.paths import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
)

# One with the log probabilities of a long prompt; without, it has some kilobytes.
_MOST_ANSWER_BYTES = 64 << 20
_NULL = msgspec.Raw(b"null")
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]
_HIDDEN = ("kv_transfer_params", "ec_transfer_params")
_HIDDEN_MARK = b"_transfer_params"
_USAGE_MARK = b'"usage"'
_Change = Callable[[msgspec.Raw], msgspec.Raw]


class NoHandover(Exception):
    """A prefill that hands nothing over; the message says why, in a few words.

    ``ended``: its first token was its last. To ask for the whole answer, the prefill instance is
    the best: it has the prompt cached.
    """

    def __init__(self, reason: str, *, ended: bool = False) -> None:
        super().__init__(reason)
        self.ended = ended


class PrefillAnswer(NamedTuple):
    """What the prefill instance says.

    Args:
        parameters: its ``kv_transfer_params``, byte for byte; b"": none.
        prompt_tokens: of its usage; None: not told.
        cached_tokens: of these; None: not told.
        ended: its one token was not cut off but ended it: an EOS, a stop.
        prompt_logprobs: JSON; b"": none.
    """

    parameters: bytes = b""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ended: bool = False
    prompt_logprobs: bytes = b""


class Mending(NamedTuple):
    """What to put into the decode instance's answer; None and b"": it is right as it is.

    What is hidden from clients is taken out in any case.
    """

    cached_tokens: int | None = None
    prompt_logprobs: bytes = b""


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    input_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None


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
    """What a prefill's whole answer says.

    Args:
        body: under status 200.

    Raises:
        NoHandover: it is no answer.
    """
    if len(body) > _MOST_ANSWER_BYTES:
        raise NoHandover(f"its answer has {len(body)} bytes")
    try:
        answer = _answer(body)
    except _ERRORS as error:
        raise NoHandover(f"its answer cannot be read: {error}") from None
    prompt_tokens, cached_tokens = _prompt_counts(path, answer.usage)
    logprobs = answer.prompt_logprobs
    if path == COMPLETIONS and answer.choices:
        logprobs = answer.choices[0].prompt_logprobs
    return PrefillAnswer(
        _said(answer.kv_transfer_params),
        prompt_tokens,
        cached_tokens,
        _ended(path, answer),
        _said(logprobs),
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


def _prompt_counts(path: str, usage: _Usage | None) -> tuple[int | None, int | None]:
    if usage is None:
        return None, None
    if path == MESSAGES:
        cached = usage.cache_read_input_tokens
        if usage.input_tokens is None:
            return None, cached
        created = usage.cache_creation_input_tokens or 0
        return usage.input_tokens + (cached or 0) + created, cached
    if path == RESPONSES:
        details = usage.input_tokens_details
        return usage.input_tokens, None if details is None else details.cached_tokens
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, None if details is None else details.cached_tokens


def mending_of(answer: PrefillAnswer) -> Mending:
    """What the decode instance's answer lacks, once it has come with this one's parameters."""
    told = b'"remote_prefill_cached_tokens"' in answer.parameters
    return Mending(None if told else answer.cached_tokens, answer.prompt_logprobs)


def mended_body(path: str, body: bytes, mending: Mending = Mending()) -> bytes:  # noqa: B008
    """The whole answer as one instance would have given it; itself where it is that.

    What is no JSON object stays as it is.
    """
    if _HIDDEN_MARK not in body and mending.cached_tokens is None and not mending.prompt_logprobs:
        return body
    changes: dict[str, _Change] = dict.fromkeys(_HIDDEN, _hide)
    if mending.cached_tokens is not None:
        changes["usage"] = _usage_with(path, mending.cached_tokens)
    if mending.prompt_logprobs:
        logprobs = msgspec.Raw(mending.prompt_logprobs)
        if path == CHAT_COMPLETIONS:
            changes["prompt_logprobs"] = lambda _: logprobs
        elif path == COMPLETIONS:
            changes["choices"] = lambda choices: _in_each(choices, "prompt_logprobs", logprobs)
    return _changed(body, changes)


def mended_events(path: str, events: bytes, mending: Mending = Mending()) -> bytes:  # noqa: B008
    """Whole server-sent events as one instance would have sent them; see ``mended_body``.

    Whoever has no ``cached_tokens`` to put in needs to show only a stream's last events.
    """
    parts = events.split(b"\n\n")
    return b"\n\n".join(_mended_event(path, part, mending) for part in parts)


def _mended_event(path: str, event: bytes, mending: Mending) -> bytes:
    counts = mending.cached_tokens is not None and _USAGE_MARK in event
    if not counts and _HIDDEN_MARK not in event:
        return event
    before, mark, data = event.partition(b"data: ")
    if not mark or b"\n" in data:  # vLLM's have one line of data, which is their last
        return event
    inner = Mending(mending.cached_tokens if counts else None)
    for name in ("response", "message"):  # of /v1/responses and /v1/messages
        if b'"%b":' % name.encode() in data:
            whole = {name: lambda raw: msgspec.Raw(mended_body(path, bytes(raw), inner))}
            data = _changed(data, whole)
    return before + mark + mended_body(path, data, inner)


def _hide(_: msgspec.Raw) -> msgspec.Raw:
    return _NULL


def _in_each(raw: msgspec.Raw, name: str, value: msgspec.Raw) -> msgspec.Raw:
    """A list of objects, each with another value under this name."""
    try:
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except _ERRORS:
        return raw
    changed = [msgspec.Raw(_changed(bytes(item), {name: lambda _: value})) for item in items]
    return msgspec.Raw(msgspec.json.encode(changed))


def _usage_with(path: str, cached_tokens: int) -> _Change:
    count = msgspec.Raw(b"%d" % cached_tokens)

    def details(raw: msgspec.Raw) -> msgspec.Raw:
        return msgspec.Raw(_changed(bytes(raw), {"cached_tokens": lambda _: count}))

    def change(raw: msgspec.Raw) -> msgspec.Raw:
        if path != MESSAGES:
            names: Sequence[str] = ("prompt_tokens_details", "input_tokens_details")
            return msgspec.Raw(_changed(bytes(raw), dict.fromkeys(names, details)))
        try:
            usage = msgspec.json.decode(raw, type=_Usage)
        except _ERRORS:
            return raw
        if usage.cache_read_input_tokens is None or usage.input_tokens is None:
            return raw
        # Its input tokens are those that were not read from the cache.
        rest = usage.input_tokens + usage.cache_read_input_tokens - cached_tokens
        left = msgspec.Raw(b"%d" % max(0, rest))
        changes = {"cache_read_input_tokens": lambda _: count, "input_tokens": lambda _: left}
        return msgspec.Raw(_changed(bytes(raw), changes))

    return change


def _changed(document: bytes, changes: Mapping[str, _Change]) -> bytes:
    """A JSON object with those of its fields that have a change; all others byte for byte."""
    try:
        fields = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    except _ERRORS:
        return document
    found = {name: changes[name](fields[name]) for name in changes if name in fields}
    if all(bytes(fields[name]) == bytes(value) for name, value in found.items()):
        return document
    return msgspec.json.encode(fields | found)
