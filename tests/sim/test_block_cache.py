"""The prefix cache in closed form is the plain one, and obeys vLLM's rules."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.sim import block_cache, kernel
from hetero_gateway.sim.engine import Engine, Sequence
from hetero_gateway.sim.jit import can_compile
from tests.sim.closed_form import BOTH, Case, check, in_closed_form
from tests.sim.naive import Job, NaiveEngine
from tests.sim.test_fleet import EXACT, REAL


def keys_of(number: int, path: tuple[int, ...], blocks: int) -> list[int]:
    """Keys of text ``number``: it goes along a path of segments of two blocks, then is its own."""
    keys = []
    for i in range(blocks):
        segment = path[: i // 2 + 1] if i // 2 < len(path) else (*path, 1000 + number)
        keys.append(hash((segment, i)) & (2**62 - 1) | 1)
    return keys


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """Arrival, prompt, output, and the segments of text that it begins with."""
    path = st.lists(st.integers(0, 2), max_size=5).map(tuple)
    sizes = st.tuples(
        st.integers(0, 512).map(lambda i: i / 64), st.integers(1, 150), st.integers(1, 60), path
    )
    return sorted(draw(st.lists(sizes, min_size=1, max_size=16)), key=lambda job: job[0])


def make_jobs(workload: list[tuple[float, int, int, tuple[int, ...]]]) -> list[Job]:
    return [
        Job(prompt, output, arrival_s, keys=keys_of(i, path, (prompt + output) // 16))
        for i, (arrival_s, prompt, output, path) in enumerate(workload)
    ]


def check_cache(case: Case, tolerance: float) -> tuple[list[Job], NaiveEngine]:
    jobs, engine, fleet = check(case, tolerance)
    n, c = fleet._n[0], fleet._c[0]
    assert (n[kernel.QUERIES_TOTAL], n[kernel.HITS_TOTAL]) == (engine.queries, engine.hits)
    # The very same blocks are cached, and they will be evicted in the same order.
    head, order = n[kernel.TOTAL_BLOCKS], []
    block = c[block_cache.NEXT_FREE][head]
    while block != head:
        order.append(c[block_cache.KEY][block])
        block = c[block_cache.NEXT_FREE][block]
    assert order == [block.key for block in engine.free]
    return jobs, engine


def case_of(
    constants: Constants, kv: int, seqs: int, scheduling: str, budget: int, jobs: list[Job]
) -> Case:
    profile = Profile("GPU", "m", 1, constants, kv, seqs)
    return Case(profile, scheduling, budget, jobs, caching=True)


@settings(max_examples=80, deadline=None)
@given(workloads(), st.integers(224, 900), st.integers(1, 8), st.sampled_from(BOTH), st.data())
def test_hits_times_and_evictions_are_those_of_the_plain_cache(
    workload, kv, seqs, scheduling, data
):
    budget = data.draw(st.integers(seqs, 200))
    check_cache(case_of(EXACT, kv, seqs, scheduling, budget, make_jobs(workload)), 0.0)


def many(count: int = 80) -> list[Job]:
    rng = np.random.default_rng(5)
    return make_jobs(
        [
            (0.02 * i, int(rng.integers(20, 160)), int(rng.integers(1, 70)),
             tuple(int(v) for v in rng.integers(0, 2, 4)))
            for i in range(count)
        ]
    )  # fmt: skip


def test_a_full_cache_with_evictions_and_hits_is_the_same():
    for scheduling, kv_tokens in itertools.product(BOTH, (400, 900, 3000)):
        case = case_of(REAL, kv_tokens, 12, scheduling, 128, many())
        jobs, engine = check_cache(case, 1e-9)
        assert engine.hits > 500
        if kv_tokens == 400:
            assert sum(job.preemptions for job in jobs) > 3


@pytest.mark.system
@pytest.mark.skipif(not can_compile(), reason="numba is not installed")
def test_the_compiled_cache_is_the_same():
    for kv_tokens in (400, 3000):
        case = case_of(REAL, kv_tokens, 12, "chunked", 128, many())
        (plain, one), (compiled, other) = (in_closed_form(case, compiled=c) for c in (False, True))
        assert plain == compiled
        assert list(one._n[0]) == list(other._n[0][: len(one._n[0])])


# -- vLLM's rules, one by one


def engine(kv_tokens: int = 1600, **options) -> Engine:
    constants = Constants(2**-10, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2**-6)
    return Engine(Profile("GPU", "m", 1, constants, kv_tokens, 8), prefix_caching=True, **options)


def serve(engine: Engine, prompt: int, output: int, keys: list[int]) -> Sequence:
    sequence = Sequence(prompt, output, keys)
    engine.submit(sequence)
    while engine.begin_step():
        engine.end_step()
    return sequence


KEYS, OTHERS = [11, 12, 13, 14], [21, 22, 23, 24, 25]


@pytest.mark.parametrize(
    ("blocks", "served", "cached"),
    [
        # The last token of a prompt is always computed.
        (100, [(64, 1, KEYS), (64, 1, KEYS), (65, 1, KEYS)], [0, 48, 64]),
        # The answer is cached but for its newest token, which has no KV.
        (100, [(33, 31, KEYS), (65, 1, KEYS), (33, 32, OTHERS), (65, 1, OTHERS)], [0, 48, 0, 64]),
        # A prefix outlives what follows it: of 8 blocks, the newer five and the first three.
        (8, [(65, 1, KEYS), (80, 1, OTHERS), (65, 1, KEYS)], [0, 0, 48]),
        # Without keys nothing is shared.
        (100, [(64, 4, []), (64, 4, [])], [0, 0]),
    ],
)
def test_what_is_found_of_what_was_served_before(blocks, served, cached):
    one = engine(kv_tokens=16 * blocks)
    assert [serve(one, *request).cached_tokens for request in served] == cached
    assert one.prefix_queries_total == sum(prompt for prompt, _, _ in served)
    assert one.prefix_hits_total == sum(cached)


def test_only_what_is_not_cached_is_computed_and_paid_for():
    one, keys = engine(), KEYS
    serve(one, 64, 1, keys)
    one.submit(Sequence(80, 2, keys))
    step = one.begin_step()
    assert (step.prefill_tokens, step.duration_s) == (16, 16 / 1024)
    one.end_step()
    # But the context of its decode steps is the whole prompt.
    assert one.begin_step().cached_tokens == 81


def test_a_prompt_finds_the_blocks_of_one_in_the_same_step():
    one, keys = engine(), KEYS
    first, second = Sequence(64, 4, keys), Sequence(64, 4, keys)
    one.submit(first)
    one.submit(second)
    step = one.begin_step()
    assert (step.prefill_sequences, step.prefill_tokens) == (2, 64 + 16)
    # Three blocks are shared.
    assert one.total_blocks - one.free_blocks == 5


def test_an_eviction_leaves_the_blocks_for_when_it_resumes():
    one = engine(kv_tokens=16 * 8)
    keys = [[10 * i + j for j in range(1, 9)] for i in (1, 2)]
    sequences = [Sequence(48, 40, keys[0]), Sequence(48, 40, keys[1])]
    for sequence in sequences:
        one.submit(sequence)
    computed = 0
    while step := one.begin_step():
        computed += step.prefill_tokens
        one.end_step()
    assert sequences[1].preemptions == 1
    assert sequences[1].cached_tokens == 0
    # It had 65 tokens in four blocks; the other needed two of them, and the first two are left.
    assert computed == 48 + 48 + 33
    assert one.prefix_queries_total == 96


def test_a_reset_forgets_and_waits_until_nothing_runs():
    one, keys = engine(), KEYS
    serve(one, 65, 1, keys)
    running = Sequence(65, 4, keys)
    one.submit(running)
    one.begin_step()
    assert not one.reset_prefix_cache()
    one.abort(running)
    one.end_step()
    assert one.reset_prefix_cache()
    assert serve(one, 65, 1, keys).cached_tokens == 0


def test_what_is_cut_short_is_cached_as_far_as_it_was_planned():
    one = engine(max_batched_tokens=32)
    cut = Sequence(128, 4, list(range(1, 9)))
    one.submit(cut)
    one.begin_step()
    one.abort(cut)
    one.end_step()
    assert one.free_blocks == one.total_blocks
    assert serve(one, 129, 1, list(range(1, 9))).cached_tokens == 32
