"""What is learnt of speeds: from faults, in virtual time, and where no steps are seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.scheduling.tickets import Ticket
from hetero_gateway.core.types import Outcome, Usage
from hetero_gateway.sim.cluster import simulate
from hetero_gateway.sim.workload import Fault, FaultKind, Workload
from tests.core.builders import FAST, SLOW
from tests.sim.builders import instances, make_scheduler, poisson

# After a fault: two equal instances get equal shares again.

BEGIN_S, END_S, LAST_S = 10.0, 18.0, 50.0


def share(rate_per_s: float, factor: float, *, profiled: bool, seed: int) -> tuple[float, float]:
    """Of the first of two equal instances: while it is slow, and from 10 s after that on."""
    workload = poisson(
        np.random.default_rng(seed), int(rate_per_s * LAST_S), rate_per_s, (50, 500), 150
    )
    records = simulate(
        instances(FAST, FAST, profiled=profiled),
        workload,
        make_scheduler("finish-time", seed),
        BucketMeanPredictor(150.0),
        faults=[Fault(0, FaultKind.SLOW, BEGIN_S, END_S, factor)],
    )

    def between(begin_s: float, end_s: float) -> float:
        there = (records.placed_s >= begin_s) & (records.placed_s < end_s)
        return float((records.instance[there] == 0).mean())

    return between(BEGIN_S + 2, END_S), between(END_S + 10, LAST_S)


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("factor", [3.0, 10.0])
@pytest.mark.parametrize("rate_per_s", [10, 60])
def test_a_slow_instance_has_its_half_again_ten_seconds_after_it_is_well(
    rate_per_s: float, factor: float, profiled: bool
) -> None:
    shares = [share(rate_per_s, factor, profiled=profiled, seed=seed) for seed in range(2)]
    slow, well = np.mean(shares, axis=0)
    assert slow < 0.35
    assert well == pytest.approx(0.5, abs=0.05)


def test_one_that_stays_slow_costs_a_small_share_of_requests() -> None:
    rng = np.random.default_rng(0)
    workload = Workload(
        np.cumsum(rng.exponential(1 / 10, 1000)), np.full(1000, 200), np.full(1000, 100)
    )
    records = simulate(
        instances(FAST, FAST),
        workload,
        make_scheduler("finish-time"),
        BucketMeanPredictor(100.0),
        faults=[Fault(0, FaultKind.SLOW, 0.0, 1e6, 10.0)],
    )
    there = records.instance[records.placed_s > 10.0] == 0
    assert 0 < there.mean() < 1 / 12


# What a gateway learns of speeds when it sees first bytes and ends, and none of the steps between:
# an endpoint picker's view, or that of a gateway whose clients do not stream. The engine takes
# prompts between its decode steps: their time must not be taken for slow steps.

WATCHED_S = 60.0


class Picker(Scheduler):
    """Of an answer it sees the first bytes (or not even these) and how long it was in the end."""

    def __init__(self, workload: Workload, *, first_bytes: bool) -> None:
        super().__init__(make_policy("finish-time"), np.random.default_rng(0))
        self.factors: dict[str, list[float]] = {"i0": [], "i1": []}
        self._output_tokens = workload.output_tokens
        self._first_bytes = first_bytes
        self._tickets: dict[Dispatch, Ticket] = {}

    def submit(self, request: Any, *args: Any, **more: Any) -> Any:
        return super().submit(request._replace(streams=self._first_bytes), *args, **more)

    def pump(self, now_s: float) -> list[Ticket]:
        placed = super().pump(now_s)
        for ticket in placed:
            if ticket.dispatch is not None:
                self._tickets[ticket.dispatch] = ticket
        return placed

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        if not self._first_bytes:
            return
        super().first_token(dispatch, now_s)
        decision = self._tickets[dispatch].decision
        assert decision is not None
        assert decision.choice.ttft_s is not None
        dispatch.predicted_s = (dispatch.sent_s, decision.choice.ttft_s)

    def settle(
        self, dispatch: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        if dispatch in self._tickets and outcome is Outcome.COMPLETED:
            ticket = self._tickets.pop(dispatch)
            self.observe_answer(dispatch, self._output_tokens[ticket.owner], now_s)
        if now_s > WATCHED_S / 2:
            name = dispatch.instance_id
            self.factors[name].append(self.snapshot(name).speed_factor)
        return super().settle(dispatch, outcome, now_s, usage)

    def observe_steps(self, *_: Any) -> bool:
        return False


@pytest.mark.parametrize("first_bytes", [True, False])
@pytest.mark.parametrize("slowdown", [1.0, 2.0])
@pytest.mark.parametrize("rate_per_s", [5.0, 6.0])
def test_prompts_between_the_steps_are_not_taken_for_a_slow_engine(
    rate_per_s: float, slowdown: float, first_bytes: bool
) -> None:
    count = int(rate_per_s * WATCHED_S)
    workload = poisson(np.random.default_rng(3), count, rate_per_s, (200, 3000), 150)
    picker = Picker(workload, first_bytes=first_bytes)
    faults = [Fault(0, FaultKind.SLOW, 0.0, 10 * WATCHED_S, slowdown)] if slowdown > 1 else []
    predictor = BucketMeanPredictor(150.0)
    simulate(instances(FAST, SLOW), workload, picker, predictor, faults=faults)
    assert np.mean(picker.factors["i0"]) == pytest.approx(slowdown, rel=0.05)
    assert np.mean(picker.factors["i1"]) == pytest.approx(1.0, rel=0.05)
