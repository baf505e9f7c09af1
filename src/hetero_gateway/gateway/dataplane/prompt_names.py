"""Names for prompts, which an engine reports with the blocks that it caches for them.

For an instance that publishes KV events (``fleet/kv_events``), the body gets one more field, its
last: ``session_id``, which comes back with the blocks. It is derived from the prompt's key, so that
equal prompts have equal names whoever asks, and from nothing that a client says or an engine could
read. A client's own ``session_id`` stays; its prompt is then known as a placement, as elsewhere.
"""

from hetero_gateway.engines.vllm.added_fields import with_last_field
from hetero_gateway.engines.vllm.kv_events import session_field
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.http.heads import Inbound

_OWN = b'"session_id"'
_PATHS = (CHAT_COMPLETIONS, COMPLETIONS)


def named_prompt(inbound: Inbound, job: Job | None, body: bytes) -> bytes:
    """The body with its prompt's name; unchanged if it has none, or a client's own."""
    keys = None if job is None else job.parsed.prefix
    if keys is None or not keys.hashes or inbound.path not in _PATHS or _OWN in body:
        return body
    if not body.rstrip().endswith(b"}"):
        return body  # the engine reports what is wrong with it
    return with_last_field(body, session_field(keys.hashes[-1]))
