"""One request, its candidates and a policy: the decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hetero_gateway.core.policies import Policy, View
from hetero_gateway.core.policies.base import Choice, SmallView
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.scheduling.pool import Eligible
from hetero_gateway.core.scheduling.queue import ModelQueue
from hetero_gateway.core.scheduling.views import Views
from hetero_gateway.core.types import Request

# Up to so many candidates, plain floats are faster than numpy (benchmarks/scheduling/pump.py).
SMALL_POOL = 16

# One for every request: a NamedTuple's own constructor is a function in Python.
_new_decision: Callable[[type[Decision], tuple[Any, ...]], Decision] = tuple.__new__


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
