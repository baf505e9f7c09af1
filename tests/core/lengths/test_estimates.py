"""Estimates of lengths: what they learn, where they start, and that they stay bounded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.lengths.predictors import (
    MAX_MODELS,
    BytesPerToken,
    ResidualLives,
    capped_output_tokens,
)

# Caps


@pytest.mark.parametrize(
    ("predicted", "max_output", "context", "prompt", "expected"),
    [
        (256.0, None, None, 100, 256.0),
        (256.0, 16, None, 100, 16.0),
        (256.0, 1000, None, 100, 256.0),
        (256.0, None, 300, 100, 200.0),
        (256.0, 150, 300, 100, 150.0),
        (256.0, 250, 300, 100, 200.0),
        (256.0, None, 100, 100, 1.0),
        (256.0, None, 100, 5000, 1.0),
        (0.2, None, None, 100, 1.0),
    ],
)
def test_a_prediction_is_capped_by_the_request_and_by_the_context(
    predicted: float, max_output: int | None, context: int | None, prompt: int, expected: float
) -> None:
    assert capped_output_tokens(predicted, max_output, context, prompt) == expected


@given(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_capped_prediction_is_at_least_one_and_within_every_limit(
    predicted: float, max_output: int, context: int, prompt: int
) -> None:
    tokens = capped_output_tokens(predicted, max_output, context, prompt)
    assert 1 <= tokens <= max_output
    assert tokens <= max(1, context - prompt)


# Prompt lengths


def test_bytes_per_token_starts_at_the_prior_and_a_prompt_has_at_least_one_token() -> None:
    ratio = BytesPerToken(4.0)
    assert ratio.ratio("m") == 4.0
    assert [ratio.tokens("m", size) for size in (0, 1, 3, 4000)] == [1, 1, 1, 1000]


def test_bytes_per_token_is_learnt_per_model() -> None:
    ratio = BytesPerToken(4.0)
    for _ in range(200):
        ratio.observe("english", 4600, 1000)
        ratio.observe("chinese", 2000, 1000)
    assert ratio.ratio("english") == pytest.approx(4.6, rel=0.02)
    assert ratio.ratio("chinese") == pytest.approx(2.0, rel=0.05)
    assert ratio.ratio("other") == 4.0


def test_the_ratio_is_of_sums_and_not_the_mean_of_ratios() -> None:
    ratio = BytesPerToken(4.0)
    for _ in range(300):
        ratio.observe("m", 10, 40)  # a short prompt: the template is most of it
        ratio.observe("m", 40_000, 10_000)
    assert ratio.ratio("m") == pytest.approx(40_010 / 10_040, rel=0.005)
    assert (10 / 40 + 4) / 2 < 2.2  # what the mean of ratios would say


def test_the_prior_weighs_as_many_tokens_as_it_says() -> None:
    ratio = BytesPerToken(4.0, prior_tokens=100)
    ratio.observe("m", 600, 100)
    assert ratio.ratio("m") == pytest.approx((4 * 100 + 600) / 200)


def test_the_ratio_follows_a_change_of_traffic() -> None:
    ratio = BytesPerToken(4.0, prior_tokens=10)
    for _ in range(10_000):
        ratio.observe("m", 4000, 1000)
    for _ in range(200):
        ratio.observe("m", 2000, 1000)
    assert ratio.ratio("m") == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("told", [(50, 4000), (60_000, 60_000), (60_000, 10), (50, 10**18)])
def test_reports_that_are_made_up_hardly_move_the_ratio_and_are_forgotten(told):
    ratio = BytesPerToken(4.0)
    for i in range(400):
        ratio.observe("m", 6000, 1500)
        if i % 16 == 0:
            ratio.observe("m", *told)
    assert ratio.ratio("m") == pytest.approx(4.0, rel=0.5)
    for _ in range(500):
        ratio.observe("m", *told)  # nothing but lies
    assert 0.25 <= ratio.ratio("m") <= 64
    for _ in range(128 + 64):  # all that are kept, and half as many until it is worked out anew
        ratio.observe("m", 6000, 1500)
    assert ratio.ratio("m") == pytest.approx(4.0)


def test_a_report_that_says_nothing_teaches_nothing() -> None:
    ratio = BytesPerToken(4.0)
    for text_bytes, tokens in ((0, 10), (10, 0), (-1, 10), (10, -1)):
        ratio.observe("m", text_bytes, tokens)
    assert ratio.ratio("m") == 4.0


def test_the_number_of_models_with_a_ratio_is_bounded() -> None:
    ratio = BytesPerToken(4.0)
    for i in range(3 * MAX_MODELS):
        for _ in range(20):
            ratio.observe(f"m{i}", 2000 if i < MAX_MODELS else 8000, 1000)
    assert len(ratio) == MAX_MODELS + 1
    assert ratio.ratio("m0") < 3
    assert ratio.ratio(f"m{3 * MAX_MODELS - 1}") == ratio.ratio("never seen") > 7


# What a stream has still to come


def test_models_beyond_the_bound_learn_and_use_one_shared_table() -> None:
    lives = ResidualLives(prior_tokens=100.0)
    for i in range(2 * MAX_MODELS):
        for _ in range(64):
            lives.observe(f"m{i}", 50 if i < MAX_MODELS else 1000)
    assert len(lives) == MAX_MODELS + 1
    late = lives.of(f"m{2 * MAX_MODELS - 1}").plain
    # In a stage of 32 tokens, its middle is 16: of 1000, 984 are left.
    assert late[0] == pytest.approx(984, rel=0.01)
    assert late == lives.of("never seen").plain
    assert lives.of("m0").plain[0] < 100


def test_lengths_that_are_made_up_do_not_move_what_a_stream_has_still_to_come() -> None:
    honest, deceived = ResidualLives(100.0), ResidualLives(100.0)
    rng = np.random.default_rng(0)
    for i, tokens in enumerate(rng.exponential(300, 2000)):
        for lives in (honest, deceived):
            lives.observe("m", 1 + tokens)
        if i % 20 == 0:
            deceived.observe("m", 10.0**15)
    assert deceived.of("m").plain[0] < 2 * honest.of("m").plain[0]
    assert max(deceived.of("m").plain) < 8000
