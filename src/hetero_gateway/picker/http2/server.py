"""Listens for data planes, and knows all that is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.gateway.wire.bodies import BodyLimits
from hetero_gateway.picker.http2.blocks import KnownBlocks
from hetero_gateway.picker.http2.calls import Call, Receiver
from hetero_gateway.picker.http2.connection import Connection
from hetero_gateway.picker.http2.frames import ProtocolError, Status
from hetero_gateway.picker.http2.handshakes import Handshake
from hetero_gateway.picker.http2.register import Register
from hetero_gateway.picker.http2.shares import Pool
from hetero_gateway.picker.http2.turns import Turns

# How often it is looked for what is late, and how many calls are looked at in one go (1 ms).
TICK_S = 1.0
_LOOKED_AT_ONCE = 4096
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
        self.known_blocks: KnownBlocks = {}
        self.pool = Pool()
        self.turns = Turns()
        self.register: Register[Connection | Handshake] = Register()
        self.tick: int = 0  # seconds, while there are connections
        self._ticking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods = methods
        self._listeners: list[asyncio.Server] = []
        self._changed = asyncio.Event()  # a call or a connection has ended
        self._logged_s = -_LOG_EVERY_S

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; the port. Raises HeteroGatewayError where it cannot be used."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(
                lambda: Connection(self) if tls is None else Handshake(self, tls),
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

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()

    # What connections ask

    @property
    def open_calls(self) -> int:
        return self.pool.open_calls

    def add(self, connection: Connection | Handshake, handshake: Handshake | None = None) -> bool:
        """Whether there may be one more, or it may take its handshake's place."""
        if handshake is not None:
            return self.register.replace(handshake, connection)
        if not self.register.add(connection):
            self._warn("a data plane's connection is refused: there are as many as there may be")
            return False
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._look)
        return True

    def discard(self, connection: Connection | Handshake) -> None:
        self.register.discard(connection)
        self._changed.set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Run what a connection has to wait for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look(self) -> None:
        self.tick += 1
        self._look_at(list(self.register))

    def _look_at(self, connections: list[Connection | Handshake]) -> None:
        """Let connections look for what is late, some in each turn of the event loop."""
        loop, looked_at = asyncio.get_running_loop(), 0
        while connections and looked_at < _LOOKED_AT_ONCE:
            looked_at += 1 + connections.pop().look(self.tick)
        if connections:
            loop.call_soon(self._look_at, connections)
        else:
            self._ticking = loop.call_later(TICK_S, self._look) if self.register else None

    def call_ended(self) -> None:
        self.pool.open_calls -= 1
        self._changed.set()

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
        self._warn(f"a data plane's connection ends: {error.code.name}: {error}")

    def _warn(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning("%s", text)


class _Nobody:
    """Of a call that was answered at once."""

    def message(self, data: bytes) -> None: ...

    def refuse(self, refusal: object) -> None: ...

    def half_closed(self) -> None: ...

    def lost(self) -> None: ...


NOBODY: Receiver = _Nobody()
