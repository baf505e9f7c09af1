"""Between a request's bytes and the scheduler: what an attempt asks, and what it reports.

``Dispatcher`` is the whole of what ``attempts`` knows of scheduling: describe, submit, and the
events of a placed attempt until it is settled. ``LocalDispatcher`` drives the scheduler of this
process; ``workers.remote`` one in another process, with the same calls. None of them waits: what
is not known at once is reported to the request's ``Owner`` in a callback.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from hetero_gateway.core.scheduling.decision_log import DecisionLog
from hetero_gateway.core.scheduling.tickets import Ticket
from hetero_gateway.core.types import InstanceId, Outcome, Reject, RejectReason, Usage
from hetero_gateway.engines.vllm import REALTIME
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.admission.limits import Limiter
from hetero_gateway.gateway.dataplane.intake import Intake, Job
from hetero_gateway.gateway.dataplane.placement import Placed, Placement, SleeperGone
from hetero_gateway.gateway.dataplane.records import Answered, Recorder
from hetero_gateway.gateway.dataplane.responses import Response, Responses
from hetero_gateway.gateway.dataplane.speed import WatchedStream
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.engine_calls import EngineCalls
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.inbound import Inbound


class Place(Protocol):
    """Where a request goes. ``waited_s``: in the queue."""

    @property
    def instance(self) -> Instance: ...

    @property
    def waited_s(self) -> float: ...


class Owner(Protocol):
    """Whose request it is. One of these is called for each ``Waiting``, unless it left.

    They do not raise.
    """

    def placed(self, place: Place | Reject) -> None: ...

    def turned_away(self, refusal: Refusal) -> None:
        """It waited too long, or the gateway ends."""
        ...

    def broke(self, error: Exception) -> None:
        """Placing it met a bug."""
        ...


class Waiting:
    """A request that has no place yet."""

    __slots__ = ()

    def leave(self) -> None:
        """Its owner wants none any more, and hears nothing more."""
        raise NotImplementedError


class Seen(Answered, WatchedStream, Protocol):
    """A response, as the recorder and the watch over the engines' speed want it."""


class Dispatcher(Protocol):
    """Finds requests their instances, and learns what becomes of them."""

    def describe(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None
    ) -> Job:
        """What the scheduler needs to know of a request; its client is charged.

        Raises:
            Refusal: 403 for what the client may not ask for, 429 for more than it may.
        """
        ...

    def submit(
        self,
        job: Job,
        tried: Sequence[InstanceId],
        failure: InstanceError | None,
        deadline_s: float,
        owner: Owner,
    ) -> Place | Reject | Waiting:
        """Ask for a place.

        Args:
            tried: where the request was before.
            failure: of the last attempt, where there was one.
            deadline_s: monotonic; of the whole request.
            owner: is called back where a ``Waiting`` is returned.

        Raises:
            Refusal: 429 for a full queue.
        """
        ...

    def stream_began(self, job: Job, place: Place, stream: Seen) -> None:
        """A good stream's first bytes are here."""
        ...

    async def spend(self, job: Job, tokens: int) -> None:
        """A session goes on: its client is charged for all of its tokens so far.

        Raises:
            Refusal: 429 for more than the client may use; the last ones are not charged.
        """
        ...

    def made(self, job: Job, place: Place, name: bytes) -> None:
        """Its answer is a response that others may continue (``Intake.response_name``)."""
        ...

    def settle(self, job: Job, place: Place, seen: Seen, outcome: Outcome, *, final: bool) -> None:
        """The attempt is over, and is taken off its instance and counted. Once for each place."""
        ...

    def fall_back(self, job: Job, model: str) -> None:
        """Nothing can take it: it is for another model from now on."""
        ...

    def settle_outside(
        self, job: Job, label: str, seen: Seen, outcome: Outcome, *, final: bool
    ) -> None:
        """An attempt at a service elsewhere is over; ``label``: of the fallback."""
        ...

    def withdraw(self, place: Place, seen: Seen | None) -> None:
        """Take an attempt off that met a bug here; nothing is counted."""
        ...

    def pass_on(self, job: Job, place: Place, seen: Seen) -> None:
        """The client gets the answer of an attempt that was settled as not final."""
        ...

    def note(self, job: Job | None, outcome: str) -> None:
        """Count a request that reached no instance; None: it was not even understood."""
        ...


class LocalDispatcher:
    """Drives the scheduler of this process.

    Args:
        intake, placement, recorder, outcomes, metrics, decisions, limiter: of the gateway.
    """

    def __init__(
        self,
        intake: Intake,
        placement: Placement,
        recorder: Recorder,
        outcomes: OutcomeWatch,
        metrics: Metrics,
        decisions: DecisionLog,
        limiter: Limiter,
    ) -> None:
        self.placement = placement
        self._intake = intake
        self._limiter = limiter
        self._recorder = recorder
        self._outcomes = outcomes
        self._metrics = metrics
        self._decisions = decisions
        # By which engines that sleep are woken; None: they are not.
        self.engine_calls: EngineCalls | None = None

    def describe(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None
    ) -> Job:
        job = self._intake.describe(inbound, client, parsed, counted)
        if client.accounts:
            charge = job.charge = self._limiter.charge(client, job.estimated_tokens)
            job.standing = charge.standing
        return job

    def adopt(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None
    ) -> Job:
        """As ``describe``, for a request that is being served already: it is not refused."""
        job = self._intake.describe(inbound, client, parsed, counted)
        if client.accounts:
            job.charge = self._limiter.adopt(client, job.estimated_tokens)
        return job

    def submit(
        self,
        job: Job,
        tried: Sequence[InstanceId],
        failure: InstanceError | None,
        deadline_s: float,
        owner: Owner,
    ) -> Placed | Reject | Waiting:
        first = True if job.fell_back else None
        place = self.placement.submit(job.request, tried, waits=job.waits, first=first)
        if isinstance(place, Placed):
            self.note_place(job, failure, place)
        elif isinstance(place, Ticket):
            return _LocalWait(self, job, failure, place, deadline_s, owner)
        elif self.engine_calls is not None and place.reason is _UNAVAILABLE:
            request = job.request
            waking = self.engine_calls.wake_for(request.model, request.only)
            if waking is not None:
                return _WakingWait(self, job, place, failure, waking, deadline_s, owner)
        return place

    def note_place(self, job: Job, failure: InstanceError | None, place: Placed) -> None:
        """Count and remember a decision."""
        self._metrics.decisions[place.instance.id] += 1
        if failure is not None:
            self._metrics.retries[failure.reason] += 1
        self._decisions.append(time.time(), job.inbound.request_id, place.decision, place.waited_s)

    def stream_began(self, job: Job, place: Place, stream: Seen | None) -> None:
        """``stream`` None: another process watches it (``Placement.observe_speed``)."""
        assert isinstance(place, Placed)
        self.placement.stream_began(place.dispatch, stream)
        if place.instance.outcomes.trial is place.dispatch:
            # Its end may be minutes away, and until then it would be the only one.
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
        self._intake.note_response(job, place.instance.id, name)

    @property
    def responses(self) -> Responses:
        """Those that others may continue."""
        return self._intake.responses

    def settle(self, job: Job, place: Place, seen: Seen, outcome: Outcome, *, final: bool) -> None:
        assert isinstance(place, Placed)
        # How long a session took says nothing of the engine's speed.
        watched = None if job.inbound.path == REALTIME else seen
        self.placement.settle(place.dispatch, outcome, watched)
        if job.response is not None and outcome is Outcome.COMPLETED:
            self._complete(job.response, seen.usage())
        self._recorder.record(job, place, seen, outcome, final=final)

    def fall_back(self, job: Job, model: str) -> None:
        request = job.request
        job.parsed.asked = job.parsed.asked or request.model
        self._metrics.fallbacks[job.parsed.asked, model] += 1
        job.parsed.model = model = sys.intern(model)
        job.request = request._replace(model=model)
        job.fell_back = True
        if job.features is not None:
            job.features.model = model

    def settle_outside(
        self, job: Job, label: str, seen: Seen, outcome: Outcome, *, final: bool
    ) -> None:
        name = job.parsed.asked or job.request.model
        self._metrics.fallbacks[name, label] += 1
        if final:
            self._recorder.count_outside(job, seen, outcome)

    def _complete(self, response: Response, usage: Usage) -> None:
        """A response is whole: its answer, too, is in its instance's cache."""
        prompt_tokens, output_tokens, _ = usage
        if prompt_tokens is None or output_tokens is None:
            return
        # A prompt that cannot be so long is somebody's invention, and so is an answer.
        most = self.placement.context_tokens(response.instance_id)
        self._intake.responses.complete(
            response, min(prompt_tokens, most), min(output_tokens, most)
        )
        if response.keys is not None:
            self.placement.know(response.instance_id, response.keys)

    def withdraw(self, place: Place, seen: Seen | None) -> None:
        assert isinstance(place, Placed)
        self.placement.settle(place.dispatch, Outcome.CLIENT_DISCONNECTED, seen)

    def pass_on(self, job: Job, place: Place, seen: Seen) -> None:
        assert isinstance(place, Placed)
        self._recorder.count(job, place, seen, Outcome.COMPLETED, time.monotonic())

    def note(self, job: Job | None, outcome: str) -> None:
        # A name that nobody serves is the client's invention: it must not become a label.
        model = "unknown"
        if job is not None:
            if self.placement.knows(job.request.model):
                model = job.request.model
            if job.charge is not None:
                job.charge.settle(0, time.monotonic())
        self._metrics.counts(model, "").outcomes[outcome] += 1


_UNAVAILABLE = RejectReason.NO_AVAILABLE_INSTANCE


class _WakingWait(Waiting):
    """A request for which an engine is woken: it is asked for anew once that is awake."""

    def __init__(
        self,
        dispatcher: LocalDispatcher,
        job: Job,
        reject: Reject,
        failure: InstanceError | None,
        waking: asyncio.Task[bool],
        deadline_s: float,
        owner: Owner,
    ) -> None:
        self._dispatcher = dispatcher
        self._owner = owner
        self._inner: Waiting | None = None
        self._gone = False
        self._task = asyncio.get_running_loop().create_task(
            self._wait(job, reject, failure, waking, deadline_s)
        )

    def leave(self) -> None:
        self._gone = True
        if self._inner is not None:
            self._inner.leave()

    async def _wait(
        self,
        job: Job,
        reject: Reject,
        failure: InstanceError | None,
        waking: asyncio.Task[bool],
        deadline_s: float,
    ) -> None:
        dispatcher, owner = self._dispatcher, self._owner
        limit_s = min(dispatcher.placement.timeout_s, deadline_s - time.monotonic())
        await asyncio.wait({waking}, timeout=max(0.0, limit_s))
        if self._gone:
            return
        try:
            awake = waking.done() and not waking.cancelled() and waking.result()
            place: Placed | Reject | Waiting = reject
            if awake:
                place = dispatcher.submit(job, (), failure, deadline_s, owner)
        except Refusal as refusal:
            owner.turned_away(refusal)
        except Exception as error:
            owner.broke(error)
        else:
            if isinstance(place, Waiting):
                self._inner = place
            else:
                owner.placed(place)


class _LocalWait(Waiting):
    """A request in the queue: the ``Sleeper`` of its ticket."""

    def __init__(
        self,
        dispatcher: LocalDispatcher,
        job: Job,
        failure: InstanceError | None,
        ticket: Ticket,
        deadline_s: float,
        owner: Owner,
    ) -> None:
        self._dispatcher = dispatcher
        self._owner = owner
        self._woken = asyncio.Event()
        self.gone = False
        self._task = asyncio.get_running_loop().create_task(
            self._wait(job, failure, ticket, deadline_s)
        )

    def leave(self) -> None:
        self.gone = True
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    async def wait(self) -> None:
        await self._woken.wait()
        self._woken.clear()

    async def _wait(
        self, job: Job, failure: InstanceError | None, ticket: Ticket, deadline_s: float
    ) -> None:
        dispatcher, owner = self._dispatcher, self._owner
        try:
            place = await dispatcher.placement.wait(ticket, self, deadline_s)
            if isinstance(place, Placed):
                dispatcher.note_place(job, failure, place)
            owner.placed(place)
        except SleeperGone:
            pass
        except Refusal as refusal:
            owner.turned_away(refusal)
        except Exception as error:
            owner.broke(error)
