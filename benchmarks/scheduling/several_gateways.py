"""Several gateways in front of one simulated cluster, and what they know of each other. Pure.

``Replicas`` stands in a scheduler's place in ``cluster.simulate``: each replica has a scheduler and
a queue of its own, sees its own requests exactly, and the others' through ``core.sharing``, as the
gateway does. Every ``interval_s`` a replica says what it has and hears what the others have said;
the replicas take turns within an interval. So what one sees of another is up to two intervals old,
but for news: where a replica has placed a request, it says so at once, and then not again for
``news_s``. News are ``NEWS_DELAY_S`` on their way.

What is shared by all, since it is load that is compared: lengths that were learnt. What an engine
does, every replica that has streams there sees.

``Shards`` is the other way to grow: every scheduler has instances of its own, and a request goes to
the shard with the least to do of a few that are drawn, by what each has last said of itself.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.instances.dispatch import Dispatch, PeerLoad
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.sharing.exchange import OTHERS, LoadExchange
from hetero_gateway.core.sharing.placements import PlacementExchange
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Reject, Usage

# What is assumed of the others before they were heard: nothing; what we have ourselves; and after
# it, that they get as much as we did since the last exchange.
Assumed = Literal["nothing", "alike-at-first", "alike"]
_EXPECTED = "expected"
_NEVER_S = 1e9
# A turn of the event loop, Redis and a network.
NEWS_DELAY_S = 0.001


class _Several:
    """Schedulers that are driven as one."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = tuple(schedulers)
        self._turn = 0
        self._placed_by: dict[Dispatch, Scheduler] = {}

    @property
    def caches(self) -> PrefixCaches | None:
        """What the first one knows of the instances' prefix caches, as all do or none."""
        return self.schedulers[0].caches

    @property
    def queued(self) -> int:
        return sum(scheduler.queued for scheduler in self.schedulers)

    def pump(self, now_s: float) -> list[Ticket]:
        """Nobody is always the first."""
        self._turn += 1
        count = len(self.schedulers)
        order = [self.schedulers[(self._turn + i) % count] for i in range(count)]
        tickets = []
        for scheduler in order:
            if scheduler.queued:
                placed = scheduler.pump(now_s)
                self._placed_by.update((t.dispatch, scheduler) for t in placed if t.dispatch)
                tickets += placed
        return tickets

    @property
    def members(self) -> Self:
        """What steps are reported to; lengths, too; and what compiles itself."""
        return self

    residual = policy = members

    def next_wakeup_s(self) -> float | None:
        times = [s.next_wakeup_s() for s in self.schedulers if s.queued]
        return min((t for t in times if t is not None), default=None)

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        dispatch.state.first_token(dispatch, now_s)

    def settle(
        self, dispatch: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        return self._placed_by.pop(dispatch).settle(dispatch, outcome, now_s, usage)

    def observe_cache(
        self,
        instance_id: InstanceId,
        caching: bool | None,
        counters: tuple[float, float] | None,
        now_s: float,
    ) -> None:
        for scheduler in self.schedulers:
            scheduler.observe_cache(instance_id, caching, counters, now_s)

    def observe(self, model: str, output_tokens: float) -> None:
        for scheduler in self.schedulers:
            scheduler.residual.observe(model, output_tokens)


class ReplicaScheduler(Scheduler):
    """A scheduler that reports what requests are to all its instances."""

    def drain_s(self, request: Request) -> float:
        """How long all its instances together take for one such request at full speed, s."""
        pool = self.members.pool(request.model)
        times_s = pool.request_times_s(request.prompt_tokens, request.predicted_output_tokens)
        return request.sequences / sum(1 / time_s for time_s in times_s)


class Replicas(_Several):
    """Gateways that all have all instances.

    Args:
        schedulers: empty ones, one for each gateway.
        replica_of: (N,) which of them each request comes to.
        interval_s: between two exchanges; None: nothing is ever exchanged.
        assumed: what a replica takes for the others' load that it has not heard of.
        news_s: shortest time between news of a replica; None: there are none.
        placements_s: between two turns at the log of what was sent (``core.sharing.placements``);
            0: what one sends all know at once; None: each knows its own only.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        replica_of: NDArray[np.int64],
        interval_s: float | None,
        assumed: Assumed = "nothing",
        news_s: float | None = None,
        placements_s: float | None = None,
    ) -> None:
        super().__init__(schedulers)
        self._placements_s = placements_s
        self._log: list[bytes] = []
        self.log_bytes = 0
        self._placements: list[PlacementExchange] = []
        self._read = [0] * len(schedulers)
        # Phases differ, as those of gateways do.
        self._log_due_s = [
            (0.5 + i) / len(schedulers) * (placements_s or math.inf) for i in range(len(schedulers))
        ]
        self._replica_of = replica_of
        self._interval_s = interval_s
        self._assumed = assumed
        self._exchanges = [
            LoadExchange(s, ttl_s=_NEVER_S, interval_s=interval_s or math.inf)
            for s in self.schedulers
        ]
        self._news_s = news_s
        self._placed: list[set[InstanceId]] = [set() for _ in schedulers]
        # When each replica's news arrive next, and when they did last.
        self._due_s = [math.inf] * len(schedulers)
        self._told_s = [-math.inf] * len(schedulers)
        for replica, scheduler in enumerate(schedulers):
            scheduler.on_dispatch = functools.partial(self._on_dispatch, replica)
        for replica, scheduler in enumerate(schedulers):
            if placements_s and scheduler.caches is not None:
                self._placements.append(
                    PlacementExchange(scheduler.caches, replica, lambda _: None)
                )
                self._placements[-1].mark = 0
        self._instances: list[InstanceId] = []
        # The number of the next turn: replica ``turn % R`` exchanges at ``turn * interval / R``.
        # Phases begin at a half, so that what comes all at once at 0 is met unprepared.
        self._next_turn = 0
        self._heard: set[int] = set()
        self._base: dict[tuple[int, InstanceId], PeerLoad] = {}

    def add(self, spec: InstanceSpec) -> None:
        self._instances.append(spec.instance_id)
        for scheduler, exchange in zip(self.schedulers, self._exchanges, strict=True):
            scheduler.add(spec)
            exchange.set_instances([(i, "") for i in self._instances])
        for placements in self._placements:
            placements.set_instances([(i, "") for i in self._instances])

    def replace(self, spec: InstanceSpec) -> None:
        for scheduler in self.schedulers:
            scheduler.replace(spec)

    def place(
        self,
        request: Request,
        now_s: float,
        *,
        owner: Any = None,
        first: bool = False,
        at_once: bool = False,
    ) -> Ticket | Reject:
        self._exchange(now_s)
        scheduler = self.schedulers[int(self._replica_of[owner])]
        return scheduler.place(request, now_s, owner=owner, first=first, at_once=False)

    def pump(self, now_s: float) -> list[Ticket]:
        self._exchange(now_s)
        tickets = super().pump(now_s)
        if self._placements_s == 0:
            for ticket in tickets:
                if ticket.dispatch is not None:
                    self._share(ticket.dispatch)
        return tickets

    def _share(self, dispatch: Dispatch) -> None:
        """The others hear of what was sent."""
        keys = dispatch.request.prefix
        for scheduler in self.schedulers:
            if keys and scheduler.caches and scheduler is not self._placed_by[dispatch]:
                scheduler.caches.index.insert(dispatch.instance_id, keys)

    def next_wakeup_s(self) -> float | None:
        told = super().next_wakeup_s()
        if self._interval_s is None:
            return told
        next_s = min(self._turn_s(self._next_turn), *self._due_s)
        return next_s if told is None else min(told, next_s)

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        self._exchange(now_s)
        super().first_token(dispatch, now_s)

    def settle(
        self, dispatch: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        self._exchange(now_s)
        return super().settle(dispatch, outcome, now_s, usage)

    def observe_steps(
        self, instance_id: InstanceId, steps: float, duration_s: float, now_s: float
    ) -> bool:
        self._exchange(now_s)
        for scheduler in self.schedulers:
            if scheduler.members.snapshot(instance_id).streaming:
                scheduler.members.observe_steps(instance_id, steps, duration_s, now_s)
            else:
                scheduler.members.observe_steps(instance_id, 0.0, 0.0, now_s)
        return False

    # The exchange

    def _turn_s(self, turn: int) -> float:
        assert self._interval_s is not None
        return (turn + 0.5) * self._interval_s / len(self.schedulers)

    def _exchange(self, now_s: float) -> None:
        self._visit_log(now_s)
        if self._interval_s is None:
            return
        count = len(self.schedulers)
        for replica, due_s in enumerate(self._due_s):
            if due_s <= now_s:
                self._tell(replica, due_s)
        last = math.floor(now_s * count / self._interval_s - 0.5)
        # Nothing has changed since the last event: two rounds say all of it.
        for turn in range(max(self._next_turn, last + 1 - 2 * count), last + 1):
            self._take_turn(turn % count, self._turn_s(turn))
        self._next_turn = max(self._next_turn, last + 1)

    def _visit_log(self, now_s: float) -> None:
        for replica, placements in enumerate(self._placements):
            if now_s < self._log_due_s[replica]:
                continue
            assert self._placements_s is not None
            periods = math.ceil((now_s - self._log_due_s[replica]) / self._placements_s + 1e-9)
            self._log_due_s[replica] += periods * self._placements_s
            self.log_bytes += sum(map(len, entries := placements.say(now_s)))
            self._log += entries
            for entry in self._log[self._read[replica] :]:
                placements.hear(entry, now_s)
            self._read[replica] = len(self._log)

    def _take_turn(self, replica: int, now_s: float) -> None:
        exchange, scheduler = self._exchanges[replica], self.schedulers[replica]
        message = exchange.say(now_s)
        if message is not None:
            exchange.said()
            for other, others in enumerate(self._exchanges):
                if other != replica:
                    # It lies there until the other one takes its turn.
                    others.hear(str(replica), message, now_s)
        self._bring_home(replica, now_s)
        self._heard.add(replica)
        if self._assumed != "nothing":
            for instance_id in self._instances:
                scheduler.members.table[instance_id].set_peer(_EXPECTED, None, now_s)
                self._base[replica, instance_id] = scheduler.members.table[instance_id].own_load(
                    now_s
                )

    def _bring_home(self, replica: int, now_s: float) -> None:
        for change in self._exchanges[replica].changes(now_s):
            self.schedulers[replica].members.table[change.instance_id].set_peer(
                OTHERS, change.load, now_s
            )

    def _on_dispatch(self, replica: int, dispatch: Dispatch, now_s: float) -> None:
        instance_id = dispatch.instance_id
        if self._placements:
            self._placements[replica].note(dispatch)
        if self._assumed != "nothing":
            self._assume(replica, instance_id, now_s)
        if self._news_s is not None and self._interval_s is not None:
            self._placed[replica].add(instance_id)
            if self._due_s[replica] == math.inf:
                due_s = max(now_s, self._told_s[replica] + self._news_s)
                self._due_s[replica] = due_s + NEWS_DELAY_S

    def _tell(self, replica: int, now_s: float) -> None:
        """A replica's news arrive."""
        self._due_s[replica], self._told_s[replica] = math.inf, now_s - NEWS_DELAY_S
        message = self._exchanges[replica].say_news(self._placed[replica], now_s)
        self._placed[replica].clear()
        if message is None:
            return
        for other, exchange in enumerate(self._exchanges):
            if other != replica:
                exchange.hear(str(replica), message, now_s)
                self._bring_home(other, now_s)

    def _assume(self, replica: int, instance_id: InstanceId, now_s: float) -> None:
        """The others place as this one does."""
        if self._assumed == "alike-at-first" and replica in self._heard:
            return
        scheduler, others = self.schedulers[replica], len(self.schedulers) - 1
        base = self._base.get((replica, instance_id), PeerLoad())
        own = scheduler.members.table[instance_id].own_load(now_s)
        more = (others * max(0.0, now - was) for now, was in zip(own, base, strict=True))
        load = PeerLoad(*more)._replace(observed_s=0.0, modelled_s=0.0, prompts=0, prompt_tokens=0)
        scheduler.members.table[instance_id].set_peer(_EXPECTED, load, now_s)


class Shards(_Several):
    """Schedulers with instances of their own, and a front that draws some of them.

    What a shard says of itself is its drain time: how long all its instances together would take
    for what it has, queue included, at full speed. So shards of different sizes compare.

    Args:
        schedulers: empty ones.
        choices: how many of them are drawn for a request; the one with the lowest drain time gets
            it. As many as there are: the best of all.
        rng: for the draws.
        block: this many instances in a row go to one shard.
        interval_s: between two reports of a shard; they take turns within it. 0: each request is
            decided by the drain times of its moment.
    """

    def __init__(
        self,
        schedulers: Sequence[ReplicaScheduler],
        choices: int,
        rng: np.random.Generator,
        block: int = 1,
        interval_s: float = 0.0,
    ) -> None:
        super().__init__(schedulers)
        self._shards = tuple(schedulers)
        self._choices = choices
        self._rng = rng
        self._interval_s = interval_s
        self._next = itertools.cycle(
            shard for shard in range(len(self.schedulers)) for _ in range(block)
        )
        self._shard_of: dict[InstanceId, int] = {}
        self._drain_s = [0.0] * len(self.schedulers)
        self._reported_s = list(self._drain_s)
        self._next_turn = 0
        # What a request has added to which shard, by its owner while it waits, then by dispatch.
        self._added: dict[Any, tuple[int, float]] = {}

    def add(self, spec: InstanceSpec) -> None:
        """Instances are dealt out in turn."""
        shard = self._shard_of[spec.instance_id] = next(self._next)
        self.schedulers[shard].add(spec)

    def replace(self, spec: InstanceSpec) -> None:
        self.schedulers[self._shard_of[spec.instance_id]].replace(spec)

    def place(
        self,
        request: Request,
        now_s: float,
        *,
        owner: Any = None,
        first: bool = False,
        at_once: bool = False,
    ) -> Ticket | Reject:
        self._report(now_s)
        count = len(self.schedulers)
        drawn: list[int] = self._rng.choice(count, self._choices, replace=False).tolist()
        told_s = self._reported_s if self._interval_s else self._drain_s
        shard = min(drawn, key=told_s.__getitem__)
        scheduler = self._shards[shard]
        ticket = scheduler.place(request, now_s, owner=owner, first=first, at_once=False)
        if not isinstance(ticket, Reject):
            added_s = scheduler.drain_s(request)
            self._added[owner] = shard, added_s
            self._drain_s[shard] += added_s
        return ticket

    def pump(self, now_s: float) -> list[Ticket]:
        self._report(now_s)
        tickets = super().pump(now_s)
        for ticket in tickets:
            added = self._added.pop(ticket.owner)
            if ticket.dispatch is None:
                self._take_off(*added)
            else:
                self._added[ticket.dispatch] = added
        return tickets

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        self._report(now_s)
        super().first_token(dispatch, now_s)

    def settle(
        self, dispatch: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        self._report(now_s)
        if (added := self._added.pop(dispatch, None)) is not None:
            self._take_off(*added)
        return super().settle(dispatch, outcome, now_s, usage)

    def observe_steps(
        self, instance_id: InstanceId, steps: float, duration_s: float, now_s: float
    ) -> bool:
        scheduler = self.schedulers[self._shard_of[instance_id]]
        return scheduler.members.observe_steps(instance_id, steps, duration_s, now_s)

    def observe_cache(
        self,
        instance_id: InstanceId,
        caching: bool | None,
        counters: tuple[float, float] | None,
        now_s: float,
    ) -> None:
        scheduler = self.schedulers[self._shard_of[instance_id]]
        scheduler.observe_cache(instance_id, caching, counters, now_s)

    def _take_off(self, shard: int, added_s: float) -> None:
        # Of sums of floats a residue below 0 may be left.
        self._drain_s[shard] = max(0.0, self._drain_s[shard] - added_s)

    def _report(self, now_s: float) -> None:
        """Nothing has changed since the last event, so a report is of now."""
        if not self._interval_s:
            return
        count = len(self.schedulers)
        last = math.floor(now_s * count / self._interval_s)
        for turn in range(max(self._next_turn, last + 1 - count), last + 1):
            self._reported_s[turn % count] = self._drain_s[turn % count]
        self._next_turn = max(self._next_turn, last + 1)
