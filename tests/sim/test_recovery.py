"""After a fault: two equal instances get equal shares again, in virtual time."""

import dataclasses

import numpy as np
import pytest

from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.sim.cluster import simulate
from hetero_gateway.sim.workload import Fault, FaultKind, Workload
from tests.core.builders import FAST
from tests.sim.builders import instances, make_scheduler, poisson

BEGIN_S, END_S, LAST_S = 10.0, 18.0, 50.0


def share(rate_per_s: float, factor: float, *, profiled: bool, seed: int) -> tuple[float, float]:
    """Of the first of two equal instances: while it is slow, and from 10 s after that on."""
    workload = poisson(
        np.random.default_rng(seed), int(rate_per_s * LAST_S), rate_per_s, (50, 500), 150
    )
    records = simulate(
        instances(FAST, FAST, profiled=profiled),
        workload,
        make_scheduler("finish-time", seed),
        BucketMeanPredictor(150.0),
        faults=[Fault(0, FaultKind.SLOW, BEGIN_S, END_S, factor)],
    )

    def between(begin_s: float, end_s: float) -> float:
        there = (records.placed_s >= begin_s) & (records.placed_s < end_s)
        return float((records.instance[there] == 0).mean())

    return between(BEGIN_S + 2, END_S), between(END_S + 10, LAST_S)


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("factor", [3.0, 10.0])
@pytest.mark.parametrize("rate_per_s", [10, 60])
def test_a_slow_instance_has_its_half_again_ten_seconds_after_it_is_well(
    rate_per_s: float, factor: float, profiled: bool
) -> None:
    shares = [share(rate_per_s, factor, profiled=profiled, seed=seed) for seed in range(2)]
    slow, well = np.mean(shares, axis=0)
    assert slow < 0.35
    assert well == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("count", "kind", "output_tokens"),
    [(2, FaultKind.SLOW, 1), (8, FaultKind.DEAD, 1), (8, FaultKind.SLOW, 8)],
)
def test_equal_unprofiled_ones_whose_speed_no_load_changes_have_their_parts(
    count: int, kind: FaultKind, output_tokens: int
) -> None:
    """Nothing but observed speeds tells them apart: who was seen first, or long ago, is no slower.

    Each has from 10 s after a fault on what it should have, within a fifth.
    """
    flat = dataclasses.replace(FAST, constants=Constants(2e-5, 0, 0, 5e-3, 0, 0, 0, 8e-3))
    parts = np.zeros(count)
    for seed in range(2):
        rng, rate_per_s = np.random.default_rng(seed), 5.0 * count
        workload = poisson(rng, int(rate_per_s * LAST_S), rate_per_s, (50, 300), output_tokens)
        records = simulate(
            instances(*[flat] * count, profiled=False),
            workload,
            make_scheduler("finish-time", seed),
            BucketMeanPredictor(float(output_tokens)),
            faults=[Fault(0, kind, BEGIN_S, END_S, 5.0)],
        )
        there = records.instance[records.placed_s >= END_S + 10]
        parts += np.bincount(there, minlength=count) / there.size * count / 2
    assert parts == pytest.approx(1, abs=0.2)


def test_one_that_stays_slow_costs_a_small_share_of_requests() -> None:
    rng = np.random.default_rng(0)
    workload = Workload(
        np.cumsum(rng.exponential(1 / 10, 1000)), np.full(1000, 200), np.full(1000, 100)
    )
    records = simulate(
        instances(FAST, FAST),
        workload,
        make_scheduler("finish-time"),
        BucketMeanPredictor(100.0),
        faults=[Fault(0, FaultKind.SLOW, 0.0, 1e6, 10.0)],
    )
    there = records.instance[records.placed_s > 10.0] == 0
    assert 0 < there.mean() < 1 / 12
