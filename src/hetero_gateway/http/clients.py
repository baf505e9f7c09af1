"""Time limits for clients, and the limit on their number.

One timer watches all connections: each is examined once in a period, an eighth of them at a time,
so that ten thousand idle ones cost half a millisecond now and then. Nothing is armed or cancelled
per request; a connection counts its turns and its bytes, and one that has not moved between two
looks may have timed out. A time-out is late by up to two periods of 2 s at most.

Whether a client reads is asked of the kernel: how many bytes it has acknowledged. The amount still
to be written says little, since a growing answer hides one that is being read.
"""

import asyncio
import enum
import logging
import resource
import socket
import struct
from collections import Counter
from typing import NamedTuple

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.server_config import TimeoutsConfig

_log = logging.getLogger(__name__)

_PARTS = 8
_MAX_PERIOD_S = 2.0
# How long a connection that is given up is still read and drained. If it were closed at once, it
# would be reset, and its client might never see the answer.
LINGER_S = 5.0
# A body may take its time-out, plus a second for this many bytes of it (Apache's MinRate).
_LEAST_BODY_BYTES_PER_S = 500
# Above this share of the connections, idle ones are closed sooner.
_CROWDED = 0.9
_CROWDED_IDLE_S = 5.0
# Limit of a WebSocket message. Audio in base64; vLLM takes no more than 25 MB of it.
MOST_MESSAGE_BYTES = 1 << 24
# Descriptors used for neither clients nor instances: the loop's, files, probes, refusals.
_OWN_DESCRIPTORS = 128
_MOST_CONNECTIONS = 100_000
# Clients above the limit that are being answered 503; further ones are closed without an answer.
_MOST_TURNED_AWAY = 32

# tcpi_bytes_acked of Linux's struct tcp_info (RFC 4898): a u64 behind eight u8, 24 u32, two u64.
_TCP_INFO_BYTES = 192
_BYTES_ACKED = struct.Struct("@Q")
_BYTES_ACKED_AT = 120


class Phase(enum.Enum):
    """What a connection is waiting for."""

    IDLE = "idle"  # a request
    HEAD = "head"  # the rest of a head
    BODY = "body"  # the rest of a body
    SERVING = "serving"  # its answer's end
    CLOSING = "closing"  # its client's end: what comes is dropped


class Watched:
    """A connection as its watch sees it: these slots record what it has seen."""

    __slots__ = (
        "acked_bytes", "admitted", "moved_s", "part", "seen_bytes", "seen_turn", "since_s",
        "stalled_s",
    )  # fmt: skip

    transport: asyncio.Transport
    body_bytes: int  # of the request, so far

    part: int
    admitted: bool
    seen_turn: int
    seen_bytes: int
    since_s: float
    moved_s: float
    stalled_s: float
    acked_bytes: int

    @property
    def phase(self) -> Phase:
        raise NotImplementedError

    @property
    def turn(self) -> int:
        """Changes with each phase."""
        raise NotImplementedError

    @property
    def reading_paused(self) -> bool:
        raise NotImplementedError

    def expire(self) -> None:
        """Time out: what it waits for did not come in time."""
        self.transport.abort()


class ConnectionLimits(NamedTuple):
    """Time limits of each connection, and the limit on their number."""

    timeouts: TimeoutsConfig
    max_connections: int


def client_limits(config: GatewayConfig) -> ConnectionLimits:
    """The configured limits, given the descriptors that the process may open."""
    most = config.server.max_connections
    return ConnectionLimits(config.timeouts, default_max_connections() if most is None else most)


def raise_descriptor_limit() -> None:
    """Raise the process's descriptor limit as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # an infinite limit is not allowed everywhere; the present one must do


def check_descriptor_limit() -> None:
    """Raises ConfigError: the process may open too few files to serve anyone."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < _OWN_DESCRIPTORS:
        raise ConfigError(
            f"this process may open {hard} files, and a gateway needs {_OWN_DESCRIPTORS} at "
            "least, and two for each client: raise the limit (ulimit -n 65536; LimitNOFILE= in "
            "systemd; --ulimit nofile=65536 of a container)"
        )


def default_max_connections(descriptors: int | None = None) -> int:
    """Half of the descriptors: each client served has another one open to an instance.

    Args:
        descriptors: how many the process may open; None: its present limit.
    """
    if descriptors is None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, (descriptors - _OWN_DESCRIPTORS) // 2))


class Watch:
    """Watches the connections of one server.

    Args:
        limits: their limits.
        timeouts: counts those that timed out, by what was waited for; ``write`` among them.
        refused: counts refusals for a head, its framing, or the number of connections, by status.

    ``ending``: the server is shutting down; each connection's present request is its last one.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        timeouts: Counter[str] | None = None,
        refused: Counter[int] | None = None,
    ) -> None:
        self.set_limits(limits)
        self.timeouts: Counter[str] = Counter() if timeouts is None else timeouts
        self.refused: Counter[int] = Counter() if refused is None else refused
        self.ending = False
        self._parts: list[set[Watched]] = [set() for _ in range(_PARTS)]
        self._next_part = 0
        self._added = 0
        self._count = self._served = 0
        self._timer: asyncio.TimerHandle | None = None

    def set_limits(self, limits: ConnectionLimits) -> None:
        """Apply other limits from now on, to existing connections as well."""
        self.limits = limits
        each = limits.timeouts
        shortest_s = min(each.header_s, each.body_s, each.write_s, each.keep_alive_s)
        self._tick_s = min(_MAX_PERIOD_S, max(0.08, shortest_s / 8)) / _PARTS

    def __len__(self) -> int:
        """The number of connections served, without those that are being refused."""
        return self._served

    def add(self, connection: Watched) -> bool:
        """Watch a connection; returns whether it may be served, or is one too many."""
        may = connection.admitted = self._served < self.limits.max_connections
        if may:
            self._served += 1
        self._count += 1
        connection.part = self._added % _PARTS
        self._added += 1
        self._parts[connection.part].add(connection)
        connection.seen_turn = -1
        connection.stalled_s = 0.0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._look)
        return may

    @property
    def may_answer(self) -> bool:
        """Whether a connection above the limit gets an answer, or none."""
        return self._count - self._served <= _MOST_TURNED_AWAY

    def discard(self, connection: Watched) -> None:
        if connection.admitted:
            self._served -= 1
        self._count -= 1
        self._parts[connection.part].discard(connection)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        part = self._parts[self._next_part]
        self._next_part = (self._next_part + 1) % _PARTS
        self._timer = loop.call_later(self._tick_s, self._look) if self._count else None
        for connection in tuple(part):
            try:
                self._look_at(connection, now_s)
            except Exception:
                # The boundary of a connection: the others are watched all the same.
                _log.exception("a connection cannot be checked")
                connection.transport.abort()

    def _look_at(self, connection: Watched, now_s: float) -> None:
        if connection.transport.get_write_buffer_size():
            if self._stalled(connection, now_s):
                self.timeouts["write"] += 1
                connection.transport.abort()
                return
        elif connection.stalled_s:
            connection.stalled_s = 0.0
        phase = connection.phase
        if connection.turn != connection.seen_turn:
            connection.seen_turn = connection.turn
            connection.since_s = connection.moved_s = now_s
            connection.seen_bytes = connection.body_bytes
        elif phase is not Phase.SERVING and self._late(connection, phase, now_s):
            self.timeouts[phase.value] += 1
            connection.expire()

    def _late(self, connection: Watched, phase: Phase, now_s: float) -> bool:
        limits, taken_s = self.limits.timeouts, now_s - connection.since_s
        if phase is Phase.IDLE:
            if self._served < _CROWDED * self.limits.max_connections:
                return taken_s >= limits.keep_alive_s
            # Idle connections make room, so that they cannot keep everyone else out (as in nginx).
            return taken_s >= min(limits.keep_alive_s, _CROWDED_IDLE_S)
        if phase is Phase.HEAD:
            return taken_s >= limits.header_s
        if phase is Phase.CLOSING:
            return taken_s >= min(LINGER_S, limits.body_s)
        count = connection.body_bytes
        if connection.reading_paused:
            # The client is waiting for us.
            connection.since_s = connection.moved_s = now_s
            return False
        if count != connection.seen_bytes:
            connection.seen_bytes, connection.moved_s = count, now_s
        return (
            now_s - connection.moved_s >= limits.body_s
            or taken_s >= limits.body_s + count / _LEAST_BODY_BYTES_PER_S
        )

    def _stalled(self, connection: Watched, now_s: float) -> bool:
        acked = acknowledged_bytes(connection.transport)
        if not connection.stalled_s or acked != connection.acked_bytes:
            connection.acked_bytes = acked
            connection.stalled_s = now_s
            return False
        return now_s - connection.stalled_s >= self.limits.timeouts.write_s


def acknowledged_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the peer's kernel has acknowledged; if unknown, those written minus those
    waiting."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    try:
        assert connection is not None
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        count: int = _BYTES_ACKED.unpack_from(info, _BYTES_ACKED_AT)[0]
        return count
    except (AssertionError, AttributeError, OSError, struct.error):
        return -transport.get_write_buffer_size()
