"""What a call has to send, while there is no window for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator


class Backlog:
    """Messages that wait, and those that are only made when they can be sent.

    Attributes:
        piece, at: the message that is being sent, and how much of it was.
        unread_bytes: of the messages that wait, as they are counted.
        unread_tick: when the peer will have read nothing for too long.
        when_made: to be called when nothing more is made; once.
    """

    __slots__ = ("_waiting", "at", "piece", "unread_bytes", "unread_tick", "when_made")

    def __init__(self, unread_tick: int) -> None:
        self._waiting: deque[bytes | Iterator[bytes]] = deque()
        self.piece = b""
        self.at = 0
        self.unread_bytes = 0
        self.unread_tick = unread_tick
        self.when_made: Callable[[], None] | None = None

    def add(self, message: bytes) -> None:
        self._waiting.append(message)
        self.unread_bytes += len(message)

    def add_each(self, messages: Iterator[bytes], when_made: Callable[[], None]) -> None:
        self._waiting.append(messages)
        self.when_made = when_made

    def take(self) -> int:
        """Take up the next message, in ``piece``; how much of what was counted has been sent."""
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
        """Whoever gave what makes messages need not keep it any more."""
        if self.when_made is not None:
            when_made, self.when_made = self.when_made, None
            when_made()
