"""Several simulated gateways: nothing is lost, and with fresh news they are as one."""

import numpy as np
import pytest

from benchmarks.scheduling.several_gateways import Assumed, Replicas, ReplicaScheduler, Shards
from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.lengths.predictors import ConstantPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.workload import Workload
from tests.core.builders import FAST, SLOW

COUNT = 60
INSTANCES = [
    SimulatedInstance(InstanceId(f"i{i}"), p, p) for i, p in enumerate((FAST, SLOW, FAST, SLOW))
]


def workload(gap_s: float) -> Workload:
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 400, COUNT)
    return Workload(np.arange(COUNT) * gap_s, lengths, lengths[::-1].copy())


def scheduler(seed: int = 0) -> ReplicaScheduler:
    return ReplicaScheduler(make_policy("finish-time"), np.random.default_rng(seed))


def run(gateways: object, gap_s: float, instances: list[SimulatedInstance] = INSTANCES) -> Records:
    return simulate(instances, workload(gap_s), gateways, ConstantPredictor(200.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("interval_s", [0.02, 1.0, None])
@pytest.mark.parametrize("assumed", ["nothing", "alike-at-first", "alike"])
@pytest.mark.parametrize("gap_s", [0.0, 0.05])
def test_every_request_is_finished_and_no_load_stays(
    interval_s: float | None, assumed: Assumed, gap_s: float
) -> None:
    gateways = [scheduler(seed) for seed in range(3)]
    several = Replicas(gateways, np.arange(COUNT) % 3, interval_s, assumed)
    records = run(several, gap_s)
    assert not np.isnan(records.finish_s).any()
    for each in gateways:
        assert each.queued == 0
        assert all(each.members.snapshot(i.instance_id).load_s == 0 for i in INSTANCES)


def test_with_fresh_news_the_picks_are_those_of_one() -> None:
    two = INSTANCES[:2]  # unequal, so that nothing is drawn
    one = run(scheduler(), 0.2, two)
    fresh = Replicas([scheduler(1), scheduler(2)], np.arange(COUNT) % 2, 0.001)
    blind = Replicas([scheduler(1), scheduler(2)], np.arange(COUNT) % 2, None)
    same = (run(fresh, 0.2, two).instance == one.instance).mean()
    assert same >= 0.9, "the typical request, which prices memory, is of what each has met"
    assert (run(blind, 0.2, two).instance == one.instance).mean() <= same


def test_shards_have_instances_of_their_own() -> None:
    gateways = [scheduler(seed) for seed in range(2)]
    records = run(Shards(gateways, 2, np.random.default_rng(0), block=2), 0.02)
    assert not np.isnan(records.finish_s).any()
    assert list(gateways[0].members.specs) == ["i0", "i1"]
    assert list(gateways[1].members.specs) == ["i2", "i3"]
    assert set(records.instance.tolist()) >= {0, 2}


@pytest.mark.parametrize("interval_s", [0.0, 0.5])
def test_what_shards_say_of_themselves_ends_at_nothing(interval_s: float) -> None:
    gateways = [scheduler(seed) for seed in range(2)]
    shards = Shards(gateways, 2, np.random.default_rng(0), interval_s=interval_s)
    records = run(shards, 0.05)
    assert not np.isnan(records.finish_s).any()
    assert shards._drain_s == pytest.approx([0.0, 0.0], abs=1e-9)
    assert not shards._added


def test_a_front_goes_by_what_a_shard_has_last_said() -> None:
    shards = Shards(
        [scheduler(seed) for seed in range(4)], 4, np.random.default_rng(0), interval_s=0.2
    )
    arrival_s = workload(0.001).arrival_s
    instance = run(shards, 0.001).instance
    # Shard 1 reports at 0.05 s for the first time: that it has a share of what came until then.
    # The others are idle, by what they have said.
    before, after = instance[arrival_s < 0.05], instance[arrival_s >= 0.05]
    assert set(before.tolist()) == {0, 1, 2, 3}
    assert set(after.tolist()) == {0, 2, 3}


def test_a_request_is_less_to_a_larger_shard() -> None:
    small, large = scheduler(), scheduler()
    shards = Shards([small, large], 2, np.random.default_rng(0))
    run(shards, 1.0, INSTANCES)
    wanted = Request("model", 100, 100.0)
    assert small.drain_s(wanted) == pytest.approx(1 / (2 / _time_s(FAST)), rel=1e-6)
    assert large.drain_s(wanted) == pytest.approx(1 / (2 / _time_s(SLOW)), rel=1e-6)


def _time_s(profile: Profile) -> float:
    return request_time_s(profile, 100, 100.0)
