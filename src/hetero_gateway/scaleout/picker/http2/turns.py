"""Shares the event loop between connections, so that one peer's bytes hold up no other's.

A connection reads what has come until its slice is over. What is left then waits here, and so does
everything of a connection that has used more than its share lately: of all that wait, one reads for
one slice in each turn of the event loop, those first that have used little. In between, sockets are
polled, and connections that ask for little are served at once, while all of them together take no
more than TURN_S of a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

# One connection's reading in a turn of the event loop: some ten requests, and a hundredth of the
# 0.1 s for which no peer may hold up another.
SLICE_S = 0.001
# CPU that a connection may use before it waits for its turn, and what it earns per second: one that
# asks for less than half of the loop never waits.
BURST_S = 0.01
SHARE = 0.5
# Of a turn of the event loop, for all connections that read at once while others wait.
TURN_S = 0.005
# Of those that wait, so many that have used little for one that has used more.
_FAVOUR = 4


class Waiting(Protocol):
    """What waits for its turn."""

    def read_on(self) -> None: ...


class Turns:
    """The connections of one server that have more to read than they may at once.

    Attributes:
        spent_s: what reading has taken in this turn of the event loop.
    """

    def __init__(self) -> None:
        self._fresh: deque[Waiting] = deque()
        self._others: deque[Waiting] = deque()
        self._favoured = 0
        self._last: Waiting | None = None
        self._due = False
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._others)

    @property
    def is_full(self) -> bool:
        """Whether a connection has to wait, however little it has used."""
        return self._due and self.spent_s >= TURN_S

    def take(self, connection: Waiting) -> bool:
        """Whether one that has used its share may read at once: nobody else wants to."""
        if self._due:
            return False
        if connection is not self._last:
            # The next one that comes in this turn waits.
            self._last = connection
            self._call()
        return True

    def forget(self, connection: Waiting) -> None:
        """It is closed. In line it may stay: it has nothing to read."""
        if connection is self._last:
            self._last = None

    def add(self, connection: Waiting, *, is_fresh: bool) -> None:
        """Let it read on when its turn comes, once. ``is_fresh``: it has used little."""
        (self._fresh if is_fresh else self._others).append(connection)
        self._call()

    def _call(self) -> None:
        if not self._due:
            self._due = True
            self.spent_s = 0.0
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._due = False
        if self._fresh and (not self._others or self._favoured < _FAVOUR):
            self._favoured += 1
            first = self._fresh.popleft()
        elif self._others:
            self._favoured = 0
            first = self._others.popleft()
        else:
            return
        if self._fresh or self._others:
            self._call()
        first.read_on()
