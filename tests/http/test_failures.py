"""What follows from each way in which an attempt can fail."""

import pytest

from hetero_gateway.core.types import Outcome
from hetero_gateway.http.failures import Failure, Suspicion


@pytest.mark.parametrize("failure", Failure)
def test_only_a_timeout_is_a_504_and_it_is_never_tried_again(failure: Failure) -> None:
    timed_out = failure.value.endswith("_timeout")
    assert (failure.status == 504) is timed_out
    assert (failure.outcome is Outcome.TIMED_OUT) is timed_out
    assert not (timed_out and failure.retryable)


def test_only_who_cannot_be_reached_is_certainly_down() -> None:
    assert [f for f in Failure if f.suspicion is Suspicion.DOWN] == [Failure.CONNECT]
