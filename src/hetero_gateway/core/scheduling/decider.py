"""One request and its candidates, as a policy sees them; and the decision that comes of it.

Candidates have two forms: plain numbers for small pools, arrays for large ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.lengths.predictors import ResidualLives
from hetero_gateway.core.policies import Policy, View
from hetero_gateway.core.policies.base import Backlog, Choice, Demand, Outlook, SmallView
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.scheduling.pool import Eligible, Pool
from hetero_gateway.core.scheduling.queue import ModelQueue
from hetero_gateway.core.types import Request

# Up to so many candidates, plain floats are faster than numpy (benchmarks/scheduling/pump.py).
SMALL_POOL = 16

# Made for every request: a NamedTuple's own constructor is a function in Python, and takes as long
# again as what it makes.
_new_small_view: Callable[[type[SmallView], tuple[Any, ...]], SmallView] = tuple.__new__
_new_backlog: Callable[[Any, tuple[Any, ...]], Backlog[list[float]]] = tuple.__new__
_new_demand: Callable[[type[Demand], tuple[Any, ...]], Demand] = tuple.__new__
_new_decision: Callable[[type[Decision], tuple[Any, ...]], Decision] = tuple.__new__


class Views:
    """Makes views.

    Args:
        table: the states.
        theta: θ of Eq. (7), above 0.
        reference: (prompt, output) tokens of a typical request while nothing has arrived.
        caches: what is known of prefix caches; None: nothing is to be known.

    ``queues``: the policy wants an ``Outlook``.
    """

    def __init__(
        self,
        table: Table,
        theta: float,
        reference: tuple[float, float],
        caches: PrefixCaches | None = None,
    ) -> None:
        self.residual = ResidualLives(reference[1])
        self._table = table
        self.theta = theta
        self._reference = reference
        self.queues = False
        self._caches = caches

    def small(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float = 0.0,
    ) -> SmallView:
        """The form in plain numbers. ``waited_s``: since the request arrived."""
        pool, kept, _ = eligible
        ids, states, members = pool.ids, pool.states, pool.members
        if kept is not None:
            ids = tuple([ids[i] for i in kept])
            states = tuple([states[i] for i in kept])
            members = tuple([members[i] for i in kept])
        queued, idle_s, gap_s, prompt_tokens, output_tokens, mean_times = self._waiting(
            eligible, now_s, queue
        )
        demand = _demand(request)
        if self._caches is not None and request.prefix is not None:
            demand = self._caches.behind(demand, request, request.prefix, states)
        pool.typical_request_time_s(prompt_tokens, output_tokens, keep=True)
        typical = pool.typical_plain
        if kept is not None:
            typical = [typical[i] for i in kept]
        profiled, stands_in = (True, pool.stands_in) if pool.profiled else _known(eligible)
        backlog = _new_backlog(
            Backlog,
            (
                queued,
                idle_s,
                gap_s,
                mean_times,
                typical,
                self.residual.plain.get(request.model) or self.residual.of(request.model).plain,
                profiled,
                stands_in,
                waited_s,
            ),
        )
        return _new_small_view(
            SmallView,
            (
                request,
                ids,
                states,
                members,
                demand,
                self.theta,
                now_s,
                backlog,
            ),
        )

    def wide(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float = 0.0,
        *,
        keep: bool,
    ) -> View:
        """The form in arrays. ``keep``: a decision is made of it, not only an explanation."""
        pool, kept, _ = eligible
        times = pool.request_times_s(request.prompt_tokens, request.predicted_output_tokens)
        n = request.sequences
        if n != 1:
            times = times * n
        columns = pool.narrowed(kept)
        if columns.at is not None:
            times = times[columns.at]
        load, kv_tokens, in_flight = self._table.loads(columns.where)
        demand = _demand(request)
        if self._caches is not None and request.prefix is not None:
            demand = self._caches.behind_wide(demand, request, request.prefix, columns.where)
        view = View(
            request,
            columns.ids,
            columns.slots,
            demand,
            times,
            load,
            kv_tokens / columns.kv_capacity_tokens,
            in_flight,
            columns.capacity,
            columns.weight,
            self.theta,
        )
        if self.queues:
            view.outlook = Outlook(
                columns.constants,
                columns.kv_capacity_tokens,
                columns.kv_limit_tokens,
                columns.max_num_seqs,
                self._table.rows(columns.where, now_s),
                self._table.stages(columns.where),
                self._backlog(request.model, eligible, now_s, queue, waited_s, keep=keep),
            )
        return view

    def _backlog(
        self,
        model: str,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float,
        *,
        keep: bool,
    ) -> Backlog[FloatArray]:
        pool, kept, _ = eligible
        queued, idle_s, gap_s, prompt_tokens, output_tokens, mean_times = self._waiting(
            eligible, now_s, queue
        )
        typical = pool.typical_request_time_s(prompt_tokens, output_tokens, keep=keep)
        return Backlog(
            queued,
            idle_s,
            gap_s,
            mean_times,
            typical if kept is None else typical[pool.narrowed(kept).at],
            self.residual.table(model),
            *_known(eligible),
            waited_s,
        )

    def _waiting(
        self, eligible: Eligible, now_s: float, queue: ModelQueue | None
    ) -> tuple[int, float, float, float, float, Callable[[], FloatArray] | None]:
        """Of who waits and what arrives, as in ``Backlog``; the typical lengths among it."""
        prompt_tokens, output_tokens = self._reference
        if queue is None:
            return 0, 0.0, math.inf, prompt_tokens, output_tokens, None
        queued, mean_times = queue.size, None
        if queued:
            mean_times = partial(mean_request_times_s, eligible.pool, queue, eligible.kept)
        if queue.arrivals:
            prompt_tokens, output_tokens = queue.mean_prompt_tokens, queue.mean_output_tokens
        idle_s = now_s - queue.last_arrival_s
        return queued, idle_s, queue.mean_gap_s, prompt_tokens, output_tokens, mean_times


class Decider:
    """Shows a policy the candidates, in the cheaper of its two forms, and keeps what it said.

    Args:
        rng: for ties and random policies.
        views: what a policy sees; its θ is that of decisions.
        small_pool: most candidates that are decided on in plain floats.
    """

    __slots__ = ("_most_small", "policy", "rng", "small_pool", "views")

    def __init__(
        self, policy: Policy, rng: np.random.Generator, views: Views, small_pool: int
    ) -> None:
        self.rng = rng
        self.views = views
        self._most_small = small_pool
        self.set_policy(policy)

    def set_policy(self, policy: Policy) -> None:
        """Have another policy choose from now on."""
        self.policy = policy
        self.small_pool = self._most_small if policy.has_small_form else 0
        self.views.queues = policy.queues

    def decide(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float = 0.0,
        *,
        asks: Callable[[View], Choice] | None = None,
    ) -> Decision | None:
        """None: it has to wait. ``asks``: in place of what the policy chooses now."""
        views, policy = self.views, self.policy
        view: View | SmallView
        if asks is not None:
            view = views.wide(request, eligible, now_s, queue, waited_s, keep=False)
            choice: Choice | None = asks(view)
        elif len(eligible.kept or eligible.pool.ids) <= self.small_pool:
            view = views.small(request, eligible, now_s, queue, waited_s)
            choice = policy.choose_small(view, self.rng)
        else:
            view = views.wide(request, eligible, now_s, queue, waited_s, keep=True)
            choice = policy.choose(view, self.rng)
        if choice is None:
            return None
        position, demand, ids = choice.position, view.demand, view.ids
        # Where it is the same for all, it is a number.
        prefill, kv_tokens = demand.prefill_tokens, demand.kv_tokens
        return _new_decision(
            Decision,
            (
                ids[position],
                request,
                choice,
                prefill if isinstance(prefill, float) else float(prefill[position]),
                round(kv_tokens if isinstance(kv_tokens, float) else kv_tokens[position]),
                ids,
                views.theta,
                policy,
                eligible.excluded,
                demand.prefix,
            ),
        )

    def would_choose(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        *,
        takes_turn: bool,
    ) -> Decision:
        """Who would get a request that comes now, whether or not there is room.

        ``takes_turn``: or else neither the policy's turn nor a random draw is taken.
        """
        policy, rng = self.policy, self.rng

        def asks(view: View) -> Choice:
            if takes_turn:
                return policy.would_choose(view, rng)
            turn, drawn = policy.turn(), rng.bit_generator.state
            try:
                return policy.would_choose(view, rng)
            finally:
                policy.take_back(turn)
                rng.bit_generator.state = drawn

        decision = self.decide(request, eligible, now_s, queue, asks=asks)
        assert decision is not None
        return decision


def _known(eligible: Eligible) -> tuple[bool, bool]:
    """Its last ones: ``profiled`` and ``stands_in``."""
    pool, kept, _ = eligible
    profiled = pool.profiled
    if not profiled:
        states = pool.states if kept is None else [pool.states[i] for i in kept]
        profiled = any(state.stands_in and state.observed for state in states)
    return profiled, pool.stands_in


def _demand(request: Request) -> Demand:
    """The same of all."""
    n, prompt = request.sequences, request.prompt_tokens
    # As ``Request.kv_tokens``.
    kv_tokens = n * (prompt + round(request.predicted_output_tokens))
    return _new_demand(Demand, (float(n * prompt), float(kv_tokens), None))


def mean_request_times_s(
    pool: Pool, queue: ModelQueue, kept: list[int] | None = None
) -> FloatArray:
    """T of the mean queued request on each instance, s, as if it fitted."""
    waiting = len(queue)
    times = pool.request_times_s(
        queue.prompt_tokens / waiting, queue.output_tokens / waiting, as_if_it_fitted=True
    )
    return times if kept is None else times[pool.narrowed(kept).at]


def drain_time_s(pool: Pool, queue: ModelQueue) -> float:
    """How long a queue would take with every instance at full speed, s; neither may be empty."""
    speed = np.array([state.speed for state in pool.states])
    return len(queue) / float((1 / (speed * mean_request_times_s(pool, queue))).sum())
