"""Runs an emulated instance under uvicorn, on a socket of its own, until a signal."""

import signal
import socket
from collections.abc import Callable

import uvicorn

from hetero_gateway.errors import ConfigError
from hetero_gateway.http.listening import cannot_listen
from hetero_gateway.lab.emulator.app import EmulatedVLLM

_BACKLOG = 4096  # a burst of clients must not see refused connections


class EmulatedServer(uvicorn.Server):
    """uvicorn with an address of its own, and a callback when it is ready.

    Args:
        emulated: the instance.
        listener: a bound socket.
        shutdown_timeout_s: how long open streams may continue after a signal; 0 aborts them, as
            vLLM.
        on_ready: called once, when requests are answered.
    """

    def __init__(
        self,
        emulated: EmulatedVLLM,
        listener: socket.socket,
        *,
        shutdown_timeout_s: int = 0,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.emulated = emulated
        super().__init__(
            uvicorn.Config(
                emulated,
                http="httptools",
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                log_level="error",
                # A second, so that aborted answers reach their clients.
                timeout_graceful_shutdown=max(1, shutdown_timeout_s),
            )
        )
        self._listener = listener
        self._on_ready = on_ready
        self._shutdown_timeout_s = shutdown_timeout_s
        emulated.on_death = self._end

    def _end(self) -> None:
        """Exit, like a vLLM whose engine has died."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self._shutdown_timeout_s:
            self.emulated.abort_all()
        await super().shutdown(sockets)

    def serve_until_signal(self) -> None:
        """Blocks; returns after SIGINT or SIGTERM, when everything is closed."""
        # uvicorn raises the signal again once it has shut down, for the earlier handler.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self.run(sockets=[self._listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises ConfigError: the address cannot be used.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port: must be 0 to 65535, not {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(cannot_listen(host, port, error, "--port")) from error
