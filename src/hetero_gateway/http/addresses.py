"""Where an instance's host name leads, which may change while connections are open."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

# A name may have more addresses than one answer tells.
LOOK_UPS = 3


class Addresses:
    """A host's addresses, as far as it is a name and they were looked up."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        try:
            ipaddress.ip_address(host)
            self.is_name = False
        except ValueError:
            self.is_name = True
        self.look_ups = 0
        self._seen: dict[str, int] = {}  # the last look-up that told each

    async def look_up(self) -> None:
        """Ask where the name leads now. That nobody can say so means nothing."""
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
        """Whether the name has led elsewhere for a while.

        Args:
            since: how many look-ups there had been when it led there for sure.
        """
        return self.look_ups - max(since, self._seen.get(address, 0)) >= LOOK_UPS
