"""Algorithm 1: its batches, its times, and what the errata change."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.costs.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.planner.batch_estimate import estimate_throughput

CONSTANTS = Constants(1e-4, 2e-4, 3e-6, 0.01, 1e-7, 1e-4, 3e-7, 0.02)

lengths = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=40)
capacities = st.integers(800, 20_000)


def profile(kv_capacity_tokens=1000):
    return Profile("gpu", "model", 1, CONSTANTS, kv_capacity_tokens)


def estimate(requests, kv_capacity_tokens=1000, **options):
    prompts, outputs = zip(*requests, strict=True)
    return estimate_throughput(profile(kv_capacity_tokens), prompts, outputs, **options)


def as_printed(requests, capacity, padded=True):
    """Algorithm 1 line by line, with errata 8 and 9; returns (batches, total time)."""
    total_time, batched, batches = 0.0, 0, []
    while batched < len(requests):
        begin, end = batched, batched
        for r in range(begin, len(requests)):
            i_sum = sum(i for i, _ in requests[begin : r + 1])
            max_o = max(o for _, o in requests[begin : r + 1])
            if i_sum + (r - begin + 1) * max_o > capacity:
                break
            end = r + 1
        batch = requests[begin:end]
        batched = end
        i_b = max(i for i, _ in batch) if padded else sum(i for i, _ in batch) / len(batch)
        o_b = max(o for _, o in batch)
        total_time += prefill_time_s(CONSTANTS, len(batch), i_b)
        total_time += decode_time_s(CONSTANTS, len(batch), i_b, o_b)
        batches.append(len(batch))
    return tuple(batches), total_time


def test_attention_is_of_the_longest_prompt_or_of_each_one():
    c = dataclasses.replace(CONSTANTS, p9=1e-6)
    attentive = dataclasses.replace(profile(20_000), constants=c)
    prompts, outputs = [100, 900], [10, 10]
    for estimator, pairs in (("paper", 900**2), ("unpadded", (100**2 + 900**2) / 2)):
        times = [
            estimate_throughput(p, prompts, outputs, estimator=estimator).total_time_s
            for p in (profile(20_000), attentive)
        ]
        assert times[1] - times[0] == pytest.approx(1e-6 * pairs)


@given(lengths, capacities)
def test_it_is_the_printed_algorithm_and_unpadded_never_takes_longer(requests, capacity):
    results = {}
    for estimator in ("paper", "unpadded"):
        batches, total_time_s = as_printed(requests, capacity, padded=estimator == "paper")
        result = estimate(requests, kv_capacity_tokens=capacity, estimator=estimator)
        assert result.batch_sizes == batches
        assert result.total_time_s == pytest.approx(total_time_s)
        results[estimator] = result
    assert results["unpadded"].total_time_s <= results["paper"].total_time_s * (1 + 1e-12)
    assert sum(batches) == len(requests)
    begin = 0
    for size in batches:
        batch = requests[begin : begin + size]
        assert sum(i for i, _ in batch) + size * max(o for _, o in batch) <= capacity
        begin += size


@pytest.mark.parametrize(("estimator", "prompt"), [("paper", 100), ("unpadded", 55)])
def test_a_batch_is_padded_to_its_longest_output_and_to_its_longest_prompt_or_the_mean(
    estimator, prompt
):
    result = estimate([(10, 40), (100, 20)], estimator=estimator)
    assert result.batch_sizes == (2,)
    times_s = prefill_time_s(CONSTANTS, 2, prompt), decode_time_s(CONSTANTS, 2, prompt, 40)
    assert result.total_time_s == pytest.approx(sum(times_s))


def test_the_last_request_is_batched_and_the_loop_ends():
    # Erratum 8: `until n > q` would go on with an empty batch.
    assert estimate([(600, 300)] * 3).batch_sizes == (1, 1, 1)


def test_a_request_that_fits_nowhere_ends_it():
    # Erratum 9: the print would make empty batches for ever.
    assert estimate([(10, 10), (900, 101), (10, 10)]) is None
    assert estimate([(10, 10), (900, 100), (10, 10)]) is not None


def test_the_throughput_is_of_prompts_and_outputs_of_one_instance():
    one = estimate([(100, 50)])
    assert one.tokens_per_s == 150 / one.total_time_s


def test_another_capacity_and_a_limit_of_sequences_cut_the_batches():
    requests = [(50, 50)] * 10
    assert estimate(requests).batch_sizes == (10,)
    assert estimate(requests, kv_capacity_tokens=400).batch_sizes == (4, 4, 2)
    assert estimate(requests, kv_capacity_tokens=250).batch_sizes == (2, 2, 2, 2, 2)
    assert estimate(requests, max_num_seqs=3).batch_sizes == (3, 3, 3, 1)


@pytest.mark.parametrize(("prompts", "outputs"), [([], []), ([1, 2], [1])])
def test_what_makes_no_sense_is_refused(prompts, outputs):
    with pytest.raises(ValueError, match="must pair up"):
        estimate_throughput(profile(), prompts, outputs)
