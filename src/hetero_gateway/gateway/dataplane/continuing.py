"""Continues a stream that broke off on another instance; the client sees one stream.

An ``Exchange`` that may be continued keeps what it has passed on, as references to reads
(``Exchange.kept``). When its instance breaks off, these are parsed for the first time, which yields
the delivered text and the request for the rest (``engines/vllm/continuations``). That is placed and
sent like any attempt, as a further leg of the request, and its answer is passed on in whole events.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetero_gateway.engines.vllm.continuations import (
    CONTINUED_PATHS,
    Fidelity,
    NotContinuable,
    Splice,
    Told,
    continuing_body,
    counted_tokens,
    counting_body,
    told_by,
)
from hetero_gateway.engines.vllm.paths import TOKENIZE
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.dataplane.relay import TAIL_BYTES, Exchange, HeldAnswer
from hetero_gateway.gateway.dataplane.retry_budget import RetryBudget
from hetero_gateway.gateway.fleet.probe import Probe
from hetero_gateway.http.chunks import ChunkDecoder
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.heads import Inbound

if TYPE_CHECKING:
    from hetero_gateway.errors import Refusal
    from hetero_gateway.gateway.fleet.instances import Instance
    from hetero_gateway.http.hops import Hops
    from hetero_gateway.http.response import ResponseHead

_log = logging.getLogger(__name__)

# Failures after which a stream may continue; the total time-out is not one.
_BREAKS = frozenset(
    (Failure.RESET, Failure.PROTOCOL, Failure.IDLE_TIMEOUT, Failure.ENGINE, Failure.SILENT,
     Failure.MOVED)
)  # fmt: skip
# A prompt under which two instances broke off is not given to a third, unless the second one had
# delivered this many tokens: what kills engines does so at once.
_MOST_BREAKS = 2
_PROGRESS_TOKENS = 8
# Counting a text takes an engine milliseconds; its answer lists the tokens.
_COUNTING_S = 2.0
_MOST_COUNT_BYTES = 1 << 22


@dataclass(slots=True, eq=False)
class Continuation:
    """A broken stream until it is continued to its end or ended.

    ``body``: asks for the rest; ``told``: delivered to the client so far, in ``events``;
    ``breaks``: how often it broke off since it last made progress; ``broken``: the first exchange,
    whose head the client has.
    """

    _inbound: Inbound
    _fidelity: Fidelity
    told: Told
    events: int
    breaks: int
    broken: Exchange
    body: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Raises NotContinuable."""
        inbound = self._inbound
        self.body = continuing_body(inbound.path, inbound.body, self.told, self._fidelity)

    async def count_on(self, instance: Instance, hops: Hops) -> None:
        """Let that engine count the delivered text, unless its ids are known. Raises
        NotContinuable."""
        told, body = self.told, self._inbound.body
        if not told.text or told.token_ids is not None:
            return
        probe = Probe(instance, _COUNTING_S, hops)
        try:
            asked = counting_body(body, told.text), b"application/json"
            answer = await probe.ask(b"POST", TOKENIZE.encode(), _MOST_COUNT_BYTES, *asked)
        except InstanceError:
            return  # then the events are counted
        finally:
            probe.close()
        tokens = counted_tokens(answer.body, told.text) if answer.good else None
        if tokens is not None and tokens != told.tokens:
            self.told = told._replace(tokens=tokens)
            self.__post_init__()


@dataclass(slots=True)
class Continuations:
    """Decides which streams are continued.

    Args:
        fidelity: which kinds are.
        most_kept_bytes: kept of one stream for this.
        _budget: of retries, which bounds continuations as well.
        _open: the open requests.
        _results: outcomes of broken streams, by a bounded name.
    """

    fidelity: Fidelity
    most_kept_bytes: int
    _budget: RetryBudget
    _open: Collection[object]
    _results: Counter[str]

    def after(
        self,
        exchange: Exchange,
        error: InstanceError,
        inbound: Inbound,
        before: Continuation | None,
    ) -> Continuation | None:
        """The continuation of a broken stream; None: it ends.

        Args:
            before: its last continuation; None: this is the first break.
        """
        if error.failure not in _BREAKS:
            return None
        try:
            result = self._of(exchange, inbound, before)
        except NotContinuable as reason:
            self._results["not_continuable"] += 1
            _log.info("request %s cannot be continued: %s", inbound.request_id.decode(), reason)
            return None
        if not self._budget.may_continue(len(self._open)):
            self._results["no_budget"] += 1
            return None
        self._results["continued"] += 1
        _log.warning(
            "request %s: its answer from %s broke off: %s; another instance continues it",
            inbound.request_id.decode(),
            exchange.place.instance.id,
            error,
        )
        return result

    def can_follow(self, exchange: Exchange, inbound: Inbound, before: Continuation | None) -> bool:
        """Whether an unbroken stream could be continued elsewhere if it broke now.

        Asked repeatedly; nothing is read again once it never can.
        """
        if exchange.stays or not self._budget.may_continue(len(self._open), counts=False):
            return False
        try:
            self._of(exchange, inbound, before)
        except NotContinuable as reason:
            exchange.stays = not reason.for_now
            return False
        return True

    def _of(
        self, exchange: Exchange, inbound: Inbound, before: Continuation | None
    ) -> Continuation:
        """Raises NotContinuable."""
        path, breaks = inbound.path, 1
        if isinstance(exchange, ContinuedExchange):
            assert before is not None
            told, broken = exchange.splice.told, before.broken
            if not got_on(exchange, before):
                breaks += before.breaks
            if breaks >= _MOST_BREAKS:
                raise NotContinuable("two instances broke off under it", for_now=True)
        else:
            told, broken = told_by(path, _events_of(exchange)), exchange
        return Continuation(inbound, self.fidelity, told, exchange.events, breaks, broken)


def continuations_of(
    config: GatewayConfig,
    budget: RetryBudget,
    open_requests: Collection[object],
    results: Counter[str],
) -> Continuations | None:
    """As configured; None: no stream is continued."""
    fidelity, most_bytes = Fidelity(config.scheduler.continue_streams), config.server.max_kept_bytes
    if fidelity is Fidelity.OFF or not most_bytes:
        return None
    return Continuations(fidelity, most_bytes, budget, open_requests, results)


def may_continue(inbound: Inbound) -> bool:
    """Whether to keep an answer for it: only of requests that are themselves kept."""
    return inbound.path in CONTINUED_PATHS and inbound.buffer is None


def _events_of(exchange: Exchange) -> bytes:
    """Everything passed on, without framing. Raises NotContinuable."""
    kept = None if exchange.kept is None else exchange.kept.body()
    if kept is None:
        raise NotContinuable("it was too long to be kept")
    if not exchange.passes_framing:
        return kept
    connection = exchange.connection
    if connection is None or not connection.passed_whole_chunks:
        raise NotContinuable("it broke off within a chunk", for_now=True)
    decoder, parts = ChunkDecoder(), []
    while kept:
        body, rest = decoder.feed(kept)
        parts.append(body)
        if len(rest) == len(kept):
            break  # the last chunk
        kept = rest
    return b"".join(parts)


@dataclass(slots=True, eq=False, repr=False)
class ContinuedExchange(Exchange):
    """A leg that continues a stream: its events become that stream's, in the gateway's chunks.

    For counting, it is the whole stream: ``events``, ``usage`` and ``first_body_at_s`` are those of
    all legs so far. ``head_sent``: something of this leg has reached the client.
    """

    splice: Splice = field(init=False)
    _broken: Exchange = field(init=False)

    def follow(self, continuation: Continuation) -> None:
        """Continue from there."""
        self.splice = Splice(self._path, continuation.told)
        self._broken = continuation.broken
        self.events = continuation.events
        self.first_body_at_s = continuation.broken.first_body_at_s

    def on_head(self, head: ResponseHead, *, body_follows: bool) -> bool:
        self.status = head.status
        self.active = True
        if head.status == 200 and head.streams:
            self.streams = True
        else:
            self.held = HeldAnswer(head)
        return True

    def on_data(self, data: bytes) -> None:
        self.active = True
        if self.held is not None:
            self.held.parts[:] = [data[:TAIL_BYTES]]  # the client gets none of it
            return
        try:
            data = self.splice.feed(data)
        except NotContinuable as error:
            self.fail(InstanceError(Failure.ENGINE, str(error)))
            return
        if not data:
            return
        if not self.head_sent:
            self.head_sent = True
            if self.first_body_at_s is None:
                self.first_body_at_s = time.monotonic()
            self.owner.stream_began(self)
            # A comment in the sense of server-sent events: the head was sent long ago.
            data = b": continued by %b\n\n%b" % (self.place.instance.id.encode(), data)
        self.events += data.count(b"data: ")
        self._tail.append(data[-TAIL_BYTES:])
        self.write_on(data)
        if self._flow.write_paused and not self.congested:
            self._hold_up()

    def on_complete(self) -> None:
        if self.held is not None:
            refused = f"it answered {self.status} to the rest of a stream"
            self.on_error(self.held.error() or InstanceError(Failure.NOT_CONTINUED, refused))
        elif not self.splice.done:
            self.on_error(InstanceError(Failure.RESET, "its answer ended early"))
        else:
            self.complete = True
            self.body_bytes = sum(map(len, self._last_reads()))
            self.write_on(b"", last=True)
            self.owner.ended(self)

    @property
    def at_event(self) -> bool:
        return True  # whole ones have been passed on

    def write_on(self, data: bytes, *, last: bool = False) -> None:
        self._broken.write_on(data, last=last)

    def break_off(self, error: Refusal) -> None:
        self._broken.break_off(error)


def got_on(exchange: Exchange, before: Continuation | None) -> bool:
    """Whether it made so much progress that its prompt is not what broke it off."""
    if isinstance(exchange, ContinuedExchange):
        assert before is not None
        return exchange.splice.told.tokens - before.told.tokens >= _PROGRESS_TOKENS
    return exchange.events >= _PROGRESS_TOKENS
