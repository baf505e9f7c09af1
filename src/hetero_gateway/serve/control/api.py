"""/admin, the dashboard, /docs and /openapi.json: the paths that FastAPI serves.

``control`` imports this module when one of them is first requested.
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse

from hetero_gateway import __version__
from hetero_gateway.errors import Refusal
from hetero_gateway.serve.control import admin
from hetero_gateway.serve.control.access import check_exposed
from hetero_gateway.serve.control.docs_page import docs_page
from hetero_gateway.serve.control.errors import HANDLERS
from hetero_gateway.serve.control.public import PlainPath
from hetero_gateway.serve.wiring.gateway import Gateway

# The page shows names that clients and instances chose: only its own files may run in it, and
# trusted types refuse any write of markup.
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
    "figures.js": "text/javascript",
    "instances.js": "text/javascript",
    "requests.js": "text/javascript",
    "docs.css": "text/css",
    "icon.svg": "image/svg+xml",
}


def make_api(gateway: Gateway, plain: Sequence[PlainPath]) -> FastAPI:
    """``plain``: paths that are described with the others, but served elsewhere."""
    api = FastAPI(
        title="hetero-gateway",
        version=__version__,
        summary="A load-balancing gateway for unequal vLLM instances",
        redirect_slashes=False,
        # /docs and /openapi.json are below, each with a setting, and without external resources.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        exception_handlers=HANDLERS,
    )
    # Used as they are: included routes would be rebuilt for every gateway.
    api.router.routes += admin.router.routes
    _add_pages(api, gateway, plain)
    api.state.gateway, api.state.routes = gateway, api.routes
    return api


def _add_pages(api: FastAPI, gateway: Gateway, plain: Sequence[PlainPath]) -> None:
    expose = gateway.config.server.expose

    @cache
    def document() -> dict[str, Any]:
        told = APIRouter()
        for each in plain:
            told.add_api_route(
                each.path,
                each.answer,
                methods=list(each.methods),
                tags=[each.tag] if each.tag else None,
                response_model=each.document,
                include_in_schema=each.tag is not None,
                openapi_extra=None if each.extra is None else dict(each.extra),
            )
        routes = [*told.routes, *api.routes]
        return get_openapi(title=api.title, version=api.version, summary=api.summary, routes=routes)

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        """The description of /admin and the other control paths."""
        await check_exposed(request, expose.openapi)
        return JSONResponse(document())

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """The same as a page."""
        await check_exposed(request, expose.docs)
        page = docs_page(document())
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")

    @api.get("/dashboard", tags=["dashboard"], response_class=HTMLResponse)
    async def dashboard(request: Request) -> Response:
        """The live page; it reads /admin with the browser's own rights."""
        await check_exposed(request, expose.dashboard)
        return _page_file("index.html")

    @api.get("/dashboard/{name}", include_in_schema=False)
    async def dashboard_file(request: Request, name: str) -> Response:
        """The page's script, style and icon; and the style of /docs."""
        await check_exposed(request, expose.docs if name == "docs.css" else expose.dashboard)
        if name not in _PAGE_FILES:
            raise Refusal(404, "not_found", f"there is no /dashboard/{name}")
        return _page_file(name)


def _page_file(name: str) -> Response:
    content = resources.files("hetero_gateway.serve.dashboard").joinpath(name).read_bytes()
    return Response(content, headers=_PAGE_HEADERS, media_type=_PAGE_FILES[name])
