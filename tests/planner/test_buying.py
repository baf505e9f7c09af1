"""Buying: the cheapest set against every set, the bound below it, and the file's offers."""

import functools
import itertools
from pathlib import Path

import pytest

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.plan_request import PlanRequest, load_requests
from hetero_gateway.planner.bound import lower_bound
from hetero_gateway.planner.goals import HEADROOM, Goals, usd_per_hour
from hetero_gateway.planner.layouts import group_machines
from hetero_gateway.planner.least_resource import cheaper_sets, is_part_of
from hetero_gateway.planner.plan import Machine, Plan
from hetero_gateway.planner.question import NoPlan, Question, Trials, reduced
from hetero_gateway.planner.search import search
from hetero_gateway.sim.alone import Alone, Engines, Mix, run_alone
from tests.fakes.planning import LENGTHS, instance_type, short_runs  # noqa: F401 - a fixture

SLO = Slo(2.0, 0.045)
TYPES = {
    ("big", 1): instance_type("big", speed=2.5, kv_tokens=12_000),
    ("small", 1): instance_type("small", kv_tokens=8_000),
}
PRICES = {"big": 2.1, "small": 1.0}
MOST = {"big": 2, "small": 3}


def machines(counts: dict[str, int]) -> tuple[Machine, ...]:
    return tuple(
        Machine(f"{name}-{i}", name, 1, PRICES[name])
        for name, n in counts.items()
        for i in range(n)
    )


def plan(goals: Goals, of: tuple[Machine, ...], types=TYPES) -> Plan:
    return search(Question(of, types, LENGTHS, goals, policy="capacity-weighted", requests=400))


@functools.cache
def alone_by_profile() -> dict[Profile, Alone]:
    mix = Mix.of(LENGTHS, 0)
    return {f.profile: run_alone(f.profile, mix, Engines(), 1000) for f in TYPES.values()}


def holds(counts: dict[str, int], goals: Goals) -> bool:
    """Whether all machines of a set hold the rate: one simulation of them all, twice."""
    mix, trials = Mix.of(LENGTHS, 0), Trials("capacity-weighted", Engines(), 400, slo=goals.slo)
    profiles = {TYPES[name, 1].profile: n for name, n in sorted(counts.items()) if n}
    system = reduced(profiles, alone_by_profile(), 400)
    wanted = (1 + HEADROOM) * goals.rate_per_s * mix.mean_tokens
    if trials.saturate(system, mix).tokens_per_s < wanted:
        return False
    for seed, times in ((0, 1), (1, 2)):
        seen = trials.hold(system, Mix.of(LENGTHS, seed), goals.rate_per_s, times)
        if seen is None or goals.missed(seen):
            return False
    return True


def sets() -> list[dict[str, int]]:
    ranges = (range(MOST[name] + 1) for name in MOST)
    every = [dict(zip(MOST, counts, strict=True)) for counts in itertools.product(*ranges)]
    return [counts for counts in every if any(counts.values())]


@pytest.mark.parametrize("rate_per_s", [pytest.param(7.0, marks=pytest.mark.system), 11.0])
def test_the_cheapest_set_is_that_of_trying_every_one(rate_per_s: float) -> None:
    goals = Goals("cost", rate_per_s=rate_per_s, slo=SLO)
    found = plan(goals, machines(MOST))
    price = usd_per_hour(found.machines, found.best.layouts)
    every = {
        sum(PRICES[name] * n for name, n in counts.items()): counts
        for counts in sets()
        if holds(counts, goals)
    }
    assert price == pytest.approx(min(every))
    assert found.best.holds
    assert 0 < found.lower_bound <= price + 1e-6
    # What costs less and was simulated does not hold the rate.
    for candidate in found.candidates[1:]:
        if candidate.simulated and usd_per_hour(found.machines, candidate.layouts) < price - 1e-9:
            assert candidate.holds is False


@pytest.mark.parametrize("rate_per_s", [7.0])
def test_the_fewest_accelerators_are_those_of_trying_every_set(rate_per_s: float) -> None:
    goals = Goals("fewest", rate_per_s=rate_per_s, slo=SLO)
    found = plan(goals, machines(MOST))
    fewest = min(sum(counts.values()) for counts in sets() if holds(counts, goals))
    assert found.best.accelerators == fewest
    assert found.lower_bound <= fewest + 1e-6


def bound(rate_per_s: float, slo: Slo | None = SLO, of: dict[str, int] = MOST):
    return lower_bound(
        group_machines(machines(of)),
        {key: found.profile for key, found in TYPES.items()},
        Mix.of(LENGTHS, 0),
        Goals("cost", rate_per_s=rate_per_s, slo=slo),
        rate_per_s,
        by_price=True,
    )


def test_the_bound_rises_with_the_rate_and_with_tighter_limits() -> None:
    least = [bound(rate) for rate in (1.0, 4.0, 8.0, 12.0)]
    assert least == sorted(least)
    assert least[0] == pytest.approx(1.0)
    assert bound(8.0, Slo(2.0, 0.02)) is None or bound(8.0, Slo(2.0, 0.02)) >= least[2]
    assert bound(8.0, None) <= least[2]


def test_more_than_everything_can_do_has_no_bound() -> None:
    assert bound(1000.0) is None
    with pytest.raises(NoPlan):
        plan(Goals("cost", rate_per_s=1000.0, slo=SLO), machines(MOST))


def test_a_prompt_that_takes_too_long_is_not_served_within_the_limits() -> None:
    # A token takes 40 µs on the big one: nothing of it is within 10.
    assert bound(1.0, Slo(1e-5, 1.0)) is None


def test_sets_nearby_are_cheaper_and_large_enough() -> None:
    near = cheaper_sets((1, 2), (4, 4), (3.0, 2.0), (6.0, 3.0), least_worth=9.0, least_price=4.0)
    assert near == [(2, 0), (1, 1), (0, 3)]
    assert is_part_of((0, 3), [(1, 2), (0, 4)])
    assert not is_part_of((0, 3), [(1, 2)])
    dear = cheaper_sets((1, 2), (4, 4), (3.0, 2.0), (6.0, 3.0), least_worth=9.0, least_price=5.5)
    assert dear == [(2, 0), (0, 3)]


FILE = """\
model: Llama-3-8B
max_model_len: 4096
offers:
  - {accelerator: T4-16GB, count: 4, price_per_hour_usd: 2.0, at_most: 2}
  - {id: big, accelerator: A100-80GB-SXM, count: 1, price_per_hour_usd: 2.4}
workload: {rate_per_s: 5}
slo: {ttft_s: 2, tpot_s: 0.1}
"""


def load(path: Path, text: str = FILE) -> PlanRequest:
    path.write_text(text, encoding="utf-8")
    return load_requests(path)[0]


def test_offers_are_machines_that_need_not_be_used(tmp_path: Path) -> None:
    question = load(tmp_path / "plan.yaml").question
    assert [m.id for m in question.machines[:3]] == ["4xt4-16gb-0", "4xt4-16gb-1", "big-0"]
    assert len(question.machines) == 2 + 16
    # The price of an offer is that of the whole machine.
    assert question.machines[0].price_per_hour_usd == pytest.approx(0.5)
    assert question.goals == Goals("cost", 5.0, slo=Slo(2.0, 0.1))


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ("offers:", "machines: [{id: a, accelerator: T4-16GB, count: 1}]\noffers:", "not both"),
        ("workload: {rate_per_s: 5}", "", "--rate"),
        ("slo:", "goals: {goal: throughput}\nslo:", "cost or fewest"),
        ("T4-16GB", "T5-16GB", "offers.0.accelerator"),
        ("at_most: 2", "at_most: 0", "offers.0.at_most"),
    ],
)
def test_what_is_wrong_with_offers_is_one_line(tmp_path, was, becomes, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "plan.yaml", FILE.replace(was, becomes))
