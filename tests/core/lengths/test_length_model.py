"""The trained length model: what it learns, what it goes on learning, and its document."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.lengths.length_model import (
    ANY_MODEL,
    Leaf,
    LengthModel,
    Split,
    TrainedPredictor,
    from_document,
    leaf_count,
    to_document,
)
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    LengthFeatures,
)
from hetero_gateway.core.lengths.training import (
    MIN_MODEL_ROWS,
    LengthSamples,
    error_of,
    errors_by_prompt,
    fit_length_model,
    replay,
)


def samples(
    prompt: Any, output: Any, limit: Any = math.inf, models: list[str] | None = None
) -> LengthSamples:
    count = len(prompt)
    return LengthSamples(
        np.asarray(prompt, float),
        np.broadcast_to(np.asarray(limit, float), (count,)),
        np.asarray(output, float),
        models or [""] * count,
    )


def steps(count: int = 4000, seed: int = 0) -> LengthSamples:
    """Output 20 up to 700 prompt tokens, 400 above; noise of a third."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 2000, count)
    mean = np.where(prompt <= 700, 20.0, 400.0)
    return samples(prompt, np.maximum(1, mean * rng.normal(1, 0.33, count)))


def predict(model: LengthModel, prompt: int, limit: int | None = None, name: str = "") -> float:
    return TrainedPredictor(model).predict(LengthFeatures(name, prompt, limit))


def test_a_planted_step_is_found_where_it_is() -> None:
    model = fit_length_model(steps())
    for prompt, mean in ((10, 20), (690, 20), (710, 400), (100_000, 400)):
        assert predict(model, prompt) == pytest.approx(mean, rel=0.1), prompt


def test_the_clients_limit_is_learnt_and_no_limit_is_its_own_case() -> None:
    rng = np.random.default_rng(1)
    limits = rng.choice([16.0, 512.0, math.inf], 3000)
    means = np.select([limits == 16, limits == 512], [12.0, 200.0], 600.0)
    model = fit_length_model(samples(rng.integers(1, 2000, 3000), rng.poisson(means) + 1, limits))
    assert predict(model, 500, 16) == pytest.approx(13, rel=0.2)
    assert predict(model, 500, 512) == pytest.approx(200, rel=0.1)
    assert predict(model, 500, None) == pytest.approx(600, rel=0.1)


def test_lengths_that_depend_on_nothing_give_one_leaf() -> None:
    rng = np.random.default_rng(2)
    noise = samples(rng.integers(1, 4000, 3000), rng.exponential(200, 3000) + 1)
    model = fit_length_model(noise)
    assert leaf_count(model.trees[ANY_MODEL]) == 1
    assert predict(model, 77) == pytest.approx(noise.output_tokens.mean(), rel=0.01)


def test_it_errs_less_than_log2_buckets_where_the_step_is_inside_of_one() -> None:
    model, later = fit_length_model(steps()), steps(seed=9)
    buckets = BucketMeanPredictor(200.0)
    replay(buckets, steps())
    trained = error_of(replay(TrainedPredictor(model), later), later)
    by_bucket = error_of(replay(buckets, later), later)
    assert trained.rmse_tokens < 0.9 * by_bucket.rmse_tokens
    assert trained.mae_tokens < 0.9 * by_bucket.mae_tokens


def test_models_with_enough_requests_have_their_own_tree_and_others_share_one() -> None:
    count = MIN_MODEL_ROWS
    names = ["brief"] * count + ["verbose"] * count + ["rare"] * 10
    output = [10] * count + [1000] * count + [5] * 10
    model = fit_length_model(samples([100] * len(names), output, models=names))
    assert set(model.trees) == {ANY_MODEL, "brief", "verbose"}
    assert predict(model, 100, name="brief") == pytest.approx(10, rel=0.01)
    assert predict(model, 100, name="verbose") == pytest.approx(1000, rel=0.01)
    assert predict(model, 100, name="rare") == predict(model, 100, name="never seen")


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="49 requests are too few: at least 50"):
        fit_length_model(samples([1] * 49, [1] * 49))


def test_it_follows_a_change_in_the_leaf_where_it_happens_and_only_there() -> None:
    model = fit_length_model(steps())
    predictor = TrainedPredictor(model)
    for _ in range(5000):
        predictor.observe(LengthFeatures("", 100), 90.0)
    assert predictor.predict(LengthFeatures("", 100)) == pytest.approx(90, rel=0.05)
    assert predictor.predict(LengthFeatures("", 1500)) == predict(model, 1500)


def test_a_frozen_one_and_the_model_itself_do_not_change() -> None:
    model = fit_length_model(steps())
    before = to_document(model)
    predictors = TrainedPredictor(model, online=False), TrainedPredictor(model)
    for predictor in predictors:
        for _ in range(100):
            predictor.observe(LengthFeatures("", 100), 9000.0)
    assert predictors[0].predict(LengthFeatures("", 100)) == predict(model, 100)
    assert predictors[1].predict(LengthFeatures("", 100)) > 2 * predict(model, 100)
    assert to_document(model) == before


@given(
    st.integers(1, 10**9),
    st.none() | st.integers(1, 10**9),
    st.lists(st.floats(0, 1e9), max_size=30),
)
def test_a_prediction_is_always_a_number_of_at_least_one(prompt, limit, outputs):
    predictor = TrainedPredictor(MODEL)
    features = LengthFeatures("m", prompt, limit)
    for output in outputs:
        predictor.observe(features, output)
        assert 1 <= predictor.predict(features) < math.inf


MODEL = fit_length_model(steps(400))

# Errors


def test_errors_are_those_that_one_computes_by_hand() -> None:
    asked = samples([10, 10, 5000], [100, 200, 300])
    error = error_of(np.array([110.0, 170.0, 300.0]), asked)
    assert error.requests == 3
    assert error.mae_tokens == pytest.approx(40 / 3)
    assert error.bias_tokens == pytest.approx(-20 / 3)
    assert error.rmse_tokens == pytest.approx(math.sqrt(1000 / 3))
    by_prompt = errors_by_prompt(np.array([110.0, 170.0, 300.0]), asked)
    assert [e.requests if e else 0 for e in by_prompt] == [2, 0, 0, 0, 1, 0]


def test_a_replayed_prediction_is_made_before_its_length_is_seen_and_capped_by_the_limit() -> None:
    buckets = BucketMeanPredictor(100.0, prior_requests=1)
    predicted = replay(buckets, samples([64, 64], [300, 300]))
    assert list(predicted) == [100.0, 200.0]
    capped = replay(ConstantPredictor(100.0), samples([64, 64], [5, 5], limit=[8, math.inf]))
    assert list(capped) == [8.0, 100.0]


# The document


def test_a_document_survives_json_unchanged() -> None:
    rng = np.random.default_rng(3)
    limits = rng.choice([16.0, math.inf], 2000)
    output = np.where(np.isinf(limits), rng.integers(1, 900, 2000), 9)
    model = fit_length_model(
        samples(rng.integers(1, 900, 2000), output, limits, ["a"] * 1000 + ["b"] * 1000)
    )
    assert len(model.trees) == 3
    text = json.dumps(to_document(model), allow_nan=False)
    assert from_document(json.loads(text)) == model


LEAF = {"tokens": 10.0, "requests": 5}
SPLIT = {"by": "prompt_tokens", "at": 3, "below": LEAF, "above": LEAF}


def document(tree: Any = LEAF, **changes: Any) -> dict[str, Any]:
    whole = {"format": "hetero-gateway length model", "version": 1, "models": {"": tree}}
    return whole | changes


def nested(depth: int) -> Any:
    tree: Any = LEAF
    for _ in range(depth):
        tree = SPLIT | {"below": tree}
    return tree


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "document: must be a mapping"),
        ({}, "document: format is missing"),
        (document(note=1), "document: unknown key 'note'"),
        (document(format="x"), "format: must be"),
        (document(version=2), "version: 2 is not known here"),
        (document(models={}), 'with a tree for ""'),
        (document(models={"": LEAF, "m": 3}), "models.m: must be a mapping"),
        (document(LEAF | {"tokens": 0}), "models..tokens: must be a number from 1"),
        (document(LEAF | {"tokens": math.nan}), "models..tokens: must be a number"),
        (document(LEAF | {"tokens": True}), "models..tokens: must be a number"),
        (document(LEAF | {"tokens": "9"}), "models..tokens: must be a number"),
        (document(LEAF | {"requests": -1}), "models..requests: must be a number from 0"),
        (document(SPLIT | {"by": "prompt"}), "models..by: must be one of prompt_tokens"),
        (document(SPLIT | {"at": math.inf}), "models..at: must be a number"),
        (document(SPLIT | {"above": {}}), "models..above: above is missing"),
        (document(SPLIT | {"more": 1}), "models.: unknown key 'more'"),
        (document(nested(500)), "more than 64 splits deep"),
    ],
)
def test_a_bad_document_is_refused_by_its_key(data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        from_document(data)


def test_splits_send_equal_values_below() -> None:
    model = LengthModel({ANY_MODEL: Split("prompt_tokens", 64, Leaf(10, 1), Leaf(90, 1))})
    assert (predict(model, 64), predict(model, 65)) == (10, 90)
    model = LengthModel({ANY_MODEL: Split("max_tokens", 64, Leaf(10, 1), Leaf(90, 1))})
    assert [predict(model, 1, limit) for limit in (64, 65, None)] == [10, 90, 90]
