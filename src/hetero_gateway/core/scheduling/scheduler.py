"""The scheduler: which instance gets a request, when, and why; and the ledger that remembers it.

Section 4.1 of the paper: workload calculator and mapper. The gateway and the simulator drive this
one class. It holds no clock and does no I/O: what is chosen is returned with its reason.

    ticket = scheduler.submit(request, now_s)        # or a Reject
    for ticket in scheduler.pump(now_s): ...         # placed (decision, dispatch), or rejected
    scheduler.first_token(ticket.dispatch, now_s)
    scheduler.settle(ticket.dispatch, outcome, now_s)

With most policies ``pump`` places what was submitted at once. A policy that ``queues`` lets
requests wait here until an instance has room, so whoever drives the scheduler pumps after each
event that may make room: a first token, a settlement, a change of membership or health, a
cancellation, and at ``next_wakeup_s``.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.drift import Drift
from hetero_gateway.core.instances.ledger import Dispatch, Ledger
from hetero_gateway.core.instances.observation import Observations, seconds
from hetero_gateway.core.instances.progress import Outlook, Progress
from hetero_gateway.core.lengths.estimates import ResidualLives
from hetero_gateway.core.policies import Candidates, Policy
from hetero_gateway.core.policies.base import Jit
from hetero_gateway.core.policies.finish_time import MOST_PATIENCE_S, idle_before_drain_s
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.scheduling.pool import Pool, stand_in
from hetero_gateway.core.scheduling.queue import ModelQueue, Ticket
from hetero_gateway.core.types import (
    InstanceId,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
    Request,
)


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
    """

    def __init__(
        self,
        policy: Policy,
        rng: np.random.Generator,
        theta: float = 2.0,
        reference: tuple[float, float] = (512.0, 256.0),
        max_queued: int = 2**31,
        observes: bool = False,
    ) -> None:
        self.ledger = Ledger()
        self.progress = Progress(keeps=observes)
        self.queued = 0
        self._policy = policy
        self._rng = rng
        self._theta = theta
        self._reference = reference
        self._specs: dict[InstanceId, InstanceSpec] = {}
        self._slots: dict[InstanceId, int] = {}
        self._max_queued = max_queued
        self._observes = observes
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
        self._policy.compile(jit)

    # Membership

    def add(self, spec: InstanceSpec) -> None:
        """Add an instance. Raises ValueError when the id is taken."""
        if spec.instance_id in self._specs:
            raise ValueError(f"instance {spec.instance_id!r} exists already")
        self._specs[spec.instance_id] = spec
        self._slots[spec.instance_id] = self.ledger.add_slot()
        self._open_slot(spec)
        self._pools.clear()

    def replace(self, spec: InstanceSpec) -> None:
        """Change an instance's models, profile or availability; its load stays.

        Raises KeyError when there is none.
        """
        before = self._specs[spec.instance_id]
        if before != spec:
            self._specs[spec.instance_id] = spec
            if _constants(before) != _constants(spec):
                self._open_slot(spec)
            self._pools.clear()

    def _open_slot(self, spec: InstanceSpec) -> None:
        slot, profile = self._slots[spec.instance_id], spec.profile
        self._drifts.pop(spec.instance_id, None)
        self.progress.open_slot(slot, _constants(spec))
        if profile is not None and self._observes:
            stated = dict(profile.source.get("error") or {})
            self._drifts[spec.instance_id] = Drift(float(stated.get("decode") or 0.0))

    def remove(self, instance_id: InstanceId) -> list[Dispatch]:
        """Forget an instance; everything on it is settled and returned. KeyError: unknown."""
        del self._specs[instance_id]
        self._drifts.pop(instance_id, None)
        self._pools.clear()
        slot = self._slots.pop(instance_id)
        orphans = self.ledger.remove_slot(slot)
        for dispatch in orphans:
            self.progress.left(dispatch, 0.0)
        self.progress.close_slot(slot)
        return orphans

    def specs(self) -> list[InstanceSpec]:
        return list(self._specs.values())

    def spec(self, instance_id: InstanceId) -> InstanceSpec:
        return self._specs[instance_id]

    def slot(self, instance_id: InstanceId) -> int:
        return self._slots[instance_id]

    def knows(self, model: str) -> bool:
        """Whether any instance, available or not, serves the model."""
        pool = self._pool(model)
        return bool(pool.ids or pool.absent)

    def context_tokens(self, model: str) -> int | None:
        """The longest sequence that any available instance of the model takes; None: unknown."""
        longest = self._pool(model).longest_context_tokens
        return None if longest in (0, math.inf) else int(longest)

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
        pool = self._pool(request.model)
        if not pool.ids:
            return self._no_instance(request.model, pool)
        # A retry was let in before: it does not lose its place to those who came after it.
        if self.queued >= self._max_queued and not first:
            return Reject(
                RejectReason.QUEUE_FULL, f"{self.queued} requests wait for an instance already."
            )
        if not pool.takes_all(request, exclude):
            selection = pool.eligible(request, exclude)
            if isinstance(selection, Reject):
                return selection
        queue = self._queues.get(request.model)
        if queue is None:
            queue = self._queues[request.model] = ModelQueue()
        ticket = Ticket(request, now_s, exclude, owner)
        queue.put(ticket, first=first)
        self.queued += 1
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
        speed = np.array([self.progress.speed(slot) for slot in pool.slots])
        times = speed * _mean_request_times_s(pool, queue, None)
        return len(queue) / float((1 / times).sum())

    def _place(self, ticket: Ticket, queue: ModelQueue, now_s: float) -> bool:
        """Decide on a queue's head. False: it has to wait."""
        result = self._decide(ticket.request, ticket.exclude, now_s, queue)
        if isinstance(result, Reject):
            ticket.rejected = result
            return True
        if result.waits:
            return False
        ticket.decision = result
        ticket.dispatch = self.dispatch(result, now_s)
        return True

    def _pass_unseen(self, now_s: float) -> None:
        while self._unseen and self._unseen[0][0] <= now_s:
            due_s, _, dispatch = heapq.heappop(self._unseen)
            self.progress.first_token(dispatch, due_s, seen=False)

    # Decisions

    def choose(
        self, request: Request, exclude: Collection[InstanceId] = (), now_s: float = 0.0
    ) -> Decision | Reject:
        """Choose an instance for a request; changes nothing but the policy's own turn.

        Args:
            exclude: instances that were tried already.

        Returns:
            The decision; when it ``waits``, no instance has room, and the one that is named would
            be the best if it had.
        """
        return self._decide(request, exclude, now_s, self._queues.get(request.model))

    def _decide(
        self,
        request: Request,
        exclude: Collection[InstanceId],
        now_s: float,
        queue: ModelQueue | None,
    ) -> Decision | Reject:
        pool = self._pool(request.model)
        if not pool.ids:
            return self._no_instance(request.model, pool)
        kept: list[int] | None = None
        excluded = pool.absent
        if not pool.takes_all(request, exclude):
            selection = pool.eligible(request, exclude)
            if isinstance(selection, Reject):
                return selection
            kept, newly_excluded = selection
            excluded += newly_excluded
        candidates = self._candidates(pool, request, kept)
        if self._policy.queues:
            candidates.outlook = self._outlook(request.model, pool, candidates, kept, queue, now_s)
        position = self._policy.choose(request, candidates, self._rng)
        waits = position is None
        if position is None:
            assert candidates.estimates is not None
            position = int(candidates.estimates.cost_s.argmin())
        return Decision(
            candidates.ids[position],
            request,
            position,
            self._policy.charge(candidates, position),
            candidates,
            self._policy,
            excluded,
            waits,
        )

    def _candidates(self, pool: Pool, request: Request, kept: list[int] | None) -> Candidates:
        times = pool.request_times_s(request.prompt_tokens, request.predicted_output_tokens)
        if request.sequences != 1:
            times = times * request.sequences
        ledger, slots, ids = self.ledger, pool.slots, pool.ids
        kv_capacity, capacity, weight = pool.kv_capacity_tokens, pool.capacity, pool.weight
        if kept is not None:
            ids = tuple(ids[i] for i in kept)
            times, slots, kv_capacity = times[kept], slots[kept], kv_capacity[kept]
            capacity, weight = capacity[kept], weight[kept]
        return Candidates(
            ids,
            slots,
            times,
            ledger.load[slots],
            ledger.kv_tokens[slots] / kv_capacity,
            ledger.in_flight[slots],
            capacity,
            weight,
            self._theta,
        )

    def _outlook(
        self,
        model: str,
        pool: Pool,
        candidates: Candidates,
        kept: list[int] | None,
        queue: ModelQueue | None,
        now_s: float,
    ) -> Outlook:
        """What the policy sees of the candidates, and of those that wait with the request."""
        constants, kv_capacity = pool.constants, pool.kv_capacity_tokens
        max_num_seqs, mean_times = pool.max_num_seqs, None
        if queue is not None and queue:
            mean_times = partial(_mean_request_times_s, pool, queue, kept)
        if kept is not None:
            constants, kv_capacity = constants.take(kept, axis=1), kv_capacity[kept]
            max_num_seqs = max_num_seqs[kept]
        return Outlook(
            constants,
            kv_capacity,
            max_num_seqs,
            self.progress.rows(candidates.slots, now_s),
            self.progress.stages(candidates.slots),
            self._residual.table(model),
            pool.profiled or self.progress.observed(candidates.slots.tolist()),
            self._typical_request_time_s(pool, queue, kept),
            0 if queue is None else len(queue),
            0.0 if queue is None else now_s - queue.last_arrival_s,
            math.inf if queue is None else queue.mean_gap_s,
            mean_times,
            pool.stands_in,
        )

    def _typical_request_time_s(
        self, pool: Pool, queue: ModelQueue | None, kept: list[int] | None
    ) -> FloatArray:
        if queue is None or not queue.arrivals:
            lengths = self._reference
        else:
            lengths = (queue.mean_prompt_tokens, queue.mean_output_tokens)
        times = pool.typical_request_time_s(*lengths)
        return times if kept is None else times[kept]

    def explain(self, request: Request, now_s: float = 0.0) -> Decision | Reject:
        """What ``choose`` would say now, without taking the policy's turn or a random draw."""
        policy, rng = self._policy, self._rng
        self._policy, self._rng = copy.deepcopy(policy), copy.deepcopy(rng)
        try:
            return self.choose(request, now_s=now_s)
        finally:
            self._policy, self._rng = policy, rng

    def dispatch(self, decision: Decision, now_s: float = 0.0) -> Dispatch:
        """Put the decision's charge on its instance."""
        candidates, position = decision.candidates, decision.position
        slot = int(candidates.slots[position])
        request = decision.request
        dispatch = self.ledger.dispatch(request, decision.instance_id, slot, decision.charge)
        if not self._policy.queues:
            if self._observes and request.streams:
                in_flight = int(self.ledger.in_flight[slot])
                alone = in_flight == self.progress.requests(slot) + 1
                self.progress.placed(dispatch, now_s, alone=alone)
        else:
            self.progress.placed(dispatch, now_s)
            if not request.streams and candidates.estimates is not None:
                self._dispatched += 1
                due_s = now_s + float(candidates.estimates.ttft_s[position])
                heapq.heappush(self._unseen, (due_s, self._dispatched, dispatch))
        return dispatch

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        """A dispatch's first output token was seen. Only the first call counts."""
        self.progress.first_token(dispatch, now_s)

    def observe_steps(
        self, instance_id: InstanceId, steps: float, duration_s: float, now_s: float
    ) -> bool:
        """The instance made so many decode steps in the last ``duration_s``, while it streamed.

        Returns whether its profile has begun or ceased to drift (``drift``). Raises KeyError when
        there is no such instance.
        """
        slot = self._slots[instance_id]
        if not self._policy.queues and self.progress.requests(slot) != self.ledger.in_flight[slot]:
            # Others are there whose progress nobody sees: the row would say that it is slow.
            duration_s = 0.0
        row = self.progress.observe_steps(slot, steps, duration_s, now_s)
        drift = self._drifts.get(instance_id)
        constants = _constants(self._specs[instance_id])
        if drift is None or constants is None:
            return False
        for first in self.progress.observations(slot).take_fresh():
            drift.observe(first.ttft_s, *seconds(first.terms, constants))
        if row is None:
            return False
        drift.observe(row.duration_s, *seconds(row.terms, constants))
        return drift.judge(row.duration_s, now_s)

    def drift(self, instance_id: InstanceId) -> Drift | None:
        """How far an instance's profile is from what is seen of it; None: it has no profile."""
        return self._drifts.get(instance_id)

    def stand_in(self, instance_id: InstanceId) -> Constants:
        """What an instance without a profile is taken for."""
        given = self.progress.stand_in(self._slots[instance_id])
        return given or stand_in(self._specs[instance_id], ())

    def observations(self, instance_id: InstanceId) -> Observations:
        """What was seen of an instance. Raises KeyError when there is none."""
        return self.progress.observations(self._slots[instance_id])

    def observe_output_tokens(self, model: str, output_tokens: float) -> None:
        """A sequence finished after so many output tokens."""
        self._residual.observe(model, output_tokens)

    def settle(self, dispatch: Dispatch, outcome: Outcome, now_s: float = 0.0) -> bool:
        """Take a dispatch off, once. See ``Ledger.settle``."""
        self.progress.left(dispatch, now_s)
        return self.ledger.settle(dispatch, outcome)

    def _pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        if pool is None:
            members: list[tuple[InstanceSpec, int]] = []
            absent = []
            for spec in self._specs.values():
                if model not in spec.models:
                    continue
                if spec.draining:
                    absent.append((spec, "draining"))
                elif not spec.available:
                    absent.append((spec, "unhealthy"))
                else:
                    members.append((spec, self._slots[spec.instance_id]))
            stand_ins = self._stand_ins(members, absent) if self._policy.queues else None
            pool = Pool(members, absent, self._reference, stand_ins)
            # Names come from clients: only a name that an instance serves is worth keeping.
            if members or absent:
                self._pools[model] = pool
        return pool

    def _stand_ins(
        self, members: list[tuple[InstanceSpec, int]], absent: list[tuple[InstanceSpec, str]]
    ) -> dict[InstanceId, Constants]:
        """Constants for the members without a profile; once given, they stay."""
        result = {}
        for spec, slot in members:
            if spec.profile is None:
                constants = self.progress.stand_in(slot)
                if constants is None:
                    others = [s for s, _ in members] + [s for s, _ in absent]
                    constants = stand_in(spec, others)
                    self.progress.open_slot(slot, constants, stand_in=True)
                result[spec.instance_id] = constants
        return result

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
