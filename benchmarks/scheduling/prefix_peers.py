"""The rules by which other routers heed prefix caches, with exact knowledge of them.

Read in their public sources in autumn 2026; the files, and what differs from them here:

    cache-aware  vllm-project/router src/policies/cache_aware.rs, lightseekorg/smg
                 model_gateway/src/policies/cache_aware.rs: unless the loads are out of balance
                 (max − min > 32 and max > 1.1·min), the best match if it is more than half of the
                 text; else the least load. These are the defaults of ``CacheAwareConfig``, those of
                 the command line are 64, 1.5 and 0.3. Equal matches go to the least load, as in
                 smg's event-driven form; its text form takes any of them
    llm-d        llm-d/llm-d-router deploy/config/epp-precise-prefix-cache-config.yaml:
                 prefix-cache-scorer 2, kv-cache-utilization-scorer 1, queue-scorer 1, and
                 max-score-picker. In pkg/epp/framework/plugins/scheduling/scorer: prefix/plugin.go
                 is the share of the prompt's full blocks that match, kvcacheutilization 1 − usage,
                 queuedepth/queue.go the waiting queue, spread from 1 (shortest) to 0 (longest), and
                 1 for all where they are equal
    dynamo       ai-dynamo/dynamo lib/kv-router/src/scheduling/selector/default.rs, defaults of
                 config.rs: the lowest sum of prefill blocks (those that wait there and the
                 prompt's, less the overlap) and decode blocks (all prompts' that are active there,
                 with this one's; not the answers'). Its queue for when every worker has 16 steps of
                 prompts waiting is left out
    aibrix       vllm-project/aibrix pkg/plugins/gateway/algorithms/prefix_cache.go: the best match
                 among those with at most mean + 1 σ requests, among equal ones the fewest requests;
                 none: the fewest. Where max > 2·(mean + 1) and max − min ≥ 8, only those with the
                 fewest may match. (Earlier versions, until 2025: the fewest where max − min > 8)
    lmetric      the lowest product of uncached tokens (those that wait there and the prompt's) and
                 requests there, this one among them; vllm-router's kv_aware has the same rule. Its
                 source was not read
    sticky       llm-d's default since August 2026, as described, not read: who has 0.8 of the
                 prompt, until it has 18 s more of uncached tokens to compute, at its own pace, than
                 the one with the fewest; else that one
    least-ttft   Mooncake, Algorithm 1 of its paper (arXiv 2407.00079): the least time in queue and
                 prefill; its source was not read

What each keeps as an estimate is exact here: matches are looked up in the simulated engines' caches
at the moment of the decision, and so are queues and KV usage, which they scrape. least-ttft has the
instances' own constants. None places a request that its instance could never finish.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from hetero_gateway.core.request import Request
from hetero_gateway.core.types import InstanceId, InstanceSpec, Leg, Outcome, Usage
from hetero_gateway.sim import block_cache, kernel
from hetero_gateway.sim.engine import DEFAULT_BLOCK_TOKENS
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.jit import compiled
from hetero_gateway.sim.prefixes import Prefixes

BLOCK = DEFAULT_BLOCK_TOKENS
_STICKY_MATCH, _STICKY_LEAD_S = 0.8, 18.0


@dataclass(eq=False)
class Placed:
    """A request on an instance. ``uncached``: prompt tokens to compute, as predicted."""

    instance_id: InstanceId
    position: int
    keys: list[int]
    uncached: int
    prefill_s: float
    waiting: bool = True
    leg: Leg = Leg.WHOLE


@dataclass(eq=False)
class PlacedTicket:
    owner: Any
    dispatch: Placed
    prefill: None = None


@dataclass
class Candidate:
    """One instance as a rule sees it: requests in flight there, its match of this request in
    tokens, and what is active and waiting."""

    position: int
    requests: int
    match: int
    queue: int
    kv_usage: float
    waiting_tokens: int
    waiting_s: float
    prefill_s: float
    token_s: float
    active_blocks: int
    new_blocks: int


@dataclass
class Load:
    requests: int = 0
    waiting_tokens: int = 0
    waiting_s: float = 0.0
    blocks: Counter[int] = field(default_factory=Counter)


class PeerGateway:
    """Stands where the scheduler stands (``sim.cluster.simulate``), and follows a peer's rule.

    Args:
        rule: chooses among candidates.
        prefixes: of the workload; a request's owner is its number there.
    """

    queued = 0
    caches = None

    def __init__(self, rule: Rule, prefixes: Prefixes, rng: np.random.Generator) -> None:
        self._rule = rule
        self._prefixes = prefixes
        self._rng = rng
        self._specs: list[InstanceSpec] = []
        self._loads: list[Load] = []
        self._placed: list[PlacedTicket] = []
        self._fleet: EngineFleet | None = None
        self._found: Any = []
        self._look_up: Any = block_cache.look_up

    def watch(self, fleet: EngineFleet) -> None:
        """What no gateway can see: the engines themselves."""
        self._fleet = fleet
        self._found = [0] * (self._prefixes.most_tokens // BLOCK + 1)
        if fleet.compiled:
            self._found = np.array(self._found)
            self._look_up = compiled(block_cache.look_up)

    @property
    def policy(self) -> Self:
        return self

    members = residual = policy  # it is its own parts

    def add(self, spec: InstanceSpec) -> None:
        self._specs.append(spec)
        self._loads.append(Load())

    def replace(self, spec: InstanceSpec) -> None:
        raise NotImplementedError  # no faults here

    def place(
        self,
        request: Request,
        now_s: float,
        *,
        owner: Any = None,
        first: bool = False,
        at_once: bool = False,
    ) -> PlacedTicket:
        keys = self._prefixes.engine_keys(owner, BLOCK)
        ticket = PlacedTicket(owner, self._place(request, keys))
        self._placed.append(ticket)
        return ticket

    def _place(self, request: Request, keys: Any) -> Placed:
        fleet = self._fleet
        assert fleet is not None
        prompt = request.prompt_tokens
        prompt_keys = keys[: prompt // BLOCK]
        plain = prompt_keys.tolist()
        looked_up = prompt_keys if fleet.compiled else plain
        _, counts, _, caches, *_ = fleet.tables()
        candidates = []
        for i, (spec, load) in enumerate(zip(self._specs, self._loads, strict=True)):
            if prompt + 1 > fleet.capacity_tokens[i]:
                continue
            n = counts[i]
            hits = 0
            if n[kernel.CACHING]:
                most = min(len(looked_up), len(self._found) - 1)
                mask = n[kernel.BUCKET_MASK]
                hits = int(self._look_up(caches[i], mask, looked_up, self._found, most))
            match = min(hits * BLOCK, prompt - 1)
            candidates.append(
                Candidate(
                    i,
                    load.requests,
                    match,
                    int(n[kernel.NUM_WAITING]),
                    1 - float(n[kernel.FREE_BLOCKS]) / float(n[kernel.TOTAL_BLOCKS]),
                    load.waiting_tokens,
                    load.waiting_s,
                    prefill_s(spec, prompt - match),
                    spec.profile.constants.p1 if spec.profile is not None else 0.0,
                    len(load.blocks) if self._rule.counts_blocks else 0,
                    sum(k not in load.blocks for k in plain) if self._rule.counts_blocks else 0,
                )
            )
        if not candidates:
            candidates = [Candidate(0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0.0, 0, 0)]
        chosen = self._rule.choose(candidates, prompt, self._rng)
        load = self._loads[chosen.position]
        uncached = prompt - chosen.match
        load.requests += 1
        load.waiting_tokens += uncached
        load.waiting_s += chosen.prefill_s
        if self._rule.counts_blocks:
            load.blocks.update(plain)
        spec = self._specs[chosen.position]
        return Placed(spec.instance_id, chosen.position, plain, uncached, chosen.prefill_s)

    def pump(self, now_s: float) -> list[PlacedTicket]:
        placed, self._placed = self._placed, []
        return placed

    def next_wakeup_s(self) -> float | None:
        return None

    def first_token(self, dispatch: Placed, now_s: float) -> None:
        if dispatch.waiting:
            dispatch.waiting = False
            load = self._loads[dispatch.position]
            load.waiting_tokens -= dispatch.uncached
            load.waiting_s -= dispatch.prefill_s

    def observe_cache(
        self,
        instance_id: InstanceId,
        caching: bool | None,
        counters: tuple[float, float] | None,
        now_s: float,
    ) -> None:
        pass

    def settle(
        self, dispatch: Placed, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        self.first_token(dispatch, now_s)
        load = self._loads[dispatch.position]
        load.requests -= 1
        if self._rule.counts_blocks:
            load.blocks.subtract(dispatch.keys)
            for key in dispatch.keys:
                if not load.blocks[key]:
                    del load.blocks[key]
        return True

    def observe_steps(
        self, instance_id: InstanceId, steps: float, duration_s: float, now_s: float
    ) -> bool:
        return False

    def observe(self, model: str, output_tokens: float) -> None:
        pass


def prefill_s(spec: InstanceSpec, tokens: int) -> float:
    assert spec.profile is not None
    c = spec.profile.constants
    return c.p1 * tokens + c.p2 + c.p4


class Rule:
    """Which of the candidates gets a request of so many prompt tokens."""

    counts_blocks = False

    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        raise NotImplementedError


def lowest(
    candidates: Sequence[Candidate], scores: Sequence[float], rng: np.random.Generator
) -> Candidate:
    """The lowest score; among equals a draw."""
    best = min(scores)
    ties = [c for c, score in zip(candidates, scores, strict=True) if score == best]
    return ties[int(rng.integers(len(ties)))] if len(ties) > 1 else ties[0]


class CacheAware(Rule):
    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        loads = [c.requests for c in candidates]
        balanced = not (max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads))
        best = max(c.match for c in candidates)
        if balanced and best / prompt > 0.5:
            candidates = [c for c in candidates if c.match == best]
            loads = [c.requests for c in candidates]
        return lowest(candidates, loads, rng)


class LlmD(Rule):
    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        queues = [c.queue for c in candidates]
        blocks = prompt // BLOCK
        scores = []
        for c in candidates:
            queue = 1.0
            if max(queues) > min(queues):
                queue = (max(queues) - c.queue) / (max(queues) - min(queues))
            match = c.match // BLOCK / blocks if blocks else 0.0
            scores.append(-(2 * match + (1 - c.kv_usage) + queue))
        return lowest(candidates, scores, rng)


class Dynamo(Rule):
    counts_blocks = True

    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        scores = [
            (c.waiting_tokens + prompt - c.match) / BLOCK + c.active_blocks + c.new_blocks
            for c in candidates
        ]
        return lowest(candidates, scores, rng)


class Aibrix(Rule):
    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        loads = np.array([c.requests for c in candidates], float)
        mean, least = loads.mean(), loads.min()
        limit = mean + loads.std()
        if loads.max() > 2 * (mean + 1) and loads.max() - least >= 8:
            limit = least
        matched = [c for c in candidates if c.match and c.requests <= limit]
        if matched:
            return min(matched, key=lambda c: (-c.match, c.requests))
        return lowest(candidates, loads.tolist(), rng)


class LeastTtft(Rule):
    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        return lowest(candidates, [c.waiting_s + c.prefill_s for c in candidates], rng)


class LMetric(Rule):
    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        scores = [(c.waiting_tokens + prompt - c.match) * (c.requests + 1) for c in candidates]
        return lowest(candidates, scores, rng)


class Sticky(Rule):
    def choose(
        self, candidates: Sequence[Candidate], prompt: int, rng: np.random.Generator
    ) -> Candidate:
        least = min(c.waiting_tokens for c in candidates)
        best = max(candidates, key=lambda c: (c.match, -c.waiting_tokens))
        lead_s = (best.waiting_tokens - least) * best.token_s
        if best.match >= _STICKY_MATCH * prompt and lead_s <= _STICKY_LEAD_S:
            return best
        return lowest(candidates, [c.waiting_tokens for c in candidates], rng)


RULES: dict[str, type[Rule]] = {
    "cache-aware": CacheAware,
    "llm-d": LlmD,
    "dynamo": Dynamo,
    "aibrix": Aibrix,
    "lmetric": LMetric,
    "sticky": Sticky,
    "least-ttft": LeastTtft,
}


def peer(name: str, prefixes: Prefixes, seed: int) -> PeerGateway:
    """A gateway with a peer's rule. KeyError: no such rule."""
    return PeerGateway(RULES[name](), prefixes, np.random.default_rng((seed, 2)))


def geometric_mean(values: Collection[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
