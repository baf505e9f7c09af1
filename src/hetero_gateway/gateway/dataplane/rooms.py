"""The services that every request uses on its way."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetero_gateway.engines.vllm import names_an_address
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.dataplane.continuing import Continuations
from hetero_gateway.gateway.dataplane.dispatcher import Dispatcher
from hetero_gateway.gateway.dataplane.ended import EndedRequests, Tracing
from hetero_gateway.gateway.dataplane.handover import Handovers
from hetero_gateway.gateway.dataplane.intake import Intake
from hetero_gateway.gateway.dataplane.priorities import Priorities
from hetero_gateway.gateway.dataplane.reading import LongBodies
from hetero_gateway.gateway.dataplane.relay import Deadlines
from hetero_gateway.gateway.dataplane.retry_budget import RetryBudget
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.http.cors import Cors
from hetero_gateway.http.headers import RequestFields
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.hops import Hops

# It goes into logs, headers and the dashboard: visible ASCII only.
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class OpenRequest(Protocol):
    """A request that has not ended."""

    def conclude(self) -> None:
        """Settle its present attempt, and decide what comes next."""

    def shut_down(self) -> None:
        """The gateway is shutting down, and this request did not finish in the time allowed."""


class AnsweredRequests:
    """Requests with complete answers, until they are settled in the next turn.

    uvloop sends what its callbacks have written after the last of them: counting and learning from
    an answer would delay it. Needs a running event loop.
    """

    __slots__ = ("_loop", "requests")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.requests: list[OpenRequest] = []

    def conclude_soon(self) -> None:
        """Called for the first one of them."""
        self._loop.call_soon(self._conclude)

    def _conclude(self) -> None:
        requests, self.requests = self.requests, []
        for request in requests:
            request.conclude()


class RequestIds:
    """Request ids that are unique over all processes."""

    __slots__ = ("numbers", "prefix")

    def __init__(self) -> None:
        self.prefix = os.urandom(6).hex().encode()
        self.numbers = itertools.count()

    def name(self, inbound: Inbound) -> None:
        """Give a request its id: the client's own if it is fit for a log, or a new one."""
        asked_id = inbound.asked_id
        if asked_id and _REQUEST_ID.fullmatch(asked_id) and not names_an_address(asked_id):
            inbound.request_id = asked_id
        else:
            inbound.request_id = b"%b-%x" % (self.prefix, next(self.numbers))


@dataclass(slots=True)
class Rooms:
    """The services that every request uses.

    ``open``: the open requests; ``ended``: notified when a request ends, and ``tracing`` makes
    spans; ``None`` if nothing subscribes. ``fields``: the request headers that are passed on.
    ``priorities``: engines' priorities; None: none. ``continuations``: of broken streams; None:
    none. ``handovers``: of split requests; None: none.
    """

    hops: Hops
    admission: Admission
    intake: Intake
    dispatcher: Dispatcher[Any, Any]
    deadlines: Deadlines
    metrics: Metrics
    budget: RetryBudget
    total_timeout_s: float
    connect_timeout_s: float
    open: set[OpenRequest]
    reading: LongBodies
    answered: AnsweredRequests
    ids: RequestIds = field(default_factory=RequestIds)
    ended: EndedRequests | None = None
    cors: Cors | None = None
    tracing: Tracing | None = None
    fields: RequestFields = field(default_factory=RequestFields)
    priorities: Priorities | None = None
    continuations: Continuations | None = None
    handovers: Handovers | None = None
