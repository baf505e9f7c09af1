"""A split request: one instance computes its prompt, then another one answers.

What the second one relays is the request's exchange from the start, so that its time-outs, its end
and its client's are those of any other. A split request that fails goes whole from then on. A
request that is not split runs none of this.

    prefill instance fails      its failure; the request goes whole to another instance, also if
                                it falls silent before its cache was fetched
    it hands nothing over       the request goes whole to any instance, which is no retry
    it was too long ago         the same: its blocks may be another prompt's by now
    decode instance fails       before it says anything: the pair is not used for some minutes,
                                and the request goes whole, as a retry; later: as any stream
    the client leaves           both connections are closed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm.kv_transfer import NoHandover
from hetero_gateway.gateway.dataplane.answers import refusal_of
from hetero_gateway.gateway.dataplane.further_attempts import FurtherAttempts
from hetero_gateway.gateway.dataplane.handover import LOOK_S, HandoverExchange, is_fresh
from hetero_gateway.gateway.dataplane.intake import Placed
from hetero_gateway.gateway.dataplane.relay import Exchange
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.upstream import UpstreamConnection

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class TwoLegs(FurtherAttempts):
    """The base of its driver, ``Attempts``."""

    # The instance that could not fetch a prompt's cache, and the other, until one is asked again.
    _unfetched: tuple[InstanceId, InstanceId] | None = None

    # Implemented by its driver

    def _request_to(self, instance: Instance, body: bytes) -> tuple[bytes, bytes]:
        """The head and the body of a request to an instance."""
        raise NotImplementedError

    def _launch(self, exchange: Exchange, connection: UpstreamConnection, *, first: bool) -> None:
        """Send it over this connection."""
        raise NotImplementedError

    # Two legs

    def _begin_legs(self, exchange: HandoverExchange) -> None:
        place = exchange.place
        assert isinstance(place, Placed)
        assert place.leg is not None
        handovers = self._rooms.handovers
        assert handovers is not None
        exchange.leg, exchange.handovers = place.leg, handovers
        self._start(self._hand_over(exchange))
        exchange.task = self._task

    async def _hand_over(self, exchange: HandoverExchange) -> None:
        """Have the prompt computed, and the other instance asked for the answer."""
        leg, handovers = exchange.leg, exchange.handovers

        def request_of(body: bytes) -> bytes:
            head, body = self._request_to(leg.instance, body)
            return head + body

        if handovers.at_once(leg):
            await self._ask_both(exchange, request_of)
            return
        try:
            body = await handovers.prefill(self._inbound, exchange, request_of)
        except InstanceError as error:
            if self._exchange is exchange:
                self._go_on_without(exchange, error)
            return
        except NoHandover as reason:
            if self._exchange is exchange:
                self._go_whole(exchange, str(reason))
            return
        if self._exchange is not exchange:
            return
        handovers.legs.prefilled(leg)
        prefilled_s = time.monotonic()
        connection = await self._connected(exchange)
        if connection is None:
            return
        if not is_fresh(leg, prefilled_s):
            exchange.place.instance.pool.release(connection)
            self._go_whole(exchange, "its lease is nearly over")
            return
        place = exchange.place
        assert isinstance(place, Placed)
        handovers.legs.asked(leg, place)
        self._ask_for_answer(exchange, connection, body)
        await self._see_fetched(exchange)

    async def _ask_both(
        self, exchange: HandoverExchange, request_of: Callable[[bytes], bytes]
    ) -> None:
        """Have the prompt computed, and meanwhile ask the other instance, which waits for it."""
        leg, handovers = exchange.leg, exchange.handovers
        try:
            body = await handovers.named(self._inbound, exchange)
        except NoHandover as reason:
            if self._exchange is exchange:
                self._go_whole(exchange, str(reason))
            return
        if self._exchange is not exchange:
            return
        prompt = asyncio.ensure_future(handovers.prefill(self._inbound, exchange, request_of))
        try:
            connection = await self._connected(exchange)
            if connection is None:
                return
            self._ask_for_answer(exchange, connection, body)
            try:
                await prompt
            except (InstanceError, NoHandover) as error:
                # The decode instance would wait for minutes. What it has said already is known
                # otherwise.
                if self._exchange is exchange and not exchange.head_sent:
                    Exchange.abort(exchange)
                    self._other_body = b""
                    if isinstance(error, InstanceError):
                        self._go_on_without(exchange, error)
                    else:
                        self._go_whole(exchange, str(error))
                return
            handovers.legs.prefilled(leg)
            place = exchange.place
            assert isinstance(place, Placed)
            handovers.legs.asked(leg, place)
            await self._see_fetched(exchange)
        finally:
            prompt.cancel()
            with contextlib.suppress(asyncio.CancelledError, InstanceError, NoHandover):
                await prompt

    async def _connected(self, exchange: HandoverExchange) -> UpstreamConnection | None:
        """Connect to the decode instance; None: that failed, or the request has moved on."""
        pool = exchange.place.instance.pool
        try:
            connection = pool.take_idle() or await pool.connect()
        except InstanceError as error:
            if self._exchange is exchange:
                exchange.on_error(error)
            return None
        if self._exchange is not exchange:
            pool.release(connection)
            return None
        return connection

    def _ask_for_answer(
        self, exchange: HandoverExchange, connection: UpstreamConnection, body: bytes
    ) -> None:
        self._other_body, exchange.active = body, True
        exchange.handovers.results["handed_over"] += 1
        self._launch(exchange, connection, first=not self._tried)

    async def _see_fetched(self, exchange: HandoverExchange) -> None:
        """The decode instance was asked, and the prompt is computed: check that the prefill
        instance is there until it was fetched. An engine that fetches from a stopped one waits for
        ever.
        """
        instance, place, legs = exchange.leg.instance, exchange.place, exchange.handovers.legs
        assert isinstance(place, Placed)
        assert self._job is not None
        streams = self._job.parsed.stream
        if not streams and self._exchange is exchange:
            legs.fetched_unseen(place)  # its first token cannot be seen
        by_s = time.monotonic() + legs.late_s(place)
        while True:
            await asyncio.sleep(LOOK_S)
            if self._exchange is not exchange or exchange.head_sent:
                return
            if instance.silent or not instance.up:
                error = InstanceError(Failure.SILENT, "nothing is heard from it, nor fetched")
                exchange.abort()
                self._go_on_without(exchange, error)
                return
            if not streams and instance.outcomes.seen_alive_s >= by_s:
                return  # a complete answer does not show when it began

    def _go_on_without(self, exchange: HandoverExchange, error: InstanceError) -> None:
        """The prefill instance failed: the request goes whole, if it may be retried."""
        leg, job, place = exchange.leg, self._job, exchange.place
        assert job is not None
        assert isinstance(place, Placed)
        exchange.handovers.failed(job, leg, error)
        self._tried.append(leg.instance.id)
        # If another one dies under it, this was the first.
        exchange.error = error
        there = Placed(leg.instance, place.decision, leg.dispatch, place.placed_s, place.waited_s)
        self._last = there, exchange, error.failure.outcome
        may = self._may_retry(error)
        self._leave_legs(exchange)
        if may:
            self._failure = error
            self._place()
        else:
            self._note("unavailable")
            self._answer(refusal_of(error, leg.instance, spent=len(self._tried) > 1))

    def _go_whole(self, exchange: HandoverExchange, reason: str) -> None:
        """Nothing is handed over, which is no failure."""
        leg = exchange.leg
        exchange.handovers.results["no_handover"] += 1
        _log.info(
            "request %s: no hand-over from %s: %s",
            self._inbound.request_id.decode(), leg.instance.id, reason,
        )  # fmt: skip
        self._leave_legs(exchange)
        self._place()

    def _leave_legs(self, exchange: HandoverExchange) -> None:
        """Take both legs off, of which none has failed; the request is whole from now on."""
        rooms, job = self._rooms, self._job
        assert job is not None
        self._exchange, self._other_body = None, b""
        rooms.deadlines.exchanges.discard(exchange)
        rooms.dispatcher.withdraw(exchange.place, None)
        job.request = job.request.replace(whole=True)

    def _after_legs(self, exchange: Exchange, error: InstanceError) -> InstanceError:
        """The failure of a split request: of its transfer, if nothing was delivered yet."""
        if not isinstance(exchange, HandoverExchange):
            return error
        job, leg, handovers = self._job, exchange.leg, exchange.handovers
        assert job is not None
        job.request = job.request.replace(whole=True)
        self._other_body = b""
        if exchange.failed_early:
            handovers.results["decode_failed"] += 1
            handovers.legs.refuse(leg, exchange.place.instance.id)
            handovers.forget(leg)
            _log.warning(
                "%s could not hand over to %s: this pair is not used for some minutes",
                leg.instance.id, exchange.place.instance.id,
            )  # fmt: skip
            self._unfetched = exchange.place.instance.id, leg.instance.id
            why = f"it did not get what {leg.instance.id} computed: {error}"
            error = exchange.error = InstanceError(Failure.HANDOVER, why)
        return error

    def _is_answered_alone(self) -> bool:
        """No other is left: whether the instance that could not fetch a prompt may compute it, too.

        It was not at fault; most likely the other one has gone.
        """
        if self._unfetched is None:
            return False
        (decode, prefill), self._unfetched = self._unfetched, None
        if decode not in self._tried:
            return False
        self._tried[self._tried.index(decode)] = prefill
        return True
