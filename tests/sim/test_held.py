"""The highest load that is held: found by bisection, in hundredths of the bound."""

import numpy as np
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.sim.experiment import Experiment, held, measure_bound
from hetero_gateway.sim.held import held_loads
from hetero_gateway.sim.workload import TraceLengths
from tests.sim.builders import instances


def find(limit: float, **options: float) -> tuple[float, list[float]]:
    """What is found where all of a load is held up to a limit, and the loads that were tried."""
    asked: list[float] = []

    def share_at(load: float) -> float:
        asked.append(load)
        return 1.0 if load <= limit + 1e-9 else 0.0

    (found,) = held_loads(share_at, (0.95,), **options)
    assert len(asked) == len(set(asked))
    return found, asked


@pytest.mark.parametrize("limit", [0.0, 0.004, 0.37, 0.9, 1.999, 2.0, 7.0])
def test_the_last_hundredth_that_has_the_share_is_found(limit: float) -> None:
    found, asked = find(limit)
    assert found == pytest.approx(min(2.0, int(limit * 100 + 1e-9) / 100))
    assert len(asked) <= 8


@pytest.mark.parametrize("likely", [0.001, 0.36, 0.4, 0.9, 5.0])
@pytest.mark.parametrize("limit", [0.0, 0.37, 0.99, 1.0])
def test_what_is_likely_changes_the_tries_and_never_the_answer(limit: float, likely: float) -> None:
    found, asked = find(limit, most=1.0, likely=likely)
    assert found == pytest.approx(limit)
    assert max(asked) <= 1.0
    assert len(asked) <= (4 if abs(likely - limit) < 0.015 else 11)


def test_a_higher_share_is_held_up_to_a_lower_load() -> None:
    found = held_loads(lambda load: 1 - load / 2)
    assert found == pytest.approx((0.2, 0.1, 0.02))


@pytest.mark.system
def test_a_cluster_holds_more_where_the_limits_are_known() -> None:
    # The second takes six times as long for a prompt, and nearly as long for a step.
    fast = Profile("fast", "m", 1, Constants(2e-5, 0, 0, 0.005, 4e-8, 2e-5, 0, 0.01), 200_000, 128)
    slow = Profile("slow", "m", 1, Constants(1.2e-4, 0, 0, 0.01, 2e-7, 4e-5, 0, 0.02), 100_000, 128)
    rng = np.random.default_rng(0)
    lengths = TraceLengths(rng.integers(100, 5000, 300), rng.integers(20, 300, 300))

    def held_at_95(*, heeds: bool) -> float:
        cluster, slo = tuple(instances(fast, slow)), Slo(1.0, 0.04)
        experiment = Experiment(cluster, lengths, 150, slo, heeds_slo=heeds)
        return held(experiment, "finish-time", range(1), measure_bound(experiment))[1]

    assert held_at_95(heeds=True) > held_at_95(heeds=False)
