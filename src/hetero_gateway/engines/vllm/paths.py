"""The paths that vLLM serves, and what work each makes it do.

Seen on vLLM 0.32. ``--api-key`` guards those under /v1/ and no other.
"""

from __future__ import annotations

import enum

# What it says of itself: GET.
# 200 with an empty body while the engine lives, also while it drains; 503 once its core has died.
HEALTH = "/health"
PING = "/ping"  # the same, by GET or POST
VERSION = "/version"
LOAD = "/load"  # always 0 unless --enable-server-load-tracking
METRICS = "/metrics"
MODELS = "/v1/models"

# What it does: POST.
CHAT_COMPLETIONS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
INVOCATIONS = "/invocations"  # a chat or a completion, by its body
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

# What concerns an engine and no request. Only with VLLM_SERVER_DEV_MODE=1.
RESET_PREFIX_CACHE = "/reset_prefix_cache"


class Work(enum.Enum):
    """What a path makes the engine do."""

    GENERATE = "generate"  # prefill and decode
    PREFILL = "prefill"  # embeddings, scores: no output tokens
    LIGHT = "light"  # tokenize and the like: no step of the engine


WORK_BY_PATH = {
    CHAT_COMPLETIONS: Work.GENERATE,
    COMPLETIONS: Work.GENERATE,
    RESPONSES: Work.GENERATE,
    MESSAGES: Work.GENERATE,
    "/v1/chat/completions/batch": Work.GENERATE,
    "/inference/v1/generate": Work.GENERATE,
    "/generative_scoring": Work.PREFILL,
    INVOCATIONS: Work.GENERATE,
    TOKENIZE: Work.LIGHT,
    DETOKENIZE: Work.LIGHT,
    "/v1/messages/count_tokens": Work.LIGHT,
    "/v1/completions/render": Work.LIGHT,
    "/v1/chat/completions/render": Work.LIGHT,
    EMBEDDINGS: Work.PREFILL,
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


def work_of_path(path: str) -> Work | None:
    """What a POST to this path is, or None when it isn't sent to an engine.

    Exactly these paths are, and no other spelling of one: an engine may decode or normalise what
    it gets, and end up at /sleep or at what changes one engine's state.
    """
    return WORK_BY_PATH.get(path)


# The fields that limit an answer's tokens, the first one ahead of the next, each with the least
# that may be asked for. A completion of none is a prompt's log probabilities where ``echo`` is set;
# in some versions a chat's max_completion_tokens of 0 counts as none given.
_CHAT_LIMITS = (("max_completion_tokens", 0), ("max_tokens", 1))
_COMPLETION_LIMITS = (("max_tokens", 0),)
_LIMITS_BY_PATH = {
    CHAT_COMPLETIONS: _CHAT_LIMITS,
    CHAT_COMPLETIONS + "/batch": _CHAT_LIMITS,
    COMPLETIONS: _COMPLETION_LIMITS,
    RESPONSES: (("max_output_tokens", 1),),
    MESSAGES: (("max_tokens", 1),),
}
_TAKES_N = frozenset((CHAT_COMPLETIONS, CHAT_COMPLETIONS + "/batch", COMPLETIONS, INVOCATIONS))


def limits_of(path: str, *, chats: bool) -> tuple[bool, tuple[tuple[str, int], ...]]:
    """(whether ``n`` counts, the fields that limit an answer) in a body on this path.

    Other paths ignore fields of these names, whatever is in them. ``chats``: it has messages.
    """
    if path == INVOCATIONS:
        return True, _CHAT_LIMITS if chats else _COMPLETION_LIMITS
    return path in _TAKES_N, _LIMITS_BY_PATH.get(path, ())


def starts_with_a_token(path: str) -> bool:
    """Whether the first bytes of a stream's body are there with its first token.

    /v1/responses sends its first events before any token is made.
    """
    return path != RESPONSES
