"""Virtual time for tests in which everything happens in one event loop.

The clock stands still while anything runs and jumps to the next timer when nothing does, so a wait
of six seconds costs nothing, and a machine with other work makes nothing late: what a test sees
depends on the order of events alone. Sockets are real. What is sent over the loopback interface is
there when ``send`` returns, or very soon after, unless Nagle's algorithm holds it back: before each
jump a byte goes round a connection of the clock's own, and by then what was sent earlier is there.

What happens outside of the loop is not waited for, with two exceptions: while a thread of the
loop's executor works (``asyncio.to_thread``), time passes as it does outside; and what is in
``before_jump`` may wait (tests/fakes/redis.py). Tests marked ``system`` need other programs and run
against the wall clock, unless the mark says ``virtual``.

Import ``anyio_backend`` into a conftest.py or a module to run its asynchronous tests like this.
"""

import asyncio
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_REAL_CLOCK, _REAL_SLEEP = time.perf_counter, time.sleep
# Each look at the clock takes this long, so that no loop waits for ever for a later time.
_TICK_S = 1e-7


class VirtualClock:
    """In place of ``time.monotonic``, ``perf_counter`` and ``sleep``; makes the loops that obey it.

    ``busy`` counts what happens outside of the loop. ``threads_take_time``: or else the clock
    stands still meanwhile, and what they write to disk changes no figure of a benchmark.
    """

    def __init__(self) -> None:
        self._now_s = time.monotonic()
        self._thread = threading.get_ident()
        self.busy = 0
        self.threads_take_time = True
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._near = socket.create_connection(server.getsockname())
            self._far, _ = server.accept()
        self._near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.before_jump: list[Callable[[], None]] = []

    def now_s(self) -> float:
        self._now_s += _TICK_S
        return self._now_s

    def jump(self, by_s: float) -> None:
        self._now_s += by_s

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self._thread:
            self.jump(seconds)
        else:
            _REAL_SLEEP(seconds)

    def let_data_arrive(self) -> None:
        for wait in self.before_jump:
            wait()
        self._near.send(b"x")
        self._far.recv(1)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop(self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "monotonic", self.now_s)
        monkeypatch.setattr(time, "perf_counter", self.now_s)
        monkeypatch.setattr(time, "sleep", self.sleep)
        # What runs takes no time, so it takes no CPU time either.
        monkeypatch.setattr(time, "process_time", lambda: 0.0)

    def close(self) -> None:
        self._near.close()
        self._far.close()


class _Selector(selectors.DefaultSelector):
    """Does not wait for a timer but jumps to it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        clock = self._clock
        if timeout is None or (clock.busy and timeout > 0):
            began_s = _REAL_CLOCK()
            events = super().select(timeout)
            if clock.threads_take_time or timeout is None:
                clock.jump(_REAL_CLOCK() - began_s)
            return events
        if timeout > 0:
            clock.let_data_arrive()
        events = super().select(0)
        if not events:
            clock.jump(max(timeout, 0.0))
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        super().__init__(_Selector(clock))

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self.clock.busy += 1
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: asyncio.Future[Any]) -> None:
        self.clock.busy -= 1


@pytest.fixture
def anyio_backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str | tuple[str, dict[str, Any]]]:
    """A loop in virtual time for each test."""
    mark = request.node.get_closest_marker("system")
    if mark and not mark.kwargs.get("virtual"):
        yield "asyncio"
        return
    clock = VirtualClock()
    clock.install(monkeypatch)
    yield "asyncio", {"loop_factory": clock.new_loop}
    clock.close()
