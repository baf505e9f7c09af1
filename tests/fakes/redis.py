"""A real redis-server on a free loopback port, without a disk, ended with the block."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

from benchmarks.ports import free_port

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
