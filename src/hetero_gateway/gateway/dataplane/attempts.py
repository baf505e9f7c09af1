"""A request's way through the gateway: read, placed, sent, retried, answered, settled.

One driver for every way in. Its events come from callbacks (the client's connection, the
instance's, timers) or from the ends of its own short tasks; none of them waits. A task exists only
where something has to wait: for the tokenizer, for room on an instance, for a connection. If
admission, description, room and an idle connection are all available at once, the request is sent
before ``begin`` returns. ``further_attempts`` has what follows a failed attempt.

The life of a request. Events down, states across; "–": impossible, or without effect:

    event           reading     counting    waiting     connecting    relaying
    --------------  ----------  ----------  ----------  ------------  ---------------------
    body complete   counting, or as if counted  –       –             –
    counted         –           waiting, connecting or relaying, given room and a connection
    refused         over: 4xx   over: 4xx   over: 429,  –             –
                                            503, 504
    placed          –           –           connecting or relaying    –
    connected       –           –           –           relaying      –
    broken off      –           –           –           –             settled; waiting or on if the
                                                                      stream may be continued, else
                                                                      over
    stale idle      –           –           –           –             connecting (once)
    failed          –           –           –           settled; waiting, connecting or relaying
                                                        if it may be retried, else over
    engine's error  –           –           –           –             held back, then as failed;
                                                                      passed on as a last resort
    complete        –           –           –           –             settled, a turn later; over
    client gone     over        over        leaves the  settled;      settled; over
                                            queue; over over
    shut down       over: 503   over: 503   the same    settled;      settled; over: 503,
                                            and 503     over: 503     or cut
    a bug           over: 500   over: 500   over: 500   settled;      settled; over: 500,
                                                        over: 500     or cut

A placed request is settled exactly once, in ``_settle``: ``_exchange`` is set from "placed" until
then. A task that finds its request over only returns what it has acquired.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from hetero_gateway.core.types import COMPLETED, Outcome, Reject, RejectReason
from hetero_gateway.engines.vllm import response_id_in
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import EVERYBODY, Client
from hetero_gateway.gateway.admission.limits import rate_limit_fields
from hetero_gateway.gateway.dataplane.answers import answer, rejection, shutting_down
from hetero_gateway.gateway.dataplane.continuing import ContinuedExchange, may_continue
from hetero_gateway.gateway.dataplane.dispatcher import Place, Waiting
from hetero_gateway.gateway.dataplane.ended import Ended, EndedRequests
from hetero_gateway.gateway.dataplane.handover import HandoverExchange
from hetero_gateway.gateway.dataplane.intake import Placed, shorten_body
from hetero_gateway.gateway.dataplane.prompt_names import named_prompt
from hetero_gateway.gateway.dataplane.relay import MOST_EMPTY_BYTES, Exchange
from hetero_gateway.gateway.dataplane.rooms import Rooms
from hetero_gateway.gateway.dataplane.routes import Outside, OutsidePlace
from hetero_gateway.gateway.dataplane.two_legs import TwoLegs
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.request.body_fields import LEAST_BYTES
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.downstream import Downstream
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.headers import lines_of
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.hops import LOOP_DETECTED
from hetero_gateway.http.upstream import UpstreamConnection, head_to_instance, head_to_outside

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class Attempts(TwoLegs):
    """One request and all of its attempts: a ``Listener``, an ``ExchangeOwner``, an ``Owner``."""

    _client: Client | None = None
    _wait: Waiting | None = None  # for a place
    _task: asyncio.Task[None] | None = None
    _deadline_s: float = 0.0
    _verdict: str = ""
    _span: Any = None
    _overhead_s: float | None = None
    over: bool = False

    @classmethod
    def open(cls, rooms: Rooms, inbound: Inbound, downstream: Downstream) -> Attempts:
        """Take a request whose head is here; it may be answered at once."""
        ids = rooms.ids
        if inbound.asked_id:
            ids.name(inbound)
        else:
            inbound.request_id = b"%b-%x" % (ids.prefix, next(ids.numbers))
        attempts = cls(rooms, inbound, downstream)
        rooms.open.add(attempts)
        attempts.arrive()
        return attempts

    def __repr__(self) -> str:
        if self.over:
            state = "over"
        elif self._exchange is not None:
            state = repr(self._exchange)
        elif self._job is not None:
            state = "waiting"
        else:
            state = "counting" if self._inbound.received_s else "reading"
        return f"<Attempts {self._inbound!r}: {state}; tried {self._tried}>"

    # Called by the client's side

    def arrive(self) -> None:
        """The head is here: identify the client, and whether it may be served."""
        rooms = self._rooms
        try:
            if self._inbound.came_through:
                # Before the key: a request that returns has none if the gateway keeps it to itself.
                rooms.hops.check(self._inbound.came_through)
            admission = rooms.admission
            self._client = EVERYBODY
            if admission.has_key:
                inbound = self._inbound
                self._client = admission.client_of(inbound.headers, inbound.authorization)
            limits = rooms.intake.limits
            if self._inbound.content_length > limits.small_bytes:
                limits.check(self._inbound.content_length)
        except Refusal as refusal:
            self._refuse(refusal)
        except Exception as error:
            self.broke(error)

    def begin(self, body: bytes) -> None:
        """The body is here: read the request, and send it if that can be done at once."""
        inbound = self._inbound
        inbound.body = body
        try:
            parsed = self._rooms.intake.read(inbound, self._client)
            if parsed is None:
                self._read_in_steps(self._rooms, inbound)
            else:
                self._describe(parsed, None)
        except Refusal as refusal:
            self._refuse(refusal)
        except Exception as error:
            self.broke(error)

    def refuse(self, refusal: Refusal) -> None:
        self._refuse(refusal)

    def caught_up(self) -> None:
        if self._exchange is not None:
            self._exchange.caught_up()

    def client_gone(self) -> None:
        if self.over:
            return
        if self._exchange is not None:
            if self._exchange.complete:
                self.conclude()
            else:
                self._leave(self._exchange)
                self._end()
        else:
            if self._wait is not None:
                self._note("client_disconnected")
                self._wait.leave()
            # Otherwise it was not described yet: a running count is in vain.
            self._end()

    def shut_down(self) -> None:
        """The gateway is shutting down, and this request did not finish in the time allowed."""
        if self.over:
            return
        if self._exchange is not None:
            if self._exchange.complete:
                self.conclude()
                return
            self._leave(self._exchange)
        if self._wait is not None:
            self._wait.leave()
        self._answer(shutting_down())

    # Reading

    def _is_over(self) -> bool:
        return self.over

    def _describe(self, parsed: ParsedRequest, counted: int | None) -> None:
        rooms, inbound = self._rooms, self._inbound
        assert self._client is not None
        if rooms.priorities is not None:
            rooms.priorities.check(inbound, self._client)
        self._job = rooms.dispatcher.describe(inbound, self._client, parsed, counted)
        budget = rooms.budget
        if budget.deadly:
            budget.check(inbound.body)
        budget.requests += 1
        if rooms.handovers is not None and not rooms.handovers.splits(inbound):
            self._job.request = self._job.request.replace(whole=True)
        self._deadline_s = inbound.received_s + rooms.total_timeout_s
        self._place()

    # Placing

    def _place(self) -> None:
        assert self._job is not None
        try:
            place = self._rooms.dispatcher.submit(
                self._job, self._tried, self._failure, self._deadline_s, self
            )
        except Refusal as refusal:
            self._turn_away(refusal, "unavailable")
            return
        if isinstance(place, Waiting):
            self._wait = place
        elif isinstance(place, Reject):
            self._take(place)
        else:
            self._send(place)

    # An Owner

    def placed(self, place: Place | Reject) -> None:
        self._wait = None
        try:
            self._take(place)
        except Exception as error:
            self.broke(error)

    def turned_away(self, refusal: Refusal) -> None:
        self._wait = None
        try:
            self._turn_away(refusal, "timed_out" if refusal.status == 504 else "unavailable")
        except Exception as error:
            self.broke(error)

    def _take(self, place: Place | Reject) -> None:
        """Send a request where it was placed, or answer that it cannot be."""
        if not isinstance(place, Reject):
            self._send(place)
            return
        ours = place.reason is RejectReason.NO_AVAILABLE_INSTANCE
        if ours and self._is_answered_alone():
            self._place()
            return
        spent = len(self._tried) > 1
        refusal = rejection(place, self._failure, self._inbound.path, spent=spent)
        self._turn_away(refusal, "unavailable" if ours else "rejected")

    # Sending

    def _send(self, placed: Place | OutsidePlace) -> None:
        inbound, rooms, instance = self._inbound, self._rooms, placed.instance
        fields = b"x-request-id: %b\r\nx-hetero-gateway-instance: %b\r\n" % (
            inbound.request_id,
            instance.id.encode(),
        )
        if self._fallen is not None:
            label = self._fallen[1].encode("ascii", "backslashreplace")
            fields += b"x-hetero-gateway-fallback: %b\r\n" % label
        if rooms.cors is not None:
            fields += lines_of(rooms.cors.headers(inbound.headers))
        assert self._job is not None
        if self._job.standing is not None:
            fields += rate_limit_fields(self._job.standing)
        kind: type[Exchange] = Exchange
        if self._continuation is not None:
            kind = ContinuedExchange
        elif rooms.handovers is not None and isinstance(placed, Placed) and placed.leg is not None:
            kind = HandoverExchange
            prefiller = placed.leg.instance.id.encode()
            fields += b"x-hetero-gateway-prefill-instance: %b\r\n" % prefiller
        exchange = self._exchange = kind(
            self._downstream, inbound.path, fields, self._deadline_s, self, placed
        )
        if self._job.parsed.stream and rooms.continuations is not None and may_continue(inbound):
            exchange.keeps_bytes = rooms.continuations.most_kept_bytes
        exchange.frees_body = inbound.buffer is not None
        rooms.deadlines.exchanges.add(exchange)
        if not rooms.deadlines.watches:
            rooms.deadlines.watch()
        if kind is not Exchange:
            if isinstance(exchange, HandoverExchange):
                self._begin_legs(exchange)
            else:
                assert isinstance(exchange, ContinuedExchange)
                self._start(self._continue(exchange))
            return
        connection = instance.pool.take_idle()
        if connection is None:
            self._start(self._connect(exchange, first=not self._tried))
        else:
            self._launch(exchange, connection, first=not self._tried)

    async def _connect(self, exchange: Exchange, *, first: bool) -> None:
        pool = exchange.place.instance.pool
        try:
            connection = await pool.connect()
        except InstanceError as error:
            if self._exchange is exchange:
                exchange.on_error(error)
            return
        if self._exchange is exchange:
            self._launch(exchange, connection, first=first)
        else:
            pool.release(connection)  # its request has ended: another may use it

    def _launch(self, exchange: Exchange, connection: UpstreamConnection, *, first: bool) -> None:
        rooms, inbound, placed = self._rooms, self._inbound, exchange.place
        instance = placed.instance
        if first:
            self._overhead_s = time.monotonic() - inbound.received_s - placed.waited_s
            rooms.metrics.overhead_s.note(self._overhead_s)
        body = self._other_body or inbound.body
        if isinstance(instance, Outside):
            head = head_to_outside(inbound, instance, rooms.hops)
        else:
            head, body = self._request_to(instance, body)
        exchange.connection = connection
        if len(body) < LEAST_BYTES:
            # One write is cheapest as long as it is small.
            connection.send(head + body, exchange)
        else:
            connection.send(head, exchange, body)

    def _request_to(self, instance: Instance, body: bytes) -> tuple[bytes, bytes]:
        rooms, inbound = self._rooms, self._inbound
        priority = parent = None
        if rooms.priorities is not None:
            assert self._client is not None
            priority, body = rooms.priorities.given(inbound, self._client, body)
        if instance.names_prompts:
            body = named_prompt(inbound, self._job, body)
        if rooms.tracing is not None:
            if self._span is None:
                self._span = rooms.tracing.begin(inbound)
            parent = rooms.tracing.parent_header(self._span)
        hidden = rooms.admission.has_key or instance.api_key is not None
        fields = rooms.fields
        withheld = fields.withheld_with_credentials if hidden else fields.withheld
        head = head_to_instance(
            inbound, instance, rooms.hops, withheld, len(body), parent, priority
        )
        return head, body

    # An ExchangeOwner

    def answer_began(self, exchange: Exchange) -> None:
        buffer = self._inbound.buffer
        if buffer is None or exchange is not self._exchange:
            return
        # From here on nothing is retried.
        shorten_body(self._inbound, self._job)
        buffer.release()

    def response_began(self, exchange: Exchange, data: bytes) -> None:
        response_id = response_id_in(data)
        if response_id and self._is_here(exchange):
            name = self._rooms.intake.response_name(self._inbound, self._client, response_id)
            self._rooms.dispatcher.made(self._job, exchange.place, name)

    def stream_began(self, exchange: Exchange) -> None:
        if self._is_here(exchange):
            self._rooms.dispatcher.stream_began(self._job, exchange.place, exchange)

    def _is_here(self, exchange: Exchange) -> bool:
        """Whether it is the present exchange, on an instance of ours."""
        return exchange is self._exchange and not isinstance(exchange.place, OutsidePlace)

    def leave_if(self, exchange: Exchange, error: InstanceError) -> None:
        job, rooms, inbound = self._job, self._rooms, self._inbound
        if not self._is_here(exchange) or exchange.held is not None or job is None:
            return
        tried = [*self._tried, exchange.place.instance.id]
        # It stays if no other instance could take it: it may still be answered there.
        if not rooms.dispatcher.has_other(job, tried):
            return
        if exchange.head_sent:
            may = rooms.continuations is not None and rooms.continuations.can_follow(
                exchange, inbound, self._continuation
            )
        else:
            attempts = len(tried) - self._refused
            may = rooms.budget.may_retry(error, attempts, len(rooms.open), counts=False)
        if may:
            exchange.fail(error)

    def ended(self, exchange: Exchange) -> None:
        if exchange is not self._exchange:
            return
        if exchange.complete and exchange.held is None:
            answered = self._rooms.answered
            answered.requests.append(self)
            if len(answered.requests) == 1:
                answered.conclude_soon()
        else:
            self.conclude()

    def conclude(self) -> None:
        """Settle its present exchange, if it has one, and decide what comes next."""
        exchange = self._exchange
        if exchange is None:
            return
        try:
            if exchange.held is not None and exchange.error is None:
                exchange.error = self._failure_of(exchange)
            if exchange.error is not None:
                self._go_on_after(exchange.error, exchange)
                return
            if exchange.held is not None:
                exchange.let_pass()
            outcome = COMPLETED
            if exchange.streams and exchange.engine_failed():
                outcome = Outcome.UPSTREAM_ERROR
                self._note_break(exchange)
            elif exchange.body_bytes <= MOST_EMPTY_BYTES and self._lacks_body(exchange):
                outcome = Outcome.UPSTREAM_ERROR
            elif exchange.status == LOOP_DETECTED:
                self._note_loop(exchange)
            self._settle(exchange, outcome, final=True)
            self._end()
        except Exception as error:
            self.broke(error)

    # Ends

    def _leave(self, exchange: Exchange) -> None:
        exchange.abort()
        self._settle(exchange, Outcome.CLIENT_DISCONNECTED, final=True)

    def _settle(self, exchange: Exchange, outcome: Outcome, *, final: bool) -> None:
        """Take the attempt off its instance, and count it: exactly once."""
        job, placed = self._job, exchange.place
        assert job is not None
        self._exchange = None
        self._last = placed, exchange, outcome
        if exchange.head_sent:
            self._status = exchange.status
        rooms = self._rooms
        rooms.deadlines.exchanges.discard(exchange)
        if isinstance(placed, OutsidePlace):
            rooms.dispatcher.settle_outside(job, placed.label, exchange, outcome, final=final)
        else:
            rooms.dispatcher.settle(job, placed, exchange, outcome, final=final)

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse a request before it was read."""
        self._verdict = "rejected"
        self._rooms.dispatcher.note(None, "rejected")
        self._answer(refusal)

    def _note(self, outcome: str) -> None:
        """Count a request that reached no instance."""
        assert self._job is not None
        self._verdict = outcome
        self._rooms.dispatcher.note(self._job, outcome)

    def _answer(self, refusal: Refusal) -> None:
        if self._continuation is not None:
            self._continuation.broken.break_off(refusal)
            self._end()
            return
        self._status = refusal.status
        inbound, cors = self._inbound, self._rooms.cors
        extra = () if cors is None else cors.headers(inbound.headers)
        answer(self._downstream, refusal, inbound.path, inbound.request_id, extra)
        self._end()

    def _end(self) -> None:
        self.over = True
        self._rooms.open.discard(self)
        rooms = self._rooms
        rooms.metrics.statuses[self._status] += 1
        if self._job is not None and self._job.charge is not None:
            self._job.charge.end()
        if rooms.ended is not None:
            self._report(rooms.ended)
        # An exchange knows its owner: as a cycle, each request would wait for the garbage
        # collector, which stops all others for milliseconds.
        self._last = self._kept = self._continuation = None

    def _report(self, ended: EndedRequests) -> None:
        client, last = self._client, self._last
        failed = last is None or last[1].error is not None
        ended.add(
            Ended(
                self._inbound,
                "" if client is None else client.name,
                self._job,
                last,
                self._verdict,
                self._status,
                len(self._tried) + (not failed),
                self._overhead_s,
                time.monotonic(),
                self._span,
            )
        )

    def broke(self, error: Exception) -> None:
        """The boundary of a request: a bug affects only this one, and is logged and counted."""
        if self.over:
            _log.error(
                "error after the end of request %s",
                self._inbound.request_id.decode(),
                exc_info=error,
            )
            return
        request_id = self._inbound.request_id.decode()
        _log.error("request %s failed inside the gateway", request_id, exc_info=error)
        self._verdict = "internal_error"
        self._rooms.metrics.counts("", "").outcomes["internal_error"] += 1
        try:
            self._give_up()
            failed = Refusal(500, "internal_error", "The gateway failed.", kind="server_error")
            self._answer(failed)
        except Exception:
            _log.exception("request %s cannot be answered", request_id)
            self._end()
            self._downstream.cut()

    def _give_up(self) -> None:
        if self._wait is not None:
            self._wait.leave()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abort()
            self._rooms.deadlines.exchanges.discard(exchange)
            if not isinstance(exchange.place, OutsidePlace):
                self._rooms.dispatcher.withdraw(exchange.place, exchange)
