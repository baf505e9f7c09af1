"""Who may ask for what is no engine's path: /admin, /metrics, /docs, /openapi.json, /dashboard.

/admin is open to

    who sends its key          that of ``server.admin_key_env``; or, where neither this nor
                               ``server.admin_listen`` is set and the gateway listens on loopback,
                               the one that it made at its start (``files/admin_key.py``)
    who reaches its listener   where ``server.admin_listen`` is set; the clients' listener has no
                               /admin then

and to nobody else. Where a request came from is no evidence: a proxy on this machine connects from
loopback, and need leave no trace of the client behind it.

The other paths each have a setting (``server.expose``).
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from hetero_gateway.errors import Refusal
from hetero_gateway.files.server_config import Exposure
from hetero_gateway.serve.wiring.gateway import Gateway

# Set by the server, for connections to the listener of /admin: what that listens on. (A client
# that has left already has no address either.)
ADMIN_LISTENER = "admin_listener"
UNIX, ADDRESS = "a Unix socket", "an address"
# How a worker says who asked it; from anybody else it does not get this far.
PEER_HEADER = "x-hetero-gateway-peer"


def gateway_of(request: Request) -> Gateway:
    """Whose control paths these are."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def check_admin(request: Request) -> None:
    """Raises Refusal: 401 or 403 to whom /admin is closed."""
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
    """Raises Refusal: 401, 403 or 404 to whom a path of this setting is closed."""
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
    """How someone with access came, for the audit."""
    if gateway_of(request).admin_key is not None:
        return "by key"
    return "by the listener"


def peer_of(request: Request) -> str:
    """The address that a request came from; "" where it has none."""
    if gateway_of(request).hub is not None:
        # Only workers reach this process's socket.
        return request.headers.get(PEER_HEADER, "")
    return "" if request.client is None else request.client.host


def _check_key(request: Request, key: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Header values are bytes; starlette shows them as latin-1.
    right = hmac.compare_digest(given.encode("latin-1"), key.encode())
    if scheme.lower() != "bearer" or not right:
        raise Refusal(401, "invalid_api_key", "The admin key is missing or wrong.")


def _check_own_listener(request: Request) -> None:
    """A web page in a browser that reaches it must not use it: by a name of its own, or at all."""
    if getattr(request.state, ADMIN_LISTENER, None) == UNIX:
        return  # which no page reaches
    host, origin = _only_host(request), request.headers.get("origin")
    # As browsers write it: a page of the gateway's own has no other.
    own = origin is None or origin in (f"http://{host}", f"https://{host}")
    if not own or not _is_address(host):
        raise Refusal(
            403,
            "admin_off",
            "/admin without a key answers on its listener by an address, not by a name, and not "
            "to another site; set server.admin_key_env.",
        )


def _only_host(request: Request) -> str:
    """What the one Host field says; "" where there is none, or another one."""
    hosts = request.headers.getlist("host")
    return hosts[0] if len(hosts) == 1 and "@" not in hosts[0] else ""


def _is_address(netloc: str) -> bool:
    """Whether it is an address or localhost: what nobody else can have point here."""
    try:
        name = urlsplit("//" + netloc).hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
