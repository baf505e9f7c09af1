"""Decides where a request goes and when: the one driver of the scheduler and of its queue.

``submit`` is synchronous: if nothing waits and an instance has room, it returns the request's
place, without a coroutine, future or timer. Under a policy that ``queues`` (finish-time) it may
return a ``QueueWait`` instead, which reports to the request's owner once it is placed, refused or
out of time. What an owner is (a client's request, a worker's, or a data plane's stream) is not
known here.

``Scheduler.pump`` must follow everything that may make room. Events in callbacks (a first token, a
settlement, a change of an instance) only request a pump in the same turn of the event loop, so that
many of them cost one, and nothing is re-entered: owners are notified after it. A timer stands in
for unseen events, and only while requests wait.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

from hetero_gateway.core.histogram import count_noted
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.decision_log import DecisionLog
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.types import (
    COMPLETED,
    InstanceId,
    Outcome,
    PrefixKeys,
    Reject,
    RejectReason,
    Usage,
)
from hetero_gateway.engines.vllm import REALTIME
from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.scheduler_config import QueueConfig
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.admission.limits import Limiter
from hetero_gateway.gateway.dataplane.answers import shutting_down
from hetero_gateway.gateway.dataplane.dispatcher import (
    Owner,
    Place,
    Waiting,
)
from hetero_gateway.gateway.dataplane.intake import Intake, Job, Placed
from hetero_gateway.gateway.dataplane.observed import ObservedResponse
from hetero_gateway.gateway.dataplane.prefill_legs import PrefillLegs
from hetero_gateway.gateway.dataplane.records import (
    UNREAD,
    AnswerTokens,
    Recorder,
    SettledAttempt,
    context_of,
)
from hetero_gateway.gateway.dataplane.responses import Response
from hetero_gateway.gateway.dataplane.speed import Parts, Samples, StepWatch
from hetero_gateway.gateway.dataplane.waits import QueueWait, WakingWait
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.engine_calls import EngineCalls
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.fleet.liveness import LivenessWatch
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.records.request_log import FailedAttempt
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.gateway.settings import Prepared, Settings
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.heads import Inbound

if TYPE_CHECKING:
    from hetero_gateway.gateway.fleet.recalibration import Recalibration

# OpenAI's clients obey a Retry-After of up to 60 s.
_RETRY_AFTER_BOUNDS_S = (1, 60)
# libuv's timers count whole milliseconds: one more, so that a pump never comes too early.
_TIMER_GRAIN_S = 0.001
# Decisions that are kept together.
_MOST_NOTED = 64
_UNAVAILABLE = RejectReason.NO_AVAILABLE_INSTANCE


class Placement:
    """Submits, pumps, wakes and settles. Needs a running event loop.

    Args:
        fleet: the instances and their scheduler; it reports its changes from now on.
        metrics: counts decision times, waits and refusals.
        config: the queue's limits, except the number of waiting requests (the scheduler's).
        recalibrate: let the instances' constants follow the traffic.
    """

    def __init__(
        self, fleet: Fleet, metrics: Metrics, config: QueueConfig, *, recalibrate: bool = False
    ) -> None:
        self.queues = fleet.queues
        self._fleet = fleet
        self._scheduler = fleet.scheduler
        self._metrics = metrics
        self.timeout_s = config.timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[QueueWait, None] = {}  # in the order in which they came
        self._recalibration: Recalibration | None = None
        self.steps = StepWatch(fleet, self._look(recalibrate))
        # Detects instances that fall silent, while there are requests.
        self.liveness: LivenessWatch | None = None
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s: float | None = None
        self._closed = False
        self.legs = PrefillLegs(fleet, self.settle, self.pump_soon)
        fleet.on_change = self.pump_soon

    def settings(self, settings: Settings) -> None:
        """Register the settings of this part that can change."""
        settings.add(
            ("scheduler.policy", "scheduler.queue.timeout_s", "scheduler.recalibrate"),
            self._prepare,
        )

    def _prepare(self, fresh: GatewayConfig) -> Prepared:
        def apply() -> None:
            self.queues = self._fleet.queues  # which has taken up the policy
            self.timeout_s = fresh.scheduler.queue.timeout_s
            self.steps.on_look = self._look(fresh.scheduler.recalibrate)

        return Prepared(apply)

    def _look(self, recalibrate: bool) -> Callable[[], None] | None:
        """Looks at observations about once a second; None: constants stay as they are."""
        if not recalibrate:
            return None
        if self._recalibration is None:
            # This imports numpy, 13 MB; few have it on.
            from hetero_gateway.gateway.fleet.recalibration import Recalibration

            self._recalibration = Recalibration(self._fleet)
        return self._recalibration.look

    def __len__(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing is watched and no timer runs."""
        timers = (self._soon, self._timer)
        return not self._waiting and self.steps.idle and timers == (None, None)

    def knows(self, model: str) -> bool:
        """Whether any instance, available or not, serves the model."""
        return self._scheduler.members.knows(model)

    def know(self, instance_id: InstanceId, keys: PrefixKeys) -> None:
        """An instance has more in its prefix cache than it was sent: an answer."""
        caches = self._scheduler.caches
        if caches is not None and instance_id in caches.index:
            caches.index.touch(instance_id, keys)

    def oldest_wait_s(self) -> float:
        """The longest wait so far, in seconds; 0 if nothing waits."""
        first = next(iter(self._waiting), None)
        return 0.0 if first is None else time.monotonic() - first.ticket.enqueued_s

    def close(self) -> None:
        """Stop every timer, and refuse what still waits."""
        self._closed = True
        self._fleet.on_change = None
        self.steps.close()
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None
        for wait in self._waiting:
            wait.wake()

    # Placing

    def submit(
        self,
        request: Request,
        exclude: Sequence[InstanceId],
        *,
        waits: bool = True,
        first: bool | None = None,
    ) -> Placed | QueueWait | Reject:
        """The request's place, or a wait that is to ``begin``.

        Args:
            exclude: instances it was tried on, or must avoid.
            waits: False: place it at once, regardless of the queue.
            first: wait at the head of the queue; None: if it was tried before.

        Raises:
            Refusal: 429 for a full queue.
            Exception: placing it met a bug, which concerns this request alone.
        """
        now_s = time.monotonic()
        if self.queues and not waits:
            return self._place_now(request, exclude, now_s)
        scheduler = self._scheduler
        began_s = time.perf_counter()
        ticket = scheduler.place(
            request, now_s, tuple(exclude), first=bool(exclude) if first is None else first
        )
        if self.liveness is not None and not self.liveness.watches:
            self.liveness.watch()
        if isinstance(ticket, Reject):
            if ticket.reason is RejectReason.QUEUE_FULL:
                raise self._refused("queue_full", request.model, ticket.detail)
            if ticket.reason is RejectReason.WAIT_TOO_LONG:
                raise self._refused("wait_too_long", request.model, ticket.detail, ticket.wait_s)
            return ticket
        if ticket.waits:
            wait = ticket.owner = QueueWait(self, ticket)
            if scheduler.queued > 1:
                self._pump(now_s)  # others wait, so it was not tried
            else:
                self._metrics.decision_s.note(time.perf_counter() - began_s)
                self._arm(now_s)
            if ticket.waits:
                self._waiting[wait] = None
                return wait
        else:
            self._metrics.decision_s.note(time.perf_counter() - began_s)
        if ticket.rejected is not None:
            return ticket.rejected
        if ticket.failed is not None:
            raise ticket.failed
        decision, dispatch = ticket.decision, ticket.dispatch
        assert decision is not None
        assert dispatch is not None
        if self.queues:
            self._metrics.queue_wait_s.zeros += 1
        place = Placed(self._fleet.instances[decision.instance_id], decision, dispatch, now_s, 0.0)
        if ticket.prefill is not None:
            place.leg = self.legs.of(ticket.prefill)
        return place

    def _place_now(
        self, request: Request, exclude: Sequence[InstanceId], now_s: float
    ) -> Placed | Reject:
        started_s = time.perf_counter()
        decision = self._scheduler.choose(request, exclude, now_s)
        self._metrics.decision_s.observe(time.perf_counter() - started_s)
        if isinstance(decision, Reject):
            return decision
        instance = self._fleet.instances[decision.instance_id]
        return Placed(instance, decision, self._scheduler.dispatch(decision, now_s), now_s, 0.0)

    def rest_of(self, request: Request, told_tokens: int) -> Request:
        """The rest of a request whose answer broke off, for another instance."""
        return self._scheduler.residual.rest_of(request, told_tokens)

    def can_take(self, request: Request, exclude: Sequence[InstanceId]) -> bool:
        """Whether a second attempt has anywhere else to go."""
        judged = self._scheduler.members.judge(request, exclude)
        if isinstance(judged, Reject):
            return False
        restraints = self._scheduler.restraints
        return restraints.strictly(judged[1], request, time.monotonic()) is not None

    def begin(
        self,
        wait: QueueWait,
        owner: Owner[Placed],
        deadline_s: float,
        note: Callable[[Placed], None],
    ) -> None:
        """Let a wait returned by ``submit`` report to its owner.

        It reports a Refusal if it was too long (429), after the deadline (504), or when the gateway
        is shutting down (503).

        Args:
            deadline_s: monotonic; of the whole request.
            note: called with its place, before the owner is.
        """
        until_s = min(wait.ticket.enqueued_s + self.timeout_s, deadline_s)
        wait.at_deadline, wait.note = until_s == deadline_s, note
        wait.begin(owner, until_s)

    def collect(self, wait: QueueWait) -> Placed | Reject:
        """The result of a wait that has ended. Raises what it is to report."""
        ticket = wait.ticket
        if ticket.waits:
            refusal = shutting_down() if self._closed else self._too_long(wait)
            self.abandon(wait)
            raise refusal
        del self._waiting[wait]
        if ticket.rejected is not None:
            return ticket.rejected
        if ticket.failed is not None:
            raise ticket.failed
        assert ticket.dispatch is not None
        assert ticket.decision is not None
        assert wait.instance is not None
        waited_s = wait.placed_s - ticket.enqueued_s
        self._metrics.queue_wait_s.observe(waited_s)
        place = Placed(wait.instance, ticket.decision, ticket.dispatch, wait.placed_s, waited_s)
        place.leg = wait.leg
        return place

    def abandon(self, wait: QueueWait) -> None:
        """Give up a wait, whether its request is still queued or was just placed."""
        del self._waiting[wait]
        ticket = wait.ticket
        if not self._scheduler.cancel(ticket) and ticket.dispatch is not None:
            self.settle(ticket.dispatch, Outcome.CLIENT_DISCONNECTED)
            self.legs.over(wait.leg, Outcome.CLIENT_DISCONNECTED)
        self.pump_soon()

    def _too_long(self, wait: QueueWait) -> Refusal:
        ticket = wait.ticket
        waited_s = time.monotonic() - ticket.enqueued_s
        message = f"no instance had room for the request in {waited_s:.3g} s"
        if wait.at_deadline:
            return Refusal(504, "upstream_timeout", message, kind="server_error")
        return self._refused("queue_timeout", ticket.request.model, message)

    def _refused(self, code: str, model: str, message: str, wait_s: float | None = None) -> Refusal:
        """``wait_s``: until there is room; None: what the queue needs."""
        self._metrics.queue_rejections[code] += 1
        low, high = _RETRY_AFTER_BOUNDS_S
        if wait_s is None:
            wait_s = self._scheduler.drain_time_s(model)
        after_s = min(high, max(low, math.ceil(min(wait_s, high))))
        return Refusal(429, code, message, kind="rate_limit_error", retry_after_s=after_s)

    # Afterwards

    def adopt(
        self,
        request: Request,
        instance_id: InstanceId,
        *,
        placed_s: float,
        waited_s: float,
        began: bool,
    ) -> Placed | None:
        """Charge a request that is already on an instance; None: there is no such instance.

        Args:
            placed_s: when it was placed there, monotonic.
            waited_s: how long it had been in a queue.
            began: past its first token.
        """
        instance = self._fleet.instances.get(instance_id)
        if instance is None:
            return None
        now_s = time.monotonic()
        decision, dispatch = self._scheduler.adopt(request, instance_id, now_s)
        if began and request.streams:
            self._scheduler.first_token(dispatch, now_s)
        return Placed(instance, decision, dispatch, placed_s, waited_s)

    def observe_speed(self, parts: Parts, samples: Samples) -> None:
        """Observations of another process's streams over the last second."""
        self.steps.take_in(parts, samples)

    def stream_began(self, dispatch: Dispatch, stream: ObservedResponse | None) -> None:
        """The first bytes of an answer are here, and its first token, if the core asks for it.

        ``stream``: to be watched from now on; None: its events are not seen here.
        """
        if not dispatch.request.streams:
            return
        now_s = time.monotonic()
        self._scheduler.first_token(dispatch, now_s)
        if stream is not None:
            self.steps.add(stream, dispatch, now_s)
        self.pump_soon()

    def settle(
        self,
        dispatch: Dispatch,
        outcome: Outcome,
        stream: ObservedResponse | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Take a dispatch off, and give its room to the next at the end of this turn.

        ``usage``: as its answer reported it; None if that is not complete.
        """
        now_s, unseen_tokens = time.monotonic(), None
        if usage is not None and dispatch.predicted_s is not None:
            # Its tokens were not seen: its total time is what it says about the speed.
            unseen_tokens = usage.output_tokens
        self._scheduler.settle(dispatch, outcome, now_s, usage, unseen_tokens)
        if stream is not None and dispatch.request.streams:
            self.steps.discard(stream, now_s)
        if self._scheduler.queued:
            self.pump_soon()

    # Pumping

    def pump_soon(self) -> None:
        """Pump at the end of this turn of the event loop, if anything waits."""
        if self._soon is None and self._scheduler.queued and not self._closed:
            self._soon = self._loop.call_soon(self._pump)

    def _pump(self, now_s: float | None = None) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if now_s is None:
            now_s = time.monotonic()
        started_s = time.perf_counter()
        done = self._scheduler.pump(now_s)
        self._metrics.decision_s.observe(time.perf_counter() - started_s)
        for ticket in done:
            self._deliver(ticket, now_s)
        self._arm(now_s)

    def _deliver(self, ticket: Ticket, now_s: float) -> None:
        wait: QueueWait = ticket.owner
        if ticket.decision is not None:
            # Kept now: the instance may be removed before the owner runs.
            wait.instance = self._fleet.instances[ticket.decision.instance_id]
            wait.placed_s = now_s
        if ticket.prefill is not None:
            wait.leg = self.legs.of(ticket.prefill)
        wait.wake()

    def _arm(self, now_s: float) -> None:
        """Keep the timer at the scheduler's next wake-up, while anything waits."""
        due_s = self._scheduler.next_wakeup_s() if self._scheduler.queued else None
        if due_s == self._timer_due_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due_s = due_s
        if due_s is not None and not self._closed:
            delay_s = max(0.0, due_s - now_s) + _TIMER_GRAIN_S
            self._timer = self._loop.call_later(delay_s, self._wake_up)

    def _wake_up(self) -> None:
        self._timer = None
        self._pump()

    def describe(self) -> dict[str, Any] | None:
        """The queue as /admin shows it; None under a policy without one."""
        if not self.queues:
            return None
        return {"waiting": self._scheduler.queued, "oldest_wait_s": self.oldest_wait_s()}


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(eq=False)
class LocalDispatcher:
    """Drives the scheduler of this process.

    Args:
        intake, placement, recorder, outcomes, metrics, decisions, limiter: of the gateway.
    """

    intake: Intake
    placement: Placement
    recorder: Recorder
    _outcomes: OutcomeWatch
    _metrics: Metrics
    _decisions: DecisionLog
    _limiter: Limiter
    # Wakes sleeping engines; None: they are not woken.
    engine_calls: EngineCalls | None = None

    def describe(
        self,
        inbound: Inbound,
        client: Client,
        parsed: ParsedRequest,
        counted: int | None,
        *,
        adopts: bool = False,
    ) -> Job:
        """``adopts``: the request is already being served, and so has no limits."""
        job = self.intake.describe(inbound, client, parsed, counted)
        if client.accounts:
            tokens, limiter = job.estimated_tokens(), self._limiter
            charge = limiter.adopt(client, tokens) if adopts else limiter.charge(client, tokens)
            job.charge, job.standing = charge, charge.standing
        return job

    def submit(
        self,
        job: Job,
        tried: Sequence[InstanceId],
        failure: InstanceError | None,
        deadline_s: float,
        owner: Owner[Placed],
        *,
        first: bool | None = None,
        wakes: bool = True,
    ) -> Placed | Reject | Waiting:
        """See ``Dispatcher``.

        Args:
            first: wait at the head of the queue; None: if it was admitted before.
            wakes: if there is no other, a sleeping engine may be woken for it.
        """
        if first is None and job.fell_back:
            first = True
        request = job.request
        if job.told_tokens is not None:
            request = self.placement.rest_of(request, job.told_tokens)
        place = self.placement.submit(request, tried, waits=job.waits, first=first)
        if isinstance(place, Placed):
            self.note_place(job, failure, place)
        elif isinstance(place, QueueWait):
            note = partial(self.note_place, job, failure)
            self.placement.begin(place, owner, deadline_s, note)
        elif wakes and self.engine_calls is not None and place.reason is _UNAVAILABLE:
            request = job.request
            waking = self.engine_calls.wake_for(request.model, request.only)
            if waking is not None:
                again = partial(self.submit, job, (), failure, deadline_s, owner)
                wait = WakingWait(waking, place, again)
                wait.begin(owner, min(time.monotonic() + self.placement.timeout_s, deadline_s))
                return wait
        return place

    def has_other(self, job: Job, tried: Sequence[InstanceId]) -> bool:
        return self.placement.can_take(job.request, tried)

    def note_place(self, job: Job, failure: InstanceError | None, place: Placed) -> None:
        """Count and remember a decision."""
        self._metrics.decisions[place.instance.id] += 1
        if failure is not None:
            self._metrics.retries[failure.reason] += 1
        noted = self._decisions.noted
        noted.append((place.placed_s, job.inbound.request_id, place.decision, place.waited_s))
        if len(noted) >= _MOST_NOTED:
            self._decisions.keep_noted()
            count_noted(self._metrics.noted)

    def stream_began(self, job: Job, place: Placed, stream: ObservedResponse | None) -> None:
        """``stream`` None: another process watches it (``Placement.observe_speed``)."""
        self.placement.stream_began(place.dispatch, stream)
        if place.leg is not None:
            self.placement.legs.fetched(place)
        if place.dispatch in place.instance.outcomes.trials:
            # Its end may be minutes away, and until then few others would try.
            self._outcomes.succeeded(
                place.instance, place.dispatch, job.inbound.body, time.monotonic()
            )

    async def spend(self, job: Job, tokens: int) -> None:
        self.extend(job, tokens)

    def extend(self, job: Job, tokens: int) -> None:
        """``spend``, done at once. Raises Refusal."""
        if job.charge is not None:
            self._limiter.extend(job.client, job.charge, tokens)

    def made(self, job: Job, place: Place, name: bytes) -> None:
        self.intake.note_response(job, place.instance.id, name)

    def settle(
        self,
        job: Job,
        place: Placed,
        seen: ObservedResponse,
        outcome: Outcome,
        *,
        final: bool,
        told: AnswerTokens | None = UNREAD,
    ) -> None:
        """See ``Dispatcher``. ``told``: of an answer that another process has watched and counted
        (``Recorder.count_seen``).
        """
        usage = seen.usage() if outcome is COMPLETED else None
        if job.inbound.path == REALTIME:
            # The duration of a session says nothing about the engine's speed.
            self.placement.settle(place.dispatch, outcome)
        else:
            stream = seen if told is UNREAD else None
            # Of an answer in several legs, the usage is that of all legs.
            of_one = usage if job.told_tokens is None else None
            if place.leg is not None and of_one is not None:
                of_one = of_one._replace(cached_tokens=None)  # the prefill instance had it
            self.placement.settle(place.dispatch, outcome, stream, of_one)
        if place.leg is not None:
            self.placement.legs.over(place.leg, outcome)
        if job.response is not None and usage is not None:
            self._complete(job.response, context_of(place.instance), usage)
        self.recorder.record(job, place, seen, outcome, usage, final=final, told=told)

    def fall_back(self, job: Job, model: str) -> None:
        request = job.request
        job.parsed.asked = job.parsed.asked or request.model
        self._metrics.fallbacks[job.parsed.asked, model] += 1
        job.parsed.model = model = sys.intern(model)
        job.request = request.replace(model=model)
        job.fell_back = True
        if job.features is not None:
            job.features.model = model

    def settle_outside(
        self, job: Job, label: str, seen: ObservedResponse, outcome: Outcome, *, final: bool
    ) -> None:
        name = job.parsed.asked or job.request.model
        self._metrics.fallbacks[name, label] += 1
        if final:
            self.recorder.count_outside(job, seen, outcome)

    def _complete(self, response: Response, most_tokens: int, usage: Usage) -> None:
        """A response is complete: its answer, too, is in its instance's cache."""
        prompt_tokens, output_tokens, _ = usage
        if prompt_tokens is None or output_tokens is None:
            return
        # A prompt that cannot be that long is invented, and so is an answer.
        self.intake.responses.complete(
            response, min(prompt_tokens, most_tokens), min(output_tokens, most_tokens)
        )
        if response.keys is not None:
            self.placement.know(response.instance_id, response.keys)

    def withdraw(self, place: Placed, seen: ObservedResponse | None) -> None:
        self.placement.settle(place.dispatch, Outcome.CLIENT_DISCONNECTED, seen)
        self.placement.legs.over(place.leg, Outcome.CLIENT_DISCONNECTED)

    def pass_on(
        self,
        job: Job,
        place: Placed,
        seen: ObservedResponse,
        outcome: Outcome = COMPLETED,
        told: AnswerTokens | None = UNREAD,
    ) -> None:
        """See ``Dispatcher``; ``told``: as in ``settle``."""
        attempt = SettledAttempt(job, place, seen, outcome, time.monotonic())
        self.recorder.count(attempt, told)

    def note(self, job: Job | None, outcome: str) -> None:
        # A name that no instance serves is the client's invention: it must not become a label.
        model = "unknown"
        if job is not None:
            if self.placement.knows(job.request.model):
                model = job.request.model
            if job.charge is not None:
                job.charge.settle(0, time.monotonic())
            turned = FailedAttempt(job.inbound.request_id, "", outcome, time.monotonic())
            self.recorder.log.add_failed(turned)
        self._metrics.counts(model, "").outcomes[outcome] += 1
