"""What is vLLM's own: the paths that it serves, and the marks in its answers.

Text and bytes in, values out: no socket, no clock.
"""

from __future__ import annotations

import enum
import re

_USAGE_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_USAGE_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')


class Work(enum.Enum):
    """What a path makes the engine do."""

    GENERATE = "generate"  # prefill and decode
    PREFILL = "prefill"  # embeddings, scores: no output tokens
    LIGHT = "light"  # tokenize and the like: no step of the engine


_WORK_BY_PATH = {
    "/v1/chat/completions": Work.GENERATE,
    "/v1/completions": Work.GENERATE,
    "/v1/responses": Work.GENERATE,
    "/v1/messages": Work.GENERATE,
    "/v1/chat/completions/batch": Work.GENERATE,
    "/inference/v1/generate": Work.GENERATE,
    "/generative_scoring": Work.PREFILL,
    "/invocations": Work.GENERATE,
    "/tokenize": Work.LIGHT,
    "/detokenize": Work.LIGHT,
    "/v1/messages/count_tokens": Work.LIGHT,
    "/v1/completions/render": Work.LIGHT,
    "/v1/chat/completions/render": Work.LIGHT,
    "/v1/embeddings": Work.PREFILL,
    "/pooling": Work.PREFILL,
    "/classify": Work.PREFILL,
    "/score": Work.PREFILL,
    "/v1/score": Work.PREFILL,
    "/rerank": Work.PREFILL,
    "/v1/rerank": Work.PREFILL,
    "/v2/rerank": Work.PREFILL,
    "/v1/audio/transcriptions": Work.GENERATE,
    "/v1/audio/translations": Work.GENERATE,
    "/v1/audio/speech": Work.GENERATE,
    "/v1/images/generations": Work.GENERATE,
    "/v1/moderations": Work.PREFILL,
}
# They change one engine's state: sent to an instance of the policy's choice they would do harm.
_NOT_ROUTED = frozenset(
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/files", "/v1/batches")
)


def work_of_path(path: str) -> Work | None:
    """What a POST to this path is, or None when it is not an engine path.

    Paths of newer engines under /v1/ are treated as prefill-only work rather than refused.
    """
    work = _WORK_BY_PATH.get(path)
    if work is None and path.startswith("/v1/") and path not in _NOT_ROUTED:
        return Work.PREFILL
    return work


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
    return (
        b'data: {"error"' in tail
        or b"event: error" in tail
        or b'"finish_reason":"abort"' in tail
        or b'"finish_reason": "abort"' in tail
    )
