"""Instances by the data plane's names: ``ip:port``.

The configuration may give an instance a host name, which the data plane cannot use: names are
resolved here, in the background. While a name has no address its instance gets no request.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.scaleout.picker.answers import Destination

# How often new instances are looked for; known names are resolved less often.
_LOOK_S = 1.0
_RESOLVER_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class KnownInstance:
    """An instance's last known address.

    ``destination``: where it is; None: its name has no address now. ``path_prefix``: the part
    of its base_url before every path; usually empty.
    """

    __slots__ = ("asked_s", "destination", "host", "instance", "path_prefix", "port")

    def __init__(self, instance: Instance) -> None:
        parts = urlsplit(instance.config.base_url)
        self.instance = instance
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path_prefix = parts.path.encode()
        self.destination: Destination | None = None
        self.asked_s: float | None = None


class Endpoints:
    """The address of each instance, and the instance at each address.

    Args:
        fleet: the instances.
        resolve_interval_s: between two look-ups of one name.
        drops_credentials: the clients' keys are for the picker, not for instances.
    """

    def __init__(self, fleet: Fleet, resolve_interval_s: float, *, drops_credentials: bool) -> None:
        self._fleet = fleet
        self._interval_s = resolve_interval_s
        self._drops_credentials = drops_credentials
        self._known: dict[InstanceId, KnownInstance] = {}
        self._by_endpoint: dict[str, InstanceId] = {}
        self.unresolved: tuple[InstanceId, ...] = ()

    def known(self, instance: Instance) -> KnownInstance:
        known = self._known.get(instance.id)
        if known is None or known.instance is not instance:
            known = self._known[instance.id] = KnownInstance(instance)
            if _is_address(known.host):
                self._set(known, known.host)
            self._index()
        return known

    def instance_at(self, endpoint: str) -> InstanceId | None:
        """The instance at this address."""
        return self._by_endpoint.get(endpoint)

    def instances_at(self, endpoints: Iterable[str]) -> frozenset[InstanceId]:
        """The instances at these addresses; unknown addresses cost little."""
        found = (self._by_endpoint.get(endpoint) for endpoint in endpoints)
        return frozenset(each for each in found if each is not None)

    def outside(self, allowed: frozenset[InstanceId]) -> tuple[InstanceId, ...]:
        return tuple(i for i in self._fleet.instances if i not in allowed)

    async def follow(self) -> None:
        """Keep the addresses up to date, for ever."""
        while True:
            try:
                await self.look()
            except Exception:
                # The background loop's boundary.
                _log.exception("looking for the instances' addresses failed")
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Find new and removed instances, and resolve the names that are due."""
        now_s = asyncio.get_running_loop().time()
        for instance in self._fleet.instances.values():
            self.known(instance)
        gone = self._known.keys() - self._fleet.instances.keys()
        for instance_id in gone:
            del self._known[instance_id]
        due = [
            known
            for known in self._known.values()
            if not _is_address(known.host)
            and (
                known.asked_s is None
                or known.destination is None
                or now_s - known.asked_s >= self._interval_s
            )
        ]
        await asyncio.gather(*(self._resolve(known, now_s) for known in due))
        if due or gone:
            self._index()

    async def _resolve(self, known: KnownInstance, now_s: float) -> None:
        known.asked_s = now_s
        try:
            async with asyncio.timeout(_RESOLVER_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    known.host, known.port, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as error:
            if known.destination is None:
                _log.debug("instance %s: %s: %r", known.instance.id, known.host, error)
            return  # a recent address is better than none
        # IPv4 first, always in the same order: a name with several addresses keeps to one.
        addresses = sorted({str(each[4][0]) for each in found}, key=lambda a: (":" in a, a))
        if addresses:
            self._set(known, addresses[0])

    def _set(self, known: KnownInstance, address: str) -> None:
        endpoint = f"[{address}]:{known.port}" if ":" in address else f"{address}:{known.port}"
        if known.destination is None or known.destination.endpoint != endpoint:
            known.destination = Destination(
                endpoint,
                known.instance.id,
                known.instance.api_key,
                drops_credentials=self._drops_credentials,
            )

    def _index(self) -> None:
        self._by_endpoint = {
            known.destination.endpoint: instance_id
            for instance_id, known in self._known.items()
            if known.destination is not None
        }
        self.unresolved = tuple(
            instance_id for instance_id, known in self._known.items() if known.destination is None
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
