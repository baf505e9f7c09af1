"""How a decode instance's stream begins: with nothing of substance yet, with text, or a failure.

A transfer may fail seconds after status 200 was sent, before any of the answer. So whoever holds a
stream's first events back until they carry something can still go elsewhere. vLLM 0.32, with the
prefill instance gone, after 4 to 5 s:

    /v1/completions        an ``error`` event and ``[DONE]``
    /v1/chat/completions   the same, after the event of the role
    /v1/messages           ``message_start``, and an ``error`` event about its own chunk
    /v1/responses          ``created`` and ``in_progress`` at once; then the connection breaks

A stream that succeeds sends its role, or ``message_start``, with its first token, so holding it
back costs no time; ``created`` and ``in_progress`` come earlier.
"""

import enum
from typing import Any

import msgspec

from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, MESSAGES, RESPONSES

_SAYS_NOTHING = {
    MESSAGES: ("message_start", "ping"),
    RESPONSES: ("response.created", "response.queued", "response.in_progress"),
}
_FAILED = ("error", "response.failed")


class Beginning(enum.Enum):
    """What a stream's bytes are so far; an end or a break in ``OPENING`` is a failure."""

    OPENING = "nothing of an answer"
    BEGUN = "a part of the answer"
    FAILED = "the engine failed"


def beginning_of(path: str, events: bytes) -> Beginning:
    """Classify a stream by its first bytes without any framing; few are looked at."""
    whole, _, _ = events.replace(b"\r\n", b"\n").rpartition(b"\n\n")
    for event in whole.split(b"\n\n"):
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            continue  # a comment
        found = _beginning_with(path, b"\n".join(lines))
        if found is not Beginning.OPENING:
            return found
    return Beginning.OPENING


def _beginning_with(path: str, data: bytes) -> Beginning:
    try:
        told: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # [DONE] of an answer without any; what is not an event of vLLM's is for the client to
        # judge.
        return Beginning.FAILED if data == b"[DONE]" else Beginning.BEGUN
    if not isinstance(told, dict):
        return Beginning.BEGUN
    if told.get("error") is not None or told.get("type") in _FAILED:
        return Beginning.FAILED
    if path == CHAT_COMPLETIONS:
        says_nothing = _is_role(told.get("choices"))
    else:
        says_nothing = told.get("type") in _SAYS_NOTHING.get(path, ())
    return Beginning.OPENING if says_nothing else Beginning.BEGUN


def _is_role(choices: Any) -> bool:
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    if not isinstance(delta, dict) or choices[0].get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")
