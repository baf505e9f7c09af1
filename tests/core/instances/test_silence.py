"""What an instance's silence means, on made-up numbers."""

import math

import pytest

from hetero_gateway.core.instances.outcomes import SILENT, BreakerState, EjectionRules, Outcomes
from hetero_gateway.core.instances.silence import (
    FLOOR_S,
    LEG_S,
    UNKNOWN_S,
    Health,
    Pauses,
    Silence,
    judge,
    next_step_s,
)
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Leg
from tests.core.builders import fast_instance

WELL = Health(None, 0.01)
NOW_S = 100.0


def streaming(prompt_tokens: int = 100) -> InstanceState:
    """One stream is under way."""
    state = fast_instance()
    entry = state.dispatch(Request("m", prompt_tokens, 100.0), 1.0, 90.0)
    state.first_token(entry, 90.1)
    return state


def after(
    silent_s: float,
    state: InstanceState,
    health: Health = WELL,
    *,
    streams: bool = True,
    pauses: Pauses | None = None,
    slack_s: float = 0.0,
) -> Silence:
    heard_s = NOW_S - silent_s
    pauses = pauses or Pauses()
    return judge(state, state.outstanding(), heard_s, streams, health, pauses, NOW_S, slack_s)


@pytest.mark.parametrize(
    ("silent_s", "verdict"),
    [(0.3, Silence.HEARD), (0.5, Silence.ASK), (0.76, Silence.SUSPECTED), (7.6, Silence.DEAD)],
)
def test_streams_are_to_go_on_within_three_times_a_step(silent_s: float, verdict: Silence) -> None:
    assert after(silent_s, streaming()) is verdict
    assert after(silent_s, streaming(), streams=False) in (Silence.HEARD, Silence.ASK)


def test_a_prompt_that_waits_may_hold_the_streams_up() -> None:
    state = streaming()
    state.dispatch(Request("m", 30_000, 100.0), 1.0, 99.0).expected_s = 60.0
    step_s = next_step_s(state)
    assert step_s is not None
    assert step_s > 1
    assert after(2.9 * step_s, state) is Silence.ASK
    assert after(3.1 * step_s, state) is Silence.SUSPECTED


def test_of_one_that_nobody_knows_more_is_tolerated() -> None:
    state = streaming()
    state.set_constants(state.constants, stands_in=True)
    state.observed = False
    assert next_step_s(state) is None
    assert after(UNKNOWN_S - 0.1, state) is Silence.ASK
    assert after(UNKNOWN_S + 0.1, state) is Silence.SUSPECTED


@pytest.mark.parametrize(("expected_s", "silent_s"), [(0.1, FLOOR_S), (2.0, 6.0)])
def test_a_first_byte_is_late_after_three_times_what_was_predicted(
    expected_s: float, silent_s: float
) -> None:
    state = fast_instance()
    entry = state.dispatch(Request("m", 100, 100.0), 1.0, NOW_S - silent_s)
    entry.expected_s = expected_s
    assert after(50.0, state, streams=False) is Silence.SUSPECTED
    entry.sent_s += 0.1
    assert after(50.0, state, streams=False) is Silence.ASK
    entry.expected_s = math.inf
    assert after(50.0, state, streams=False) is Silence.ASK


def test_an_answer_that_does_not_stream_is_late_only_together_with_health() -> None:
    state = fast_instance()
    state.dispatch(Request("m", 100, 100.0, streams=False), 1.0, 90.0)
    assert after(500.0, state, streams=False) is Silence.ASK
    late = Health(NOW_S - 0.6, 0.01)
    assert after(0.7, state, late, streams=False) is Silence.ASK
    assert after(0.8, state, late, streams=False) is Silence.SUSPECTED
    assert after(1.6, state, Health(NOW_S - 1.1, 0.01), streams=False) is Silence.DEAD
    # It always takes so long, or nobody knows.
    assert after(5.0, state, Health(NOW_S - 1.1, 0.5), streams=False) is Silence.ASK
    assert after(5.0, state, Health(NOW_S - 1.1, math.inf), streams=False) is Silence.ASK


def test_of_two_legs_each_is_owed_for_ten_seconds() -> None:
    state = fast_instance()
    entry = state.dispatch(Request("m", 100, 0.0, streams=False), 1.0, 0.0)
    entry.leg, entry.expected_s = Leg.PREFILL, 0.1
    assert after(LEG_S - 0.1, state, streams=False) is Silence.ASK
    assert after(LEG_S + 0.1, state, streams=False) is Silence.SUSPECTED
    state.prefilled(entry, 1.0)
    assert after(LEG_S + 0.1, state, streams=False) is Silence.ASK


def test_an_answer_is_owed_when_it_is_asked_for() -> None:
    state = fast_instance()
    entry = state.dispatch(Request("m", 100, 100.0), 1.0, 0.0)
    entry.leg, entry.expected_s, entry.sent_s = Leg.DECODE, 0.1, math.inf
    assert after(10 * LEG_S, state, streams=False) is Silence.ASK
    entry.sent_s = NOW_S - LEG_S - 0.1
    assert after(10 * LEG_S, state, streams=False) is Silence.SUSPECTED


def test_a_pause_that_was_none_is_tolerated_twice_as_long_for_a_while() -> None:
    pauses = Pauses()
    pauses.note(2.0, NOW_S)
    pauses.note(1.0, NOW_S)
    pauses.note(500.0, NOW_S)  # that was more than a pause
    assert after(3.9, streaming(), pauses=pauses) is Silence.ASK
    assert after(4.1, streaming(), pauses=pauses) is Silence.SUSPECTED
    assert pauses.longest_s(NOW_S + 120) < 0.3


def test_what_is_known_late_is_tolerated_for_as_much_longer() -> None:
    assert after(1.7, streaming(), slack_s=1.0) is Silence.ASK
    assert after(1.8, streaming(), slack_s=1.0) is Silence.SUSPECTED


def silent(now_s: float = NOW_S) -> Outcomes:
    outcomes = Outcomes(EjectionRules())
    outcomes.eject(now_s, SILENT)
    return outcomes


def test_who_is_heard_again_soon_is_as_before_and_later_begins_slowly() -> None:
    outcomes = silent()
    assert outcomes.heard(NOW_S + 1)
    assert outcomes.breaker is BreakerState.CLOSED
    assert outcomes.ejections == 0
    outcomes = silent()
    assert outcomes.heard(NOW_S + 5)
    assert outcomes.breaker is BreakerState.SLOW_START
    assert not outcomes.heard(NOW_S + 6)
    outcomes.eject(NOW_S + 7, SILENT)
    assert outcomes.heard(NOW_S + 7.5)
    assert outcomes.breaker is BreakerState.SLOW_START  # which goes on
    assert outcomes.until_s == NOW_S + 15


def test_an_answer_is_heard_as_well() -> None:
    outcomes = silent()
    assert not outcomes.is_heard_again
    outcomes.answered(NOW_S + 0.5, 1)
    assert outcomes.is_heard_again


def test_without_a_sign_of_life_nothing_tries_it_for_ten_seconds() -> None:
    outcomes = silent()
    assert outcomes.bar(NOW_S + 9.9, 0) is not None
    assert outcomes.bar(NOW_S + 10, 0) is None
    outcomes = silent()
    assert not outcomes.vouched(NOW_S - 1, NOW_S + 1)  # asked before
    assert not outcomes.vouched(NOW_S + 1, NOW_S + 1)
    assert outcomes.bar(NOW_S + 1.9, 0) is not None  # its term is not over
    assert outcomes.bar(NOW_S + 2, 0) is None
    outcomes = silent()
    outcomes.advance(NOW_S + 2)
    assert outcomes.vouched(NOW_S + 4, NOW_S + 4)
    assert outcomes.breaker is BreakerState.HALF_OPEN
