"""The lines of a file of requests, and of their answers: OpenAI's format and ``vllm run-batch``'s.

One JSON object per line, with an id for its answer (``custom_id``), a path and a body:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}

and for an answer

    {"id": "…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}},
     "error": null}
"""

import re
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.engines.vllm.paths import (
    TRANSCRIPTIONS,
    TRANSLATIONS,
    WORK_BY_PATH,
    Work,
)

# Accepted paths of a line: they cause engine steps, and take JSON.
ENDPOINTS = tuple(
    path
    for path, work in WORK_BY_PATH.items()
    if work is not Work.LIGHT and path not in (TRANSCRIPTIONS, TRANSLATIONS)
)
MOST_ID_CHARACTERS = 512
_MOST_SHOWN = 64
_PARTS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(w|d|h|min|m|s)")
_SECONDS = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
MOST_WINDOW_S = 366 * 86400.0


class BatchLine(msgspec.Struct):
    """A line of a file of requests. ``body``: its JSON."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class LineProblem(NamedTuple):
    """A problem of a line. ``code`` and ``param`` as in OpenAI's errors of batches."""

    code: str
    message: str
    param: str | None = None


_READER = msgspec.json.Decoder(BatchLine)


def read_line(data: bytes, endpoint: str | None) -> BatchLine | LineProblem:
    """Read a line, without its end.

    Args:
        endpoint: the one that all lines have to name; None: each may name its own.
    """
    try:
        line = _READER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Describes the error and its position, but does not quote the line.
        text = str(error) if isinstance(error, msgspec.DecodeError) else "it is no text in UTF-8"
        return LineProblem("invalid_json_line", f"This line is not a request in JSON: {text}.")
    if not 1 <= len(line.custom_id) <= MOST_ID_CHARACTERS:
        message = f"custom_id must have 1 to {MOST_ID_CHARACTERS} characters."
        return LineProblem("invalid_custom_id", message, "custom_id")
    if line.method.upper() != "POST":
        return LineProblem("invalid_method", "method must be POST.", "method")
    if endpoint is not None and line.url != endpoint:
        message = f"url must be the batch's endpoint, {endpoint}, and is {_shown(line.url)}."
        return LineProblem("mismatched_endpoint", message, "url")
    if line.url not in ENDPOINTS:
        message = f"{_shown(line.url)} is not served in batches."
        return LineProblem("invalid_url", message, "url")
    if not bytes(line.body).startswith(b"{"):
        return LineProblem("invalid_body", "body must be an object.", "body")
    return line


class _Background(msgspec.Struct):
    background: Any = None


_BACKGROUND = msgspec.json.Decoder(_Background)


def in_background(body: bytes) -> bool:
    """Whether a body of /v1/responses asks for an answer to be fetched later."""
    return bool(_BACKGROUND.decode(body).background)


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_MOST_SHOWN])


def window_s(text: str) -> float | None:
    """The seconds of ``24h``, ``1d12h``, ``90s``; None: not a duration, or above a year."""
    parts = _PARTS.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        return None
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return seconds if 0 < seconds <= MOST_WINDOW_S else None


def answer_line(
    line_id: str, custom_id: str, status: int, request_id: str, body: bytes, *, repeated: bool
) -> bytes:
    """The line of an answer, with its end. A body that is not JSON becomes a string."""
    content: Any = msgspec.Raw(body)
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        if b"\n" in body or b"\r" in body:
            content = msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = body.decode("utf-8", "replace")
    response = {"status_code": status, "request_id": request_id, "body": content}
    return _line(line_id, custom_id, response, None, repeated)


def error_line(line_id: str, custom_id: str | None, code: str, message: str, **more: Any) -> bytes:
    """The line of a request without an answer, with its end."""
    error = {"code": code, "message": message, **more}
    return _line(line_id, custom_id, None, error, False)


def _line(line_id: str, custom_id: str | None, response: Any, error: Any, repeated: bool) -> bytes:
    told = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    if repeated:
        told["repeated"] = True
    return msgspec.json.encode(told) + b"\n"
