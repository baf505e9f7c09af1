"""A real redis-server on a free loopback port, without a disk, ended with the block."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.ports import free_port
from hetero_gateway.scaleout.sharing.redis import RedisConnection
from tests.fakes.clock import VirtualLoop

START_S = 20.0


class RedisServer:
    """``redis-server``, which can be killed, stopped and started again on the same port."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--daemonize", "no", *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self.process.poll() is None, "redis-server ended"
            time.sleep(0.02)
        raise RuntimeError("redis-server did not come up")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None

    def stop(self) -> None:
        """SIGSTOP: it accepts connections and says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    server = RedisServer(*options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def redis_at_once() -> Iterator[RedisServer]:
    """A server whose replies to gateways of a ``VirtualLoop`` take none of its time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    asked, send = False, RedisConnection.send

    def ask(self: RedisConnection, commands: Sequence[tuple[bytes, ...]]) -> None:
        nonlocal asked
        asked = True
        send(self, commands)

    def wait_for_replies() -> None:
        nonlocal asked
        # What comes together is replied to in any order: all that came before the second of two.
        for _ in range(2 * asked):
            connection.send(b"PING\r\n")
            assert connection.recv(7) == b"+PONG\r\n"
        asked = False

    with (
        redis_server() as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
        pytest.MonkeyPatch.context() as patch,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patch.setattr(RedisConnection, "send", ask)
        loop.clock.before_jump.append(wait_for_replies)
        yield server
        loop.clock.before_jump.remove(wait_for_replies)
