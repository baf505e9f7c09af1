"""A connection as its calls see it: bytes in by turns, frames out, the peer's windows.

Incoming data is read at once, for a time slice. The rest, and everything of a connection that has
used more than its share of CPU, waits for its turn (``commons``). While a peer does not read our
answers, nothing of it is read. All frames of one turn of the event loop go out in one write. Frames
are interpreted in ``connection``, not here.
"""

import asyncio
import random
import time
from collections.abc import Sized
from typing import Protocol

from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.scaleout.picker.http2 import commons
from hetero_gateway.scaleout.picker.http2.commons import Commons, Occupant
from hetero_gateway.scaleout.picker.http2.frames import ProtocolError

# How much data may wait for its turn; above that the socket is not read.
BACKLOG_BYTES = 2**16
# Of short reads, with a request or two, one in 2 ** UNMETERED_BITS / 2 is metered for all.
SHORT_BYTES = 1024
UNMETERED_BITS = 5
# Cost of frames without a message: credit of a connection's first seconds, before its messages earn
# some (refused calls cost two).
CREDITS = 4096
# Pending bytes sent in a turn of the event loop.
PUSH_BYTES = 2**17
DEFAULT_WINDOW_BYTES = 65535
# Of a connection, besides long bodies. With Python's overhead and its calls, that is below 50 MB.
HELD_BYTES = 24 * 2**20
# Of all connections of a server together.
MAX_HELD_BYTES = 256 * 2**20
# A call's own memory, from its head to its end: measured, with the request that it carries.
CALL_BYTES = 6 * 1024
_clock_s = time.perf_counter


def no_room() -> Refusal:
    return Refusal(
        503,
        "too_many_bytes_buffered",
        "The picker already buffers as many bytes for this connection as it may.",
        kind="server_error",
        retry_after_s=2,
    )


class Share(BodyLimits):
    """The memory that one connection holds, and may hold: its part of two budgets.

    Long bodies count against the gateway's own (``BodyLimits``), and everything else kept for a
    peer, calls, short messages and unread answers, against the server's. Of both, a connection
    may have only as much as it leaves to the others, so that however many connections take all
    they can, something is left for the next one.

    Args:
        server: has the gateway's limits of long bodies, and the total of all connections.
        calls: the connection's, each of which counts as ``CALL_BYTES``.
    """

    __slots__ = ("_calls", "_limits", "_long_bytes", "_server", "held_bytes")

    def __init__(self, server: Commons, calls: Sized) -> None:
        self._server = server
        self._limits = server.limits
        self._calls = calls
        self._long_bytes = 0
        self.held_bytes = 0

    # Long bodies: the limits are the gateway's, which may change (a reload).

    @property
    def max_body_bytes(self) -> int:  # type: ignore[override]
        return self._limits.max_body_bytes

    @property
    def small_bytes(self) -> int:  # type: ignore[override]
        return self._limits.small_bytes

    @property
    def buffered_bytes(self) -> int:
        return self._long_bytes

    @buffered_bytes.setter
    def buffered_bytes(self, size_bytes: int) -> None:
        self._limits.buffered_bytes += size_bytes - self._long_bytes
        self._long_bytes = size_bytes

    def check_room(self, more_bytes: int) -> None:
        limits = self._limits
        limits.check_room(more_bytes)
        most = max(
            limits.max_body_bytes + self._server.margin_bytes, limits.max_buffered_bytes // 2
        )
        if self._long_bytes + more_bytes > most:
            raise no_room()

    # Everything else

    def has_room(self, more_bytes: int) -> bool:
        """Whether this connection may hold so much more."""
        server = self._server
        mine = self.held_bytes + CALL_BYTES * len(self._calls) + more_bytes
        all_bytes = server.held_bytes + CALL_BYTES * server.open_calls + more_bytes
        return mine <= HELD_BYTES and mine <= MAX_HELD_BYTES - all_bytes

    def hold(self, more_bytes: int) -> None:
        """Count it, whether there is room or not; a negative number gives it back."""
        self.held_bytes += more_bytes
        self._server.held_bytes += more_bytes


class Carried(Protocol):
    """A call, as its connection drives it."""

    def go_on(self) -> None:
        """Deliver messages for which the last slice had no time."""

    def end(self) -> None:
        """The peer sends nothing more."""

    def push(self) -> None:
        """Send waiting data, as far as the windows allow."""


class Carrier(Occupant, asyncio.Protocol):
    """Carries calls, and waits for its turns.

    Args:
        server: the parts shared with other connections.
        calls: the open ones.
    """

    _transport: asyncio.Transport

    def __init__(self, server: Commons, calls: Sized) -> None:
        self.server = server
        # For its users: whether the peer reports on responses; until when that is not relied on.
        self.reports = False
        self.stray_until_s = 0.0
        self.share = Share(server, calls)
        self.credits = CREDITS
        # The peer's windows, for outgoing data: the connection's, and each call's initial one.
        self.window = self.initial_window = DEFAULT_WINDOW_BYTES
        # Calls that wait, for the connection's window or for the socket, and for their own.
        self.blocked: dict[Carried, None] = {}
        self.narrow: dict[Carried, None] = {}
        self.push_bytes = PUSH_BYTES  # pending bytes that may still be sent in this turn
        self._loop = asyncio.get_running_loop()
        self._unblock_due = False
        self._widened = False  # the initial window has grown, and calls wait
        self._flush_due = False
        self._turns = server.turns
        self._rest = b""
        self._out: list[bytes] = []
        self._reading = False  # frames are being read
        self._until_s = 0.0  # the slice's end; 0: it is a short read
        # A call with undelivered messages of the last frame; whether it ends with them.
        self._behind: Carried | None = None
        self._behind_ends = False
        self._waits = False  # for its turn
        self._stalled = False  # the peer does not read
        self._paused = False  # the socket is not read
        self._is_closing = False
        # When it will be back within its share; unmetered reads, from now on and since the last
        # metered one.
        self._busy_s = 0.0
        self._unmetered = 0
        self._weight = 1

    # What is read, and what comes of it

    def _read(self, data: bytes) -> None:
        """Read the available frames, until ``_slice_is_over``; keep the ``_rest``."""
        raise NotImplementedError

    def _fail(self, error: ProtocolError) -> None:
        raise NotImplementedError

    def forget(self, stream_id: int, call: Carried) -> None:
        raise NotImplementedError

    # Called by the transport

    def pause_writing(self) -> None:
        self._stalled = True
        self._unmetered = 0
        self._read_socket()

    def resume_writing(self) -> None:
        self._stalled = False
        if self._rest or self._behind is not None:
            self._wait()
        self._read_socket()

    def data_received(self, data: bytes) -> None:
        if self._unmetered and len(data) <= SHORT_BYTES:
            # A short read, not worth a look at the clock.
            self._unmetered -= 1
            self._reading = True
            try:
                self._read(data)
            except ProtocolError as error:
                self._fail(error)
            finally:
                self._reading = False
            if self._out:
                self._flush()
            return
        if self._rest:
            data = self._rest + data
            self._rest = b""
        began_s = _clock_s()
        line, is_busy = self._turns, self._busy_s > began_s
        if not (self._waits or self._stalled) and (
            line.take(self) if is_busy else not line.is_full
        ):
            self._take(data, began_s)
        else:
            self._rest = data
            self._wait()
            if len(data) > BACKLOG_BYTES:
                self._read_socket()

    def read_on(self) -> None:
        self._waits = False
        if (self._rest or self._behind is not None) and not (self._stalled or self._is_closing):
            data, self._rest = self._rest, b""
            self._take(data, _clock_s())
        if self._paused:
            self._read_socket()

    def _take(self, data: bytes, began_s: float) -> None:
        """Read for one slice."""
        is_short = len(data) <= SHORT_BYTES
        self._reading = True
        self._until_s = began_s + commons.SLICE_S
        try:
            if self._behind is not None:
                self._catch_up(self._behind)
            if self._behind is None:
                self._read(data)
            else:
                self._rest = data
        except ProtocolError as error:
            self._fail(error)
        finally:
            self._reading = False
            self._until_s = 0.0
        if self._out:
            self._flush()
        now_s = _clock_s()
        used_s = now_s - began_s
        self._turns.spent_s += used_s
        earliest_s = began_s - commons.BURST_S / commons.SHARE
        self._busy_s = max(self._busy_s, earliest_s) + used_s / commons.SHARE * (
            self._weight if is_short else 1
        )
        if self._busy_s > now_s or self._waits or self._rest:
            self._unmetered, self._weight = 0, 1
        elif is_short:
            # Random, so that a peer cannot know how many are not metered.
            self._unmetered = random.getrandbits(UNMETERED_BITS)
            self._weight = self._unmetered + 1

    def has_to_wait(self, call: Carried) -> bool:
        """Whether the slice is over in the middle of a frame: ``call`` continues in the next
        one."""
        if not self._until_s or _clock_s() < self._until_s:
            return False
        self._behind = call
        self._wait()
        return True

    def _catch_up(self, call: Carried) -> None:
        self._behind = None
        call.go_on()
        if self._behind is None and self._behind_ends:
            self._behind_ends = False
            call.end()

    def _wait(self) -> None:
        if not (self._waits or self._stalled):
            self._waits = True
            self._turns.add(self, is_fresh=self._busy_s < _clock_s() - commons.BURST_S)

    def _read_socket(self) -> None:
        """Pause the socket while the peer does not read, or there is enough to process."""
        pauses = self._stalled or (self._waits and len(self._rest) > BACKLOG_BYTES)
        if pauses is not self._paused and not self._transport.is_closing():
            self._paused = pauses
            if pauses:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _slice_is_over(self) -> bool:
        return self._behind is not None or _clock_s() >= self._until_s

    # Frames out

    def write(self, data: bytes) -> None:
        """Send a frame at the end of this turn of the event loop, with all others."""
        if not self._reading and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        self._flush_due = False
        out = self._out
        if out and not self._transport.is_closing():
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()

    def unblock_soon(self) -> None:
        """Let the waiting calls look again, once in a turn of the event loop."""
        if not (self._unblock_due or self._stalled):
            self._unblock_due = True
            self._loop.call_soon(self._unblock)

    def _unblock(self) -> None:
        """Let the waiting calls send what they can, in turn."""
        self._unblock_due = False
        if self._stalled or self._is_closing:
            return
        self.push_bytes = PUSH_BYTES
        if self._widened:
            # Once for all frames, as it may be for a thousand calls.
            self._widened = False
            self.blocked.update(self.narrow)
            self.narrow.clear()
        blocked = self.blocked
        while blocked and self.window > 0 and self.push_bytes > 0:
            call = next(iter(blocked))
            del blocked[call]
            call.push()
