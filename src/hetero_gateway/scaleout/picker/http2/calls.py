"""One stream of HTTP/2 as a gRPC call: messages in, messages out.

The receiver of a call handles its messages; here they are cut out of DATA frames and kept within
limits, and outgoing ones wait for the peer's windows. States, with events as rows:

    event              open              half-closed       finished            over
    -----------------  ----------------  ----------------  ------------------  -------
    message            receiver.message  –                 dropped             –
    too long, no       receiver.refuse,  –                 –                   –
    room, too late     the rest dropped
    peer's END_STREAM  half-closed:      –                 over                –
                       .half_closed
    send               sent, or kept     as open           dropped             dropped
    no room for it     over: .lost       over: .lost       –                   –
    finish             finished          over              –                   –
    reset, or the      over:             over:             over                –
    connection's end   receiver.lost     receiver.lost
    late again, or     reset, over:      reset, over:      reset, over         –
    nothing read       receiver.lost     receiver.lost
    a bug in receiver  finished: INTERNAL, and receiver.lost                   –

After ``lost`` a receiver gets no more events.

Times are counted in the server's ticks, a second each, so that a call reads no clock.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.answers import too_large
from hetero_gateway.scaleout.picker.http2.carrier import CREDITS, Carrier, no_room
from hetero_gateway.scaleout.picker.http2.frames import (
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
    ProtocolError,
    Status,
    reset,
    trailers,
    window_update,
)

_log = logging.getLogger(__name__)

# How much a peer may send on one stream before it gets more room, which it does when half of it is
# used and its answers are read: data to be sent back (FULL_DUPLEX) is kept until then.
STREAM_WINDOW_BYTES = 2**18
UNREAD_BYTES = 2**16
# A request has four frames without a message, five with a window's update.
CREDITS_PER_MESSAGE = 16
# From a call's head to its first whole message. A data plane sends both in one packet.
FIRST_MESSAGE_S = 10
# From a message's beginning to its end, plus a second for each so many bytes: the data plane has
# all of it when it begins.
MESSAGE_S = 30
MESSAGE_BYTES_PER_S = 2**20
# How long a data plane may read nothing of a call, like clients of ``serve`` (timeouts.write_s).
UNREAD_S = 60
# From our last word to the peer's: both ends know by then that the call is over.
LINGER_S = 10
_NEVER = 2**62
_LATE = Refusal(408, "request_timeout", "The data plane did not send the request in time.")


class Receiver(Protocol):
    """Handles a call's messages."""

    def message(self, data: bytes) -> None: ...

    def refuse(self, refusal: Refusal) -> None:
        """A message is too long, too late, or there is no room for it; nothing more will come."""

    def half_closed(self) -> None:
        """The peer sends nothing more."""

    def lost(self) -> None:
        """The call is over, but not by ``finish``."""


class _Nobody:
    """The receiver before a call has its own, and after its end."""

    def message(self, data: bytes) -> None:
        pass

    def refuse(self, refusal: Refusal) -> None:
        pass

    def half_closed(self) -> None:
        pass

    def lost(self) -> None:
        pass


_NOBODY = _Nobody()


@dataclass(slots=True, eq=False)
class Unsent:
    """A call's outgoing messages, while there is no window for them.

    Attributes:
        piece, at: the message being sent, and how much of it was.
        unread_bytes: of the waiting messages, as counted.
        unread_tick: when the peer will have read nothing for too long.
        when_made: to be called once, when no more messages are made.
    """

    unread_tick: int
    piece: bytes = b""
    at: int = 0
    unread_bytes: int = 0
    when_made: Callable[[], None] | None = None
    _waiting: deque[bytes | Iterator[bytes]] = field(default_factory=deque)

    def add(self, message: bytes) -> None:
        self._waiting.append(message)
        self.unread_bytes += len(message)

    def add_each(self, messages: Iterator[bytes], when_made: Callable[[], None]) -> None:
        self._waiting.append(messages)
        self.when_made = when_made

    def take(self) -> int:
        """Move the next message to ``piece``; returns how many counted bytes have been sent."""
        sent_bytes = 0
        self.at, waiting = 0, self._waiting
        while waiting:
            first = waiting[0]
            if not isinstance(first, bytes):
                self.piece = next(first, b"")
                if self.piece:
                    break
                self.end_making()
            elif self.piece is first:
                sent_bytes = len(first)
                self.unread_bytes -= sent_bytes
                self.piece = b""
            else:
                self.piece = first
                break
            waiting.popleft()
        else:
            self.piece = b""
        return sent_bytes

    def end_making(self) -> None:
        """Report that the source of messages is no longer needed."""
        if self.when_made is not None:
            when_made, self.when_made = self.when_made, None
            when_made()


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """A stream. Whoever opens it sets ``receiver``."""

    _connection: Carrier
    _id: int
    # The deadline of the arriving message, and the receiver's own deadline.
    _message_tick: int
    _due_tick: int = _NEVER
    # The peer's window, for outgoing data: relative to its initial window for all calls, which may
    # change while this one is open.
    _offset: int = 0
    room: int = STREAM_WINDOW_BYTES  # ours: how much the peer may send
    _partial: bytearray | None = None
    _partial_bytes: int = 0  # of it, as counted; of these, beyond a small size:
    _long_bytes: int = 0
    _held_bytes: int = 0  # counted for the receiver
    _backlog: Unsent | None = None
    _ending: bytes | None = None  # the trailers, while something is pending
    _head_sent: bool = False
    _dropping: bool = False
    # Whether somebody waits for its result: then its connection is not closed for others.
    at_work: bool = False
    half_closed: bool = False
    finished: bool = False
    receiver: Receiver = _NOBODY

    def __repr__(self) -> str:
        state = "finished" if self.finished else "half-closed" if self.half_closed else "open"
        return f"<Call {self._id}, {state}>"

    @property
    def peer(self) -> Carrier:
        return self._connection

    # For its receiver

    def hold(self, more_bytes: int) -> None:
        """Count bytes that the receiver keeps until the call is over. Raises Refusal: 503, no
        room."""
        share = self._connection.share
        if not share.has_room(more_bytes):
            raise no_room()
        share.hold(more_bytes)
        self._held_bytes += more_bytes

    def let_go(self, left_bytes: int) -> None:
        if self._held_bytes > left_bytes:
            self._connection.share.hold(left_bytes - self._held_bytes)
            self._held_bytes = left_bytes

    def expect(self, within_s: int) -> None:
        """The receiver is told that the peer is late, unless it sets another deadline by then."""
        self._due_tick = self._in(within_s)

    def _in(self, within_s: int) -> int:
        return self._connection.server.tick + 1 + within_s

    # From the peer

    def take(self, data: bytes) -> None:
        """A DATA frame's contents."""
        if self._partial is None and len(data) >= MESSAGE_HEAD_BYTES:
            compressed, size = MESSAGE_HEAD.unpack_from(data)
            if size == len(data) - MESSAGE_HEAD_BYTES and not compressed and not self._dropping:
                self._deliver(data[MESSAGE_HEAD_BYTES:])
                return
        if not self._dropping and not self.finished:
            # A message in several frames, or several in one.
            if self._partial is None:
                self._partial = bytearray(data)
            else:
                self._partial += data
            self.go_on()

    def go_on(self) -> None:
        """Deliver complete messages, as many as the connection's time slice allows."""
        partial = self._partial
        if partial is None:
            return
        while len(partial) >= MESSAGE_HEAD_BYTES:
            compressed, size = MESSAGE_HEAD.unpack_from(partial)
            if compressed:
                receiver = self.receiver
                self.finish(Status.UNIMPLEMENTED, "compressed messages are not understood")
                self._over(receiver)
                return
            end = MESSAGE_HEAD_BYTES + size
            if len(partial) < end:
                self._keep(partial, size)
                return
            whole = bytes(memoryview(partial)[MESSAGE_HEAD_BYTES:end])
            del partial[:end]
            self._count(0, 0)
            self._deliver(whole)
            if self._dropping or self.finished:
                self._drop()
                return
            if partial and self._connection.has_to_wait(self):
                break
        if partial:
            self._keep(partial, 0)
        else:
            self._partial = None

    def _keep(self, partial: bytearray, size: int) -> None:
        """A message of this size has begun: count its received part, within limits."""
        share = self._connection.share
        if self._partial_bytes < MESSAGE_HEAD_BYTES:
            self._message_tick = self._in(MESSAGE_S + size // MESSAGE_BYTES_PER_S)
        here_bytes = len(partial)
        long_bytes = max(0, here_bytes - share.small_bytes)
        short_bytes = here_bytes - long_bytes - (self._partial_bytes - self._long_bytes)
        try:
            if size > share.max_body_bytes + self._connection.server.margin_bytes:
                raise too_large(share.max_body_bytes)
            if size > share.small_bytes:
                share.check_room(size - self._long_bytes)
            if not share.has_room(short_bytes):
                raise no_room()
        except Refusal as refusal:
            self._drop()
            self._tell(self.receiver.refuse, refusal)
        else:
            self._count(here_bytes, long_bytes)

    def _count(self, here_bytes: int, long_bytes: int) -> None:
        """Update the received part of a message, and the part counted as a long body."""
        more_bytes = here_bytes - self._partial_bytes
        if more_bytes:
            share, more_long_bytes = self._connection.share, long_bytes - self._long_bytes
            share.hold(more_bytes - more_long_bytes)
            if more_long_bytes:
                share.buffered_bytes += more_long_bytes
            self._partial_bytes, self._long_bytes = here_bytes, long_bytes

    def _drop(self) -> None:
        self._dropping = True
        self._partial = None
        self._count(0, 0)

    def _deliver(self, data: bytes) -> None:
        connection = self._connection
        connection.heard = True
        if connection.credits < CREDITS:
            connection.credits += CREDITS_PER_MESSAGE
        if self.finished:
            return
        self._message_tick = _NEVER
        self._tell(self.receiver.message, data)

    def _tell(self, hear: Callable[..., None], *what: Any) -> None:
        try:
            hear(*what)
        except Exception:
            self._broke()

    def end(self) -> None:
        self.half_closed = True
        self._message_tick = _NEVER
        if self.finished:
            if self._backlog is None:
                self._forget()
            return
        self._tell(self.receiver.half_closed)

    def lose(self) -> None:
        """Reset by the peer, or the connection is lost."""
        receiver = self.receiver
        self._forget()
        if not self.finished:
            self.finished = True
            self._over(receiver)

    def _over(self, receiver: Receiver) -> None:
        self._drop()
        try:
            receiver.lost()
        except Exception:
            _log.exception("%r: its receiver failed at its end", self)

    def _broke(self) -> None:
        """The boundary of a call: a bug costs only the call that met it."""
        _log.exception("%r: its receiver failed", self)
        self._connection.server.on_bug()
        receiver = self.receiver
        if not self.finished:
            self.finish(Status.INTERNAL, "the picker failed")
        self._over(receiver)

    def look(self, tick: int) -> None:
        if self._message_tick <= tick or self._due_tick <= tick:
            if self.finished:
                self.cut(ErrorCode.NO_ERROR)
            elif self._dropping:
                self.cut(ErrorCode.CANCEL)
            else:
                # The next event, if the receiver does not end the call.
                self.expect(LINGER_S)
                self._message_tick = _NEVER
                self._drop()
                self._tell(self.receiver.refuse, _LATE)
        elif self._backlog is not None and self._backlog.unread_tick <= tick:
            self.cut(ErrorCode.CANCEL)

    def cut(self, code: ErrorCode) -> None:
        self._connection.write(reset(self._id, code))
        self.lose()

    # To the peer

    def send(self, message: bytes) -> None:
        """Send a message that has its head (``frames.message``); kept while there is no window."""
        if self.finished:
            return
        connection, size = self._connection, len(message)
        if (
            self._backlog is None
            and size <= MAX_FRAME_BYTES
            and size <= connection.initial_window + self._offset
            and size <= connection.window
        ):
            self._offset -= size
            connection.window -= size
            self._begin()
            connection.write(HEAD.pack(size << 8 | DATA, 0, self._id) + message)
            return
        if not connection.share.has_room(size):
            self.cut(ErrorCode.ENHANCE_YOUR_CALM)
            return
        connection.share.hold(size)
        backlog = self._backlog
        if backlog is not None:
            backlog.add(message)
        else:
            self._begin_backlog().add(message)
            self.push()

    def send_each(self, messages: Iterator[bytes], when_made: Callable[[], None]) -> None:
        """Send messages that are made when there is a window for them, and so are never kept.

        Once per call.

        Args:
            when_made: called when that is over, for whatever reason.
        """
        if self.finished:
            when_made()
        elif self._backlog is not None:
            self._backlog.add_each(messages, when_made)
        else:
            self._begin_backlog().add_each(messages, when_made)
            self.push()

    def _begin_backlog(self) -> Unsent:
        backlog = self._backlog = Unsent(self._in(UNREAD_S))
        return backlog

    def finish(self, status: Status = Status.OK, detail: str = "") -> None:
        """End the call, after what was sent. Its receiver is not called any more."""
        if self.finished:
            return
        self.finished = True
        fields = TRAILERS_OK if status is Status.OK else trailers(status, detail)
        if not self._head_sent:
            fields = RESPONSE_HEAD + fields
        self._ending = (
            HEAD.pack(len(fields) << 8 | HEADERS, END_HEADERS | END_STREAM, self._id) + fields
        )
        if self._backlog is None:
            self._end_sending()

    def _begin(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            self._connection.write(
                HEAD.pack(len(RESPONSE_HEAD) << 8 | HEADERS, END_HEADERS, self._id) + RESPONSE_HEAD
            )

    def push(self) -> None:
        backlog = self._backlog
        if backlog is None:
            return
        self._begin()
        while self._push_piece(backlog):
            try:
                sent_bytes = backlog.take()
            except Exception:
                self._broke()
                backlog.end_making()
                sent_bytes, self._backlog = backlog.unread_bytes, None
            if sent_bytes:
                # The peer has taken this much of the kept data.
                self._connection.share.hold(-sent_bytes)
                if self.room < STREAM_WINDOW_BYTES // 2 and not self.half_closed:
                    self.widen_room()
            if not backlog.piece or self._backlog is None:
                self._backlog = None
                if self._ending is not None:
                    self._end_sending()
                return

    def _push_piece(self, backlog: Unsent) -> bool:
        """Send the rest of one message; False: it has to wait."""
        connection, piece, at = self._connection, backlog.piece, backlog.at
        while at < len(piece):
            window = connection.initial_window + self._offset
            size = min(len(piece) - at, MAX_FRAME_BYTES, window, connection.window)
            if size <= 0 or connection.push_bytes <= 0:
                (connection.narrow if window <= 0 else connection.blocked)[self] = None
                backlog.at = at
                if size > 0:
                    connection.unblock_soon()
                return False
            self._offset -= size
            connection.window -= size
            connection.push_bytes -= size
            backlog.unread_tick = self._in(UNREAD_S)
            head = HEAD.pack(size << 8 | DATA, 0, self._id)
            connection.write(head + piece[at : at + size])
            at += size
        return True

    def _end_sending(self) -> None:
        assert self._ending is not None
        self._connection.write(self._ending)
        self._ending = None
        if self.half_closed:
            self._forget()
        else:
            self._due_tick = self._in(LINGER_S)

    def widen(self, more_bytes: int) -> None:
        """The peer's window for this stream grows."""
        self._offset += more_bytes
        connection = self._connection
        if connection.initial_window + self._offset > MAX_WINDOW_BYTES:
            self.cut(ErrorCode.FLOW_CONTROL_ERROR)
        elif self in connection.narrow:
            del connection.narrow[self]
            self.push()

    def widen_room(self) -> None:
        """The peer has used half of its window, or has read its answers: give it more room."""
        if self.room < 0:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "a call's window")
        unread_bytes = 0 if self._backlog is None else self._backlog.unread_bytes
        if unread_bytes <= UNREAD_BYTES and not self.finished:
            self._connection.write(window_update(self._id, STREAM_WINDOW_BYTES - self.room))
            self.room = STREAM_WINDOW_BYTES

    def _forget(self) -> None:
        if self._partial_bytes:
            self._count(0, 0)
        self._partial = None
        if self._held_bytes:
            self._connection.share.hold(-self._held_bytes)
            self._held_bytes = 0
        if self._backlog is not None:
            backlog, self._backlog = self._backlog, None
            self._connection.share.hold(-backlog.unread_bytes)
            backlog.end_making()
        self._connection.forget(self._id, self)
        # The receiver refers to it: in a cycle, each call would wait for the garbage collector.
        self.receiver = _NOBODY


# Handlers of calls by path (``/service/Method``).
Methods: TypeAlias = Mapping[str, Callable[[Call], Receiver]]
