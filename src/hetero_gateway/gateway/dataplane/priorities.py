"""The engine's own priority for each class of requests.

The gateway orders requests that wait for an engine. Those sent are the engine's to order, by time
unless it runs with ``--scheduling-policy priority``; then a lower number is sooner, and preempts. A
client may not set that number; its class does, by ``scheduler.engine_priorities``. It is written
into the body as the last field, which is the one that counts, where every version of vLLM reads it;
and into the head, where newer versions look first, also on paths without such a field
(/v1/messages). Classes without a priority are sent on byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetero_gateway.engines.vllm import Work
from hetero_gateway.engines.vllm.added_fields import with_last_field
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.request.forms import is_form
from hetero_gateway.http.heads import Inbound


class Priorities:
    """Priorities by class. ``priorities``: those that are not 0, an engine's default."""

    def __init__(self, priorities: Mapping[str, int]) -> None:
        self._priorities = priorities

    def check(self, inbound: Inbound, client: Client) -> None:
        """Raises Refusal: 400 for a body that its priority cannot be written into, else 403."""
        self.given(inbound, client, inbound.body)

    def given(self, inbound: Inbound, client: Client, body: bytes) -> tuple[int | None, bytes]:
        """(the request's priority, its body); None: it has none, and is sent as it came.

        Args:
            body: the body for the instance, which may differ from the client's.
        """
        priority = self._priorities.get(client.class_of(inbound.headers))
        if priority is None or inbound.work is Work.LIGHT or _is_form(inbound):
            return None, body
        return priority, with_last_field(body, b'"priority":%d' % priority)


def _is_form(inbound: Inbound) -> bool:
    """Whether a body is a form: no engine has a priority for recordings."""
    return is_form(inbound.path, inbound.content_type)


def priorities_of(configured: Mapping[str, int]) -> Priorities | None:
    """As configured; None: no class has any."""
    wanted = {name: priority for name, priority in configured.items() if priority}
    return Priorities(wanted) if wanted else None
