"""TLS in front of a connection: in the register from the first byte, and not for long.

A server of asyncio's own would keep a handshake that stalls out of everybody's sight, for a minute.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TYPE_CHECKING, cast

from hetero_gateway.picker.http2.connection import Connection
from hetero_gateway.picker.http2.register import address_of

if TYPE_CHECKING:
    from hetero_gateway.picker.http2.server import Server

# A data plane's takes two round trips.
HANDSHAKE_S = 10.0


class Handshake(asyncio.Protocol):
    """The beginning of a connection of ``server``: a ``Member`` of its register."""

    def __init__(self, server: Server, tls: ssl.SSLContext) -> None:
        self.address = ""
        self.at_work = False
        self.heard = False
        self.has_spoken = False
        self.spoke_tick = server.tick
        self._server = server
        self._tls = tls
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
                self._connection, self._socket, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # as ssl.SSLError and a time-out are
            self._socket.close()
        finally:
            self._server.discard(self)

    def _connection(self) -> Connection:
        return Connection(self._server, self)

    def works(self) -> bool:
        return False

    def make_room(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster

    def drain(self) -> None:
        self.make_room()

    def close(self) -> None:
        self.make_room()

    def look(self, tick: int) -> int:
        return 0
