"""DNS: the addresses of a name, or its SRV records, looked up again when their TTL has passed.

Needs dnspython (extra ``dns``), as the system's resolver does not report the TTL. A name that no
longer exists is believed after two such answers; a server that does not answer changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from typing import Any

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.gateway.fleet.sources.base import (
    DEFAULT_PORT,
    MOST_INSTANCES,
    Found,
    SourceError,
    Tell,
    url_of,
)
from hetero_gateway.gateway.fleet.sources.pace import Allowance

# The shortest pause, however short a TTL is, and however often the answer is empty.
_SHORTEST_S = 1.0
_LIFETIME_S = 5.0
# Limit of names in an answer: two queries for each.
_QUERIES_PER_S, _QUERIES_AT_ONCE = 50.0, 100


class DnsSource:
    """Follows one name.

    Raises:
        ConfigError: dnspython is not installed, or the name server's address is invalid.
    """

    def __init__(self, config: SourceConfig) -> None:
        try:
            import dns.asyncresolver
            import dns.exception
            import dns.resolver
        except ImportError as error:
            raise ConfigError(
                "discovery: kind dns needs its extra: pip install 'hetero-gateway[dns]'"
            ) from error
        assert config.host is not None
        self._host, self._config = config.host, config
        self._allowance = Allowance(_QUERIES_PER_S, _QUERIES_AT_ONCE)
        self._no_answer: Any = (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer)
        self._failed: Any = (dns.exception.DNSException, OSError)
        try:
            self._resolver = dns.asyncresolver.Resolver(configure=config.nameserver is None)
        except self._failed as error:
            raise ConfigError(f"discovery: {config.name}: no name server: {error}") from error
        # Earlier answers are not kept: the name is asked for again when its time has passed.
        self._resolver.cache = None
        if config.nameserver is not None:
            host, port = _server(config.nameserver, config.name)
            self._resolver.nameservers = [host]
            self._resolver.port = port

    async def follow(self, tell: Tell) -> None:
        empty = 0
        while True:
            found, ttl_s = await self._look()
            empty = 0 if found else empty + 1
            if found or empty > 1:
                tell(found)
            elif empty:
                ttl_s = _SHORTEST_S
            await asyncio.sleep(max(_SHORTEST_S, min(ttl_s, self._config.interval_s)))

    async def _look(self) -> tuple[list[Found], float]:
        """(the complete list, how long it holds)."""
        config = self._config
        port = config.port or DEFAULT_PORT
        targets, ttl_s = [(self._host, port)], config.interval_s
        if config.record == "srv":
            records, ttl_s = await self._ask(self._host, "SRV")
            targets = [(str(r.target).rstrip("."), int(r.port)) for r in records]
        found: dict[str, Found] = {}
        for host, number in targets[:MOST_INSTANCES]:
            for kind in ("A", "AAAA"):
                records, holds_s = await self._ask(host, kind)
                if records:
                    ttl_s = min(ttl_s, holds_s)
                for record in records:
                    url = url_of(config.scheme, str(record.address), number)
                    if url is not None and len(found) < MOST_INSTANCES:
                        key = re.sub(r"[^0-9a-z]+", "-", url.partition("://")[2]).strip("-")
                        found[key] = Found(key, url)
        return list(found.values()), ttl_s

    async def _ask(self, name: str, kind: str) -> tuple[list[Any], float]:
        await self._allowance.take()
        try:
            answer = await self._resolver.resolve(name, kind, lifetime=_LIFETIME_S, search=True)
        except self._no_answer:
            return [], _SHORTEST_S
        except self._failed as error:
            raise SourceError(f"{name}: {error}") from error
        return list(answer), float(answer.rrset.ttl if answer.rrset is not None else 0)


def _server(text: str, name: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port or (host.count(":") > 0 and not host.startswith("[")):
        host, port = text, "53"
    host = host.strip("[]")
    try:
        ipaddress.ip_address(host)
        return host, int(port)
    except ValueError as error:
        raise ConfigError(f"discovery: {name}: nameserver: {text!r} is no IP[:PORT]") from error
