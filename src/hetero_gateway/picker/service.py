"""What data planes call: ext_proc, and grpc.health.v1 for whoever balances between pickers."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
from pathlib import Path
from typing import NamedTuple

import msgspec
from google.protobuf.message import DecodeError

from hetero_gateway.errors import ConfigError, Refusal
from hetero_gateway.files.gateway_config import PickerConfig
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.app import model_list
from hetero_gateway.gateway.control.metrics import Metrics
from hetero_gateway.gateway.dataplane.dispatcher import LocalDispatcher
from hetero_gateway.gateway.dataplane.intake import Intake, LongBodies
from hetero_gateway.gateway.wiring import Gateway
from hetero_gateway.picker import answers
from hetero_gateway.picker.endpoints import Endpoints
from hetero_gateway.picker.http2.calls import Call
from hetero_gateway.picker.http2.frames import Status, message
from hetero_gateway.picker.http2.server import Methods, Server
from hetero_gateway.picker.protocol.messages_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HttpHeaders,
)
from hetero_gateway.picker.reports import ReportCall
from hetero_gateway.picker.stream import Stream

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
REPORTS = "hetero_gateway.Reports"
_ALIVE = ("", "liveness")
# The last one is what earlier endpoint pickers are asked for.
_READY = ("readiness", EXT_PROC, "inference-extension")
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
_WATCH_S = 0.5
# Of a message, besides the body in it.
_MESSAGE_MARGIN_BYTES = 2**20


class Rooms(NamedTuple):
    """What every request passes through."""

    admission: Admission
    intake: Intake
    dispatcher: LocalDispatcher
    metrics: Metrics
    total_timeout_s: float
    reading: LongBodies


class Picker:
    """Serves ext_proc with a gateway's parts. ``start`` once that gateway runs.

    Args:
        gateway: running when ``start`` is called.
        config: where to listen.
    """

    def __init__(self, gateway: Gateway, config: PickerConfig, base_dir: Path = Path()) -> None:
        self._gateway = gateway
        self._config = config
        self._tls = _tls(config, base_dir)
        self._servers: list[Server] = []
        self._following: asyncio.Task[None] | None = None
        self._serving = False
        self.extends_timeout = config.extend_timeouts
        self.endpoints = Endpoints(
            gateway.fleet, config.resolve_interval_s, drops_credentials=gateway.admission.has_key
        )
        self.tickets: dict[bytes, Stream] = {}
        # Envoy may ask several pickers in turn: what is of another one must be known as such.
        self.ticket_prefix = b"%010d" % secrets.randbelow(10**10)
        self._numbers = itertools.count()
        self.open = 0
        self.port = 0

    @property
    def ready(self) -> bool:
        """Whether requests may be sent here. Without an instance, too: it says so itself."""
        return self._serving and not self._gateway.draining

    @property
    def queue_timeout_s(self) -> float:
        return self._gateway.config.scheduler.queue.timeout_s

    async def start(self) -> None:
        """Listen. Raises HeteroGatewayError: a port cannot be used."""
        config, dataplane = self._config, self._gateway.dataplane
        self.rooms = Rooms(
            dataplane.rooms.admission,
            dataplane.intake,
            dataplane.dispatcher,
            self._gateway.metrics,
            dataplane.rooms.total_timeout_s,
            dataplane.rooms.reading,
        )
        self.name = dataplane.name
        self.body_limits = dataplane.body_limits
        await self.endpoints.look()
        self._following = asyncio.get_running_loop().create_task(self.endpoints.follow())
        health: Methods = {
            f"/{HEALTH}/Check": lambda call: HealthCall(self, call, watches=False),
            f"/{HEALTH}/Watch": lambda call: HealthCall(self, call, watches=True),
        }
        requests: Methods = {
            f"/{EXT_PROC}/Process": lambda call: Stream(self, call),
            f"/{REPORTS}/Report": lambda call: ReportCall(self, call),
        }
        main = self._server({**requests, **health})
        self.port = await main.listen(config.host, config.port, self._tls)
        if config.health_port is not None:
            await self._server(health).listen(config.host, config.health_port)
        self._serving = True

    def _server(self, methods: Methods) -> Server:
        server = Server(methods, self.body_limits, _MESSAGE_MARGIN_BYTES, self.count_bug)
        self._servers.append(server)
        return server

    async def stop(self) -> None:
        """Turn unready, give the data planes time to see it, and let open streams end."""
        if self._serving and self.open:
            self._serving = False
            await asyncio.sleep(self._config.drain_s)
        self._serving = False
        grace_s = self._gateway.config.server.shutdown_timeout_s
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        if self._following is not None:
            self._following.cancel()

    def issue_ticket(self, stream: Stream) -> bytes:
        """A name for a request's response, by which the data plane may report on it."""
        ticket = b"%b%010d" % (self.ticket_prefix, next(self._numbers) % 10**10)
        self.tickets[ticket] = stream
        return ticket

    def count_bug(self) -> None:
        self.rooms.metrics.counts("", "").outcomes["internal_error"] += 1

    def other_request(self, method_and_path: str, head: HttpHeaders) -> bytes:
        """The answer to what is no POST on an engine's path."""
        if method_and_path == "GET /v1/models":
            headers = [
                (field.key.encode(), field.raw_value or field.value.encode())
                for field in head.headers.headers
            ]
            client = self._gateway.admission.client_of(headers)
            return answers.immediate(200, msgspec.json.encode(model_list(self._gateway, client)))
        raise Refusal(404, "not_found", f"there is no {method_and_path}"[:200])

    def health(self, service: str) -> int:
        """As grpc.health.v1 has it."""
        if service in _ALIVE:
            return _SERVING
        if service in _READY:
            return _SERVING if self.ready else _NOT_SERVING
        return _UNKNOWN


class HealthCall:
    """Check and Watch of grpc.health.v1.Health: a ``Receiver``."""

    def __init__(self, picker: Picker, call: Call, *, watches: bool) -> None:
        self._picker = picker
        self._call = call
        self._watches = watches
        self._service: str | None = None
        self._last: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def message(self, data: bytes) -> None:
        if self._service is not None:
            return
        try:
            self._service = HealthCheckRequest.FromString(data).service
        except DecodeError:
            self._call.finish(Status.INVALID_ARGUMENT, "this is no HealthCheckRequest")
            return
        if self._watches:
            self._look(self._service)
            return
        status = self._picker.health(self._service)
        if status == _UNKNOWN:
            self._call.finish(Status.NOT_FOUND, "unknown service")
        else:
            self._say(status)
            self._call.finish()

    def _look(self, service: str) -> None:
        status = self._picker.health(service)
        if status != self._last:
            self._last = status
            self._say(status)
        self._timer = asyncio.get_running_loop().call_later(_WATCH_S, self._look, service)

    def _say(self, status: int) -> None:
        self._call.send(message(HealthCheckResponse(status=status).SerializeToString()))

    def refuse(self, refusal: Refusal) -> None:
        self._call.finish(Status.RESOURCE_EXHAUSTED, "the message is too long")

    def half_closed(self) -> None:
        if self._service is None:
            self._call.finish(Status.INVALID_ARGUMENT, "there was no message")

    def lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _tls(config: PickerConfig, base_dir: Path) -> ssl.SSLContext | None:
    if config.certificate_file is None or config.key_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(base_dir / config.certificate_file, base_dir / config.key_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"picker.certificate_file, picker.key_file: {error}") from error
    return context
