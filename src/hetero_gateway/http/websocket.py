"""A client's WebSocket: uvicorn's protocol for them, over the ``websockets`` package.

``http.protocol`` hands a connection over once its head asks for one. It stays watched
(``http.clients``), so that a client that reads nothing, or never ends, is cut off.
"""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from hetero_gateway.http.clients import Phase, Watch, Watched

# In a scope's ``extensions``: an event that is set when the client is gone, or leaving.
GONE = "hetero_gateway.gone"

_NO_OPENING = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

_log = logging.getLogger(__name__)
# uvicorn's info lines show the query, in which a client may have put anything; the debug lines of
# ``websockets`` show the head, with its key.
_log.setLevel(logging.WARNING)


class ClientWebSocket(WebSocketsSansIOProtocol, Watched):
    """uvicorn's protocol, with limits.

    An HTTP answer ends a handshake, too; a client that does not read is not read from; invalid
    UTF-8 ends the session and is not our error; fragments of a message take its bytes and no more.
    """

    body_bytes = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = self.conn.logger = _log
        self.conn.debug = False
        self.gone = asyncio.Event()
        self._watch: Watch | None = None

    def watched_by(self, watch: Watch) -> None:
        """Watch it from now on, until the connection is lost."""
        self._watch = watch
        watch.add(self)

    # A Watched

    @property
    def phase(self) -> Phase:
        return Phase.CLOSING if self.turn else Phase.SERVING

    @property
    def turn(self) -> int:
        return int(self.close_sent or self.transport.is_closing())

    @property
    def reading_paused(self) -> bool:
        return self.read_paused

    # An asyncio.Protocol

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        if self._watch is not None:
            self._watch.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # refused: ``websockets`` would fail on what follows
        super().data_received(data)
        if not self.handshake_initiated and not self.close_sent:
            # The head is here: what ``websockets`` does not accept now, it never will.
            self.handle_parser_exception()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Otherwise a client that reads nothing could have pongs written for as long as it sends
        # pings.
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    # uvicorn's reactions to events

    def shutdown(self) -> None:
        self.gone.set()
        super().shutdown()

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions[GONE] = self.gone

    def handle_close(self, event: Any) -> None:
        super().handle_close(event)
        self.gone.set()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is not None:
            super().handle_parser_exception()
        elif not self.close_sent:
            # The opening, or input before it is answered, is not part of this protocol.
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
            self.close_sent = True
            if not self.handshake_complete:
                self.transport.write(_NO_OPENING)
            self.transport.close()
        self.gone.set()

    def handle_cont(self, event: Any) -> None:
        # One buffer: a list of fragments would grow with empty ones.
        whole: Any = self.frames[0]
        if not isinstance(whole, bytearray):
            whole = bytearray(whole)
            self.frames = [whole]
        whole += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                str(self.frames[0], "utf-8")
            except UnicodeDecodeError:
                self.frames = []
                self.conn.fail(1007, "invalid UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        if self.close_sent or self.gone.is_set():
            raise ClientDisconnected  # ``websockets`` would fail: nothing can be sent any more
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self.writable.is_set():
                self.transport.resume_reading()
        return message
