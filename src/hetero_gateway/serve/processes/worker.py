"""A worker: the data plane, whose scheduler is in another process.

It has what ``wiring.Gateway`` has but for probes, sharing and control: an own fleet and scheduler,
which follow the scheduler process and decide while that is away. It answers the public paths
itself; all others that are not an engine's are passed on to that process (``control``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from hetero_gateway.core.lengths.estimates import BytesPerToken
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.models import Listing
from hetero_gateway.gateway.dataplane.placement import Placement
from hetero_gateway.gateway.dataplane.predictor import make_predictor, predictor_settings
from hetero_gateway.gateway.dataplane.realtime import Realtime
from hetero_gateway.gateway.dataplane.relay import Deadlines
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.request.tokenizer import tokenizer_of
from hetero_gateway.gateway.settings import Settings
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.http.downstream import Downstream, Listener, Receive, Scope, Send
from hetero_gateway.http.inbound import Inbound
from hetero_gateway.http.tls import server_tls
from hetero_gateway.scaleout.workers import messages
from hetero_gateway.scaleout.workers.channel import Channel
from hetero_gateway.scaleout.workers.remote import RemoteDispatcher
from hetero_gateway.serve.app import route, worker_paths
from hetero_gateway.serve.control.public import is_public
from hetero_gateway.serve.processes.control import ControlRelay
from hetero_gateway.serve.wiring.gateway import (
    make_admission,
    make_hops,
    make_tracing,
    prefix_secret,
)

_RECONNECT_S = 0.05
# Predictors that look at lengths alone.
_BY_LENGTH = ("bucket-mean", "constant", "normal")

_log = logging.getLogger(__name__)


def share_of(config: GatewayConfig, workers: int) -> GatewayConfig:
    """The configuration of one of this many workers: of what is limited, each has its part."""
    server, pool = config.server, config.pool
    connections = server.max_connections
    return config.model_copy(
        update={
            "server": server.model_copy(
                update={
                    "max_buffered_bytes": math.ceil(server.max_buffered_bytes / workers),
                    "max_connections": None
                    if connections is None
                    else math.ceil(connections / workers),
                }
            ),
            "pool": pool.model_copy(
                update={"max_connections": math.ceil(pool.max_connections / workers)}
            ),
        }
    )


def _reads_prompts(config: GatewayConfig) -> bool:
    return predictor_settings(config)[0] not in _BY_LENGTH


class Worker:
    """Serves clients. ``start`` needs a running event loop.

    Args:
        config: of the gateway.
        config_path: profile files are relative to it.
        number: from 0, of ``config.server.workers``.
        hub_path, control_path: the scheduler process's Unix sockets.
    """

    def __init__(
        self,
        config: GatewayConfig,
        config_path: Path | None,
        number: int,
        hub_path: str,
        control_path: str,
    ) -> None:
        self.settings = Settings(share_of(config, config.server.workers))
        self.number = number
        self.draining = False
        self.has_admin = False
        # Takes the lines of the access log; None: nobody does.
        self.access: Callable[[list[bytes]], None] | None = None
        base_dir = config_path.parent if config_path else Path()
        self._base_dir = base_dir
        self.tls = server_tls(config.server, base_dir)
        self.admission = make_admission(config, base_dir)
        self._prefix_secret = prefix_secret(config)
        self.fleet = Fleet(self.config, base_dir, make_hops())
        self.metrics = Metrics(config.scheduler.policy, self.fleet.gauges)
        self.control = ControlRelay(control_path, lambda: self.remote.alone)
        self._paths = worker_paths(self)
        self._predictor = make_predictor(config, base_dir, self.metrics.predictor_failures)
        self._hub_path = hub_path
        self._stack = AsyncExitStack()
        self.dataplane: DataPlane
        self.remote: RemoteDispatcher
        self.realtime: Realtime

    @property
    def config(self) -> GatewayConfig:
        """The configuration in effect, this worker's share of it."""
        return self.settings.config

    # A Service

    @property
    def body_limits(self) -> BodyLimits:
        return self.dataplane.body_limits

    def open(self, inbound: Inbound, downstream: Downstream) -> Listener:
        return self.dataplane.open(inbound, downstream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await self.realtime.serve(scope, receive, send)
        else:
            await route(scope, receive, send, self.dataplane, self._answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = self._paths if is_public(scope["path"]) else self.control
        await paths(scope, receive, send)

    @property
    def listing(self) -> Listing:
        """What /readyz and /v1/models answer by: what the scheduler process said last."""
        return self.remote.members

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:
            _log.exception("worker %d cannot start", self.number)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Connect to the scheduler process; returns once it has named the instances."""
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        config = self.config
        outcomes = OutcomeWatch(self.fleet, self.metrics)
        self._stack.callback(outcomes.close)
        deadlines = Deadlines(config.timeouts)
        self._stack.callback(deadlines.close)
        self._stack.callback(self.fleet.close)
        placement = Placement(self.fleet, self.metrics, config.scheduler.queue)
        self._stack.callback(placement.close)
        tokens = config.scheduler.tokens
        self.dataplane = DataPlane(
            config,
            self.fleet,
            # Never started: probes are the scheduler process's.
            HealthMonitor(self.fleet, config.health, tasks),
            outcomes,
            self.metrics,
            self.admission,
            self._predictor,
            BytesPerToken(tokens.bytes_per_token),
            tokenizer_of(tokens, self._base_dir),
            deadlines,
            placement,
            self._prefix_secret,
        )
        self.remote = RemoteDispatcher(
            self.dataplane.dispatcher,
            self.fleet,
            self.metrics,
            self.number,
            admission=self.admission,
            headers=self.dataplane.intake.described_headers,
            sends_bodies=_reads_prompts(config),
            draining=lambda: self.draining,
            on_config=self._take_up,
        )
        self.realtime = Realtime(self.dataplane)
        # A request goes there straight from its connection.
        self.open = self.dataplane.open  # type: ignore[method-assign]
        self._stack.callback(self.remote.close)
        self.dataplane.rooms.dispatcher = self.remote
        self.fleet.settings(self.settings)
        placement.settings(self.settings)
        self.dataplane.settings(self.settings, self._base_dir, self.metrics.predictor_failures)
        self.dataplane.write_about(config.log, self.access, make_tracing(config.traces))
        self._stack.callback(self.dataplane.close)
        for work in (self._keep_connected(), self.fleet.close_idle_connections()):
            task = tasks.create_task(work)
            self._stack.callback(task.cancel)
        await self.remote.ready.wait()

    async def stop(self) -> None:
        self.draining = True
        await self._stack.aclose()
        await self.control.close()

    def drain(self) -> None:
        """It was asked to end; the scheduler process hears of it and passes it on."""
        self.draining = True

    def _take_up(self, config: GatewayConfig) -> None:
        """The scheduler process has another configuration in effect."""
        try:
            change = self.settings.prepare(share_of(config, self.config.server.workers))
        except ConfigError as error:
            _log.error("worker %d cannot take up the configuration: %s", self.number, error)
            return
        self.settings.apply(change)
        self.remote.headers = self.dataplane.intake.described_headers
        self.remote.sends_bodies = _reads_prompts(self.config)

    def reload_soon(self, cause: str) -> None:
        """The scheduler process reads the configuration, and passes it on."""

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, channel = await loop.create_unix_connection(
                    lambda: Channel(messages.FromScheduler, self.remote), self._hub_path
                )
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            self.remote.connected(channel)
            await self.remote.gone.wait()
            await asyncio.sleep(_RECONNECT_S)
