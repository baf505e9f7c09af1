"""The scheduler: which instance gets a request, when, and why.

Section 4.1 of the paper: workload calculator and mapper. A facade: membership, views, queues and
the policy each have a module of their own; here they meet. The gateway and the simulator drive this
one class. It holds no clock and does no I/O: decisions are returned with their reason.

    ticket = scheduler.place(request, now_s)        # placed, waiting, or a Reject
    for ticket in scheduler.pump(now_s): ...        # those that have waited: placed, or rejected
    scheduler.first_token(ticket.dispatch, now_s)
    scheduler.settle(ticket.dispatch, outcome, now_s)

With most policies a request is placed at once. A policy that ``queues`` lets requests wait here
until an instance has room, so the caller pumps after each event that may make room: a first token,
a settlement, a change of membership or health, a cancellation, and at ``next_wakeup_s``. Reading
(``explain``, ``snapshot``, ``knows``) changes nothing.

A request's numbers come from outside, so the arithmetic, or a policy, may fail on them. They are
checked on entry, and an exception while placing a request is kept on its ticket (``failed``) for
its owner, while the others go on. Nothing of such a request is left behind: a dispatch is made
completely or not at all.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from hetero_gateway.core.instances.dispatch import NO_PEERS, Dispatch
from hetero_gateway.core.policies import Policy
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.policies.finish_time import MOST_PATIENCE_S, drain_s, idle_before_drain_s
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.decider import Decider, Views
from hetero_gateway.core.scheduling.disciplines import Clients, Fifo, Shortest
from hetero_gateway.core.scheduling.legs import Legs
from hetero_gateway.core.scheduling.members import Members
from hetero_gateway.core.scheduling.pool import Eligible, Pool
from hetero_gateway.core.scheduling.probes import Probes, sent
from hetero_gateway.core.scheduling.queue import ModelQueue, QueueDiscipline, Ticket
from hetero_gateway.core.scheduling.restraints import Restraints
from hetero_gateway.core.scheduling.shedding import MARGIN, WaitLimits, predicted_wait_s
from hetero_gateway.core.types import (
    COMPLETED,
    DECODE,
    Draws,
    InstanceId,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
    Usage,
)

# The default limit of waiting requests.
MOST_QUEUED: Final = 2**31
# Lines of a queue that are examined in one pump: contexts and caches come in a few sizes. Retries
# may have many lines, and each costs a decision.
_MOST_LINES: Final = 8
# Queues of this many models are kept although nothing waits in them and no instance serves them.
_MOST_QUEUES: Final = 256
# A request of more sequences than an engine runs at once fills it for minutes. It lets the others
# pass for this long rather than take the last instance that has room.
_CROWD_WAITS_S: Final = 30.0


class Fresh(NamedTuple):
    """The inputs of placements of a scheduler that has placed nothing.

    ``pool``: of the one model that is asked for.
    """

    policy: Policy
    rng: Draws
    theta: float
    pool: Pool
    reference: tuple[float, float]
    discipline: QueueDiscipline


class Scheduler:
    """Queues, chooses, dispatches and settles. One per gateway or simulated cluster.

    ``members``: the instances, and their pools by model. ``legs``: requests that two instances
    share.

    Args:
        policy: chooses among the eligible instances.
        theta: θ of Eq. (7), above 0.
        rng: seeded generator for ties and random policies.
        reference: (prompt, output) tokens of the request that fitted capacities are computed for.
        max_queued: most requests that wait at once, over all models.
        observes: check the profiles: keep observations and how far they are off, and for that
            follow the progress of streams even under a policy that does not need it.
        discipline: decides which waiting request is next; None: first come, first served.
        prefix_cache: track the prefix caches of instances, for requests with keys.
    """

    def __init__(
        self,
        policy: Policy,
        rng: Draws,
        theta: float = 2.0,
        reference: tuple[float, float] = (512.0, 256.0),
        max_queued: int = MOST_QUEUED,
        observes: bool = False,
        discipline: QueueDiscipline | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.caches = PrefixCaches() if prefix_cache else None
        self.queued = 0
        queues = policy.queues
        self.members = Members(reference, stand_ins=queues, observes=observes)
        views = Views(theta, reference, self.caches)
        self.residual = views.residual  # expected remaining tokens of streams
        self._decider = Decider(policy, rng, views)
        # Chooses among the eligible instances; ``set_policy`` changes it.
        self.policy = policy
        self.restraints = Restraints()
        self.legs = Legs(self._decider, self.members, self.restraints, self.caches)
        self._reference = reference
        self._max_queued = max_queued
        self._waits: WaitLimits | None = None
        self._observes = observes
        self._discipline: QueueDiscipline = Fifo() if discipline is None else discipline
        self._shares = discipline if isinstance(discipline, Clients) else None
        self.queues: dict[str, ModelQueue] = {}
        self._most_queues = _MOST_QUEUES
        # (when, tie-break, dispatch): unseen first tokens, by prediction.
        self._unseen: list[tuple[float, int, Dispatch]] = []
        self._dispatched = 0
        self._probes = Probes(self.members, active=queues)
        self._pumped_s = -math.inf
        # Called with (dispatch, now_s) when a request was sent. It must not raise.
        self.on_dispatch: Callable[[Dispatch, float], None] | None = None

    def __repr__(self) -> str:
        return f"<Scheduler {self.policy.name}: {self.queued} waiting; {self.members!r}>"

    def fresh(self, model: str) -> Fresh | None:
        """The inputs of this model's placements, for callers that do without the scheduler.

        Returns ``None`` once anything has been placed, or if other settings affect placement.
        """
        pool = self.members.pool(model)
        if (
            self.queues
            or self.legs.pairs is not None
            or self._observes
            or self.restraints.by_id
            or not isinstance(self._discipline, Fifo)
            or type(self._discipline) not in (Fifo, Shortest)
            or not self._discipline.unused
            or self._max_queued < MOST_QUEUED
            or self.on_dispatch is not None
            or not pool.ids
            or len(pool.ids) < len(self.members.specs)
            or any(spec.profile is None or spec.max_model_len for spec in pool.specs)
            or any(state.in_flight or state.peers is not NO_PEERS for state in pool.states)
        ):
            return None
        by = self._decider
        return Fresh(by.policy, by.rng, by.views.theta, pool, self._reference, self._discipline)

    def set_policy(self, policy: Policy) -> None:
        """Use another policy from now on. Pump afterwards.

        Loads, speeds and waiting requests stay; outstanding charges are taken off as they were
        made. Under a policy that does not queue, the next pump places everything that waits.
        """
        queues = policy.queues
        self.policy = policy
        self.legs.decide_by(policy)
        self.members.set_stand_ins(queues)
        self._probes.activate(queues)

    def set_limits(self, theta: float, max_queued: int, waits: WaitLimits | None = None) -> None:
        """Set θ of Eq. (7), above 0, and how many requests may wait, and how long."""
        self._decider.views.theta = theta
        self._max_queued = max_queued
        self._waits = waits if waits is not None and waits.any else None

    def set_discipline(self, discipline: QueueDiscipline) -> None:
        """Use another discipline, also for requests that already wait. Pump afterwards.

        Past service of clients does not count against them.
        """
        self._discipline = discipline
        self._shares = discipline if isinstance(discipline, Clients) else None
        for queue in self.queues.values():
            queue.set_discipline(discipline)

    # Membership

    def add(self, spec: InstanceSpec) -> None:
        """Add an instance. Raises ValueError if the id is taken."""
        self.members.join(spec)
        if self.caches is not None:
            self.caches.join(spec, self.members.table[spec.instance_id].slot)

    def replace(self, spec: InstanceSpec) -> None:
        """Change an instance's models, profile or availability; its load stays.

        Raises KeyError if there is none.
        """
        before = self.members.specs[spec.instance_id]
        self.members.change(spec)
        if self.caches is not None:
            self.caches.change(before, spec)

    def remove(self, instance_id: InstanceId, now_s: float = 0.0) -> list[Dispatch]:
        """Remove an instance; everything on it is settled and returned. KeyError: unknown."""
        self.restraints.by_id.pop(instance_id, None)
        if self._shares is not None:
            for dispatch in self.members.table[instance_id].outstanding():
                self._shares.settled(dispatch, None, 0.0)
        orphans = self.members.leave(instance_id, now_s)
        if self.caches is not None:
            self.caches.leave(instance_id)
        return orphans

    # The queue

    def _forget_queues(self) -> None:
        """Forget queues of models that no instance serves any more, as unloaded adapters."""
        self.queues = {
            m: queue for m, queue in self.queues.items() if queue or self.members.knows(m)
        }
        self._most_queues = max(_MOST_QUEUES, 2 * len(self.queues))

    def place(
        self,
        request: Request,
        now_s: float,
        exclude: Collection[InstanceId] = (),
        *,
        owner: Any = None,
        first: bool = False,
        at_once: bool = True,
    ) -> Ticket | Reject:
        """Submit a request, and place it at once if nothing waits before it and it can be.

        The ticket shows the result: ``dispatch``, ``rejected``, ``failed``, or it ``waits``.

        Args:
            at_once: False: it waits for the next pump in any case.
        """
        eligible: Eligible | Reject | None = None
        pool = self.members.pools.get(request.model)
        if pool is not None and pool.ids:
            eligible = pool.eligible(request, exclude)
        if not isinstance(eligible, Eligible):
            judged = self.members.judge(request, exclude)
            if isinstance(judged, Reject):
                return judged
            request, eligible = judged
        ticket = Ticket(request, now_s, exclude, owner, eligible)
        if at_once and not self.policy.queues:
            # Nothing ever waits, and arrivals are of no interest: no queue has to know.
            self._place(ticket, None, now_s)
            return ticket
        # A retry was admitted before: it does not lose its place to later arrivals.
        if self.queued >= self._max_queued and not first:
            return Reject(
                RejectReason.QUEUE_FULL, f"{self.queued} requests wait for an instance already."
            )
        queue = self.queues.get(request.model)
        if self._waits is not None and self.queued and not first:
            wait_s = self.predicted_wait_s(request, now_s)
            most_s = self._waits.of(request, queue.first_token_s if queue else 0.0)
            if wait_s > MARGIN * most_s:
                detail = f"It would wait for about {wait_s:.3g} s; at most {most_s:g} s is wanted."
                return Reject(RejectReason.WAIT_TOO_LONG, detail, wait_s)
        if queue is None:
            if len(self.queues) >= self._most_queues:
                self._forget_queues()
            queue = ModelQueue(request.model, self._discipline)
            self.queues[request.model] = queue
        queue.arrive(ticket, first=first)
        self.queued += 1
        if self.queued > 1 or not at_once:
            queue.wait(ticket)
            return ticket
        self._pumped_s = now_s
        if self._unseen and self._unseen[0][0] <= now_s:
            self._pass_unseen(now_s)
        if self._place(ticket, queue, now_s):
            queue.passed(ticket, now_s)
            self.queued = 0
        else:
            queue.wait(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Take a ticket out of its queue; False if it is no longer in it."""
        queue = self.queues.get(ticket.request.model)
        if queue is None or not queue.drop(ticket):
            return False
        self.queued -= 1
        return True

    def pump(self, now_s: float) -> list[Ticket]:
        """Place everything that can be placed now; returns the tickets that no longer wait.

        A queue's head waits for its turn, and those behind it wait for the head, unless they can
        use instances that it cannot (``_let_pass``). If queues share instances, the head that has
        waited longest goes first.
        """
        self._pumped_s = now_s
        if self._unseen and self._unseen[0][0] <= now_s:
            self._pass_unseen(now_s)
        if not self.queued:
            return []
        done: list[Ticket] = []
        open_queues = [queue for queue in self.queues.values() if queue]
        while open_queues:
            queue = open_queues[0]
            if len(open_queues) > 1:
                queue = min(open_queues, key=lambda q: q.turn(q.head(now_s), now_s))
            ticket = queue.head(now_s)
            if self.members.pools.get(ticket.request.model) is not queue.pool:
                self._judge_anew(queue, done)
            elif self._place(ticket, queue, now_s):
                self._leave(ticket, queue, now_s, done)
            else:
                if queue.mixed:
                    self._let_pass(queue, now_s, done)
                open_queues.remove(queue)
                continue
            if not queue:
                open_queues.remove(queue)
        return done

    def _leave(self, ticket: Ticket, queue: ModelQueue, now_s: float, done: list[Ticket]) -> None:
        queue.went(ticket, now_s)
        self.queued -= 1
        done.append(ticket)

    def _judge_anew(self, queue: ModelQueue, done: list[Ticket]) -> None:
        """Judge a queue's tickets again: the membership has changed."""
        members = self.members

        def judge(ticket: Ticket) -> bool:
            judged = members.judge(ticket.request, ticket.exclude)
            if isinstance(judged, Reject):
                ticket.rejected, ticket.waits = judged, False
                return False
            request, ticket.eligible = judged
            if request is not ticket.request:
                queue.change(ticket, request)
            return True

        refused = queue.stand_anew(members.pool(queue.model), judge)
        self.queued -= len(refused)
        done += refused

    def _let_pass(self, queue: ModelQueue, now_s: float, done: list[Ticket]) -> None:
        """A queue's head has to wait: place tickets behind it that can use other instances.

        What any ticket ahead may use is kept for it, so being overtaken delays no one.
        """
        kept_free: set[int] = set()
        turns = queue.heads(_MOST_LINES, now_s)
        held_up = turns.pop(0)
        if not self._holds_back(held_up, now_s):
            kept_free.update(held_up.eligible.positions())
        while turns and len(kept_free) < len(held_up.eligible.pool.ids):
            ticket = turns.pop(0)
            eligible = ticket.eligible.without(kept_free, "kept for who waits longer")
            if eligible is None:
                continue
            if self._place(ticket, queue, now_s, eligible):
                self._leave(ticket, queue, now_s, done)
                following = queue.next_in_line(ticket.line)
                if following is not None:
                    insort(turns, following, key=lambda t: queue.turn(t, now_s))
            elif not self._holds_back(ticket, now_s):
                kept_free.update(ticket.eligible.positions())

    def _holds_back(self, ticket: Ticket, now_s: float) -> bool:
        """Whether it waits for the sake of others, so that nothing has to be kept free for it.

        A crowd does, for a while, rather than take the last instance that others can use; so does a
        request whose client has more than its part of the seats.
        """
        if self._shares is not None and self._shares.leaves_room(ticket, now_s):
            return True
        return self._crowds(ticket, now_s)

    def _crowds(self, ticket: Ticket, now_s: float) -> bool:
        """Whether it is a crowd, and would take the last instance that has room."""
        if ticket.line is None or not ticket.line[1] or now_s - ticket.enqueued_s >= _CROWD_WAITS_S:
            return False
        pool, free = ticket.eligible.pool, 0
        for state, member in zip(pool.states, pool.members, strict=True):
            free += state.waiting + state.streaming < member.seats
        return len(pool.ids) > 1 and free < 2

    def next_wakeup_s(self) -> float | None:
        """When to pump next without an event, as of the last pump; None: never."""
        times = [self._unseen[0][0]] if self._unseen else []
        if self.queued:
            # The drain rule begins, or patience ends: what a queue does with time alone.
            times.append(self._pumped_s + MOST_PATIENCE_S)
            times += [
                q.last_arrival_s + idle_before_drain_s(q.mean_gap_s)
                for q in self.queues.values()
                if q
            ]
            if self.restraints.by_id:
                times.append(self.restraints.next_change_s(self._pumped_s))
        # The last pump's moment is past: a timer at it would never rest.
        return min((t for t in times if t > self._pumped_s), default=None)

    def predicted_wait_s(self, request: Request, now_s: float) -> float:
        """How long a request that comes now would wait here, behind those that wait already."""
        queue = self.queues.get(request.model)
        if not queue:
            return 0.0
        return predicted_wait_s(queue, request, self.drain_time_s(request.model), now_s)

    def drain_time_s(self, model: str) -> float:
        """How long the model's queue would take at full speed, in seconds, by the cost model."""
        pool, queue = self.members.pool(model), self.queues.get(model)
        if not queue or not pool.ids:
            return 0.0
        return drain_s(pool.states, pool.members, queue.mean_lengths(), queue.size)

    def _place(
        self,
        ticket: Ticket,
        queue: ModelQueue | None,
        now_s: float,
        eligible: Eligible | None = None,
    ) -> bool:
        """Decide on a ticket, among all eligible instances or only these. False: it has to wait."""
        try:
            if ticket.line is not None and self._crowds(ticket, now_s):
                return False
            takers, trial = eligible or ticket.eligible, None
            if self._shares is not None and self._shares.leaves_room(ticket, now_s):
                roomy = takers.roomy(ticket.request, self._shares.reserve)
                if roomy is None:
                    return False
                eligible = takers = roomy
            waited_s = now_s - ticket.enqueued_s
            if self.restraints.by_id:
                judged = self._judge_now(ticket, eligible, now_s)
                if judged is None or isinstance(judged, Reject):
                    ticket.rejected, ticket.waits = judged, judged is None
                    return judged is not None
                takers = judged
                if eligible is None and not ticket.exclude:
                    trial = self.restraints.trial(takers)
            probes, decision = self._probes, None
            if now_s >= probes.next_s:
                probes.revise(now_s)
            if trial is not None:
                decision = self._decider.decide(ticket.request, trial, now_s, queue, waited_s)
            elif probes.doubted and (one := probes.due(takers, now_s)) is not None:
                decision = self._decider.decide(ticket.request, one, now_s, queue, waited_s)
                if decision is not None:
                    sent(probes, now_s)
            if decision is None:
                decision = self._decider.decide(ticket.request, takers, now_s, queue, waited_s)
            if decision is None:
                return False
            if decision.choice.prefill_position >= 0:
                ticket.prefill = self.legs.dispatch(decision, now_s)
                if self.on_dispatch is not None:
                    self.on_dispatch(ticket.prefill, now_s)
            ticket.dispatch = self.dispatch(decision, now_s)
            ticket.decision, ticket.waits = decision, False
        except Exception as error:
            # The boundary between requests: left at the head, it would fail all that come after.
            if ticket.prefill is not None:
                self.settle(ticket.prefill, Outcome.UPSTREAM_ERROR, now_s)
                ticket.prefill = None
            ticket.failed, ticket.waits = error, False
        return True

    def _judge_now(
        self, ticket: Ticket, among: Eligible | None, now_s: float
    ) -> Eligible | Reject | None:
        """Leave out eligible instances that had better not get it now; None: it has to wait."""
        if among is None:
            return self.restraints.judge(ticket.eligible, ticket.request, ticket.exclude, now_s)
        # The others are only kept free: that is no reason to use one that fails.
        return self.restraints.strictly(among, ticket.request, now_s)

    def _pass_unseen(self, now_s: float) -> None:
        while self._unseen and self._unseen[0][0] <= now_s:
            due_s, _, dispatch = heapq.heappop(self._unseen)
            if dispatch.outcome is None:  # most have ended by then
                dispatch.state.first_token(dispatch, due_s, seen=False)

    # Decisions

    def choose(
        self, request: Request, exclude: Collection[InstanceId] = (), now_s: float = 0.0
    ) -> Decision | Reject:
        """Choose an instance for a request, regardless of the queue; takes the policy's turn.

        Args:
            exclude: instances that were tried already.

        Returns:
            The decision; if it ``waits``, no instance has room, and the named one would be the
            best.

        Raises:
            ValueError: a number of the request is out of bounds.
        """
        judged = self._judged(request, exclude, now_s)
        if isinstance(judged, Reject):
            return judged
        return self._would_choose(*judged, now_s)

    def explain(self, request: Request, now_s: float = 0.0) -> Decision | Reject:
        """What ``choose`` would return now, without taking the policy's turn or a random draw."""
        judged = self._judged(request, (), now_s)
        if isinstance(judged, Reject):
            return judged
        return self._would_choose(*judged, now_s, takes_turn=False)

    def _judged(
        self, request: Request, exclude: Collection[InstanceId], now_s: float
    ) -> tuple[Request, Eligible] | Reject:
        """As ``Members.judge``, without the instances that had better not get it now."""
        judged = self.members.judge(request, exclude)
        if isinstance(judged, Reject) or judged[0] is not request or not self.restraints.by_id:
            return judged
        eligible = self.restraints.judge(judged[1], request, exclude, now_s)
        return eligible if isinstance(eligible, Reject) else (request, eligible)

    def _would_choose(
        self, request: Request, eligible: Eligible, now_s: float, *, takes_turn: bool = True
    ) -> Decision:
        queue = self.queues.get(request.model)
        return self._decider.would_choose(request, eligible, now_s, queue, takes_turn=takes_turn)

    # A request's events

    def dispatch(self, decision: Decision, now_s: float = 0.0) -> Dispatch:
        """Put the decision's charge on its instance. ValueError: it cannot be charged."""
        state = self.members.table.states[decision.instance_id]
        request, choice, queues = decision.request, decision.choice, self.policy.queues
        if state.constants is None and state.stands_in:
            self.members.stand_in_for(state, request.model)
        due_s = now_s + (choice.ttft_s or 0.0)
        if queues and not due_s < math.inf:
            # In a heap, a NaN would keep all others there for ever.
            raise ValueError(f"a first token is predicted in {choice.ttft_s} s")
        dispatch = state.dispatch(
            request,
            choice.charge,
            now_s,
            decision.kv_tokens,
            decision.prefill_tokens,
            tracked=queues or (self._observes and request.streams),
            alone=queues or state.in_flight == state.tracked,
        )
        if choice.ttft_s is not None:
            dispatch.expected_s = choice.ttft_s
        if choice.prefill_position >= 0:
            # Its first token says nothing about a prompt computed elsewhere, and is not owed until
            # it is asked for (``Legs.asked``).
            dispatch.leg, dispatch.before, dispatch.sent_s = DECODE, None, math.inf
        if self.restraints.by_id:
            self.restraints.sent(dispatch, now_s)
        if self.on_dispatch is not None:
            self.on_dispatch(dispatch, now_s)
        keys = request.prefix
        if keys is not None and self.caches is not None:
            if decision.prefix is not None:
                dispatch.match_tokens = decision.prefix.match_tokens[choice.position]
            self.caches.placed(dispatch, keys)
        if queues and not request.streams and choice.ttft_s is not None:
            self._dispatched += 1
            dispatch.predicted_s = (now_s, choice.ttft_s)
            heapq.heappush(self._unseen, (due_s, self._dispatched, dispatch))
        return dispatch

    def adopt(
        self, request: Request, instance_id: InstanceId, now_s: float
    ) -> tuple[Decision, Dispatch]:
        """Charge a request that is on an instance already, whatever the instance's state.

        The policy's turn and its random draws are not taken, and nothing is learnt from it about
        the instance's speed. Raises KeyError if there is no such instance.
        """
        eligible = self.members.alone(instance_id, request.model)
        decision = self._would_choose(request, eligible, now_s, takes_turn=False)
        dispatch = self.dispatch(decision, now_s)
        dispatch.before = None
        return decision, dispatch

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        """Note a dispatch's first output token. Only the first call counts."""
        if self.queued:
            self._decider.freed.append(dispatch.instance_id)
        dispatch.state.first_token(dispatch, now_s)

    def settle(
        self,
        dispatch: Dispatch,
        outcome: Outcome,
        now_s: float = 0.0,
        usage: Usage | None = None,
        unseen_tokens: float | None = None,
    ) -> bool:
        """Take a dispatch off, once. See ``InstanceState.settle``.

        ``unseen_tokens``: of a complete answer that did not stream, to be learnt from first.
        """
        keys = dispatch.request.prefix
        if keys is not None and self.caches is not None and dispatch.outcome is None:
            self.caches.settled(dispatch, keys, outcome)
        state = dispatch.state
        if unseen_tokens:
            state.observe_answer(dispatch, unseen_tokens, now_s, usage)
        if self._shares is not None and dispatch.turn is not None:
            cut = outcome is not COMPLETED and dispatch.tracked
            made_tokens = state.made_tokens(dispatch, now_s) if cut else None
            self._shares.settled(dispatch, usage, made_tokens)
        if not state.settle(dispatch, outcome, now_s, usage):
            return False
        if self.queued:
            self._decider.freed.append(state.instance_id)
        if keys is not None and self.caches is not None and outcome is COMPLETED:
            if dispatch.hit_tokens is not None or state.prefix.counts:
                hits = state.prefix.believed_hits(dispatch)
                if hits is not None:
                    self.caches.observe(dispatch, hits)
        return True

    def observe_cache(
        self,
        instance_id: InstanceId,
        caching: bool | None,
        counters: tuple[float, float] | None,
        now_s: float,
    ) -> None:
        """Note whether an instance's engine has a prefix cache, and the tokens it has looked for
        and found there since it started. KeyError: unknown.

        ``caching`` None: not reported. ``counters`` None: not known (any more).
        """
        renewed = self.members.table[instance_id].observe_cache(caching, counters, now_s)
        if self.caches is not None:
            self.caches.switch(instance_id, on=caching is not False)
            if renewed:
                self.caches.forget(instance_id)
