"""What vLLM's answers say: of the models it serves, of a request's usage, of its own failure.

Nothing here parses an answer that passes through: usage and failures are found in the last bytes of
its body, framing and all. A quote or a newline within a text is escaped in JSON, so none of the
marks below can match what a model wrote.

Seen on vLLM 0.32, and not to be relied on: that ``[DONE]`` means success (a dead engine sends an
error event and then ``[DONE]``, under status 200), or that an event is a token (deltas merge, and
some are empty).
"""

from __future__ import annotations

import re

import msgspec

from hetero_gateway.engines.vllm.paths import COMPLETIONS

DONE = b"data: [DONE]\n\n"  # not on /v1/messages and /v1/responses
# The finish_reason of a sequence that the engine gave up.
ABORT = "abort"
# At most so many events end a stream and are no tokens: usage, where asked for, and ``[DONE]``.
CLOSING_EVENTS = 2

# Digits of the longest count that is taken for one: int() refuses 4 300 and more.
_COUNT = rb"\s*:\s*(\d{1,15})(?!\d)"
_USAGE_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"' + _COUNT)
_USAGE_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"' + _COUNT)
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"' + _COUNT)
_DELTA = re.compile(rb'"choices":\s*\[\s*\{')
_FAILURES = (
    b'data: {"error"',
    b"\nevent: error",
    b'"finish_reason":"%b"' % ABORT.encode(),
    b'"finish_reason": "%b"' % ABORT.encode(),
)


def usage_in_tail(tail: bytes) -> tuple[int | None, int | None]:
    """(prompt tokens, output tokens) of the last ``usage`` object in a response's tail."""
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None, None
    prompt = _USAGE_PROMPT.search(tail, start)
    output = _USAGE_OUTPUT.search(tail, start)
    return int(prompt[1]) if prompt else None, int(output[1]) if output else None


def failed_in_tail(tail: bytes) -> bool:
    """Whether a stream that ended well in HTTP says that the engine failed.

    A killed engine sends an error event and then ``[DONE]`` under status 200; one that is stopped
    may end its streams with finish_reason "abort".
    """
    return tail.startswith(_FAILURES[1][1:]) or any(mark in tail for mark in _FAILURES)


def tokens_of_events(path: str, events: int) -> int:
    """Output tokens of a whole stream that has no usage: one per event that may carry one.

    ``[DONE]`` does not, nor does the role chunk that opens a chat.
    """
    return max(0, events - (1 if path == COMPLETIONS else 2))


def deltas_in(events: bytes) -> int:
    """Events with a choice: the role chunk, text, or both; not the closing usage."""
    return len(_DELTA.findall(events))


def completion_counts_in(events: bytes) -> list[int]:
    """Tokens so far, by every event that says: with ``continuous_usage_stats`` each of them."""
    return [int(count) for count in _COMPLETION_TOKENS.findall(events)]


def read_models(body: bytes) -> dict[str, int | None] | None:
    """The models that /v1/models lists, in its order, each with its context window in tokens.

    None for a window that is not told; None in place of it all for what is no list of models.
    Never raises.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    cards = document.get("data") if isinstance(document, dict) else None
    if not isinstance(cards, list):
        return None
    models: dict[str, int | None] = {}
    for card in cards:
        name = card.get("id") if isinstance(card, dict) else None
        if isinstance(name, str):
            length = card.get("max_model_len")
            known = isinstance(length, int) and not isinstance(length, bool) and length > 0
            models[name] = length if known else None
    return models
