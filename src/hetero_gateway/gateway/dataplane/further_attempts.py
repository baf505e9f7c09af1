"""What follows an attempt that did not serve its request, and a request that has no place.

Another attempt, the rest of its stream from elsewhere, a fallback, or an answer with what there is.
A request that is served at once runs none of this.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from hetero_gateway.core.types import COMPLETED, InstanceId, Outcome
from hetero_gateway.engines.vllm import Work
from hetero_gateway.engines.vllm.continuations import (
    CONTINUED_PATHS,
    NotContinuable,
    missing_end,
)
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.answers import NO_RETRY, nobody_can, refusal_of
from hetero_gateway.gateway.dataplane.continuing import Continuation, ContinuedExchange, got_on
from hetero_gateway.gateway.dataplane.dispatcher import Place
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.reading import RequestReader
from hetero_gateway.gateway.dataplane.relay import Exchange
from hetero_gateway.gateway.dataplane.rooms import Rooms
from hetero_gateway.gateway.dataplane.routes import Fallback, Outside, OutsidePlace
from hetero_gateway.gateway.request.openai import with_model
from hetero_gateway.http.downstream import Downstream
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.headers import lines_of
from hetero_gateway.http.heads import Inbound

_log = logging.getLogger(__name__)

# The answer if nothing can take a request.
_FALLS_BACK = frozenset(
    ("model_not_found", "no_healthy_instance", "queue_full", "queue_timeout", "wait_too_long",
     "upstream_error", "gateway_exhausted")
)  # fmt: skip
# As in nginx, for a client that left before an answer.
CLIENT_GONE = 499


@dataclass(slots=True, eq=False, repr=False)
class FurtherAttempts(RequestReader):
    """A request that may need several attempts: what is known of the earlier ones.

    Its driver, ``Attempts``, derives from it and implements what is left open here.
    """

    _rooms: Rooms
    _inbound: Inbound
    _downstream: Downstream
    _job: Job | None = None
    _tried: list[InstanceId] = field(default_factory=list)
    _refused: int = 0  # of the tried instances, those that refused the connection
    _failure: InstanceError | None = None  # of the last attempt, if another follows
    # And its answer, if any.
    _kept: Exchange | None = None
    _continuation: Continuation | None = None  # of a stream that broke off
    _other_body: bytes = b""  # sent in place of the client's; b"": none
    # The number of fallbacks examined, and the last one's label.
    _fallen: tuple[int, str] | None = None
    _exchange: Exchange | None = None  # at its place, until it is settled
    _status: int = CLIENT_GONE  # that the client got
    # Its outcome, for reports.
    _last: tuple[Place | OutsidePlace, Exchange, Outcome] | None = None

    # Implemented by its driver

    def _after_legs(self, exchange: Exchange, error: InstanceError) -> InstanceError:
        """The failure of an attempt, if it was split."""
        raise NotImplementedError

    def _place(self) -> None:
        """Have it placed on an untried instance."""
        raise NotImplementedError

    def _send(self, placed: Place | OutsidePlace) -> None:
        """Send it where it was placed."""
        raise NotImplementedError

    async def _connect(self, exchange: Exchange, *, first: bool) -> None:
        """Send it over a new connection."""
        raise NotImplementedError

    def _settle(self, exchange: Exchange, outcome: Outcome, *, final: bool) -> None:
        """Take the attempt off its instance, and count it."""
        raise NotImplementedError

    def _note(self, outcome: str) -> None:
        """Count a request that reached no instance."""
        raise NotImplementedError

    def _answer(self, refusal: Refusal) -> None:
        """Answer it with an error; it is over."""
        raise NotImplementedError

    def _end(self) -> None:
        """End it."""
        raise NotImplementedError

    # An answer that is none

    def _failure_of(self, exchange: Exchange) -> InstanceError | None:
        """What a held-back answer means; None: pass it on."""
        assert exchange.held is not None
        if exchange.status == 404 and isinstance(exchange.place, OutsidePlace):
            return None
        error = exchange.held.error()
        if error is None and self._lacks_body(exchange):
            error = InstanceError(Failure.EMPTY, "its answer is empty")
        return error

    def _lacks_body(self, exchange: Exchange) -> bool:
        return exchange.empty and exchange.status == 200 and self._inbound.work is Work.GENERATE

    def _note_break(self, exchange: Exchange) -> None:
        """The HTTP response is complete, but the engine's answer is not."""
        _log.warning(
            "request %s: the engine of %s broke off its answer",
            self._inbound.request_id.decode(),
            exchange.place.instance.id,
        )

    def _note_loop(self, exchange: Exchange) -> None:
        """The request has come back to a gateway it has been through."""
        self._rooms.hops.note_loop(exchange.place.instance.id)
        if not self._inbound.came_through:
            exchange.error = InstanceError(Failure.LOOP, "it leads back to a gateway")

    # An attempt that failed

    def _go_on_after(self, error: InstanceError, exchange: Exchange) -> None:
        """Handle a failed attempt: retry, ask a fallback, or answer with what there is."""
        placed = exchange.place
        instance, connection = placed.instance, exchange.connection
        if connection is not None and connection.stale and error.failure is Failure.RESET:
            # The instance was closing this idle connection when the request was written. A new one
            # is not stale, so this happens once.
            exchange.begin_again()
            self._start(self._connect(exchange, first=False))
            return
        if self._ends_all_the_same(error, exchange):
            return
        error = self._after_legs(exchange, error)
        self._tried.append(instance.id)
        outside = isinstance(placed, OutsidePlace)
        deadly = self._note_deadly(error, exchange)
        if outside or deadly:
            retry = False
        elif exchange.head_sent:
            retry = self._continues(exchange, error)
        else:
            retry = self._may_retry(error)
        fallback = None
        if not (retry or exchange.head_sent or deadly or error.failure is Failure.TOTAL_TIMEOUT):
            fallback = self._next_fallback()
        answered = exchange.complete
        outcome = error.failure.outcome
        if answered and exchange.status >= 400 and not retry and fallback is None:
            outcome = COMPLETED  # with its engine's own answer
        self._settle(exchange, outcome, final=not retry and fallback is None)
        spent = len(self._tried) > 1
        if retry or fallback is not None:
            self._failure = error
            self._kept = exchange if answered else None
            if fallback is None:
                self._place()
            else:
                self._fall_back(fallback)
        elif answered:
            self._pass_on(exchange)
        elif exchange.head_sent:
            _log.warning(
                "request %s: its answer from %s broke off: %s",
                self._inbound.request_id.decode(),
                instance.id,
                error,
            )
            exchange.break_off(refusal_of(error, instance))
            self._end()
        else:
            self._answer(refusal_of(error, instance, spent=spent))

    def _may_retry(self, error: InstanceError) -> bool:
        """Whether it may be retried, ``error`` being the last attempt's."""
        rooms = self._rooms
        self._refused += error.refused
        attempts = len(self._tried) - self._refused
        return rooms.budget.may_retry(error, attempts, len(rooms.open))

    def _note_deadly(self, error: InstanceError, exchange: Exchange) -> bool:
        """Whether instances die under this request, the last one before it made much progress.

        Two in turn; or one more, under a request like a previous one.
        """
        if error.failure is not Failure.RESET or got_on(exchange, self._continuation):
            return False
        budget, body, last = self._rooms.budget, self._inbound.body, self._last
        died = [exchange.place.instance.id]
        if not budget.deaths_under(body):
            before = self._failure
            if last is None or before is None or before.failure is not Failure.RESET:
                return False
            instance = last[0].instance
            if isinstance(instance, Outside) or instance is exchange.place.instance or instance.up:
                return False
            died.insert(0, instance.id)
        budget.note_deaths(body, len(died))
        if exchange.head_sent and exchange.streams:
            self._rooms.metrics.streams_continued["not_continuable"] += 1
        request_id = self._inbound.request_id.decode()
        _log.warning("request %s is not retried: %s died", request_id, " and ".join(died))
        return True

    def _ends_all_the_same(self, error: InstanceError, exchange: Exchange) -> bool:
        """Whether a stream broke off after its complete answer, lacking only its end."""
        job = self._job
        assert job is not None
        if not (exchange.head_sent and exchange.streams and exchange.at_event):
            return False
        if self._inbound.path not in CONTINUED_PATHS or error.failure is Failure.ENGINE:
            return False
        rest = missing_end(exchange.tail(), job.request.sequences)
        if rest is None or self._downstream.gone:
            return False
        _log.info(
            "request %s: its answer from %s was complete except for its end: %s",
            self._inbound.request_id.decode(),
            exchange.place.instance.id,
            error,
        )
        exchange.abort()
        exchange.end_without(rest)
        self._settle(exchange, COMPLETED, final=True)
        self._end()
        return True

    def _pass_on(self, exchange: Exchange) -> None:
        """No instance has a better answer than the held-back one: the client gets that."""
        if not self._downstream.gone:
            # Answers of busy engines stay unchanged: trying again later is right, and meanwhile the
            # gateway spares those engines, so that it costs one attempt and not several.
            spent = len(self._tried) > 1 and exchange.status in (500, 502)
            exchange.let_pass(lines_of((NO_RETRY,)) if spent else b"")
            self._status = exchange.status
        self._end()

    # A stream that broke off

    def _continues(self, exchange: Exchange, error: InstanceError) -> bool:
        """Whether a broken stream is continued elsewhere."""
        continuations, job = self._rooms.continuations, self._job
        if continuations is None or not exchange.streams or self._downstream.gone:
            return False
        assert job is not None
        self._continuation = continuations.after(exchange, error, self._inbound, self._continuation)
        if self._continuation is None:
            return False
        if self._continuation.breaks == 1:
            # It has made progress since the others failed.
            self._tried, self._refused = self._tried[-1:], 0
        job.told_tokens = self._continuation.told.tokens
        return True

    async def _continue(self, exchange: ContinuedExchange) -> None:
        """Send the rest of a broken stream, once its size is known."""
        continuation, instance = self._continuation, exchange.place.instance
        assert continuation is not None
        assert not isinstance(instance, Outside)
        exchange.follow(continuation)
        try:
            await continuation.count_on(instance, self._rooms.hops)
        except NotContinuable as reason:
            exchange.on_error(InstanceError(Failure.NOT_CONTINUED, f"{reason}"))
        if self._exchange is exchange:
            exchange.follow(continuation)  # as it was counted
            self._other_body = continuation.body
            await self._connect(exchange, first=False)

    def _end_stream(self, refusal: Refusal) -> None:
        """Nothing takes the rest of a broken stream: it counts as what it was."""
        assert self._job is not None
        assert self._last is not None
        placed, exchange, outcome = self._last
        assert not isinstance(placed, OutsidePlace)
        self._rooms.dispatcher.pass_on(self._job, placed, exchange, outcome)
        self._answer(refusal)

    # No place

    def _turn_away(self, refusal: Refusal, outcome: str) -> None:
        """Answer a request that was not placed, or ask a fallback."""
        if refusal.code in _FALLS_BACK and (fallback := self._next_fallback()) is not None:
            self._fall_back(fallback)
            return
        if self._fallen is not None and refusal.code == "model_not_found":
            refusal = nobody_can()  # of the fallback alone
        if self._downstream.started:
            self._end_stream(refusal)
            return
        if self._kept is not None:
            exchange, placed = self._kept, self._kept.place
            assert self._job is not None
            if isinstance(placed, OutsidePlace):
                self._rooms.dispatcher.settle_outside(
                    self._job, placed.label, exchange, COMPLETED, final=True
                )
            else:
                self._rooms.dispatcher.pass_on(self._job, placed, exchange)
            self._last = placed, exchange, COMPLETED
            self._pass_on(exchange)
            return
        self._note(outcome)
        self._answer(refusal)

    def _next_fallback(self) -> Fallback | None:
        """The fallback to ask now that nothing can take the request; None: none (left)."""
        job, client, routes = self._job, self._client, self._rooms.intake.routes
        if not routes.by_name or job is None or client is None or job.parsed.previous:
            return None
        if self._inbound.method != b"POST" or self._downstream.started:
            return None
        name = job.parsed.asked or job.parsed.model or ""
        seen = 0 if self._fallen is None else self._fallen[0]
        found = routes.next_fallback(name, seen, client.models, self._inbound.path)
        if found is None:
            return None
        number, fallback = found
        job.parsed.asked = name
        self._fallen = number, fallback.label
        return fallback

    def _fall_back(self, fallback: Fallback) -> None:
        job, inbound = self._job, self._inbound
        assert job is not None
        self._tried, self._refused = [], 0
        try:
            inbound.body = with_model(inbound.body, inbound.content_type, fallback.model)
        except Refusal as refusal:
            self._note("rejected")
            self._answer(refusal)
            return
        if fallback.outside is not None:
            self._send(OutsidePlace(fallback.outside, fallback.label))
            return
        self._rooms.dispatcher.fall_back(job, fallback.model)
        self._place()
