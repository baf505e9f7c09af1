"""Who goes next of those that wait: queue disciplines, behind one Protocol.

    fifo       who came first
    shortest   of what came together, who takes least of a machine's time, by prediction
    classes    shares of the machines' time for named classes; within one, who came first
    clients    the same, and within a class shares for clients, so that none's backlog is another's

A discipline is one for all the queues of a scheduler, so that models that share instances share
them by it, too. It orders and refuses nobody; ``clients`` keeps a seat of each instance free.

``shortest`` is aged when a request comes: it stands in the row as if it had come later than it did,
by ``patience_s`` times its work over four times the mean work, and by ``patience_s`` at most. So
who comes so much later never passes it, however short.

``classes`` is start-time fair queueing (Goyal, Vin and Cheng, 1996): a class whose request goes
has its next turn after work/share, on a clock of work done. One that asks for less than its share
hardly waits, whatever the others ask for; what it leaves over is theirs. Who has waited for its
class's ``max_wait_s`` goes ahead of them all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.discipline_settings import (
    DEFAULT_PATIENCE_S,
    DEFAULT_RESERVE,
    DisciplineName,
)
from hetero_gateway.core.scheduling.pool import Pool
from hetero_gateway.core.scheduling.queue import (
    MEAN_OVER_REQUESTS,
    QueueDiscipline,
    Ticket,
    Turn,
)
from hetero_gateway.core.types import BATCH_CLASS, DEFAULT_CLASS, Usage

# A retry has waited its turn before.
_RETRY = -math.inf
# Few requests are longer than so many mean ones; they need not be distinguished.
LONG = 4.0
# Clients that come and go leave nothing behind.
_MOST_COUNTERS = 10_000
# An answer is taken to be at most so many times the work that was predicted.
_MOST_TIMES = 32.0
# Who has not asked for so long needs no room kept free.
_LATELY_S = 60.0


class Fifo:
    """First in, first out."""

    __slots__ = ("_sequence",)

    sorts = False
    has_rows = False

    def __init__(self) -> None:
        self._sequence = 0

    @property
    def unused(self) -> bool:
        """Nobody has joined yet."""
        return not self._sequence

    def line(self, request: Request) -> str:
        return ""

    def join(self, ticket: Ticket, *, first: bool) -> Turn:
        self._sequence += 1
        if first:
            return (_RETRY, 0.0, -self._sequence)
        return (0.0, 0.0, self._sequence)

    def turn(self, ticket: Ticket, now_s: float) -> Turn:
        return ticket.rank

    def went(self, ticket: Ticket, now_s: float) -> None:
        pass

    def weight(self, request: Request) -> float:
        return 1.0

    def behind_s(self, request: Request) -> float:
        return 0.0


class Shortest(Fifo):
    """The least work first, aged.

    Args:
        patience_s: who comes so much later than another does not go ahead of it; above 0.
    """

    __slots__ = ("_joined", "_mean_work_s", "patience_s")

    sorts = True

    def __init__(self, patience_s: float = DEFAULT_PATIENCE_S) -> None:
        super().__init__()
        self.patience_s = patience_s
        self._joined = 0
        self._mean_work_s = 0.0

    def join(self, ticket: Ticket, *, first: bool) -> Turn:
        self._sequence += 1
        if first:
            return (_RETRY, 0.0, -self._sequence)
        work_s = work_of(ticket.request, ticket.eligible.pool)
        self._joined += 1
        share = 1 / min(self._joined, MEAN_OVER_REQUESTS)
        self._mean_work_s += share * (work_s - self._mean_work_s)
        later = later_s(work_s, self._mean_work_s, self.patience_s)
        return (ticket.enqueued_s + later, 0.0, self._sequence)


def later_s(work_s: float, mean_work_s: float, patience_s: float) -> float:
    """How much later than it did a request is taken to have come."""
    if work_s <= 0.0:
        return 0.0
    return patience_s * min(1.0, work_s / (LONG * mean_work_s))


@dataclass(frozen=True, slots=True)
class ClassRule:
    """What a class gets.

    Args:
        share: of the machines' time, beside the others' shares, while all want more; above 0.
        max_wait_s: who has waited so long goes ahead of every class, s; above 0.
    """

    share: float = 1.0
    max_wait_s: float = math.inf


# Interactive requests wait only for their own kind, as long as they are not nine parts in ten of
# the work; and a batch's go on.
DEFAULT_CLASSES: Mapping[str, ClassRule] = {
    DEFAULT_CLASS: ClassRule(9.0),
    BATCH_CLASS: ClassRule(1.0),
}


class Classes(Fifo):
    """Shares for classes.

    Args:
        classes: by name, at least one. A request of another class counts as of the first.
    """

    __slots__ = ("_clock_s", "_first", "_next_s", "_rules")

    has_rows = True

    def __init__(self, classes: Mapping[str, ClassRule] = DEFAULT_CLASSES) -> None:
        super().__init__()
        self._rules = dict(classes)
        self._first = next(iter(self._rules))
        # Work done, as the class whose turn it was had it; and when each has its next turn.
        self._clock_s = 0.0
        self._next_s = dict.fromkeys(self._rules, 0.0)

    def line(self, request: Request) -> str:
        name = request.request_class
        return name if name in self._rules else self._first

    def turn(self, ticket: Ticket, now_s: float) -> Turn:
        level, _, sequence = ticket.rank
        name = self.line(ticket.request)
        if level < 0:
            return ticket.rank
        if now_s - ticket.enqueued_s >= self._rules[name].max_wait_s:
            return (-1.0, ticket.enqueued_s, sequence)
        return (0.0, max(self._clock_s, self._next_s[name]), sequence)

    def went(self, ticket: Ticket, now_s: float) -> None:
        name = self.line(ticket.request)
        start_s = max(self._clock_s, self._next_s[name])
        if self.turn(ticket, now_s)[0] == 0:
            # Who goes out of turn moves its class on, and not the clock of all.
            self._clock_s = start_s
        work_s = work_of(ticket.request, ticket.eligible.pool)
        self._next_s[name] = start_s + work_s / self._rules[name].share

    def weight(self, request: Request) -> float:
        return self._rules[Classes.line(self, request)].share

    def behind_s(self, request: Request) -> float:
        return max(0.0, self._next_s[self.line(request)] - self._clock_s)


class Clients(Classes):
    """Shares for clients, within their classes: a virtual counter of work for each.

    A client's weight is its share times its class's. As a virtual token counter (Sheng et al.,
    2024), it counts what was served and is lifted to the clock of all when a client comes back, so
    that nobody saves up; it counts time on a machine instead of tokens. Predicted work is charged
    as a request goes, and corrected by what its answer says that it was.

    Who has more requests out than its part of all of them leaves room for another on each instance
    (``leaves_room``, ``Eligible.roomy``) while others have asked within a minute: what comes next
    from somebody else finds a seat, as it would if the backlog were not there.

    Args:
        reserve: share of the seats and the memory of each instance that it leaves free so, if that
            is more than for one request; from 0 to below 1.
    """

    __slots__ = ("_asked_s", "_counters_s", "_out", "_total", "_weight", "reserve", "shares")

    def __init__(
        self, classes: Mapping[str, ClassRule] = DEFAULT_CLASSES, reserve: float = DEFAULT_RESERVE
    ) -> None:
        super().__init__(classes)
        self.reserve = reserve
        # Of clients, by ``Request.client``; who has none has 1. Above 0.
        self.shares: Mapping[str, float] = {}
        self._counters_s: dict[str, float] = {}
        # Sequences that are on instances, by line and in all.
        self._out: dict[str, int] = {}
        self._total = 0
        # Who has asked lately: (when last, weight), the longest ago first; and their weight.
        self._asked_s: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._weight = 0.0

    def line(self, request: Request) -> str:
        return f"{super().line(request)}\n{request.client}"

    def join(self, ticket: Ticket, *, first: bool) -> Turn:
        asked, now_s, line = self._asked_s, ticket.enqueued_s, self.line(ticket.request)
        weight = self.weight(ticket.request)
        self._weight += weight - asked.pop(line, (0.0, 0.0))[1]
        asked[line] = now_s, weight
        while len(asked) > 1:
            oldest = next(iter(asked))
            if now_s - asked[oldest][0] < _LATELY_S and len(asked) <= _MOST_COUNTERS:
                break
            self._weight -= asked.pop(oldest)[1]
        return super().join(ticket, first=first)

    def turn(self, ticket: Ticket, now_s: float) -> Turn:
        level, _, sequence = ticket.rank
        if level < 0:
            return ticket.rank
        if now_s - ticket.enqueued_s >= self._rules[super().line(ticket.request)].max_wait_s:
            return (-1.0, ticket.enqueued_s, sequence)
        counter_s = self._counters_s.get(self.line(ticket.request), 0.0)
        return (0.0, max(self._clock_s, counter_s), sequence)

    def leaves_room(self, ticket: Ticket, now_s: float) -> bool:
        """Whether it may take no instance's last room: its client has more than its part already,
        and others have asked lately."""
        if len(self._asked_s) < 2:
            return False
        request = ticket.request
        out = self._out.get(self.line(request), 0)
        return (
            out * self._weight > self._total * self.weight(request)
            and self.turn(ticket, now_s)[0] == 0
        )

    def went(self, ticket: Ticket, now_s: float) -> None:
        request, name = ticket.request, self.line(ticket.request)
        counters = self._counters_s
        start_s = max(self._clock_s, counters.get(name, 0.0))
        if self.turn(ticket, now_s)[0] == 0:
            self._clock_s = start_s
        weight = self.weight(request)
        work_s = work_of(request, ticket.eligible.pool) / weight
        counters[name] = start_s + work_s
        if len(counters) > _MOST_COUNTERS:
            # What is behind the clock says nothing.
            self._counters_s = {n: c for n, c in counters.items() if c > self._clock_s}
        if ticket.dispatch is not None:
            ticket.dispatch.turn = Served(self, name, work_s, weight, ticket.eligible.pool)
            self._out[name] = self._out.get(name, 0) + request.sequences
            self._total += request.sequences

    def settled(self, dispatch: Dispatch, usage: Usage | None, made_tokens: float | None) -> None:
        """A request is over; later calls change nothing.

        Args:
            usage: as its answer reported; None, or what is None in it: nobody knows.
            made_tokens: what it had made when it was cut short; None: it came to its end.
        """
        served, dispatch.turn = dispatch.turn, None
        if not isinstance(served, Served) or served.by is not self:
            return
        name, request = served.line, dispatch.request
        sequences = request.sequences
        self._total -= sequences
        self._out[name] -= sequences
        if not self._out[name]:
            del self._out[name]
        prompt, output = float(request.prompt_tokens), made_tokens
        if usage is not None and usage.output_tokens is not None:
            output = float(usage.output_tokens)
            if usage.prompt_tokens is not None and sequences == 1:
                prompt = float(usage.prompt_tokens)
        if output is None:
            return  # as predicted
        real_s = sequences * served.pool.work_s(prompt, output / sequences) / served.weight
        # An instance that says something absurd shall not bar a client for long.
        real_s = min(real_s, _MOST_TIMES * served.work_s)
        self._counters_s[name] = self._counters_s.get(name, self._clock_s) + real_s - served.work_s

    def weight(self, request: Request) -> float:
        return super().weight(request) * self.shares.get(request.client, 1.0)

    def behind_s(self, request: Request) -> float:
        return max(0.0, self._counters_s.get(self.line(request), 0.0) - self._clock_s)


class Served(NamedTuple):
    """As what a request was counted when it went. ``work_s``: predicted, over the weight."""

    by: Clients
    line: str
    work_s: float
    weight: float
    pool: Pool


def work_of(request: Request, pool: Pool) -> float:
    """How much of a machine's time a request takes, of all its sequences, s: T on the pool's
    fastest, as if that had memory for it."""
    return request.sequences * pool.work_s(request.prompt_tokens, request.predicted_output_tokens)


def make_discipline(
    name: DisciplineName,
    patience_s: float = DEFAULT_PATIENCE_S,
    classes: Mapping[str, ClassRule] | None = None,
    reserve: float = DEFAULT_RESERVE,
) -> QueueDiscipline:
    """A discipline by its name in a configuration; what does not concern it is not looked at."""
    if name == "shortest":
        return Shortest(patience_s)
    if name == "classes":
        return Classes(classes or DEFAULT_CLASSES)
    if name == "clients":
        return Clients(classes or DEFAULT_CLASSES, reserve)
    return Fifo()
