"""A data plane's connection: frames in, frames out, and limits on what a peer can cost us.

A connection carries many calls. All frames of one turn of the event loop go out in one write.

What a peer could make us do or keep, and the bounds:

    CPU, for any frames                SLICE_S in a turn of the event loop, and anything over
                                       BURST_S or its SHARE waits in line (``commons``); no frame
                                       costs more than its own bytes do: a window is a number,
                                       however many calls it is for, and the calls that wait for
                                       one are looked at once in a turn
    frames that carry no message       each costs one of CREDITS, a message earns
                                       CREDITS_PER_MESSAGE, a second CREDITS_PER_S; none left:
                                       ENHANCE_YOUR_CALM
      (PING, resets, empty DATA, WINDOW_UPDATE, PRIORITY, GOAWAY, calls without a message)
    SETTINGS, header blocks            more than one: SETTINGS_CREDITS, a credit for every
                                       BLOCK_BYTES_PER_CREDIT
    header blocks                      MAX_BLOCK_BYTES, decoded and not (``blocks``);
                                       MAX_FRAGMENTS pieces
    open calls                         MAX_CALLS of a connection, and no more than it leaves to the
                                       others: REFUSED_STREAM
    bytes kept for it                  HELD_BYTES of a connection, MAX_HELD_BYTES of all, no more
                                       than it leaves to the others (``carrier``): a message is
                                       refused, a call that reads nothing is reset
      (short messages and bodies, unread answers, CALL_BYTES for each call)
    bytes of long messages             the budget of bodies, half of it for a connection; received
                                       bytes count, not announced ones
    unread answers                     of a call: UNREAD_BYTES, then it may not send more than
                                       STREAM_WINDOW_BYTES, after UNREAD_S it is reset; in all:
                                       above WRITE_HIGH_BYTES nothing is read, after STALL_S closed
    lateness                           (``calls``) FIRST_MESSAGE_S, MESSAGE_S, LINGER_S; the
                                       receivers' own limits, for a body and for a whole request
    an idle connection                 HANDSHAKE_S for TLS, PREFACE_S for its preface and SETTINGS,
                                       IDLE_S without a message or a call, CLOSE_S at its end; and
                                       the first to be closed when there is no room
    connections                        MAX_CONNECTIONS, MAX_PER_ADDRESS (``commons``): an idle one
                                       is closed, or else the newcomer
"""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from hetero_gateway.scaleout.picker.http2 import frames
from hetero_gateway.scaleout.picker.http2.blocks import MAX_BLOCK_BYTES, HeaderBlocks
from hetero_gateway.scaleout.picker.http2.calls import (
    FIRST_MESSAGE_S,
    STREAM_WINDOW_BYTES,
    Call,
    Methods,
)
from hetero_gateway.scaleout.picker.http2.carrier import (
    CALL_BYTES,
    CREDITS,
    DEFAULT_WINDOW_BYTES,
    Carried,
    Carrier,
)
from hetero_gateway.scaleout.picker.http2.commons import Commons, Occupant, address_of
from hetero_gateway.scaleout.picker.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    PADDED,
    WITH_PRIORITY,
    ErrorCode,
    ProtocolError,
    Status,
    window_update,
)

# A data plane with more opens another connection; so many calls fit in HELD_BYTES.
MAX_CALLS = 1024
# A block comes in one frame, unless it is of MAX_BLOCK_BYTES in small frames.
MAX_FRAGMENTS = 16
CREDITS_PER_S = 200
# A data plane sends one SETTINGS frame, and one to acknowledge ours.
SETTINGS_CREDITS = 32
# A new block of 200 bytes costs as much as 30 frames without one, which a message pays for.
BLOCK_BYTES_PER_CREDIT = 64
# A data plane sends both as soon as it is connected.
PREFACE_S = 10.0
# An idle connection, without calls and messages: the peer opens another one when needed. Health
# checks are messages.
IDLE_S = 600
# For the last bytes, of a connection that is to be closed.
CLOSE_S = 5
STALL_S = 30.0
WRITE_HIGH_BYTES = 2**20
# Of the whole connection; half of it is given back at a time. It bounds nothing: data is read at
# once, kept within the budgets, or refused.
WINDOW_BYTES = 2**24
_LOW_ROOM_BYTES = STREAM_WINDOW_BYTES // 2
_MOST_STREAM_ID = 2**31 - 1
_DRAINING = b"draining"

_GREETING = frames.settings(
    {
        frames.HEADER_TABLE_SIZE: 0,
        frames.MAX_CONCURRENT_STREAMS: MAX_CALLS,
        frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        frames.MAX_HEADER_LIST_SIZE: MAX_BLOCK_BYTES,
    }
) + window_update(0, WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
_SETTINGS_ACK = frames.frame(frames.SETTINGS, frames.ACK, 0)


class DataPlaneConnection(Carrier):
    """One connection of ``server``: an ``Occupant`` of its register."""

    def __init__(
        self, server: Commons, methods: Methods, handshake: Occupant | None = None
    ) -> None:
        self.calls: dict[int, Call] = {}
        super().__init__(server, self.calls)
        self._methods = methods
        self._handshake = handshake
        self.spoke_tick = server.tick
        self._room = WINDOW_BYTES  # ours
        self._blocks = HeaderBlocks(server.known_blocks)
        self._greeted = False
        self._last_id = 0
        self._draining = False
        self._refusing = False
        self._closing_tick = 0
        self._block: tuple[int, int, bytearray] | None = None  # to be continued
        self._fragments = 0
        self._credited_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DataPlaneConnection {len(self.calls)} calls, {self.credits} credits>"

    # Called by the transport, besides the methods of ``Carrier``

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is not a subclass.
        self._transport = transport = cast(asyncio.Transport, transport)
        self.address = address_of(transport)
        if not self.server.add(self, self._handshake):
            transport.abort()
            return
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES)
        transport.write(_GREETING)
        self._timer = self._loop.call_later(PREFACE_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.discard(self)
        self._turns.forget(self)
        self._rest = b""
        self._stop_timer()
        self._out.clear()
        for call in list(self.calls.values()):
            call.lose()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.push_bytes = 0
        self._stop_timer()
        self._timer = self._loop.call_later(STALL_S, self._transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()
        self.unblock_soon()

    # Called by its server

    def look(self, tick: int) -> int:
        if self._is_closing:
            if self._closing_tick <= tick:
                self._transport.abort()
            return 0
        if self.heard:
            self.heard = False
            self.has_spoken = True
            self.spoke_tick = tick
        calls = list(self.calls.values())
        for call in calls:
            call.look(tick)
        self.works()
        if not self.calls and self.spoke_tick + IDLE_S < tick:
            self.drain()
            self._refuse_new()
        return len(calls)

    def works(self) -> bool:
        self.at_work = any(call.at_work for call in self.calls.values())
        return self.at_work

    def make_room(self) -> None:
        self._transport.abort()

    # Frames in

    def _read(self, data: bytes) -> None:
        at, size = 0, len(data)
        if not self._greeted:
            if not data.startswith(frames.PREFACE):
                if frames.PREFACE.startswith(data):
                    self._rest = data
                    return
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
            if size < len(frames.PREFACE) + HEAD_BYTES:
                self._rest = data
                return
            at = len(frames.PREFACE)
            if data[at + 3] != frames.SETTINGS or data[at + 4] & frames.ACK:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "no SETTINGS behind the preface")
            self._greeted = True
            self._stop_timer()
        unpack, until_s = HEAD.unpack_from, self._until_s
        while size - at >= HEAD_BYTES:
            word, flags, stream_id = unpack(data, at)
            length = word >> 8
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "a frame is too long")
            end = at + HEAD_BYTES + length
            if end > size:
                break
            payload = data[at + HEAD_BYTES : end]
            at = end
            kind = word & 0xFF
            if self._block is not None and kind != CONTINUATION:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a header block is not complete")
            if kind == DATA:
                self._on_data(flags, stream_id & _MOST_STREAM_ID, payload)
            else:
                handler = _HANDLERS.get(kind)
                if handler is None:
                    self._spend()
                else:
                    handler(self, flags, stream_id & _MOST_STREAM_ID, payload)
            if until_s and at < size and self._slice_is_over():
                self._rest = data[at:]
                self._wait()
                return
        if at < size:
            self._rest = data[at:]
            self._unmetered = 0  # later data is appended to it

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._room -= size
        if self._room < WINDOW_BYTES // 2:
            self.write(window_update(0, WINDOW_BYTES - self._room))
            self._room = WINDOW_BYTES
        call = self.calls.get(stream_id)
        ends = flags & END_STREAM
        if call is None or call.half_closed:
            self._check_known(stream_id)
            self._spend()
            if call is not None:
                call.cut(ErrorCode.STREAM_CLOSED)
            return
        room = call.room = call.room - size
        if room < _LOW_ROOM_BYTES and not ends:
            call.widen_room()
        if flags & PADDED:
            payload = _unpadded(payload)
        if payload:
            call.take(payload)
        elif not ends:
            self._spend()
        if ends:
            if self._behind is call:
                self._behind_ends = True
            else:
                call.end()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            # 0 is the connection, and even numbers are for pushes.
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "HEADERS of no call")
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < 5:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without its priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._open(stream_id, flags, payload)
        else:
            self._block = (stream_id, flags, bytearray(payload))
            self._fragments = 0

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first_flags, block = self._block
        block += payload
        self._fragments += 1
        if len(block) > MAX_BLOCK_BYTES or self._fragments > MAX_FRAGMENTS:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & END_HEADERS:
            self._block = None
            self._open(stream_id, first_flags, bytes(block))

    def _open(self, stream_id: int, flags: int, block: bytes) -> None:
        """A header block is complete: a new call, or the end of one."""
        path = self._blocks.known(block)
        if path is None:
            self._spend(len(block) // BLOCK_BYTES_PER_CREDIT)
            path = self._blocks.path_of(block)
        call = self.calls.get(stream_id)
        if call is not None:
            if not flags & END_STREAM or call.half_closed:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a second head")
            call.end()
            return
        self._spend()
        if stream_id <= self._last_id:
            return  # data in transit of a call that is over
        server = self.server
        if self._refusing or len(self.calls) >= MAX_CALLS or not self.share.has_room(CALL_BYTES):
            if not self._refusing:
                self._last_id = stream_id
            self.write(frames.reset(stream_id, ErrorCode.REFUSED_STREAM))
            return
        self._last_id = stream_id
        call = self.calls[stream_id] = Call(self, stream_id, server.tick + 1 + FIRST_MESSAGE_S)
        server.open_calls += 1
        method = self._methods.get(path)
        if method is None:
            call.finish(Status.UNIMPLEMENTED, "there is no such method")
        else:
            call.receiver = method(call)
        if flags & END_STREAM:
            call.end()

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PRIORITY of no call")
        if len(payload) != 5:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY")
        self._spend()

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM")
        self._spend()
        call = self.calls.get(stream_id)
        if call is None:
            self._check_known(stream_id)
        else:
            call.lose()

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a call")
        if len(payload) % 6 or (flags & frames.ACK and payload):
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS")
        self._spend(SETTINGS_CREDITS)
        if flags & frames.ACK:
            self._blocks.forbid_table()
            return
        # First: data sent by the new window would be too much for a peer that does not know yet
        # that it applies.
        self.write(_SETTINGS_ACK)
        for key, value in struct.iter_unpack(">HI", payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW_BYTES:
                    raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "an initial window")
                if value > self.initial_window and (self.narrow or self._widened):
                    self._widened = True
                    self.unblock_soon()
                self.initial_window = value
            elif key == frames.ENABLE_PUSH and value > 1:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH")
            elif key == frames.MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 2**24:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE")

    def _on_push(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PING of a call")
        if len(payload) != 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "PING")
        self._spend()
        if not flags & frames.ACK:
            self.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _DRAINING and self._draining:
            self._refuse_new()

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a call")
        if len(payload) < 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY")
        self._spend()
        # It opens no more calls; the open ones continue.
        self._draining = self._refusing = True
        self._close_if_done()

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE")
        self._spend()
        more = int.from_bytes(payload, "big") & MAX_WINDOW_BYTES
        if not more:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        if stream_id:
            call = self.calls.get(stream_id)
            if call is None:
                self._check_known(stream_id)
            else:
                call.widen(more)
            return
        self.window += more
        if self.window > MAX_WINDOW_BYTES:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window")
        if self.blocked:
            self.unblock_soon()

    def _check_known(self, stream_id: int) -> None:
        """Ended streams may still be named; future ones may not."""
        if stream_id > self._last_id and not self._refusing:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a frame of a call that is not open")
        if not stream_id & 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a frame of no call")

    # Credits

    def _spend(self, credits: int = 1) -> None:
        self.credits -= credits
        if self.credits < 0:
            now_s = self._loop.time()
            earned = (now_s - self._credited_s) * CREDITS_PER_S
            self._credited_s = now_s
            self.credits = min(CREDITS, int(earned)) - credits
            if self.credits < 0:
                raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "frames without messages")

    # Ends

    def drain(self) -> None:
        """Take no new calls, once the peer can know it; close when the open ones are done."""
        if self._draining:
            return
        self._draining = True
        self.write(frames.goaway(_MOST_STREAM_ID, ErrorCode.NO_ERROR))
        # Calls opened before the peer knew of that have arrived when this one is answered.
        self.write(frames.frame(frames.PING, 0, 0, _DRAINING))

    def _refuse_new(self) -> None:
        if not self._refusing:
            self._refusing = True
            self.write(frames.goaway(self._last_id, ErrorCode.NO_ERROR))
        self._close_if_done()

    def close(self) -> None:
        self._flush()
        self._end()

    def _end(self) -> None:
        self._is_closing = True
        self._closing_tick = self.server.tick + 1 + CLOSE_S
        self._transport.close()

    def _close_if_done(self) -> None:
        if self._refusing and not self.calls:
            self.close()

    def forget(self, stream_id: int, call: Carried) -> None:
        if self.calls.get(stream_id) is call:
            del self.calls[stream_id]
            self.server.call_ended()
            self.blocked.pop(call, None)
            self.narrow.pop(call, None)
            if self._refusing and not self.calls:
                self._loop.call_soon(self._close_if_done)

    def _fail(self, error: ProtocolError) -> None:
        self.server.warn(f"a data plane's connection ends: {error.code.name}: {error}")
        self._transport.write(
            b"".join(self._out) + frames.goaway(self._last_id, error.code, str(error))
        )
        self._out.clear()
        self._end()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "padding")
    return payload[1 : len(payload) - payload[0]]


_HANDLERS: dict[int, Callable[[DataPlaneConnection, int, int, bytes], None]] = {
    frames.HEADERS: DataPlaneConnection._on_headers,
    frames.PRIORITY: DataPlaneConnection._on_priority,
    frames.RST_STREAM: DataPlaneConnection._on_reset,
    frames.SETTINGS: DataPlaneConnection._on_settings,
    frames.PUSH_PROMISE: DataPlaneConnection._on_push,
    frames.PING: DataPlaneConnection._on_ping,
    frames.GOAWAY: DataPlaneConnection._on_goaway,
    frames.WINDOW_UPDATE: DataPlaneConnection._on_window_update,
    CONTINUATION: DataPlaneConnection._on_continuation,
}
