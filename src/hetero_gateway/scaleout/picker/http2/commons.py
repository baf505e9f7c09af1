"""What all connections of a server have in common: their places, turns, memory and time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine

from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.scaleout.picker.http2.blocks import KnownBlocks
from hetero_gateway.scaleout.picker.http2.frames import ProtocolError
from hetero_gateway.scaleout.picker.http2.register import Member, Register
from hetero_gateway.scaleout.picker.http2.shares import Pool
from hetero_gateway.scaleout.picker.http2.turns import Turns

# How often it is looked for what is late, and how many calls are looked at in one go (1 ms).
TICK_S = 1.0
_LOOKED_AT_ONCE = 4096
_LOG_EVERY_S = 10.0

_log = logging.getLogger(__name__)


class Commons:
    """Knows all connections of a server, and what each of them may use.

    Args:
        limits: the budget of long messages.
        margin_bytes: what a message may be longer than a body.
        on_bug: called where a receiver failed.
    """

    def __init__(self, limits: BodyLimits, margin_bytes: int, on_bug: Callable[[], None]) -> None:
        self.limits = limits
        self.margin_bytes = margin_bytes
        self.on_bug = on_bug
        self.known_blocks: KnownBlocks = {}
        self.pool = Pool()
        self.turns = Turns()
        self.register = Register()
        self.tick: int = 0  # seconds, while there are connections
        self._ticking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # a call or a connection has ended
        self._logged_s = -_LOG_EVERY_S

    # What connections ask

    @property
    def open_calls(self) -> int:
        return self.pool.open_calls

    def add(self, connection: Member, handshake: Member | None = None) -> bool:
        """Whether there may be one more, or it may take its handshake's place."""
        if handshake is not None:
            return self.register.replace(handshake, connection)
        if not self.register.add(connection):
            self._warn("a data plane's connection is refused: there are as many as there may be")
            return False
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._look)
        return True

    def discard(self, connection: Member) -> None:
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

    def _look_at(self, connections: list[Member]) -> None:
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

    def on_misuse(self, error: ProtocolError) -> None:
        """A peer broke the protocol."""
        self._warn(f"a data plane's connection ends: {error.code.name}: {error}")

    def _warn(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning("%s", text)

    # What its server does

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
