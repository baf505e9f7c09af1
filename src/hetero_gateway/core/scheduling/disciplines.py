"""Queue disciplines, which decide who goes next, behind one Protocol.

    fifo       the oldest
    shortest   among those that came together, the least predicted machine time
    classes    shares of the machines' time for named classes; within one, the oldest
    clients    the same, and within a class shares for clients, so that one client's backlog does
               not delay another's requests

One discipline serves all the queues of a scheduler, so that models that share instances also share
them by it. It orders and never refuses; ``clients`` keeps a seat of each instance free.

``shortest`` is aged on arrival: a request is queued as if it had come later than it did, by
``patience_s`` times its work over four times the mean work, and by at most ``patience_s``. So a
request that arrives later by more than that never overtakes it, however short.

``classes`` is start-time fair queueing (Goyal, Vin and Cheng, 1996): a class whose request goes has
its next turn after work/share, on a clock of work done. A class that asks for less than its share
hardly waits, whatever the others ask for; what it leaves over goes to them. A request that has
waited for its class's ``max_wait_s`` goes ahead of all others.
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

# A retry has already waited its turn.
_RETRY = -math.inf
# Few requests are longer than this many mean ones; they need not be distinguished.
LONG = 4.0
# Clients that come and go leave no state behind.
_MOST_COUNTERS = 10_000
# An answer counts as at most this many times the predicted work.
_MOST_TIMES = 32.0
# A client that has not asked for this long needs no room kept free.
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
        """Whether nothing has joined yet."""
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
        patience_s: a request that comes later by more than this does not go ahead; above 0.
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
    """How much later than its arrival a request is queued."""
    if work_s <= 0.0:
        return 0.0
    return patience_s * min(1.0, work_s / (LONG * mean_work_s))


@dataclass(frozen=True, slots=True)
class ClassRule:
    """The share of a class.

    Args:
        share: of the machines' time, relative to the other classes, while all want more; above 0.
        max_wait_s: after this wait a request goes ahead of every class, s; above 0.
    """

    share: float = 1.0
    max_wait_s: float = math.inf


# Interactive requests wait only for their own kind, unless they are nine tenths of the work; and a
# batch's keep moving.
DEFAULT_CLASSES: Mapping[str, ClassRule] = {
    DEFAULT_CLASS: ClassRule(9.0),
    BATCH_CLASS: ClassRule(1.0),
}


class Classes(Fifo):
    """Shares for classes.

    Args:
        classes: by name, at least one. A request of an unknown class counts as of the first.
    """

    __slots__ = ("_clock_s", "_first", "_next_s", "_rules")

    has_rows = True

    def __init__(self, classes: Mapping[str, ClassRule] = DEFAULT_CLASSES) -> None:
        super().__init__()
        self._rules = dict(classes)
        self._first = next(iter(self._rules))
        # Work done, by the clock of the class whose turn it was; and each class's next turn.
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
            # Going out of turn advances the class, and not the common clock.
            self._clock_s = start_s
        work_s = work_of(ticket.request, ticket.eligible.pool)
        self._next_s[name] = start_s + work_s / self._rules[name].share

    def weight(self, request: Request) -> float:
        return self._rules[Classes.line(self, request)].share

    def behind_s(self, request: Request) -> float:
        return max(0.0, self._next_s[self.line(request)] - self._clock_s)


class Clients(Classes):
    """Shares for clients, within their classes: a virtual counter of work for each.

    A client's weight is its share times its class's. As in a virtual token counter (Sheng et al.,
    2024), the counter is of what was served and is lifted to the common clock when a client comes
    back, so that nobody saves up; it counts machine time instead of tokens. Predicted work is
    charged when a request goes, and corrected when its answer shows the real work.

    A client with more than its part of the outstanding requests leaves room for another one on each
    instance (``leaves_room``, ``Eligible.roomy``) while others have asked within a minute: the next
    request of another client finds a seat, as if the backlog were not there.

    Args:
        reserve: the share of each instance's seats and memory left free in this way, if that is
            more than room for one request; from 0 to below 1.
    """

    __slots__ = ("_asked_s", "_counters_s", "_out", "_total", "_weight", "reserve", "shares")

    def __init__(
        self, classes: Mapping[str, ClassRule] = DEFAULT_CLASSES, reserve: float = DEFAULT_RESERVE
    ) -> None:
        super().__init__(classes)
        self.reserve = reserve
        # Weights of clients, by ``Request.client``; 1 if not listed. Above 0.
        self.shares: Mapping[str, float] = {}
        self._counters_s: dict[str, float] = {}
        # Sequences on instances, by line and in total.
        self._out: dict[str, int] = {}
        self._total = 0
        # Clients that asked recently: (when last, weight), the longest ago first; and their weight.
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
        """Whether it may not take an instance's last room: its client has more than its part
        already, and others have asked recently."""
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
            # Anything behind the clock means nothing.
            self._counters_s = {n: c for n, c in counters.items() if c > self._clock_s}
        if ticket.dispatch is not None:
            ticket.dispatch.turn = Served(self, name, work_s, weight, ticket.eligible.pool)
            self._out[name] = self._out.get(name, 0) + request.sequences
            self._total += request.sequences

    def settled(self, dispatch: Dispatch, usage: Usage | None, made_tokens: float | None) -> None:
        """Settle a request; later calls change nothing.

        Args:
            usage: as its answer reported; None, or None in it: unknown.
            made_tokens: tokens made when it was cut short; None: it was complete.
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
        # An absurd report of an instance must not lock a client out for long.
        real_s = min(real_s, _MOST_TIMES * served.work_s)
        self._counters_s[name] = self._counters_s.get(name, self._clock_s) + real_s - served.work_s

    def weight(self, request: Request) -> float:
        return super().weight(request) * self.shares.get(request.client, 1.0)

    def behind_s(self, request: Request) -> float:
        return max(0.0, self._counters_s.get(self.line(request), 0.0) - self._clock_s)


class Served(NamedTuple):
    """How a request was counted when it went. ``work_s``: predicted, over the weight."""

    by: Clients
    line: str
    work_s: float
    weight: float
    pool: Pool


def work_of(request: Request, pool: Pool) -> float:
    """Machine time that a request takes, of all its sequences, s: T on the pool's fastest instance,
    as if that had memory for it."""
    return request.sequences * pool.work_s(request.prompt_tokens, request.predicted_output_tokens)


def make_discipline(
    name: DisciplineName,
    patience_s: float = DEFAULT_PATIENCE_S,
    classes: Mapping[str, ClassRule] | None = None,
    reserve: float = DEFAULT_RESERVE,
) -> QueueDiscipline:
    """Make a discipline by its name in a configuration; settings of other disciplines are
    ignored."""
    if name == "shortest":
        return Shortest(patience_s)
    if name == "classes":
        return Classes(classes or DEFAULT_CLASSES)
    if name == "clients":
        return Clients(classes or DEFAULT_CLASSES, reserve)
    return Fifo()
