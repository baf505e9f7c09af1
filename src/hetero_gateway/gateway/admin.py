"""/admin: the instances, what was decided and why, and reloading the configuration.

Guarded by a key of its own (``server.admin_key_env``). Without a key it is open only while the
server listens on loopback, and then only to requests that name a loopback host, so that a web page
cannot reach it by rebinding a name or by a cross-site form.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero_gateway.config import InstanceConfig, load_gateway_config, parse_model
from hetero_gateway.core.scheduler import Decision
from hetero_gateway.core.types import InstanceId, Reject
from hetero_gateway.core.types import Request as CoreRequest
from hetero_gateway.errors import ClientError, ConfigError
from hetero_gateway.gateway.fleet import Instance
from hetero_gateway.gateway.state import Gateway


class InstancePatch(BaseModel):
    """What can be changed while serving."""

    model_config = ConfigDict(extra="forbid")

    draining: bool | None = None
    weight: float | None = Field(None, gt=0)


def is_loopback(host: str) -> bool:
    """Whether an address or host name (without port) means this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def _check_access(request: Request) -> None:
    gateway = _gateway(request)
    if gateway.admin_key is not None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), gateway.admin_key.encode()):
            raise ClientError(401, "invalid_api_key", "The admin key is missing or wrong.")
        return
    if not is_loopback(gateway.config.server.host):
        raise ClientError(
            403, "admin_off", "/admin is off: set server.admin_key_env, or listen on loopback."
        )
    host = urlsplit("//" + request.headers.get("host", "")).hostname or ""
    origin = request.headers.get("origin")
    if not is_loopback(host) or (origin and not is_loopback(urlsplit(origin).hostname or "")):
        raise ClientError(403, "admin_off", "/admin without a key answers to loopback names only.")


router = APIRouter(prefix="/admin", dependencies=[Depends(_check_access)], tags=["admin"])


@router.get("/instances")
async def list_instances(request: Request) -> dict[str, Any]:
    """Every instance: configuration, health, load."""
    gateway = _gateway(request)
    return {
        "policy": gateway.config.scheduler.policy,
        "instances": [describe_instance(gateway, i) for i in gateway.fleet.instances.values()],
    }


@router.post("/instances", status_code=201)
async def add_instance(request: Request) -> dict[str, Any]:
    """Add an instance; the body is one entry of the configuration's ``instances``, as JSON."""
    gateway = _gateway(request)
    try:
        data = await request.json()
    except ValueError as error:
        raise ClientError(400, "invalid_json", f"The body is not JSON: {error}") from error
    try:
        instance = gateway.add_instance(parse_model(InstanceConfig, data, "body"))
    except ConfigError as error:
        conflict = isinstance(data, dict) and data.get("id") in gateway.fleet.instances
        raise ClientError(409 if conflict else 400, "invalid_instance", str(error)) from error
    return describe_instance(gateway, instance)


@router.patch("/instances/{instance_id}")
async def change_instance(request: Request, instance_id: str) -> dict[str, Any]:
    """Change ``draining`` or ``weight``."""
    gateway = _gateway(request)
    instance = _known(gateway, instance_id)
    try:
        patch = InstancePatch.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ClientError(400, "invalid_instance", f"{key}: {first['msg']}") from error
    if patch.draining is not None:
        instance.draining = patch.draining
    if patch.weight is not None:
        instance.weight = patch.weight
    gateway.fleet.publish(instance)
    return describe_instance(gateway, instance)


@router.delete("/instances/{instance_id}")
async def remove_instance(request: Request, instance_id: str) -> dict[str, Any]:
    """Remove an instance. Its load is settled now; its open responses go on to their end."""
    gateway = _gateway(request)
    _known(gateway, instance_id)
    return {"id": instance_id, "open_requests": gateway.remove_instance(InstanceId(instance_id))}


@router.get("/explain")
async def explain(
    request: Request,
    prompt_tokens: Annotated[int, Query(ge=1)],
    model: str | None = None,
    max_tokens: Annotated[int | None, Query(ge=1)] = None,
) -> dict[str, Any]:
    """What would be decided for a request now, and why; nothing is sent or counted."""
    gateway = _gateway(request)
    if model is None:
        served = gateway.fleet.models()
        if len(served) != 1:
            names = ", ".join(served) or "none"
            raise ClientError(400, "missing_model", f"say which model; served: {names}")
        model = next(iter(served))
    predicted = gateway.predict_output_tokens(model, prompt_tokens, max_tokens)
    result = gateway.fleet.scheduler.explain(CoreRequest(model, prompt_tokens, predicted))
    policy = gateway.config.scheduler.policy
    if isinstance(result, Reject):
        return {"chosen": None, "policy": policy, "reason": result.detail, "candidates": []}
    return {
        "chosen": result.instance_id,
        "policy": policy,
        "predicted_output_tokens": predicted,
        "candidates": describe_decision(result),
    }


@router.get("/decisions")
async def list_decisions(
    request: Request, limit: Annotated[int, Query(ge=1, le=256)] = 50
) -> dict[str, Any]:
    """The last decisions, newest first, each with every candidate's figures."""
    gateway = _gateway(request)
    records = list(gateway.dataplane.decisions)[: -limit - 1 : -1]
    return {
        "policy": gateway.config.scheduler.policy,
        "decisions": [
            {
                "time": record.unix_s,
                "request_id": record.request_id,
                "model": record.decision.request.model,
                "prompt_tokens": record.decision.request.prompt_tokens,
                "predicted_output_tokens": record.decision.request.predicted_output_tokens,
                "sequences": record.decision.request.sequences,
                "chosen": record.decision.instance_id,
                "candidates": describe_decision(record.decision),
            }
            for record in records
        ],
    }


@router.post("/reload")
async def reload(request: Request) -> dict[str, Any]:
    """Read the configuration file again and bring the instances in line with it."""
    gateway = _gateway(request)
    if gateway.config_path is None:
        raise ClientError(409, "no_file", "the gateway was not started from a file")
    try:
        fresh = load_gateway_config(gateway.config_path)
        return gateway.apply(fresh)
    except ConfigError as error:
        raise ClientError(400, "invalid_configuration", str(error)) from error


def describe_decision(decision: Decision) -> list[dict[str, Any]]:
    """The candidates of a decision as JSON."""
    return [
        {
            "instance": row.instance_id,
            "request_time_s": row.request_time_s,
            "kv_usage": row.kv_usage,
            "workload": row.workload,
            "load": row.load_s,
            "load_after": row.load_after_s,
            "in_flight": row.in_flight,
            "excluded": row.excluded,
        }
        for row in decision.explain()
    ]


def describe_instance(gateway: Gateway, instance: Instance) -> dict[str, Any]:
    """An instance as JSON; never its key."""
    ledger = gateway.fleet.scheduler.ledger
    slot = gateway.fleet.scheduler.slot(instance.id)
    profile = gateway.fleet.scheduler.spec(instance.id).profile
    kv_tokens = int(ledger.kv_tokens[slot])
    return {
        "id": instance.id,
        "base_url": instance.config.base_url,
        "models": sorted(instance.models),
        "profile": profile.name if profile else "unprofiled",
        "profile_source": profile.source.get("how") if profile else None,
        "max_model_len": instance.max_model_len,
        "weight": instance.weight,
        "up": instance.up,
        "draining": instance.draining,
        "down_reason": None if instance.up else instance.down_reason,
        "in_flight": int(ledger.in_flight[slot]),
        "workload": float(ledger.load[slot]),
        "kv_tokens": kv_tokens,
        "kv_capacity_tokens": profile.kv_capacity_tokens if profile else None,
        "kv_usage": kv_tokens / profile.kv_capacity_tokens if profile else None,
        "engine_kv_usage": instance.engine_kv_usage,
        "connections": instance.pool.open_connections,
        "requests": gateway.metrics.decisions[instance.id],
    }


def _known(gateway: Gateway, instance_id: str) -> Instance:
    instance = gateway.fleet.instances.get(InstanceId(instance_id))
    if instance is None:
        raise HTTPException(404, f"there is no instance {instance_id!r}")
    return instance
