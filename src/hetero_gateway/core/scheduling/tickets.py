"""A request on its way through the scheduler: waiting, placed or refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.scheduling.pool import Eligible
from hetero_gateway.core.types import InstanceId, Reject, Request

# When it is one's turn: the lower, the sooner; whole numbers of arrival decide among equals.
Turn = tuple[float, float, int]
# Which instances can take a ticket (positions in its pool; None: all), whether it is a crowd, and
# the row that its discipline wants it in. None: all can, it is none, and there is one row.
LineName = tuple[tuple[int, ...] | None, bool, str] | None


class Ticket:
    """One request waiting for an instance, or placed on one. Changed by the scheduler alone.

    ``waits``: nothing has become of it yet. ``exclude``: instances it was tried on. ``owner``:
    whatever the shell wants to find again.
    ``eligible``: who may get it, as judged in its model's present pool; ``line``: where it stands,
    ``rank``: since when, ``first``: as a retry, in front of who came after it. When it leaves
    the queue by being placed or refused, it has either ``decision`` and ``dispatch``, or
    ``rejected``, or ``failed``: what its placement met, a bug that is nobody else's.
    """

    __slots__ = (
        "decision",
        "dispatch",
        "eligible",
        "enqueued_s",
        "exclude",
        "failed",
        "first",
        "line",
        "owner",
        "rank",
        "rejected",
        "request",
        "waits",
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
        self.line: LineName = None
        self.rank: Turn = (0.0, 0.0, 0)
        self.first = False
        self.decision: Decision | None = None
        self.dispatch: Dispatch | None = None
        self.rejected: Reject | None = None
        self.failed: Exception | None = None
        self.waits = True

    def __repr__(self) -> str:
        if self.rejected is not None:
            state = f"rejected: {self.rejected.reason.value}"
        elif self.failed is not None:
            state = f"failed: {self.failed!r}"
        else:
            state = "waiting" if self.dispatch is None else f"placed: {self.dispatch!r}"
        return f"<Ticket {self.request.model} since {self.enqueued_s:.3f} s, {state}>"
