"""The ASGI callable: the data plane for engine paths, ``Control`` for everything else.

``create_app`` builds a gateway and wires it; nothing is global, so tests build as many as they
like. The gateway starts and stops in the lifespan.
"""

import asyncio
import contextlib
import functools
import importlib
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Lifespan

from hetero_gateway.engines.vllm import ENGINE_CALLS, REALTIME, Work, asked_at, work_of_path
from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.server_config import Exposure
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.records.exposition import CONTENT_TYPE
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.http.downstream import Downstream, Listener, Receive, Scope, Send
from hetero_gateway.http.headers import HOPS, Headers, takes_gzip
from hetero_gateway.http.heads import Inbound
from hetero_gateway.serve.control.access import check_exposed
from hetero_gateway.serve.control.errors import error as _error
from hetero_gateway.serve.control.errors import nothing_at
from hetero_gateway.serve.control.public import PlainPath, plain_app, public_paths
from hetero_gateway.serve.garbage import freeze_what_came_later
from hetero_gateway.serve.wiring.gateway import Gateway, Parts

if TYPE_CHECKING:
    from hetero_gateway.gateway.dataplane.realtime import Realtime

# In the gateway's own paths only a model's name and a request's id may be escaped: they may contain
# a slash, and an id any visible character. No path matches in two ways, or a near miss would be
# tried in all of them.
_PART = r"[0-9A-Za-z._~!$&'()*+,=:@-]+"
_PATH = re.compile(
    r"/(?:(?:v1|admin)/models|admin/requests)/[0-9A-Za-z._~!$&'()*+,=:@/%-]+"
    rf"|/(?:{_PART}(?:/{_PART})*)?"
)
# Paths that pages of other sites may never request, whatever the configuration.
_NO_PAGES = re.compile(r"/(?:admin|dashboard|docs|openapi\.json|metrics)(?:/|\Z)")
_DOTS = re.compile(r"/\.{1,2}(?:/|$)")


class PartsApp:
    """The application that uvicorn serves: of a single-process gateway, or of a worker.

    A ``http.protocol.Service``, and an ASGI application for everything else.

    Args:
        parts: start and stop with it.
        control: makes the application that has the lifespan and serves non-engine paths.
    """

    def __init__(self, parts: Parts, control: Callable[[Lifespan[Starlette]], ASGIApp]) -> None:
        self._parts = parts
        self.control = control(self._live)

    @property
    def body_limits(self) -> BodyLimits:
        return self._parts.dataplane.body_limits

    def open(self, inbound: Inbound, downstream: Downstream) -> Listener:
        """A request on an engine path, from the callbacks of the server's own protocol."""
        return self._parts.dataplane.open(inbound, downstream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._realtime.serve(scope, receive, send)
        elif scope["type"] == "http":
            await route(scope, receive, send, self._parts.dataplane, self.control)
        else:
            await self.control(scope, receive, send)

    @functools.cached_property
    def _realtime(self) -> "Realtime":
        """The WebSocket handler; loaded on first use, as ``websockets`` takes 1 MB."""
        from hetero_gateway.gateway.dataplane.realtime import Realtime

        return Realtime(self._parts.dataplane)

    @contextlib.asynccontextmanager
    async def _live(self, _: Starlette) -> AsyncIterator[None]:
        await self._parts.start()
        # From now on requests go there straight from their connections.
        self.open = self._parts.dataplane.open  # type: ignore[method-assign]
        try:
            yield
        finally:
            await self._parts.stop()


class App(PartsApp):
    """The application of a whole ``gateway``."""

    def __init__(self, gateway: Gateway, control: Callable[[Lifespan[Starlette]], ASGIApp]) -> None:
        super().__init__(gateway, control)
        self.gateway = gateway


async def route(
    scope: Scope, receive: Receive, send: Send, dataplane: DataPlane, control: ASGIApp
) -> None:
    """Route an ASGI request: to the data plane, to ``control``, or to nothing."""
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
    headers: dict[str, str] = {}
    if work is not None or asked is not None:
        headers["allow"] = ", ".join(("POST",) if asked is None else asked.methods)
        detail = f"{path[:200]} takes {headers['allow']}."
        refusal = Refusal(405, "method_not_allowed", detail)
    elif path == REALTIME:
        headers["upgrade"] = "websocket"
        refusal = Refusal(426, "upgrade_required", f"{path} is a WebSocket.")
    elif path in ENGINE_CALLS:
        refusal = _engine_call(path)
    elif not _PATH.fullmatch(path) or _DOTS.search(path):
        refusal = nothing_at(path)
    else:
        if method == "HEAD":
            # The server omits the body.
            scope = {**scope, "method": "GET"}
        with contextlib.suppress(ClientDisconnect):  # the client has left
            await control(scope, receive, send)
        return
    await _error(refusal, path, headers)(scope, receive, send)


# Prefixes served by FastAPI, and the module that does.
_API_MODULE = "hetero_gateway.serve.control.api"
_API = re.compile(r"/(?:admin|dashboard|docs|openapi\.json)(?:/|\Z)")


class Control:
    """The gateway's non-engine paths, its start and its end: an ASGI application.

    Probes and scrapes need little. FastAPI and /admin's models are loaded when one of their
    paths is first requested: 9 MB, which a gateway saves until then.
    """

    def __init__(self, gateway: Gateway, lifespan: Lifespan[Starlette]) -> None:
        self._gateway = gateway
        self.paths = [*public_paths(gateway), _metrics_path(gateway), _front_path(gateway)]
        if gateway.config.batches.on:
            from hetero_gateway.serve.control.batches import batch_paths

            self.paths += batch_paths(gateway)
        self._plain = plain_app(gateway, self.paths, lifespan)
        self._api: Starlette | None = None
        self._loading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not _API.match(scope["path"]):
            await self._plain(scope, receive, send)
            return
        if self._api is None:
            async with self._loading:
                if _API_MODULE not in sys.modules:
                    # Loading takes as long as hundreds of chunks, and streams must go on.
                    await asyncio.to_thread(importlib.import_module, _API_MODULE)
                self._api = self._api or self.make_api()
        await self._api(scope, receive, send)

    def make_api(self) -> Starlette:
        from hetero_gateway.serve.control.api import make_api

        api = make_api(self._gateway, self.paths)
        freeze_what_came_later()
        return api


def create_app(
    config: GatewayConfig,
    config_path: Path | None = None,
    hub_listener: socket.socket | None = None,
    record: Path | None = None,
    flags: Mapping[str, Any] | None = None,
) -> App:
    """Build a gateway; see ``Gateway``.

    Raises ConfigError for errors that only show when it is put together.
    """
    gateway = Gateway(config, config_path, hub_listener, record, flags)
    return App(gateway, functools.partial(Control, gateway))


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


def _path_of(scope: Scope) -> str:
    """The path as received: an escaped path is not the same path."""
    raw: bytes | None = scope.get("raw_path")
    return scope["path"] if raw is None else raw.decode("latin-1")


def _front_path(gateway: Gateway) -> PlainPath:
    async def front(request: Request) -> Response:
        """Redirects to the dashboard."""
        await check_exposed(request, gateway.config.server.expose.dashboard)
        return RedirectResponse("dashboard")  # relative, so it works below a reverse proxy's prefix

    return PlainPath("/", front, None)


def _metrics_path(gateway: Gateway) -> PlainPath:
    expose = gateway.config.server.expose

    async def metrics(request: Request) -> Response:
        """Prometheus exposition."""
        named: Exposure = "admin" if gateway.admission.keys is not None else "open"
        await check_exposed(request, expose.metrics or named)
        gzipped = takes_gzip(request.headers.get("accept-encoding", ""))
        headers = {"vary": "accept-encoding"} | ({"content-encoding": "gzip"} if gzipped else {})
        body = gateway.metrics.exposition(gzipped=gzipped)
        return StreamingResponse(body, headers=headers, media_type=CONTENT_TYPE)

    return PlainPath("/metrics", metrics, "health")
