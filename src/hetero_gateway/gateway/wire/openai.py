"""The wire: what the gateway reads from a request and a response, and the errors it makes itself.

A request's body is passed on byte for byte; only the few fields that scheduling needs are looked
at, with the prompt left as raw JSON. What an engine's paths and answers mean is in engines/vllm.

How long a prompt is (docs/scheduling.md, "Prompt length"):

- Token-id prompts are exact: the numbers are counted.
- Otherwise the raw JSON bytes of messages (or prompt, input, system) and tools are counted, a
  ``\\uXXXX`` escape as three bytes, and divided by the model's learnt bytes-per-token ratio.
- Each image, audio clip or video counts ``image_tokens``, and the base64 data none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from hetero_gateway.errors import Refusal

_MEDIA_PART = re.compile(
    rb'"type"\s*:\s*"(?:image_url|image|input_image|input_audio|audio_url|video_url)"'
)
_BASE64_MARK = b";base64,"
_MULTIPART_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
_JSON_NUMBERS = re.compile(rb"\[\s*\d")
_JSON_LIST_OF_NUMBERS = re.compile(rb"\[\s*\[")


class _Body(msgspec.Struct):
    """The fields that scheduling looks at; everything else is skipped."""

    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")


_decode_body = msgspec.json.Decoder(_Body).decode


@dataclass(slots=True)
class ParsedRequest:
    """What a body says. ``text_bytes`` is 0 when the prompt is exact."""

    model: str | None
    stream: bool
    max_output_tokens: int | None
    sequences: int
    text_bytes: int
    media_parts: int
    exact_prompt_tokens: int | None
    prompt_count: int
    messages: bytes
    prompt: bytes


def parse_body(body: bytes, content_type: bytes) -> ParsedRequest:
    """Read what scheduling needs from a request's body.

    Raises:
        Refusal: 400 for broken JSON, a body that is not an object, a ``model`` that is no
            string. Everything else is the engine's to judge.
    """
    if content_type.startswith(b"multipart/"):
        match = _MULTIPART_MODEL.search(body)
        model = match.group(1).decode("utf-8", "replace") if match else None
        return ParsedRequest(model, False, None, 1, 0, 1, None, 1, b"", b"")
    try:
        fields = _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(
            400, "invalid_json", f"The request body is not usable JSON: {error}"
        ) from None
    model = fields.model
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "invalid_type", "`model` must be a string.", param="model")
    prompt = bytes(fields.prompt)
    tokens, prompts, text_bytes = _measure_prompt(prompt)
    media_parts = 0
    for raw in (fields.messages, fields.input, fields.system, fields.instructions, fields.tools):
        if raw:
            raw_bytes = bytes(raw)
            found = len(_MEDIA_PART.findall(raw_bytes))
            text_bytes += _text_bytes(raw_bytes) - (_base64_bytes(raw_bytes) if found else 0)
            media_parts += found
    return ParsedRequest(
        model=model,
        stream=fields.stream is True,
        max_output_tokens=_positive(fields.max_completion_tokens)
        or _positive(fields.max_tokens)
        or _positive(fields.max_output_tokens),
        sequences=prompts * (_positive(fields.n) or 1),
        text_bytes=text_bytes,
        media_parts=media_parts,
        exact_prompt_tokens=tokens,
        prompt_count=prompts,
        messages=bytes(fields.messages),
        prompt=prompt,
    )


def prompt_text(body: bytes) -> str:
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


def _measure_prompt(raw: bytes) -> tuple[int | None, int, int]:
    """(exact tokens of all prompts or None, number of prompts, text bytes) of ``prompt``."""
    if not raw or raw[:1] == b'"' or raw == b"null":
        return None, 1, _text_bytes(raw)
    if _JSON_NUMBERS.match(raw):
        return raw.count(b",") + 1, 1, 0
    if _JSON_LIST_OF_NUMBERS.match(raw):
        # Every list has one number more than it has commas; one comma stands between two lists.
        return raw.count(b",") + 1, max(1, raw.count(b"[") - 1), 0
    try:
        count = len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    except msgspec.DecodeError:
        count = 1
    return None, max(1, count), _text_bytes(raw)


def _text_bytes(raw: bytes) -> int:
    # A search for one byte is many times faster than one for two, and long prompts are text.
    return len(raw) - (3 * raw.count(b"\\u") if b"\\" in raw else 0)


def _base64_bytes(raw: bytes) -> int:
    """Bytes of base64 data in data URLs."""
    size = 0
    start = raw.find(_BASE64_MARK)
    while start >= 0:
        end = raw.find(b'"', start)
        end = len(raw) if end < 0 else end
        size += end - start
        start = raw.find(_BASE64_MARK, end)
    return size


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


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
