"""Listens for data planes, and closes their connections at the end."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.scaleout.picker.http2.calls import Methods
from hetero_gateway.scaleout.picker.http2.commons import Commons, Occupant, address_of
from hetero_gateway.scaleout.picker.http2.connection import DataPlaneConnection

_BACKLOG = 512
_CLOSE_S = 1.0
# A data plane's handshake takes two round trips.
HANDSHAKE_S = 10.0


class Handshake(Occupant, asyncio.Protocol):
    """TLS before a connection: an ``Occupant`` of the register from the first byte on.

    A server of asyncio's own would let a stalled handshake hold a connection unseen, for a minute.
    """

    def __init__(self, server: "GrpcServer", tls: ssl.SSLContext) -> None:
        self.spoke_tick = server.tick
        self._server = server
        self._tls = tls
        self._socket: socket.socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.address = address_of(transport)
        if self._server.add(self):
            # `start_tls` would lose data that uvloop has read by then, so the socket starts anew.
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._socket.setblocking(False)
            self._server.start(self._greet())
        transport.abort()

    async def _greet(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: self._server.connection(self),
                self._socket,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except OSError:  # includes ssl.SSLError and timeouts
            self._socket.close()
        finally:
            self._server.discard(self)

    def make_room(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster


class GrpcServer(Commons):
    """Listens on any number of addresses.

    Args:
        methods: handlers of calls by path (``/service/Method``).
        limits, margin_bytes, on_bug: see ``Commons``.
    """

    def __init__(
        self, methods: Methods, limits: BodyLimits, margin_bytes: int, on_bug: Callable[[], None]
    ) -> None:
        super().__init__(limits, margin_bytes, on_bug)
        self._methods = methods
        self._listeners: list[asyncio.Server] = []

    def connection(self, handshake: Occupant | None = None) -> DataPlaneConnection:
        """A new connection, in the place of its handshake if it had one."""
        return DataPlaneConnection(self, self._methods, handshake)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the port. Raises HeteroGatewayError if it cannot be used."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(
                lambda: self.connection() if tls is None else Handshake(self, tls),
                host,
                port,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise HeteroGatewayError(
                f"cannot listen on {host}:{port} (is the port taken?)"
            ) from error
        self._listeners.append(listener)
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        """Stop listening, let open calls end within a time, and close all connections."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self.register):
            connection.drain()
        await self._until(lambda: not self.open_calls, grace_s)
        for connection in list(self.register):
            connection.close()
        await self._until(lambda: not self.register, _CLOSE_S)
        if self._ticking is not None:
            self._ticking.cancel()
