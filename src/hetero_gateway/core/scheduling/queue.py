"""Requests that wait in the gateway for an instance: first in, first out, one queue per model.

Models do not block each other. A ticket can leave from the middle (its client went away), which
costs as much as from the head. The sums that a policy wants to know are kept beside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from hetero_gateway.core.instances.ledger import Dispatch
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.types import InstanceId, Reject, Request

# What is typical of a model's requests changes over minutes, not from one to the next.
_MEAN_OVER_REQUESTS = 1000
# A burst must be known for one while it lasts.
_MEAN_OVER_GAPS = 16


class Ticket:
    """One request waiting for an instance, or placed on one. Changed by the scheduler alone.

    ``exclude``: instances it was tried on. ``owner``: whatever the shell wants to find again.
    When it leaves the queue by ``pump``, it has either ``decision`` and ``dispatch``, or
    ``rejected``.
    """

    __slots__ = ("decision", "dispatch", "enqueued_s", "exclude", "owner", "rejected", "request")

    def __init__(
        self, request: Request, enqueued_s: float, exclude: Collection[InstanceId], owner: Any
    ) -> None:
        self.request = request
        self.enqueued_s = enqueued_s
        self.exclude = exclude
        self.owner = owner
        self.decision: Decision | None = None
        self.dispatch: Dispatch | None = None
        self.rejected: Reject | None = None


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

    def __init__(self) -> None:
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.prompt_tokens = 0
        self.output_tokens = 0.0
        self.last_arrival_s = 0.0
        self.arrivals = 0
        self.mean_gap_s = 0.0
        self.mean_prompt_tokens = 0.0
        self.mean_output_tokens = 0.0

    def __len__(self) -> int:
        return len(self._tickets)

    def head(self) -> Ticket:
        """The one whose turn it is; there must be one."""
        return next(iter(self._tickets))

    def put(self, ticket: Ticket, *, first: bool) -> None:
        """Add at the end, or, ``first``, at the head (a retry has waited before)."""
        self._tickets[ticket] = None
        if first:
            self._tickets.move_to_end(ticket, last=False)
        else:
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
        if ticket not in self._tickets:
            return False
        del self._tickets[ticket]
        if self._tickets:
            self.prompt_tokens -= ticket.request.prompt_tokens
            self.output_tokens -= ticket.request.predicted_output_tokens
        else:
            self.prompt_tokens, self.output_tokens = 0, 0.0
        return True
