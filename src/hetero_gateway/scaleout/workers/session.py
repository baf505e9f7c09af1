"""A worker's requests, driven through a ``LocalDispatcher`` by its messages.

The scheduler process has a session for each of its workers (``hub``), and a worker one of its own
while that process is away (``remote``). Policies, queue, ledger, records and predictors are the
dispatcher's. A session that ends, however it ends, leaves nothing on any instance.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetero_gateway.core.types import InstanceId, Reject
from hetero_gateway.engines.vllm import REALTIME, Work, work_of_path
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.dataplane.dispatcher import Waiting, report_to
from hetero_gateway.gateway.dataplane.intake import Job, Placed
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.heads import Inbound
from hetero_gateway.scaleout.workers import messages

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Request:
    """A worker's request: the ``Owner`` of its place."""

    session: "RequestSession"
    key: int
    job: Job
    deadline_s: float
    wait: Waiting | None = None
    place: Placed | None = None  # and not settled
    settled: Placed | None = None  # the last one

    def submit(self, tried: list[InstanceId], failure: InstanceError | None) -> None:
        submit = self.session.dispatcher.submit
        ask = partial(submit, self.job, tried, failure, self.deadline_s, self)
        self.wait = report_to(self, ask)

    def placed(self, place: Placed | Reject) -> None:
        self.wait = None
        send = self.session.send
        if isinstance(place, Reject):
            send(messages.Rejected(self.key, place.reason, place.detail))
            return
        self.place = place
        job, request = self.job, place.dispatch.request
        send(
            messages.PlacedAt(
                self.key,
                place.instance.id,
                request.prompt_tokens,
                request.predicted_output_tokens,
                request.sequences,
                request.streams,
                place.placed_s,
                place.waited_s,
                "" if job.parsed.model else request.model,
                job.standing,
            )
        )

    def turned_away(self, refusal: Refusal) -> None:
        self.wait = None
        self.session.send(messages.Refused(self.key, refusal))

    def broke(self, error: Exception) -> None:
        self.wait = None
        name = self.job.inbound.request_id.decode("ascii", "replace")
        _log.error("request %s cannot be placed", name, exc_info=error)
        self.session.send(messages.Failed(self.key))

    def end(self) -> None:
        """Release everything it has."""
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


class RequestSession:
    """One worker's requests, until it or its scheduler is gone.

    Args:
        dispatcher: places them.
        admission: knows clients by their names.
        send: takes the answers.
    """

    def __init__(
        self, dispatcher: LocalDispatcher, admission: Admission, send: Callable[[Any], None]
    ) -> None:
        self.dispatcher = dispatcher
        self.send = send
        self.name = "a worker"
        self._admission = admission
        self._requests: dict[int, _Request] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Outstanding: self._outstanding,
            messages.Submit: self._submit,
            messages.Resubmit: self._again,
            messages.Spend: self._spend,
            messages.Speed: self._speed,
        }
        # Of open requests; events of others are ignored.
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
        return f"<{type(self).__name__} {self.name}: {len(self._requests)} requests>"

    def received(self, received: list[Any]) -> None:
        for message in received:
            try:
                event = self._events.get(type(message))
                if event is None:
                    self._handlers[type(message)](message)
                elif (request := self._requests.get(message.key)) is not None:
                    event(request, message)
            except Exception as error:
                self.broke(message, error)

    def broke(self, message: Any, error: Exception) -> None:
        """The boundary of a request: a bug costs only the request that met it."""
        _log.error("%s: a %s failed", self.name, type(message).__name__, exc_info=error)
        key = getattr(message, "key", None)
        if key is None:
            return
        request = self._requests.pop(key, None)
        if request is not None:
            request.end()
        if isinstance(message, messages.Submit | messages.Resubmit):
            self.send(messages.Failed(key))

    def end(self) -> None:
        """End all of them now."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            try:
                request.end()
            except Exception:
                _log.exception("a request of %s cannot be settled", self.name)

    def _job_of(self, facts: messages.Facts, *, adopts: bool) -> Job:
        """Raises Refusal."""
        work = work_of_path(facts.path)
        if work is None:
            work = Work.GENERATE if facts.path == REALTIME else Work.LIGHT
        inbound = Inbound(facts.path, b"", work, facts.headers)
        inbound.request_id = facts.request_id
        inbound.received_s = facts.received_s
        inbound.body = facts.body
        client = self._admission.named(facts.client)
        describe = self.dispatcher.describe
        job = describe(inbound, client, facts.parsed, facts.counted, adopts=adopts)
        job.told_tokens = facts.told_tokens
        if facts.path == REALTIME:
            job.features = None  # as in ``Realtime``: nothing is learnt from a session's length
        return job

    def _outstanding(self, said: messages.Outstanding) -> None:
        for carried in said.requests:
            try:
                job = self._job_of(carried.facts, adopts=True)
            except Refusal:
                continue  # it would not be admitted now: its events are ignored
            request = _Request(self, carried.key, job, carried.facts.deadline_s)
            self._requests[carried.key] = request
            if not carried.instance:
                continue
            leg = job.request.replace(
                prompt_tokens=carried.prompt_tokens,
                predicted_output_tokens=carried.predicted_output_tokens,
                sequences=carried.sequences,
                streams=carried.streams,
            )
            if job.told_tokens is None:
                job.request = leg
            request.place = self.dispatcher.placement.adopt(
                leg,
                carried.instance,
                placed_s=carried.placed_s,
                waited_s=carried.waited_s,
                began=carried.began_s is not None,
            )

    def _submit(self, said: messages.Submit) -> None:
        try:
            # Continued requests were admitted when they began.
            job = self._job_of(said.facts, adopts=said.facts.told_tokens is not None)
        except Refusal as refusal:
            self.dispatcher.note(None, "rejected")
            self.send(messages.Refused(said.key, refusal))
            return
        request = _Request(self, said.key, job, said.facts.deadline_s)
        self._requests[said.key] = request
        request.submit(said.tried, said.failure)

    def _again(self, said: messages.Resubmit) -> None:
        request = self._requests[said.key]
        if said.model:
            self.dispatcher.fall_back(request.job, said.model)
        request.job.told_tokens = said.told_tokens
        request.submit(said.tried, said.failure)

    def _leave(self, request: _Request, said: Any) -> None:
        del self._requests[said.key]
        request.end()

    def _began(self, request: _Request, said: messages.Began) -> None:
        if request.place is not None:
            self.dispatcher.stream_began(request.job, request.place, None)

    def _made(self, request: _Request, said: messages.Made) -> None:
        if request.place is not None:
            self.dispatcher.made(request.job, request.place, said.name)

    def _spend(self, said: messages.Spend) -> None:
        request = self._requests.get(said.key)
        try:
            if request is not None:
                self.dispatcher.extend(request.job, said.tokens)
        except Refusal as refusal:
            self.send(messages.Refused(said.key, refusal))
        else:
            self.send(messages.Spent(said.key))

    def _settle(self, request: _Request, said: messages.Settle) -> None:
        if said.final:
            del self._requests[said.key]
        place, request.place = request.place, None
        if place is None:
            request.close()
            return  # its instance was unknown when reported
        request.settled = place
        job, answer = request.job, said.answer
        job.inbound.body = answer.mark
        self.dispatcher.settle(
            job, place, answer, said.outcome, final=said.final, told=answer.told()
        )
        if said.final:
            request.close()

    def _outside(self, request: _Request, said: messages.SettleOutside) -> None:
        self.dispatcher.settle_outside(
            request.job, said.label, said.answer, said.outcome, final=said.final
        )
        if said.final:
            self._leave(request, said)

    def _pass_on(self, request: _Request, said: messages.PassOn) -> None:
        self._leave(request, said)
        if request.settled is not None:
            answer = said.answer
            self.dispatcher.pass_on(
                request.job, request.settled, answer, said.outcome, answer.told()
            )

    def _over(self, request: _Request, said: messages.Over) -> None:
        self._leave(request, said)
        if said.outcome:
            self.dispatcher.note(request.job, said.outcome)

    def _speed(self, said: messages.Speed) -> None:
        parts: dict[InstanceId, list[tuple[float, float]]] = {}
        for instance_id, duration_s, steps in said.parts:
            parts.setdefault(instance_id, []).append((duration_s, steps))
        self.dispatcher.placement.observe_speed(parts, said.samples)
