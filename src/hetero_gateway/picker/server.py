"""The picker's process: gRPC for the data plane, and the gateway's control paths over HTTP."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.app import create_app
from hetero_gateway.picker.service import Picker


class PickerServer(uvicorn.Server):
    """uvicorn with the control paths; the gRPC server lives within its start and its end.

    Args:
        on_ready: called with the address of ext_proc, and the URL of the control paths.
    """

    def __init__(
        self,
        config: GatewayConfig,
        config_path: Path | None,
        on_ready: Callable[[str, str], None],
    ) -> None:
        app = create_app(config, config_path)
        self.gateway = app.gateway
        base_dir = config_path.parent if config_path else Path()
        self.picker = Picker(app.gateway, config.picker, base_dir)
        self._grpc_host = config.picker.host
        self._on_ready = on_ready
        super().__init__(
            uvicorn.Config(
                # No data plane: engine paths are not served here.
                app.control,
                host=config.server.host,
                port=config.server.port,
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                log_config=None,
                timeout_graceful_shutdown=round(config.server.shutdown_timeout_s),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        await self.picker.start()
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        name = self._grpc_host
        self._on_ready(
            f"{f'[{name}]' if ':' in name else name}:{self.picker.port}",
            f"http://{f'[{host}]' if ':' in host else host}:{port}",
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gateway.draining = True
        await self.picker.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.gateway.draining = True
        super().handle_exit(sig, frame)


def run(
    config: GatewayConfig, config_path: Path | None, on_ready: Callable[[str, str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. Raises HeteroGatewayError when an address is taken."""

    def ready(address: str, url: str) -> None:
        # What start-up made stays for good: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        on_ready(address, url)

    server = PickerServer(config, config_path, ready)
    # uvicorn raises the signal again once it has shut down: to whoever listened before it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        server.run()
    except SystemExit as error:
        host, port = config.server.host, config.server.port
        raise HeteroGatewayError(f"cannot listen on {host}:{port} (is the port taken?)") from error
