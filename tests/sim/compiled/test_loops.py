"""The compiled loops have the scheduler's records, to the last bit."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    LengthFeatures,
    NormalPredictor,
    OutputLengthPredictor,
)
from hetero_gateway.core.policies import POLICY_NAMES, PolicyOptions, make_policy
from hetero_gateway.core.policies.finish_time import FinishTime
from hetero_gateway.core.policies.slo import Slo, Slos
from hetero_gateway.core.scheduling.disciplines import make_discipline
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim import cluster, fleet
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.workload import Fault, FaultKind, Workload

pytestmark = pytest.mark.skipif(not can_compile(), reason="numba is not installed")

PLACING = tuple(name for name in POLICY_NAMES if name != "finish-time")
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


def run(profiles, load, policy, options, predictor, *, compiled, queue="fifo", **others) -> Records:
    instances = [
        SimulatedInstance(InstanceId(f"i{i}"), p, p, weight=1.0 + 0.7 * i)
        for i, p in enumerate(profiles)
    ]
    scheduler = Scheduler(
        make_policy(policy, options),
        np.random.default_rng(3),
        discipline=make_discipline(queue, 2.0),
    )
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
        patch.setattr(fleet, "compile_kernel", lambda: fleet.ENTRIES)
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


# Twins, so that there are ties; and far more than they can hold, so that charges are huge.
SMALL = Profile("small", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.01), 2000, 4)
LARGE = Profile("large", "m", 1, Constants(1e-5, 0, 0, 0.01, 1e-8, 1e-4, 0, 0.02), 9000, 16)
CLUSTER = [SMALL, LARGE, SMALL, LARGE, SMALL, SMALL]
# Of all steps of one for a while: it is doubted, and probed.
SLOW = [Fault(1, FaultKind.SLOW, 0.5, 9.0, 8.0)]


# Policies that place at once


@settings(max_examples=50, deadline=None)
@given(
    profiles(400),
    jobs,
    st.sampled_from(PLACING),
    st.booleans(),
    st.sampled_from(PREDICTORS),
    st.booleans(),
    faults,
)
def test_what_is_placed_at_once_is_the_same(
    profiles, jobs, policy, randomised, predictor, oracle, faults
):
    load = make_workload(jobs)
    options = PolicyOptions(randomised=randomised, single_instance=InstanceId("i0"))
    predictions = load.output_tokens.astype(float) if oracle else None
    given = {"predictions": predictions, "faults": faults}
    assert check_interpreted(profiles, load, policy, options, predictor, **given)


@pytest.mark.system
@pytest.mark.parametrize("policy", PLACING)
def test_by_numba_what_is_placed_at_once_is_the_same(policy):
    load = heavy_workload(3000, 0.002)
    for randomised in (False, True) if "round-robin" in policy else (False,):
        check_compiled(CLUSTER, load, policy, PolicyOptions(randomised=randomised))


def test_what_is_not_covered_is_left_to_the_objects():
    class Other(BucketMeanPredictor):
        pass

    load = heavy_workload(30, 0.002)
    dead = [Fault(0, FaultKind.DEAD, 0.01, 0.02)]
    learnt = BucketMeanPredictor(10.0)
    learnt.observe(LengthFeatures("model", 5), 9)
    for predictor, happens in ((Other(40.0), []), (learnt, []), ("bucket-mean", dead)):
        twins, options = [LARGE, LARGE], PolicyOptions()
        assert not check_interpreted(twins, load, "min-max", options, predictor, faults=happens)


# Finish-time


@settings(max_examples=25, deadline=None)
@given(
    profiles(1000),
    jobs,
    st.sampled_from(["latency", "makespan"]),
    st.integers(1, 4),
    st.sampled_from(PREDICTORS),
    st.booleans(),
    faults,
    st.sampled_from([None, Slo(), Slo(0.1, 0.02), Slo(tpot_s=0.05), Slo(ttft_s=0.5)]),
    st.sampled_from(["fifo", "shortest"]),
)
def test_finish_time_is_the_same(
    profiles, jobs, objective, depth, predictor, oracle, faults, slo, queue
):
    load = make_workload(jobs)
    slos = None if slo is None else Slos(slo)
    options = PolicyOptions(objective=objective, prefill_depth=depth, slos=slos)
    predictions = load.output_tokens.astype(float) if oracle else None
    given = {"predictions": predictions, "faults": faults, "queue": queue}
    used = check_interpreted(profiles, load, "finish-time", options, predictor, **given)
    # Normal draws may be longer than the smallest instance.
    assert used or predictor == "normal"


def test_doubted_speeds_and_probes_are_the_same():
    load = heavy_workload(300, 0.15)
    options = PolicyOptions()
    assert check_interpreted(CLUSTER, load, "finish-time", options, "bucket-mean", faults=SLOW)


def test_requests_that_not_all_can_hold_are_left_to_the_objects():
    load = Workload(np.zeros(2), np.array([2600, 10]), np.array([5, 5]))
    two = [SMALL, LARGE]
    assert not check_interpreted(two, load, "finish-time", PolicyOptions(), "constant")


def test_queues_of_several_rows_are_left_to_the_objects():
    load, options = heavy_workload(20, 0.1), PolicyOptions()
    assert not check_interpreted(CLUSTER, load, "finish-time", options, "constant", queue="classes")


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


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        PolicyOptions(),
        PolicyOptions(objective="makespan"),
        PolicyOptions(slos=Slos(Slo(0.2, 0.03))),
    ],
    ids=["latency", "makespan", "slo"],
)
def test_by_numba_finish_time_is_the_same(options):
    for gap_s in (0.002, 0.1):
        load = heavy_workload(1500, gap_s)
        for queue in ("fifo", "shortest"):
            check_compiled(CLUSTER, load, "finish-time", options, faults=SLOW, queue=queue)
