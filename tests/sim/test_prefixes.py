"""Prompts that begin alike, in the simulator: keys, hits, and what the scheduler makes of them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.predictors import ConstantPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.prefixes import KnownText, Prefixes, Run
from hetero_gateway.sim.workload import Fault, FaultKind, Workload
from tests.sim.builders import instances

# Of a V100, about.
REAL = Constants(5.5e-5, 1e-5, 1e-6, 7.2e-3, 7.5e-8, 8.7e-5, 3.5e-8, 1.01e-2)


def prefixes(*requests: tuple[int, int, list[tuple[int, int]]], block_tokens: int = 64) -> Prefixes:
    return Prefixes(
        [KnownText(tuple(Run(*run) for run in runs)) for _, _, runs in requests],
        np.array([prompt for prompt, _, _ in requests], np.int64),
        np.array([output for _, output, _ in requests], np.int64),
        block_tokens,
    )


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


@pytest.mark.parametrize(
    ("block_tokens", "engine_tokens"), [(64, 16), (64, 128), (512, 16), (48, 32)]
)
def test_engines_see_equal_blocks_as_far_as_the_text_is_known_to_be_equal(
    block_tokens, engine_tokens
):
    size = 12 * block_tokens
    texts = prefixes(
        (size, 64, [(0, 8), (100, 4)]), (size, 64, [(0, 8), (200, 4)]), (size, 64, [(0, 8)]),
        block_tokens=block_tokens,
    )  # fmt: skip
    keys = [texts.engine_keys(i, engine_tokens).tolist() for i in range(3)]
    assert all(len(k) == (size + 64) // engine_tokens for k in keys)
    assert all(len(set(k)) == len(k) and min(k) > 0 for k in keys)
    equal = 8 * block_tokens // engine_tokens
    assert [common(keys[a], keys[b]) for a, b in ((0, 1), (0, 2), (1, 2))] == [equal] * 3


def test_the_gateway_sees_the_prompts_beginnings():
    # Two turns of one session, and one of another with the same system prompt.
    texts = prefixes(
        (1024, 128, [(0, 10), (50, 8)]),
        (2048, 128, [(0, 10), (50, 8), (70, 16)]),
        (1024, 128, [(0, 10), (90, 8)]),
    )
    first, second, other = (texts.gateway_keys(i) for i in range(3))
    assert (first.text_bytes, second.text_bytes) == (4096, 8192)
    turn = common(list(first.hashes), list(second.hashes))
    assert second.ends[turn - 1] == 4096
    system = common(list(first.hashes), list(other.hashes))
    assert other.ends[system - 1] == 10 * 64 * 4
    assert texts.gateway_keys(0) is first


def test_a_text_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="request 0"):
        prefixes((64, 1, [(0, 2)]))
    with pytest.raises(ValueError, match="a text for each"):
        Prefixes([], np.ones(1, np.int64), np.ones(1, np.int64), 64)


def cluster() -> list[SimulatedInstance]:
    fast = Profile("GPU", "m", 1, REAL, 400_000, 64)
    return instances(fast, Profile("GPU", "m", 1, REAL.scaled(2), 300_000, 64))


def sessions(count: int = 60, turns: int = 5) -> Workload:
    """Turns that go on from each other, all first ones ahead of the second ones."""
    rows, rng = [], np.random.default_rng(3)
    for k in range(turns):
        for s in rng.permutation(count).tolist():
            length = 1024 * (k + 1)
            runs = [(1000 * s + 16 * j, 16) for j in range(k + 1)]
            rows.append((0.1 * len(rows), length, 64, runs))
    texts = prefixes(*[row[1:] for row in rows])
    arrival_s, prompts, outputs, _ = zip(*rows, strict=True)
    return Workload(np.array(arrival_s), np.array(prompts), np.array(outputs), texts)


def run(workload: Workload, *, aware: bool, among=None, **options):
    rng = np.random.default_rng(0)
    scheduler = Scheduler(make_policy("finish-time"), rng, prefix_cache=aware)
    records = simulate(among or cluster(), workload, scheduler, ConstantPredictor(64.0), **options)
    assert "faults" in options or np.isfinite(records.finish_s).all()
    return records, scheduler


def share(workload: Workload, records) -> float:
    return records.cached_tokens.sum() / workload.prompt_tokens.sum()


def test_who_knows_the_caches_sends_turns_where_the_last_one_went():
    workload = sessions()
    blind, _ = run(workload, aware=False)
    aware, scheduler = run(workload, aware=True)
    assert share(workload, aware) > share(workload, blind) + 0.1
    # Of each turn all but its last kilotoken could be: 10 of 15.
    assert share(workload, aware) > 0.6
    assert aware.finish_s.mean() < blind.finish_s.mean()
    # What was predicted was there.
    assert min(scheduler.caches.eta(InstanceId(i)) for i in ("i0", "i1")) > 0.9


def test_an_instance_without_a_cache_is_found_out():
    workload = sessions()
    fast, slow = cluster()
    half = [replace(fast, prefix_caching=False), slow]
    records, scheduler = run(workload, aware=True, among=half)
    assert not records.cached_tokens[records.instance == 0].any()
    assert records.cached_tokens[records.instance == 1].any()
    assert scheduler.caches.eta(InstanceId("i0")) < 0.3
    assert scheduler.caches.eta(InstanceId("i1")) > 0.9


def test_a_dead_instance_comes_back_with_an_empty_cache():
    workload = sessions(20)
    alone, fault = cluster()[:1], Fault(0, FaultKind.DEAD, 5.0, 5.1)
    records, _ = run(workload, aware=True, among=alone, faults=[fault])
    unhurt, _ = run(workload, aware=True, among=alone)
    done = np.isfinite(records.finish_s)
    assert records.cached_tokens[done].sum() < unhurt.cached_tokens[done].sum() - 20 * 1024


def test_without_texts_nothing_is_cached_and_nothing_changes():
    workload = replace(sessions(), prefixes=None)
    aware, _ = run(workload, aware=True)
    blind, _ = run(workload, aware=False)
    assert not aware.cached_tokens.any()
    np.testing.assert_array_equal(aware.finish_s, blind.finish_s)


@pytest.mark.system
@pytest.mark.skipif(not can_compile(), reason="numba is not installed")
def test_compiled_it_is_the_same():
    workload = sessions(20)
    plain, _ = run(workload, aware=True)
    compiled, _ = run(workload, aware=True, compiled=True)
    np.testing.assert_array_equal(plain.cached_tokens, compiled.cached_tokens)
    np.testing.assert_array_equal(plain.finish_s, compiled.finish_s)
