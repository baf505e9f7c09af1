"""Requests that wait in the gateway for an instance: a queue for each model.

Models do not block each other. A ticket can leave from the middle (its client went away) at the
same cost as from the head. The discipline decides who is next (``disciplines.py``); ``ModelQueue``
keeps the sums and means that policies need.

Within a model, tickets that the same instances can take stand in one line; if contexts and caches
are equal, nothing is retried and there are no classes, there is only one. The line whose turn it is
goes first. When its head has to wait, the heads of other lines may go to instances that it cannot
use: what it waits for is kept for it, so being overtaken delays no one. A *crowd*, a request of
more sequences than any engine of its pool runs at once, stands in a line of its own.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, Protocol

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.pool import Eligible, Pool
from hetero_gateway.core.types import InstanceId, Reject

# The typical request of a model changes over minutes, not from one request to the next.
MEAN_OVER_REQUESTS: Final = 1000
# A burst must be recognised while it lasts.
MEAN_OVER_GAPS: Final = 16
# Seats become free in groups.
MEAN_OVER_DEPARTURES: Final = 64
# A line is tidied when tickets that left its middle exceed twice those present by this many.
_MOST_DROPPED: Final = 64


# When it is its turn: the lower, the sooner; whole numbers of arrival break ties.
Turn = tuple[float, float, int]
# The instances that can take a ticket (positions in its pool; None: all), whether it is a crowd,
# and the row that its discipline assigns. None: all can, it is no crowd, and there is one row.
LineName = tuple[tuple[int, ...] | None, bool, str] | None


class Ticket:
    """A request waiting for an instance, or placed on one. Only the scheduler changes it.

    ``waits``: still undecided. ``exclude``: instances it was tried on. ``owner``: the shell's own
    object.
    ``eligible``: the instances that may get it, as judged in its model's present pool; ``line``:
    where it stands, ``rank``: since when, ``first``: as a retry, ahead of later arrivals. When it
    leaves the queue by being placed or refused, it has either ``decision`` and ``dispatch``, or
    ``rejected``, or ``failed``: the exception its placement met, a bug that concerns it alone.
    ``prefill``: the other leg of a split request; ``dispatch`` is the instance that answers.
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
        "prefill",
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
        self.prefill: Dispatch | None = None
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


class QueueDiscipline(Protocol):
    """Decides which ticket is next. ``sorts``: also within a line of tickets for the same
    instances.

    ``has_rows``: such tickets stand in several rows, whose turns advance as requests go; otherwise
    neither ``line`` nor ``went`` does anything.

    In a discipline without rows, only tickets that have to wait ``join``.
    """

    sorts: bool
    has_rows: bool

    def line(self, request: Request) -> str:
        """The row of a request, among those that the same instances can take."""
        ...

    def join(self, ticket: Ticket, *, first: bool) -> Turn:
        """Give a ticket its final place; ``first``: it goes ahead of the others (a retry)."""
        ...

    def turn(self, ticket: Ticket, now_s: float) -> Turn:
        """When it is the turn of a ticket that is first in its line."""
        ...

    def went(self, ticket: Ticket, now_s: float) -> None:
        """Note that it was placed."""
        ...

    def weight(self, request: Request) -> float:
        """The weight of its row relative to the others; above 0."""
        ...

    def behind_s(self, request: Request) -> float:
        """What others are served, over their weight, until its row's turn; s of work."""
        ...


class Line(Protocol):
    """Requests that the same instances can take, in the order in which they go."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Ticket]: ...

    def head(self) -> Ticket:
        """The ticket whose turn it is; there must be one."""
        ...

    def put(self, ticket: Ticket) -> None:
        """Add a ticket where its ``rank`` says."""
        ...

    def drop(self, ticket: Ticket) -> bool:
        """Remove a ticket, wherever it stands; False if it is not there."""
        ...


class Row:
    """A line with the newest last, and a retry first."""

    __slots__ = ("_tickets",)

    def __init__(self) -> None:
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def head(self) -> Ticket:
        return next(iter(self._tickets))

    def put(self, ticket: Ticket) -> None:
        self._tickets[ticket] = None
        if ticket.first:
            self._tickets.move_to_end(ticket, last=False)

    def drop(self, ticket: Ticket) -> bool:
        if ticket not in self._tickets:
            return False
        del self._tickets[ticket]
        return True


class SortedLine:
    """A line in the order of ranks. Dropped tickets stay in the heap until they reach its top."""

    __slots__ = ("_heap", "_tickets")

    def __init__(self) -> None:
        self._heap: list[tuple[Turn, Ticket]] = []
        self._tickets: set[Ticket] = set()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(sorted(self._tickets, key=_rank))

    def head(self) -> Ticket:
        heap = self._heap
        while heap[0][1] not in self._tickets:
            heapq.heappop(heap)
        return heap[0][1]

    def put(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)
        heapq.heappush(self._heap, (ticket.rank, ticket))

    def drop(self, ticket: Ticket) -> bool:
        if ticket not in self._tickets:
            return False
        self._tickets.remove(ticket)
        if len(self._heap) > _MOST_DROPPED + 2 * len(self._tickets):
            self._heap = [entry for entry in self._heap if entry[1] in self._tickets]
            heapq.heapify(self._heap)
        return True


class ModelQueue:
    """The waiting requests of one model: their number, the sums of their lengths (tokens), means.

    ``mean_prompt_tokens``, ``mean_output_tokens`` (predicted) and ``mean_gap_s`` cover recent
    arrivals; ``departures``, ``last_departure_s`` and ``mean_departure_gap_s`` what was placed
    while others waited, since the queue was last empty (the mean continues).

    Args:
        model: the name that these requests ask for.
        discipline: decides who is next.
    """

    __slots__ = (
        "_discipline",
        "_first_token_s",
        "_first_token_spread_s",
        "_lines",
        "arrivals",
        "departures",
        "last_arrival_s",
        "last_departure_s",
        "mean_departure_gap_s",
        "mean_gap_s",
        "mean_output_tokens",
        "mean_prompt_tokens",
        "model",
        "output_tokens",
        "pool",
        "prompt_tokens",
        "size",
    )

    def __init__(self, model: str, discipline: QueueDiscipline) -> None:
        self.model = model
        self._discipline = discipline
        self._lines: dict[LineName, Line] = {}  # none of them is empty
        self.size = 0
        self.pool: Pool | None = None  # that the lines are of
        self.prompt_tokens = 0
        self.output_tokens = 0.0
        self.last_arrival_s = 0.0
        self.arrivals = 0
        self.mean_gap_s = 0.0
        self.departures = 0
        self.last_departure_s = 0.0
        self.mean_departure_gap_s = 0.0
        self._first_token_s = 0.0
        self._first_token_spread_s = 0.0
        self.mean_prompt_tokens = 0.0
        self.mean_output_tokens = 0.0

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return (
            f"<ModelQueue of {self.size} in {len(self._lines)} lines, "
            f"mean gap {self.mean_gap_s:.3g} s>"
        )

    def mean_lengths(self) -> tuple[float, float]:
        """Prompt and output tokens of the mean waiting request; there must be one."""
        return self.prompt_tokens / self.size, self.output_tokens / self.size

    @property
    def mixed(self) -> bool:
        """Whether it has several lines."""
        return len(self._lines) > 1

    def head(self, now_s: float) -> Ticket:
        """The ticket whose turn it is; there must be one."""
        lines = self._lines.values()
        if len(lines) == 1:
            return next(iter(lines)).head()
        turn = self._discipline.turn
        return min((line.head() for line in lines), key=lambda ticket: turn(ticket, now_s))

    def turn(self, ticket: Ticket, now_s: float) -> Turn:
        """When it is the turn of a ticket that is first in its line."""
        return self._discipline.turn(ticket, now_s)

    def heads(self, most: int, now_s: float) -> list[Ticket]:
        """The heads of this many lines, in the order of their turns."""
        turn = self._discipline.turn
        heads = [line.head() for line in self._lines.values()]
        return sorted(heads, key=lambda ticket: turn(ticket, now_s))[:most]

    def next_in_line(self, line: LineName) -> Ticket | None:
        """The ticket first in that line now; None: none."""
        there = self._lines.get(line)
        return None if there is None else there.head()

    def arrive(self, ticket: Ticket, *, first: bool) -> None:
        """Note an arrival, or, ``first``, a request that has waited before (a retry).

        It has to ``wait`` in its line right away, or has ``passed``, as most do if nothing waits.
        """
        discipline = self._discipline
        if discipline.has_rows:
            ticket.rank = discipline.join(ticket, first=first)
        ticket.first = first
        request, eligible = ticket.request, ticket.eligible
        if eligible.kept is not None or request.sequences > 1 or discipline.has_rows:
            ticket.line = self._line_of(ticket)
        if not self.size:
            # Waiting tickets were judged in the previous pool: the pump judges all again.
            self.pool = eligible.pool
        prompt_tokens, output_tokens = request.prompt_tokens, request.predicted_output_tokens
        if not first:
            arrived_s = ticket.enqueued_s
            if self.arrivals:
                gap_s = arrived_s - self.last_arrival_s
                self.mean_gap_s += (gap_s - self.mean_gap_s) / MEAN_OVER_GAPS
            self.last_arrival_s = arrived_s
            self.arrivals += 1
            over = self.arrivals if self.arrivals < MEAN_OVER_REQUESTS else MEAN_OVER_REQUESTS
            share = 1 / over
            self.mean_prompt_tokens += share * (prompt_tokens - self.mean_prompt_tokens)
            self.mean_output_tokens += share * (output_tokens - self.mean_output_tokens)
        self.size += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens

    def _line_of(self, ticket: Ticket) -> LineName:
        pool, kept = ticket.eligible.pool, ticket.eligible.kept
        sequences = ticket.request.sequences
        crowd = sequences > 1 and sequences > pool.most_sequences
        row = self._discipline.line(ticket.request)
        if kept is not None or crowd or row:
            return (None if kept is None else tuple(kept), crowd, row)
        return None

    def wait(self, ticket: Ticket) -> None:
        """Make a ticket that has just arrived wait."""
        discipline = self._discipline
        if not discipline.has_rows:
            ticket.rank = discipline.join(ticket, first=ticket.first)
        self._stand(ticket)

    def _stand(self, ticket: Ticket) -> None:
        name = ticket.line
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = SortedLine() if self._discipline.sorts else Row()
        line.put(ticket)

    def passed(self, ticket: Ticket, now_s: float) -> None:
        """Remove an arrived ticket that stands in no line (any more): placed, or not."""
        if ticket.dispatch is not None and self._discipline.has_rows:
            self._discipline.went(ticket, now_s)
        self.size -= 1
        if self.size:
            self.prompt_tokens -= ticket.request.prompt_tokens
            self.output_tokens -= ticket.request.predicted_output_tokens
        else:
            self.prompt_tokens, self.output_tokens = 0, 0.0
            self.departures = 0

    def stand_anew(self, pool: Pool, judge: Callable[[Ticket], bool]) -> list[Ticket]:
        """Judge all tickets again and put them where they belong, as the pool has changed.

        Args:
            judge: sets a ticket's ``eligible``. False: no instance can take it any more.

        Returns:
            those that no instance can take; they have left.
        """
        tickets = sorted((t for line in self._lines.values() for t in line), key=_rank)
        self.pool = pool
        self._lines = {}
        refused = [ticket for ticket in tickets if not judge(ticket)]
        gone = set(refused)
        staying = [ticket for ticket in tickets if ticket not in gone]
        for ticket in staying:
            ticket.line = self._line_of(ticket)
        for ticket in (t for t in staying if not t.first):
            self._stand(ticket)
        # The last one put first stands in front.
        for ticket in reversed([t for t in staying if t.first]):
            self._stand(ticket)
        for ticket in refused:
            self.passed(ticket, ticket.enqueued_s)
        return refused

    def set_discipline(self, discipline: QueueDiscipline) -> None:
        """Use another discipline from now on: all tickets are put again, in order of arrival."""
        tickets = sorted(
            (t for line in self._lines.values() for t in line), key=lambda t: t.enqueued_s
        )
        retries = [t for line in self._lines.values() for t in line if t.first]
        self._discipline = discipline
        self._lines = {}
        for ticket in [t for t in tickets if not t.first] + retries[::-1]:
            ticket.rank = discipline.join(ticket, first=ticket.first)
            ticket.line = self._line_of(ticket)
            self._stand(ticket)

    def change(self, ticket: Ticket, request: Request) -> None:
        """Change the assumed lengths of a ticket."""
        self.prompt_tokens += request.prompt_tokens - ticket.request.prompt_tokens
        self.output_tokens += (
            request.predicted_output_tokens - ticket.request.predicted_output_tokens
        )
        ticket.request = request

    def went(self, ticket: Ticket, now_s: float) -> None:
        """Remove a ticket that was placed."""
        if ticket.dispatch is not None:
            self._note_departure(ticket, now_s)
        self.drop(ticket, now_s)

    def ahead(self, request: Request) -> float:
        """How many tickets will leave before one that comes now."""
        discipline = self._discipline
        row = discipline.line(request)
        if discipline.sorts or not row:
            return self.size
        weight, mine = discipline.weight(request), 0
        weights = {row: weight}
        for name, line in self._lines.items():
            if name is None:
                continue
            if name[2] == row:
                mine += len(line)
            else:
                weights[name[2]] = discipline.weight(line.head().request)
        total, behind = sum(weights.values()), discipline.behind_s(request)
        if behind and self.pool is not None:
            # On the clock of work, over the work of one that leaves.
            work_s = self.pool.work_s(self.mean_prompt_tokens, self.mean_output_tokens)
            behind = behind / work_s if work_s else 0.0
        return min(self.size, mine * total / weight + behind * total)

    @property
    def first_token_s(self) -> float:
        """How long after their placement most of the recently placed requests have their first
        token, as predicted: the mean plus twice the mean deviation (as in TCP's time-outs, RFC
        6298)."""
        return self._first_token_s + 2 * self._first_token_spread_s

    def _note_departure(self, ticket: Ticket, now_s: float) -> None:
        if ticket.decision is not None:
            share = 1 / min(self.departures + 1, MEAN_OVER_DEPARTURES)
            first_token_s = ticket.decision.choice.ttft_s or 0.0
            off_s = first_token_s - self._first_token_s
            self._first_token_s += share * off_s
            self._first_token_spread_s += share * (abs(off_s) - self._first_token_spread_s)
        if self.departures:
            gap_s = now_s - self.last_departure_s
            share = 1 / min(self.departures, MEAN_OVER_DEPARTURES)
            self.mean_departure_gap_s += share * (gap_s - self.mean_departure_gap_s)
        self.last_departure_s = now_s
        self.departures += 1

    def drop(self, ticket: Ticket, now_s: float = 0.0) -> bool:
        """Remove a ticket, wherever it stands; False if it is not there."""
        line = self._lines.get(ticket.line)
        if line is None or not line.drop(ticket):
            return False
        if not line:
            del self._lines[ticket.line]
        self.passed(ticket, now_s)
        return True


def _rank(ticket: Ticket) -> Turn:
    return ticket.rank
