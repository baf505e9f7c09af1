"""``finish-time``: the compiled loop has the scheduler's records, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.policies import PolicyOptions
from hetero_gateway.core.policies.finish_time import FinishTime
from hetero_gateway.core.policies.slo import Slo, Slos
from hetero_gateway.sim.fleet import can_compile
from hetero_gateway.sim.workload import Fault, FaultKind, Workload
from tests.sim.compiled.cases import (
    PREDICTORS,
    check_compiled,
    check_interpreted,
    faults,
    heavy_workload,
    jobs,
    make_workload,
    profiles,
)

pytestmark = pytest.mark.skipif(not can_compile(), reason="numba is not installed")

SMALL = Profile("small", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.01), 2500, 4)
LARGE = Profile("large", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.02), 9000, 16)
CLUSTER = [SMALL, LARGE, SMALL, LARGE, SMALL, SMALL]
# Of all steps of one for a while: it is doubted, and probed.
SLOW = [Fault(1, FaultKind.SLOW, 0.5, 9.0, 8.0)]


@settings(max_examples=60, deadline=None)
@given(
    profiles(1000),
    jobs,
    st.sampled_from(["latency", "makespan"]),
    st.integers(1, 4),
    st.sampled_from(PREDICTORS),
    st.booleans(),
    faults,
    st.sampled_from([None, Slo(), Slo(0.1, 0.02), Slo(tpot_s=0.05), Slo(ttft_s=0.5)]),
)
def test_records_are_the_same_to_the_bit(
    profiles, jobs, objective, depth, predictor, oracle, faults, slo
):
    load = make_workload(jobs)
    slos = None if slo is None else Slos(slo)
    options = PolicyOptions(objective=objective, prefill_depth=depth, slos=slos)
    predictions = load.output_tokens.astype(float) if oracle else None
    given = {"predictions": predictions, "faults": faults}
    used = check_interpreted(profiles, load, "finish-time", options, predictor, **given)
    # Normal draws may be longer than the smallest instance.
    assert used or predictor == "normal"


def test_doubted_speeds_and_probes_are_the_same():
    load = heavy_workload(300, 0.15)
    options = PolicyOptions()
    assert check_interpreted(CLUSTER, load, "finish-time", options, "bucket-mean", faults=SLOW)


def test_requests_that_not_all_can_hold_are_left_to_the_objects():
    load = Workload(np.zeros(2), np.array([2600, 10]), np.array([5, 5]))
    cluster = [SMALL, LARGE]
    assert not check_interpreted(cluster, load, "finish-time", PolicyOptions(), "constant")


def test_limits_that_are_not_the_same_for_all_are_left_to_the_objects():
    options = PolicyOptions(slos=Slos(Slo(1.0, 0.1), classes={"batch": Slo()}))
    load = heavy_workload(20, 0.1)
    assert not check_interpreted(CLUSTER, load, "finish-time", options, "constant")


def test_a_rule_that_is_not_known_is_left_to_the_objects(monkeypatch):
    made = FinishTime.__init__

    def with_more(policy, options):
        made(policy, options)
        policy.patience_of_saints = 1.0

    monkeypatch.setattr(FinishTime, "__init__", with_more)
    load = heavy_workload(20, 0.1)
    assert not check_interpreted(CLUSTER, load, "finish-time", PolicyOptions(), "constant")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        PolicyOptions(),
        PolicyOptions(objective="makespan"),
        PolicyOptions(slos=Slos(Slo(0.2, 0.03))),
    ],
    ids=["latency", "makespan", "slo"],
)
def test_compiled_by_numba_too(options):
    for gap_s in (0.002, 0.1):
        load = heavy_workload(1500, gap_s)
        check_compiled(CLUSTER, load, "finish-time", options, faults=SLOW)
