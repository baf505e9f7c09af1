"""Whether a base_url leads to the gateway's own listener.

Names are looked up, but only if the port is the gateway's own: the caller must be able to wait.
Loops through a proxy or a port map are not found here; ``http/hops`` finds them.
"""

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from hetero_gateway.files.server_config import ServerConfig

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_not_own(base_url: str, server: "ServerConfig") -> None:
    """Raises ValueError: the gateway would send requests to itself."""
    listeners = [(server.host, server.port)]
    if server.admin_listen is not None and not server.admin_listen.startswith("unix:"):
        admin = urlsplit("//" + server.admin_listen)
        listeners.append((admin.hostname or "", admin.port or 0))
    for host, port in listeners:
        if _leads_to(base_url, host, port):
            raise ValueError(
                f"base_url: {base_url} is where this gateway listens ({host}:{port}): requests "
                "would come back to it; name the engine's address, or change server.port"
            )


def _leads_to(base_url: str, host: str, port: int) -> bool:
    parts = urlsplit(base_url)
    if port == 0 or (parts.port or (443 if parts.scheme == "https" else 80)) != port:
        return False
    listening = _addresses(host)
    return any(
        _reaches(target, own) for target in _addresses(parts.hostname or "") for own in listening
    )


def _reaches(target: _Address, own: _Address) -> bool:
    """Whether a connection to ``target`` reaches the listener at ``own``."""
    if target.is_unspecified:
        # The kernel takes it for its loopback address.
        loopback = "127.0.0.1" if target.version == 4 else "::1"
        target = ipaddress.ip_address(loopback)
    if not own.is_unspecified:
        return target == own
    # ``::`` serves both families, 0.0.0.0 only its own.
    return (own.version == 6 or target.version == 4) and _is_local(target)


def _is_local(address: _Address) -> bool:
    """Whether it is one of this machine's addresses: only those can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return address.is_loopback
    return True


def _addresses(host: str) -> set[_Address]:
    """Of an address in any spelling, or of a name; empty if it has none."""
    name = host.strip("[]").rstrip(".").lower()
    if name in ("", "*"):
        name = "::"
    if name == "localhost" or name.endswith(".localhost"):
        return {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {_plain(str(each[4][0])) for each in found}


def _plain(text: str) -> _Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if address.version == 6 else None
    return mapped or address
