"""Who is barred for what its requests came to gets none, but never so that a request is refused."""

import pytest

from hetero_gateway.core.instances.outcomes import EjectionRules, Outcomes
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, Outcome, Reject
from tests.core.builders import SLOW, eject, request, scheduler, spec

POLICIES = ["finish-time", "min-max", "round-robin", "least-requests", "power-of-two"]
NOW_S = 100.0


def sent_to(of: Scheduler, now_s: float, *exclude: str) -> str:
    """Where one request goes."""
    ticket = of.place(request(), now_s, tuple(InstanceId(i) for i in exclude))
    return str(ticket.dispatch.instance_id)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_ejected_instance_gets_nothing_and_explain_says_so(policy: str) -> None:
    chosen = scheduler(spec("a"), spec("b"), spec("c"), policy=policy)
    eject(chosen, "b", NOW_S)
    assert {sent_to(chosen, NOW_S + 1) for _ in range(12)} == {"a", "c"}
    decision = chosen.explain(request(), NOW_S + 1)
    assert {row.instance_id: row.excluded for row in decision.explain()} == {
        "a": None,
        "c": None,
        "b": "ejected",
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_half_open_it_gets_exactly_one_until_that_is_over(policy: str) -> None:
    chosen = scheduler(spec("a"), spec("b"), policy=policy)
    outcomes = eject(chosen, "b", NOW_S)
    went = [sent_to(chosen, NOW_S + 2) for _ in range(4)]
    assert went.count("b") == 1
    (trial,) = chosen.members.table[InstanceId("b")].outstanding()
    assert outcomes.trials == [trial]
    chosen.settle(trial, Outcome.CLIENT_DISCONNECTED, NOW_S + 3)
    went = [sent_to(chosen, NOW_S + 3) for _ in range(4)]
    assert went.count("b") == 1


def test_half_open_it_is_tried_though_the_policy_would_never_have_it() -> None:
    for policy in ("finish-time", "min-max"):
        chosen = scheduler(spec("fast"), spec("slow", SLOW), policy=policy)
        outcomes = eject(chosen, "slow", NOW_S)
        assert sent_to(chosen, NOW_S + 1) == "fast"
        assert sent_to(chosen, NOW_S + 2) == "slow"
        assert sent_to(chosen, NOW_S + 2) == "fast"
        outcomes.succeeded(NOW_S + 2, outcomes.trials[0])
        assert sent_to(chosen, NOW_S + 2) == "fast"


def test_a_first_attempt_goes_to_an_ejected_instance_rather_than_nowhere() -> None:
    chosen = scheduler(spec("a", max_model_len=100), spec("b"))
    eject(chosen, "b", NOW_S)
    assert sent_to(chosen, NOW_S) == "b"  # its prompt does not fit on the other one


def test_a_second_attempt_goes_nowhere_rather_than_to_an_ejected_instance() -> None:
    for policy in POLICIES:
        chosen = scheduler(spec("a"), spec("b"), policy=policy)
        eject(chosen, "b", NOW_S)
        ticket = chosen.place(request(), NOW_S, (InstanceId("a"),), first=True)
        assert isinstance(ticket.rejected, Reject)
        assert "b ejected" in ticket.rejected.detail
        assert chosen.queued == 0


def test_of_those_that_are_barred_the_busy_one_is_asked_before_the_ejected_one() -> None:
    chosen = scheduler(spec("a"), spec("b"))
    eject(chosen, "a", NOW_S)
    busy = Outcomes(EjectionRules())
    busy.busy(NOW_S, others=0)
    chosen.restraints.heed(InstanceId("b"), busy)
    assert {sent_to(chosen, NOW_S) for _ in range(10)} == {"b"}


def test_who_waits_is_placed_when_a_term_is_over() -> None:
    chosen = scheduler(spec("a"), spec("b"), policy="finish-time")
    outcomes = eject(chosen, "b", NOW_S)
    while True:
        ticket = chosen.place(request(prompt_tokens=4000), NOW_S)
        assert isinstance(ticket, Ticket)
        if ticket.waits:
            break
    due_s = chosen.next_wakeup_s()
    assert due_s <= outcomes.until_s
    assert chosen.pump(outcomes.until_s) == [ticket]
    assert ticket.dispatch.instance_id == "b"


def test_nobody_is_heeded_any_more_when_it_is_open_or_gone() -> None:
    chosen = scheduler(spec("a"), spec("b"))
    outcomes = eject(chosen, "b", NOW_S)
    outcomes.reprieve(NOW_S)
    outcomes.advance(NOW_S + 11)
    chosen.restraints.heed(InstanceId("b"), outcomes)
    eject(chosen, "a", NOW_S)
    chosen.remove(InstanceId("a"))
    assert chosen.restraints.by_id == {}
