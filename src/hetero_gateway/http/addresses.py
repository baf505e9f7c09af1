"""Resolves an instance's host name, whose address may change while connections are open."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

# A name may have more addresses than one answer lists.
LOOK_UPS = 3


class Addresses:
    """A host's addresses, if it is a name and was looked up."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        try:
            ipaddress.ip_address(host)
            self.is_name = False
        except ValueError:
            self.is_name = True
        self.look_ups = 0
        self._seen: dict[str, int] = {}  # the last look-up that listed each

    async def look_up(self) -> None:
        """Look the name up again. A failed look-up has no effect."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError):
            return
        self.look_ups += 1
        self._seen = {a: n for a, n in self._seen.items() if self.look_ups - n < LOOK_UPS}
        self._seen.update((str(address[0]), self.look_ups) for *_, address in found)

    def has_left(self, address: str, since: int) -> bool:
        """Whether the name has resolved elsewhere for a while.

        Args:
            since: the number of look-ups when it certainly resolved there.
        """
        return self.look_ups - max(since, self._seen.get(address, 0)) >= LOOK_UPS
