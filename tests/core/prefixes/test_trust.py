"""Trust: what a predicted hit is worth on one instance."""

from __future__ import annotations

import pytest

from hetero_gateway.core.prefixes.trust import Trust


def test_it_begins_at_one_and_stays_there_while_hits_come() -> None:
    trust = Trust()
    assert trust.eta == 1.0
    for _ in range(200):
        trust.observe(3000, 3000)
    assert trust.eta == 1.0


def test_an_instance_without_a_cache_ends_near_0() -> None:
    trust = Trust()
    for _ in range(50):
        trust.observe(4000, 0)
    assert trust.eta < 0.05
    trust = Trust()
    trust.observe(0, 0)
    assert trust.eta == 1.0, "nothing was predicted, so nothing was wrong"


def test_by_hand() -> None:
    trust = Trust()
    trust.observe(4096, 2048)
    assert trust.eta == pytest.approx((2048 + 4096) / (4096 + 4096))
    trust.observe(1000, 500)
    assert trust.eta == pytest.approx((0.98 * 2048 + 500 + 4096) / (0.98 * 4096 + 1000 + 4096))


def test_it_recovers_within_some_dozen_requests() -> None:
    trust = Trust()
    for _ in range(200):
        trust.observe(4000, 0)
    for _ in range(150):
        trust.observe(4000, 4000)
    assert trust.eta > 0.9


def test_a_hit_that_nobody_predicted_does_not_make_up_for_one_that_failed() -> None:
    trust = Trust()
    for _ in range(100):
        trust.observe(4000, 0)
        trust.observe(100, 1_000_000)
    assert trust.eta < 0.2


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
    trust = Trust()
    trust.observe(100, figure)
    trust.observe(figure, 100)
    assert trust.eta == 1.0


def test_after_a_restart_it_is_the_prior() -> None:
    trust = Trust()
    trust.observe(100_000, 0)
    trust.reset()
    assert trust.eta == 1.0
