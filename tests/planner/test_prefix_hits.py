"""Plans for traces whose prompts begin alike: hits count, as ``simulate`` counts them."""

import functools
import math

import numpy as np
import pytest

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.plan import Machine
from hetero_gateway.planner.present import simulate_present
from hetero_gateway.planner.question import Question, Trials, reduced
from hetero_gateway.planner.search import search
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.experiment import Experiment, mix_moments, run_once
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.prefixes import KnownText, Run
from hetero_gateway.sim.workload import TraceLengths
from tests.fakes.planning import instance_type, short_runs, types_of  # noqa: F401 - a fixture

BLOCK_TOKENS = 16
MACHINES = (Machine("m", "gpu", 4),)
REQUESTS = 250


def trace(*, shared: bool, rows: int = 800, sessions: int = 60) -> OrderedTrace:
    """Prompts of one of four systems' 20 blocks and some of their own; unlike: of their own all."""
    rng = np.random.default_rng(1)
    prompt = 320 + 16 * rng.integers(1, 12, rows)
    own = 10_000 + 100 * np.arange(rows)
    texts = tuple(
        KnownText((Run(32 * (i % sessions % 4) if shared else int(own[i]) + 50, 20),
                   Run(int(own[i]), int(prompt[i]) // BLOCK_TOKENS - 20)))
        for i in range(rows)
    )  # fmt: skip
    return OrderedTrace(
        np.cumsum(rng.exponential(0.1, rows)),
        prompt,
        rng.integers(10, 50, rows),
        np.arange(rows) % sessions,
        texts,
        BLOCK_TOKENS,
    )


SHARED, UNLIKE = trace(shared=True), trace(shared=False)
SAMPLED = TraceLengths(SHARED.prompt_tokens, SHARED.output_tokens)
LENGTHS = {"shared": SHARED, "unlike": UNLIKE, "sampled": SAMPLED}


@functools.cache
def plan(which, sizes=(1, 2), **goals):
    types = types_of("gpu", sizes=sizes)
    return search(
        Question(MACHINES, types, LENGTHS[which], goals=Goals(**goals), requests=REQUESTS)
    )


def test_prompts_that_begin_alike_are_worth_tokens():
    shared, unlike = plan("shared").best, plan("unlike").best
    assert shared.simulated.tokens_per_s > 1.2 * unlike.simulated.tokens_per_s
    assert shared.simulated.cached_share == pytest.approx(0.75, abs=0.1)
    assert shared.at_rate.cached_share > 0.5
    assert unlike.simulated.cached_share == 0
    # The types alone have their caches, too, and what they do bounds no system.
    assert shared.alone_tokens_per_s > 1.2 * unlike.alone_tokens_per_s


def test_prompts_that_are_unlike_do_what_sampled_ones_do():
    ordered, sampled = plan("unlike").best, plan("sampled").best
    assert ordered.layouts == sampled.layouts
    assert ordered.simulated.tokens_per_s == pytest.approx(sampled.simulated.tokens_per_s, rel=0.06)
    assert math.isnan(sampled.simulated.cached_share)


def test_the_figures_are_those_of_simulate():
    found = plan("shared")
    best, rate_per_s = found.best, found.rate_per_s
    instances = tuple(
        SimulatedInstance(f"i{k}", p, p)
        for k, p in enumerate(types_of("gpu")["gpu", t].profile for t in best.layouts["m"])
    )
    whole = SHARED.workload(REQUESTS, 1.0)
    experiment = Experiment(
        instances,
        TraceLengths(SHARED.prompt_tokens, SHARED.output_tokens, in_order=True),
        REQUESTS,
        Slo(),
        trace_arrival_s=whole.arrival_s,
        prefixes=whole.prefixes,
    )
    moments = mix_moments(experiment.lengths)
    run = run_once(experiment, "finish-time", rate_per_s, 0, moments)
    assert best.at_rate.cached_share == pytest.approx(run.cached_share, abs=0.03)
    assert best.at_rate.latency_mean_s == pytest.approx(run.latency_s.mean, rel=0.05)
    at_once = run_once(experiment, "finish-time", math.inf, 0, moments)
    assert best.simulated.cached_share == pytest.approx(at_once.cached_share, abs=0.03)
    # Of which the start and the end, when engines are not full, are part.
    assert best.simulated.output_tokens_per_s == pytest.approx(
        at_once.steady_tokens_per_s, rel=0.15
    )


def test_what_a_smaller_system_stands_for_has_as_many_hits():
    profile = instance_type(t=2).profile
    mix = Mix.of(SHARED, 0)
    plain = {profile: run_alone(profile, mix, Engines())}
    found = {
        requests: Trials("finish-time", Engines(), requests).saturate(
            reduced({profile: 16}, plain, requests), mix
        )
        for requests in (300, 2000)
    }
    small, large = found[300], found[2000]
    assert small.tokens_per_s == pytest.approx(large.tokens_per_s, rel=0.1)
    assert small.cached_share == pytest.approx(large.cached_share, abs=0.1)


@pytest.mark.system
def test_hits_count_for_a_goodput_and_for_machines_that_hold_a_rate():
    limits = {"sizes": (2,), "slo": Slo(1.0, 0.06)}
    shared, unlike = (plan(x, name="goodput", **limits).best for x in ("shared", "unlike"))
    assert shared.goodput_per_s > 1.1 * unlike.goodput_per_s
    asked = {"name": "fewest", "rate_per_s": 0.55 * unlike.goodput_per_s} | limits
    fewest = {x: plan(x, **asked) for x in ("shared", "unlike")}
    assert all(found.best.holds for found in fewest.values())
    assert fewest["shared"].best.accelerators < fewest["unlike"].best.accelerators
    # A bound would be of prompts that are computed in full.
    assert fewest["shared"].lower_bound is None


def test_what_runs_is_judged_by_the_same_trials():
    best = plan("shared").best
    question = Question(MACHINES, types_of("gpu", sizes=(1, 2)), SHARED, requests=REQUESTS)
    found = simulate_present(question, best.layouts)
    assert found.simulated.tokens_per_s == pytest.approx(best.simulated.tokens_per_s, rel=0.03)
    assert found.simulated.cached_share == pytest.approx(best.simulated.cached_share, abs=0.03)
