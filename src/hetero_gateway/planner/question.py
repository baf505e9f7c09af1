"""What is asked of the planner, and the trials of whole systems that are run for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.planner.batch_estimate import Estimator
from hetero_gateway.planner.goals import HEADROOM, Goals, Goodput, find_goodput
from hetero_gateway.planner.plan import InstanceType, Key, Machine, Plan, SystemFigures, Unfit
from hetero_gateway.planner.trials import SYSTEM_REQUESTS, System, Trials, at_most
from hetero_gateway.sim.alone import Alone, Engines, Mix, run_alone
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.workload import Lengths, even_rows

# In batches of the whole system: enough that a run is mostly in its stride.
_BATCHES = 30
_LEAST_REQUESTS, _MOST_REQUESTS = 200, 20_000
_SAMPLES = 50


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the planner.

    Args:
        machines: ids differ.
        types: what can be deployed, by (accelerator, size); ``unfit``: what cannot.
        lengths: of the requests.
        estimator: of Algorithm 1, which prunes.
        seed: of everything that is drawn.
        requests: of one simulation of a whole system, about.
        compiled: run the engines compiled by numba.
        notes: passed on to the plan.
    """

    machines: tuple[Machine, ...]
    types: Mapping[Key, InstanceType]
    lengths: Lengths
    goals: Goals = field(default_factory=Goals)
    policy: str = "finish-time"
    estimator: Estimator = "unpadded"
    engines: Engines = field(default_factory=Engines)
    unfit: tuple[Unfit, ...] = ()
    seed: int = 0
    requests: int = SYSTEM_REQUESTS
    compiled: bool = False
    notes: tuple[str, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether the requests are a trace that says which prompts begin alike."""
        return isinstance(self.lengths, OrderedTrace)

    @property
    def trials(self) -> Trials:
        return Trials(self.policy, self.engines, self.requests, self.compiled, self.goals.slo)

    def saturate(self, system: System, mix: Mix, alone_tokens_per_s: float) -> SystemFigures | None:
        """A system with everything at once, at most what its instances do alone."""
        figures = self.trials.saturate(system, mix)
        return None if figures is None else at_most(figures, alone_tokens_per_s)

    def goodput(
        self, system: System, mix: Mix, full: SystemFigures, likely_per_s: float | None = None
    ) -> Goodput | None:
        """What a system holds within the limits; ``full``: what it does with everything at once."""
        most_per_s = full.tokens_per_s / (1 + HEADROOM) / mix.mean_tokens
        if not most_per_s:
            return None
        return find_goodput(
            functools.partial(self.trials.hold, system, mix),
            self.goals,
            most_per_s,
            likely_per_s=likely_per_s,
        )

    def alone(self, profile: Profile, mix: Mix, share: float) -> Alone | None:
        """One instance with always enough to do, and of a trace in order with a share of it."""
        found = run_alone(profile, mix, self.engines)
        if found is None or not self.in_order:
            return found
        return self.trials.alone_in_order(profile, found, share, mix)


class NoPlan(HeteroGatewayError):
    """The machines can serve, but nothing that they can be made into keeps the goals."""


def sample_requests(plan: Plan, question: Question) -> list[tuple[int, int]]:
    """Requests to load a planned deployment with: (prompt, output) tokens.

    Their means are those of the planned mix.
    """
    batch = plan.best.simulated.batch if plan.best.simulated is not None else 1.0
    running = batch * sum(map(len, plan.best.layouts.values()))
    count = min(max(math.ceil(_BATCHES * running), _LEAST_REQUESTS), _MOST_REQUESTS)
    mix = Mix.of(question.lengths, question.seed)
    rng = np.random.default_rng(question.seed)
    # One of each slice of the mix sorted by length; of some such samples, that whose means are
    # nearest to the mix's: a plan and a run of a thousand requests are to differ by less than 1 %.
    samples = [even_rows(mix.prompt_pool, mix.output_pool, count, rng) for _ in range(_SAMPLES)]
    rows = min(samples, key=lambda sample: _distance(mix, sample))
    rng.shuffle(rows)
    prompt, output = mix.prompt_pool[rows], mix.output_pool[rows]
    return list(zip(prompt.tolist(), output.tolist(), strict=True))


def _distance(mix: Mix, rows: Integers) -> float:
    """How far the means of some requests are from those of the mix, relative."""
    prompt = float(mix.prompt_pool[rows].mean()) / mix.mean_prompt
    output = float(mix.output_pool[rows].mean()) / mix.mean_output
    return abs(prompt - 1) + abs(output - 1)
