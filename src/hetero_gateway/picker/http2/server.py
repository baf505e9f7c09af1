"""Listens for data planes, and knows all that is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Mapping

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.gateway.wire.bodies import BodyLimits
from hetero_gateway.picker.http2.calls import Call, Receiver
from hetero_gateway.picker.http2.connection import Connection
from hetero_gateway.picker.http2.frames import ProtocolError, Status

# A data plane has a connection for each of its threads, and some for its health checks.
MAX_CONNECTIONS = 1024
# Each is a client's request, and a few kilobytes.
MAX_CALLS = 65536
# Data planes have a few different blocks each; those with a trace's id in them are all different.
_MAX_BLOCKS = 256
_MAX_BLOCK_BYTES = 1024
_BACKLOG = 512
_LOG_EVERY_S = 10.0
_CLOSE_S = 1.0

_log = logging.getLogger(__name__)

Methods = Mapping[str, Callable[[Call], Receiver]]


class Server:
    """Listens on any number of addresses.

    Args:
        methods: what serves a call of each path (``/service/Method``).
        limits: the budget of long messages.
        margin_bytes: what a message may be longer than a body.
        on_bug: called where a receiver failed.
    """

    def __init__(
        self, methods: Methods, limits: BodyLimits, margin_bytes: int, on_bug: Callable[[], None]
    ) -> None:
        self.limits = limits
        self.margin_bytes = margin_bytes
        self.on_bug = on_bug
        self.known_blocks: dict[bytes, str] = {}
        self.open_calls = 0
        self._methods = methods
        self._connections: set[Connection] = set()
        self._listeners: list[asyncio.Server] = []
        self._changed = asyncio.Event()  # a call or a connection has ended
        self._logged_s = -_LOG_EVERY_S

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; the port. Raises HeteroGatewayError where it cannot be used."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(
                lambda: Connection(self), host, port, ssl=tls, backlog=_BACKLOG
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
        for connection in list(self._connections):
            connection.drain()
        await self._until(lambda: not self.open_calls, grace_s)
        for connection in list(self._connections):
            connection.close()
        await self._until(lambda: not self._connections, _CLOSE_S)

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()

    # What connections ask

    @property
    def has_room(self) -> bool:
        return self.open_calls < MAX_CALLS

    def add(self, connection: Connection) -> bool:
        """Whether there may be one more."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def discard(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._changed.set()

    def call_ended(self) -> None:
        self.open_calls -= 1
        self._changed.set()

    def remember_block(self, block: bytes, path: str) -> None:
        if len(block) <= _MAX_BLOCK_BYTES:
            if len(self.known_blocks) >= _MAX_BLOCKS:
                self.known_blocks.clear()
            self.known_blocks[block] = path

    def route(self, path: str, call: Call) -> None:
        """Give a new call its receiver."""
        method = self._methods.get(path)
        if method is None:
            call.receiver = NOBODY
            call.finish(Status.UNIMPLEMENTED, "there is no such method")
        else:
            call.receiver = method(call)

    def on_misuse(self, error: ProtocolError) -> None:
        """A peer broke the protocol."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning("a data plane's connection ends: %s: %s", error.code.name, error)


class _Nobody:
    """Of a call that was answered at once."""

    def message(self, data: bytes) -> None: ...

    def refuse(self, refusal: object) -> None: ...

    def half_closed(self) -> None: ...

    def lost(self) -> None: ...


NOBODY: Receiver = _Nobody()
