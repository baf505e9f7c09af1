"""What every source of instances says: all that there are, each time something changes."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.instance_config import InstanceConfig

# More than this many are not believed.
MOST_INSTANCES = 4096
DEFAULT_PORT = 8000


class SourceError(HeteroGatewayError):
    """A source cannot be asked now; what it has named stays.

    ``retry_after_s``: when it wants to be asked again, if it says so.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Found(NamedTuple):
    """One instance, as a source names it.

    Args:
        key: its name within the source, as long as it is the same one.
        base_url: where it listens.
        labels: what may say which profile it has.
        config: all of it, where the source says more than an address.
        rank: of a place, which one it is of those there; None: it is all of it.
    """

    key: str
    base_url: str
    labels: Mapping[str, str] = {}
    config: InstanceConfig | None = None
    rank: int | None = None


# Called with all that there are.
Tell: TypeAlias = Callable[[list[Found]], None]


class Source(Protocol):
    """Asks, again and again, and reports; ends by an exception or when it is cancelled."""

    async def follow(self, tell: Tell) -> None:
        """Raises SourceError: it is to be tried again in a while."""


def url_of(scheme: str, address: str, port: int) -> str | None:
    """The base_url of an IP address; None: no instance can be there.

    Whoever writes the records must not have requests, and keys, sent to a cloud's metadata.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return None
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    return f"{scheme}://{host}:{port}"
