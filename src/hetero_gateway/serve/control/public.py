"""The paths for everybody that say how the gateway is and what it serves.

A gateway of one process answers them by its fleet; a worker by what the scheduler process said
last, so that these are answered at once whatever has become of that process.

    /livez, /health, /ping    this process works: 200, whatever the instances do
    /readyz                   what comes now can be placed: 503 while no instance can take requests,
                              and from SIGTERM on. A worker places by itself without the scheduler
                              process, and is ready then as well
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from hetero_gateway import __version__
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.models import model_card, model_list, served_models
from hetero_gateway.serve.wiring.gateway import Parts

_PATHS = frozenset(("/health", "/livez", "/ping", "/readyz", "/version", "/v1/models"))


def is_public(path: str) -> bool:
    return path in _PATHS or path.startswith("/v1/models/")


def add_public_paths(control: FastAPI, gateway: Parts) -> None:
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
        served = served_models(gateway)
        client.check_model(model)
        if model not in served:
            message = f"The model `{model[:200]}` does not exist."
            raise Refusal(404, "model_not_found", message, param="model")
        return model_card(model, served[model])
