"""The services for data planes: ext_proc, and grpc.health.v1 for balancing between pickers."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import PickerConfig
from hetero_gateway.http.tls import server_tls
from hetero_gateway.scaleout.picker.endpoints import Endpoints
from hetero_gateway.scaleout.picker.http2.calls import Call, Methods
from hetero_gateway.scaleout.picker.http2.frames import Status, message
from hetero_gateway.scaleout.picker.http2.server import GrpcServer
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
)
from hetero_gateway.scaleout.picker.reports import ReportCall
from hetero_gateway.scaleout.picker.resources import PickerGateway, Resources
from hetero_gateway.scaleout.picker.stream import Stream

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
REPORTS = "hetero_gateway.Reports"
_ALIVE = ("", "liveness")
# The last one is the name that earlier endpoint pickers were asked for.
_READY = ("readiness", EXT_PROC, "inference-extension")
_OTHER = "unknown"
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
_WATCH_S = 0.5
# Bytes of a message besides the body in it.
_MESSAGE_MARGIN_BYTES = 2**20


class Picker:
    """Serves ext_proc with a gateway's parts. ``start`` once that gateway runs.

    Args:
        gateway: running when ``start`` is called.
        config: where to listen.
    """

    def __init__(self, gateway: PickerGateway, config: PickerConfig, base_dir: Path) -> None:
        self._gateway = gateway
        self._config = config
        self._tls = server_tls(config, base_dir, section="picker", protocol="h2")  # of ext_proc
        self._servers: list[GrpcServer] = []
        self.resources: Resources
        self._following: asyncio.Task[None] | None = None
        self._serving = False
        self.endpoints = Endpoints(
            gateway.fleet, config.resolve_interval_s, drops_credentials=gateway.admission.has_key
        )
        self._watchers: set[HealthCall] = set()
        self._watching: asyncio.TimerHandle | None = None
        self._was_ready = False
        self.port = 0

    @property
    def ready(self) -> bool:
        """Whether requests may be sent here. Also without an instance: the picker reports that
        itself."""
        return self._serving and not self._gateway.draining

    async def start(self) -> None:
        """Listen. Raises HeteroGatewayError: a port cannot be used."""
        config = self._config
        resources = self.resources = Resources(self._gateway, config, self.endpoints)
        await self.endpoints.look()
        self._following = asyncio.get_running_loop().create_task(self.endpoints.follow())

        def process(call: Call) -> Stream:
            resources.open += 1
            return Stream(resources, call)

        health: Methods = {
            f"/{HEALTH}/Check": lambda call: HealthCall(self, call, False),
            f"/{HEALTH}/Watch": lambda call: HealthCall(self, call, True),
        }
        requests: Methods = {
            f"/{EXT_PROC}/Process": process,
            f"/{REPORTS}/Report": lambda call: ReportCall(resources.tickets, call),
        }
        main = self._server({**requests, **health})
        self.port = await main.listen(
            config.host, config.port, None if self._tls is None else self._tls.context
        )
        if config.health_port is not None:
            await self._server(health).listen(config.host, config.health_port)
        self._serving = True

    def _server(self, methods: Methods) -> GrpcServer:
        limits, on_bug = self._gateway.dataplane.body_limits, self.resources.count_bug
        server = GrpcServer(methods, limits, _MESSAGE_MARGIN_BYTES, on_bug)
        self._servers.append(server)
        return server

    async def stop(self) -> None:
        """Turn unready, give the data planes time to see it, and let open streams end."""
        if self._serving and self.resources.open:
            self._serving = False
            await asyncio.sleep(self._config.drain_s)
        self._serving = False
        grace_s = self._gateway.config.server.shutdown_timeout_s
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        if self._following is not None:
            self._following.cancel()
        if self._watching is not None:
            self._watching.cancel()

    def health(self, service: str) -> int:
        """The status, as grpc.health.v1 defines it."""
        if service in _ALIVE:
            return _SERVING
        if service in _READY:
            return _SERVING if self.ready else _NOT_SERVING
        return _UNKNOWN

    def watch(self, watcher: "HealthCall") -> None:
        """Call it whenever the health has changed: one timer, however many there are."""
        self._watchers.add(watcher)
        if self._watching is None:
            self._was_ready = self.ready
            self._watching = asyncio.get_running_loop().call_later(_WATCH_S, self._look)

    def unwatch(self, watcher: "HealthCall") -> None:
        self._watchers.discard(watcher)

    def _look(self) -> None:
        if self.ready != self._was_ready:
            self._was_ready = self.ready
            for watcher in list(self._watchers):
                watcher.look()
        self._watching = (
            asyncio.get_running_loop().call_later(_WATCH_S, self._look) if self._watchers else None
        )


@dataclass(eq=False)
class HealthCall:
    """Check and Watch of grpc.health.v1.Health: a ``Receiver``."""

    _picker: Picker
    _call: Call
    _watches: bool
    _service: str | None = None
    _last: int | None = None

    def message(self, data: bytes) -> None:
        if self._service is not None:
            return
        try:
            service = HealthCheckRequest.FromString(data).service
        except DecodeError:
            self._call.finish(Status.INVALID_ARGUMENT, "this is no HealthCheckRequest")
            return
        # Unknown names are not kept.
        self._service = service if service in (*_ALIVE, *_READY) else _OTHER
        if self._watches:
            self.look()
            self._picker.watch(self)
            return
        status = self._picker.health(self._service)
        if status == _UNKNOWN:
            self._call.finish(Status.NOT_FOUND, "unknown service")
        else:
            self._say(status)
            self._call.finish()

    def look(self) -> None:
        assert self._service is not None
        status = self._picker.health(self._service)
        if status != self._last:
            self._last = status
            self._say(status)

    def _say(self, status: int) -> None:
        self._call.send(message(HealthCheckResponse(status=status).SerializeToString()))

    def refuse(self, refusal: Refusal) -> None:
        self._call.finish(Status.RESOURCE_EXHAUSTED, "the message is too long")

    def half_closed(self) -> None:
        if self._service is None:
            self._call.finish(Status.INVALID_ARGUMENT, "there was no message")

    def lost(self) -> None:
        self._picker.unwatch(self)
