"""Arrivals, lengths and faults of simulated runs."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.sim.workload import (
    EvenLengths,
    Fault,
    FaultKind,
    LogNormal,
    LogNormalLengths,
    TraceLengths,
    Workload,
    at_rate,
    gamma_arrivals,
    mean_rate_per_s,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def workload(
    arrivals: list[float], prompt: list[int] | None = None, output: list[int] | None = None
) -> Workload:
    ones = [1] * len(arrivals)
    return Workload(np.array(arrivals, float), np.array(prompt or ones), np.array(output or ones))


# Workload


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([],), "at least one request"),
        (([0.0], [1, 1]), "one length"),
        (([1.0, 0.5],), "must not decrease"),
        (([-1.0],), "at least 0"),
        (([0.0, math.nan],), "finite"),
        (([0.0, math.inf],), "finite"),
        (([0.0], [0]), "at least 1 token"),
        (([0.0], [1], [0]), "at least 1 token"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        workload(*arguments)


# Arrivals


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    gaps = np.diff(gamma_arrivals(200_000, 5.0, cv, rng()))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_a_variation_of_zero_is_a_clock_and_poisson_gaps_are_exponential() -> None:
    assert gamma_arrivals(4, 2.0, 0, rng()).tolist() == [0, 0.5, 1.0, 1.5]
    gaps = np.diff(gamma_arrivals(100_000, 1.0, 1.0, rng()))
    assert (gaps > 2).mean() == pytest.approx(math.exp(-2), rel=0.03)


FACTORS = st.floats(0.01, 100), st.floats(0.1, 100), st.floats(0, 5)


@given(st.integers(1, 200), *FACTORS, st.integers(0, 2**31))
def test_a_rate_only_stretches_the_arrivals_of_a_seed(count, rate, factor, cv, seed):
    slow = gamma_arrivals(count, rate, cv, rng(seed))
    fast = gamma_arrivals(count, rate * factor, cv, rng(seed))
    assert slow[0] == fast[0] == 0
    assert (np.diff(slow) >= 0).all()
    assert np.allclose(fast * factor, slow)


def test_given_times_are_stretched_to_a_rate_unless_they_are_all_the_same() -> None:
    times = np.array([10.0, 11.0, 14.0])
    assert mean_rate_per_s(times) == 0.5
    assert at_rate(times, 0.5).tolist() == [0, 1, 4]
    assert at_rate(times, 2.0).tolist() == [0, 0.25, 1]
    assert at_rate(times, math.inf).tolist() == [0, 0, 0]
    assert mean_rate_per_s(np.array([3.0, 3.0])) == math.inf
    assert at_rate(np.array([3.0, 3.0]), 5.0).tolist() == [0, 0]


# Lengths


def test_log_normal_lengths_have_their_median_and_stay_within_bounds() -> None:
    prompt, output = LogNormalLengths(LogNormal(300, 1.0, 1000), LogNormal(50, 0.5, 4000)).draw(
        50_000, rng()
    )
    assert np.median(prompt) == pytest.approx(300, rel=0.02)
    assert np.log(output).std() == pytest.approx(0.5, rel=0.02)
    assert (prompt.min(), prompt.max()) >= (1, 1000)
    assert prompt.max() == 1000
    assert prompt.dtype == output.dtype == np.int64


def test_a_trace_in_order_begins_again_after_its_last_row() -> None:
    trace = TraceLengths(np.array([1, 2, 3]), np.array([10, 20, 30]), in_order=True)
    prompt, output = trace.draw(5, rng())
    assert prompt.tolist() == [1, 2, 3, 1, 2]
    assert output.tolist() == [10, 20, 30, 10, 20]


def test_a_sampled_trace_keeps_its_rows_together_and_draws_all_of_them() -> None:
    trace = TraceLengths(np.arange(1, 9), np.arange(1, 9) * 7)
    prompt, output = trace.draw(1000, rng())
    assert (output == prompt * 7).all()
    assert set(prompt.tolist()) == set(range(1, 9))
    assert trace.draw(20, rng(1))[0].tolist() == trace.draw(20, rng(1))[0].tolist()


# Faults


@pytest.mark.parametrize(
    "change",
    [{"start_s": -1}, {"end_s": 5.0}, {"factor": 0.0}, {"factor": math.inf}, {"start_s": math.nan}],
)
def test_a_fault_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    values = {"start_s": 5.0, "end_s": 6.0, "factor": 2.0} | change
    with pytest.raises(ValueError, match=r"start_s|factor"):
        Fault(0, FaultKind.SLOW, **values)


def test_even_lengths_have_the_means_of_their_pool() -> None:
    rng = np.random.default_rng(0)
    prompt = LogNormal(300, 1.0, 5000).draw(20_000, rng)
    output = LogNormal(100, 1.0, 2000).draw(20_000, rng)
    even, drawn = EvenLengths(prompt, output), TraceLengths(prompt, output)
    errors = {
        name: np.std([sum(lengths.draw(500, np.random.default_rng(s))).mean() for s in range(20)])
        for name, lengths in (("even", even), ("drawn", drawn))
    }
    assert errors["even"] < errors["drawn"] / 10
    p, o = even.draw(500, rng)
    rows = set(zip(prompt.tolist(), output.tolist(), strict=True))
    assert set(zip(p.tolist(), o.tolist(), strict=True)) <= rows
    # Short and long ones are mixed: a run is the same at its start and at its end.
    assert abs(np.corrcoef(np.arange(500), p)[0, 1]) < 0.2
