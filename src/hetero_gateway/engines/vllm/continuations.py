"""How a broken answer is requested again from where it broke, and delivered as one stream.

The prompt and what the client already has become the new prompt: by token ids on /v1/completions if
the client had them returned, else as text, with vLLM's ``continue_final_message`` in a chat.
The second engine knows nothing of the first one: whatever state would have to be carried over (a
grammar, a random state, penalties for earlier text) cannot be continued exactly, and by default is
not. Stop strings can: an engine sends no text that may be the beginning of one.

Events are parsed in full here, and only here: of streams that broke, and of their continuations.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.engines.vllm.answers import DONE, failed_in_tail
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS

CONTINUED_PATHS = frozenset((CHAT_COMPLETIONS, COMPLETIONS))
# vLLM's default for /v1/completions; a chat may go on to the end of the context window.
_DEFAULT_MAX_TOKENS = 16
# A longer event of a continuation is not a token's.
_MOST_EVENT_BYTES = 1 << 20
# Fields that mean the same to an engine that has part of the answer in its prompt.
_SAME = frozenset(
    ("model", "messages", "prompt", "stream", "stream_options", "max_tokens",
     "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop",
     "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
     "repetition_penalty", "logit_bias", "allowed_token_ids", "user", "metadata", "store",
     "service_tier", "priority", "cache_salt", "prompt_cache_key", "safety_identifier",
     "session_id", "chat_template", "chat_template_kwargs", "add_special_tokens",
     "return_token_ids")
)  # fmt: skip
# The values that other fields must have for that: nothing is asked for.
_HARMLESS: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "include_reasoning": (True, False),
    "suffix": ("",),
    "continue_final_message": (True, False),
    "add_generation_prompt": (True, False),
}
# Fields that only change what is drawn: the stream is still well formed.
_DRAWN = frozenset(("seed", "presence_penalty", "frequency_penalty", "bad_words"))
_Event = dict[str, Any]
_FINISHED = re.compile(rb'"finish_reason":\s*"')


class Fidelity(enum.Enum):
    """Which streams are continued.

    ``TEXT_SAFE``: where each token is drawn as the first engine would have; ``ALL``: also where
    the stream is only well formed, though a seed starts again or a penalty forgets earlier text.
    """

    OFF = "off"
    TEXT_SAFE = "text-safe"
    ALL = "all"


class NotContinuable(Exception):
    """A stream that cannot be continued; the message gives the reason in a few words.

    ``for_now``: it may become possible once more has arrived.
    """

    def __init__(self, reason: str, *, for_now: bool = False) -> None:
        super().__init__(reason)
        self.for_now = for_now


class Told(NamedTuple):
    """What a client has of a stream.

    Args:
        envelope: ``id``, ``created`` and ``model`` of its events.
        text: of its one sequence.
        tokens: number of tokens of the text: one per event with text, unless their ids were
            given.
        token_ids: of the text, if they were returned, with the prompt's; None: they were not.
        prompt_ids: see ``token_ids``.
        held_ids: of tokens sent without their text: half a character. The continuation has to
            make them again, or their text would be lost.
        opened: a chat's role was sent.
        finished: its finish reason was sent.
        closed: its usage was sent.
    """

    envelope: Mapping[str, Any]
    text: str = ""
    tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    held_ids: tuple[int, ...] = ()
    opened: bool = False
    finished: bool = False
    closed: bool = False


NOTHING_TOLD = Told({})


def told_by(path: str, events: bytes) -> Told:
    """What a client has after whole server-sent events, without any framing.

    Raises:
        NotContinuable: they are not one sequence of text, or report that the engine failed.
    """
    told = NOTHING_TOLD
    parts = events.replace(b"\r\n", b"\n").split(b"\n\n")
    if parts.pop():
        raise NotContinuable("it broke off within an event", for_now=True)
    for part in parts:
        data = _data_of(part)
        if data and data != b"[DONE]":
            told = after(told, path, _read(data))
    return told


def _data_of(event: bytes) -> bytes:
    """The event's data; b"" if it has none, as a comment."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def _read(data: bytes) -> _Event:
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotContinuable("an event of it is no JSON") from None
    if not isinstance(event, dict) or "error" in event:
        raise NotContinuable("its engine failed in words")
    return event


def after(told: Told, path: str, event: _Event) -> Told:
    """The state after one more event. Raises NotContinuable."""
    envelope = told.envelope or {key: event.get(key) for key in ("id", "created", "model")}
    told = told._replace(envelope=envelope)
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise NotContinuable("it has several sequences")
    if not choices:
        return told._replace(closed=told.closed or bool(event.get("usage")))
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("index") or choice.get("logprobs"):
        raise NotContinuable("it is more than text")
    text = _text_of(path, choice)
    ids = choice.get("token_ids")
    told_ids, held_ids, count = told.token_ids, told.held_ids, 1 if text else 0
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        held_ids = (*held_ids, *ids)
        count = 0
        if text:
            count = len(held_ids)
            if told_ids is not None or not told.tokens:
                told_ids = (*(told_ids or ()), *held_ids)
            held_ids = ()
    elif text:
        told_ids = None
    prompt_ids = told.prompt_ids
    given = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
    if prompt_ids is None and isinstance(given, list):
        prompt_ids = tuple(given)
    return told._replace(
        text=told.text + text,
        tokens=told.tokens + count,
        token_ids=told_ids,
        prompt_ids=prompt_ids,
        held_ids=held_ids,
        opened=told.opened or path == CHAT_COMPLETIONS,
        finished=told.finished or choice.get("finish_reason") is not None,
    )


def _text_of(path: str, choice: _Event) -> str:
    if path == COMPLETIONS:
        text = choice.get("text")
    else:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            raise NotContinuable("it is more than text")
        if any(value for key, value in delta.items() if key not in ("role", "content")):
            raise NotContinuable("it is more than text")  # tool calls or reasoning
        text = delta.get("content")
    if text is not None and not isinstance(text, str):
        raise NotContinuable("it is more than text")
    return text or ""


def continuing_body(path: str, body: bytes | bytearray, told: Told, fidelity: Fidelity) -> bytes:
    """The request for the rest.

    Args:
        body: of the original request: JSON.
        told: by the stream that broke off, and by its continuations so far.

    Raises:
        NotContinuable: it asks for something that cannot be continued.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    if path not in CONTINUED_PATHS or not isinstance(fields, dict) or told.finished:
        raise NotContinuable("it is no stream of text")
    _check(fields, fidelity)
    if not told.text and not told.tokens:
        return bytes(body)
    if fidelity is not Fidelity.ALL and _ends_in_a_stop(told.text, fields.get("stop")):
        raise NotContinuable("it broke off where a stop string may begin", for_now=True)
    if path == COMPLETIONS:
        fields["prompt"] = _longer_prompt(fields.get("prompt"), told)
    else:
        _continue_chat(fields, told.text)
    _shorten(path, fields, told.tokens)
    return msgspec.json.encode(fields)


def _check(fields: _Event, fidelity: Fidelity) -> None:
    for name, value in fields.items():
        if name in _SAME or value is None or value in _HARMLESS.get(name, ()):
            continue
        if fidelity is Fidelity.ALL and name in _DRAWN:
            continue
        if name == "seed" and fields.get("temperature") == 0:
            continue  # nothing is drawn
        raise NotContinuable(f"`{name}` is not carried over")


def _ends_in_a_stop(text: str, stop: Any) -> bool:
    """Whether the text ends with the beginning of a stop string.

    An engine holds such text back while it may still become one; so it was none when the first
    engine went on, but may become one with what another draws.
    """
    stops = [stop] if isinstance(stop, str) else stop or ()
    return any(
        text.endswith(one[:size])
        for one in stops
        if isinstance(one, str)
        for size in range(1, len(one))
    )


def _longer_prompt(prompt: Any, told: Told) -> Any:
    if told.prompt_ids is not None and told.token_ids is not None:
        return [*told.prompt_ids, *told.token_ids]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt + told.text
    if prompt and isinstance(prompt, list) and all(type(token) is int for token in prompt):
        if told.token_ids is not None:
            return [*prompt, *told.token_ids]
        raise NotContinuable("its prompt is token ids, and its answer was text")
    raise NotContinuable("it has several prompts")


def _continue_chat(fields: _Event, text: str) -> None:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise NotContinuable("it has no messages")
    messages = list(messages)
    if fields.get("continue_final_message"):
        last = messages[-1] if messages else None
        if not isinstance(last, dict) or not isinstance(last.get("content"), str):
            raise NotContinuable("its last message is more than text")
        messages[-1] = last | {"content": last["content"] + text}
    elif fields.get("add_generation_prompt") is False:
        raise NotContinuable("it has no generation prompt")
    else:
        messages.append({"role": "assistant", "content": text})
    fields |= {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def _shorten(path: str, fields: _Event, tokens: int) -> None:
    """Subtract the tokens already sent from the limits of an answer's length."""
    limited = False
    for name in ("max_tokens", "max_completion_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if type(value) is not int or value <= tokens:
            raise NotContinuable("it has all of its tokens")
        fields[name] = value - tokens
        limited = True
    if path == COMPLETIONS and not limited:
        if tokens >= _DEFAULT_MAX_TOKENS:
            raise NotContinuable("it has all of its tokens")
        fields["max_tokens"] = _DEFAULT_MAX_TOKENS - tokens
    least = fields.get("min_tokens")
    if type(least) is int:
        fields["min_tokens"] = max(0, least - tokens)


def counting_body(body: bytes | bytearray, text: str) -> bytes:
    """The body for /tokenize that counts the tokens of a part of this request's answer.

    Events do not say: one may carry several, if the engine is ahead of its reader.
    """
    model = msgspec.json.decode(body, type=_Counted).model
    asked = {"prompt": text, "add_special_tokens": False}
    return msgspec.json.encode(asked if model is None else {"model": model} | asked)


def counted_tokens(answer: bytes, text: str) -> int | None:
    """The count in /tokenize's answer; None: no plausible one."""
    try:
        count = msgspec.json.decode(answer, type=_Counted).count
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return count if 0 < count <= len(text.encode("utf-8", "replace")) else None


class _Counted(msgspec.Struct):
    count: int = 0
    model: str | None = None


def missing_end(tail: bytes, sequences: int) -> bytes | None:
    """The missing bytes of a stream that broke off when only its end was left; None: more is
    missing.

        Args:
            tail: the last bytes of its body, with any framing, to the end of an event.
            sequences: how many it has.

        Its closing usage is known if each event has one (``continuous_usage_stats``).
    """
    tail = b"\n" + tail
    if len(_FINISHED.findall(tail)) < sequences or failed_in_tail(tail):
        return None
    if b"\ndata: [DONE]" in tail:
        return b""
    last, end, rest = tail[tail.rfind(b"\ndata: ") :].partition(b"\n\n")
    if not end or rest.strip(b"\r\n"):
        return None
    try:
        event = _read(_data_of(last))
    except NotContinuable:
        return None
    if not event.get("choices") or not event.get("usage"):
        return DONE
    return b"data: %b\n\n%b" % (msgspec.json.encode(event | {"choices": []}), DONE)


class Splice:
    """A continuation, rewritten as events of the original stream.

    Args:
        path: the request's.
        told: by the stream so far.

    Attributes:
        told: including what passed through here.
        usage: (prompt tokens, output tokens) of the whole, if the engine states them.
        done: ``[DONE]`` has passed.
    """

    def __init__(self, path: str, told: Told) -> None:
        self._path = path
        self._before_tokens = told.tokens
        self._part = b""
        self._held_ids = list(told.held_ids)
        self.told = told._replace(held_ids=())
        self.usage: tuple[int, int] | None = None
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Take body bytes as they come; returns the whole events that the client gets.

        Raises:
            NotContinuable: it is not such a stream, or reports that its engine failed.
        """
        parts = (self._part + data).split(b"\n\n")
        self._part = parts.pop()
        if len(self._part) > _MOST_EVENT_BYTES:
            raise NotContinuable("an event of it has no end")
        return b"".join(map(self._event, parts))

    def _event(self, part: bytes) -> bytes:
        data = _data_of(part)
        if data == b"[DONE]":
            self.done = True
            return DONE
        if not data:
            return part + b"\n\n"
        event = _read(data)
        opened = self.told.opened
        told = self.told = after(self.told, self._path, event)
        choices = event["choices"]
        if choices and ((opened and _only_opens(choices[0])) or self._was_held(choices[0])):
            return b""
        event |= told.envelope
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._join(usage)
        return b"data: %b\n\n" % msgspec.json.encode(event)

    def _was_held(self, choice: _Event) -> bool:
        """Whether these tokens were sent before, and still have no text."""
        ids, held_ids = choice.get("token_ids"), self._held_ids
        if not (ids and held_ids) or ids != held_ids[: len(ids)] or _text_of(self._path, choice):
            self._held_ids = []
            return False
        del held_ids[: len(ids)]
        return choice.get("finish_reason") is None

    def _join(self, usage: _Event) -> None:
        """The first engine's tokens are part of the prompt here, and of the answer for the
        client."""
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is int and type(output) is int:
            before = min(self._before_tokens, prompt)
            usage["prompt_tokens"], usage["completion_tokens"] = prompt - before, output + before
            self.usage = prompt - before, output + before


def _only_opens(choice: _Event) -> bool:
    """Whether it is a chat's first event, which has a role and no text."""
    delta = choice.get("delta")
    return (
        isinstance(delta, dict)
        and "role" in delta
        and not delta.get("content")
        and choice.get("finish_reason") is None
    )
