"""The speed factor: what it is made of, and how long it is believed."""

import dataclasses

import pytest

from hetero_gateway.core.instances.speed import UNSEEN_S, SpeedEstimate, observe, revise
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.types import InstanceId, Outcome
from tests.core.builders import FAST, FAST_CONSTANTS, request, scheduler, spec, state


def saw(one: SpeedEstimate, observed_s: float, modelled_s: float, now_s: float) -> float:
    return observe(one, observed_s, modelled_s, now_s, 0.0, 0.0)


def estimate(factor: float, seconds: int = 20) -> SpeedEstimate:
    """One that was seen to be so slow, once a second."""
    result = SpeedEstimate(0.1, 10.0)
    for second in range(seconds):
        saw(result, 1.0, 1 / factor, float(second))
    return result


def test_a_factor_that_is_seen_is_not_doubted() -> None:
    one = estimate(8.0)
    assert one.factor == pytest.approx(8, rel=0.02)
    for i in range(10):
        revise(one, 1.0, one.seen_s + 0.1 * i)
        assert not one.doubted
    assert one.factor == pytest.approx(8, rel=0.02)


def test_one_that_is_not_seen_goes_to_the_best_that_is_known() -> None:
    one = estimate(8.0)
    last_s = one.seen_s
    factors = []
    for i in range(100):
        revise(one, 2.0, last_s + UNSEEN_S + 0.5 * i)
        factors.append(one.factor)
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx(8, rel=0.02)
    assert factors[-1] == 2.0
    assert not one.doubted


def test_how_often_time_is_let_pass_does_not_matter() -> None:
    often, seldom = estimate(8.0), estimate(8.0)
    last_s = often.seen_s
    for one, steps in ((often, 600), (seldom, 6)):
        revise(one, 1.0, last_s + UNSEEN_S)
        for i in range(1, steps + 1):
            revise(one, 1.0, last_s + UNSEEN_S + 6 * i / steps)
    assert often.factor == pytest.approx(seldom.factor, rel=1e-6)


def test_the_first_thing_seen_of_a_doubted_one_counts() -> None:
    one = estimate(8.0)
    revise(one, 1.0, one.seen_s + 3.0)
    assert one.doubted
    assert saw(one, 0.5, 0.5, one.seen_s + 4.0) < 1.6


def test_a_doubted_one_that_is_slow_indeed_is_slow_at_once() -> None:
    one = estimate(8.0)
    for i in range(20):
        revise(one, 1.0, one.seen_s + 4.0)
        assert saw(one, 1.0, 1 / 8, one.seen_s + 5.0) > 6, i


def test_what_was_slow_and_is_still_seen_recovers_in_seconds() -> None:
    one = estimate(8.0)
    for second in range(3):
        saw(one, 1.0, 1.0, 20.0 + second)
    assert one.factor < 1.5


def test_a_low_factor_is_never_doubted() -> None:
    one = estimate(0.5)
    revise(one, 1.0, 1000.0)
    assert not one.doubted
    assert one.factor == pytest.approx(0.5, rel=0.02)


# Requests whose tokens nobody sees


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("together", [1, 8])
def test_plain_requests_teach_how_fast_an_instance_is(factor: float, together: int) -> None:
    s = scheduler(spec("a"), policy="finish-time")
    body = request(output_tokens=100.0).replace(streams=False)
    c, now_s = FAST_CONSTANTS, 0.0
    for _ in range(30):
        tickets = [s.place(body, now_s) for _ in range(together)]
        s.pump(now_s)
        prompt = together * body.prompt_tokens
        prefill_s = c.p1 * prompt + c.p2 * together + c.p4
        context = prompt + 50 * together
        step_s = c.p5 * context + c.p6 * together + c.p7 * context / together + c.p8
        end_s = now_s + factor * (prefill_s + 99 * step_s)
        while now_s < end_s:
            now_s = min(end_s, now_s + 0.25)
            s.pump(now_s)
        for ticket in tickets:
            ticket.dispatch.state.observe_answer(ticket.dispatch, 100, now_s)  # type: ignore[union-attr, arg-type]
        for ticket in tickets:
            s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)  # type: ignore[union-attr, arg-type]
    assert state(s, "a").speed == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_what_a_server_takes_beside_its_engine_says_nothing_of_the_engines_speed(factor) -> None:
    """One whole answer teaches as much as if there were no server in front."""
    speeds = []
    for first_token_s in (0.0, 0.8):
        s = scheduler(
            spec("a", dataclasses.replace(FAST, first_token_s=first_token_s)), policy="finish-time"
        )
        body = request(output_tokens=100.0).replace(streams=False)
        ticket = s.place(body, 0.0)
        c, prompt = FAST_CONSTANTS, body.prompt_tokens
        engine_s = c.p1 * prompt + c.p2 + c.p4 + 99 * (c.p5 * prompt + c.p6 + c.p7 * prompt + c.p8)
        ends_s = first_token_s + factor * engine_s
        s.settle(ticket.dispatch, Outcome.COMPLETED, ends_s, unseen_tokens=100)  # type: ignore[union-attr, arg-type]
        speeds.append(state(s, "a").speed)
    assert speeds[1] == pytest.approx(speeds[0], rel=1e-9)
    assert (speeds[0] - 1) * (factor - 1) > 0 or factor == 1


def test_a_server_that_becomes_slower_is_known_at_once() -> None:
    s = scheduler(spec("a"))
    s.replace(spec("a", dataclasses.replace(FAST, first_token_s=0.3)))
    assert state(s, "a").first_token_s == 0.3


TOO_LARGE = pytest.mark.interpreted("what is compiled refuses an int that is too large for a float")


@pytest.mark.parametrize("told", [10**18, pytest.param(10**310, marks=TOO_LARGE)])
def test_an_absurd_length_that_an_engine_tells_is_hardly_believed(told: int) -> None:
    s = scheduler(spec("a"), policy="finish-time")
    ticket = s.place(request().replace(streams=False), 0.0)
    ticket.dispatch.state.observe_answer(ticket.dispatch, told, 1.0)  # type: ignore[union-attr, arg-type]
    assert 0.2 < state(s, "a").speed <= 1.0


def test_an_answer_teaches_nothing_where_it_was_not_predicted_or_is_over() -> None:
    one = Table().join(InstanceId("a"))
    one.set_constants(FAST_CONSTANTS)
    entry = one.dispatch(request(), 1.0, 0.0)
    one.observe_answer(entry, 10, 50.0)
    one.settle(entry, Outcome.COMPLETED, 50.0)
    entry.predicted_s = (0.0, 0.1)
    one.observe_answer(entry, 10, 100.0)
    assert one.speed == 1.0
