"""Names for prompts, by which an engine tells of the blocks that it caches for them.

Where an instance publishes KV events (``fleet/kv_events``), the body gets one field more, its last:
``session_id``, which comes back with the blocks. It is made of the prompt's key, so that equal
prompts have equal names whoever asks, and of nothing that a client says or an engine could read. A
client's own ``session_id`` stays; its prompt is known as a placement then, as everywhere else.
"""

from hetero_gateway.engines.vllm.added_fields import with_last_field
from hetero_gateway.engines.vllm.kv_events import session_field
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.http.heads import Inbound

_OWN = b'"session_id"'
_PATHS = (CHAT_COMPLETIONS, COMPLETIONS)


def named_prompt(inbound: Inbound, job: Job | None, body: bytes) -> bytes:
    """The body with its prompt's name; as it came, where it has none, or a client's own."""
    keys = None if job is None else job.parsed.prefix
    if keys is None or not keys.hashes or inbound.path not in _PATHS or _OWN in body:
        return body
    if not body.rstrip().endswith(b"}"):
        return body  # the engine is to say what is wrong with it
    return with_last_field(body, session_field(keys.hashes[-1]))
