"""/admin/…/engine/…: calls to an engine, for one instance or all that serve a model.

An engine's answer is passed on whole, up to a size; a broadcast reports each answer.
"""

import asyncio
from typing import Any

import msgspec
from fastapi import Request, Response

from hetero_gateway.engines.vllm import ENGINE_CALLS
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.answers import refusal_of
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.fleet.places import servers
from hetero_gateway.gateway.fleet.probe import ProbeAnswer
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.serve.control.documents import body_of, json_answer
from hetero_gateway.serve.wiring.gateway import Gateway

# How much of each answer a broadcast shows.
_MOST_SHOWN_BYTES = 1 << 16
_AT_ONCE = 16


async def call_one(gateway: Gateway, request: Request, instance: Instance, call: str) -> Response:
    """The engine's own answer.

    Raises Refusal: 404 and 405 for an unknown call, 502 to 504 if no answer came.
    """
    path = _path_of(request, call)
    body = await body_of(request)
    request.state.change = f"instance {instance.id}: {path}"
    try:
        answer = await _ask(gateway, request, instance, path, body)
    except InstanceError as error:
        raise refusal_of(error, instance) from error
    if answer.problem:
        raise Refusal(502, "upstream_error", f"instance {instance.id}: {answer.problem}")
    kind = "application/json" if _json_in(answer.body) is not None else "text/plain"
    headers = {"x-hetero-gateway-instance": instance.id, "cache-control": "no-store"}
    return Response(answer.body, answer.status, headers, kind)


async def call_all(gateway: Gateway, request: Request, model: str, call: str) -> Response:
    """The answers of all instances of a model: 200 if all of them succeeded, else 502.

    Raises Refusal: 404 and 405 for an unknown call, and for a model that nobody serves.
    """
    path = _path_of(request, call)
    body = await body_of(request)
    instances = [each for each in servers(gateway.fleet) if model in each.models]
    if not instances:
        raise Refusal(404, "model_not_found", f"no instance serves the model {model[:200]!r}")
    request.state.change = f"{len(instances)} instances of {model[:200]}: {path}"
    turns = asyncio.Semaphore(_AT_ONCE)

    async def answer_of(instance: Instance) -> dict[str, Any]:
        told: dict[str, Any] = {"instance": instance.id, "status": None, "body": None}
        async with turns:
            try:
                answer = await _ask(gateway, request, instance, path, body)
            except InstanceError as error:
                return told | {"error": str(error)}
        if not answer.problem and len(answer.body) <= _MOST_SHOWN_BYTES:
            told["body"] = _json_in(answer.body) or answer.body.decode("utf-8", "replace")
        return told | {"status": answer.status, "error": answer.problem or None}

    answers = await asyncio.gather(*map(answer_of, instances))
    good = all(each["error"] is None and 200 <= each["status"] < 300 for each in answers)
    document = {"model": model, "call": path, "answers": answers}
    return json_answer(document, 200 if good else 502)


def _path_of(request: Request, call: str) -> str:
    path = "/" + call
    method = ENGINE_CALLS.get(path)
    if method is None:
        known = ", ".join(sorted(ENGINE_CALLS))
        raise Refusal(404, "not_found", f"{path[:200]} is not an engine call; these are: {known}")
    if request.method != method and not (request.method == "HEAD" and method == "GET"):
        allow = [(b"allow", method.encode())]
        raise Refusal(405, "method_not_allowed", f"{path} takes {method}.", headers=allow)
    return path


async def _ask(
    gateway: Gateway, request: Request, instance: Instance, path: str, body: bytes
) -> ProbeAnswer:
    kind = request.headers.get("content-type", "").encode("latin-1")
    query: bytes = request.scope["query_string"]
    return await gateway.engine_calls.call(instance, path, query, body, kind)


def _json_in(body: bytes) -> msgspec.Raw | None:
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return msgspec.Raw(body)
