"""Requests that wait in the gateway for an instance: a queue per model, behind one Protocol.

Models do not block each other. A ticket can leave from the middle (its client went away), which
costs as much as from the head. Who is next is the discipline's business; the sums and means that a
policy wants to know are kept beside it, by ``ModelQueue``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Protocol

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.scheduling.pool import Eligible
from hetero_gateway.core.types import InstanceId, Reject, Request

# What is typical of a model's requests changes over minutes, not from one to the next.
_MEAN_OVER_REQUESTS = 1000
# A burst must be known for one while it lasts.
_MEAN_OVER_GAPS = 16


class Ticket:
    """One request waiting for an instance, or placed on one. Changed by the scheduler alone.

    ``exclude``: instances it was tried on. ``owner``: whatever the shell wants to find again.
    ``eligible``: who may get it, as judged in its model's present pool. When it leaves the queue
    by being placed or refused, it has either ``decision`` and ``dispatch``, or ``rejected``, or
    ``failed``: what its placement met, a bug that is nobody else's.
    """

    __slots__ = (
        "decision",
        "dispatch",
        "eligible",
        "enqueued_s",
        "exclude",
        "failed",
        "owner",
        "rejected",
        "request",
    )

    def __init__(
        self,
        request: Request,
        enqueued_s: float,
        exclude: Collection[InstanceId],
        owner: Any,
        eligible: Eligible,
    ) -> None:
        self.request = request
        self.enqueued_s = enqueued_s
        self.exclude = exclude
        self.owner = owner
        self.eligible = eligible
        self.decision: Decision | None = None
        self.dispatch: Dispatch | None = None
        self.rejected: Reject | None = None
        self.failed: Exception | None = None

    @property
    def waits(self) -> bool:
        """Nothing has become of it yet."""
        return self.dispatch is None and self.rejected is None and self.failed is None

    def __repr__(self) -> str:
        if self.rejected is not None:
            state = f"rejected: {self.rejected.reason.value}"
        elif self.failed is not None:
            state = f"failed: {self.failed!r}"
        else:
            state = "waiting" if self.dispatch is None else f"placed: {self.dispatch!r}"
        return f"<Ticket {self.request.model} since {self.enqueued_s:.3f} s, {state}>"


class QueueDiscipline(Protocol):
    """Who is next among those that wait for one model."""

    def __len__(self) -> int: ...

    def head(self) -> Ticket:
        """The one whose turn it is; there must be one."""
        ...

    def put(self, ticket: Ticket, *, first: bool) -> None:
        """Add one; ``first``: it has waited before (a retry) and goes ahead of the others."""
        ...

    def drop(self, ticket: Ticket) -> bool:
        """Take one out, wherever it stands; False when it is not there."""
        ...


class Fifo:
    """First in, first out."""

    __slots__ = ("_tickets",)

    def __init__(self) -> None:
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def head(self) -> Ticket:
        return next(iter(self._tickets))

    def put(self, ticket: Ticket, *, first: bool) -> None:
        self._tickets[ticket] = None
        if first:
            self._tickets.move_to_end(ticket, last=False)

    def drop(self, ticket: Ticket) -> bool:
        if ticket not in self._tickets:
            return False
        del self._tickets[ticket]
        return True


class ModelQueue:
    """What waits for one model: the sums of its lengths (tokens), its last arrival, and the means.

    ``mean_prompt_tokens``, ``mean_output_tokens`` (predicted) and ``mean_gap_s`` are of what
    arrived lately.
    """

    __slots__ = (
        "_tickets",
        "arrivals",
        "last_arrival_s",
        "mean_gap_s",
        "mean_output_tokens",
        "mean_prompt_tokens",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self, discipline: QueueDiscipline) -> None:
        self._tickets = discipline
        self.prompt_tokens = 0
        self.output_tokens = 0.0
        self.last_arrival_s = 0.0
        self.arrivals = 0
        self.mean_gap_s = 0.0
        self.mean_prompt_tokens = 0.0
        self.mean_output_tokens = 0.0

    def __len__(self) -> int:
        return len(self._tickets)

    def __repr__(self) -> str:
        return f"<ModelQueue of {len(self)}, mean gap {self.mean_gap_s:.3g} s>"

    def head(self) -> Ticket:
        """The one whose turn it is; there must be one."""
        return self._tickets.head()

    def put(self, ticket: Ticket, *, first: bool) -> None:
        """Add a request that arrived, or, ``first``, one that has waited before (a retry)."""
        self._tickets.put(ticket, first=first)
        if not first:
            self._note_arrival(ticket)
        self.prompt_tokens += ticket.request.prompt_tokens
        self.output_tokens += ticket.request.predicted_output_tokens

    def _note_arrival(self, ticket: Ticket) -> None:
        if self.arrivals:
            gap_s = ticket.enqueued_s - self.last_arrival_s
            self.mean_gap_s += (gap_s - self.mean_gap_s) / _MEAN_OVER_GAPS
        self.last_arrival_s = ticket.enqueued_s
        self.arrivals += 1
        request, share = ticket.request, 1 / min(self.arrivals, _MEAN_OVER_REQUESTS)
        self.mean_prompt_tokens += share * (request.prompt_tokens - self.mean_prompt_tokens)
        self.mean_output_tokens += share * (
            request.predicted_output_tokens - self.mean_output_tokens
        )

    def drop(self, ticket: Ticket) -> bool:
        """Take one out, wherever it stands; False when it is not there."""
        if not self._tickets.drop(ticket):
            return False
        if self._tickets:
            self.prompt_tokens -= ticket.request.prompt_tokens
            self.output_tokens -= ticket.request.predicted_output_tokens
        else:
            self.prompt_tokens, self.output_tokens = 0, 0.0
        return True
