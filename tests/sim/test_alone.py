"""An instance alone, in its stride: neither the start nor the end of a run counts."""

import dataclasses

import numpy as np
import pytest

from hetero_gateway.sim import alone
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.kernel import GENERATION_TOTAL
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths
from tests.fakes.planning import LENGTHS, instance_type

ENGINES = Engines()
MIX = Mix.of(LENGTHS, 0)


def long_run_tokens_per_s(profile, lengths, seed):
    """Output tokens per s by the engine's own counter, over the middle of 8000 requests."""
    fleet = EngineFleet([profile])
    prompt, output = lengths.draw(8_000, np.random.default_rng(seed))
    for i, o in zip(prompt.tolist(), output.tolist(), strict=True):
        fleet.submit(0, fleet.new_slot(), i, o, 0.0)
    whole_s = float(output.sum()) / run_alone(profile, MIX, ENGINES).output_tokens_per_s
    counts = []
    for share in (0.2, 0.8):
        while not fleet.advance(share * whole_s, False):
            pass
        counts.append(fleet._n[0][GENERATION_TOTAL])
    return (counts[1] - counts[0]) / (0.6 * whole_s)


@pytest.mark.parametrize("t", [1, 4])
def test_a_short_run_says_what_a_long_one_does(t):
    profile = instance_type(t=t).profile
    short = run_alone(profile, MIX, ENGINES).output_tokens_per_s
    assert short == pytest.approx(long_run_tokens_per_s(profile, LENGTHS, 99), rel=0.03)


def test_runs_of_six_batches_count_no_more_than_a_long_one_does(monkeypatch):
    profile = instance_type().profile
    long = [long_run_tokens_per_s(profile, LENGTHS, seed) for seed in range(3)]
    monkeypatch.setattr(alone, "_REQUESTS", 0)  # as many as six batches have
    mixes = [Mix.of(LENGTHS, seed) for seed in range(40)]
    short = [run_alone(profile, mix, ENGINES).output_tokens_per_s for mix in mixes]
    # Fresh requests from the first third to the last first token make it 2.6 % more.
    assert np.mean(short) == pytest.approx(np.mean(long), rel=0.015)


def test_half_done_requests_are_parts_of_whole_ones():
    prompt, output = MIX.requests(3000, 0)
    whole = set((MIX.prompt_pool + MIX.output_pool).tolist())
    assert set((prompt + output).tolist()) <= whole
    assert output.min() >= 1
    # What is left of a request that is met at random: E[O²] / 2E[O].
    expected = float((MIX.output_pool.astype(float) ** 2).mean()) / (2 * MIX.mean_output)
    assert output.mean() == pytest.approx(expected, rel=0.05)


def test_all_get_the_same_new_requests():
    few, many = MIX.requests(5, 100), MIX.requests(50, 200)
    assert (few[0][5:] == many[0][50:150]).all()
    assert (few[1][5:] == many[1][50:150]).all()


def test_twice_as_fast_is_twice_the_throughput():
    profile = instance_type().profile
    fast = dataclasses.replace(profile, constants=profile.constants.scaled(0.5))
    assert run_alone(fast, MIX, ENGINES).tokens_per_s == pytest.approx(
        2 * run_alone(profile, MIX, ENGINES).tokens_per_s, rel=1e-6
    )


def test_what_keeps_the_batch_small_is_told():
    assert run_alone(instance_type(kv_tokens=4000).profile, MIX, ENGINES).limit == "KV"
    many = instance_type(kv_tokens=400_000, max_num_seqs=16).profile
    alone = run_alone(many, MIX, ENGINES)
    assert alone.limit == "max_num_seqs"
    assert alone.batch == pytest.approx(16, rel=0.05)
    short = Mix.of(LogNormalLengths(LogNormal(1000, 0.3, 2000), LogNormal(8, 0.3, 20)), 0)
    assert run_alone(instance_type(kv_tokens=400_000).profile, short, ENGINES).limit == "prefill"


def test_nothing_fits_a_cache_that_is_too_small():
    lengths = LogNormalLengths(LogNormal(500, 0.0, 500), LogNormal(20, 0.0, 20))
    assert run_alone(instance_type(kv_tokens=64).profile, Mix.of(lengths, 0), ENGINES) is None
