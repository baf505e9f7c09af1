"""Requests to load a planned deployment with."""

from __future__ import annotations

import math

import numpy as np

from hetero_gateway.planner.plan import Plan
from hetero_gateway.planner.question import Question
from hetero_gateway.sim.alone import Mix
from hetero_gateway.sim.arrays import Integers
from hetero_gateway.sim.workload import even_rows

# In batches of the whole system: enough that a run is mostly in its stride.
_BATCHES = 30
_LEAST_REQUESTS, _MOST_REQUESTS = 200, 20_000
_SAMPLES = 50


def sample_requests(plan: Plan, question: Question) -> list[tuple[int, int]]:
    """(prompt, output) tokens of requests whose means are those of the planned mix."""
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
