"""A cluster in virtual time: what is conserved, what the scheduler hears, and what faults do."""

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor, ConstantPredictor
from hetero_gateway.core.policies import POLICY_NAMES, make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.workload import Fault, FaultKind, Workload
from tests.core.builders import FAST_CONSTANTS, SLOW_CONSTANTS
from tests.sim.builders import FAST, SLOW, instances, make_scheduler, random_workload
from tests.sim.naive import Job, NaiveEngine

# Every step takes a quarter of a second, whatever is in it.
EVEN = Profile("even", "m", 1, Constants(0, 0, 0, 0.25, 0, 0, 0, 0.25), 100_000, 8)


def workload(*rows: tuple[float, int, int]) -> Workload:
    arrival_s, prompts, outputs = zip(*rows, strict=True)
    return Workload(np.array(arrival_s, dtype=float), np.array(prompts), np.array(outputs))


def run(cluster, load, scheduler=None, **options) -> Records:
    return simulate(
        cluster, load, scheduler or make_scheduler(), BucketMeanPredictor(100.0), **options
    )


def same(one: Records, other: Records) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True)
        for name in ("instance", "placed_s", "first_token_s", "finish_s", "preemptions")
    )


# Where the time stands among the arguments of what a scheduler is told.
TOLD = {"place": 1, "pump": 0, "first_token": 1, "settle": 2, "observe_steps": 3}


class Witness(Scheduler):
    """A scheduler that writes down what it is told."""

    def __init__(self, policy: str = "finish-time") -> None:
        super().__init__(make_policy(policy), np.random.default_rng(0))
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        parts = dict.fromkeys(TOLD, self) | {
            "observe_steps": self.members,
            "observe": self.residual,
        }
        for name, part in parts.items():
            setattr(part, name, functools.partial(self._note, name, getattr(part, name)))

    def _note(self, name, method, *args, **options):
        self.calls.append((name, args))
        return method(*args, **options)

    def told(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]

    @property
    def times(self) -> list[float]:
        return [args[TOLD[name]] for name, args in self.calls if name in TOLD]


def is_empty(scheduler: Scheduler) -> bool:
    seen = [
        scheduler.members.snapshot(spec.instance_id)
        for spec in list(scheduler.members.specs.values())
    ]
    idle = not any((each.load_s, each.kv_tokens, each.in_flight) != (0.0, 0, 0) for each in seen)
    return idle and scheduler.queued == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("scheduling", ["chunked", "prefill-first"])
def test_every_request_is_placed_and_finishes_in_order_of_time(policy, scheduling):
    load = random_workload(300, per_s=8.0)
    scheduler = make_scheduler(policy)
    records = run(instances(FAST, SLOW, SLOW), load, scheduler, scheduling=scheduling)
    assert (load.arrival_s <= records.placed_s).all()
    assert (records.placed_s < records.first_token_s).all()
    assert (records.first_token_s <= records.finish_s).all()
    assert set(records.instance) <= {0, 1, 2}
    assert is_empty(scheduler)


@pytest.mark.parametrize("policy", ["finish-time", "power-of-two", "min-max"])
def test_one_seed_has_one_result(policy):
    cluster, load = instances(FAST, SLOW, SLOW), random_workload(300, per_s=10.0)
    one = run(cluster, load, make_scheduler(policy, 3))
    assert same(one, run(cluster, load, make_scheduler(policy, 3)))


@pytest.mark.system
@pytest.mark.skipif(not can_compile(), reason="numba is not installed")
@pytest.mark.parametrize("policy", ["finish-time", "min-max"])
def test_compiled_and_plain_records_are_the_same(policy):
    cluster, load = instances(FAST, SLOW, SLOW), random_workload(500, per_s=10.0)
    faults = [Fault(0, FaultKind.DEAD, 5.0, 15.0), Fault(1, FaultKind.SLOW, 3.0, 20.0, 2.5)]
    plain = run(cluster, load, make_scheduler(policy), faults=faults, compiled=False)
    compiled = run(cluster, load, make_scheduler(policy), faults=faults, compiled=True)
    assert same(plain, compiled)


jobs = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(jobs, st.integers(180, 500), st.integers(1, 6), st.booleans())
def test_one_instance_does_what_the_plain_simulator_does(jobs, kv_tokens, max_num_seqs, chunked):
    profile = Profile("GPU", "m", 1, SLOW_CONSTANTS, kv_tokens, max_num_seqs)
    jobs = sorted(jobs, key=lambda job: job[0])
    expected = [Job(prompt, output, arrival_s) for arrival_s, prompt, output in jobs]
    NaiveEngine(profile, chunked, 64).run(expected)
    records = run(
        instances(profile),
        workload(*jobs),
        scheduling="chunked" if chunked else "prefill-first",
        max_batched_tokens=64,
        predictions=np.ones(len(jobs)),
        observe_interval_s=0.3,
    )
    assert records.finish_s == pytest.approx([job.finish_s for job in expected], abs=1e-9)
    assert records.first_token_s == pytest.approx([job.first_s for job in expected], abs=1e-9)
    assert list(records.preemptions) == [job.preemptions for job in expected]


def test_the_schedulers_clock_never_goes_back():
    witness = Witness()
    faults = [Fault(0, FaultKind.DEAD, 4.0, 9.0), Fault(1, FaultKind.SLOW, 2.0, 12.0, 3.0)]
    run(instances(FAST, SLOW, SLOW), random_workload(300, 10.0), witness, faults=faults)
    assert witness.times == sorted(witness.times)
    assert is_empty(witness)


def test_the_scheduler_hears_of_every_first_token_and_length():
    witness, load = Witness(), random_workload(200, 10.0)
    records = run(instances(FAST, SLOW), load, witness)
    assert sorted(at_s for _, at_s in witness.told("first_token")) == sorted(records.first_token_s)
    lengths = [tokens for _, tokens in witness.told("observe")]
    assert sorted(lengths) == sorted(load.output_tokens)


def test_the_scheduler_hears_of_the_exact_decode_steps():
    witness, quiet = Witness(), Witness()
    # Its prefill ends at 0.25 s, and 40 decode steps at 10.25 s.
    run(instances(EVEN), workload((0.0, 10, 41)), witness, observe_interval_s=1.0)
    assert witness.told("observe_steps")[:10] == [
        ("i0", 3, pytest.approx(0.75), 1.0),
        *(("i0", 4, pytest.approx(1.0), float(now_s)) for now_s in range(2, 11)),
    ]
    # An idle instance is not observed.
    run(instances(EVEN, EVEN), workload((0.0, 10, 41), (500.0, 10, 9)), quiet)
    seen_s = {now_s for *_, now_s in quiet.told("observe_steps")}
    assert seen_s <= {*range(1, 12), 501, 502, 503}


def test_ticks_go_on_where_their_times_are_rounded():
    # 3 · 0.3 / 0.3 rounds down to below 3: the third tick must not come again.
    witness = Witness()
    run(instances(EVEN), workload((0.0, 10, 41)), witness, observe_interval_s=0.3)
    _, steps, _, times = zip(*witness.told("observe_steps"), strict=True)
    assert len(times) == len(set(times))
    assert sum(steps) == 40


def test_predictions_take_the_place_of_the_predictor():
    witness, load = Witness("min-max"), random_workload(20, 5.0)
    run(instances(FAST), load, witness, predictions=load.output_tokens.astype(float))
    predicted = [asked.predicted_output_tokens for asked, _ in witness.told("place")]
    assert predicted == list(load.output_tokens)


@pytest.mark.slow
def test_a_single_server_queue_waits_as_the_theory_of_m_d_1_says():
    # One sequence at a time, one prefill and three decode steps of a quarter of a second each.
    one_at_a_time = Profile("even", "m", 1, EVEN.constants, 1000, 1)
    service_s, utilisation, count = 1.0, 0.5, 1000
    means = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        load = Workload(
            np.cumsum(rng.exponential(service_s / utilisation, count)),
            np.full(count, 10),
            np.full(count, 4),
        )
        records = run(instances(one_at_a_time), load, predictions=np.full(count, 4.0))
        waits_s = records.finish_s - service_s - load.arrival_s
        assert waits_s.min() >= -1e-6
        means.append(waits_s.mean())
    expected_s = utilisation * service_s / (2 * (1 - utilisation))
    # 2.86 is the 99 % point of Student's t with 19 degrees of freedom.
    margin_s = 2.861 * np.std(means, ddof=1) / math.sqrt(len(means))
    assert margin_s < 0.1 * expected_s
    assert abs(np.mean(means) - expected_s) < margin_s


@pytest.mark.parametrize(
    ("faults", "finish_s"),
    [
        # 3 steps until 0.75, those that begin at 0.75 and 1.25 take 0.5 s, then 4 of 0.25 s.
        ([(0.6, 1.3, 2.0)], 2.75),
        # They multiply while they overlap: steps end at 0.5, one of 1.5 s at 2.0, then 7 of 0.25 s.
        ([(0.0, 1.5, 2.0), (0.5, 1.0, 3.0)], 3.75),
    ],
)
def test_a_slow_fault_stretches_the_steps_that_begin_within_it(faults, finish_s):
    slow = [Fault(0, FaultKind.SLOW, *fault) for fault in faults]
    assert run(instances(EVEN), workload((0.0, 10, 9)), faults=slow).finish_s[0] == finish_s


def test_a_dead_instance_loses_its_streams_and_gives_back_what_has_no_token():
    # The first two have tokens at 1.0; the last two arrive just before, and have none.
    load = workload((0.0, 10, 99), (0.0, 10, 99), (0.9, 10, 5), (0.9, 10, 5))
    scheduler = make_scheduler()
    records = run(
        instances(EVEN, EVEN), load, scheduler, faults=[Fault(0, FaultKind.DEAD, 0.95, 30.0)]
    )
    lost = np.isnan(records.finish_s)
    assert list(lost) == [True, False, False, False]
    assert records.first_token_s[0] == 0.25
    assert list(records.instance) == [0, 1, 1, 1]
    # The one that was tried again was placed anew, when the instance died.
    assert sorted(records.placed_s[2:]) == [0.9, 0.95]
    assert is_empty(scheduler)


def test_a_dead_instance_gets_nothing_until_it_is_back():
    load = workload(*[(0.5 + i, 10, 3) for i in range(20)])
    records = run(instances(EVEN, EVEN), load, faults=[Fault(0, FaultKind.DEAD, 5.4, 10.0)])
    dead = (load.arrival_s > 5.4) & (load.arrival_s < 10.0)
    assert set(records.instance[dead]) == {1}
    assert set(records.instance[load.arrival_s > 10.0]) == {0, 1}
    assert not np.isnan(records.finish_s).any()


def test_overlapping_deaths_end_with_the_last():
    load = workload(*[(0.5 + i, 10, 3) for i in range(12)])
    faults = [Fault(0, FaultKind.DEAD, 2.0, 6.0), Fault(0, FaultKind.DEAD, 4.0, 9.0)]
    records = run(instances(EVEN, EVEN), load, faults=faults)
    assert 0 not in records.instance[(load.arrival_s > 2.0) & (load.arrival_s < 9.0)]
    assert 0 in records.instance[load.arrival_s > 9.0]


@pytest.mark.parametrize("policy", ["round-robin", "finish-time"])
def test_with_no_instance_left_requests_are_refused(policy):
    load = workload((0.0, 10, 99), (0.2, 10, 9), (2.0, 10, 9), (20.0, 10, 9))
    scheduler = make_scheduler(policy)
    records = run(instances(EVEN), load, scheduler, faults=[Fault(0, FaultKind.DEAD, 1.0, 10.0)])
    assert list(np.isnan(records.finish_s)) == [True, True, True, False]
    assert list(records.instance) == [0, 0, -1, 0]
    assert math.isnan(records.placed_s[2])
    assert is_empty(scheduler)


def test_one_that_dies_for_good_ends_the_run():
    scheduler = make_scheduler("finish-time")
    load, fault = workload(*[(0.0, 10, 50)] * 40), Fault(0, FaultKind.DEAD, 1.0)
    records = run(instances(EVEN), load, scheduler, faults=[fault])
    assert np.isnan(records.finish_s).all()
    assert scheduler.queued == 0


@pytest.mark.parametrize("policy", ["round-robin", "finish-time"])
@pytest.mark.parametrize(
    ("lengths", "predictions", "placed"), [((500, 5), None, -1), ((50, 500), [5.0, 5.0], 0)]
)
def test_what_fits_nowhere_is_not_placed_or_refused_by_an_engine(
    policy, lengths, predictions, placed
):
    """Never placed, where the scheduler knows; else its instance refuses it."""
    small = Profile("small", "m", 1, EVEN.constants, 160, 8)
    scheduler, load = make_scheduler(policy), workload((0.0, *lengths), (0.0, 10, 5))
    predictions = None if predictions is None else np.array(predictions)
    records = run(instances(small), load, scheduler, predictions=predictions)
    assert list(records.instance) == [placed, 0]
    assert list(np.isnan(records.finish_s)) == [True, False]
    assert is_empty(scheduler)


def test_an_unprofiled_instance_takes_part():
    cluster = [*instances(FAST), SimulatedInstance(InstanceId("unknown"), SLOW, None, weight=0.5)]
    for policy in ("finish-time", "min-max", "weighted-round-robin"):
        records = run(cluster, random_workload(200, 8.0), make_scheduler(policy))
        assert set(records.instance) == {0, 1}
        assert not np.isnan(records.finish_s).any()


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("rate", [6.0, 40.0])
def test_with_no_profile_at_all_requests_are_shared_by_observed_speed(scale: float, rate: float):
    # One is four times as slow; nobody has told the scheduler, nor how fast the other is.
    fast = Profile("fast", "m", 1, FAST_CONSTANTS.scaled(scale), 200_000, 256)
    slow = Profile("slow", "m", 1, FAST_CONSTANTS.scaled(4 * scale), 200_000, 256)
    load = random_workload(1200, rate / scale)
    late = np.arange(1200) >= 300
    shares, latencies = [], []
    for known in (True, False):
        cluster = instances(slow, fast, profiled=known)
        records = run(cluster, load, make_scheduler("finish-time"))
        shares.append((records.instance[late] == 1).mean())
        latencies.append((records.finish_s - load.arrival_s)[late].mean())
    assert shares[1] == pytest.approx(shares[0], abs=0.06)
    # How long prompts keep answers waiting is reckoned with only where it is known.
    assert latencies[1] < 1.15 * latencies[0]
    assert shares[1] > 0.7


def test_everything_at_once_is_worked_off():
    load = random_workload(400, 1.0)
    load = Workload(np.zeros(400), load.prompt_tokens, load.output_tokens)
    ends = {}
    for policy in ("round-robin", "finish-time"):
        scheduler, predictor = make_scheduler(policy), ConstantPredictor(120.0)
        records = simulate(instances(FAST, SLOW, SLOW), load, scheduler, predictor)
        ends[policy] = records.finish_s.max()
    # A third of the work each leaves the fast one idle for most of the time.
    assert ends["finish-time"] < 0.8 * ends["round-robin"]
