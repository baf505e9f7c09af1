"""Decode steps in closed form are the same as one by one: times, finishes, evictions."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.sim import kernel
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.recorded import Placements, run_as_placed
from tests.sim.closed_form import BOTH, NEVER_S, Case, check, in_closed_form
from tests.sim.naive import Job

# Sums of these, and of times on the same grid, are exact: an arrival can be at a step's very end.
EXACT = Constants(2**-12, 2**-9, 0.0, 2**-6, 2**-14, 2**-10, 0.0, 2**-6, 2**-15)
ROUND = Constants(0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.25)
REAL = Constants(5.5e-5, 1e-5, 1e-6, 7.2e-3, 7.5e-6, 8.7e-5, 3.5e-6, 1.01e-2)
ATTENTIVE = dataclasses.replace(REAL, p9=3e-6)
STEEP = Constants(1e-4, 2e-4, 3e-6, 0.01, 1e-3, 1e-4, 3e-3, 0.0)


def jobs_of(*rows: tuple[float, int, int]) -> list[Job]:
    """Of (arrival, prompt, output)."""
    return [Job(prompt, output, arrival_s) for arrival_s, prompt, output in rows]


@st.composite
def cases(draw: st.DrawFn, constants: tuple[Constants, ...], times: st.SearchStrategy[float]):
    kv_tokens = draw(st.integers(192, 600))  # room for the largest job, in whole blocks
    sizes = st.tuples(times, st.integers(1, 120), st.integers(1, 60))
    jobs = sorted(draw(st.lists(sizes, min_size=1, max_size=14)), key=lambda job: job[0])
    max_num_seqs = draw(st.integers(1, 8))
    changes = st.tuples(times, st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    c = draw(st.sampled_from(constants))
    profile = Profile(
        *("GPU", "m", 1, c, kv_tokens, max_num_seqs),
        plans_ahead=draw(st.booleans()),
        experts_awake_at=draw(st.sampled_from([0.0, 4.0])),
        idle_expert_s=c.p8 / 16,
    )
    return Case(
        profile,
        draw(st.sampled_from(BOTH)),
        draw(st.integers(max_num_seqs, 200)),
        jobs_of(*jobs),
        sorted(draw(st.lists(changes, max_size=3)), key=lambda change: change[0]),
    )


@settings(max_examples=200)
@given(cases((REAL, STEEP, ATTENTIVE), st.floats(0, 8)))
def test_times_and_evictions_are_those_of_single_steps(case):
    check(case, 1e-9)


@settings(max_examples=200)
@given(cases((EXACT,), st.integers(0, 512).map(lambda i: i / 64)))
def test_they_are_the_same_to_the_last_bit_where_sums_are_exact(case):
    check(case, 0.0)


@settings(max_examples=150)
@given(cases((ROUND,), st.integers(0, 60).map(lambda i: i / 4)))
@example(
    Case(
        Profile("GPU", "m", 1, ROUND, 10_000, 8),
        "chunked",
        64,
        jobs_of((0.0, 10, 40), (1.0, 10, 5), (1.0, 10, 9), (1.5, 3, 3)),
    )
)
def test_an_arrival_at_the_end_of_a_step_is_seen_by_the_next(case):
    # Every step takes a quarter of a second (times a factor), and so do the arrivals.
    check(case, 0.0)


def test_many_evictions_are_the_same():
    jobs = jobs_of(*((0.01 * i, 20 + 7 * i % 90, 10 + 13 * i % 70) for i in range(60)))
    for scheduling, kv_tokens in itertools.product(BOTH, (200, 400, 900)):
        case = Case(Profile("GPU", "m", 1, REAL, kv_tokens, 16), scheduling, 128, jobs)
        assert sum(job.preemptions for job in check(case, 1e-9)[0]) > 5


@pytest.mark.system
@pytest.mark.skipif(not can_compile(), reason="numba is not installed")
def test_the_compiled_kernel_gives_the_same_floats():
    jobs = jobs_of(*((0.03 * i, 1 + 37 * i % 300, 1 + 13 * i % 170) for i in range(300)))
    for scheduling, kv_tokens in itertools.product(BOTH, (600, 20_000)):
        profile = Profile("GPU", "m", 1, REAL, kv_tokens, 32)
        case = Case(profile, scheduling, 128, jobs, [(3.0, 2.0), (5.0, 1.0)])
        assert in_closed_form(case, compiled=True)[0] == in_closed_form(case)[0]


def test_a_run_of_decode_steps_is_one_event():
    fleet = EngineFleet([Profile("GPU", "m", 1, REAL, 100_000, 32)])
    for _ in range(8):
        fleet.submit(0, fleet.new_slot(), 100, 1000, 0.0)
    fleet.advance(1e-6, False)
    assert fleet._n[0][kernel.STEPS] == 1
    fleet.advance(0.1, False)
    assert fleet._n[0][kernel.STEPS] == 999
    assert fleet.advance(NEVER_S, False)
    assert fleet.log[0] == 8


def test_instances_do_not_disturb_each_other():
    profiles = [Profile("GPU", "m", 1, REAL.scaled(1 + i), 4000, 8) for i in range(5)]
    rows = [(0.1 * i, 10 + i, 20 + i) for i in range(30)]
    arrival_s, prompts, outputs = (np.repeat(column, 5) for column in zip(*rows, strict=True))
    where = np.tile(np.arange(5), 30)
    records = run_as_placed(profiles, Placements(where, arrival_s, prompts, outputs))
    for i, profile in enumerate(profiles):
        alone, _ = in_closed_form(Case(profile, "chunked", 2048, jobs_of(*rows)))
        assert records.finish_s[where == i].tolist() == [job.finish_s for job in alone]
