"""What a gateway learns of speeds when it sees first bytes and ends, and none of the steps between.

That is an endpoint picker's view, or that of a gateway whose clients do not stream. The engine
takes prompts between its decode steps: their time must not be taken for slow steps.
"""

from typing import Any

import numpy as np
import pytest

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import Outcome, Usage
from hetero_gateway.sim.cluster import simulate
from hetero_gateway.sim.workload import Fault, FaultKind, Workload
from tests.core.builders import FAST, SLOW
from tests.sim.builders import instances, poisson

LAST_S = 60.0


class Picker(Scheduler):
    """Of an answer it sees the first bytes (or not even these) and how long it was in the end."""

    def __init__(self, workload: Workload, *, first_bytes: bool) -> None:
        super().__init__(make_policy("finish-time"), np.random.default_rng(0))
        self.factors: dict[str, list[float]] = {"i0": [], "i1": []}
        self._output_tokens = workload.output_tokens
        self._first_bytes = first_bytes
        self._tickets: dict[Dispatch, Ticket] = {}
        self.members.observe_steps = lambda *_: False  # type: ignore[method-assign]

    def place(self, request: Any, *args: Any, **more: Any) -> Any:
        return super().place(request.replace(streams=self._first_bytes), *args, **more)

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
            dispatch.state.observe_answer(dispatch, self._output_tokens[ticket.owner], now_s)
        if now_s > LAST_S / 2:
            name = dispatch.instance_id
            self.factors[name].append(self.members.snapshot(name).speed_factor)
        return super().settle(dispatch, outcome, now_s, usage)


@pytest.mark.parametrize("first_bytes", [True, False])
@pytest.mark.parametrize("slowdown", [1.0, 2.0])
@pytest.mark.parametrize("rate_per_s", [5.0, 6.0])
def test_prompts_between_the_steps_are_not_taken_for_a_slow_engine(
    rate_per_s: float, slowdown: float, first_bytes: bool
) -> None:
    count = int(rate_per_s * LAST_S)
    workload = poisson(np.random.default_rng(3), count, rate_per_s, (200, 3000), 150)
    picker = Picker(workload, first_bytes=first_bytes)
    faults = [Fault(0, FaultKind.SLOW, 0.0, 10 * LAST_S, slowdown)] if slowdown > 1 else []
    predictor = BucketMeanPredictor(150.0)
    simulate(instances(FAST, SLOW), workload, picker, predictor, faults=faults)
    assert np.mean(picker.factors["i0"]) == pytest.approx(slowdown, rel=0.05)
    assert np.mean(picker.factors["i1"]) == pytest.approx(1.0, rel=0.05)
