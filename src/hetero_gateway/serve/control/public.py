"""The public paths on the gateway's state and models.

A single-process gateway answers them from its fleet; a worker from the scheduler process's last
report, so that answers are immediate even if that process fails.

    /livez, /health, /ping    this process works: 200, whatever the state of the instances
    /readyz                   new requests can be placed: 503 while no instance can take requests,
                              and from SIGTERM on. A worker places by itself without the scheduler
                              process, and is ready then as well

They are requested every few seconds: plain starlette answers them. FastAPI, which describes them
with the others (``api``), is not loaded for them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan

from hetero_gateway import __version__, compiled
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.models import model_card, model_list, served_models
from hetero_gateway.serve.control.errors import HANDLERS
from hetero_gateway.serve.wiring.gateway import Parts

_MODEL = {
    "parameters": [
        {
            "name": "model",
            "in": "path",
            "required": True,
            "schema": {"title": "Model", "type": "string"},
        }
    ]
}
_PATHS = frozenset(("/health", "/livez", "/ping", "/readyz", "/version", "/v1/models"))


def is_public(path: str) -> bool:
    return path in _PATHS or path.startswith("/v1/models/")


class PlainPath(NamedTuple):
    """A path that plain starlette answers, and its description in /openapi.json.

    ``tag``: None: not described. ``document``: the type of its answer; None: not described.
    ``extra``: further fields in OpenAPI's format.
    """

    path: str
    answer: Callable[[Request], Awaitable[Response]]
    tag: str | None
    document: Any = None
    methods: Sequence[str] = ("GET",)
    extra: Mapping[str, Any] | None = None


def plain_app(
    gateway: Parts, paths: Sequence[PlainPath], lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """Answers these, and 404 on all others."""
    routes = [Route(each.path, each.answer, methods=each.methods) for each in paths]
    app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.gateway, app.state.routes = gateway, routes
    return app


def public_paths(gateway: Parts) -> list[PlainPath]:
    # The docstring of each is its description in /docs.
    async def live(_: Request) -> Response:
        """The process is alive; says nothing of the instances."""
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        """200 while an instance can take requests, 503 while none can or while draining."""
        if gateway.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not gateway.listing.ready():
            return JSONResponse({"status": "no healthy instance"}, 503)
        return JSONResponse({"status": "ok"})

    async def version(_: Request) -> Response:
        """The gateway's own version, and whether its scheduler runs compiled."""
        return JSONResponse({"version": __version__, "scheduler": compiled.form()})

    async def models(request: Request) -> Response:
        """Every name that a live instance serves."""
        return JSONResponse(model_list(gateway, gateway.admission.client_of(request.headers.raw)))

    async def model(request: Request) -> Response:
        """One of these names."""
        name = request.path_params["model"]
        client = gateway.admission.client_of(request.headers.raw)
        served = served_models(gateway)
        client.check_model(name)
        if name not in served:
            message = f"The model `{name[:200]}` does not exist."
            raise Refusal(404, "model_not_found", message, param="model")
        return JSONResponse(model_card(name, served[name]))

    return [
        PlainPath("/livez", live, "health", dict[str, str]),
        PlainPath("/health", live, "health", dict[str, str]),
        PlainPath("/ping", live, None, methods=("GET", "POST")),
        PlainPath("/readyz", ready, "health"),
        PlainPath("/version", version, "health", dict[str, str]),
        PlainPath("/v1/models", models, "openai", dict[str, Any]),
        PlainPath("/v1/models/{model:path}", model, "openai", dict[str, Any], extra=_MODEL),
    ]
