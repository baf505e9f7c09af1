"""A prompt computed by one instance and answered by another, with vLLM's connectors.

One request becomes two, by its path and its body:

1. ``reason_against(path, body)``: "" if it is possible at all.
2. ``prefill_body`` goes to the prefill instance, which makes one token that is thrown away.
3. ``read_answer`` reads that instance's answer, and ``Connector.for_decode`` checks the object that
   it hands over: an incomplete one crashes the engine that gets it. ``NoHandover``: the request
   goes whole, to any instance. The decode instance must get it while the blocks are pinned:
   ``may_be_fetched``.
4. ``decode_body`` goes to the decode instance, whose answer is the client's.
5. ``beginning_of`` says whether the first events of its stream carry anything yet: until they do,
   the request can still go elsewhere.
6. ``mending_of`` says what in that answer differs from a single instance's, and ``mended_body`` and
   ``mended_events`` correct it.

With ``Connector.at_once`` (Mooncake) both requests go at the same time, so 3 needs no answer. Both
requests have one X-Request-Id. ``connectors`` says what was observed, on vLLM 0.32 and NIXL 1.5.1,
and what is from vLLM's source alone. Nothing here reads a clock or knows about HTTP.
"""

from hetero_gateway.engines.vllm.kv_transfer.answers import Mending as Mending
from hetero_gateway.engines.vllm.kv_transfer.answers import NoHandover as NoHandover
from hetero_gateway.engines.vllm.kv_transfer.answers import PrefillAnswer as PrefillAnswer
from hetero_gateway.engines.vllm.kv_transfer.answers import mended_body as mended_body
from hetero_gateway.engines.vllm.kv_transfer.answers import mended_events as mended_events
from hetero_gateway.engines.vllm.kv_transfer.answers import mending_of as mending_of
from hetero_gateway.engines.vllm.kv_transfer.answers import read_answer as read_answer
from hetero_gateway.engines.vllm.kv_transfer.beginnings import Beginning as Beginning
from hetero_gateway.engines.vllm.kv_transfer.beginnings import beginning_of as beginning_of
from hetero_gateway.engines.vllm.kv_transfer.bodies import SPLIT_PATHS as SPLIT_PATHS
from hetero_gateway.engines.vllm.kv_transfer.bodies import decode_body as decode_body
from hetero_gateway.engines.vllm.kv_transfer.bodies import prefill_body as prefill_body
from hetero_gateway.engines.vllm.kv_transfer.bodies import reason_against as reason_against
from hetero_gateway.engines.vllm.kv_transfer.connectors import CONNECTORS as CONNECTORS
from hetero_gateway.engines.vllm.kv_transfer.connectors import DEFAULT_LEASE_S as DEFAULT_LEASE_S
from hetero_gateway.engines.vllm.kv_transfer.connectors import Connector as Connector
from hetero_gateway.engines.vllm.kv_transfer.connectors import Transfer as Transfer
from hetero_gateway.engines.vllm.kv_transfer.connectors import may_be_fetched as may_be_fetched
from hetero_gateway.engines.vllm.kv_transfer.connectors import (
    mooncake_engine_ids as mooncake_engine_ids,
)
