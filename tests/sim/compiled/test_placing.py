"""The compiled loop does what the scheduler's objects do, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    NormalPredictor,
)
from hetero_gateway.core.policies import POLICY_NAMES, PolicyOptions, make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim import cluster
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.fleet import can_compile
from hetero_gateway.sim.workload import Fault, FaultKind, Workload

PLACING = tuple(name for name in POLICY_NAMES if name != "finish-time")

pytestmark = pytest.mark.skipif(not can_compile(), reason="numba is not installed")

times_s = st.floats(0, 0.01)
profiles = st.builds(
    Profile,
    st.just("any"),
    st.just("m"),
    st.just(1),
    st.builds(
        Constants,
        st.floats(1e-6, 1e-4), times_s, times_s, times_s, st.floats(0, 1e-6), times_s, times_s,
        st.floats(1e-3, 0.05), st.sampled_from([0.0, 1e-9]),
    ),
    st.integers(400, 6000),
    st.integers(1, 12),
)  # fmt: skip
jobs = st.lists(
    st.tuples(st.floats(0, 3).map(lambda s: round(s, 2)), st.integers(1, 700), st.integers(1, 80)),
    min_size=1,
    max_size=60,
)
faults = st.lists(
    st.builds(
        lambda at, lasts, factor: Fault(0, FaultKind.SLOW, at, at + lasts, factor),
        st.floats(0, 3), st.floats(0.1, 3), st.floats(0.5, 4),
    ),
    max_size=2,
)  # fmt: skip


class Interpreted:
    """Runs the loops as they are written, and says whether any was asked for."""

    def __init__(self) -> None:
        self.used = False

    def __call__(self, loop):
        self.used = True
        return loop


def predictor_of(kind: str):
    return {
        "bucket-mean": lambda: BucketMeanPredictor(40.0),
        "constant": lambda: ConstantPredictor(30.5),
        "normal": lambda: NormalPredictor(40.0, 25.0, np.random.default_rng(5)),
    }[kind]()


def make_workload(jobs) -> Workload:
    arrival_s, prompts, outputs = zip(*sorted(jobs, key=lambda job: job[0]), strict=True)
    return Workload(np.array(arrival_s, float), np.array(prompts), np.array(outputs))


def run(profiles, load, policy, options, kind, *, compiled, **others) -> Records:
    instances = [
        SimulatedInstance(InstanceId(f"i{i}"), p, p, weight=1.0 + 0.7 * i)
        for i, p in enumerate(profiles)
    ]
    scheduler = Scheduler(make_policy(policy, options), np.random.default_rng(3))
    return simulate(
        instances, load, scheduler, predictor_of(kind),
        compiled=compiled, max_batched_tokens=64, **others,
    )  # fmt: skip


def assert_same(one: Records, other: Records) -> None:
    for name in Records.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(profiles, min_size=1, max_size=3).flatmap(
        lambda few: st.lists(st.sampled_from(few), min_size=1, max_size=5)
    ),
    jobs,
    st.sampled_from(PLACING),
    st.booleans(),
    st.sampled_from(["bucket-mean", "constant", "normal"]),
    st.booleans(),
    faults,
)
def test_records_are_the_same_to_the_bit(profiles, jobs, policy, randomised, kind, oracle, faults):
    load = make_workload(jobs)
    options = PolicyOptions(randomised=randomised, single_instance=InstanceId("i0"))
    predictions = load.output_tokens.astype(float) if oracle else None
    given = {"predictions": predictions, "faults": faults}
    expected = run(profiles, load, policy, options, kind, compiled=False, **given)
    interpreted = Interpreted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "jit_loop", interpreted)
        found = run(profiles, load, policy, options, kind, compiled=True, **given)
    assert interpreted.used
    assert_same(expected, found)


# Twins, so that there are ties; and far more than they can hold, so that charges are huge.
SMALL = Profile("small", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.01), 2000, 4)
LARGE = Profile("large", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.02), 9000, 16)


def heavy_workload(count: int) -> Workload:
    rng = np.random.default_rng(1)
    return Workload(
        np.cumsum(rng.exponential(0.002, count)),
        rng.integers(1, 1800, count),
        rng.integers(1, 150, count),
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", PLACING)
def test_compiled_by_numba_too(policy):
    load, twins = heavy_workload(3000), [SMALL, LARGE, SMALL, LARGE, SMALL, SMALL]
    for randomised in (False, True) if "round-robin" in policy else (False,):
        options = PolicyOptions(randomised=randomised)
        runs = [
            run(twins, load, policy, options, "bucket-mean", compiled=compiled)
            for compiled in (False, True)
        ]
        assert_same(*runs)


def test_what_is_not_covered_is_left_to_the_objects():
    class Other(BucketMeanPredictor):
        pass

    load = heavy_workload(30)
    dead = [Fault(0, FaultKind.DEAD, 0.01, 0.02)]
    learnt = BucketMeanPredictor(10.0)
    learnt.observe(cluster.LengthFeatures("model", 5), 9)
    for predictor, faults, policy in (
        (Other(40.0), [], "min-max"),
        (learnt, [], "min-max"),
        (BucketMeanPredictor(40.0), dead, "min-max"),
    ):
        interpreted = Interpreted()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster, "jit_loop", interpreted)
            instances = [SimulatedInstance(InstanceId(f"i{i}"), LARGE, LARGE) for i in range(2)]
            scheduler = Scheduler(make_policy(policy), np.random.default_rng(3))
            simulate(instances, load, scheduler, predictor, compiled=True, faults=faults)
        assert not interpreted.used
