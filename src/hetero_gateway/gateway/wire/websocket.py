"""A client's WebSocket: uvicorn's protocol for them, over the ``websockets`` package.

``wire.protocol`` hands a connection over once its head asks for one.
"""

from __future__ import annotations

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_log = logging.getLogger(__name__)
# uvicorn's lines of information show the query, in which a client may have put anything.
_log.setLevel(logging.WARNING)


class ClientWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's, which knows that an HTTP answer ends a handshake, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _log

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True
