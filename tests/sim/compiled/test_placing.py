"""Policies that place at once: the compiled loop has the scheduler's records, to the last bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor, LengthFeatures
from hetero_gateway.core.policies import POLICY_NAMES, PolicyOptions
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim.fleet import can_compile
from hetero_gateway.sim.workload import Fault, FaultKind
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

PLACING = tuple(name for name in POLICY_NAMES if name != "finish-time")

pytestmark = pytest.mark.skipif(not can_compile(), reason="numba is not installed")

# Twins, so that there are ties; and far more than they can hold, so that charges are huge.
SMALL = Profile("small", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.01), 2000, 4)
LARGE = Profile("large", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.02), 9000, 16)


@settings(max_examples=150, deadline=None)
@given(
    profiles(400),
    jobs,
    st.sampled_from(PLACING),
    st.booleans(),
    st.sampled_from(PREDICTORS),
    st.booleans(),
    faults,
)
def test_records_are_the_same_to_the_bit(
    profiles, jobs, policy, randomised, predictor, oracle, faults
):
    load = make_workload(jobs)
    options = PolicyOptions(randomised=randomised, single_instance=InstanceId("i0"))
    predictions = load.output_tokens.astype(float) if oracle else None
    given = {"predictions": predictions, "faults": faults}
    assert check_interpreted(profiles, load, policy, options, predictor, **given)


@pytest.mark.slow
@pytest.mark.parametrize("policy", PLACING)
def test_compiled_by_numba_too(policy):
    load, twins = heavy_workload(3000, 0.002), [SMALL, LARGE, SMALL, LARGE, SMALL, SMALL]
    for randomised in (False, True) if "round-robin" in policy else (False,):
        check_compiled(twins, load, policy, PolicyOptions(randomised=randomised))


def test_what_is_not_covered_is_left_to_the_objects():
    class Other(BucketMeanPredictor):
        pass

    load = heavy_workload(30, 0.002)
    dead = [Fault(0, FaultKind.DEAD, 0.01, 0.02)]
    learnt = BucketMeanPredictor(10.0)
    learnt.observe(LengthFeatures("model", 5), 9)
    for predictor, happens in ((Other(40.0), []), (learnt, []), ("bucket-mean", dead)):
        cluster, options = [LARGE, LARGE], PolicyOptions()
        assert not check_interpreted(cluster, load, "min-max", options, predictor, faults=happens)
