"""Limits of requests: what is expected to miss them, whose they are, and what they change."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.policies import PolicyOptions
from hetero_gateway.core.policies.slo import Slo, Slos, late_behind, too_late, too_slow, violations
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome
from tests.core.builders import SLOW, placed, request, scheduler, spec, state, view_of

TIGHT = Slo(1.0, 0.05)


def with_limits(slo: Slo | None, *specs: InstanceSpec) -> Scheduler:
    options = PolicyOptions(slos=None if slo is None else Slos(slo))
    return scheduler(*specs, policy="finish-time", options=options)


def test_a_class_goes_before_a_model_and_both_before_the_rest() -> None:
    slos = Slos(Slo(1.0, 0.1), {"m": Slo(2.0, 0.2)}, {"batch": Slo()})
    assert slos.of(request(model="other")) == Slo(1.0, 0.1)
    assert slos.of(request(model="m")) == Slo(2.0, 0.2)
    assert slos.of(request(model="m").replace(request_class="batch")) == Slo(math.inf, math.inf)
    assert slos.everyones() is None
    assert Slos(TIGHT).everyones() == TIGHT


def expected(s: Scheduler, body: Request, slo: Slo, waited_s: float = 0.0, now_s: float = 0.0):
    """Of the one instance, for figures that the scheduler itself predicts."""
    view = view_of(s, body, now_s)
    choice = s.policy.would_choose(view, np.random.default_rng(0))
    ttft_s = choice.figures.at("ttft_s", 0)
    latency_s = choice.figures.at("latency_s", 0)
    output = float(body.predicted_output_tokens)
    step_s = (latency_s - ttft_s) / (output - 1) if output > 1 else 0.0
    there = state(s, "a")
    member = s.members.pool(body.model).members[0]
    lengths = (view.prefill_tokens[0], float(body.sequences), float(body.prompt_tokens), output)
    return violations(there, member, ttft_s, step_s, *lengths, now_s, waited_s, slo)


@given(
    st.integers(0, 40),
    st.floats(0.001, 5.0),
    st.floats(0.001, 0.5),
    st.floats(0, 3),
    st.integers(1, 4),
)
def test_what_is_missed_is_never_less_than_nothing(there, ttft_s, tpot_s, waited_s, sequences):
    s = with_limits(None, spec("a"))
    for _ in range(there):
        ticket = placed(s, request(200))
        if ticket.dispatch is not None:
            s.first_token(ticket.dispatch, 0.01)
    body = request(300, 40.0).replace(sequences=sequences)
    assert expected(s, body, Slo(ttft_s, tpot_s), waited_s, 0.5) >= 0


def test_nothing_is_missed_where_there_is_no_limit() -> None:
    s = with_limits(None, spec("a"))
    assert expected(s, request(), Slo()) == 0


def test_a_step_above_the_limit_is_missed_by_all_that_are_newly_above_it() -> None:
    s = with_limits(None, spec("a"))
    for _ in range(8):
        s.first_token(placed(s, request(10)).dispatch, 0.0)  # type: ignore[arg-type]
    nobody = expected(s, request(10), Slo(math.inf, 1.0))
    everybody = expected(s, request(10), Slo(math.inf, 1e-6))
    assert nobody == 0
    # Those that are there miss such a limit already, so only the request's own is new.
    assert everybody == pytest.approx(1.0)


def test_an_answer_of_one_token_has_only_a_first() -> None:
    s = with_limits(None, spec("a"))
    assert expected(s, request(10, 1.0), Slo(math.inf, 1e-6)) == 0


def test_who_has_waited_too_long_already_is_placed_as_without_limits() -> None:
    s = with_limits(None, spec("a"))
    limit = Slo(0.2, 1e-6)
    assert expected(s, request(), limit, waited_s=0.1) > 0
    assert expected(s, request(), limit, waited_s=0.2) == 0


def test_prompts_that_were_sent_lately_make_steps_longer_and_are_forgotten() -> None:
    s = with_limits(None, spec("a"))
    for _ in range(8):
        s.first_token(placed(s, request(4000, 100.0)).dispatch, 0.0)  # type: ignore[arg-type]
    there = state(s, "a")
    assert there.recent_prefill == pytest.approx(32_000)
    s.place(request(0 + 1), 10.0)
    assert there.recent_prefill == pytest.approx(32_000 / math.e + 1)


def test_a_long_prompt_is_missed_by_those_whose_steps_wait_for_it() -> None:
    s = with_limits(None, spec("a", max_model_len=None))
    for _ in range(8):
        s.first_token(placed(s, request(10)).dispatch, 0.0)  # type: ignore[arg-type]
    # With this prompt a step takes nearly that; those that are there have it to wait for, too.
    limit = Slo(math.inf, 0.02)
    assert expected(s, request(100), limit) == pytest.approx(0, abs=1e-6)
    assert expected(s, request(80_000, 2.0), limit) > 5


def test_of_a_step_near_the_limit_an_idle_machine_is_surer_than_a_busy_one() -> None:
    """As few prompts come in between as make or break an answer."""

    def missed(share: float, busy: float, output: float = 100.0) -> float:
        step_s = share * 0.025 * (1 - busy)
        return too_slow(step_s, 1 - busy, 0.0, 3e-5, output, 0.025)

    assert missed(0.8, 0.0) < 0.001 < missed(0.8, 0.4) < missed(0.8, 0.4, 20.0) < 0.5
    assert missed(1.2, 0.0) > 0.99 > missed(1.2, 0.4) > 0.5
    assert 0 < missed(0.96, 0.0) < 0.3 < missed(0.96, 0.4) < 0.5
    # A prompt more, by which each of its tokens comes 1 ms later.
    assert too_slow(0.0245, 1.0, 0.099, 3e-5, 100.0, 0.025) > 0.5


def test_first_tokens_behind_a_prompt_are_late_where_others_come_and_the_limit_is_near() -> None:
    assert late_behind(0.5, 0.1, 1.0, 1.0) == 0  # nobody comes
    assert late_behind(0.1, 0.1, 0.5, 1.0) == 0
    assert 0 < late_behind(0.5, 0.1, 0.5, 1.0) < late_behind(0.5, 0.2, 0.5, 1.0)
    assert late_behind(2.0, 0.1, 0.5, 1.0) == 0  # they are late anyway


def test_what_waits_may_be_late_and_what_it_takes_itself_is_certain() -> None:
    assert too_late(0.9, 0.9, 1.0) == 0.0
    assert too_late(1.0, 0.5, 1.0) == 1.0
    assert too_late(0.62, 0.5, 1.0) == 0.0  # a quarter of what the limit leaves for waiting
    assert 0.4 < too_late(0.8, 0.5, 1.0) < 0.5
    assert too_late(0.8, 0.5, 1.0) > too_late(0.8, 0.6, 1.0) > too_late(0.8, 0.7, 1.0)
    assert too_late(5.0, 1.0, math.inf) == 0.0


def test_a_first_token_waits_for_the_steps_between_its_prompts_chunks() -> None:
    s = with_limits(None, spec("a"))
    alone = expected(s, request(8000, 2.0), Slo(0.7))
    for _ in range(8):
        s.first_token(placed(s, request(10)).dispatch, 0.0)  # type: ignore[arg-type]
    assert expected(s, request(8000, 2.0), Slo(0.7)) > alone


def test_a_machine_whose_streams_would_be_too_slow_is_avoided() -> None:
    def chosen_of(slo: Slo | None) -> str:
        s = with_limits(slo, spec("a"), spec("b"))
        # One has computed prompts all the time: its streams stand still half of it.
        for _ in range(12):
            one = placed(s, request(7000, 400.0).replace(only=InstanceId("a")))
            if one.dispatch is not None:
                s.first_token(one.dispatch, 0.1)
                s.settle(one.dispatch, Outcome.COMPLETED, 0.2)
        # At the other a prompt stands in front.
        placed(s, request(3000, 100.0).replace(only=InstanceId("b")), 0.3)
        return placed(s, request(200, 15.0), 0.5).decision.instance_id  # type: ignore[union-attr]

    assert chosen_of(None) == "a"
    assert chosen_of(Slo(1.0, 0.015)) == "b"


def test_explain_says_what_would_be_missed() -> None:
    s = with_limits(Slo(1e-3, 1e-6), spec("a"), spec("b", SLOW))
    decision = s.explain(request())
    assert "limits that would be missed" in decision.reason()
    assert all("slo_price_s" in one.estimates for one in decision.explain())
    without = with_limits(None, spec("a"), spec("b", SLOW)).explain(request())
    assert "limits" not in without.reason()
    assert all("slo_price_s" not in one.estimates for one in without.explain())
