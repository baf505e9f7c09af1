"""Who is connected, and who goes when there is no room for one more.

A data plane has a connection for each of its threads, and each that says nothing holds a place all
the same. So a newcomer is always let in as long as one of the others does nothing: the one that
goes is the one that would be missed least. Places are shared between addresses, too: a crowd at one
address pushes out only its own.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

# A data plane has a connection for each of its threads and each 1024 calls.
MAX_CONNECTIONS = 1024
# Of one address: what is left is for the others.
MAX_PER_ADDRESS = 512
# Whoever has a network of IPv6 has all addresses in it.
_NETWORK_BITS = 64


class Member(Protocol):
    """A connection, or the beginning of one.

    Attributes:
        address: of its peer, as ``address_of`` names it.
        at_work: whether it did something that nobody may cut short, when that was last looked at.
        heard: a message has come since that tick.
        has_spoken: one came before.
        spoke_tick: the server's tick in which the last one came, or it was made.
    """

    address: str
    at_work: bool
    heard: bool
    has_spoken: bool
    spoke_tick: int

    def works(self) -> bool:
        """Look whether it is at work."""

    def make_room(self) -> None:
        """Be gone, now."""

    def drain(self) -> None:
        """Take nothing new, and be gone when what is open is done."""

    def close(self) -> None:
        """Be gone, whatever is open."""

    def look(self, tick: int) -> int:
        """Once in a tick: what is late. Returns how many calls were looked at."""


def address_of(transport: asyncio.BaseTransport) -> str:
    """What counts as one peer's address."""
    peer = transport.get_extra_info("peername")
    return network_of(peer[0]) if peer else ""


def network_of(host: str) -> str:
    """An address of IPv4, or the network that one of IPv6 is in."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> _NETWORK_BITS << _NETWORK_BITS, 64)))


class Register:
    """The connections of one server, in the order in which they came."""

    def __init__(self) -> None:
        self._members: dict[Member, None] = {}
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def add(self, member: Member) -> bool:
        """Whether there is room for one more, or was made."""
        count = self._by_address[member.address]
        if count >= MAX_PER_ADDRESS:
            least = self._least(member.address)
        elif len(self._members) >= MAX_CONNECTIONS:
            crowd, most = self._by_address.most_common(1)[0]
            least = (self._least(crowd) if most > count + 1 else None) or self._least()
        else:
            self._put(member)
            return True
        if least is None:
            return False
        self.discard(least)
        self._put(member)
        least.make_room()
        return True

    def _least(self, address: str | None = None) -> Member | None:
        """The one that would be missed least, of all or of an address; None: all are at work."""
        while True:
            idle = (
                each
                for each in self._members
                if not each.at_work and (address is None or each.address == address)
            )
            least = min(idle, key=_worth, default=None)
            if least is None or not least.works():
                return least

    def replace(self, member: Member, by: Member) -> bool:
        """It goes on as another one, in its place, if it still has that."""
        if member not in self._members:
            return False
        self.discard(member)
        self._put(by)
        return True

    def discard(self, member: Member) -> None:
        if member in self._members:
            del self._members[member]
            self._by_address[member.address] -= 1
            if not self._by_address[member.address]:
                del self._by_address[member.address]

    def _put(self, member: Member) -> None:
        self._members[member] = None
        self._by_address[member.address] += 1


def _worth(member: Member) -> tuple[bool, bool, int]:
    """By which those that have had something to say stay longest; of equals the oldest goes."""
    return member.heard or member.has_spoken, member.heard, member.spoke_tick
