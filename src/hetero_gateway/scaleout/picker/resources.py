"""Resources of every stream: the gateway's parts, and the picker's knowledge of its data planes."""

import logging
import math
import time
from typing import Protocol

import msgspec

from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import GatewayConfig, PickerConfig
from hetero_gateway.gateway.dataplane.handover import Handovers
from hetero_gateway.gateway.dataplane.models import Serving, model_list
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.http.headers import Withheld
from hetero_gateway.scaleout.picker import answers
from hetero_gateway.scaleout.picker.endpoints import Endpoints
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import HttpHeaders
from hetero_gateway.scaleout.picker.reports import Tickets

_LOG_EVERY_S = 10.0
# So that the gateway's own limit for a request comes first.
_GRACE_S = 10

_log = logging.getLogger(__name__)


class PickerGateway(Serving, Protocol):
    """The gateway behind a picker."""

    draining: bool
    fleet: Fleet
    metrics: Metrics

    @property
    def config(self) -> GatewayConfig: ...


class Resources:
    """The resources of a running gateway.

    Attributes:
        open: number of streams that are not over.
        stream_timeout_s: the longest that one may take, whole seconds.
    """

    def __init__(self, gateway: PickerGateway, config: PickerConfig, endpoints: Endpoints) -> None:
        dataplane = gateway.dataplane
        self._gateway = gateway
        self._logged_s: dict[str, float] = {}  # when each misconfiguration was logged last
        self.admission = dataplane.rooms.admission
        self.intake = dataplane.intake
        self.dispatcher = dataplane.dispatcher
        self.metrics = gateway.metrics
        self.reading = dataplane.rooms.reading
        self.name = dataplane.rooms.ids.name
        self.total_timeout_s = dataplane.rooms.total_timeout_s
        self.stream_timeout_s = math.ceil(self.total_timeout_s) + _GRACE_S
        self.extends_timeout = config.extend_timeouts
        self.prefill_header = config.prefill_header
        self.legs = dataplane.dispatcher.placement.legs
        self.endpoints = endpoints
        self.tickets = Tickets()
        self.open = 0

    @property
    def guarded(self) -> Withheld:
        """The header fields that clients may not set, by the current configuration."""
        return self._gateway.dataplane.rooms.fields.guarded

    @property
    def handovers(self) -> Handovers | None:
        """How requests are split; None: they are not."""
        return self._gateway.dataplane.rooms.handovers

    @property
    def queue_timeout_s(self) -> float:
        return self._gateway.config.scheduler.queue.timeout_s

    def count_bug(self) -> None:
        self.metrics.counts("", "").outcomes["internal_error"] += 1

    def misconfigured(self, what: str) -> Refusal:
        """Report that the data plane does not send what the picker needs."""
        now_s = time.monotonic()
        if now_s - self._logged_s.get(what, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_s[what] = now_s
            _log.error("the data plane's ext_proc filter is misconfigured: %s", what)
        return Refusal(500, "misconfigured_data_plane", f"ext_proc: {what}.", kind="server_error")

    def other_request(self, method_and_path: str, head: HttpHeaders) -> bytes:
        """The answer to anything but a POST on an engine's path."""
        if method_and_path == "GET /v1/models":
            headers = [
                (field.key.encode(), field.raw_value or field.value.encode())
                for field in head.headers.headers
            ]
            client = self._gateway.admission.client_of(headers)
            return answers.immediate(200, msgspec.json.encode(model_list(self._gateway, client)))
        raise Refusal(404, "not_found", f"there is no {method_and_path}"[:200])
