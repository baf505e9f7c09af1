"""/v1/responses/ID and its cancellation: asked of the instance that made the response.

Not on the data plane: no step of an engine comes of it, and it is rare. An answer is gathered
whole, also one that streams.
"""

from __future__ import annotations

from fastapi import Request, Response

from hetero_gateway.engines.vllm import Work
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.answers import refusal_of
from hetero_gateway.gateway.failures import InstanceError
from hetero_gateway.gateway.fleet.probe import Probe
from hetero_gateway.gateway.wire.inbound import Inbound
from hetero_gateway.gateway.wiring import Gateway

_MOST_BYTES = 1 << 25
_TIMEOUT_S = 60.0


async def pass_on(gateway: Gateway, request: Request, response_id: str) -> Response:
    """What the instance says that made the response.

    Raises Refusal: 401, 404 for one that nobody knows (any more), 502 to 504.
    """
    gateway.admission.client_of(request.headers.raw)
    path: bytes = request.scope["raw_path"]
    inbound = Inbound(request.url.path, path, Work.LIGHT, request.headers.raw)
    instance_id = gateway.dataplane.intake.where_is(inbound, response_id.encode())
    instance = None if instance_id is None else gateway.fleet.instances.get(instance_id)
    if instance is None:
        message = f"Response with id '{response_id[:256]}' not found."
        raise Refusal(404, "response_not_found", message, param="response_id")
    query: bytes = request.scope["query_string"]
    target = path + (b"?" + query if query else b"")
    key = instance.api_key
    if key is None and not gateway.admission.has_key:  # then it is the engine's
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        key = sent if scheme.lower() == "bearer" and sent else None
    probe = Probe(instance.config.base_url, key, _TIMEOUT_S, instance.ssl_context)
    try:
        answer = await probe.ask(request.method.encode(), target, _MOST_BYTES)
    except InstanceError as error:
        raise refusal_of(error, instance) from error
    finally:
        probe.close()
    kind = "application/json"
    if answer.body.startswith(b"event:"):
        kind = "text/event-stream"
    headers = {"x-hetero-gateway-instance": instance.id}
    return Response(answer.body, answer.status, headers, kind)
