"""What the compiled loops are compared on, and how."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    NormalPredictor,
    OutputLengthPredictor,
)
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim import cluster
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.workload import Fault, FaultKind, Workload

PREDICTORS = ("bucket-mean", "constant", "normal")

times_s = st.floats(0, 0.01)


def profiles(least_kv_tokens: int) -> st.SearchStrategy[list[Profile]]:
    """One to five instances of one to three kinds."""
    kinds = st.builds(
        Profile,
        st.just("any"),
        st.just("m"),
        st.just(1),
        st.builds(
            Constants,
            st.floats(1e-6, 1e-4), times_s, times_s, times_s, st.floats(0, 1e-6), times_s, times_s,
            st.floats(1e-3, 0.05), st.sampled_from([0.0, 1e-9]),
        ),
        st.integers(least_kv_tokens, 6000),
        st.integers(1, 12),
    )  # fmt: skip
    return st.lists(kinds, min_size=1, max_size=3).flatmap(
        lambda few: st.lists(st.sampled_from(few), min_size=1, max_size=5)
    )


jobs = st.lists(
    st.tuples(st.floats(0, 3).map(lambda s: round(s, 2)), st.integers(1, 700), st.integers(1, 80)),
    min_size=1,
    max_size=60,
)
faults = st.lists(
    st.builds(
        lambda at, lasts, factor: Fault(0, FaultKind.SLOW, at, at + lasts, factor),
        st.floats(0, 3), st.floats(0.1, 6), st.floats(0.5, 8),
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


def predictor_of(kind: str) -> OutputLengthPredictor:
    if kind == "bucket-mean":
        return BucketMeanPredictor(40.0)
    if kind == "constant":
        return ConstantPredictor(30.5)
    return NormalPredictor(40.0, 25.0, np.random.default_rng(5))


def make_workload(jobs) -> Workload:
    arrival_s, prompts, outputs = zip(*sorted(jobs, key=lambda job: job[0]), strict=True)
    return Workload(np.array(arrival_s, float), np.array(prompts), np.array(outputs))


def heavy_workload(count: int, gap_s: float, longest_prompt: int = 1800) -> Workload:
    """More than a few instances can do."""
    rng = np.random.default_rng(1)
    return Workload(
        np.cumsum(rng.exponential(gap_s, count)),
        rng.integers(1, longest_prompt, count),
        rng.integers(1, 150, count),
    )


def run(profiles, load, policy, options, predictor, *, compiled, **others) -> Records:
    instances = [
        SimulatedInstance(InstanceId(f"i{i}"), p, p, weight=1.0 + 0.7 * i)
        for i, p in enumerate(profiles)
    ]
    scheduler = Scheduler(make_policy(policy, options), np.random.default_rng(3))
    # Predictors learn: each run has one of its own.
    predictor = predictor_of(predictor) if isinstance(predictor, str) else deepcopy(predictor)
    return simulate(
        instances, load, scheduler, predictor,
        compiled=compiled, max_batched_tokens=64, **others,
    )  # fmt: skip


def check_interpreted(profiles, load, policy, options: PolicyOptions, predictor, **others) -> bool:
    """Whether a loop ran, as it is written; if so, its records are the scheduler's to the bit."""
    interpreted = Interpreted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "jit_loop", interpreted)
        found = run(profiles, load, policy, options, predictor, compiled=True, **others)
    expected = run(profiles, load, policy, options, predictor, compiled=False, **others)
    assert_same(expected, found)
    return interpreted.used


def check_compiled(profiles, load, policy, options: PolicyOptions, **others) -> None:
    """With numba the records are the scheduler's, to the bit."""
    assert_same(
        *(
            run(profiles, load, policy, options, "bucket-mean", compiled=compiled, **others)
            for compiled in (False, True)
        )
    )


def assert_same(one: Records, other: Records) -> None:
    for name in Records.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
