"""One stream of HTTP/2 as a gRPC call: messages in, messages out.

What a call does with its messages is its receiver's business; here they are cut out of DATA frames
and kept within limits, and what is sent waits for the peer's windows. States, events down:

    event              open              half-closed       finished            over
    -----------------  ----------------  ----------------  ------------------  -------
    message            receiver.message  –                 dropped             –
    too long, no room  receiver.refuse,  –                 –                   –
                       the rest dropped
    peer's END_STREAM  half-closed:      –                 over                –
                       .half_closed
    send               sent, or kept     as open           dropped             dropped
    finish             finished          over              –                   –
    reset, or the      over:             over:             over                –
    connection's end   receiver.lost     receiver.lost
    a bug in receiver  finished: INTERNAL, and receiver.lost                   –

After ``lost`` a receiver hears no more.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.answers import too_large
from hetero_gateway.picker.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    MESSAGE_HEAD,
    MESSAGE_HEAD_BYTES,
    RESPONSE_HEAD,
    TRAILERS_OK,
    ErrorCode,
    Status,
    reset,
    trailers,
    window_update,
)

if TYPE_CHECKING:
    from hetero_gateway.picker.http2.connection import Connection

_log = logging.getLogger(__name__)

# What a peer may send on one stream before it hears of more room, which it does as soon as half is
# used: what is kept is bounded by the budget of bodies, not by windows.
STREAM_WINDOW_BYTES = 2**20


class Receiver(Protocol):
    """What a call's messages are for."""

    def message(self, data: bytes) -> None: ...

    def refuse(self, refusal: Refusal) -> None:
        """A message is too long, or there is no room for it; nothing more is coming."""
        ...

    def half_closed(self) -> None:
        """The peer sends nothing more."""
        ...

    def lost(self) -> None:
        """The call is over, and not by ``finish``."""
        ...


class Call:
    """A stream. ``receiver`` is to be set by who opens it."""

    __slots__ = (
        "_connection",
        "_dropping",
        "_ending",
        "_head_sent",
        "_id",
        "_partial",
        "_pending",
        "_reserved_bytes",
        "_window",
        "finished",
        "half_closed",
        "receiver",
        "room",
    )

    receiver: Receiver

    def __init__(self, connection: Connection, stream_id: int, window: int) -> None:
        self._connection = connection
        self._id = stream_id
        self._window = window  # the peer's: for what is sent
        self.room = STREAM_WINDOW_BYTES  # ours: what the peer may send
        self._partial: bytearray | None = None
        self._reserved_bytes = 0  # of the budget, for a message that is not complete
        self._pending: deque[bytes] | None = None
        self._ending: bytes | None = None  # the trailers, while something is pending
        self._head_sent = False
        self._dropping = False
        self.half_closed = False
        self.finished = False

    def __repr__(self) -> str:
        state = "finished" if self.finished else "half-closed" if self.half_closed else "open"
        return f"<Call {self._id}, {state}>"

    @property
    def peer(self) -> Connection:
        return self._connection

    # From the peer

    def take(self, data: bytes) -> None:
        """A DATA frame's contents."""
        if self._partial is None and len(data) >= MESSAGE_HEAD_BYTES:
            compressed, size = MESSAGE_HEAD.unpack_from(data)
            if size == len(data) - MESSAGE_HEAD_BYTES and not compressed and not self._dropping:
                self._deliver(data[MESSAGE_HEAD_BYTES:])
                return
        if not self._dropping and not self.finished:
            self._gather(data)

    def _gather(self, data: bytes) -> None:
        """Put together a message that comes in several frames, or several that come in one."""
        partial = self._partial
        if partial is None:
            partial = self._partial = bytearray(data)
        else:
            partial += data
        while len(partial) >= MESSAGE_HEAD_BYTES:
            compressed, size = MESSAGE_HEAD.unpack_from(partial)
            if compressed:
                self.finish(Status.UNIMPLEMENTED, "compressed messages are not understood")
                self._over()
                return
            end = MESSAGE_HEAD_BYTES + size
            if len(partial) < end:
                self._reserve(size)
                return
            self._release()
            whole = bytes(memoryview(partial)[MESSAGE_HEAD_BYTES:end])
            del partial[:end]
            self._deliver(whole)
            if self._dropping:
                return
        if not partial:
            self._partial = None

    def _reserve(self, size: int) -> None:
        """Keep room for a long message: the peer has it, so that it comes at once."""
        limits = self._connection.server.limits
        if self._reserved_bytes or size <= limits.small_bytes:
            return
        try:
            if size > limits.max_body_bytes + self._connection.server.margin_bytes:
                raise too_large(limits.max_body_bytes)
            limits.check_room(size)
        except Refusal as refusal:
            self._drop()
            self._guarded_refuse(refusal)
        else:
            limits.buffered_bytes += size
            self._reserved_bytes = size

    def _release(self) -> None:
        if self._reserved_bytes:
            self._connection.server.limits.buffered_bytes -= self._reserved_bytes
            self._reserved_bytes = 0

    def _drop(self) -> None:
        self._dropping = True
        self._partial = None
        self._release()

    def _deliver(self, data: bytes) -> None:
        self._connection.credit()
        if self.finished:
            return
        try:
            self.receiver.message(data)
        except Exception:
            self._broke()

    def _guarded_refuse(self, refusal: Refusal) -> None:
        try:
            self.receiver.refuse(refusal)
        except Exception:
            self._broke()

    def end(self) -> None:
        """The peer's END_STREAM."""
        self.half_closed = True
        if self.finished:
            self._forget()
            return
        try:
            self.receiver.half_closed()
        except Exception:
            self._broke()

    def lose(self) -> None:
        """Reset by the peer, or the connection is lost."""
        self._forget()
        if not self.finished:
            self.finished = True
            self._over()

    def _over(self) -> None:
        self._drop()
        try:
            self.receiver.lost()
        except Exception:
            _log.exception("%r: its receiver failed at its end", self)

    def _broke(self) -> None:
        """The boundary of a call: a bug costs the one that met it."""
        _log.exception("%r: its receiver failed", self)
        self._connection.server.on_bug()
        if not self.finished:
            self.finish(Status.INTERNAL, "the picker failed")
        self._over()

    # To the peer

    def send(self, message: bytes) -> None:
        """Send a message that has its head (``frames.message``); kept while there is no window."""
        if self.finished:
            return
        connection, size = self._connection, len(message)
        if (
            self._pending is None
            and size <= MAX_FRAME_BYTES
            and size <= self._window
            and size <= connection.window
        ):
            self._window -= size
            connection.window -= size
            self._begin()
            connection.write(HEAD.pack(size << 8 | DATA, 0, self._id) + message)
            return
        if self._pending is None:
            self._pending = deque()
        self._pending.append(message)
        self.push()

    def finish(self, status: Status = Status.OK, detail: str = "") -> None:
        """End the call, behind what was sent. Its receiver is not called any more."""
        if self.finished:
            return
        self.finished = True
        fields = TRAILERS_OK if status is Status.OK else trailers(status, detail)
        if not self._head_sent:
            fields = RESPONSE_HEAD + fields
        self._ending = (
            HEAD.pack(len(fields) << 8 | HEADERS, END_HEADERS | END_STREAM, self._id) + fields
        )
        if self._pending is None:
            self._end_sending()

    def _begin(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            self._connection.write(
                HEAD.pack(len(RESPONSE_HEAD) << 8 | HEADERS, END_HEADERS, self._id) + RESPONSE_HEAD
            )

    def push(self) -> None:
        """Send what is pending, as far as the windows go."""
        pending, connection = self._pending, self._connection
        if pending is None:
            return
        self._begin()
        while pending:
            first = pending[0]
            size = min(len(first), MAX_FRAME_BYTES, self._window, connection.window)
            if size <= 0:
                connection.blocked[self] = None
                return
            self._window -= size
            connection.window -= size
            connection.write(HEAD.pack(size << 8 | DATA, 0, self._id) + first[:size])
            if size == len(first):
                pending.popleft()
            else:
                pending[0] = first[size:]
        self._pending = None
        connection.blocked.pop(self, None)
        if self._ending is not None:
            self._end_sending()

    def _end_sending(self) -> None:
        assert self._ending is not None
        self._connection.write(self._ending)
        self._ending = None
        if self.half_closed:
            self._forget()

    def widen(self, more_bytes: int) -> None:
        """The peer's window for this stream grows, or shrinks."""
        self._window += more_bytes
        if self._window > MAX_WINDOW_BYTES:
            self._connection.write(reset(self._id, ErrorCode.FLOW_CONTROL_ERROR))
            self.lose()
            return
        self.push()

    def consume(self, size: int, *, ends: bool) -> None:
        """The peer has used so much of the window that it was given."""
        self.room -= size
        if self.room < STREAM_WINDOW_BYTES // 2 and not ends:
            self._connection.write(window_update(self._id, STREAM_WINDOW_BYTES - self.room))
            self.room = STREAM_WINDOW_BYTES

    def _forget(self) -> None:
        self._release()
        self._pending = None
        self._connection.forget(self._id, self)
