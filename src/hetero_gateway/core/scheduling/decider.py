"""Presents one request and its candidates to a policy, and makes the decision of its answer."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from hetero_gateway.core.lengths.predictors import ResidualLives
from hetero_gateway.core.policies import Policy, View
from hetero_gateway.core.policies.base import Backlog, Decision
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.pool import Eligible
from hetero_gateway.core.scheduling.queue import ModelQueue
from hetero_gateway.core.types import Draws, InstanceId

# Of more candidates than this, a policy that ``samples`` is shown the fastest, those that have just
# become free, and this many drawn ones: each costs the same to look at, and the best of 24 is as
# good as the best of all (benchmarks/scheduling/shards.py).
MOST_CANDIDATES: Final = 48
_DRAWN: Final = 24
_MOST_FREED: Final = 8
# If none of a sample can take a request, all are examined, at most this often: some have room that
# no event reports.
_LOOKS_AT_ALL_EVERY_S: Final = 0.1


class Views:
    """Makes views.

    Args:
        theta: θ of Eq. (7), above 0.
        reference: (prompt, output) tokens of a typical request while nothing has arrived.
        caches: knowledge of prefix caches; None: not used.

    ``queues``: the policy needs a ``Backlog``.
    """

    def __init__(
        self, theta: float, reference: tuple[float, float], caches: PrefixCaches | None = None
    ) -> None:
        self.residual = ResidualLives(reference[1])
        self.theta = theta
        self._reference = reference
        self.queues = False
        self._caches = caches

    def view(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float = 0.0,
        *,
        keep: bool = True,
    ) -> View:
        """Make the view of a request.

        Args:
            waited_s: since the request arrived.
            keep: it leads to a decision, not only to an explanation.
        """
        pool, kept = eligible.pool, eligible.kept
        ids, states, members = pool.ids, pool.states, pool.members
        if kept is not None:
            ids = tuple([ids[i] for i in kept])
            states = tuple([states[i] for i in kept])
            members = tuple([members[i] for i in kept])
        # The same for all; kv_tokens as ``Request.kv_tokens``.
        n, prompt, keys = request.sequences, request.prompt_tokens, request.prefix
        kv_tokens = n * (prompt + round(request.predicted_output_tokens))
        prefix = backlog = None
        if self._caches is not None and keys is not None:
            prefix = self._caches.cached(prompt, keys, states)
        if prefix is None:
            prefill_tokens = [float(n * prompt)] * len(ids)
        else:
            prefill_tokens = [n * (prompt - tokens) for tokens in prefix.cached_tokens]
        if self.queues:
            backlog = self._backlog(request.model, eligible, now_s, queue, waited_s, keep)
        return View(
            request, ids, states, members, prefill_tokens, kv_tokens, prefix, self.theta, now_s,
            backlog,
        )  # fmt: skip

    def _backlog(
        self,
        model: str,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float,
        keep: bool,
    ) -> Backlog:
        pool, kept = eligible.pool, eligible.kept
        prompt_tokens, output_tokens = self._reference
        queued, idle_s, gap_s, mean_lengths = 0, 0.0, math.inf, None
        if queue is not None:
            queued, gap_s, idle_s = queue.size, queue.mean_gap_s, now_s - queue.last_arrival_s
            if queued:
                mean_lengths = queue.mean_lengths()
            if queue.arrivals:
                prompt_tokens, output_tokens = queue.mean_prompt_tokens, queue.mean_output_tokens
        typical = pool.typical_request_time_s(prompt_tokens, output_tokens, keep=keep)
        if kept is not None:
            typical = [typical[i] for i in kept]
        profiled = pool.profiled
        if not profiled:
            profiled = any(
                pool.states[i].stands_in and pool.states[i].observed for i in eligible.positions()
            )
        residual = self.residual.plain.get(model) or self.residual.of(model).plain
        return Backlog(
            queued,
            idle_s,
            gap_s,
            mean_lengths,
            typical,
            residual,
            profiled,
            pool.stands_in,
            waited_s,
        )


class _Ahead:
    """Draws that can be looked at before they are taken; ``drawn`` has them."""

    def __init__(self, rng: Draws) -> None:
        self._rng = rng
        self.drawn: list[float] = []

    def random(self) -> float:
        self.drawn.append(self._rng.random())
        return self.drawn[-1]


class _Draws:
    """A generator whose draws can be returned."""

    __slots__ = ("_given_back", "rng")

    def __init__(self, rng: Draws) -> None:
        self.rng = rng
        self._given_back: list[float] = []

    def random(self) -> float:
        return self._given_back.pop() if self._given_back else self.rng.random()

    def give_back(self, drawn: list[float]) -> None:
        self._given_back += reversed(drawn)


class Decider:
    """Shows a policy the candidates, and keeps its decisions.

    ``freed``: instances whose requests have just ended, or begun to stream, while others waited.

    Args:
        rng: for ties, random policies and samples.
        views: makes what a policy sees; its θ is that of decisions.
    """

    __slots__ = ("_draws", "_looked_s", "freed", "policy", "views")

    def __init__(self, policy: Policy, rng: Draws, views: Views) -> None:
        self._draws = _Draws(rng)
        self.views = views
        self.freed: deque[InstanceId] = deque(maxlen=_MOST_FREED)
        self._looked_s = -math.inf
        self.set_policy(policy)

    @property
    def rng(self) -> Draws:
        """The generator it was given."""
        return self._draws.rng

    def set_policy(self, policy: Policy) -> None:
        """Use another policy from now on."""
        self.policy = policy
        self.views.queues = policy.queues

    def decide(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        waited_s: float = 0.0,
    ) -> Decision | None:
        """Decide; None: the request has to wait."""
        policy, draws, looked_at = self.policy, self._draws, eligible
        if len(eligible.kept or eligible.pool.ids) > MOST_CANDIDATES and policy.samples:
            looked_at = self._sample(eligible, draws)
        view = self.views.view(request, looked_at, now_s, queue, waited_s)
        choice = policy.choose(view, draws)
        if choice is None and looked_at is not eligible:
            if now_s - self._looked_s >= _LOOKS_AT_ALL_EVERY_S:
                self._looked_s = now_s
                view = self.views.view(request, eligible, now_s, queue, waited_s)
                choice = policy.choose(view, draws)
        return None if choice is None else Decision(view, choice, policy, eligible.excluded)

    def _sample(self, eligible: Eligible, draws: Draws) -> Eligible:
        pool, positions = eligible.pool, eligible.positions()
        count = len(positions)
        sample = {positions[int(draws.random() * count)] for _ in range(_DRAWN)}
        freed = [pool.position[i] for i in self.freed if i in pool.position]
        sample.update(i for i in (*pool.fastest, *freed) if eligible.has(i))
        return Eligible(pool, sorted(sample), eligible.excluded)

    def would_choose(
        self,
        request: Request,
        eligible: Eligible,
        now_s: float,
        queue: ModelQueue | None,
        *,
        takes_turn: bool,
    ) -> Decision:
        """The instance for a request that comes now, whether or not there is room.

        ``takes_turn``: otherwise neither the policy's turn nor a random draw is taken.
        """
        policy, ahead = self.policy, _Ahead(self._draws)
        turn = None if takes_turn else policy.turn()
        try:
            looked_at = eligible
            if len(eligible.positions()) > MOST_CANDIDATES and policy.samples:
                looked_at = self._sample(eligible, ahead)
            view = self.views.view(request, looked_at, now_s, queue, keep=False)
            return Decision(view, policy.would_choose(view, ahead), policy, eligible.excluded)
        finally:
            if not takes_turn:
                policy.take_back(turn)
                self._draws.give_back(ahead.drawn)
