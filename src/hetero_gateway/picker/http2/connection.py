"""A data plane's connection: frames in, frames out, and what a peer may ask of us.

A connection carries many calls. What the calls write in a turn of the event loop goes out in one
write. Header blocks are the same for every call of a data plane: with a header table of size 0 a
block means the same wherever it stands, so that one that was decoded before is only looked up.

What a peer could make us do or keep, and what bounds it:

    frames that carry no message       each costs a credit, a message earns some, time gives some
                                       back; none left: ENHANCE_YOUR_CALM
      (PING, SETTINGS, resets, empty DATA, WINDOW_UPDATE, PRIORITY, calls without a message)
    CONTINUATION                       MAX_BLOCK_BYTES of a block, MAX_FRAGMENTS pieces
    open calls                         MAX_CALLS, and the server's for all: REFUSED_STREAM
    bytes of messages                  the budget of bodies (``calls``). Windows bound nothing: what
                                       comes is read at once, and they are opened again
    what it does not read              above WRITE_HIGH_BYTES nothing is read; after STALL_S closed
    a connection that says nothing     PREFACE_S for its preface and SETTINGS
    connections                        the server's limit: closed at once
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import hpack

from hetero_gateway.picker.http2.calls import Call
from hetero_gateway.picker.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_BYTES,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ErrorCode,
    ProtocolError,
    frame,
    goaway,
    reset,
    settings,
    window_update,
)

if TYPE_CHECKING:
    from hetero_gateway.picker.http2.server import Server

MAX_CALLS = 16384
MAX_BLOCK_BYTES = 32768
MAX_FRAGMENTS = 16
CREDITS = 4096
CREDITS_PER_S = 200
CREDITS_PER_MESSAGE = 16
PREFACE_S = 10.0
STALL_S = 30.0
WRITE_HIGH_BYTES = 2**20
# Of the whole connection; half of it is given back at a time.
WINDOW_BYTES = 2**24
_DEFAULT_WINDOW_BYTES = 65535
_MOST_STREAM_ID = 2**31 - 1
_DRAINING = b"draining"

_GREETING = settings(
    {
        HEADER_TABLE_SIZE: 0,
        MAX_CONCURRENT_STREAMS: MAX_CALLS,
        INITIAL_WINDOW_SIZE: 2**20,
        MAX_HEADER_LIST_SIZE: MAX_BLOCK_BYTES,
    }
) + window_update(0, WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
_SETTINGS_ACK = frame(SETTINGS, ACK, 0)


class Connection(asyncio.Protocol):
    """One connection of ``server``."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # For its users: whether the peer reports on responses; until when that is not relied on.
        self.reports = False
        self.stray_until_s = 0.0
        self.calls: dict[int, Call] = {}
        self.blocked: dict[Call, None] = {}  # by a window; in the order in which they came
        self.window = _DEFAULT_WINDOW_BYTES  # the peer's, for what is sent
        self._stream_window = _DEFAULT_WINDOW_BYTES
        self._room = WINDOW_BYTES  # ours
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._decoder = hpack.Decoder(MAX_BLOCK_BYTES)
        self._stateless = False  # every block means the same, wherever it stands
        self._rest = b""
        self._out: list[bytes] = []
        self._reading = False
        self._flush_due = False
        self._greeted = False
        self._last_id = 0
        self._draining = False
        self._refusing = False
        self._block: tuple[int, int, bytearray] | None = None  # of which CONTINUATIONs follow
        self._fragments = 0
        self._credits = CREDITS
        self._credited_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            HEADERS: self._on_headers,
            PRIORITY: self._on_priority,
            RST_STREAM: self._on_reset,
            SETTINGS: self._on_settings,
            PUSH_PROMISE: self._on_push,
            PING: self._on_ping,
            GOAWAY: self._on_goaway,
            WINDOW_UPDATE: self._on_window_update,
            CONTINUATION: self._on_continuation,
        }

    def __repr__(self) -> str:
        return f"<Connection {len(self.calls)} calls, {self._credits} credits>"

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by inheritance.
        self._transport = transport = cast(asyncio.Transport, transport)
        if not self.server.add(self):
            transport.abort()
            return
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES)
        transport.write(_GREETING)
        self._timer = self._loop.call_later(PREFACE_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.discard(self)
        self._stop_timer()
        self._out.clear()
        for call in list(self.calls.values()):
            call.lose()

    def pause_writing(self) -> None:
        self._transport.pause_reading()
        self._stop_timer()
        self._timer = self._loop.call_later(STALL_S, self._transport.abort)

    def resume_writing(self) -> None:
        self._stop_timer()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        self._reading = True
        try:
            self._read(data)
        except ProtocolError as error:
            self._fail(error)
        finally:
            self._reading = False
        if self._out:
            self._flush()

    # Frames in

    def _read(self, data: bytes) -> None:
        at, size = 0, len(data)
        if not self._greeted:
            if not data.startswith(PREFACE):
                if PREFACE.startswith(data):
                    self._rest = data
                    return
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
            if size < len(PREFACE) + HEAD_BYTES:
                self._rest = data
                return
            at = len(PREFACE)
            if data[at + 3] != SETTINGS:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "no SETTINGS behind the preface")
            self._greeted = True
            self._stop_timer()
        unpack = HEAD.unpack_from
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
                continue
            handler = self._handlers.get(kind)
            if handler is None:
                self._spend()
            else:
                handler(flags, stream_id & _MOST_STREAM_ID, payload)
        if at < size:
            self._rest = data[at:]

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
                self.write(reset(stream_id, ErrorCode.PROTOCOL_ERROR))
                call.lose()
            return
        call.consume(size, ends=bool(ends))
        if flags & PADDED:
            payload = _unpadded(payload)
        if payload:
            call.take(payload)
        elif not ends:
            self._spend()
        if ends:
            call.end()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
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
        server = self.server
        path = server.known_blocks.get(block) if self._stateless else None
        if path is None:
            path = self._decode(block)
        call = self.calls.get(stream_id)
        if call is not None:
            if not flags & END_STREAM or call.half_closed:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a second head")
            call.end()
            return
        if stream_id <= self._last_id:
            self._spend()
            return  # what was still on its way of a call that is over
        if not stream_id & 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a call's number is even")
        self._spend()
        if self._refusing or len(self.calls) >= MAX_CALLS or not server.has_room:
            if not self._refusing:
                self._last_id = stream_id
            self.write(reset(stream_id, ErrorCode.REFUSED_STREAM))
            return
        self._last_id = stream_id
        call = Call(self, stream_id, self._stream_window)
        self.calls[stream_id] = call
        server.open_calls += 1
        server.route(path, call)
        if flags & END_STREAM:
            call.end()

    def _decode(self, block: bytes) -> str:
        """The path that a header block asks for; "" where it is no call of gRPC's."""
        decoder = self._decoder
        try:
            found = {str(name): str(value) for name, value in decoder.decode(block)}
        except hpack.HPACKError as error:
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "a header block") from error
        path = found.get(":path", "")
        if found.get(":method") != "POST" or not found.get("content-type", "").startswith(
            "application/grpc"
        ):
            path = ""
        if self._stateless:
            self.server.remember_block(block, path)
        elif decoder.max_allowed_table_size == 0 and decoder.header_table_size == 0:
            # From now on; this one began with the update of the size.
            self._stateless = True
        return path

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
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
        if stream_id or len(payload) % 6 or (flags & ACK and payload):
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS")
        self._spend()
        if flags & ACK:
            # The next block begins with the header table's new size.
            self._decoder.max_allowed_table_size = 0
            return
        # First: what is sent by the new window would be too much for a peer that has not heard
        # that it holds.
        self.write(_SETTINGS_ACK)
        for key, value in struct.iter_unpack(">HI", payload):
            if key == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW_BYTES:
                    raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "an initial window")
                more, self._stream_window = value - self._stream_window, value
                for call in list(self.calls.values()) if more else ():
                    call.widen(more)
            elif key == ENABLE_PUSH and value > 1:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH")
            elif key == MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 2**24:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE")

    def _on_push(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) != 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "PING")
        self._spend()
        if not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif payload == _DRAINING and self._draining:
            self._refuse_new()

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        # It opens no calls any more; those that are open go on.
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
        for call in list(self.blocked):
            call.push()

    def _check_known(self, stream_id: int) -> None:
        """What is over may still be named; what has not begun, may not."""
        if stream_id > self._last_id and not self._refusing:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a frame of a call that is not open")
        if not stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a frame of no call")

    # Credits

    def credit(self) -> None:
        """A message came."""
        if self._credits < CREDITS:
            self._credits += CREDITS_PER_MESSAGE

    def _spend(self) -> None:
        self._credits -= 1
        if self._credits < 0:
            now_s = self._loop.time()
            earned = (now_s - self._credited_s) * CREDITS_PER_S
            self._credited_s = now_s
            self._credits = min(CREDITS, int(earned)) - 1
            if self._credits < 0:
                raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "frames without messages")

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

    # Ends

    def drain(self) -> None:
        """Take no new calls, once the peer can know it; close when the open ones are done."""
        if self._draining:
            return
        self._draining = True
        self.write(goaway(_MOST_STREAM_ID, ErrorCode.NO_ERROR))
        # What it opened before it heard of that is here when this one is answered.
        self.write(frame(PING, 0, 0, _DRAINING))

    def _refuse_new(self) -> None:
        if not self._refusing:
            self._refusing = True
            self.write(goaway(self._last_id, ErrorCode.NO_ERROR))
        self._close_if_done()

    def close(self) -> None:
        """Close it, whatever is open."""
        self._flush()
        self._transport.close()

    def _close_if_done(self) -> None:
        if self._refusing and not self.calls:
            self._flush()
            self._transport.close()

    def forget(self, stream_id: int, call: Call) -> None:
        """A call is over."""
        if self.calls.get(stream_id) is call:
            del self.calls[stream_id]
            self.server.call_ended()
            self.blocked.pop(call, None)
            if self._refusing and not self.calls:
                self._loop.call_soon(self._close_if_done)

    def _fail(self, error: ProtocolError) -> None:
        self.server.on_misuse(error)
        self._transport.write(b"".join(self._out) + goaway(self._last_id, error.code, str(error)))
        self._out.clear()
        self._transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "padding")
    return payload[1 : len(payload) - payload[0]]
