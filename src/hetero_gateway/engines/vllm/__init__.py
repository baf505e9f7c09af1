"""All that is vLLM's own and that another engine would do otherwise; text in, values out.

``paths``: what it serves. ``answers``: what its answers say. ``metrics``: what its /metrics says.
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
    read_models,
    response_id_in,
    tokens_of_events,
    usage_in_tail,
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
    ENGINE_CALLS,
    REALTIME,
    RESPONSES,
    WORK_BY_PATH,
    Asked,
    Work,
    asked_at,
    limits_of,
    starts_with_a_token,
    work_of_path,
)

__all__ = [
    "ABORT",
    "CHAT_COMPLETIONS",
    "CLOSING_EVENTS",
    "DONE",
    "ENGINE_CALLS",
    "REALTIME",
    "RESPONSES",
    "WORK_BY_PATH",
    "Asked",
    "CacheFacts",
    "EngineMetrics",
    "ModelCard",
    "Sample",
    "Work",
    "asked_at",
    "completion_counts_in",
    "deltas_in",
    "failed_in_tail",
    "is_model_name",
    "limits_of",
    "metrics_of",
    "read_metrics",
    "read_models",
    "response_id_in",
    "samples_in",
    "starts_with_a_token",
    "tokens_of_events",
    "usage_in_tail",
    "work_of_path",
]
