"""Ended requests, for those that report each of them: the access log and traces.

Noted one by one and passed on in groups, so that reporting a request delays no other one. Without a
report, none of this runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from hetero_gateway.core.types import Outcome, Usage
from hetero_gateway.engines.vllm import tokens_of_events
from hetero_gateway.gateway.dataplane.dispatcher import Place
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.observed import ObservedResponse
from hetero_gateway.gateway.dataplane.records import LATER_S, label_of
from hetero_gateway.gateway.dataplane.routes import OutsidePlace
from hetero_gateway.http.heads import Inbound

_log = logging.getLogger(__name__)

_MOST_LATER = 64
_NOTHING = Usage(None, None, None)


class Ended(NamedTuple):
    """One request that has ended.

    Args:
        client: the name of its key; "" without one.
        job: None: it was not read.
        last: its last attempt: place, response and outcome; None: it had none.
        verdict: its outcome if no attempt has one.
        status: that the client got; 499: it left before an answer.
        attempts: number of attempts.
        overhead_s: from its last byte in to sending it on, less its wait; None: it was not sent.
        ended_s: monotonic.
        span: the trace's, if it is traced.
    """

    inbound: Inbound
    client: str
    job: Job | None
    last: tuple[Place | OutsidePlace, ObservedResponse, Outcome] | None
    verdict: str
    status: int
    attempts: int
    overhead_s: float | None
    ended_s: float
    span: Any = None

    @property
    def outcome(self) -> str:
        """As counted in ``hetero_gateway_requests_total``."""
        if self.verdict or self.last is None:
            return self.verdict or Outcome.CLIENT_DISCONNECTED.value
        _, seen, outcome = self.last
        return label_of(outcome, seen)

    @property
    def reason(self) -> str:
        """Why the last attempt failed; "" if it did not."""
        error = None if self.last is None else self.last[1].error
        return "" if error is None else error.reason

    @property
    def waited_s(self) -> float:
        """In the queue, before the last attempt; or until it was turned away."""
        if self.last is not None:
            return self.last[0].waited_s
        return self.duration_s if self.job is not None else 0.0

    @property
    def duration_s(self) -> float:
        """From its last byte in; 0 if that never came."""
        received_s = self.inbound.received_s
        return self.ended_s - received_s if received_s else 0.0

    @property
    def ttft_s(self) -> float | None:
        """To the first byte of the answer's body."""
        first_s = None if self.last is None else self.last[1].first_body_at_s
        return None if first_s is None else first_s - self.inbound.received_s

    def usage(self) -> Usage:
        """Tokens as the engine reported them, or as its events count."""
        if self.last is None or self.status >= 400:
            return _NOTHING
        seen = self.last[1]
        usage = seen.usage()
        if usage.output_tokens is None and seen.events:
            counted = tokens_of_events(self.inbound.path, seen.events)
            return usage._replace(output_tokens=counted)
        return usage


class Tracing(Protocol):
    """Makes a span for each request; see ``tracing``, which is not imported unless used."""

    def begin(self, inbound: Inbound) -> Any: ...

    def parent_header(self, span: Any) -> bytes: ...

    def __call__(self, requests: Sequence[Ended]) -> None: ...

    def close(self) -> None: ...


Take: TypeAlias = Callable[[Sequence[Ended]], None]


class EndedRequests:
    """Passes ended requests on to those that report them. Needs a running event loop.

    Args:
        takers: each is called with several of them at a time.
    """

    def __init__(self, takers: Sequence[Take]) -> None:
        self._takers = takers
        self._loop = asyncio.get_running_loop()
        self._later: list[Ended] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, ended: Ended) -> None:
        """Add an ended request."""
        later = self._later
        later.append(ended)
        if len(later) >= _MOST_LATER:
            self.pass_on()
        elif self._timer is None:
            self._timer = self._loop.call_later(LATER_S, self.pass_on)

    def pass_on(self) -> None:
        """Pass on what there is now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        later, self._later = self._later, []
        for take in self._takers:
            try:
                take(later)
            except Exception:
                # The boundary of reporting: no request fails because of it.
                _log.exception("%d finished requests cannot be logged", len(later))
