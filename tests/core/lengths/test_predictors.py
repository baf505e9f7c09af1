"""Length predictors: what they learn, where they start, and that they stay bounded."""

import numpy as np
import pytest

from hetero_gateway.core.lengths.predictors import (
    MAX_MODELS,
    BucketMeanPredictor,
    ConstantPredictor,
    LengthFeatures,
    NormalPredictor,
    OutputLengthPredictor,
)


def asked_of(
    beginning: int | None = None, prompt_tokens: int = 100, model: str = "m"
) -> LengthFeatures:
    return LengthFeatures(model, prompt_tokens, beginning=beginning)


M_100 = asked_of()


def learnt(*teaching: tuple[LengthFeatures, float], times: int = 500) -> BucketMeanPredictor:
    """Taught each of these lengths so often, in turn."""
    predictor = BucketMeanPredictor(256.0)
    for _ in range(times):
        for features, tokens in teaching:
            predictor.observe(features, tokens)
    return predictor


def test_a_bucket_starts_at_the_prior_which_weighs_as_much_as_it_says() -> None:
    predictor, asked = BucketMeanPredictor(100.0, prior_requests=4), asked_of(prompt_tokens=64)
    assert predictor.predict(asked) == 100.0
    for seen in range(1, 5):
        predictor.observe(asked, 200)
        mean = (4 * 100 + seen * 200) / (4 + seen)
        assert predictor.predict(asked) == pytest.approx(mean)
    # A mean, never a draw.
    assert len({predictor.predict(asked) for _ in range(20)}) == 1


def test_a_bucket_learns_the_mean_of_its_own_lengths() -> None:
    predictor = BucketMeanPredictor(256.0)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        predictor.observe(M_100, rng.exponential(40))
        predictor.observe(LengthFeatures("m", 3000), rng.exponential(800))
    assert predictor.predict(LengthFeatures("m", 120)) == pytest.approx(40, rel=0.15)
    assert predictor.predict(LengthFeatures("m", 2500)) == pytest.approx(800, rel=0.15)


def test_prompts_that_begin_alike_are_learnt_apart() -> None:
    predictor = BucketMeanPredictor(100.0, 8.0)
    for _ in range(200):
        predictor.observe(asked_of(1), 20.0)
        predictor.observe(asked_of(None), 300.0)
    assert predictor.predict(asked_of(1)) == pytest.approx(20.0, rel=0.3)
    # What is known by its beginning says nothing of those that are not.
    for other in (None, 2):
        assert predictor.predict(asked_of(other)) == pytest.approx(300.0, rel=0.1)
    assert predictor.predict(asked_of(1, 1000)) == predictor.predict(asked_of(3, 1000))


def test_beginnings_that_were_not_seen_for_long_are_forgotten() -> None:
    predictor = BucketMeanPredictor(100.0)
    for i in range(10_000):
        predictor.observe(asked_of(i), 20.0)
        predictor.observe(asked_of(-1), 50.0)
    assert len(predictor._beginnings) == 4096
    assert predictor.predict(asked_of(-1)) == pytest.approx(50.0, rel=0.02)


def test_models_are_learnt_apart() -> None:
    brief, verbose = asked_of(model="brief"), asked_of(model="verbose")
    predictor = learnt((brief, 10), (verbose, 1000))
    assert predictor.predict(brief) < 20
    assert predictor.predict(verbose) > 950


def test_a_bucket_without_requests_starts_at_its_models_mean() -> None:
    predictor, long = learnt((M_100, 10)), asked_of(prompt_tokens=100_000)
    assert predictor.predict(long) == pytest.approx(14, abs=3)
    predictor.observe(long, 100)
    # One request moves it by a ninth of the way, from the model's mean and not from the prior.
    assert predictor.predict(long) == pytest.approx(14 + 86 / 9, abs=3)


def test_buckets_are_powers_of_two() -> None:
    sizes = [asked_of(prompt_tokens=size) for size in (64, 127, 128, 255)]
    predictor = learnt((sizes[0], 10), (sizes[2], 1000))
    means = [predictor.predict(features) for features in sizes]
    assert means[0] == means[1] < 20
    assert means[2] == means[3] > 900


def test_it_follows_a_change_of_traffic() -> None:
    predictor = learnt((M_100, 10), times=100_000)
    for _ in range(5000):
        predictor.observe(M_100, 1000)
    assert predictor.predict(M_100) > 950


def test_the_number_of_models_is_bounded_and_the_rest_share_one_entry() -> None:
    predictor = BucketMeanPredictor(256.0)
    for i in range(3 * MAX_MODELS):
        for _ in range(20):
            predictor.observe(LengthFeatures(f"m{i}", 100), 10 if i < MAX_MODELS else 1000)
            predictor.observe(LengthFeatures(f"m{i}", 3000), 10 if i < MAX_MODELS else 4000)
    assert len(predictor._models) == MAX_MODELS + 1
    assert len(predictor._buckets) == 2 * (MAX_MODELS + 1)
    assert predictor.predict(LengthFeatures("m0", 100)) < 100
    # Those that came too late learn together, by bucket like everyone else.
    late = LengthFeatures(f"m{3 * MAX_MODELS - 1}", 100)
    assert predictor.predict(late) == pytest.approx(1000, rel=0.1)
    assert predictor.predict(LengthFeatures("never seen", 3000)) == pytest.approx(4000, rel=0.1)


@pytest.mark.parametrize(
    "predictor",
    [
        ConstantPredictor(0.25),
        BucketMeanPredictor(0.25),
        NormalPredictor(0.25, 0.0, np.random.default_rng(0)),
    ],
)
def test_a_prediction_is_never_below_one_token(predictor: OutputLengthPredictor) -> None:
    assert predictor.predict(M_100) == 1.0
    for _ in range(50):
        predictor.observe(M_100, 0)
    assert predictor.predict(M_100) == 1.0


def test_a_constant_learns_nothing() -> None:
    predictor = ConstantPredictor(300.0)
    predictor.observe(M_100, 10)
    assert predictor.predict(M_100) == 300.0


def test_the_normal_draw_has_its_mean_and_deviation_and_is_clipped_at_one_token() -> None:
    predictor = NormalPredictor(1000.0, 100.0, np.random.default_rng(0))
    draws = [predictor.predict(M_100) for _ in range(4000)]
    assert np.mean(draws) == pytest.approx(1000, abs=8)
    assert np.std(draws) == pytest.approx(100, rel=0.06)
    predictor = NormalPredictor(100.0, 200.0, np.random.default_rng(0))
    draws = [predictor.predict(M_100) for _ in range(2000)]
    assert min(draws) == 1.0
    # P(X < 1) at mean 100 and deviation 200 is 31 %.
    assert 0.25 < draws.count(1.0) / len(draws) < 0.37
    assert np.mean([d for d in draws if d > 1]) > 100


def test_answers_that_are_made_up_hardly_move_the_mean_and_are_forgotten() -> None:
    predictor = BucketMeanPredictor(256.0)
    for i in range(1000):
        predictor.observe(M_100, 200)
        if i % 50 == 0:
            predictor.observe(M_100, 10**15)
    assert predictor.predict(M_100) < 300
    for _ in range(48):
        predictor.observe(M_100, 10**15)
    for _ in range(3000):
        predictor.observe(M_100, 200)
    assert predictor.predict(M_100) == pytest.approx(200, rel=0.2)
