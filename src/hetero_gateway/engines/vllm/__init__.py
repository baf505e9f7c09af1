"""Everything specific to vLLM; text in, values out.

``paths``: which paths it serves, and what each computes. ``fields``: what clients may not set.
``answers``: how to read its answers. ``metrics``: how to read its /metrics.
The gateway, the profiler and the load generator read with these, and the emulated instance writes
with the same names. No socket, no clock, and nothing of the gateway's own.
"""

from hetero_gateway.engines.vllm.answers import ABORT as ABORT
from hetero_gateway.engines.vllm.answers import CLOSING_EVENTS as CLOSING_EVENTS
from hetero_gateway.engines.vllm.answers import DONE as DONE
from hetero_gateway.engines.vllm.answers import ModelCard as ModelCard
from hetero_gateway.engines.vllm.answers import completion_counts_in as completion_counts_in
from hetero_gateway.engines.vllm.answers import deltas_in as deltas_in
from hetero_gateway.engines.vllm.answers import failed_in_tail as failed_in_tail
from hetero_gateway.engines.vllm.answers import is_model_name as is_model_name
from hetero_gateway.engines.vllm.answers import lacks_model as lacks_model
from hetero_gateway.engines.vllm.answers import least_tokens_of_bytes as least_tokens_of_bytes
from hetero_gateway.engines.vllm.answers import least_tokens_of_events as least_tokens_of_events
from hetero_gateway.engines.vllm.answers import read_listing as read_listing
from hetero_gateway.engines.vllm.answers import read_models as read_models
from hetero_gateway.engines.vllm.answers import response_id_in as response_id_in
from hetero_gateway.engines.vllm.answers import tokens_of_events as tokens_of_events
from hetero_gateway.engines.vllm.answers import usage_in_tail as usage_in_tail
from hetero_gateway.engines.vllm.fields import GUARDED_FIELDS as GUARDED_FIELDS
from hetero_gateway.engines.vllm.fields import GUARDED_HEADERS as GUARDED_HEADERS
from hetero_gateway.engines.vllm.fields import PRIORITY_HEADER as PRIORITY_HEADER
from hetero_gateway.engines.vllm.fields import RANK_HEADER as RANK_HEADER
from hetero_gateway.engines.vllm.fields import guarded_at as guarded_at
from hetero_gateway.engines.vllm.fields import is_guarded_header as is_guarded_header
from hetero_gateway.engines.vllm.fields import names_an_address as names_an_address
from hetero_gateway.engines.vllm.metrics import CacheFacts as CacheFacts
from hetero_gateway.engines.vllm.metrics import EngineMetrics as EngineMetrics
from hetero_gateway.engines.vllm.metrics import MetricSample as MetricSample
from hetero_gateway.engines.vllm.metrics import metrics_of as metrics_of
from hetero_gateway.engines.vllm.metrics import of_place as of_place
from hetero_gateway.engines.vllm.metrics import read_metrics as read_metrics
from hetero_gateway.engines.vllm.metrics import samples_in as samples_in
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS as CHAT_COMPLETIONS
from hetero_gateway.engines.vllm.paths import CUTS_PROMPTS as CUTS_PROMPTS
from hetero_gateway.engines.vllm.paths import DOCUMENTS as DOCUMENTS
from hetero_gateway.engines.vllm.paths import ENGINE_CALLS as ENGINE_CALLS
from hetero_gateway.engines.vllm.paths import FIELDS_OF as FIELDS_OF
from hetero_gateway.engines.vllm.paths import GENERATE as GENERATE
from hetero_gateway.engines.vllm.paths import INVOCATIONS as INVOCATIONS
from hetero_gateway.engines.vllm.paths import QUERIES as QUERIES
from hetero_gateway.engines.vllm.paths import REALTIME as REALTIME
from hetero_gateway.engines.vllm.paths import RESPONSES as RESPONSES
from hetero_gateway.engines.vllm.paths import WORK_BY_PATH as WORK_BY_PATH
from hetero_gateway.engines.vllm.paths import Asked as Asked
from hetero_gateway.engines.vllm.paths import Prompts as Prompts
from hetero_gateway.engines.vllm.paths import Work as Work
from hetero_gateway.engines.vllm.paths import asked_at as asked_at
from hetero_gateway.engines.vllm.paths import limits_of as limits_of
from hetero_gateway.engines.vllm.paths import prompts_at as prompts_at
from hetero_gateway.engines.vllm.paths import starts_with_a_token as starts_with_a_token
from hetero_gateway.engines.vllm.paths import work_of_path as work_of_path
