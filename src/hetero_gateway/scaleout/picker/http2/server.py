"""Listens for data planes, and closes what is open at the end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.scaleout.picker.http2.calls import Methods
from hetero_gateway.scaleout.picker.http2.commons import Commons
from hetero_gateway.scaleout.picker.http2.connection import Connection
from hetero_gateway.scaleout.picker.http2.handshakes import Handshake
from hetero_gateway.scaleout.picker.http2.register import Member

_BACKLOG = 512
_CLOSE_S = 1.0


class Server(Commons):
    """Listens on any number of addresses.

    Args:
        methods: what serves a call of each path (``/service/Method``).
        limits, margin_bytes, on_bug: see ``Commons``.
    """

    def __init__(
        self, methods: Methods, limits: BodyLimits, margin_bytes: int, on_bug: Callable[[], None]
    ) -> None:
        super().__init__(limits, margin_bytes, on_bug)
        self._methods = methods
        self._listeners: list[asyncio.Server] = []

    def connection(self, handshake: Member | None = None) -> Connection:
        """A new connection, in the place of its handshake if it had one."""
        return Connection(self, self._methods, handshake)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; the port. Raises HeteroGatewayError where it cannot be used."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(
                lambda: self.connection() if tls is None else Handshake(self, tls, self.connection),
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
        """Listen no more, let open calls end for so long, and close all connections."""
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
