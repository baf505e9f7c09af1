"""The paths for everybody that say how the gateway is and what it serves.

A gateway of one process answers them by its fleet; a worker by what the scheduler process said
last, so that these are answered at once whatever has become of that process.

    /livez, /health, /ping    this process works: 200, whatever the instances do
    /readyz                   what comes now can be placed: 503 while no instance can take requests,
                              and from SIGTERM on. A worker places by itself without the scheduler
                              process, and is ready then as well
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from hetero_gateway import __version__
from hetero_gateway.engines.vllm import ModelCard
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Admission, Client
from hetero_gateway.gateway.dataplane.application import DataPlane

_PATHS = frozenset(("/health", "/livez", "/ping", "/readyz", "/version", "/v1/models"))


class Listing(Protocol):
    """What knows the instances: a ``Fleet``, or of a worker ``Members``."""

    def ready(self) -> bool:
        """Whether any instance can take requests."""

    def models(self) -> Mapping[str, ModelCard]:
        """Names that live instances serve, each with a card."""


class Public(Protocol):
    """What answers them: a ``Gateway``, or a ``Worker``."""

    draining: bool
    admission: Admission
    dataplane: DataPlane

    @property
    def listing(self) -> Listing: ...


def is_public(path: str) -> bool:
    """Whether a path is one of them."""
    return path in _PATHS or path.startswith("/v1/models/")


def add_public_paths(control: FastAPI, gateway: Public) -> None:
    """Have an application answer them."""

    @control.get("/health", tags=["health"])
    @control.get("/livez", tags=["health"])
    @control.get("/ping", include_in_schema=False)
    @control.post("/ping", include_in_schema=False)
    async def live() -> dict[str, str]:
        """The process is alive; says nothing of the instances."""
        return {"status": "ok"}

    @control.get("/readyz", tags=["health"])
    async def ready() -> Response:
        """200 while an instance can take requests, 503 while none can or while draining."""
        if gateway.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not gateway.listing.ready():
            return JSONResponse({"status": "no healthy instance"}, 503)
        return JSONResponse({"status": "ok"})

    @control.get("/version", tags=["health"])
    async def version() -> dict[str, str]:
        """The gateway's own version."""
        return {"version": __version__}

    @control.get("/v1/models", tags=["openai"])
    async def models(request: Request) -> dict[str, Any]:
        """Every name that a live instance serves."""
        return model_list(gateway, gateway.admission.client_of(request.headers.raw))

    @control.get("/v1/models/{model:path}", tags=["openai"])
    async def model(request: Request, model: str) -> dict[str, Any]:
        """One of these names."""
        client = gateway.admission.client_of(request.headers.raw)
        served = _served(gateway)
        client.check_model(model)
        if model not in served:
            message = f"The model `{model[:200]}` does not exist."
            raise Refusal(404, "model_not_found", message, param="model")
        return _card(model, served[model])


def model_list(gateway: Public, client: Client) -> dict[str, Any]:
    """What /v1/models answers: the models that the client may ask for."""
    wanted = client.models
    served = _served(gateway).items()
    cards = [_card(*m) for m in served if wanted is None or m[0] in wanted]
    return {"object": "list", "data": cards}


def _served(gateway: Public) -> dict[str, ModelCard]:
    """The models of live instances, and names that stand for any of them."""
    served = dict(gateway.listing.models())
    for name, model in list(gateway.dataplane.intake.routes.aliases(served.__contains__)):
        card = served[model]
        served.setdefault(name, card._replace(owned_by=None, root=card.root or model))
    return served


def _card(model: str, card: ModelCard) -> dict[str, Any]:
    """As its engine shows it: a base and its adapters can be distinguished."""
    return {
        "id": model,
        "object": "model",
        "created": card.created or 0,
        "owned_by": card.owned_by or "hetero-gateway",
        "root": card.root or model,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        "permission": card.permission,
    }
