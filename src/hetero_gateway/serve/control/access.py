"""Who may use the non-engine paths: /admin, /metrics, /docs, /openapi.json, /dashboard.

/admin is open to

    requests with its key      that of ``server.admin_key_env``; or, if neither this nor
                               ``server.admin_listen`` is set and the gateway listens on loopback,
                               the one that it created at its start (``files/admin_key.py``)
    users of its listener      if ``server.admin_listen`` is set; the clients' listener then has no
                               /admin

and to nobody else. The origin of a request proves nothing: a proxy on this machine connects from
loopback, and may leave no trace of the client behind it.

The other paths each have a setting (``server.expose``).
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from hetero_gateway.errors import Refusal
from hetero_gateway.files.server_config import Exposure
from hetero_gateway.serve.wiring.gateway import Gateway

# Set by the server, for connections to the listener of /admin: its address. (A client that has left
# has no address either.)
ADMIN_LISTENER = "admin_listener"
UNIX, ADDRESS = "a Unix socket", "an address"
# How a worker names the original client; from anybody else it does not get this far.
PEER_HEADER = "x-hetero-gateway-peer"


def gateway_of(request: Request) -> Gateway:
    """The gateway that the request's control paths belong to."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def check_admin(request: Request) -> None:
    """Raises Refusal: 401 or 403 if /admin is closed to the request."""
    gateway = gateway_of(request)
    over_listener = bool(getattr(request.state, ADMIN_LISTENER, False))
    if gateway.config.server.admin_listen is not None and not over_listener:
        raise Refusal(403, "admin_off", "/admin is on a listener of its own: server.admin_listen.")
    if gateway.admin_key is not None:
        _check_key(request, gateway.admin_key)
    elif over_listener:
        _check_own_listener(request)
    else:
        raise Refusal(
            403,
            "admin_off",
            "/admin is off: set server.admin_key_env or server.admin_listen, or listen on "
            "loopback.",
        )


async def check_exposed(request: Request, exposure: Exposure) -> None:
    """Raises Refusal: 401, 403 or 404 if a path of this setting is closed to the request."""
    gateway = gateway_of(request)
    if getattr(request.state, ADMIN_LISTENER, False):
        await check_admin(request)
    elif exposure == "off":
        raise Refusal(404, "not_found", f"There is nothing at {request.url.path[:200]}.")
    elif exposure == "admin":
        await check_admin(request)
    elif exposure == "clients":
        try:
            gateway.admission.client_of(request.headers.raw)
        except Refusal:
            await check_admin(request)


def how(request: Request) -> str:
    """How a request with access was admitted, for the audit."""
    if gateway_of(request).admin_key is not None:
        return "by key"
    return "by the listener"


def peer_of(request: Request) -> str:
    """The address that a request came from; "" if it has none."""
    if gateway_of(request).hub is not None:
        # Only workers reach this process's socket.
        return request.headers.get(PEER_HEADER, "")
    return "" if request.client is None else request.client.host


def _check_key(request: Request, key: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Header values are bytes; starlette decodes them as latin-1.
    right = hmac.compare_digest(given.encode("latin-1"), key.encode())
    if scheme.lower() != "bearer" or not right:
        raise Refusal(401, "invalid_api_key", "The admin key is missing or wrong.")


def _check_own_listener(request: Request) -> None:
    """Refuse web pages in a browser that reaches the listener, by DNS rebinding or otherwise."""
    if getattr(request.state, ADMIN_LISTENER, None) == UNIX:
        return  # no page can reach it
    host, origin = _only_host(request), request.headers.get("origin")
    # As browsers write it: the gateway's own pages have no other.
    own = origin is None or origin in (f"http://{host}", f"https://{host}")
    if not own or not _is_address(host):
        raise Refusal(
            403,
            "admin_off",
            "/admin without a key answers on its listener by an address, not by a name, and not "
            "to another site; set server.admin_key_env.",
        )


def _only_host(request: Request) -> str:
    """The value of the only Host field; "" if there is none, or more than one."""
    hosts = request.headers.getlist("host")
    return hosts[0] if len(hosts) == 1 and "@" not in hosts[0] else ""


def _is_address(netloc: str) -> bool:
    """Whether it is an address or localhost: names that nobody else can point here."""
    try:
        name = urlsplit("//" + netloc).hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
