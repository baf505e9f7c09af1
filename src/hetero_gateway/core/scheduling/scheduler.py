"""The scheduler: which instance gets a request, when, and why.

Section 4.1 of the paper: workload calculator and mapper. A facade: the states of the instances, the
pools by model, the queues and the policy each have a module of their own; here they meet. The
gateway and the simulator drive this one class. It holds no clock and does no I/O: what is chosen is
returned with its reason.

    ticket = scheduler.place(request, now_s)        # placed, waiting, or a Reject
    for ticket in scheduler.pump(now_s): ...        # those that have waited: placed, or rejected
    scheduler.first_token(ticket.dispatch, now_s)
    scheduler.settle(ticket.dispatch, outcome, now_s)

With most policies a request is placed at once. A policy that ``queues`` lets requests wait here
until an instance has room, so whoever drives the scheduler pumps after each event that may make
room: a first token, a settlement, a change of membership or health, a cancellation, and at
``next_wakeup_s``. Reading (``explain``, ``snapshot``, ``knows``) changes nothing.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.drift import Drift
from hetero_gateway.core.instances.observation import Observations, seconds
from hetero_gateway.core.instances.snapshot import InstanceSnapshot, snapshot_of
from hetero_gateway.core.instances.state import Dispatch, InstanceState, PeerLoad
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.lengths.predictors import ResidualLives
from hetero_gateway.core.policies import Policy, View
from hetero_gateway.core.policies.base import Backlog, Choice, Demand, Jit, Outlook, SmallView
from hetero_gateway.core.policies.finish_time import MOST_PATIENCE_S, idle_before_drain_s
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.scheduling.pool import Eligible, Pool, stand_in
from hetero_gateway.core.scheduling.queue import Fifo, ModelQueue, QueueDiscipline, Ticket
from hetero_gateway.core.types import (
    InstanceId,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
    Request,
)

# Up to so many candidates, plain floats are faster than numpy (benchmarks/scheduling/pump.py).
SMALL_POOL = 16


class Scheduler:
    """Queues, chooses, dispatches and settles. One per gateway or simulated cluster.

    Args:
        policy: what chooses among the eligible instances.
        theta: θ of Eq. (7), above 0.
        rng: seeded generator for ties and random policies.
        reference: (prompt, output) tokens of the request that fitted capacities are computed for.
        max_queued: most requests that wait at once, over all models.
        observes: check the profiles: keep what is observed and how far they are off, and for that
            the progress of streams also under a policy that does not ask for it.
        discipline: makes the queue of one model.
        small_pool: most candidates that are decided on in plain floats.
    """

    def __init__(
        self,
        policy: Policy,
        rng: np.random.Generator,
        theta: float = 2.0,
        reference: tuple[float, float] = (512.0, 256.0),
        max_queued: int = 2**31,
        observes: bool = False,
        discipline: Callable[[], QueueDiscipline] = Fifo,
        small_pool: int = SMALL_POOL,
    ) -> None:
        self.policy = policy
        self.queued = 0
        self._table = Table(keeps=observes)
        self._rng = rng
        self._theta = theta
        self._reference = reference
        self._specs: dict[InstanceId, InstanceSpec] = {}
        self._max_queued = max_queued
        self._observes = observes
        self._discipline = discipline
        self._small_pool = small_pool if policy.has_small_form else 0
        self._drifts: dict[InstanceId, Drift] = {}
        self._pools: dict[str, Pool] = {}
        self._queues: dict[str, ModelQueue] = {}
        self._residual = ResidualLives(reference[1])
        # (when, tie-break, dispatch): first tokens that nobody will see, by prediction.
        self._unseen: list[tuple[float, int, Dispatch]] = []
        self._dispatched = 0
        self._pumped_s = -math.inf

    def compile(self, jit: Jit) -> None:
        """Have ``jit`` compile what the policy computes with. See ``Policy.compile``."""
        self.policy.compile(jit)

    # Membership

    def add(self, spec: InstanceSpec) -> None:
        """An instance joins. Raises ValueError when the id is taken."""
        if spec.instance_id in self._specs:
            raise ValueError(f"instance {spec.instance_id!r} exists already")
        self._specs[spec.instance_id] = spec
        self._begin(self._table.join(spec.instance_id), spec)
        self._pools.clear()

    def replace(self, spec: InstanceSpec) -> None:
        """Change an instance's models, profile or availability; its load stays.

        Raises KeyError when there is none.
        """
        before = self._specs[spec.instance_id]
        if before != spec:
            self._specs[spec.instance_id] = spec
            if _constants(before) != _constants(spec):
                self._begin(self._table[spec.instance_id], spec)
            self._pools.clear()

    def remove(self, instance_id: InstanceId, now_s: float = 0.0) -> list[Dispatch]:
        """An instance leaves; everything on it is settled and returned. KeyError: unknown."""
        del self._specs[instance_id]
        self._drifts.pop(instance_id, None)
        self._pools.clear()
        return self._table.leave(instance_id, now_s)

    def _begin(self, state: InstanceState, spec: InstanceSpec) -> None:
        """Its constants are new."""
        self._drifts.pop(spec.instance_id, None)
        if spec.profile is not None:
            state.set_constants(spec.profile.constants)
            if self._observes:
                stated = dict(spec.profile.source.get("error") or {})
                self._drifts[spec.instance_id] = Drift(float(stated.get("decode") or 0.0))
        else:
            # Constants that stand in come with the first dispatch; until then nobody asks.
            state.set_constants(None, stands_in=self.policy.queues)
            if state.stands_in:
                state.set_speed(self._table.stand_in_speed())

    def specs(self) -> list[InstanceSpec]:
        return list(self._specs.values())

    def spec(self, instance_id: InstanceId) -> InstanceSpec:
        return self._specs[instance_id]

    def knows(self, model: str) -> bool:
        """Whether any instance, available or not, serves the model."""
        return any(model in spec.models for spec in self._specs.values())

    def context_tokens(self, model: str) -> int | None:
        """The longest sequence that any available instance of the model takes; None: unknown."""
        longest = self._pool(model).longest_context_tokens
        return None if longest in (0, math.inf) else int(longest)

    def outstanding(self, instance_id: InstanceId) -> frozenset[Dispatch]:
        """What is on an instance now. KeyError: unknown."""
        return self._table[instance_id].outstanding()

    def snapshot(self, instance_id: InstanceId) -> InstanceSnapshot:
        """All that there is to show of an instance. KeyError: unknown."""
        return snapshot_of(
            self._specs[instance_id],
            self._table[instance_id],
            self._drifts.get(instance_id),
            queues=self.policy.queues,
        )

    def set_peer(self, instance_id: InstanceId, peer: str, load: PeerLoad | None) -> None:
        """What another gateway has on an instance now: load that is not ours. KeyError: unknown.

        None: the peer is gone, or has nothing there.
        """
        self._table[instance_id].set_peer(peer, load)

    # The queue

    def submit(
        self,
        request: Request,
        now_s: float,
        exclude: Collection[InstanceId] = (),
        *,
        owner: Any = None,
        first: bool = False,
    ) -> Ticket | Reject:
        """Put a request into its model's queue; ``pump`` places it.

        Args:
            exclude: instances that were tried already.
            owner: kept on the ticket.
            first: at the head of the queue, for a retry.

        Returns:
            A ticket, or why nobody can ever take the request as things are.
        """
        eligible = self._eligible(request, exclude)
        if isinstance(eligible, Reject):
            return eligible
        # A retry was let in before: it does not lose its place to those who came after it.
        if self.queued >= self._max_queued and not first:
            return Reject(
                RejectReason.QUEUE_FULL, f"{self.queued} requests wait for an instance already."
            )
        queue = self._queues.get(request.model)
        if queue is None:
            queue = self._queues[request.model] = ModelQueue(self._discipline())
        ticket = Ticket(request, now_s, exclude, owner, eligible)
        queue.put(ticket, first=first)
        self.queued += 1
        return ticket

    def place(
        self,
        request: Request,
        now_s: float,
        exclude: Collection[InstanceId] = (),
        *,
        owner: Any = None,
        first: bool = False,
    ) -> Ticket | Reject:
        """``submit``; and when nobody waits before it, place it in the same step if it can be.

        The ticket says which: ``dispatch``, ``rejected``, or it ``waits``.
        """
        ticket = self.submit(request, now_s, exclude, owner=owner, first=first)
        if self.queued != 1 or isinstance(ticket, Reject):
            return ticket
        self._pumped_s = now_s
        if self._unseen:
            self._pass_unseen(now_s)
        queue = self._queues[request.model]
        if self._place(ticket, queue, now_s):
            queue.drop(ticket)
            self.queued = 0
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Take a ticket out of its queue; False when it is not in it any more."""
        queue = self._queues.get(ticket.request.model)
        if queue is None or not queue.drop(ticket):
            return False
        self.queued -= 1
        return True

    def pump(self, now_s: float) -> list[Ticket]:
        """Place all that can be placed now; returns the tickets that were placed or rejected.

        A queue's head waits for its turn, and those behind it wait for the head. Where queues share
        instances, the head that has waited longest goes first.
        """
        self._pumped_s = now_s
        if self._unseen:
            self._pass_unseen(now_s)
        if not self.queued:
            return []
        done: list[Ticket] = []
        open_queues = [queue for queue in self._queues.values() if queue]
        while open_queues:
            queue = open_queues[0]
            if len(open_queues) > 1:
                queue = min(open_queues, key=lambda q: q.head().enqueued_s)
            ticket = queue.head()
            if not self._place(ticket, queue, now_s):
                open_queues.remove(queue)
                continue
            done.append(ticket)
            queue.drop(ticket)
            self.queued -= 1
            if not queue:
                open_queues.remove(queue)
        return done

    def next_wakeup_s(self) -> float | None:
        """When to pump next although nothing happens, after the last pump; None: never."""
        times = [self._unseen[0][0]] if self._unseen else []
        if self.queued:
            # The drain rule begins, or patience ends: what a queue does with time alone.
            times.append(self._pumped_s + MOST_PATIENCE_S)
            times += [
                q.last_arrival_s + idle_before_drain_s(q.mean_gap_s)
                for q in self._queues.values()
                if q
            ]
        # What the last pump has seen is over: a timer at it would never rest.
        return min((t for t in times if t > self._pumped_s), default=None)

    def queued_for(self, model: str) -> int:
        """How many requests wait for this model."""
        queue = self._queues.get(model)
        return 0 if queue is None else len(queue)

    def drain_time_s(self, model: str) -> float:
        """How long the model's queue would take at full speed, in seconds, by the cost model."""
        pool, queue = self._pool(model), self._queues.get(model)
        if queue is None or not queue or not pool.ids:
            return 0.0
        speed = np.array([state.speed for state in pool.states])
        times = speed * _mean_request_times_s(pool, queue, None)
        return len(queue) / float((1 / times).sum())

    def _place(self, ticket: Ticket, queue: ModelQueue, now_s: float) -> bool:
        """Decide on a queue's head. False: it has to wait."""
        request = ticket.request
        if self._pools.get(request.model) is not ticket.eligible.pool:
            # The membership has changed since it was judged.
            eligible = self._eligible(request, ticket.exclude)
            if isinstance(eligible, Reject):
                ticket.rejected = eligible
                return True
            ticket.eligible = eligible
        decision = self._decide(request, ticket.eligible, now_s, queue)
        if decision is None:
            return False
        ticket.decision = decision
        ticket.dispatch = self.dispatch(decision, now_s)
        return True

    def _pass_unseen(self, now_s: float) -> None:
        while self._unseen and self._unseen[0][0] <= now_s:
            due_s, _, dispatch = heapq.heappop(self._unseen)
            dispatch.state.first_token(dispatch, due_s, seen=False)

    # Decisions

    def choose(
        self, request: Request, exclude: Collection[InstanceId] = (), now_s: float = 0.0
    ) -> Decision | Reject:
        """Choose an instance for a request, whoever waits; takes the policy's turn.

        Args:
            exclude: instances that were tried already.

        Returns:
            The decision; when it ``waits``, no instance has room, and the one that is named would
            be the best if it had.
        """
        eligible = self._eligible(request, exclude)
        if isinstance(eligible, Reject):
            return eligible
        return self._would_choose(request, eligible, now_s, self.policy, self._rng)

    def explain(self, request: Request, now_s: float = 0.0) -> Decision | Reject:
        """What ``choose`` would say now, without taking the policy's turn or a random draw."""
        eligible = self._eligible(request, ())
        if isinstance(eligible, Reject):
            return eligible
        policy, rng = copy.deepcopy(self.policy), copy.deepcopy(self._rng)
        return self._would_choose(request, eligible, now_s, policy, rng)

    def _would_choose(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        policy: Policy,
        rng: np.random.Generator,
    ) -> Decision:
        queue = self._queues.get(request.model)
        view = self._view(request, eligible, now_s, queue, keep=False)
        return self._decision(view, policy.would_choose(view, rng), eligible)

    def _decide(
        self, request: Request, eligible: Eligible, now_s: float, queue: ModelQueue
    ) -> Decision | None:
        """None: it has to wait."""
        policy = self.policy
        if len(eligible.kept or eligible.pool.ids) <= self._small_pool:
            small = self._small_view(request, eligible, now_s, queue)
            choice = policy.choose_small(small, self._rng)
            return None if choice is None else self._decision(small, choice, eligible)
        view = self._view(request, eligible, now_s, queue, keep=True)
        choice = policy.choose(view, self._rng)
        return None if choice is None else self._decision(view, choice, eligible)

    def _decision(self, view: View | SmallView, choice: Choice, eligible: Eligible) -> Decision:
        position, demand = choice.position, view.demand
        return Decision(
            view.ids[position],
            view.request,
            choice,
            float(demand.prefill_tokens[position]),
            round(demand.kv_tokens[position]),
            view.ids,
            self._theta,
            self.policy,
            eligible.excluded,
        )

    def _small_view(
        self, request: Request, eligible: Eligible, now_s: float, queue: ModelQueue
    ) -> SmallView:
        pool, kept, _ = eligible
        ids, states, members = pool.ids, pool.states, pool.members
        if kept is not None:
            ids = tuple([ids[i] for i in kept])
            states = tuple([states[i] for i in kept])
            members = tuple([members[i] for i in kept])
        size, n = len(ids), request.sequences
        demand = Demand(
            [float(n * request.prompt_tokens)] * size, [float(request.kv_tokens)] * size
        )
        backlog = self._backlog(request.model, eligible, now_s, queue, keep=True)
        return SmallView(request, ids, states, members, demand, self._theta, now_s, backlog)

    def _view(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        *,
        keep: bool,
    ) -> View:
        """What the policy sees; ``keep``: a real decision, not only a look."""
        pool, kept, _ = eligible
        times = pool.request_times_s(request.prompt_tokens, request.predicted_output_tokens)
        n = request.sequences
        if n != 1:
            times = times * n
        ids, slots, where = pool.ids, pool.slots, pool.where
        kv_capacity, capacity, weight = pool.kv_capacity_tokens, pool.capacity, pool.weight
        if kept is not None:
            ids = tuple([ids[i] for i in kept])
            times, slots, kv_capacity = times[kept], slots[kept], kv_capacity[kept]
            capacity, weight, where = capacity[kept], weight[kept], slots
        load, kv_tokens, in_flight = self._table.loads(where)
        each = pool.ones[: len(ids)]
        view = View(
            request,
            ids,
            slots,
            Demand(each * (n * request.prompt_tokens), each * request.kv_tokens),
            times,
            load,
            kv_tokens / kv_capacity,
            in_flight,
            capacity,
            weight,
            self._theta,
        )
        if self.policy.queues:
            constants, max_num_seqs = pool.constants, pool.max_num_seqs
            if kept is not None:
                constants, max_num_seqs = constants.take(kept, axis=1), max_num_seqs[kept]
            view.outlook = Outlook(
                constants,
                kv_capacity,
                max_num_seqs,
                self._table.rows(where, now_s),
                self._table.stages(where),
                self._backlog(request.model, eligible, now_s, queue, keep=keep),
            )
        return view

    def _backlog(
        self,
        model: str,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        *,
        keep: bool,
    ) -> Backlog:
        pool, kept, _ = eligible
        queued, idle_s, mean_gap_s, mean_times = 0, 0.0, math.inf, None
        lengths = self._reference
        if queue is not None:
            queued, idle_s, mean_gap_s = len(queue), now_s - queue.last_arrival_s, queue.mean_gap_s
            if queued:
                mean_times = partial(_mean_request_times_s, pool, queue, kept)
            if queue.arrivals:
                lengths = (queue.mean_prompt_tokens, queue.mean_output_tokens)
        typical = pool.typical_request_time_s(*lengths, keep=keep)
        profiled = pool.profiled
        if not profiled:
            states = pool.states if kept is None else [pool.states[i] for i in kept]
            profiled = any(state.stands_in and state.observed for state in states)
        return Backlog(
            queued,
            idle_s,
            mean_gap_s,
            mean_times,
            typical if kept is None else typical[kept],
            self._residual.table(model),
            profiled,
            pool.stands_in,
        )

    # A request's events

    def dispatch(self, decision: Decision, now_s: float = 0.0) -> Dispatch:
        """Put the decision's charge on its instance."""
        state = self._table[decision.instance_id]
        request, choice = decision.request, decision.choice
        if state.constants is None and state.stands_in:
            self._stand_in(state, request.model)
        if self.policy.queues:
            dispatch = state.dispatch(
                request, choice.charge, now_s, decision.kv_tokens, decision.prefill_tokens
            )
            if not request.streams and choice.ttft_s is not None:
                self._dispatched += 1
                due_s = now_s + choice.ttft_s
                heapq.heappush(self._unseen, (due_s, self._dispatched, dispatch))
            return dispatch
        return state.dispatch(
            request,
            choice.charge,
            now_s,
            decision.kv_tokens,
            decision.prefill_tokens,
            tracked=self._observes and request.streams,
            alone=state.in_flight == state.tracked,
        )

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        """A dispatch's first output token was seen. Only the first call counts."""
        dispatch.state.first_token(dispatch, now_s)

    def settle(self, dispatch: Dispatch, outcome: Outcome, now_s: float = 0.0) -> bool:
        """Take a dispatch off, once. See ``InstanceState.settle``."""
        return dispatch.state.settle(dispatch, outcome, now_s)

    def observe_steps(
        self, instance_id: InstanceId, steps: float, duration_s: float, now_s: float
    ) -> bool:
        """The instance made so many decode steps in the last ``duration_s``, while it streamed.

        Returns whether its profile has begun or ceased to drift (``drift``). Raises KeyError when
        there is no such instance.
        """
        state = self._table[instance_id]
        if not self.policy.queues and state.tracked != state.in_flight:
            # Others are there whose progress nobody sees: the row would say that it is slow.
            duration_s = 0.0
        row = state.observe_steps(steps, duration_s, now_s)
        if state.stands_in and row is not None:
            self._table.spread_stand_in_speed()
        drift = self._drifts.get(instance_id)
        constants = _constants(self._specs[instance_id])
        if drift is None or constants is None:
            return False
        for first in state.observations.take_fresh():
            drift.observe(first.ttft_s, *seconds(first.terms, constants))
        if row is None:
            return False
        drift.observe(row.duration_s, *seconds(row.terms, constants))
        return drift.judge(row.duration_s, now_s)

    def observe_output_tokens(self, model: str, output_tokens: float) -> None:
        """A sequence finished after so many output tokens."""
        self._residual.observe(model, output_tokens)

    def drift(self, instance_id: InstanceId) -> Drift | None:
        """How far an instance's profile is from what is seen of it; None: it has no profile."""
        return self._drifts.get(instance_id)

    def stand_in(self, instance_id: InstanceId) -> Constants:
        """What an instance without a profile is taken for."""
        state = self._table[instance_id]
        if state.stands_in and state.constants is not None:
            return state.constants
        return stand_in(self._specs[instance_id], ())

    def observations(self, instance_id: InstanceId) -> Observations:
        """What was seen of an instance. Raises KeyError when there is none."""
        return self._table[instance_id].observations

    # Pools

    def _eligible(self, request: Request, exclude: Collection[InstanceId]) -> Eligible | Reject:
        pool = self._pools.get(request.model) or self._pool(request.model)
        if not pool.ids:
            return self._no_instance(request.model, pool)
        return pool.eligible(request, exclude)

    def _pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        if pool is None:
            members: list[tuple[InstanceSpec, InstanceState]] = []
            absent = []
            for spec in self._specs.values():
                if model not in spec.models:
                    continue
                if spec.draining:
                    absent.append((spec, "draining"))
                elif not spec.available:
                    absent.append((spec, "unhealthy"))
                else:
                    members.append((spec, self._table[spec.instance_id]))
            stand_ins = None
            if self.policy.queues:
                others = [s for s, _ in members] + [s for s, _ in absent]
                stand_ins = {
                    spec.instance_id: state.constants or stand_in(spec, others)
                    for spec, state in members
                    if spec.profile is None
                }
            pool = Pool(members, absent, self._reference, stand_ins)
            # Names come from clients: only a name that an instance serves is worth keeping.
            if members or absent:
                self._pools[model] = pool
        return pool

    def _stand_in(self, state: InstanceState, model: str) -> None:
        """What its pool takes it for is what it is taken for from now on, in every pool."""
        pool = self._pool(model)
        member = pool.members[pool.ids.index(state.instance_id)]
        speed = state.speed
        state.set_constants(Constants(*member[:8]), stands_in=True)
        state.set_speed(speed)
        self._pools = {model: pool}

    def _no_instance(self, model: str, pool: Pool) -> Reject:
        # An instance that has not answered yet may serve any name.
        if pool.absent or any(not spec.models for spec in self._specs.values()):
            why = ", ".join(f"{spec.instance_id} {why}" for spec, why in pool.absent[:5])
            detail = f"no instance of the model {model!r} can take requests now"
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, detail + (f": {why}" if why else ""))
        return Reject(RejectReason.UNKNOWN_MODEL, f"The model `{model}` does not exist.")


def _mean_request_times_s(pool: Pool, queue: ModelQueue, kept: list[int] | None) -> FloatArray:
    """T of the mean queued request on each instance, as if it fitted."""
    waiting = len(queue)
    times = pool.request_times_s(
        queue.prompt_tokens / waiting, queue.output_tokens / waiting, as_if_it_fitted=True
    )
    return times if kept is None else times[kept]


def _constants(spec: InstanceSpec) -> Constants | None:
    return None if spec.profile is None else spec.profile.constants
