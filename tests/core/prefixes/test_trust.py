"""Trust: what a predicted hit is worth on one instance."""

import pytest

from hetero_gateway.core.prefixes.trust import Trust


def told(*figures: tuple[float, float], times: int = 1) -> Trust:
    """After so many rounds of (predicted, actual) tokens."""
    trust = Trust()
    assert trust.eta == 1.0
    for _ in range(times):
        for predicted, actual in figures:
            trust.observe(predicted, actual)
    return trust


def test_it_is_what_the_hits_are_worth() -> None:
    assert told((3000, 3000), times=200).eta == 1.0
    assert told((4000, 0), times=50).eta < 0.05
    assert told((0, 0)).eta == 1.0, "nothing was predicted, so nothing was wrong"
    # By hand.
    assert told((4096, 2048)).eta == pytest.approx((2048 + 4096) / (4096 + 4096))
    expected = (0.98 * 2048 + 500 + 4096) / (0.98 * 4096 + 1000 + 4096)
    assert told((4096, 2048), (1000, 500)).eta == pytest.approx(expected)
    # A hit that nobody predicted does not make up for one that failed to come.
    assert told((4000, 0), (100, 1_000_000), times=100).eta < 0.2


def test_it_recovers_within_some_dozen_requests() -> None:
    trust = told((4000, 0), times=200)
    for _ in range(150):
        trust.observe(4000, 4000)
    assert trust.eta > 0.9


def test_a_cache_that_is_switched_off_is_not_trusted_at_all() -> None:
    trust = Trust()
    trust.switch(on=False)
    assert trust.eta == 0.0
    trust.observe(4000, 4000)
    trust.reset()
    assert trust.eta == 0.0
    trust.switch(on=True)
    assert trust.eta == 1.0


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_figure_that_cannot_be_is_ignored(figure: float) -> None:
    assert told((100, figure), (figure, 100)).eta == 1.0


def test_after_a_restart_it_is_the_prior() -> None:
    trust = told((100_000, 0))
    trust.reset()
    assert trust.eta == 1.0
