"""uvicorn, set up for the gateway: one process, uvloop, our protocol, a long listen backlog."""

from __future__ import annotations

import gc
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.gateway.app import App
from hetero_gateway.gateway.wire.clients import (
    Watch,
    client_limits,
    default_max_connections,
    raise_descriptor_limit,
)
from hetero_gateway.gateway.wire.protocol import engine_protocol

_log = logging.getLogger(__name__)

# Short backlogs drop connections when hundreds of clients come at once: with 128, first tokens
# came a second late at 512 clients.
_BACKLOG = 4096


class GatewayServer(uvicorn.Server):
    """A uvicorn server that turns unready as soon as it is told to stop."""

    def __init__(self, app: App, on_ready: Callable[[str], None]) -> None:
        server = app.gateway.config.server
        metrics = app.gateway.metrics
        self.watch = Watch(
            client_limits(app.gateway.config), metrics.client_timeouts, metrics.client_refusals
        )
        metrics.client_connections = self.watch.__len__
        super().__init__(
            uvicorn.Config(
                app,
                host=server.host,
                port=server.port,
                loop="uvloop",
                http=engine_protocol(app, self.watch),
                ws="none",
                lifespan="on",
                backlog=_BACKLOG,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                log_config=None,
                timeout_graceful_shutdown=round(server.shutdown_timeout_s),
            )
        )
        self._app = app
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.gateway.draining = True
        super().handle_exit(sig, frame)


def run(app: App, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises HeteroGatewayError when the address is taken."""

    def ready(url: str) -> None:
        # What start-up made stays for good: the collector need not walk it again and again, which
        # would hold every stream for milliseconds.
        gc.collect()
        gc.freeze()
        on_ready(url)

    raise_descriptor_limit()
    most = app.gateway.config.server.max_connections
    if most is not None and most > (allowed := default_max_connections()):
        _log.warning(
            "server.max_connections is %d, and descriptors are enough for %d clients and their "
            "instances' connections: raise the process's limit (ulimit -n)", most, allowed,
        )  # fmt: skip
    server = GatewayServer(app, ready)
    # uvicorn raises the signal again once it has shut down: to whoever listened before it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        server.run()
    except SystemExit as error:
        host, port = app.gateway.config.server.host, app.gateway.config.server.port
        raise HeteroGatewayError(f"cannot listen on {host}:{port} (is the port taken?)") from error
