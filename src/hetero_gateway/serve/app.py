"""The ASGI callable: the data plane for engine paths, FastAPI for everything else.

``create_app`` builds a gateway and wires it; nothing is global, and tests build as many as they
like. The gateway starts and stops in the lifespan.
"""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Lifespan

from hetero_gateway import __version__
from hetero_gateway.engines.vllm import ENGINE_CALLS, REALTIME, Work, asked_at, work_of_path
from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.server_config import Exposure
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.realtime import Realtime
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.http.downstream import Downstream, Listener, Receive, Scope, Send
from hetero_gateway.http.errors import error_body
from hetero_gateway.http.headers import HOPS, Headers
from hetero_gateway.http.heads import Inbound
from hetero_gateway.serve.control import admin
from hetero_gateway.serve.control.access import check_exposed
from hetero_gateway.serve.control.docs_page import docs_page
from hetero_gateway.serve.control.public import add_public_paths
from hetero_gateway.serve.wiring.gateway import Gateway, Parts

# The page shows names that clients and instances chose: nothing but its own files may run in it,
# and trusted types refuse any write of markup.
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_PAGE_FILES = {
    "index.html": "text/html",
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "docs.css": "text/css",
    "icon.svg": "image/svg+xml",
}


# Of the gateway's own paths only a model's name may be escaped: it may have a slash. No path fits
# in two ways, or one that nearly fits would be tried in all of them.
_PART = r"[0-9A-Za-z._~!$&'()*+,=:@-]+"
_PATH = re.compile(
    rf"/(?:v1|admin)/models/[0-9A-Za-z._~!$&'()*+,=:@/%-]+|/(?:{_PART}(?:/{_PART})*)?"
)
# What no other site's page may ask for, however it is configured.
_NO_PAGES = re.compile(r"/(?:admin|dashboard|docs|openapi\.json|metrics)(?:/|\Z)")
_DOTS = re.compile(r"/\.{1,2}(?:/|$)")


class App:
    """What uvicorn serves. ``gateway`` is the running state, ``control`` the FastAPI part.

    A ``http.protocol.Service``, and an ASGI application for all that does not come that way.
    """

    def __init__(self, gateway: Gateway, control: FastAPI) -> None:
        self.gateway = gateway
        self.control = control
        self._realtime: Realtime | None = None

    @property
    def body_limits(self) -> BodyLimits:
        return self.gateway.dataplane.body_limits

    def open(self, inbound: Inbound, downstream: Downstream) -> Listener:
        """A request on an engine path, from the callbacks of the server's own protocol."""
        return self.gateway.dataplane.open(inbound, downstream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            if self._realtime is None:
                self._realtime = Realtime(self.gateway.dataplane)
            await self._realtime.serve(scope, receive, send)
        elif scope["type"] == "http":
            await route(scope, receive, send, self.gateway.dataplane, self.control)
        else:
            await self.control(scope, receive, send)


async def route(
    scope: Scope, receive: Receive, send: Send, dataplane: DataPlane, control: ASGIApp
) -> None:
    """A request of an ASGI server: to the data plane, to ``control``, or to nothing."""
    method, path = scope["method"], _path_of(scope)
    came_through = next((value for name, value in scope["headers"] if name == HOPS), b"")
    if came_through:
        try:
            dataplane.rooms.hops.check(came_through)
        except Refusal as loop:
            await _error(loop, path)(scope, receive, send)
            return
    cors = dataplane.rooms.cors
    if cors is not None and not _NO_PAGES.match(path):
        if method == "OPTIONS" and (told := cors.preflight(scope["headers"])) is not None:
            await send({"type": "http.response.start", "status": 204, "headers": told})
            await send({"type": "http.response.body", "body": b""})
            return
        if work_of_path(path) is None or method != "POST":
            send = _with_headers(send, cors.headers(scope["headers"]))
    work = work_of_path(path)
    if work is not None and method == "POST":
        await dataplane.serve(scope, receive, send, work)
        return
    asked = None if work is not None else asked_at(path)
    if asked is not None and (method if method != "HEAD" else "GET") in asked.methods:
        await dataplane.serve(scope, receive, send, Work.LIGHT)
        return
    if work is not None or asked is not None:
        allowed = ("POST",) if asked is None else asked.methods
        names = ", ".join(allowed)
        refusal = Refusal(405, "method_not_allowed", f"{path[:200]} takes {names}.")
        await _error(refusal, path, {"allow": names})(scope, receive, send)
        return
    if path == REALTIME:
        refusal = Refusal(426, "upgrade_required", f"{path} is a WebSocket.")
        await _error(refusal, path, {"upgrade": "websocket"})(scope, receive, send)
        return
    if path in ENGINE_CALLS:
        await _error(_engine_call(path), path)(scope, receive, send)
        return
    if not _PATH.fullmatch(path) or _DOTS.search(path):
        await _error(_nothing_at(path), path)(scope, receive, send)
        return
    if method == "HEAD":
        # The server leaves the body out.
        scope = {**scope, "method": "GET"}
    try:
        await control(scope, receive, send)
    except ClientDisconnect:
        pass  # nobody is left to answer


def create_app(
    config: GatewayConfig,
    config_path: Path | None = None,
    hub_listener: socket.socket | None = None,
    record: Path | None = None,
    flags: Mapping[str, Any] | None = None,
) -> App:
    """Build a gateway; see ``Gateway``.

    Raises ConfigError for what only shows when it is put together.
    """
    gateway = Gateway(config, config_path, hub_listener, record, flags)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        # A request goes there straight from its connection.
        app.open = gateway.dataplane.open  # type: ignore[method-assign]
        try:
            yield
        finally:
            await gateway.stop()

    control = _control_app(gateway, lifespan)
    control.state.gateway = gateway
    control.include_router(admin.router)
    _add_control_paths(control, gateway)
    app = App(gateway, control)
    return app


def worker_paths(worker: Parts) -> FastAPI:
    """What a worker answers itself of the paths that are no engine's."""
    return _control_app(worker, None)


def _control_app(gateway: Parts, lifespan: Lifespan[FastAPI] | None) -> FastAPI:
    """The public paths alone, and errors with OpenAI's body."""
    control = FastAPI(
        title="hetero-gateway",
        version=__version__,
        summary="A load-balancing gateway for unequal vLLM instances",
        lifespan=lifespan,
        redirect_slashes=False,
        # /docs and /openapi.json are below, with a setting each and nothing from elsewhere.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    control.add_exception_handler(Refusal, _render_error)
    control.add_exception_handler(HTTPException, _render_http_error)
    control.add_exception_handler(Exception, _render_bug)
    add_public_paths(control, gateway)
    return control


async def _render_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _error(error, request.url.path)


async def _render_http_error(request: Request, error: Exception) -> Response:
    """FastAPI's own errors (an unknown path, a wrong method) with OpenAI's body."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    refusal = Refusal(error.status_code, "bad_request", str(error.detail))
    if error.status_code == 404:
        refusal = _nothing_at(path)
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}."
        refusal = Refusal(405, "method_not_allowed", message)
        return _error(refusal, path, {"allow": ", ".join(_methods_at(request))})
    return _error(refusal, path, dict(error.headers or {}))


def _methods_at(request: Request) -> list[str]:
    """The methods of all routes at a request's path: an error names those of the first alone."""
    methods: set[str] = set()
    for route in (*request.app.routes, *admin.router.routes):
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


async def _render_bug(request: Request, error: Exception) -> Response:
    """An exception that nobody expected; the server logs it."""
    refusal = Refusal(500, "internal_error", "The gateway failed.", kind="server_error")
    return _error(refusal, request.url.path)


def _with_headers(send: Send, extra: Headers) -> Send:
    async def with_them(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            sent = {name for name, _ in message.get("headers", ())}
            added = [pair for pair in extra if pair[0] not in sent]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return with_them


def _engine_call(path: str) -> Refusal:
    detail = (
        f"{path} concerns an engine and not a request. Who may use /admin asks for it at "
        f"/admin/instances/ID/engine{path}, or of all that serve a model at "
        f"/admin/models/MODEL/engine{path}."
    )
    return Refusal(403, "engine_call", detail)


def _nothing_at(path: str) -> Refusal:
    return Refusal(404, "not_found", f"There is nothing at {path[:200]}.")


def _error(refusal: Refusal, path: str, headers: dict[str, str] | None = None) -> Response:
    headers = headers or {}
    headers |= {name.decode(): value.decode() for name, value in refusal.headers}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return Response(error_body(refusal, path), refusal.status, headers, "application/json")


def _path_of(scope: Scope) -> str:
    """The path as it came: what was escaped is not the same path."""
    raw: bytes | None = scope.get("raw_path")
    return scope["path"] if raw is None else raw.decode("latin-1")


def _add_control_paths(control: FastAPI, gateway: Gateway) -> None:
    expose = gateway.config.server.expose

    @control.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        """What /admin and the other control paths take."""
        await check_exposed(request, expose.openapi)
        return JSONResponse(control.openapi())

    @control.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """The same as a page."""
        await check_exposed(request, expose.docs)
        page = docs_page(control.openapi())
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")

    @control.get("/metrics", tags=["health"])
    async def metrics(request: Request) -> Response:
        """Prometheus exposition."""
        named: Exposure = "admin" if gateway.admission.keys is not None else "open"
        await check_exposed(request, expose.metrics or named)
        return StreamingResponse(gateway.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @control.get("/dashboard", tags=["dashboard"], response_class=HTMLResponse)
    async def dashboard(request: Request) -> Response:
        """The live page; it reads /admin with the browser's own rights."""
        await check_exposed(request, expose.dashboard)
        return _page_file("index.html")

    @control.get("/dashboard/{name}", include_in_schema=False)
    async def dashboard_file(request: Request, name: str) -> Response:
        """The page's script, style and icon; and the style of /docs."""
        await check_exposed(request, expose.docs if name == "docs.css" else expose.dashboard)
        if name not in _PAGE_FILES:
            raise Refusal(404, "not_found", f"there is no /dashboard/{name}")
        return _page_file(name)


def _page_file(name: str) -> Response:
    content = resources.files("hetero_gateway.serve.dashboard").joinpath(name).read_bytes()
    return Response(content, headers=_PAGE_HEADERS, media_type=_PAGE_FILES[name])
