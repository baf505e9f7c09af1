"""The paths that vLLM serves, and the work each causes.

Seen on vLLM 0.32. ``--api-key`` protects those under /v1/ and no other.
"""

import enum
import functools
import re
from typing import NamedTuple

# Information about itself: GET.
# 200 with an empty body while the engine lives, also while it drains; 503 once its core has died.
HEALTH = "/health"
PING = "/ping"  # the same, by GET or POST
VERSION = "/version"
KV_EVENT_SOURCES = "/kv_event_sources"
LOAD = "/load"  # always 0 unless --enable-server-load-tracking
METRICS = "/metrics"
MODELS = "/v1/models"

# Work: POST.
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

# About an engine, not a request: most of it only with VLLM_SERVER_DEV_MODE=1.
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
    **dict.fromkeys(
        (
            IS_SLEEPING, IS_PAUSED, LOAD, "/server_info", KV_EVENT_SOURCES,
            "/fault_tolerance/status", "/weight_info", "/get_world_size",
        ),
        "GET",
    ),
    **dict.fromkeys(
        (
            LOAD_LORA_ADAPTER, UNLOAD_LORA_ADAPTER, SLEEP, WAKE_UP, PAUSE, RESUME,
            RESET_PREFIX_CACHE, "/reset_mm_cache", "/reset_encoder_cache",
            "/release_kv_cache_memory", "/abort_requests", "/start_profile", "/stop_profile",
            "/collective_rpc", "/scale_elastic_ep", "/is_scaling_elastic_ep",
            "/fault_tolerance/apply", "/init_weight_transfer_engine",
            "/shutdown_weight_transfer_engine", "/start_weight_update",
            "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
            "/update_weight_version", "/weight_checker",
        ),
        "POST",
    ),
}  # fmt: skip


class Work(enum.Enum):
    """The work that a path causes."""

    GENERATE = "generate"  # prefill and decode
    PREFILL = "prefill"  # embeddings, scores: no output tokens
    LIGHT = "light"  # tokenize and the like: no step of the engine


class Prompts(enum.Enum):
    """How a request's prompts are built from the fields of its body."""

    TEXT = "`prompt`, or a conversation and what a template puts in front of it"
    CHATS = "a conversation in each item of `messages`"
    ANY = "what a chat, a completion or a pooling model takes, by the fields that are there"
    TOKENS = "`token_ids`"
    INPUTS = "one for each text, image or conversation in `input` and its like"
    PAIRS = "one for each pair of a query and a document, the query computed with each"
    ITEMS = "the query with each of `items`, as texts or token ids"
    QUESTIONS = "the state, once for each question"
    SPEECH = "a form with a recording"


# Every path that is sent to an engine: the work it causes, and how its prompts are built from the
# fields of a body. None: no engine step, so it does not matter.
_SERVED: dict[str, tuple[Work, Prompts | None]] = {
    CHAT_COMPLETIONS: (Work.GENERATE, Prompts.TEXT),
    COMPLETIONS: (Work.GENERATE, Prompts.TEXT),
    RESPONSES: (Work.GENERATE, Prompts.TEXT),
    MESSAGES: (Work.GENERATE, Prompts.TEXT),
    CHAT_COMPLETIONS + "/batch": (Work.GENERATE, Prompts.CHATS),
    GENERATE: (Work.GENERATE, Prompts.TOKENS),
    "/generative_scoring": (Work.PREFILL, Prompts.ITEMS),
    INVOCATIONS: (Work.GENERATE, Prompts.ANY),
    TOKENIZE: (Work.LIGHT, None),
    DETOKENIZE: (Work.LIGHT, None),
    COUNT_TOKENS: (Work.LIGHT, None),
    "/v1/completions/render": (Work.LIGHT, None),
    "/v1/chat/completions/render": (Work.LIGHT, None),
    "/v1/messages/render": (Work.LIGHT, None),
    "/v1/responses/render": (Work.LIGHT, None),
    "/v1/completions/derender": (Work.LIGHT, None),
    "/v1/chat/completions/derender": (Work.LIGHT, None),
    "/cohere/v2/chat": (Work.GENERATE, Prompts.TEXT),
    "/v1/systemone": (Work.GENERATE, Prompts.QUESTIONS),
    EMBEDDINGS: (Work.PREFILL, Prompts.INPUTS),
    "/v2/embed": (Work.PREFILL, Prompts.INPUTS),
    "/pooling": (Work.PREFILL, Prompts.INPUTS),
    "/classify": (Work.PREFILL, Prompts.INPUTS),
    "/score": (Work.PREFILL, Prompts.PAIRS),
    "/v1/score": (Work.PREFILL, Prompts.PAIRS),
    "/rerank": (Work.PREFILL, Prompts.PAIRS),
    "/v1/rerank": (Work.PREFILL, Prompts.PAIRS),
    "/v2/rerank": (Work.PREFILL, Prompts.PAIRS),
    TRANSCRIPTIONS: (Work.GENERATE, Prompts.SPEECH),
    TRANSLATIONS: (Work.GENERATE, Prompts.SPEECH),
    "/v1/audio/speech": (Work.GENERATE, Prompts.INPUTS),
    "/v1/images/generations": (Work.GENERATE, Prompts.TEXT),
    "/v1/moderations": (Work.PREFILL, Prompts.INPUTS),
}
WORK_BY_PATH = {path: work for path, (work, _) in _SERVED.items()}
_PROMPTS_BY_PATH = {path: prompts for path, (_, prompts) in _SERVED.items() if prompts}


def work_of_path(path: str) -> Work | None:
    """The work of a POST to this path, or None if it isn't sent to an engine.

    Only exactly these paths, in no other spelling: an engine may decode or normalise a path,
    and end up at /sleep or another call that changes the engine's state.
    """
    return WORK_BY_PATH.get(path)


class Asked(NamedTuple):
    """A question to an instance about its stored data: it causes no engine step.

    Args:
        methods: the accepted ones.
        response_id: the response it is about; "": none, and any instance can answer.
    """

    methods: tuple[str, ...]
    response_id: str = ""


_OF_A_TOKENIZER = Asked(("GET",))
# No escape, slash or dot segment: an engine must not read another path out of it. Items and
# deletion are OpenAI's; vLLM 0.32 answers that it has none.
_OF_A_RESPONSE = re.compile(
    RESPONSES + r"/(?!\.{1,2}(?:/|\Z))([0-9A-Za-z._~!$&'()*+,=:@-]{1,256})(/cancel|/input_items)?"
)
_RESPONSE_METHODS = {None: ("GET", "DELETE"), "/cancel": ("POST",), "/input_items": ("GET",)}


def asked_at(path: str) -> Asked | None:
    """The question at this path, or None if it is none of these."""
    if path == TOKENIZER_INFO:
        return _OF_A_TOKENIZER
    found = _OF_A_RESPONSE.fullmatch(path)
    if found is None or path in WORK_BY_PATH:
        return None
    return Asked(_RESPONSE_METHODS[found[2]], found[1])


# The fields that limit an answer's tokens, in order of precedence, each with its minimum. A
# completion of 0 returns a prompt's log probabilities if ``echo`` is set; in some versions a chat's
# max_completion_tokens of 0 counts as not given.
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

    Other paths ignore fields of these names, whatever they contain. ``chats``: it has messages.
    """
    if path == INVOCATIONS:
        return True, _CHAT_LIMITS if chats else _COMPLETION_LIMITS
    return path in _TAKES_N, _LIMITS_BY_PATH.get(path, ())


def starts_with_a_token(path: str) -> bool:
    """Whether the first bytes of a stream's body arrive with its first token.

    /v1/responses sends its first events before any token is made.
    """
    return path != RESPONSES


# Where ``truncate_prompt_tokens`` cuts each prompt; other paths do not know it, or may refuse it.
CUTS_PROMPTS = frozenset(
    (
        *(EMBEDDINGS, "/pooling", "/classify"),
        *(path for path, prompts in _PROMPTS_BY_PATH.items() if prompts is Prompts.PAIRS),
    )
)
# The two sides of a pair, by their names in vLLM's score, rerank and older forms.
QUERIES = ("query", "queries", "text_1", "data_1")
DOCUMENTS = ("documents", "items", "text_2", "data_2")
# Fields read besides those of most paths. ``documents`` is one of them.
FIELDS_OF = {
    Prompts.TEXT: ("previous_input_messages",),
    Prompts.ANY: (
        *(name for name in (*QUERIES, *DOCUMENTS) if name != "documents"),
        *("inputs", "texts", "images", "data"),
    ),
    Prompts.TOKENS: ("token_ids",),
    Prompts.INPUTS: ("inputs", "texts", "images", "data"),
    Prompts.PAIRS: tuple(name for name in (*QUERIES, *DOCUMENTS) if name != "documents"),
    Prompts.ITEMS: ("query", "items"),
    Prompts.QUESTIONS: ("state", "questions", "images", "audio", "videos"),
}


def prompts_at(path: str) -> Prompts:
    """How a path's prompts are built; irrelevant for a path without an engine step."""
    return _PROMPTS_BY_PATH.get(path, Prompts.TEXT)
