"""Addresses that no instance should have: link-local ones, where clouds keep their metadata.

Otherwise, anybody who may name instances could have the gateway read the machine's credentials
there. Names are not looked up here: their addresses are checked once a connection is made.
"""

import ipaddress
import socket

# Metadata services that are not link-local: AWS over IPv6, Alibaba, Oracle, Azure's wire server.
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"),
    )
)
_NAMES = frozenset(("metadata", "metadata.google.internal", "metadata.goog", "instance-data"))


def is_link_local(host: str) -> bool:
    """Whether a host (an address in any spelling, or a name) is one of those."""
    name = host.strip("[]").rstrip(".").lower()
    if name in _NAMES:
        return True
    address = _address_of(name)
    if address is None:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if embedded is not None:
            address = embedded
    return address.is_link_local or address in _METADATA


def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        pass
    try:
        # 0xa9fea9fe, 2852039166, 169.254.43518: spellings that the C library accepts as an address.
        return ipaddress.IPv4Address(socket.inet_aton(name))
    except OSError:
        return None
