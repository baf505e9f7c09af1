"""Request bodies on their way in: kept once, and bounded, individually and together.

A body that fits in ``SMALL_BYTES`` costs nothing but its parts. A longer one is written into one
buffer, so that there is never a second copy of it, and counted against a budget of all requests.
When that is spent, the next request gets 503 and a Retry-After, already at its head if that states
its length. Pausing would be worse: clients that send slowly, or never finish, could fill the budget
with incomplete bodies, and none of them would ever end. Small requests are never refused because of
long ones; the limit on connections bounds their total.

Bytes count when they arrive, not when they are announced: an announcement costs a client nothing.
"""

import io

from hetero_gateway.errors import Refusal

# Nearly all prompts are shorter. One read of a socket returns this much.
SMALL_BYTES = 1 << 16
_RETRY_AFTER_S = 2
# This many pieces are kept as they came.
_FEW = 16


class BodyLimits:
    """The limits of one body and of all buffered ones.

    Args:
        max_body_bytes: of one.
        max_buffered_bytes: of all long ones together, from their first byte until an instance has
            begun to answer.
    """

    __slots__ = ("buffered_bytes", "max_body_bytes", "max_buffered_bytes", "small_bytes")

    def __init__(self, max_body_bytes: int, max_buffered_bytes: int) -> None:
        self.set(max_body_bytes, max_buffered_bytes)
        self.buffered_bytes = 0

    def set(self, max_body_bytes: int, max_buffered_bytes: int) -> None:
        """Apply other limits from now on."""
        self.max_body_bytes = max_body_bytes
        # One body of the maximum size must have room, at least when it is alone.
        self.max_buffered_bytes = max(max_buffered_bytes, max_body_bytes)
        self.small_bytes = min(SMALL_BYTES, max_body_bytes)

    def check(self, size_bytes: int) -> None:
        """Raises Refusal: 413, or 503 if there is no room for this many bytes now."""
        if size_bytes <= self.small_bytes:
            return
        self.check_size(size_bytes)
        self.check_room(size_bytes)

    def check_size(self, size_bytes: int) -> None:
        """Raises Refusal: 413."""
        if size_bytes > self.max_body_bytes:
            detail = f"The request body is larger than {self.max_body_bytes} bytes."
            raise Refusal(413, "request_too_large", detail)

    def check_room(self, more_bytes: int) -> None:
        """Raises Refusal: 503."""
        if self.buffered_bytes + more_bytes > self.max_buffered_bytes:
            raise Refusal(
                503,
                "too_many_bytes_buffered",
                "The gateway already buffers as many bytes of requests as it may.",
                kind="server_error",
                retry_after_s=_RETRY_AFTER_S,
            )


class BodyBuffer:
    """One body. ``size_bytes``: received so far."""

    __slots__ = ("_held_bytes", "_limits", "_long", "_parts", "size_bytes")

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._parts: list[bytes] = []
        self._long: io.BytesIO | None = None
        self._held_bytes = 0
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        """Raises Refusal: 413 or 503; nothing more may be added then."""
        size = self.size_bytes = self.size_bytes + len(data)
        if size <= self._limits.small_bytes and self._long is None and len(self._parts) < _FEW:
            self._parts.append(data)
            return
        if size > self._limits.small_bytes:
            self._count(size - self._held_bytes)
        if self._long is None:
            # Also if it comes in many pieces: each would be an object of its own.
            self._long = io.BytesIO()
            self._long.writelines(self._parts)
            self._parts = []
        self._long.write(data)

    def _count(self, more_bytes: int) -> None:
        limits = self._limits
        try:
            limits.check_size(self.size_bytes)
            limits.check_room(more_bytes)
        except Refusal:
            self.release()
            raise
        limits.buffered_bytes += more_bytes
        self._held_bytes += more_bytes

    def take(self) -> bytes:
        """The whole body; it counts as buffered until ``release``."""
        if self._long is not None:
            # The buffer's own bytes, not a copy.
            body, self._long = self._long.getvalue(), None
            return body
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def holds(self) -> bool:
        """Whether it counts as buffered."""
        return self._held_bytes > 0

    def release(self) -> None:
        """Release it: it is no longer needed."""
        self._limits.buffered_bytes -= self._held_bytes
        self._held_bytes = 0
        self._long = None
        self._parts = []
