"""The picker's process: gRPC for the data plane, and the gateway's control paths over HTTP."""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetero_gateway.errors import Refusal
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.dataplane.answers import answer
from hetero_gateway.http.downstream import Downstream, Listener
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.listening import url_host
from hetero_gateway.scaleout.picker.service import Picker
from hetero_gateway.serve.app import App, create_app
from hetero_gateway.serve.server import GatewayServer

_ELSEWHERE = Refusal(404, "not_found", "This is the picker: engine paths are served by Envoy.")


class ControlApp(App):
    """Only the control paths: no engine path is served here."""

    def open(self, inbound: Inbound, downstream: Downstream) -> Listener:
        self.gateway.dataplane.rooms.ids.name(inbound)
        answer(downstream, _ELSEWHERE, inbound.path, inbound.request_id)
        return _NOBODY


class _Nobody:
    """For a request that was answered at once."""

    over = True

    def begin(self, body: bytes) -> None: ...

    def refuse(self, refusal: Refusal) -> None: ...

    def caught_up(self) -> None: ...

    def client_gone(self) -> None: ...


_NOBODY: Listener = _Nobody()


class PickerServer(GatewayServer):
    """The control paths over HTTP; the ext_proc server runs within its start and stop.

    Args:
        on_ready: called with the address of ext_proc, and the URL of the control paths.
    """

    def __init__(
        self,
        config: GatewayConfig,
        config_path: Path | None,
        on_ready: Callable[[str, str], None],
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        # No client's body passes through it, so batches' lines cannot be sent.
        config = config.model_copy(update={"batches": BatchesConfig()})
        app = create_app(config, config_path, flags=flags)
        service = ControlApp(app.gateway, lambda _: app.control)
        super().__init__(service, app.gateway, lambda _: None)
        base_dir = config_path.parent if config_path else Path()
        self.made_admin_key = app.gateway.made_admin_key
        self.picker = Picker(app.gateway, config.picker, base_dir)
        self._grpc_host = config.picker.host
        self._on_picking = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            await self.picker.start()
            self._on_picking(f"{url_host(self._grpc_host)}:{self.picker.port}", self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gateway.draining = True
        await self.picker.stop()
        await super().shutdown(sockets)
