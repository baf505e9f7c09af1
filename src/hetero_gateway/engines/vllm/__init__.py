"""All that is vLLM's own and that another engine would do otherwise; text in, values out.

``paths``: what it serves, and what of a body it computes. ``fields``: what of one is not for
clients to say. ``answers``: what its answers say. ``metrics``: what its /metrics says.
The gateway, the profiler and the load read with these, and the emulated instance writes with the
same names. No socket, no clock, and nothing of the gateway's own.
"""

from hetero_gateway.engines.vllm.answers import (
    ABORT,
    CLOSING_EVENTS,
    DONE,
    ModelCard,
    completion_counts_in,
    deltas_in,
    failed_in_tail,
    is_model_name,
    least_tokens_of_bytes,
    least_tokens_of_events,
    read_listing,
    read_models,
    response_id_in,
    tokens_of_events,
    usage_in_tail,
)
from hetero_gateway.engines.vllm.fields import (
    GUARDED_FIELDS,
    GUARDED_HEADERS,
    PRIORITY_HEADER,
    guarded_at,
    is_guarded_header,
    names_an_address,
)
from hetero_gateway.engines.vllm.metrics import (
    CacheFacts,
    EngineMetrics,
    Sample,
    metrics_of,
    read_metrics,
    samples_in,
)
from hetero_gateway.engines.vllm.paths import (
    CHAT_COMPLETIONS,
    CUTS_PROMPTS,
    DOCUMENTS,
    ENGINE_CALLS,
    FIELDS_OF,
    GENERATE,
    INVOCATIONS,
    QUERIES,
    REALTIME,
    RESPONSES,
    WORK_BY_PATH,
    Asked,
    Prompts,
    Work,
    asked_at,
    limits_of,
    prompts_at,
    starts_with_a_token,
    work_of_path,
)

__all__ = [
    "ABORT", "CHAT_COMPLETIONS", "CLOSING_EVENTS", "CUTS_PROMPTS", "DOCUMENTS", "DONE",
    "ENGINE_CALLS", "FIELDS_OF", "GENERATE", "GUARDED_FIELDS", "GUARDED_HEADERS", "INVOCATIONS",
    "PRIORITY_HEADER", "QUERIES", "REALTIME", "RESPONSES", "WORK_BY_PATH", "Asked",
    "CacheFacts", "EngineMetrics", "ModelCard", "Prompts", "Sample", "Work", "asked_at",
    "completion_counts_in", "deltas_in", "failed_in_tail", "guarded_at", "is_guarded_header",
    "is_model_name", "least_tokens_of_bytes", "least_tokens_of_events", "limits_of",
    "metrics_of", "names_an_address", "prompts_at", "read_listing", "read_metrics",
    "read_models", "response_id_in", "samples_in", "starts_with_a_token", "tokens_of_events",
    "usage_in_tail", "work_of_path",
]  # fmt: skip
