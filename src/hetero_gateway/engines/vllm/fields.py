"""What a client may not tell an engine: fields and headers, each with the reason.

A client speaks to a model. Some fields address the machinery behind it: where an engine gets a
prompt's KV cache, on which rank it runs, whom it overtakes, under which key others will find what
was computed. They are for the gateways and prefill instances of a cluster; from a client, each of
them can hurt others. Names and meanings are those of vLLM 0.32's request classes
(``vllm/entrypoints/**/protocol.py``), of its headers (``entrypoints/generate/base/serving.py``), of
SageMaker's conventions, which it serves under /invocations, and of llm-d's sidecar
(``pkg/common/routing``).

Not listed, though specific to vLLM: what costs or changes only the request that has it
(``mm_processor_kwargs``, ``media_io_kwargs``, ``bad_words``, ``structured_outputs``,
``min_tokens``, ``session_id``, ``chat_template_kwargs``), what an engine refuses unless its
operator has enabled it (``chat_template``, ``logits_processors``), and what keeps clients apart
(``cache_salt``). An ``X-Request-Id`` takes precedence over ``request_id`` everywhere except on
/v1/responses.
"""

from collections.abc import Mapping

from hetero_gateway.engines.vllm.paths import GENERATE, RESPONSES

_ON_ANY_PATH = {
    "kv_transfer_params": "it says which cache blocks an engine reads, from which host; wrong ones "
    "end the engine, and others' blocks are others' prompts",
    "ec_transfer_params": "the same, for what an encoder has computed",
    "vllm_xargs": "it becomes the engine's extra_args, kv_transfer_params among them, and reaches "
    "custom code in the engine",
    "data_parallel_rank": "it chooses a rank, against the engine's own balance",
    "priority": "a lower one overtakes every other client's requests, and has them preempted",
    "prompt_embeds": "it is a pickled tensor that the engine loads, which has crashed engines "
    "(CVE-2025-62164), and a prompt whose length nobody can know",
}
_ON_ONE_PATH = {
    GENERATE: {
        "sampling_params.extra_args": "it is vllm_xargs by another name",
        "features": "it writes tensors into caches that all share, under hashes of the client's "
        "choice, and reads them by hash",
    },
    RESPONSES: {
        "request_id": "it becomes the response's id, and replaces another client's response",
    },
}
# Every field that an operator may allow, in the order of the documentation.
GUARDED_FIELDS: Mapping[str, str] = {
    **_ON_ANY_PATH,
    **{name: reason for fields in _ON_ONE_PATH.values() for name, reason in fields.items()},
}

# Prefixes of names, with hyphens, in lower case; other spellings that readers accept count too.
GUARDED_HEADERS: Mapping[str, str] = {
    "x-data-parallel-": "vLLM's rank, llm-d's address of one",
    "x-vllm-": "X-Vllm-Priority goes before the body's priority",
    "x-prefill": "llm-d's sidecar connects to x-prefiller-host-port for the prompt's cache",
    "x-decode": "the same, of a decode instance",
    "x-encode": "the same, of encoders (x-encoder-hosts-ports)",
    "x-kv-": "where a cache is read from",
    "x-gateway-destination-": "the address that an endpoint picker has chosen",
    "x-gateway-model-": "the model that an endpoint picker has chosen",
    "x-gateway-inference-": "whom an endpoint picker prefers",
    "x-amzn-sagemaker-": "X-Amzn-SageMaker-Adapter-Identifier replaces the model on /invocations",
}
_HEADER_BEGINNINGS = tuple(name.encode() for name in GUARDED_HEADERS)
# Written by the gateway itself, where it tells an engine whom to serve first.
PRIORITY_HEADER = b"x-vllm-priority"
# The same, to say which of the engines behind one address is meant.
RANK_HEADER = b"x-data-parallel-rank"
# vLLM's P2pNcclConnector (until 0.32) finds the hosts to connect to in a request's id.
_ADDRESSES_IN_ID = (b"prefill_addr_", b"decode_addr_")


def guarded_at(path: str) -> frozenset[str]:
    """The fields that a client may not set in a body on this path.

    A field of an object within the body is named with a dot.
    """
    return frozenset(_ON_ANY_PATH) | frozenset(_ON_ONE_PATH.get(path, ()))


def is_guarded_header(name: bytes) -> bool:
    """Whether a lower-case header addresses an engine's machinery. Some servers accept ``_``."""
    return name.replace(b"_", b"-").startswith(_HEADER_BEGINNINGS)


def names_an_address(request_id: bytes) -> bool:
    """Whether an engine may read hosts to connect to from a request's id."""
    return any(mark in request_id for mark in _ADDRESSES_IN_ID)
