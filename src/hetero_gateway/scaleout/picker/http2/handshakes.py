"""TLS in front of a connection: in the register from the first byte, and not for long.

A server of asyncio's own would keep a handshake that stalls out of everybody's sight, for a minute.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from hetero_gateway.scaleout.picker.http2.commons import Commons
from hetero_gateway.scaleout.picker.http2.register import Member, address_of

# A data plane's takes two round trips.
HANDSHAKE_S = 10.0


class Handshake(asyncio.Protocol):
    """The beginning of a connection of ``server``: a ``Member`` of its register.

    Args:
        connect: makes the connection that takes its place.
    """

    def __init__(
        self,
        server: Commons,
        tls: ssl.SSLContext,
        connect: Callable[[Member], asyncio.BaseProtocol],
    ) -> None:
        self.address = ""
        self.at_work = False
        self.heard = False
        self.has_spoken = False
        self.spoke_tick = server.tick
        self._server = server
        self._tls = tls
        self._connect = connect
        self._socket: socket.socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.address = address_of(transport)
        if self._server.add(self):
            # `start_tls` would lose what uvloop has read by then, and so the socket starts anew.
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._socket.setblocking(False)
            self._server.start(self._greet())
        transport.abort()

    async def _greet(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: self._connect(self),
                self._socket,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except OSError:  # as ssl.SSLError and a time-out are
            self._socket.close()
        finally:
            self._server.discard(self)

    def works(self) -> bool:
        return False

    def make_room(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster

    drain = close = make_room

    def look(self, tick: int) -> int:
        return 0
