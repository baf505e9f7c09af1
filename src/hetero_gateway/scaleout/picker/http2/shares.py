"""One connection's part of what all of them may keep in memory.

Two budgets: long bodies count against the gateway's own (``BodyLimits``), and everything else that
is kept for a peer, calls and short messages and what it does not read, against the server's. Of
both, a connection may have only a part: as much as it leaves to the others, so that however many
connections take what they can get, there is something left for the next one.
"""

from __future__ import annotations

from collections.abc import Sized

from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.scaleout.picker.http2.commons import Commons

# Of a connection, besides long bodies. With what Python adds, and its calls, that is below 50 MB.
HELD_BYTES = 24 * 2**20
# Of all connections of a server together.
MAX_HELD_BYTES = 256 * 2**20
# What a call keeps by itself, from its head to its end: measured, with the request that it carries.
CALL_BYTES = 6 * 1024


def no_room() -> Refusal:
    return Refusal(
        503,
        "too_many_bytes_buffered",
        "The picker holds as many bytes for this data plane's connection as it may.",
        kind="server_error",
        retry_after_s=2,
    )


class Share(BodyLimits):
    """What one connection holds; its long bodies are counted as ``BodyLimits`` counts them.

    Args:
        server: has the gateway's limits of long bodies, and counts what all connections hold.
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
        """Count it, if there is room or not; a negative number gives it back."""
        self.held_bytes += more_bytes
        self._server.held_bytes += more_bytes
