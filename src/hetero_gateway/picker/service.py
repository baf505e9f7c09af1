"""The gRPC services: ext_proc, and grpc.health.v1 for whoever balances between pickers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec

from hetero_gateway.core.scheduling.decision_log import DecisionLog
from hetero_gateway.errors import ConfigError, HeteroGatewayError, Refusal
from hetero_gateway.files.gateway_config import PickerConfig
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.app import model_list
from hetero_gateway.gateway.control.metrics import Metrics
from hetero_gateway.gateway.dataplane.intake import Intake
from hetero_gateway.gateway.dataplane.placement import Placement
from hetero_gateway.gateway.dataplane.records import Recorder
from hetero_gateway.gateway.wiring import Gateway
from hetero_gateway.picker import answers
from hetero_gateway.picker.endpoints import Endpoints
from hetero_gateway.picker.protocol.messages_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HttpHeaders,
)
from hetero_gateway.picker.stream import Stream

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
_ALIVE = ("", "liveness")
# The last one is what earlier endpoint pickers are asked for.
_READY = ("readiness", EXT_PROC, "inference-extension")
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
_WATCH_S = 0.5
# A body travels in one message where it is buffered.
_MESSAGE_MARGIN_BYTES = 2**20

_log = logging.getLogger(__name__)


class Rooms(NamedTuple):
    """What every request passes through."""

    admission: Admission
    intake: Intake
    placement: Placement
    recorder: Recorder
    decisions: DecisionLog
    metrics: Metrics
    total_timeout_s: float


class Picker:
    """Serves ext_proc with a gateway's parts. ``start`` once that gateway runs.

    Args:
        gateway: running when ``start`` is called.
        config: where to listen.
    """

    def __init__(self, gateway: Gateway, config: PickerConfig, base_dir: Path = Path()) -> None:
        self._gateway = gateway
        self._config = config
        self._credentials = _credentials(config, base_dir)
        self._servers: list[Any] = []
        self._following: asyncio.Task[None] | None = None
        self.extends_timeout = config.extend_timeouts
        self.queue_timeout_s = gateway.config.scheduler.queue.timeout_s
        self.endpoints = Endpoints(
            gateway.fleet, config.resolve_interval_s, drops_credentials=gateway.admission.has_key
        )
        self.open = 0
        self.port = 0

    @property
    def ready(self) -> bool:
        """Whether requests may be sent here. Without an instance, too: it says so itself."""
        return bool(self._servers) and not self._gateway.draining

    async def start(self) -> None:
        """Listen. Raises HeteroGatewayError: a port cannot be used."""
        config = self._config
        dataplane = self._gateway.dataplane
        self.rooms = Rooms(
            dataplane.rooms.admission,
            dataplane.intake,
            self._gateway.placement,
            dataplane.recorder,
            dataplane.decisions,
            self._gateway.metrics,
            dataplane.rooms.total_timeout_s,
        )
        self.name = dataplane.name
        await self.endpoints.look()
        self._following = asyncio.get_running_loop().create_task(self.endpoints.follow())
        main = self._server((_ext_proc(self), _health(self)))
        self.port = _listen(main, config.host, config.port, self._credentials)
        servers = [main]
        if config.health_port is not None:
            plain = self._server((_health(self),))
            _listen(plain, config.host, config.health_port, None)
            servers.append(plain)
        for server in servers:
            await server.start()
        self._servers = servers

    def _server(self, handlers: tuple[Any, ...]) -> Any:
        limit = self.rooms.intake.max_body_bytes + _MESSAGE_MARGIN_BYTES
        return grpc.aio.server(
            handlers=handlers,
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                # Two pickers on one port would each see a part of the streams by chance.
                ("grpc.so_reuseport", 0),
                # Data planes keep their connection alive as they like.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )

    async def stop(self) -> None:
        """Turn unready, give the data planes time to see it, and let open streams end."""
        servers, self._servers = self._servers, []
        if servers and self.open:
            await asyncio.sleep(self._config.drain_s)
        grace_s = self._gateway.config.server.shutdown_timeout_s
        await asyncio.gather(*(server.stop(grace_s) for server in servers))
        if self._following is not None:
            self._following.cancel()

    async def process(self, _: Any, context: Any) -> None:
        """One stream of ext_proc, which is one request."""
        stream = Stream(self, context)
        self.open += 1
        try:
            await stream.run()
        except Exception:
            # The boundary of a request: a bug costs the one that met it.
            _log.exception("%r failed inside the picker", stream)
            self.rooms.metrics.series("", "").outcomes["internal_error"] += 1
            raise
        finally:
            self.open -= 1
            stream.release()

    def other_request(self, method_and_path: str, head: HttpHeaders) -> bytes:
        """The answer to what is no POST on an engine's path."""
        if method_and_path == "GET /v1/models":
            headers = [
                (field.key.encode(), field.raw_value or field.value.encode())
                for field in head.headers.headers
            ]
            self._gateway.admission.client_of(headers)
            return answers.immediate(200, msgspec.json.encode(model_list(self._gateway)))
        raise Refusal(404, "not_found", f"there is no {method_and_path}"[:200])

    async def check(self, data: bytes, context: Any) -> bytes:
        """grpc.health.v1.Health/Check."""
        status = self._status(data)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthCheckResponse(status=status).SerializeToString()

    async def watch(self, data: bytes, context: Any) -> None:
        """grpc.health.v1.Health/Watch."""
        last = None
        while True:
            status = self._status(data)
            if status != last:
                await context.write(HealthCheckResponse(status=status).SerializeToString())
                last = status
            await asyncio.sleep(_WATCH_S)

    def _status(self, data: bytes) -> int:
        service = HealthCheckRequest.FromString(data).service
        if service in _ALIVE:
            return _SERVING
        if service in _READY:
            return _SERVING if self.ready else _NOT_SERVING
        return _UNKNOWN


def _ext_proc(picker: Picker) -> Any:
    # No serialisers: messages come and go as bytes, most of them ready-made.
    method = grpc.stream_stream_rpc_method_handler(picker.process)
    return grpc.method_handlers_generic_handler(EXT_PROC, {"Process": method})


def _health(picker: Picker) -> Any:
    return grpc.method_handlers_generic_handler(
        HEALTH,
        {
            "Check": grpc.unary_unary_rpc_method_handler(picker.check),
            "Watch": grpc.unary_stream_rpc_method_handler(picker.watch),
        },
    )


def _credentials(config: PickerConfig, base_dir: Path) -> Any:
    if config.certificate_file is None or config.key_file is None:
        return None
    try:
        certificate = (base_dir / config.certificate_file).read_bytes()
        key = (base_dir / config.key_file).read_bytes()
    except OSError as error:
        raise ConfigError(f"picker.certificate_file, picker.key_file: {error}") from error
    return grpc.ssl_server_credentials([(key, certificate)])


def _listen(server: Any, host: str, port: int, credentials: Any) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            bound: int = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise HeteroGatewayError(f"cannot listen on {address} (is the port taken?)") from error
    return bound
