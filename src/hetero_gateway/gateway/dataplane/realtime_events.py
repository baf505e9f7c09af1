"""Interprets the events of a realtime session: models, audio, tokens.

An event is one message: a JSON object with a ``type``. Any other message passes unchanged, since no
engine reads a field of it. Messages are read as Python's ``json``, and so vLLM, reads them: any
spelling of a name, the last of equal names, bytes in UTF-8, UTF-16 or UTF-32. No object is built
from an event without relevant names; its audio is measured in place.

    what passes                     counts as
    ------------------------------  ------------------------------------------------------------
    ``input_audio_buffer.append``   its audio: a token for 2 560 bytes, 80 ms of PCM16 at 16 kHz
    a binary message                the same, of all its bytes
    another message of a client     a token for 4 bytes
    a ``….delta`` of an instance    a token, or the audio that is in it
    a ``….done`` with a usage       its usage, if that is more than what was counted
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.engines.vllm import REALTIME, guarded_at, usage_in_tail
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request.body_fields import check_guarded

# vLLM's realtime models take 12.5 tokens for a second of audio (Voxtral: one for 80 ms), as PCM16
# at 16 kHz, one channel.
AUDIO_BYTES_PER_TOKEN = 2560
_TEXT_BYTES_PER_TOKEN = 4
# Of base64.
_BYTES_PER_CHARACTER = 3 / 4
_APPEND = "input_audio_buffer.append"
# The rest of an audio event: its type, an id.
_AROUND_AUDIO_BYTES = 256
# Limit of an examined event, without its audio: read whole in 25 ms at worst.
_MOST_EVENT_BYTES = 1 << 17
_USAGE_WITHIN_BYTES = 4096

_OBJECT = re.compile(r"[ \t\r\n]*\{")
_NONE = msgspec.Raw(b"")


class _Fields(msgspec.Struct):
    type: msgspec.Raw = _NONE
    audio: msgspec.Raw = _NONE
    delta: msgspec.Raw = _NONE


_decode = msgspec.json.Decoder(_Fields).decode
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


class ClientEvent(NamedTuple):
    """A client's message: its forwarded form, and the parts that count as audio and as text."""

    message: str | bytes
    audio_bytes: float
    text_bytes: int


class Meter:
    """Counts the tokens of a session, as above.

    Args:
        context_tokens: of the model; an instance that reports more for one answer is not believed.
    """

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens
        # Of finished answers, and of what has come since.
        self._input_tokens = self._output_tokens = 0
        self._audio_bytes = self._text_bytes = 0.0
        self._deltas = 0.0

    def __repr__(self) -> str:
        return f"<Meter: {self.input_tokens} + {self.output_tokens} tokens>"

    @property
    def input_tokens(self) -> int:
        """Tokens of everything the client has sent."""
        return self._input_tokens + self._latest_input_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens of everything the instance has answered."""
        return self._output_tokens + math.ceil(self._deltas)

    @property
    def _latest_input_tokens(self) -> int:
        audio_tokens = math.ceil(self._audio_bytes / AUDIO_BYTES_PER_TOKEN)
        return audio_tokens + math.ceil(self._text_bytes / _TEXT_BYTES_PER_TOKEN)

    def sent(self, event: ClientEvent) -> None:
        """Count a client's message."""
        self._audio_bytes += event.audio_bytes
        self._text_bytes += event.text_bytes

    def take_back(self, event: ClientEvent) -> None:
        """Take it back: it was not sent on."""
        self._audio_bytes = max(0.0, self._audio_bytes - event.audio_bytes)
        self._text_bytes = max(0.0, self._text_bytes - event.text_bytes)

    def answered(self, message: str | bytes) -> None:
        """Count an instance's message."""
        if isinstance(message, bytes):
            self._deltas += len(message) / AUDIO_BYTES_PER_TOKEN
            return
        try:
            fields = _decode(message)
            kind = _text(fields.type)
        except _ERRORS:
            return
        if kind.endswith("audio.delta"):
            characters = max(0, _size(fields.delta) - 2)
            self._deltas += characters * _BYTES_PER_CHARACTER / AUDIO_BYTES_PER_TOKEN
        elif kind.endswith(".delta"):
            self._deltas += 1
        elif kind.endswith(".done"):
            prompt, output, _ = usage_in_tail(message[-_USAGE_WITHIN_BYTES:].encode())
            if prompt is not None or output is not None:
                self._end_answer(prompt or 0, output or 0)

    def _end_answer(self, prompt_tokens: int, output_tokens: int) -> None:
        if prompt_tokens > self._context_tokens:
            prompt_tokens = 0
        if output_tokens > self._context_tokens:
            output_tokens = 0
        self._input_tokens += max(prompt_tokens, self._latest_input_tokens)
        self._output_tokens += max(output_tokens, math.ceil(self._deltas))
        self._audio_bytes = self._text_bytes = self._deltas = 0.0


class ClientEvents:
    """Reads what a client sends.

    Args:
        model: of the session, by the name that its instance serves.
        asked: the name that the client asked for, if that is an alias; else "".
        allowed: guarded fields that clients may set.
    """

    def __init__(self, model: str, asked: str, allowed: frozenset[str]) -> None:
        self._model = model
        self._asked = asked
        self._guarded = guarded_at(REALTIME) - allowed
        # An event without any of these, and without an escape that could spell one, names none.
        self._marks = ('model"', "\\u", *(f'{name}"' for name in sorted(self._guarded)))

    def read(self, message: str | bytes) -> ClientEvent:
        """Raises Refusal: 403 for another model; 400 for guarded fields, or if it is too large."""
        text = message if isinstance(message, str) else _text_in(message)
        if text is None or not _OBJECT.match(text):
            audio = isinstance(message, bytes)
            return ClientEvent(message, audio * len(message), (not audio) * len(message))
        readable, audio_characters = True, 0
        try:
            fields = _decode(text)
            if _text(fields.type) == _APPEND:
                audio_characters = max(0, _size(fields.audio) - 2)
        except _ERRORS:
            # Not an object, or only valid for Python, with a NaN or half a surrogate.
            readable = False
        rest = len(text) - audio_characters
        if not readable or any(mark in text for mark in self._marks):
            if rest > _MOST_EVENT_BYTES:
                detail = f"An event may have {_MOST_EVENT_BYTES} bytes besides its audio."
                raise Refusal(400, "event_too_large", detail)
            try:
                event = json.loads(text)
            except RecursionError:
                # Another version of Python would read it.
                detail = "The event is nested too deeply."
                raise Refusal(400, "invalid_json", detail) from None
            except ValueError:
                event = None  # an engine cannot read it either
            if self._changed(event):
                message = json.dumps(event)
        if audio_characters:
            rest = max(0, rest - _AROUND_AUDIO_BYTES)
        return ClientEvent(message, audio_characters * _BYTES_PER_CHARACTER, rest)

    def _changed(self, event: Any) -> bool:
        """Examine an event; returns whether its model's name was replaced.

        Raises:
            Refusal: as ``read``.
        """
        changed = False
        left = [event]
        while left:
            value = left.pop()
            if isinstance(value, list):
                left += [each for each in value if isinstance(each, dict | list)]
            elif isinstance(value, dict):
                for name, field in value.items():
                    if isinstance(field, dict | list):
                        left.append(field)
                    # A schema may describe a field called priority, or model; null names none.
                    if name in self._guarded and not (
                        name == "priority" and isinstance(field, dict)
                    ):
                        check_guarded(name, field)
                    if name == "model" and not isinstance(field, dict | None):
                        if self._asked and field == self._asked:
                            value[name] = self._model
                            changed = True
                        elif field != self._model:
                            raise self._another(field)
        return changed

    def _another(self, field: object) -> Refusal:
        name = self._asked or self._model
        detail = f"This session is with the model `{name}`; open another one for {field!a:.200}."
        return Refusal(403, "model_not_allowed", detail, param="model")


def _text_in(message: bytes) -> str | None:
    """The text that Python's ``json.loads`` would read from bytes; None: none."""
    try:
        return message.decode(json.detect_encoding(message), "surrogatepass")
    except UnicodeDecodeError:
        return None


def _text(raw: msgspec.Raw) -> str:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(raw, type=str) if raw else ""


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes if raw else 0


def error_event(refusal: Refusal) -> str:
    """The error event for the client, in the form of OpenAI's realtime API."""
    error = {
        "type": refusal.kind,
        "code": refusal.code,
        "message": refusal.message,
        "param": refusal.param,
    }
    return json.dumps({"type": "error", "error": error})
