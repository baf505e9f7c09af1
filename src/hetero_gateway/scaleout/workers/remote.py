"""A worker's ``Dispatcher``: the scheduler is in another process, or for a while absent.

Each question and each event is a message, and the answer comes in a callback. When the connection
is lost, the messages go to a ``RequestSession`` here, over a scheduler of the worker's own. The new
recipient learns all open requests, and unanswered questions are asked again; the own scheduler
knows the others' load from the last ``View``. When the scheduler process is back, the same goes the
other way, and the own scheduler is empty again. No request ends because of it.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from hetero_gateway import __version__
from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import (
    COMPLETED,
    DEFAULT_CLASS,
    InstanceId,
    Outcome,
    Reject,
    RejectReason,
)
from hetero_gateway.engines.vllm import ModelCard, Work
from hetero_gateway.errors import ConfigError, Refusal
from hetero_gateway.files.client_keys import KeysFile
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.gateway.admission.clients import Admission, Client
from hetero_gateway.gateway.dataplane.dispatcher import Owner, Waiting
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.observed import ObservedResponse
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher
from hetero_gateway.gateway.dataplane.records import LATER_S
from hetero_gateway.gateway.dataplane.speed import StreamWatch
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.heads import Inbound
from hetero_gateway.scaleout.workers import messages
from hetero_gateway.scaleout.workers.messages import Channel
from hetero_gateway.scaleout.workers.session import RequestSession

# After this long a silence the scheduler process counts as gone; it sends a message each second.
_SILENCE_S = 3.0
_TICK_S = 1.0
# Responses that a new scheduler process is told: some 0.1 s of its time for each worker.
_MOST_KNOWN = 10_000
_OTHERS = "other workers"
# Shown for a request that was not described here.
_UNKNOWN = Request("", 1, 0.0)

_Key = TypeVar("_Key")

_log = logging.getLogger(__name__)


class RemoteJob(Job):
    """A request that is described elsewhere. ``request`` is known once it is placed.

    ``fallback``: the model that it is for now, not sent yet; ``session``: the one in which the
    recipient knows it; 0: in none.
    """

    __slots__ = ("counted", "deadline_s", "fallback", "key", "session")

    def __init__(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None
    ) -> None:
        super().__init__(inbound, client, parsed, _UNKNOWN, None)
        self.counted = counted
        self.deadline_s = 0.0
        self.fallback = ""
        self.key = 0
        self.session = 0


@dataclass(slots=True, eq=False)
class Assignment:
    """A place, until it is settled."""

    job: RemoteJob
    instance: Instance
    placed_s: float
    waited_s: float
    began_s: float | None = None

    # Called by the watch over streams

    outcome: ClassVar[Outcome | None] = None

    @property
    def instance_id(self) -> InstanceId:
        return self.instance.id

    @property
    def request(self) -> Request:
        return self.job.request


class FleetMirror:
    """Keeps a worker's ``fleet`` equal to the scheduler process's."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # By configuration, as last received.
        self._known: dict[bytes, tuple[InstanceId, messages.InstanceNow]] = {}
        self.listed = messages.Listed(False, {})

    def ready(self) -> bool:
        return self.listed.ready

    def models(self) -> dict[str, ModelCard]:
        return self.listed.models

    def take(self, said: messages.Instances) -> None:
        """These are all instances."""
        fleet = self._fleet
        # Of hundreds, a few have changed: the others are not even read.
        before, self._known = self._known, {}
        for member in said.instances:
            instance_id, known = before.get(member.config, (None, None))
            if instance_id is None or known != member or instance_id not in fleet.instances:
                config = InstanceConfig.model_validate_json(member.config)
                instance_id = InstanceId(config.id)
                self._take(config, member)
            self._known[member.config] = instance_id, member
        wanted = {instance_id for instance_id, _ in self._known.values()}
        for instance_id in [i for i in fleet.instances if i not in wanted]:
            fleet.remove(instance_id)

    def _take(self, config: InstanceConfig, member: messages.InstanceNow) -> None:
        fleet = self._fleet
        config = config.model_copy(update={"weight": member.weight})
        instance = fleet.instances.get(InstanceId(config.id))
        try:
            if instance is not None and fleet.can_adjust(instance, config):
                fleet.adjust(instance, config)
            else:
                built = fleet.build(config)
                if instance is not None:
                    fleet.remove(instance.id)
                fleet.admit(built)
                instance = built
        except ConfigError as error:
            _log.error("instance %s cannot be used in this process: %s", config.id, error)
            return
        instance.models = frozenset(member.models)
        instance.max_model_len = member.max_model_len
        instance.engine_kv_capacity_tokens = member.kv_capacity_tokens
        instance.weight = member.weight
        instance.up = member.available
        instance.silent = member.silent
        instance.leave_at_s = member.leave_at_s
        instance.names_prompts = member.names_prompts
        instance.draining = member.draining
        fleet.publish(instance)


class OwnScheduler:
    """A worker's own scheduler, where messages go while the scheduler process is away.

    As over a wire, its answers come after this turn of the event loop.
    """

    def __init__(
        self, local: LocalDispatcher, admission: Admission, take: Callable[[Any], None]
    ) -> None:
        self._session = RequestSession(local, admission, self._answer)
        self._take = take
        self._is_closed = False

    def send(self, message: Any) -> None:
        self._session.received([message])

    def _answer(self, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self._pass_on, message)

    def _pass_on(self, message: Any) -> None:
        if not self._is_closed:
            self._take(message)

    def close(self) -> None:
        """Somebody else answers from now on: no request is open here any more."""
        self._is_closed = True
        self._session.end()


@dataclass(slots=True, eq=False)
class _Ask(Waiting):
    """A question without an answer yet."""

    remote: "RemoteDispatcher"
    job: RemoteJob
    tried: Sequence[InstanceId]
    failure: InstanceError | None
    owner: Owner[Assignment]
    asked_s: float = field(default_factory=time.monotonic)

    def leave(self) -> None:
        self.remote.forget(self)


@dataclass(eq=False)
class RemoteDispatcher:
    """See above. Needs a running event loop.

    Args:
        _local: drives the worker's own scheduler, over the fleet.
        _fleet: the instances as this worker knows them; updated by the scheduler process.
        _metrics: of this worker; its counts are passed on.
        _worker: its number.
        _admission: of this worker; the scheduler process updates its keys, and clients' usage
            while the worker was on its own is passed on.
        headers: names of the request headers used by the description.
        sends_bodies: the predictor reads prompts.
        _draining: whether the worker was asked to end.
        _on_config: called with the gateway's configuration, when it has changed.

    Attributes:
        ready: it knows the instances.
        gone: the previous connection.
    """

    _local: LocalDispatcher
    _fleet: Fleet
    _metrics: Metrics
    _worker: int
    _admission: Admission
    headers: frozenset[bytes]
    sends_bodies: bool
    _draining: Callable[[], bool]
    _on_config: Callable[[GatewayConfig], None]

    def __post_init__(self) -> None:
        self.ready, self.gone = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.has_other = self._local.has_other
        self._connected: Channel | None = None  # not greeted yet
        self._channel: Channel | None = None  # of the scheduler process; None: it is away
        self._own = OwnScheduler(self._local, self._admission, self._answered)
        self._session = 1
        self._keys = itertools.count(1)
        self.mirror = FleetMirror(self._fleet)
        self._asked: dict[int, _Ask] = {}
        self._open: dict[int, Assignment] = {}
        # Pending answers to ``Spend``.
        self._spending: dict[int, asyncio.Future[None]] = {}
        self._streams = StreamWatch()
        self._view: dict[InstanceId, PeerLoad] = {}
        self._heard_s = 0.0
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._telling: asyncio.TimerHandle | None = None  # sends the counts
        self._numbers = itertools.count(1)
        self._untold: list[messages.Counts] = []  # not acknowledged yet
        self._told_keys: bytes | None = None  # not applied yet
        self._taking_keys: asyncio.Task[None] | None = None

    @property
    def alone(self) -> bool:
        """No scheduler process answers."""
        return self._channel is None

    @property
    def idle(self) -> bool:
        """Nothing is asked or open."""
        return not self._asked and not self._open and not self._streams

    def close(self) -> None:
        """Send pending reports, and end."""
        self._timer.cancel()
        if self._taking_keys is not None:
            self._taking_keys.cancel()
        self._tell_counts()
        channel, self._channel, self._connected = self._connected, None, None
        if channel is not None:
            channel.close()

    # A Dispatcher

    def describe(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None
    ) -> RemoteJob:
        return RemoteJob(inbound, client, parsed, counted)

    def submit(
        self,
        job: RemoteJob,
        tried: Sequence[InstanceId],
        failure: InstanceError | None,
        deadline_s: float,
        owner: Owner[Assignment],
    ) -> Waiting:
        job.deadline_s = deadline_s
        ask = _Ask(self, job, tried, failure, owner)
        self._ask(ask)
        return ask

    def stream_began(self, job: RemoteJob, place: Assignment, stream: ObservedResponse) -> None:
        place.began_s = time.monotonic()
        if place.request.streams:
            self._streams.add(stream, place, place.began_s)
        self._send(messages.Began(job.key))

    async def spend(self, job: RemoteJob, tokens: int) -> None:
        if not job.client.accounts:
            return
        said = self._spending[job.key] = self._loop.create_future()
        self._send(messages.Spend(job.key, tokens))
        try:
            await said
        finally:
            if self._spending.get(job.key) is said:
                del self._spending[job.key]

    def made(self, job: RemoteJob, place: Assignment, name: bytes) -> None:
        # Here as well, for when the scheduler process is away or a new one.
        self._local.made(job, place, name)
        self._send(messages.Made(job.key, name))

    def settle(
        self,
        job: RemoteJob,
        place: Assignment,
        seen: ObservedResponse,
        outcome: Outcome,
        *,
        final: bool,
    ) -> None:
        self._close_place(place, seen)
        answer = self._counted(job, place, seen, outcome, final=final)
        self._send(messages.Settle(job.key, outcome, final, answer))

    def _counted(
        self,
        job: RemoteJob,
        place: Assignment,
        seen: ObservedResponse,
        outcome: Outcome,
        *,
        final: bool,
    ) -> messages.CountedAnswer:
        """An answer, which counts if it is the last one."""
        usage, told = seen.usage(), None
        if final:
            count_seen = self._local.recorder.count_seen
            told = count_seen(job, place.instance, seen, outcome, time.monotonic(), usage)
            if self._telling is None:
                self._telling = self._loop.call_later(LATER_S, self._tell_counts)
        return messages.CountedAnswer(
            seen.status,
            seen.error,
            seen.first_body_at_s,
            seen.empty,
            *usage,
            messages.mark_of(job.inbound.body),
            *((None, None) if told is None else (told.prompt, told.output)),
        )

    def fall_back(self, job: RemoteJob, model: str) -> None:
        self._introduce(job)
        job.fallback = job.parsed.model = model

    def settle_outside(
        self, job: RemoteJob, label: str, seen: ObservedResponse, outcome: Outcome, *, final: bool
    ) -> None:
        self._introduce(job)
        answer = messages.OutsideAnswer(
            seen.status,
            seen.error,
            seen.first_body_at_s,
            seen.empty,
            *seen.usage(),
            seen.events,
            seen.complete,
            seen.body_bytes,
        )
        self._send(messages.SettleOutside(job.key, label, outcome, final, answer))

    def withdraw(self, place: Assignment, seen: ObservedResponse | None) -> None:
        self._close_place(place, seen)
        self._send(messages.Over(place.job.key, ""))

    def pass_on(
        self,
        job: RemoteJob,
        place: Assignment,
        seen: ObservedResponse,
        outcome: Outcome = COMPLETED,
    ) -> None:
        answer = self._counted(job, place, seen, outcome, final=True)
        self._send(messages.PassOn(job.key, answer, outcome))

    def note(self, job: RemoteJob | None, outcome: str) -> None:
        if job is None:
            self._local.note(None, outcome)
        else:
            self._introduce(job)
            self._send(messages.Over(job.key, outcome))

    def _send(self, message: Any) -> None:
        """To the current recipient."""
        (self._channel or self._own).send(message)

    def _close_place(self, place: Assignment, seen: ObservedResponse | None) -> None:
        self._open.pop(place.job.key, None)
        if seen is not None and place.began_s is not None:
            self._streams.discard(seen, time.monotonic())

    # Questions

    def _ask(self, ask: _Ask) -> None:
        job, tried = ask.job, list(ask.tried)
        if job.session == self._session:
            again = messages.Resubmit(job.key, tried, ask.failure, job.fallback, job.told_tokens)
            self._send(again)
        else:
            job.key = job.key or next(self._keys)
            job.session = self._session
            self._send(messages.Submit(job.key, self._facts_of(job), tried, ask.failure))
        job.fallback = ""
        self._asked[job.key] = ask

    def _facts_of(self, job: RemoteJob) -> messages.Facts:
        inbound, parsed, names = job.inbound, job.parsed, self.headers
        return messages.Facts(
            inbound.request_id,
            inbound.path,
            job.client.name,
            inbound.received_s,
            job.deadline_s,
            [pair for pair in inbound.headers if pair[0] in names] if names else [],
            parsed,
            job.counted,
            inbound.body if self.sends_bodies else b"",
            job.told_tokens,
        )

    def forget(self, ask: _Ask) -> None:
        """Its owner no longer wants an answer."""
        if self._asked.pop(ask.job.key, None) is not None:
            self._send(messages.Leave(ask.job.key))

    # The current recipient

    def _change(self, channel: Channel | None) -> None:
        """Somebody else answers from now on, and learns the open requests."""
        self._channel = channel
        self._session += 1
        for key in list(self._spending):
            self._charged(key, None)  # the next one repeats all of them
        if self._open:
            carried = [self._carried(place.job, place) for place in self._open.values()]
            self._send(messages.Outstanding(carried))

    def _introduce(self, job: RemoteJob) -> None:
        """Tell the recipient about a request that is on no instance now."""
        if job.session != self._session:
            job.key = job.key or next(self._keys)
            self._send(messages.Outstanding([self._carried(job)]))

    def _carried(self, job: RemoteJob, place: Assignment | None = None) -> messages.CarriedRequest:
        job.session = self._session
        request = job.request
        where: tuple[InstanceId, float, float, float | None] = InstanceId(""), 0.0, 0.0, None
        if place is not None:
            where = place.instance.id, place.placed_s, place.waited_s, place.began_s
        return messages.CarriedRequest(
            job.key,
            self._facts_of(job),
            request.prompt_tokens,
            request.predicted_output_tokens,
            request.sequences,
            request.streams,
            *where,
        )

    def _ask_anew(self) -> None:
        for ask in list(self._asked.values()):
            self._ask(ask)

    # A ChannelUser

    def connected(self, channel: Channel) -> None:
        """There is a connection; the process at its other end has to answer first."""
        self._connected = channel
        self._heard_s = time.monotonic()
        self.gone.clear()
        channel.send(messages.Hello(self._worker, os.getpid(), __version__))

    def received(self, received: list[Any]) -> None:
        self._heard_s = time.monotonic()
        for message in received:
            kind = type(message)
            if kind is messages.PlacedAt:  # the usual case
                self._answered(message)
            elif kind is messages.Instances:
                self.mirror.take(message)
                if self._channel is None and self._connected is not None:
                    self._greeted(self._connected)
            elif kind is messages.Listed:
                self.mirror.listed = message
            elif kind is messages.Configuration:
                self._on_config(GatewayConfig.model_validate_json(message.config))
            elif kind is messages.PrefixSecret:
                self._local.intake.begin_keys_with(message.secret)
            elif kind is messages.Counted:
                self._untold = [each for each in self._untold if each.number > message.number]
            elif kind is messages.InstanceLoads:
                self._view = dict(message.loads)
            elif kind is messages.Keys:
                self._told_keys = message.text
                if self._taking_keys is None:
                    self._taking_keys = self._loop.create_task(self._take_up_keys())
            else:
                self._answered(message)

    async def _take_up_keys(self) -> None:
        """In a thread: thousands of them would delay every stream."""

        def prepare(text: bytes) -> Callable[[], None]:
            return self._admission.prepare_keys(KeysFile.model_validate_json(text))

        try:
            while (text := self._told_keys) is not None:
                self._told_keys = None
                take_up = await asyncio.to_thread(prepare, text)
                take_up()
        finally:
            self._taking_keys = None

    def unsent(self, message: Any, error: Exception) -> None:
        key = getattr(message, "key", None)
        if key is None:
            return
        ask = self._asked.pop(key, None)
        if ask is not None:
            ask.job.session = 0  # not sent to anybody yet
            ask.owner.broke(error)
        elif not isinstance(message, messages.Over):
            self._send(messages.Over(key, ""))

    def lost(self) -> None:
        """The scheduler process is gone, or does not answer: go on alone."""
        was_there = self._channel is not None
        self._connected = None
        self.gone.set()
        if not was_there:
            return
        _log.warning("the scheduler process is gone: placing by its last view")
        self._own = OwnScheduler(self._local, self._admission, self._answered)
        self._change(None)
        now_s = time.monotonic()
        states = self._fleet.scheduler.members.table
        for instance_id, total in self._view.items():
            if instance_id in self._fleet.instances:
                own = states[instance_id].own_load(now_s)
                others = PeerLoad(*(max(0.0, a - b) for a, b in zip(total, own, strict=True)))
                states[instance_id].set_peer(_OTHERS, others, now_s)
        self._ask_anew()

    # Answers

    def _answered(self, message: Any) -> None:
        """The result of a question."""
        kind, ask = type(message), self._asked.pop(message.key, None)
        if kind is messages.PlacedAt and ask is not None:
            self._placed(ask, message)
        elif kind is messages.Spent:
            self._charged(message.key, None)
        elif ask is None:
            if kind is messages.Refused:
                self._charged(message.key, message.refusal)
            # Else its owner has left, and the recipient is told.
        elif kind is messages.Rejected:
            ask.owner.placed(Reject(message.reason, message.detail))
        elif kind is messages.Refused:
            ask.owner.turned_away(message.refusal)
        else:
            ask.owner.broke(RuntimeError("the scheduler process could not place it"))

    def _placed(self, ask: _Ask, said: messages.PlacedAt) -> None:
        job = ask.job
        client, inbound = job.client, job.inbound
        request_class = DEFAULT_CLASS
        if inbound.work is not Work.LIGHT:
            request_class = client.class_of(inbound.headers)
        job.request = Request(
            job.parsed.model or said.model,
            said.prompt_tokens,
            said.predicted_output_tokens,
            said.sequences,
            said.streams,
            client.party,
            request_class=request_class,
        )
        job.standing = said.standing
        if said.waited_s == 0.0 and self._channel is not None:
            self._metrics.round_trip_s.observe(self._heard_s - ask.asked_s)
        instance = self._fleet.instances.get(said.instance)
        if instance is None:
            # It was added and removed again, or the other way round, within this turn.
            detail = f"instance {said.instance} is not known here"
            ask.owner.placed(Reject(RejectReason.NO_AVAILABLE_INSTANCE, detail))
            return
        place = Assignment(job, instance, said.placed_s, said.waited_s)
        self._open[job.key] = place
        ask.owner.placed(place)

    def _charged(self, key: int, refusal: Refusal | None) -> None:
        waiting = self._spending.pop(key, None)
        if waiting is None or waiting.done():
            return
        if refusal is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(refusal)

    # The scheduler process is there

    def _greeted(self, channel: Channel) -> None:
        """The scheduler process answers: it decides from now on."""
        self._own.close()
        for instance_id in self._fleet.instances:
            self._fleet.scheduler.members.table[instance_id].set_peer(_OTHERS, None)
        if self.ready.is_set():
            _log.info("the scheduler process is back; reporting %d requests to it", len(self._open))
            latest = self._local.intake.responses.latest(_MOST_KNOWN)
            responses = [(r.name, r.instance_id, r.tokens, r.model, r.owner) for r in latest]
            channel.send(messages.Known(responses))  # first: open requests may refer to one
        self._change(channel)
        self._ask_anew()
        for counts in self._untold:
            channel.send(counts)
        self.ready.set()

    # Once a second

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        now_s = time.monotonic()
        channel = self._channel
        if channel is not None and now_s - self._heard_s > _SILENCE_S:
            _log.warning("nothing heard from the scheduler process for %g s", _SILENCE_S)
            channel.abort()
            return
        seen, samples = self._streams.look(now_s)
        parts = [(name, *part) for name, of_one in seen.items() for part in of_one]
        if parts or samples:
            self._send(messages.Speed(parts, samples))
        self._tell_counts()

    def _tell_counts(self) -> None:
        """Pass on the counts; they wait until there is a recipient."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._channel is None:
            return
        metrics = self._metrics
        series, classes = metrics.take_series(), _taken(metrics.classes)
        counts = messages.Counts(
            next(self._numbers),
            self._draining(),
            metrics.client_connections(),
            {i.id: i.pool.open_connections for i in self._fleet.instances.values()},
            series,
            [(*key, number) for key, number in classes.items()],
            _taken(metrics.client_disconnects),
            _taken(metrics.client_timeouts),
            _taken(metrics.client_refusals),
            _taken(metrics.statuses),
            metrics.overhead_s.take(),
            metrics.round_trip_s.take(),
            self._admission.usage.take(),
            _taken(metrics.streams_continued),
        )
        self._untold.append(counts)
        self._channel.send(counts)


def _taken(counter: dict[_Key, int]) -> dict[_Key, int]:
    taken = dict(counter)
    counter.clear()
    return taken
