"""The paths that vLLM serves, and what work each makes it do.

Seen on vLLM 0.32. ``--api-key`` guards those under /v1/ and no other.
"""

from __future__ import annotations

import enum
import functools
import re
from typing import NamedTuple

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
COUNT_TOKENS = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
GENERATE = "/inference/v1/generate"  # tokens in, tokens out
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
INVOCATIONS = "/invocations"  # a chat or a completion, by its body
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

REALTIME = "/v1/realtime"  # a WebSocket
TOKENIZER_INFO = "/tokenizer_info"  # GET; only with --enable-tokenizer-info-endpoint

# What concerns an engine and no request: most of it only with VLLM_SERVER_DEV_MODE=1.
RESET_PREFIX_CACHE = "/reset_prefix_cache"
LOAD_LORA_ADAPTER = "/v1/load_lora_adapter"  # with VLLM_ALLOW_RUNTIME_LORA_UPDATING
UNLOAD_LORA_ADAPTER = "/v1/unload_lora_adapter"
SLEEP = "/sleep"  # with --enable-sleep-mode, and ?level=1 (the default) or 2
WAKE_UP = "/wake_up"
IS_SLEEPING = "/is_sleeping"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"

# Those calls, each with its method: none of them is passed on for a client.
ENGINE_CALLS = {
    LOAD_LORA_ADAPTER: "POST",
    UNLOAD_LORA_ADAPTER: "POST",
    SLEEP: "POST",
    WAKE_UP: "POST",
    IS_SLEEPING: "GET",
    PAUSE: "POST",
    RESUME: "POST",
    IS_PAUSED: "GET",
    RESET_PREFIX_CACHE: "POST",
    "/reset_mm_cache": "POST",
    "/reset_encoder_cache": "POST",
    "/release_kv_cache_memory": "POST",
    "/abort_requests": "POST",
    "/start_profile": "POST",
    "/stop_profile": "POST",
    LOAD: "GET",
    "/server_info": "GET",
    "/kv_event_sources": "GET",
    "/collective_rpc": "POST",
    "/scale_elastic_ep": "POST",
    "/is_scaling_elastic_ep": "POST",
    "/fault_tolerance/apply": "POST",
    "/fault_tolerance/status": "GET",
    "/init_weight_transfer_engine": "POST",
    "/shutdown_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/start_draft_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
    "/update_weight_version": "POST",
    "/weight_info": "GET",
    "/weight_checker": "POST",
    "/get_world_size": "GET",
}


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
    GENERATE: Work.GENERATE,
    "/generative_scoring": Work.PREFILL,
    INVOCATIONS: Work.GENERATE,
    TOKENIZE: Work.LIGHT,
    DETOKENIZE: Work.LIGHT,
    COUNT_TOKENS: Work.LIGHT,
    "/v1/completions/render": Work.LIGHT,
    "/v1/chat/completions/render": Work.LIGHT,
    "/v1/messages/render": Work.LIGHT,
    "/v1/responses/render": Work.LIGHT,
    "/v1/completions/derender": Work.LIGHT,
    "/v1/chat/completions/derender": Work.LIGHT,
    "/cohere/v2/chat": Work.GENERATE,
    "/v1/systemone": Work.GENERATE,
    EMBEDDINGS: Work.PREFILL,
    "/v2/embed": Work.PREFILL,
    "/pooling": Work.PREFILL,
    "/classify": Work.PREFILL,
    "/score": Work.PREFILL,
    "/v1/score": Work.PREFILL,
    "/rerank": Work.PREFILL,
    "/v1/rerank": Work.PREFILL,
    "/v2/rerank": Work.PREFILL,
    TRANSCRIPTIONS: Work.GENERATE,
    TRANSLATIONS: Work.GENERATE,
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


class Asked(NamedTuple):
    """What is asked of an instance about what it has: no step of its engine comes of it.

    Args:
        methods: that it takes.
        response_id: which response it is about; "": about none, and any instance can say.
    """

    methods: tuple[str, ...]
    response_id: str = ""


_OF_A_TOKENIZER = Asked(("GET",))
# No escape, no slash and no dot segment: an engine must not read another path out of it. Items and
# deletion are OpenAI's; vLLM 0.32 says that it has none.
_OF_A_RESPONSE = re.compile(
    RESPONSES + r"/(?!\.{1,2}(?:/|\Z))([0-9A-Za-z._~!$&'()*+,=:@-]{1,256})(/cancel|/input_items)?"
)
_RESPONSE_METHODS = {None: ("GET", "DELETE"), "/cancel": ("POST",), "/input_items": ("GET",)}


def asked_at(path: str) -> Asked | None:
    """What is asked at this path, or None when it is none of these."""
    if path == TOKENIZER_INFO:
        return _OF_A_TOKENIZER
    found = _OF_A_RESPONSE.fullmatch(path)
    if found is None or path in WORK_BY_PATH:
        return None
    return Asked(_RESPONSE_METHODS[found[2]], found[1])


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
    "/cohere/v2/chat": (("max_tokens", 1),),
    GENERATE: (("max_tokens", 1),),  # within sampling_params, as n
}
_TAKES_N = frozenset(
    (CHAT_COMPLETIONS, CHAT_COMPLETIONS + "/batch", COMPLETIONS, INVOCATIONS, GENERATE)
)


@functools.lru_cache
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
