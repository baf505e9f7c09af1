"""The interface of instance sources: the complete list, each time something changes."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.instance_config import InstanceConfig

# Longer lists are not believed.
MOST_INSTANCES = 4096
DEFAULT_PORT = 8000


class SourceError(HeteroGatewayError):
    """A source cannot be read now; the instances it listed stay.

    ``retry_after_s``: when it asks to be asked again, if it does.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Found(NamedTuple):
    """One instance, as a source lists it.

    Args:
        key: its name within the source, stable for one instance.
        base_url: where it listens.
        labels: may determine its profile.
        config: all of it, if the source gives more than an address.
        rank: of a place, its number among those of the server; None: the whole server.
    """

    key: str
    base_url: str
    labels: Mapping[str, str] = {}
    config: InstanceConfig | None = None
    rank: int | None = None


# Called with the complete list.
Tell: TypeAlias = Callable[[list[Found]], None]


class Source(Protocol):
    """Reports repeatedly; ends by an exception or when cancelled."""

    async def follow(self, tell: Tell) -> None:
        """Raises SourceError: it should be retried in a while."""


def url_of(scheme: str, address: str, port: int) -> str | None:
    """The base_url of an IP address; None: no instance can be there.

    Whoever writes the records must not get requests, and keys, sent to a cloud's metadata service.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return None
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    return f"{scheme}://{host}:{port}"
