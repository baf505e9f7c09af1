"""How far the event loop is behind: whether a missing answer was late, or was not looked at."""

from __future__ import annotations

import asyncio

_EVERY_S = 0.1
# How late a loop with enough CPU time is now and then.
_GRAIN_S = 0.02


class LoopLag:
    """Adds up how late timers fire while it is in use: ``with lag: ...``.

    Whatever blocks the loop counts: a long callback, other processes, a machine that was stopped.
    """

    def __init__(self) -> None:
        self.behind_s = 0.0
        self._watchers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def __enter__(self) -> LoopLag:
        self._watchers += 1
        if self._timer is None:
            self._arm(asyncio.get_running_loop())
        return self

    def __exit__(self, *_: object) -> None:
        self._watchers -= 1
        if not self._watchers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + _EVERY_S
        self._timer = loop.call_later(_EVERY_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        late_s = loop.time() - self._due_s
        if late_s > _GRAIN_S:
            self.behind_s += late_s
        self._arm(loop)
