"""Another policy while requests are outstanding: nothing is lost, and every sum ends at 0."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.policies import POLICY_NAMES, make_policy
from hetero_gateway.core.scheduling.disciplines import DisciplineName, make_discipline
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.types import Outcome
from tests.core.builders import FAST, SLOW, chosen, is_empty, request, scheduler, spec, state

DISCIPLINES: tuple[DisciplineName, ...] = ("fifo", "shortest", "classes", "clients")


@given(st.lists(st.sampled_from((*POLICY_NAMES, "begin", "end")), max_size=60), st.integers(0, 99))
def test_whatever_policies_follow_each_other_every_sum_ends_at_zero(events, seed):
    rng = np.random.default_rng(seed)
    s = scheduler(spec("a", FAST), spec("b", SLOW), spec("c", None), policy="finish-time")
    waiting: list[Ticket] = []
    open_: list[Ticket] = []
    now_s = 0.0

    def pump() -> None:
        for ticket in s.pump(now_s):
            waiting.remove(ticket)
            assert ticket.failed is None
            open_.append(ticket)

    for event in events:
        now_s += 0.1
        for _ in range(int(rng.integers(1, 20))):
            ticket = s.place(request(100, 50.0), now_s)
            assert ticket.failed is None
            (waiting if ticket.waits else open_).append(ticket)
        if event in POLICY_NAMES:
            s.set_policy(make_policy(event))
            pump()
            if not s.policy.queues:
                assert not s.queued
            s.set_discipline(make_discipline(DISCIPLINES[int(rng.integers(len(DISCIPLINES)))]))
        elif open_ and event == "begin":
            s.first_token(open_[int(rng.integers(len(open_)))].dispatch, now_s)  # type: ignore[arg-type]
        elif open_:
            ticket = open_.pop(int(rng.integers(len(open_))))
            s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
        for each in s.members.specs:
            s.members.observe_steps(each, 10, 0.1, now_s)
    while waiting or open_:
        now_s += 1.0
        for ticket in open_:
            s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
        open_.clear()
        pump()
    assert all(is_empty(state(s, name)) for name in "abc")
    assert s.queued == 0


@pytest.mark.parametrize("count", [2, 20])
def test_what_was_placed_by_another_policy_counts_for_the_next(count: int) -> None:
    """In plain numbers and in arrays."""
    s = scheduler(*(spec(f"i{i}") for i in range(count)), policy="single-instance")
    for _ in range(8):
        s.dispatch(chosen(s.choose(request())))
    assert state(s, "i0").in_flight == 8
    s.set_policy(make_policy("finish-time"))
    ticket = s.place(request(), 1.0)
    assert ticket.decision.instance_id != "i0"
    s.set_policy(make_policy("least-requests"))
    assert chosen(s.choose(request(), now_s=2.0)).instance_id != "i0"
