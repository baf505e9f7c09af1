"""The scheduler process's end: its workers' questions and reports, and its messages to them.

Each worker has a ``WorkerSession``. Its requests go to the same ``LocalDispatcher`` as those of a
single-process gateway.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero_gateway import __version__
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher
from hetero_gateway.gateway.dataplane.records import OUTSIDE
from hetero_gateway.gateway.dataplane.responses import Response
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.scaleout.workers import messages
from hetero_gateway.scaleout.workers.messages import Channel
from hetero_gateway.scaleout.workers.session import RequestSession

VIEW_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class WorkerSession(RequestSession):
    """One worker, for as long as its connection lasts."""

    def __init__(self, hub: "Hub", channel: Channel) -> None:
        super().__init__(hub.dispatcher, hub.admission, channel.send)
        self.channel = channel
        self.connections = 0
        self.pools: dict[InstanceId, int] = {}
        self._hub = hub
        self._process = (-1, 0)  # its number, and the process's
        self._handlers |= {
            messages.Hello: self._hello,
            messages.Known: self._known,
            messages.Counts: self._counts,
        }

    def unsent(self, message: Any, error: Exception) -> None:
        if isinstance(message, messages.PlacedAt):
            self.broke(message, error)
            self.channel.send(messages.Failed(message.key))

    def lost(self) -> None:
        """The worker is gone, and its requests with it."""
        self._hub.sessions.discard(self)
        if len(self):
            _log.warning("%s is gone, and %d requests with it", self.name, len(self))
        self.end()

    def _hello(self, said: messages.Hello) -> None:
        self.name = f"worker {said.worker} (process {said.pid})"
        self._process = said.worker, said.pid
        if said.version != __version__:
            # They are started together; after an upgrade of the package, a restart is needed.
            _log.error("%s has version %s, this process %s", self.name, said.version, __version__)
            self.channel.abort()
            return
        hub = self._hub
        told = (hub.config, hub.prefix_secret, hub.listed(), hub.instances(), hub.keys)
        for message in told:
            if message is not None:
                self.channel.send(message)

    def _known(self, said: messages.Known) -> None:
        now_s, responses = time.monotonic(), self.dispatcher.intake.responses
        for name, instance_id, tokens, model, owner in said.responses:
            if responses.find(name, now_s) is None:
                responses.note(Response(name, instance_id, tokens, None, 0, model, owner), now_s)

    def _counts(self, said: messages.Counts) -> None:
        self.connections = said.connections
        self.pools = said.pools
        self.channel.send(messages.Counted(said.number))
        if said.draining:
            self._hub.on_draining()
        if said.number <= self._hub.counted.get(self._process, 0):
            return  # its answer was lost with a connection
        self._hub.counted[self._process] = said.number
        metrics, knows = self._hub.metrics, self._hub.has_series
        for row in said.series:
            if knows(row.instance_id):
                metrics.add_series(row)
        for name, outcome, number in said.classes:
            metrics.classes[name, outcome] += number
        for instance_id, number in said.disconnects.items():
            if knows(instance_id):
                metrics.client_disconnects[instance_id] += number
        metrics.client_timeouts.update(said.timeouts)
        metrics.client_refusals.update(said.refusals)
        for status, number in said.statuses.items():
            metrics.statuses[status] += number
        metrics.streams_continued.update(said.continued)
        metrics.overhead_s.add(said.overhead)
        metrics.round_trip_s.add(said.round_trip)
        self._hub.admission.usage.add(said.usage)


@dataclass(eq=False)
class Hub:
    """All workers of a gateway. Needs a running event loop.

    Args:
        _fleet, dispatcher, metrics, admission: of the gateway; the fleet reports its changes
            from now on.
        _listener: where the workers connect.
        on_draining: called once a worker was asked to stop.
    """

    _fleet: Fleet
    dispatcher: LocalDispatcher
    metrics: Metrics
    admission: Admission
    _listener: socket.socket
    on_draining: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.sessions: set[WorkerSession] = set()
        # The sequence numbers of workers' last counts, by their numbers and processes.
        self.counted: dict[tuple[int, int], int] = {}
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._told: messages.Instances | None = None
        self._told_listed: messages.Listed | None = None
        self.config: messages.Configuration | None = None  # None: unchanged since the start
        self.keys: messages.Keys | None = None  # the same
        self.prefix_secret: messages.PrefixSecret | None = None  # the same
        self._configs: dict[InstanceId, tuple[Any, bytes]] = {}
        self.metrics.workers = self.__len__
        self.metrics.client_connections = lambda: sum(s.connections for s in self.sessions)

    def __len__(self) -> int:
        """Connected workers."""
        return len(self.sessions)

    def has_series(self, instance_id: str) -> bool:
        """Whether the series exists; those of a removed instance are gone for good."""
        return instance_id in self._fleet.instances or instance_id in ("", OUTSIDE)

    def connections_to(self, instance_id: InstanceId) -> int:
        """The workers' open connections to an instance, within the last second."""
        return sum(session.pools.get(instance_id, 0) for session in self.sessions)

    def tell_keys(self) -> None:
        if (keys := self.admission.keys) is not None:
            self.keys = messages.Keys(keys.model_dump_json(by_alias=True).encode())
            self._send(self.keys)

    async def start(self) -> None:
        """Accept workers."""
        self._server = await self._loop.create_unix_server(self._channel, sock=self._listener)
        self._fleet.on_publish = self._tell_soon
        self._timer = self._loop.call_later(VIEW_INTERVAL_S, self._tick)

    async def stop(self) -> None:
        """Disconnect all workers."""
        self._fleet.on_publish = None
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        if self._server is not None:
            self._server.close()
        for session in list(self.sessions):
            session.channel.close()
            session.lost()

    def _channel(self) -> Channel:
        channel = Channel(messages.FromWorker)
        session = WorkerSession(self, channel)
        channel.listener = session
        self.sessions.add(session)
        return channel

    # The instances

    def instances(self) -> messages.Instances:
        """The instances, in the form for workers."""
        instances = []
        for instance in self._fleet.instances.values():
            known = self._configs.get(instance.id)
            if known is None or known[0] is not instance.config:
                known = (instance.config, instance.config.model_dump_json().encode())
                self._configs[instance.id] = known
            instances.append(
                messages.InstanceNow(
                    known[1],
                    sorted(instance.models),
                    instance.max_model_len,
                    instance.engine_kv_capacity_tokens,
                    instance.weight,
                    instance.up and instance.awake and not instance.outcomes.ejected,
                    instance.draining,
                    instance.silent,
                    instance.leave_at_s,
                    instance.names_prompts,
                )
            )
        for gone in self._configs.keys() - self._fleet.instances.keys():
            del self._configs[gone]
        return messages.Instances(instances)

    def listed(self) -> messages.Listed:
        return messages.Listed(self._fleet.ready(), dict(self._fleet.models()))

    def tell_settings(self, config: GatewayConfig) -> None:
        self.config = messages.Configuration(config.model_dump_json().encode())
        self._send(self.config)

    def tell_prefix_secret(self, secret: bytes) -> None:
        self.prefix_secret = messages.PrefixSecret(secret)
        self._send(self.prefix_secret)

    def _send(self, message: Any) -> None:
        """To all workers."""
        for session in self.sessions:
            session.channel.send(message)

    def _tell_soon(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._soon = None
        instances = self.instances()
        if instances != self._told:
            self._told = instances
            self._tell_listed()
            self._send(instances)

    def _tell_listed(self) -> None:
        listed = self.listed()
        if listed != self._told_listed:
            self._told_listed = listed
            self._send(listed)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(VIEW_INTERVAL_S, self._tick)
        if not self.sessions:
            return
        self._tell()  # ejections after failures are published nowhere else
        self._tell_listed()  # nor are engines' model cards
        scheduler, now_s = self._fleet.scheduler, time.monotonic()
        loads = [
            (name, scheduler.members.table[name].own_load(now_s)) for name in self._fleet.instances
        ]
        self._send(messages.InstanceLoads(loads))


def listen(path: str) -> socket.socket:
    """A Unix socket that listens at ``path``, for this user alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(128)
    listener.setblocking(False)
    return listener
