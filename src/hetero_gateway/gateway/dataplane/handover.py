"""A request whose prompt one instance computes and another answers: its two exchanges.

The scheduler has chosen both (``Placed.leg``). ``Handovers.prefill`` asks the one for the prompt,
and turns its answer into the body for the other; ``HandoverExchange`` relays the other's answer.
``engines/vllm/kv_transfer`` knows what engines tell each other, ``two_legs`` what follows when one
of them fails.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hetero_gateway.core.instances.outcomes import SILENT
from hetero_gateway.core.instances.silence import LEG_S
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm.kv_transfer import (
    CONNECTORS,
    SPLIT_PATHS,
    Beginning,
    Mending,
    NoHandover,
    Transfer,
    beginning_of,
    decode_body,
    may_be_fetched,
    mended_body,
    mended_events,
    mending_of,
    mooncake_engine_ids,
    prefill_body,
    read_answer,
    reason_against,
)
from hetero_gateway.engines.vllm.paths import RESPONSES
from hetero_gateway.files.server_config import PoolConfig
from hetero_gateway.gateway.dataplane.intake import Job, PrefillLeg
from hetero_gateway.gateway.dataplane.prefill_legs import PrefillLegs
from hetero_gateway.gateway.dataplane.records import Recorder
from hetero_gateway.gateway.dataplane.relay import Exchange
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.fleet.probe import ProbeAnswer, asked_of
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.response import ResponseHead
from hetero_gateway.http.upstream import InstancePool

# Longer bodies are not searched for what cannot be split.
_MOST_BODY_BYTES = 1 << 20
# Of a prefill's answer: one token, and the log probabilities of a long prompt if requested.
_MOST_ANSWER_BYTES = 8 << 20
# Of a corrected complete answer; and of a stream's events before it says anything.
_MOST_WHOLE_BYTES = 8 << 20
_MOST_OPENING_BYTES = 1 << 16
# How often silence is checked of the instance that computes a prompt, or is fetched from.
LOOK_S = 0.5
# Time-out of Mooncake's bootstrap servers.
_BOOTSTRAP_POOL = PoolConfig(max_connections=1, max_idle=1)
_BOOTSTRAP_S, _MOST_BOOTSTRAP_BYTES = 2.0, 1 << 20
_NOTHING_LACKS: Final = Mending()


@dataclass(slots=True, eq=False, repr=False)
class HandoverExchange(Exchange):
    """The decode leg: its answer becomes what one instance would have answered.

    Nothing reaches the client until it says something, as a transfer fails after a good head.

    ``leg``: the instance that computes the prompt; ``task``: asks for it; ``handovers``: as
    configured when it began; ``transfer``: if both were asked at once.
    """

    leg: PrefillLeg = field(init=False)
    handovers: Handovers = field(init=False)
    task: asyncio.Task[None] | None = None
    transfer: Transfer | None = None
    mending: Mending = _NOTHING_LACKS
    _opening: ResponseHead | None = None
    _is_whole: bool = False
    _parts: list[bytes] = field(default_factory=list)
    _size_bytes: int = 0

    def on_head(self, head: ResponseHead, *, body_follows: bool) -> bool:
        if head.status != 200 or head.content_length == 0:
            return Exchange.on_head(self, head, body_follows=body_follows)
        self.status, self.active = head.status, True
        self._decode = not self._downstream.passes_framing
        self._is_whole = not head.streams
        self._opening = head
        return True

    def on_data(self, data: bytes) -> None:
        head = self._opening
        if head is None:
            if self.streams and self.status == 200:
                self._pass_events(data)
            else:
                Exchange.on_data(self, data)
            return
        self.active = True
        self._parts.append(data)
        self._size_bytes += len(data)
        if self._is_whole:
            if self._size_bytes > _MOST_WHOLE_BYTES:
                self.fail(InstanceError(Failure.HANDOVER, "its answer is too long to be put right"))
            return
        told = Beginning.BEGUN
        if self._size_bytes <= _MOST_OPENING_BYTES:
            told = beginning_of(self._path, b"".join(self._parts))
        if told is Beginning.FAILED:
            self.fail(InstanceError(Failure.HANDOVER, "its engine did not get the prompt's cache"))
        elif told is Beginning.BEGUN:
            parts, self._opening = self._taken(), None
            # Events are corrected, so the gateway frames them.
            self._rechunk = not self._decode
            self._begin_answer(_framed(head, None))
            self._pass_events(parts)

    def _taken(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    def _pass_events(self, data: bytes) -> None:
        """Pass whole events on; the rest of one waits for its end."""
        self._parts.append(data)
        data = self._taken()
        end = data.rfind(b"\n\n") + 2
        if end < 2:  # none is whole
            end = 0 if len(data) <= _MOST_OPENING_BYTES else len(data)
        if end < len(data):
            self._parts.append(data[end:])
        if end:
            Exchange.on_data(self, mended_events(self._path, data[:end], self.mending))

    def on_complete(self) -> None:
        head, self._opening = self._opening, None
        if head is not None:
            if not self._is_whole or not self._parts:
                self._opening = head
                self.on_error(InstanceError(Failure.HANDOVER, "its answer ended before it began"))
                return
            body = mended_body(self._path, self._taken(), self.mending)
            self.body_bytes = len(body)
            self._begin_answer(_framed(head, len(body)))
            Exchange.on_data(self, body)
        elif self._parts:
            Exchange.on_data(self, self._taken())
        Exchange.on_complete(self)

    def abort(self) -> None:
        if self.task is not None and self.leg.sent_s is None:
            self.task.cancel()
        Exchange.abort(self)

    @property
    def failed_early(self) -> bool:
        """Whether its engine failed before it said anything, as when a transfer fails."""
        error = self.error
        if error is None or self.head_sent:
            return False
        if self.leg.sent_s is None and self.transfer is None:
            return False
        # An engine that opens its stream before fetching breaks it off then.
        broke = error.failure is Failure.RESET and self._path == RESPONSES and bool(self._parts)
        return broke or error.failure in _BY_TRANSFERS


# How a failed transfer looks.
_BY_TRANSFERS = (Failure.SERVER_ERROR, Failure.ENGINE, Failure.EMPTY, Failure.HANDOVER)


def _framed(head: ResponseHead, length_bytes: int | None) -> ResponseHead:
    """The same head, for a body of this length; None: chunks."""
    headers = [pair for pair in head.headers if pair[0] != b"content-length"]
    if length_bytes is not None:
        headers.append((b"content-length", b"%d" % length_bytes))
    return ResponseHead(
        head.status, headers, chunked=length_bytes is None, content_length=length_bytes
    )


@dataclass(slots=True)
class Handovers:
    """How requests are split.

    Args:
        first_byte_s: how long an instance may take to compute a prompt.
        results: outcomes, by a bounded name.
        legs: the scheduler's.
        _recorder: counts failures of instances.
    """

    first_byte_s: float
    results: Counter[str]
    legs: PrefillLegs
    _recorder: Recorder
    # For connectors that ask both at once: the instances' engines, from their bootstrap servers.
    _engines: dict[InstanceId, tuple[Instance, str]] = field(default_factory=dict)

    def splits(self, inbound: Inbound) -> bool:
        """Whether a request can be split at all, by its path and its body."""
        if inbound.path not in SPLIT_PATHS or inbound.buffer is not None:
            return False
        body = inbound.body
        return len(body) <= _MOST_BODY_BYTES and not reason_against(inbound.path, body)

    async def prefill(
        self, inbound: Inbound, exchange: HandoverExchange, request_of: Callable[[bytes], bytes]
    ) -> bytes:
        """Have the prompt computed; returns the body for the decode instance.

        Args:
            request_of: makes the whole request to the prefill instance from its body.

        Raises:
            InstanceError: that instance failed.
            NoHandover: it hands nothing over.
        """
        leg = exchange.leg
        connector = CONNECTORS[leg.transfer.connector]
        transfer = exchange.transfer
        if transfer is None:
            transfer = Transfer(inbound.request_id.decode(), leg.instance.engine_block_tokens)
        body = prefill_body(inbound.path, inbound.body, connector.for_prefill(transfer))
        answer = await self._ask(exchange, request_of(body))
        if answer.status >= 500 or answer.status == 429:
            busy = answer.status in (429, 503)
            failure = Failure.BUSY if busy else Failure.SERVER_ERROR
            raise InstanceError(failure, f"it answered {answer.status} to a prompt")
        if answer.status != 200 or answer.problem:
            # The instance that gets the request whole tells the client what is wrong with it.
            raise NoHandover(answer.problem or f"it answered {answer.status}")
        self._recorder.note_prompt(inbound.body, leg)
        told = read_answer(inbound.path, answer.body)
        parameters = connector.for_decode(transfer, told)
        exchange.mending = mending_of(told)
        return decode_body(inbound.body, parameters)

    def failed(self, job: Job, leg: PrefillLeg, error: InstanceError) -> None:
        """Settle a prefill leg whose instance failed."""
        self.results["prefill_failed"] += 1
        self.forget(leg)
        self.legs.over(leg, error.failure.outcome)
        dispatch, instance = leg.dispatch, leg.instance
        sent_s, expected_s = dispatch.sent_s, dispatch.expected_s
        self._recorder.catch_up()  # earlier answers must count before this failure
        self._recorder.note_error(job, instance, dispatch, error, sent_s, expected_s)

    async def _ask(self, exchange: HandoverExchange, request: bytes) -> ProbeAnswer:
        """Raises InstanceError."""
        instance = exchange.leg.instance
        asking = asyncio.ensure_future(asked_of(instance.pool, request, _MOST_ANSWER_BYTES))
        began_s = time.monotonic()
        try:
            while True:
                await asyncio.wait([asking], timeout=LOOK_S)
                exchange.active = True  # another instance is being waited for
                if asking.done():
                    return asking.result()
                took_s, outcomes = time.monotonic() - began_s, instance.outcomes
                suspected = outcomes.ejected and outcomes.reason == SILENT and took_s >= LEG_S
                if instance.silent or suspected:
                    raise InstanceError(Failure.SILENT, "nothing is heard from it")
                if took_s >= self.first_byte_s:
                    message = f"no prompt computed in {self.first_byte_s:g} s"
                    raise InstanceError(Failure.FIRST_BYTE_TIMEOUT, message)
        finally:
            asking.cancel()

    # Both at once

    def at_once(self, leg: PrefillLeg) -> bool:
        """Whether the decode instance is asked while the prompt is being computed (Mooncake)."""
        return CONNECTORS[leg.transfer.connector].at_once

    async def named(self, inbound: Inbound, exchange: HandoverExchange) -> bytes:
        """The body for the decode instance, and ``exchange.transfer`` for the prompt, which
        follows.

        Raises:
            NoHandover: the prompt's engine is unknown, or the request does not allow it.
        """
        leg = exchange.leg
        if b"prompt_logprobs" in inbound.body:
            raise NoHandover("its prompt's log probabilities may come later than its answer")
        bootstrap = leg.transfer.bootstrap_url or f"http://{_host_of(leg.instance)}:8998"
        try:
            engine_id = await self._engine_of(leg.instance, bootstrap)
        except NoHandover:
            self.legs.refuse(leg, exchange.place.instance.id)  # retried in some minutes
            raise
        # A client may repeat its own id.
        exchange.transfer = Transfer(
            secrets.token_hex(16), bootstrap=bootstrap, engine_id=engine_id
        )
        connector = CONNECTORS[leg.transfer.connector]
        return decode_body(inbound.body, connector.for_decode(exchange.transfer, None))

    def forget(self, leg: PrefillLeg) -> None:
        """Ask for its engine again: it may have changed."""
        self._engines.pop(leg.instance.id, None)

    async def _engine_of(self, instance: Instance, bootstrap: str) -> str:
        """Raises NoHandover."""
        known = self._engines.get(instance.id)
        if known is not None and known[0] is instance:
            return known[1]
        pool = InstancePool(bootstrap, _BOOTSTRAP_POOL, _BOOTSTRAP_S)
        pool.allows_link_local = instance.pool.allows_link_local
        request = b"GET /query HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n\r\n"
        try:
            async with asyncio.timeout(_BOOTSTRAP_S):
                answer = await asked_of(pool, request % pool.host_header, _MOST_BOOTSTRAP_BYTES)
        except (InstanceError, TimeoutError) as error:
            why = str(error) or f"no answer within {_BOOTSTRAP_S:g} s"
            raise NoHandover(f"its bootstrap server {bootstrap}: {why}") from None
        finally:
            pool.close()
        engines = mooncake_engine_ids(answer.body) if answer.good else {}
        if len(engines) != 1:
            # With several ranks, the engine would need to know which of them computes the prompt.
            raise NoHandover(f"its bootstrap server {bootstrap} names {len(engines)} engines")
        (engine_id,) = engines.values()
        self._engines[instance.id] = instance, engine_id
        return engine_id


def _host_of(instance: Instance) -> str:
    host = instance.pool.host
    return f"[{host}]" if ":" in host else host


def is_fresh(leg: PrefillLeg, prefilled_s: float) -> bool:
    """Whether the computed KV is still pinned, long enough to ask for it."""
    return may_be_fetched(time.monotonic() - prefilled_s, leg.transfer.lease_s)
