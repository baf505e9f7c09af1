"""Goodput: the highest rate within the limits, as a goal, as a constraint, and as a price."""

import dataclasses
import math

import pytest

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.planner.goals import HEADROOM, Goals, find_goodput
from hetero_gateway.planner.plan import Machine, Plan, PlanCandidate, SystemFigures
from hetero_gateway.planner.question import Question, Trials, reduced
from hetero_gateway.planner.search import search
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from tests.fakes.planning import LENGTHS, Types, short_runs, types_of  # noqa: F401 - a fixture

ONE_MACHINE = (Machine("m", "gpu", 4, 1.5),)
# Large instances take shorter steps, and one alone more sequences than the limit allows.
TYPES = types_of("gpu", kv_tokens=60_000, all_reduce_s=5e-4)
TIGHT, LOOSE = Slo(2.0, 0.015), Slo(10.0, 0.2)


def plan(
    goals: Goals, types: Types = TYPES, machines: tuple[Machine, ...] = ONE_MACHINE, **options: int
) -> Plan:
    question = Question(machines, types, LENGTHS, goals, policy="capacity-weighted", requests=400)
    return search(dataclasses.replace(question, **options))


def figures(slo_share: float) -> SystemFigures:
    return SystemFigures(*[1.0] * 9, slo_share)


def test_the_highest_rate_with_the_share_is_found_and_its_figures_kept() -> None:
    goals = Goals("goodput", slo=TIGHT, share=0.9)
    found = find_goodput(lambda rate: figures(1 - rate / 100), goals, 50.0)
    assert found is not None
    assert found.rate_per_s == pytest.approx(10.0)
    assert found.figures.slo_share == pytest.approx(0.9)


def test_no_rate_within_the_limits_is_none() -> None:
    assert find_goodput(lambda rate: figures(0.5), Goals(slo=TIGHT), 50.0) is None
    assert find_goodput(lambda rate: None, Goals(slo=TIGHT), 50.0) is None


def test_a_limit_of_a_percentile_counts_too() -> None:
    def hold(rate_per_s: float) -> SystemFigures:
        return dataclasses.replace(figures(1.0), ttft_p99_s=rate_per_s)

    found = find_goodput(hold, Goals(slo=TIGHT, ttft_p99_s=3.0), 10.0)
    assert found is not None
    assert found.rate_per_s == pytest.approx(3.0)


def exhaustive(slo: Slo) -> dict[tuple[int, ...], float]:
    """Requests/s of each equal layout, by trials of every rate in hundredths."""
    mix, engines, goals = Mix.of(LENGTHS, 0), Engines(), Goals("goodput", slo=slo)
    trials = Trials("capacity-weighted", engines, 400, slo=slo)
    result = {}
    for (_, t), found in TYPES.items():
        its = {found.profile: run_alone(found.profile, mix, engines)}
        system = reduced({found.profile: 4 // t}, its, 400)
        most = trials.saturate(system, mix).tokens_per_s / (1 + HEADROOM) / mix.mean_tokens
        held = [0.0]
        for step in range(5, 101, 5):
            seen = trials.hold(system, mix, most * step / 100)
            if seen is None or goals.missed(seen):
                break
            held.append(most * step / 100)
        result[(t,) * (4 // t)] = held[-1]
    return result


@pytest.mark.parametrize("slo", [pytest.param(TIGHT, marks=pytest.mark.system), LOOSE])
def test_the_best_holds_as_much_as_the_best_equal_layout(slo: Slo) -> None:
    found = plan(Goals("goodput", slo=slo))
    rates = exhaustive(slo)
    assert found.best.goodput_per_s >= 0.98 * max(rates.values())
    assert found.rate_per_s == found.best.goodput_per_s
    assert found.best.at_rate.slo_share >= 0.95
    # The ranking is that of the simulated goodput, whatever the instances alone would do.
    told = [c.goodput_per_s or 0.0 for c in found.candidates if c.simulated is not None]
    assert told == sorted(told, reverse=True)


def test_tight_limits_take_larger_instances() -> None:
    loose, tight = (plan(Goals("goodput", slo=slo)).best for slo in (LOOSE, TIGHT))
    assert max(tight.layouts["m"]) > max(loose.layouts["m"])
    assert tight.goodput_per_s < loose.goodput_per_s


def test_a_smaller_share_is_held_at_no_lower_rate() -> None:
    most, least = (plan(Goals("goodput", slo=TIGHT, share=s)).best for s in (0.5, 0.99))
    assert most.goodput_per_s >= least.goodput_per_s


def test_the_price_is_that_of_the_tokens_within_the_limits() -> None:
    found = plan(Goals("goodput", slo=TIGHT))
    best, tokens = found.best, found.mean_prompt_tokens + found.mean_output_tokens
    per_hour = best.goodput_per_s * tokens * 3600
    assert best.usd_per_million_tokens == pytest.approx(4 * 1.5 / per_hour * 1e6)
    assert found.best_goodput_tokens_per_s == pytest.approx(best.goodput_per_s * tokens)


def test_the_goal_cost_without_a_rate_is_at_the_goodput() -> None:
    machines = (Machine("a", "gpu", 4, 1.0), Machine("b", "dear", 4, 9.0))
    types = types_of("gpu", "dear", kv_tokens=60_000)
    found = plan(Goals("cost", slo=Slo(2.0, 0.05)), types, machines)
    assert found.best.layouts["b"] == ()
    assert found.best.goodput_per_s == found.rate_per_s
    prices = [c.usd_per_million_tokens for c in found.candidates if c.goodput_per_s]
    assert prices == sorted(prices)


def test_a_machine_that_only_does_harm_stays_out() -> None:
    # 40 times slower: nothing that it gets is within the limits.
    types = TYPES | types_of("slow", kv_tokens=60_000, speed=1 / 40)
    found = plan(Goals("goodput", slo=TIGHT), types, (*ONE_MACHINE, Machine("s", "slow", 1)))
    assert found.best.layouts["s"] == ()


def test_as_a_constraint_the_share_decides_what_holds_a_rate() -> None:
    free = plan(Goals("fewest", rate_per_s=4.0)).best
    bound = plan(Goals("fewest", rate_per_s=4.0, slo=TIGHT)).best
    assert bound.accelerators >= free.accelerators
    assert max(bound.layouts["m"]) > max(free.layouts["m"])
    assert bound.at_rate.slo_share >= 0.95
    assert bound.goodput_per_s >= 4.0 * 0.98
    assert math.isnan(free.at_rate.slo_share)


def test_what_misses_the_share_says_so() -> None:
    found = plan(Goals("throughput", rate_per_s=4.0, slo=Slo(2.0, 0.015)))
    missed: list[PlanCandidate] = [c for c in found.candidates if c.holds is False and c.at_rate]
    assert missed
    assert all("of the requests within TTFT 2 s, TPOT 15 ms, under 95 %" in c.why_not
               for c in missed)  # fmt: skip
