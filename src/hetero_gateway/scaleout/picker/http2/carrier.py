"""A connection as its calls see it: frames out, the peer's windows, and what it may use.

What the calls write in a turn of the event loop goes out in one write. Here is no frame that comes
in: those are of whoever is derived from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Protocol

from hetero_gateway.scaleout.picker.http2.commons import Commons
from hetero_gateway.scaleout.picker.http2.reader import Reader
from hetero_gateway.scaleout.picker.http2.shares import Share

# What frames without a message cost: of a connection's first seconds, before its messages earn some
# (calls that are refused cost two).
CREDITS = 4096
# Of what is pending, in a turn of the event loop.
PUSH_BYTES = 2**17
DEFAULT_WINDOW_BYTES = 65535


class Blocked(Protocol):
    """A call that waits until it may send."""

    def push(self) -> None:
        """Send what waits, as far as the windows go."""


class Carrier(Reader):
    """What carries calls.

    Args:
        server: what it has in common with the others.
        calls: those that are open.
    """

    def __init__(self, server: Commons, calls: Sized) -> None:
        super().__init__(server.turns)
        self.server = server
        # For its users: whether the peer reports on responses; until when that is not relied on.
        self.reports = False
        self.stray_until_s = 0.0
        self.share = Share(server.limits, server.margin_bytes, server.pool, calls)
        self.address = ""
        self.heard = False  # a message, in this tick
        self.credits = CREDITS
        # The peer's windows, for what is sent: the connection's, each call's at its beginning.
        self.window = self.initial_window = DEFAULT_WINDOW_BYTES
        # Calls that wait, for the connection's window or for the socket, and for their own.
        self.blocked: dict[Blocked, None] = {}
        self.narrow: dict[Blocked, None] = {}
        self.push_bytes = PUSH_BYTES  # what may still be sent in this turn, of what is pending
        self._loop = asyncio.get_running_loop()
        self._unblock_due = False
        self._widened = False  # the initial window, and calls wait for that
        self._flush_due = False

    def forget(self, stream_id: int, call: Blocked) -> None:
        """A call is over."""
        raise NotImplementedError

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
        """Let the calls that wait look again, once in a turn of the event loop."""
        if not (self._unblock_due or self._stalled):
            self._unblock_due = True
            self._loop.call_soon(self._unblock)

    def _unblock(self) -> None:
        """Let the calls that wait send what they can, in turn."""
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
