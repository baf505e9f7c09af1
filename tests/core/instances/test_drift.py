"""A profile's drift is told from rows of traffic, once, and not before it is certain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.instances.drift import HOLD_S, Drift


def feed(
    drift: Drift,
    seconds: int,
    *,
    decode: float = 1.0,
    prefill: float = 1.0,
    noise: float = 0.1,
    share: float = 0.3,
    start_s: float = 0.0,
    seed: int = 0,
) -> list[float]:
    """Rows of a second each; returns when the verdict changed."""
    rng = np.random.default_rng(seed)
    changes = []
    for i in range(seconds):
        # What fits into a second: a part of it prefill, the rest decode; steps are a little off.
        p = float(rng.uniform(0, 2 * share))
        d = (1 - p) * float(np.exp(rng.normal(0, noise)))
        drift.observe(1.0, p / prefill, d / decode)
        if drift.judge(1.0, start_s + i):
            changes.append(start_s + i)
    return changes


@pytest.mark.parametrize(("decode", "prefill"), [(1, 1), (2, 1), (1, 2), (0.5, 3), (3, 0.5)])
def test_decode_and_prefill_are_told_apart(decode: float, prefill: float) -> None:
    drift = Drift()
    feed(drift, 400, decode=decode, prefill=prefill)
    told = drift.verdict()
    assert told.decode == pytest.approx(decode, rel=0.08)
    assert told.prefill == pytest.approx(prefill, rel=0.12)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 5), st.floats(0.02, 0.3), st.integers(0, 2**16))
def test_noise_in_the_steps_does_not_bias_the_ratio(ratio: float, noise: float, seed: int) -> None:
    drift = Drift()
    feed(drift, 600, decode=ratio, prefill=ratio, noise=noise, share=0.0, seed=seed)
    assert drift.verdict().decode == pytest.approx(ratio, rel=0.05 + noise / 3)


def test_a_phase_that_was_not_seen_is_not_told() -> None:
    drift = Drift()
    feed(drift, 200, share=0.0)
    assert drift.verdict().decode == pytest.approx(1, rel=0.05)
    assert drift.verdict().prefill is None


def test_nothing_is_told_of_a_few_seconds() -> None:
    drift = Drift()
    feed(drift, 15, decode=3.0)
    assert drift.verdict() == (None, None, None)
    assert not drift.drifted


def test_a_right_profile_never_drifts() -> None:
    drift = Drift()
    assert feed(drift, 3000, noise=0.2) == []
    assert drift.since_s is None


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_a_wrong_one_is_told_once_and_again_only_after_it_recovered(ratio: float) -> None:
    drift = Drift()
    (first,) = feed(drift, 600, decode=ratio, prefill=ratio)
    assert HOLD_S <= first < 3 * HOLD_S
    assert (drift.drifted, drift.since_s) == (True, first)
    (back,) = feed(drift, 1500, start_s=600)
    assert back > 600
    assert (drift.drifted, drift.since_s) == (False, None)
    assert len(feed(drift, 1500, decode=ratio, prefill=ratio, start_s=2100)) == 1


def test_it_does_not_flicker_at_the_bound() -> None:
    drift = Drift()
    changes = feed(drift, 5000, decode=1.25, prefill=1.25, noise=0.15)
    assert len(changes) <= 2


def test_rows_that_scatter_far_beyond_the_stated_error_are_drift() -> None:
    changes = {}
    for stated in (0.05, 0.6):
        drift = Drift(stated)
        changes[stated] = feed(drift, 900, noise=0.5, share=0.0)
    assert changes[0.05]
    assert not changes[0.6]


def test_one_wild_row_is_one_row() -> None:
    drift = Drift()
    feed(drift, 300)
    drift.observe(1.0, 0.0, 100.0)
    assert drift.verdict().decode == pytest.approx(1, rel=0.1)
