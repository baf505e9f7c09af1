"""The scheduler process's end: what its workers ask and report, and what they are told.

Each worker has a ``WorkerSession``. Its requests go to the same ``LocalDispatcher`` as those of a
gateway of one process, so that policies, queue, ledger, records and predictors are none of this
module's business. A session that ends, however it ends, leaves nothing on any instance.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero_gateway import __version__
from hetero_gateway.core.types import InstanceId, Reject
from hetero_gateway.engines.vllm import REALTIME, Work, work_of_path
from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.admission.clients import Admission, Client
from hetero_gateway.gateway.dataplane.dispatcher import Place, Placed, Waiting
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher, Placement
from hetero_gateway.gateway.dataplane.responses import Response
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.heads import Inbound
from hetero_gateway.scaleout.workers import messages
from hetero_gateway.scaleout.workers.messages import Channel

VIEW_INTERVAL_S = 1.0
# By which the supervisor gives all of its processes one secret: for the keys of prompts, and
# the key of /admin.
SECRET_ENV = "HETERO_GATEWAY_PROCESS_SECRET"

_Describe = Callable[[Inbound, Client, ParsedRequest, int | None], Job]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Request:
    """A worker's request: the ``Owner`` of its place."""

    session: WorkerSession
    key: int
    job: Job
    deadline_s: float
    wait: Waiting | None = None
    place: Place | None = None  # and not settled
    settled: Place | None = None  # the last one

    def submit(self, tried: list[InstanceId], failure: InstanceError | None) -> None:
        try:
            place = self.session.dispatcher.submit(self.job, tried, failure, self.deadline_s, self)
        except Refusal as refusal:
            self.turned_away(refusal)
        except Exception as error:
            self.broke(error)
        else:
            if isinstance(place, Waiting):
                self.wait = place
            else:
                self.placed(place)

    def placed(self, place: Place | Reject) -> None:
        self.wait = None
        send = self.session.channel.send
        if isinstance(place, Reject):
            send(messages.Rejected(self.key, place.reason, place.detail))
            return
        assert isinstance(place, Placed)
        self.place = place
        send(
            messages.PlacedAt(
                self.key,
                place.instance.id,
                messages.PlacedLengths(*place.dispatch.request[1:5]),
                place.placed_s,
                place.waited_s,
                self.job.standing,
            )
        )

    def turned_away(self, refusal: Refusal) -> None:
        self.wait = None
        self.session.channel.send(messages.Refused.of(self.key, refusal))

    def broke(self, error: Exception) -> None:
        self.wait = None
        name = self.job.inbound.request_id.decode("ascii", "replace")
        _log.error("request %s cannot be placed", name, exc_info=error)
        self.session.channel.send(messages.Failed(self.key))

    def end(self) -> None:
        """Whatever it has, it gives back."""
        if self.wait is not None:
            self.wait.leave()
            self.wait = None
        place, self.place = self.place, None
        if place is not None:
            self.session.dispatcher.withdraw(place, None)
        self.close()

    def close(self) -> None:
        if self.job.charge is not None:
            self.job.charge.end()


class WorkerSession:
    """One worker, for as long as its connection lasts."""

    def __init__(self, hub: Hub, channel: Channel) -> None:
        self.channel = channel
        self.dispatcher = hub.dispatcher
        self.name = "a worker"
        self.connections = 0
        self.pools: dict[InstanceId, int] = {}
        self._hub = hub
        self._requests: dict[int, _Request] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Hello: self._hello,
            messages.Outstanding: self._outstanding,
            messages.Submit: self._submit,
            messages.Resubmit: self._again,
            messages.Spend: self._spend,
            messages.Known: self._known,
            messages.Speed: self._speed,
            messages.Counts: self._counts,
        }
        # Of requests that are not over; what comes of others is not heard.
        self._events: dict[type, Callable[[_Request, Any], None]] = {
            messages.Leave: self._leave,
            messages.Began: self._began,
            messages.Made: self._made,
            messages.Settle: self._settle,
            messages.SettleOutside: self._outside,
            messages.PassOn: self._pass_on,
            messages.Over: self._over,
        }

    def __len__(self) -> int:
        return len(self._requests)

    def __repr__(self) -> str:
        return f"<WorkerSession {self.name}: {len(self._requests)} requests>"

    def received(self, received: list[Any]) -> None:
        for message in received:
            try:
                event = self._events.get(type(message))
                if event is None:
                    self._handlers[type(message)](message)
                elif (request := self._requests.get(message.key)) is not None:
                    event(request, message)
            except Exception as error:
                self._broke(message, error)

    def _broke(self, message: Any, error: Exception) -> None:
        """The boundary of a request: a bug costs the one that met it."""
        _log.error("%s: a %s failed", self.name, type(message).__name__, exc_info=error)
        key = getattr(message, "key", None)
        if key is None:
            return
        request = self._requests.pop(key, None)
        if request is not None:
            request.end()
        if isinstance(message, messages.Submit | messages.Resubmit):
            self.channel.send(messages.Failed(key))

    def unsent(self, message: Any, error: Exception) -> None:
        if isinstance(message, messages.PlacedAt):
            self._broke(message, error)
            self.channel.send(messages.Failed(message.key))

    def lost(self) -> None:
        """The worker is gone: its requests are over, now."""
        self._hub.forget(self)
        requests, self._requests = self._requests, {}
        if requests:
            _log.warning("%s is gone, and %d requests with it", self.name, len(requests))
        for request in requests.values():
            try:
                request.end()
            except Exception:
                _log.exception("a request of %s cannot be settled", self.name)

    # Who it is, and what it has

    def _hello(self, said: messages.Hello) -> None:
        self.name = f"worker {said.worker} (process {said.pid})"
        if said.version != __version__:
            # They are started together; a package that was exchanged meanwhile needs a restart.
            _log.error("%s is of version %s and this is %s", self.name, said.version, __version__)
            self.channel.abort()
            return
        hub = self._hub
        for message in (hub.config, hub.listed(), hub.instances(), hub.keys):
            if message is not None:
                self.channel.send(message)

    def _outstanding(self, said: messages.Outstanding) -> None:
        for carried in said.requests:
            job = self._job_of(carried.facts, self.dispatcher.adopt)
            job.request = job.request._replace(**carried.lengths._asdict())
            request = _Request(self, carried.key, job, carried.facts.deadline_s)
            self._requests[carried.key] = request
            request.place = self._hub.placement.adopt(
                job.request,
                carried.instance,
                placed_s=carried.placed_s,
                waited_s=carried.waited_s,
                began=carried.began_s is not None,
            )

    # Requests

    def _job_of(self, facts: messages.Facts, describe: _Describe) -> Job:
        """Raises Refusal."""
        work = work_of_path(facts.path)
        if work is None:
            work = Work.GENERATE if facts.path == REALTIME else Work.LIGHT
        inbound = Inbound(facts.path, b"", work, facts.headers)
        inbound.request_id = facts.request_id
        inbound.received_s = facts.received_s
        inbound.body = facts.body
        client = self._hub.admission.named(facts.client)
        job = describe(inbound, client, facts.parsed, facts.counted)
        if facts.path == REALTIME:
            job.features = None  # as ``Realtime`` has it: nothing is learnt of a session's length
        return job

    def _submit(self, said: messages.Submit) -> None:
        try:
            job = self._job_of(said.facts, self.dispatcher.describe)
        except Refusal as refusal:
            self.dispatcher.note(None, "rejected")
            self.channel.send(messages.Refused.of(said.key, refusal))
            return
        request = _Request(self, said.key, job, said.facts.deadline_s)
        self._requests[said.key] = request
        request.submit(said.tried, messages.error_of(said.failure))

    def _again(self, said: messages.Resubmit) -> None:
        request = self._requests[said.key]
        if said.model:
            self.dispatcher.fall_back(request.job, said.model)
        request.submit(said.tried, messages.error_of(said.failure))

    def _leave(self, request: _Request, said: messages.Leave) -> None:
        del self._requests[said.key]
        request.end()

    def _began(self, request: _Request, said: messages.Began) -> None:
        if request.place is not None:
            self.dispatcher.stream_began(request.job, request.place, None)

    def _made(self, request: _Request, said: messages.Made) -> None:
        if request.place is not None:
            self.dispatcher.made(request.job, request.place, said.name)

    def _known(self, said: messages.Known) -> None:
        now_s, responses = time.monotonic(), self.dispatcher.responses
        for name, instance_id, tokens, model, owner in said.responses:
            if responses.find(name, now_s) is None:
                responses.note(Response(name, instance_id, tokens, None, 0, model, owner), now_s)

    def _spend(self, said: messages.Spend) -> None:
        request = self._requests.get(said.key)
        try:
            if request is not None:
                self.dispatcher.extend(request.job, said.tokens)
        except Refusal as refusal:
            self.channel.send(messages.Refused.of(said.key, refusal))
        else:
            self.channel.send(messages.Spent(said.key))

    def _settle(self, request: _Request, said: messages.Settle) -> None:
        if said.final:
            del self._requests[said.key]
        place, request.place = request.place, None
        if place is None:
            request.close()
            return  # its instance was unknown when it was reported
        request.settled = place
        job = request.job
        job.inbound.body = said.report.mark
        self.dispatcher.settle(job, place, said.report, said.outcome, final=said.final)
        if said.final:
            request.close()

    def _outside(self, request: _Request, said: messages.SettleOutside) -> None:
        self.dispatcher.settle_outside(
            request.job, said.label, said.report, said.outcome, final=said.final
        )
        if said.final:
            del self._requests[said.key]
            request.end()

    def _pass_on(self, request: _Request, said: messages.PassOn) -> None:
        del self._requests[said.key]
        request.end()
        if request.settled is not None:
            self.dispatcher.pass_on(request.job, request.settled, said.report)

    def _over(self, request: _Request, said: messages.Over) -> None:
        del self._requests[said.key]
        request.end()
        if said.outcome:
            self.dispatcher.note(request.job, said.outcome)

    # Besides

    def _speed(self, said: messages.Speed) -> None:
        parts: dict[InstanceId, list[tuple[float, float]]] = {}
        for instance_id, duration_s, steps in said.parts:
            parts.setdefault(instance_id, []).append((duration_s, steps))
        self._hub.placement.observe_speed(parts, said.samples)

    def _counts(self, said: messages.Counts) -> None:
        metrics = self._hub.metrics
        self.connections = said.connections
        self.pools = said.pools
        for model, instance_id, outcome, number in said.outcomes:
            metrics.counts(model, instance_id).outcomes[outcome] += number
        metrics.client_timeouts.update(said.timeouts)
        metrics.client_refusals.update(said.refusals)
        metrics.statuses.update(said.statuses)
        metrics.overhead_s.add(*said.overhead)
        metrics.round_trip_s.add(*said.round_trip)
        self._hub.admission.usage.add(said.usage)
        if said.draining:
            self._hub.on_draining()


class Hub:
    """All workers of a gateway. Needs a running event loop.

    Args:
        fleet, placement, dispatcher, metrics, admission: of the gateway; the fleet tells of its
            changes from now on.
        listener: where the workers connect.
        on_draining: called once a worker was asked to stop.
    """

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        dispatcher: LocalDispatcher,
        metrics: Metrics,
        admission: Admission,
        listener: socket.socket,
        on_draining: Callable[[], None] = lambda: None,
    ) -> None:
        self.placement = placement
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.admission = admission
        self._fleet = fleet
        self._listener = listener
        self.on_draining = on_draining
        self._sessions: set[WorkerSession] = set()
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._told: messages.Instances | None = None
        self._told_listed: messages.Listed | None = None
        self.config: messages.Configuration | None = None  # None: as when the processes started
        self.keys: messages.Keys | None = None  # the same
        self._configs: dict[InstanceId, tuple[Any, bytes]] = {}
        metrics.workers = self.__len__
        metrics.client_connections = lambda: sum(s.connections for s in self._sessions)

    def __len__(self) -> int:
        """Workers that are connected."""
        return len(self._sessions)

    @property
    def requests(self) -> int:
        """Requests that are not over, of all workers."""
        return sum(len(session) for session in self._sessions)

    def connections_to(self, instance_id: InstanceId) -> int:
        """The workers' open connections to an instance, within the last second."""
        return sum(session.pools.get(instance_id, 0) for session in self._sessions)

    def tell_keys(self) -> None:
        if (keys := self.admission.keys) is not None:
            self.keys = messages.Keys(keys.model_dump_json(by_alias=True).encode())
            self._send(self.keys)

    async def start(self) -> None:
        """Let workers in."""
        self._server = await self._loop.create_unix_server(self._channel, sock=self._listener)
        self._fleet.on_publish = self._tell_soon
        self._timer = self._loop.call_later(VIEW_INTERVAL_S, self._tick)

    async def stop(self) -> None:
        """Let go of all workers."""
        self._fleet.on_publish = None
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        if self._server is not None:
            self._server.close()
        for session in list(self._sessions):
            session.channel.close()
            session.lost()

    def _channel(self) -> Channel:
        channel = Channel(messages.FromWorker)
        session = WorkerSession(self, channel)
        channel.listener = session
        self._sessions.add(session)
        return channel

    def forget(self, session: WorkerSession) -> None:
        self._sessions.discard(session)

    # The instances

    def instances(self) -> messages.Instances:
        """The instances, as workers need to know them."""
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

    def _send(self, message: Any) -> None:
        """To all workers."""
        for session in self._sessions:
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
        if not self._sessions:
            return
        self._tell()  # whom failures have ejected is published nowhere else
        self._tell_listed()  # nor what an engine says of a model
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
