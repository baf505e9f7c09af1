"""A new rule of ``finish-time`` is one function: in force in the gateway's scheduler, in the
simulator that drives it, and in the compiled loop.
"""

from collections import Counter

import pytest

from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.policies import PolicyOptions
from hetero_gateway.core.policies.estimates import Prospect
from hetero_gateway.core.policies.finish_time import FinishTime
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.sim.jit import can_compile
from tests.core.builders import profile, request, scheduler, spec, submitted
from tests.sim.compiled import test_loops as loops

MANY_WAIT = 2
# By a tenth than the others of ``builders``.
SLOWER = profile(Constants(6e-5, 1e-5, 1e-6, 8e-3, 8e-8, 9.5e-5, 4e-8, 1.1e-2))
COST, PARTS = "cost_s", ("delay_s", "memory_price_s", "late_price_s")


def crowded(state, member, prospect: Prospect) -> float:
    """Where several wait for their first token, latencies come out a fifth longer."""
    return 0.2 * prospect.latency_s if state.waiting > MANY_WAIT else 0.0


def with_rule() -> FinishTime:
    return FinishTime(PolicyOptions(), own_price=crowded)


def run(way: str, monkeypatch: pytest.MonkeyPatch, policy=with_rule):
    """A cluster's records: by the scheduler's objects, by the loop as it is written, by numba."""
    load = loops.heavy_workload(250, 0.03)
    monkeypatch.setattr(loops, "make_policy", lambda name, options: policy())
    arguments = loops.CLUSTER, load, "finish-time", PolicyOptions()
    if way == "as written":
        assert loops.check_interpreted(*arguments, "bucket-mean", faults=loops.SLOW)
    return loops.run(*arguments, "bucket-mean", compiled=way == "by numba", faults=loops.SLOW)


def without_rule() -> FinishTime:
    return FinishTime(PolicyOptions())


def test_the_gateways_scheduler_adds_it_to_the_cost_of_each_candidate() -> None:
    ruled, plain = (
        scheduler(spec("a"), spec("b", SLOWER), policy=policy)
        for policy in (with_rule(), without_rule())
    )
    waiting: Counter[str] = Counter()
    elsewhere = told = 0
    for prompt_tokens in range(50, 650, 50):
        decision, other = placed(ruled, prompt_tokens), placed(plain, prompt_tokens)
        figures, position = decision.choice.figures, decision.choice.position
        latency, own, room, cost = map(figures.column, ("latency_s", "own_price_s", "room", COST))
        assert own == [
            0.2 * s if waiting[i] > MANY_WAIT else 0.0
            for i, s in zip(decision.ids, latency, strict=True)
        ]
        parts = (latency, *map(figures.column, PARTS), own)
        assert cost == [sum(each) for each in zip(*parts, strict=True)]
        assert cost[position] == min(c for c, has in zip(cost, room, strict=True) if has)
        if own[position] and min(cost) == cost[position] and room.count(1.0) > 1:
            assert "s for a rule of its own" in ruled.policy.because(decision)
            told += 1
        elsewhere += decision.instance_id != other.instance_id
        waiting[decision.instance_id] += 1
    assert elsewhere
    assert told


def placed(s: Scheduler, prompt_tokens: int):
    ticket = submitted(s, request(prompt_tokens))
    assert s.pump(0.0) == [ticket]
    return ticket.decision


@pytest.mark.skipif(not can_compile(), reason="numba is not installed")
@pytest.mark.parametrize("way", ["as written", pytest.param("by numba", marks=pytest.mark.system)])
def test_the_simulators_objects_and_its_loop_have_it_to_the_bit(way, monkeypatch) -> None:
    objects, loop = (run(one, monkeypatch) for one in ("objects", way))
    loops.assert_same(objects, loop)
    plain = run("objects", monkeypatch, without_rule)
    assert (plain.instance != objects.instance).sum() > 25
