"""A worker: the data plane, whose scheduler is in another process.

It has the parts of ``wiring.Gateway`` except probes, sharing and control: its own fleet and
scheduler, which follow the scheduler process and decide while that is away. It answers the public
paths itself; other non-engine paths are passed on to that process (``control``).
"""

import asyncio
import logging
import math
from pathlib import Path

from starlette.applications import Starlette
from starlette.types import ASGIApp, Lifespan

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.models import InstanceListing
from hetero_gateway.gateway.dataplane.predictor import predictor_settings
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.http.downstream import Receive, Scope, Send
from hetero_gateway.scaleout.workers import messages
from hetero_gateway.scaleout.workers.messages import Channel
from hetero_gateway.scaleout.workers.remote import RemoteDispatcher
from hetero_gateway.serve.app import PartsApp
from hetero_gateway.serve.control.public import is_public, plain_app, public_paths
from hetero_gateway.serve.processes.control import ControlRelay
from hetero_gateway.serve.wiring.gateway import Parts

_RECONNECT_S = 0.05
# Predictors that use only lengths.
_BY_LENGTH = ("bucket-mean", "constant", "normal")

_log = logging.getLogger(__name__)


def share_of(config: GatewayConfig, workers: int) -> GatewayConfig:
    """The configuration for one of this many workers: each has its part of every limit."""
    server, pool = config.server, config.pool
    of_server = {"max_buffered_bytes": math.ceil(server.max_buffered_bytes / workers)}
    if server.max_connections is not None:
        of_server["max_connections"] = math.ceil(server.max_connections / workers)
    of_pool = {"max_connections": math.ceil(pool.max_connections / workers)}
    own = {"server": server.model_copy(update=of_server), "pool": pool.model_copy(update=of_pool)}
    return config.model_copy(update=own)


def _reads_prompts(config: GatewayConfig) -> bool:
    return predictor_settings(config)[0] not in _BY_LENGTH


class Worker(Parts):
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
        super().__init__(share_of(config, config.server.workers), config_path)
        self.number = number
        self.app = PartsApp(self, self._control)
        self._control_path = control_path
        self._hub_path = hub_path
        self.remote: RemoteDispatcher

    def _control(self, lifespan: Lifespan[Starlette]) -> ASGIApp:
        own = plain_app(self, public_paths(self), lifespan)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            is_own = scope["type"] == "lifespan" or is_public(scope["path"])
            await (own if is_own else self._relay)(scope, receive, send)

        return answer

    @property
    def listing(self) -> InstanceListing:
        """The data for /readyz and /v1/models: the scheduler process's last report."""
        return self.remote.mirror

    async def start(self) -> None:
        """Connect to the scheduler process; returns once it has sent the instances."""
        self._relay = ControlRelay(self._control_path, lambda: self.remote.alone)
        self._stack.push_async_callback(self._relay.close)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        # The scheduler process probes: these probes are never started.
        self._begin_placing(lambda _: None, recalibrate=False)
        self.fleet.on_publish = self.deadlines.leave_silent
        health = HealthMonitor(self.fleet, self.config.health, tasks)
        self.dataplane = DataPlane(self, health, None)
        self.remote = RemoteDispatcher(
            self.dataplane.dispatcher,
            self.fleet,
            self.metrics,
            self.number,
            self.admission,
            self.dataplane.intake.described_headers,
            _reads_prompts(self.config),
            lambda: self.draining,
            self._take_up,
        )
        self._stack.callback(self.remote.close)
        self.dataplane.rooms.dispatcher = self.remote
        self.fleet.settings(self.settings)
        self.placement.settings(self.settings)
        self.dataplane.settings(self.settings, self._base_dir, self.metrics.predictor_failures)
        self._write_about_requests()
        for work in (self._keep_connected(), self.fleet.close_idle_connections()):
            task = tasks.create_task(work)
            self._stack.callback(task.cancel)
        await self.remote.ready.wait()

    def _take_up(self, config: GatewayConfig) -> None:
        """The scheduler process has another configuration in effect."""
        try:
            change = self.settings.prepare(share_of(config, self.config.server.workers))
        except ConfigError as error:
            _log.error("worker %d cannot apply the configuration: %s", self.number, error)
            return
        self.settings.apply(change)
        self.remote.headers = self.dataplane.intake.described_headers
        self.remote.sends_bodies = _reads_prompts(self.config)

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
