"""Errors of all non-engine paths, with OpenAI's body."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from hetero_gateway.errors import Refusal
from hetero_gateway.http.errors import error_body


def error(refusal: Refusal, path: str, headers: dict[str, str] | None = None) -> Response:
    headers = headers or {}
    headers |= {name.decode(): value.decode() for name, value in refusal.headers}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return Response(error_body(refusal, path), refusal.status, headers, "application/json")


def nothing_at(path: str) -> Refusal:
    return Refusal(404, "not_found", f"There is nothing at {path[:200]}.")


async def _render_error(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, Refusal)
    return error(failure, request.url.path)


async def _render_http_error(request: Request, failure: Exception) -> Response:
    """The framework's own errors (an unknown path, a wrong method)."""
    assert isinstance(failure, HTTPException)
    path = request.url.path
    refusal = Refusal(failure.status_code, "bad_request", str(failure.detail))
    if failure.status_code == 404:
        refusal = nothing_at(path)
    elif failure.status_code == 405:
        message = f"{path} does not take {request.method}."
        refusal = Refusal(405, "method_not_allowed", message)
        return error(refusal, path, {"allow": ", ".join(_methods_at(request))})
    return error(refusal, path, dict(failure.headers or {}))


def _methods_at(request: Request) -> list[str]:
    """The methods of all routes at a request's path: the framework's error has only the first's."""
    methods: set[str] = set()
    for route in request.app.state.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


async def _render_bug(request: Request, _: Exception) -> Response:
    """An unexpected exception; the server logs it."""
    refusal = Refusal(500, "internal_error", "The gateway failed.", kind="server_error")
    return error(refusal, request.url.path)


# An application's exception handlers.
HANDLERS: dict[Any, Any] = {
    Refusal: _render_error,
    HTTPException: _render_http_error,
    Exception: _render_bug,
}
