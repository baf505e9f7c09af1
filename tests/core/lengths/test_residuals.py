"""What is left of a request whose answer broke off."""

import pytest

from hetero_gateway.core.lengths.predictors import ResidualLives
from hetero_gateway.core.request import Request


def test_what_was_told_is_prompt_and_no_output_any_more() -> None:
    lives = ResidualLives(256.0)
    request = Request("m", 100, 300.0, certain_tokens=120)
    rest = lives.rest_of(request, 40)
    assert repr(rest) == repr(
        request.replace(prompt_tokens=140, predicted_output_tokens=260.0, certain_tokens=160)
    )
    assert rest.kv_tokens == request.kv_tokens
    assert lives.rest_of(request.replace(certain_tokens=None), 40).certain_tokens is None


@pytest.mark.parametrize(("told", "left"), [(30, 984.0), (100, 904.0), (999, 232.0)])
def test_beyond_its_prediction_it_is_as_long_as_such_answers_are(told: int, left: float) -> None:
    lives = ResidualLives(256.0, prior_requests=1e-9)
    for _ in range(500):
        lives.observe("m", 10.0)
        lives.observe("m", 1000.0)
    rest = lives.rest_of(Request("m", 100, float(told)), told)
    # As from the middle of its stage.
    assert rest.predicted_output_tokens == pytest.approx(left, rel=1e-3)
    assert rest.prompt_tokens == 100 + told
