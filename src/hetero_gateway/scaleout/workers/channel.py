"""One end of the socket between a worker and the scheduler process."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import msgspec

from hetero_gateway.scaleout.workers.messages import FrameReader, frame

_log = logging.getLogger(__name__)


class ChannelUser(Protocol):
    """Who is at an end. Called from the event loop's callbacks."""

    def received(self, messages: list[Any]) -> None: ...

    def unsent(self, message: Any, error: Exception) -> None:
        """A message holds what cannot be sent: a number of too many digits, say."""

    def lost(self) -> None:
        """The other end is gone. Called once, unless ``close`` was."""


class Channel(asyncio.Protocol):
    """Sends and receives messages; those of one turn of the event loop go in one write.

    Args:
        kinds: the messages that may come, as a union.
        listener: hears of them; set before anything comes.
    """

    def __init__(self, kinds: Any, listener: ChannelUser | None = None) -> None:
        self.listener = listener
        self._reader = FrameReader(kinds, self._take)
        self._outbox: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def send(self, message: Any) -> None:
        """Send it at the end of this turn; nothing happens when the other end is gone."""
        if self.closed:
            return
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append(message)

    def flush(self) -> None:
        if self._outbox and self._transport is not None and not self.closed:
            outbox, self._outbox = self._outbox, []
            try:
                data = frame(outbox)
            except Exception:
                data = self._what_can_be_sent(outbox)
            self._transport.write(data)

    def _what_can_be_sent(self, outbox: list[Any]) -> bytes:
        """One message that cannot be written must not take the others with it."""
        parts = []
        for message in outbox:
            try:
                parts.append(frame([message]))
            except Exception as error:
                _log.exception("a %s cannot be sent", type(message).__name__)
                if self.listener is not None:
                    self.listener.unsent(message, error)
        return b"".join(parts)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except (msgspec.MsgspecError, ValueError):
            _log.exception("what came over a socket of our own cannot be read")
            self.abort()

    def _take(self, messages: list[Any]) -> None:
        if self.listener is not None and not self.closed:
            self.listener.received(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            if self.listener is not None:
                self.listener.lost()

    def close(self) -> None:
        """Send what is waiting, and end; the listener hears nothing more."""
        self.flush()
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once, as if the other end were gone."""
        if self._transport is not None:
            self._transport.abort()
