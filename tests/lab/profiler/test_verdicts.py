"""Which batches count, decided from counters and times made up here."""

from dataclasses import replace

import pytest

from hetero_gateway.core.costs.fitting import Sample
from hetero_gateway.engines.vllm import EngineMetrics
from hetero_gateway.lab.profiler.batch import Shot
from hetero_gateway.lab.profiler.verdicts import (
    CACHED,
    FOREIGN,
    HURRIED,
    PREEMPTED,
    RAGGED,
    BatchVerdict,
    disturbance,
    one_step,
    several_steps,
)

BEFORE = EngineMetrics(0, 0, 5, 1000, 500, 64)
SHOT = Shot(None, None, 0.1, 0.1, prompt_tokens=300, output_tokens=40)
AFTER = EngineMetrics(0, 0, 5, 1300, 540, 64)
WHOLE = Sample(4, 100, 20, 0.5, None)
DECODE = Sample(4, 100, 20, None, 0.8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"generation_tokens": 541}, FOREIGN),
        ({"prompt_tokens": 1301}, FOREIGN),
        ({"running": 1}, FOREIGN),
        ({"waiting": 1}, FOREIGN),
        ({"preemptions": 6}, PREEMPTED),
        ({"prefix_cache_hits": 80}, CACHED),
    ],
)
def test_an_engine_was_ours_alone_but_for_each_sign_of_company(change, reason):
    assert disturbance(BEFORE, replace(AFTER, **change), SHOT) == reason


def test_counters_that_are_not_exported_accuse_nobody():
    nothing = EngineMetrics()
    assert disturbance(nothing, nothing, SHOT) is None


def test_a_batch_in_one_step_is_one_sample():
    sample = Sample(4, 100, 20, 0.5, 0.8)
    assert one_step(WHOLE, DECODE, ragged=False) == [BatchVerdict(sample, None, closes=True)]


@pytest.mark.parametrize(("prefill_s", "reason"), [(0.0011, HURRIED), (0.0062, None)])
def test_a_prefill_that_ends_sooner_than_a_step_was_timed_from_too_late(prefill_s, reason):
    # As seen on an H100, where a decode step of one sequence takes 6.4 ms.
    whole, decode = Sample(1, 16, 23, prefill_s, None), Sample(1, 16, 23, None, 22 * 0.0064)
    verdicts = one_step(whole, decode, ragged=False)
    assert verdicts[0].reason == reason
    assert verdicts[0].closes == (reason is None)
    assert verdicts[-1].sample.decode_s == decode.decode_s
    assert verdicts[-1].reason is None


def test_a_ragged_batch_keeps_its_decode_part_only():
    decode = replace(DECODE, prompt_tokens=101.5)
    # Neither closes the cell, so it is tried again.
    verdicts = [BatchVerdict(WHOLE, RAGGED), BatchVerdict(decode, None)]
    assert one_step(WHOLE, decode, ragged=True) == verdicts


def test_a_batch_of_several_steps_keeps_its_prefill_out_of_the_fit():
    verdict = BatchVerdict(DECODE, None, closes=True, beyond=WHOLE)
    assert several_steps(WHOLE, DECODE) == [verdict]
