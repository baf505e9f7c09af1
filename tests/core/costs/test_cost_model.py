"""Each equation against a naive literal form, and the laws that a cost must keep."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.costs import cost_model
from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.policies.estimates import holds
from hetero_gateway.core.policies.estimates import request_time_s as member_request_time_s
from hetero_gateway.core.policies.member import Member
from tests.core.builders import FAST, FAST_CONSTANTS, SLOW, profile, profiles

GIB = 2**30
prompts = st.integers(1, 200_000)
outputs = st.floats(0, 20_000)


def literal_decode_time_s(
    c: Constants, batch: float, prompt_tokens: float, output_tokens: int
) -> float:
    """Eq. (4) as it is printed: a sum over the steps."""
    return math.fsum(
        c.p5 * batch * (prompt_tokens + k) + c.p6 * batch + c.p7 * (prompt_tokens + k) + c.p8
        for k in range(1, output_tokens + 1)
    )


def literal_request_time_s(p: Profile, prompt_tokens: int, output_tokens: int) -> float:
    """Eqs. (3) to (6), literally, with b capped at max_num_seqs and infinity below one."""
    b = p.kv_capacity_tokens / (prompt_tokens + output_tokens)
    if b < 1:
        return math.inf
    b = min(b, p.max_num_seqs)
    c = p.constants
    prefill_s = c.p1 * b * prompt_tokens + c.p2 * b + c.p3 * prompt_tokens + c.p4
    prefill_s += c.p9 * b * prompt_tokens**2 / 2  # not in the print
    return (prefill_s + literal_decode_time_s(c, b, prompt_tokens, output_tokens)) / b


# KV memory


def test_kv_memory_is_what_is_left_after_weights_and_reserve_in_tokens() -> None:
    # 32 layers, 8 KV heads of 128, fp16: a quarter of what 2·l·h with h = 4096 would give.
    llama = cost_model.kv_bytes_per_token(32, 8, 128, 2)
    assert llama == 131072 == cost_model.kv_bytes_per_token(32, 32, 128, 2) / 4
    assert cost_model.kv_bytes_per_token(48, 8, 128, 2) == 196608  # Qwen 14B
    # Eq. (1) by hand: 4 × 32 GiB × 0.9 − 4 × 2 GiB − 8e9 × 2 B = 107.2 GiB − 16e9 B.
    left_bytes = cost_model.kv_capacity_bytes(4, 32 * GIB, 0.9, 2 * GIB, 8e9, 2)
    assert left_bytes == pytest.approx(107.2 * GIB - 16e9)
    assert left_bytes / llama == pytest.approx(756112.5)
    # The reserve is taken off every accelerator.
    one = cost_model.kv_capacity_bytes(1, 10, 1, 1, 0, 2)
    assert [cost_model.kv_capacity_bytes(t, 10, 1, 1, 0, 2) / one for t in (2, 8)] == [2, 8]
    # A model that does not fit leaves less than nothing.
    assert cost_model.kv_capacity_bytes(1, 16 * GIB, 0.9, 2 * GIB, 14e9, 2) < 0
    # The longest request must fit.
    assert cost_model.fits_memory(4096, 3840, 256)
    assert not cost_model.fits_memory(4095, 3840, 256)


# Step times


def test_a_prefill_and_a_decode_step_are_four_terms_each() -> None:
    c = Constants(2, 3, 5, 7, 17, 19, 23, 29)
    assert cost_model.prefill_time_s(c, 11, 13) == 2 * 11 * 13 + 3 * 11 + 5 * 13 + 7
    assert cost_model.decode_step_time_s(c, 11, 13) == 17 * 11 * 13 + 19 * 11 + 23 * 13 + 29


def test_attention_is_added_where_it_was_fitted_and_changes_nothing_elsewhere() -> None:
    c = Constants(2, 3, 5, 7, 0, 0, 0, 1, p9=17)
    eq_3_s = 2 * 11 * 13 + 3 * 11 + 5 * 13 + 7
    assert cost_model.prefill_time_s(c, 11, 13) == eq_3_s + 17 * 11 * 13 * 13 / 2
    assert cost_model.prefill_time_s(c, 11, 13, 100) == eq_3_s + 17 * 11 * 13 * (100 + 13 / 2)
    eight = dataclasses.replace(FAST_CONSTANTS, p9=0.0)
    assert eight == FAST_CONSTANTS
    for new in (1, 517, 100_003):
        eq_3_s = eight.p1 * 3 * new + eight.p2 * 3 + eight.p3 * new + eight.p4
        assert cost_model.prefill_time_s(eight, 3, new, 999) == eq_3_s  # to the bit


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(0, 100_000))
def test_a_prompt_in_chunks_attends_to_as_much_as_in_one_piece(chunks, context):
    pairs, behind = 0.0, context
    for chunk in chunks:
        pairs += cost_model.attended_pairs(chunk, behind)
        behind += chunk
    assert pairs == cost_model.attended_pairs(sum(chunks), context)  # whole halves: exact
    # And a cached context spares the attention of its own tokens, no more.
    whole = cost_model.attended_pairs(context + sum(chunks))
    assert pairs == whole - cost_model.attended_pairs(context)


@given(profiles(), st.floats(1, 512), st.integers(0, 100_000), st.integers(0, 400))
def test_decode_time_equals_the_literal_sum(p, batch, prompt_tokens, output_tokens):
    literal = literal_decode_time_s(p.constants, batch, prompt_tokens, output_tokens)
    closed = cost_model.decode_time_s(p.constants, batch, prompt_tokens, output_tokens)
    assert closed == pytest.approx(literal, rel=1e-9, abs=1e-15)


# The cost of a request


def test_the_ideal_batch_fills_the_kv_cache_up_to_the_engines_limit() -> None:
    p = profile(kv_capacity_tokens=10_000, max_num_seqs=64)
    assert cost_model.ideal_batch(p, 900, 100) == 10
    assert cost_model.ideal_batch(p, 10, 10) == 64


@given(profiles(), prompts, st.integers(1, 400))
def test_request_time_equals_the_literal_equations(p, prompt_tokens, output_tokens):
    literal = literal_request_time_s(p, prompt_tokens, output_tokens)
    assert request_time_s(p, prompt_tokens, output_tokens) == pytest.approx(literal, rel=1e-9)


@given(profiles(), prompts)
def test_request_time_is_infinite_exactly_where_the_kv_cache_is_too_small(p, prompt_tokens):
    room = p.kv_capacity_tokens - prompt_tokens
    if room >= 0:
        assert math.isfinite(request_time_s(p, prompt_tokens, room))
    assert request_time_s(p, prompt_tokens, max(0, room + 1)) == math.inf


def member_of(p: Profile) -> Member:
    limits = (float(p.kv_capacity_tokens), float(p.kv_capacity_tokens), float(p.max_num_seqs))
    return Member(*dataclasses.astuple(p.constants), *limits, 1.0, 0.0, 0.0, 0.0)


@given(profiles(), prompts, outputs)
def test_a_member_s_request_time_equals_the_equations_of_its_profile(
    p: Profile, prompt_tokens: int, output_tokens: float
) -> None:
    member, expected = member_of(p), request_time_s(p, prompt_tokens, output_tokens)
    assert holds(member, prompt_tokens + output_tokens) == math.isfinite(expected)
    if not math.isfinite(expected):
        # As if it ran alone.
        roomy = dataclasses.replace(p, kv_capacity_tokens=10**9, max_num_seqs=1)
        expected = request_time_s(roomy, prompt_tokens, output_tokens)
    found = member_request_time_s(member, prompt_tokens, output_tokens)
    assert found == pytest.approx(expected, rel=1e-9)


@given(profiles(), prompts, outputs, st.integers(0, 5000), st.floats(0, 5000))
def test_request_time_never_falls_with_more_tokens(
    p: Profile, prompt_tokens: int, output_tokens: float, more_prompt: int, more_output: float
) -> None:
    base = request_time_s(p, prompt_tokens, output_tokens)
    longer_prompt = request_time_s(p, prompt_tokens + more_prompt, output_tokens)
    longer_output = request_time_s(p, prompt_tokens, output_tokens + more_output)
    assert longer_prompt >= base * (1 - 1e-12)
    assert longer_output >= base * (1 - 1e-12)


def test_request_time_rises_with_its_lengths_and_on_a_slower_machine() -> None:
    by_prompt = [request_time_s(FAST, i, 256) for i in (1, 10, 100, 1000, 10_000)]
    by_output = [request_time_s(FAST, 512, o) for o in (1, 10, 100, 1000, 10_000)]
    assert by_prompt == sorted(set(by_prompt))
    assert by_output == sorted(set(by_output))
    fast_s, half_speed = request_time_s(FAST, 512, 256), profile(FAST_CONSTANTS.scaled(2))
    assert request_time_s(SLOW, 512, 256) > 2 * fast_s
    assert request_time_s(half_speed, 512, 256) == pytest.approx(2 * fast_s)


# Workload


def test_workload_grows_with_the_exponential_of_kv_usage_which_may_exceed_one() -> None:
    assert [cost_model.kv_usage(tokens, 1000) for tokens in (0, 2500)] == [0, 2.5]
    assert cost_model.workload(3.0, 0.0, 2.0) == 3.0
    for usage in (0.5, 1.5):
        assert cost_model.workload(3.0, usage, 2.0) == pytest.approx(3 * math.exp(2 * usage))


@pytest.mark.parametrize("usage", [25.0, 26.0, 1e6, 1e300, math.inf])
def test_the_exponent_is_capped_instead_of_overflowing(usage: float) -> None:
    capped = cost_model.workload(2.0, usage, 2.0)
    assert capped == 2.0 * math.exp(cost_model.MAX_EXPONENT)
