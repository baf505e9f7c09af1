"""A slow instance is reported within seconds, with its factor; small absolute errors are not."""

import numpy as np
import pytest

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.instances.slowness import HTTP_S, MOST, Slowness, engine_time_s
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.members import Members
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome


def seconds_of(slowness: Slowness, factor: float, count: int, start_s: float = 0.0) -> list[float]:
    """Looks a second apart, each ``factor`` times as long as modelled; when it changed."""
    return [
        start_s + i for i in range(1, count + 1) if slowness.look(1.0, 1.0 / factor, start_s + i)
    ]


@pytest.mark.parametrize("factor", [2.2, 4.0, 5.4])
def test_it_is_reported_within_seconds_with_its_factor(factor: float) -> None:
    slowness = Slowness()
    assert seconds_of(slowness, 1.0, 60) == []
    (found_s,) = seconds_of(slowness, factor, 10, 60.0)
    assert found_s - 60 <= 6
    assert slowness.factor == pytest.approx(factor)
    assert slowness.since_s == pytest.approx(60, abs=5)
    (over_s,) = seconds_of(slowness, 1.1, 10, 70.0)
    assert over_s - 70 <= 6
    assert slowness.since_s is None


def test_it_stays_while_nothing_is_seen_and_does_not_flicker_between_the_bounds() -> None:
    slowness = Slowness()
    assert len(seconds_of(slowness, 3.0, 5)) == 1
    assert not slowness.look(0.0, 0.0, 600.0)
    assert slowness.since_s is not None
    assert seconds_of(slowness, 1.8, 60, 600.0) == []
    # What was seen long before is no witness: three fast seconds are enough.
    assert seconds_of(slowness, 1.0, 5, 900.0) == [903.0]
    assert seconds_of(slowness, 1.8, 60, 1000.0) == []


def test_what_was_seen_by_one_who_was_late_says_nothing() -> None:
    slowness = Slowness()
    assert seconds_of(slowness, 4.0, 2) == []
    slowness.start_anew()
    assert seconds_of(slowness, 4.0, 2, 2.0) == []
    assert seconds_of(slowness, 4.0, 1, 4.0) == [5.0]
    slowness.start_anew()
    assert slowness.since_s is not None


def test_one_long_answer_by_itself_proves_nothing_and_an_engine_that_hangs_is_slow() -> None:
    slowness = Slowness()
    assert not slowness.look(12.0, 3.0, 12.0)
    assert slowness.look(12.0, 3.0, 24.0)
    hanging = Slowness()
    assert [hanging.look(1.0, 0.0, float(i)) for i in range(4)] == [False, False, True, False]
    assert hanging.factor == MOST


@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_a_long_prefill_is_granted_once(slow: float) -> None:
    """Ten seconds of prefill by the model, without a step, and what comes after it."""
    slowness, changes, prefill_s = Slowness(), [], 10.0
    for i in range(1, round(slow * prefill_s) + 1):
        modelled_s = slowness.excused(1.0, 0.0, 0.0, prefill_s)
        changes.append(slowness.look(1.0, modelled_s, float(i)))
    now_s = slow * prefill_s + 1
    modelled_s = slowness.excused(1.0, prefill_s, 1.0 / slow, 0.0)
    assert modelled_s == pytest.approx(1.0 / slow, abs=0.01)
    changes.append(slowness.look(1.0, modelled_s, now_s))
    assert any(changes) == (slow > 2)


def test_http_is_no_engine() -> None:
    # The demo's: 6 ms of prefill take 9.
    assert engine_time_s(0.009, 0.006) == 0.006
    assert engine_time_s(0.2, 0.1) == pytest.approx(0.2 - HTTP_S)
    assert engine_time_s(0.05, 0.1) == 0.05


C = Constants(p1=1e-5, p2=0.0, p3=0.0, p4=2e-3, p5=1e-8, p6=1e-5, p7=0.0, p8=3e-3)
I0 = InstanceId("i0")


def one_by_one(http_s: float, slow: float, requests: int) -> tuple[Members, float | None]:
    """Streams of 200 tokens that follow one another; when the instance was first called slow."""
    s = Scheduler(
        make_policy("finish-time"), np.random.default_rng(0), 2.0, (500, 50), observes=True
    )
    s.add(InstanceSpec(I0, frozenset(("m",)), Profile("GPU", "m", 1, C, 400_000, 64)))
    s.observe_cache(I0, False, None, 0.0)
    now_s, found_s = 0.0, None
    for _ in range(requests):
        ticket = s.place(Request("m", 400, 200.0), now_s)
        assert ticket.dispatch is not None
        now_s += slow * prefill_time_s(C, 1, 400) + http_s
        s.first_token(ticket.dispatch, now_s)
        s.members.observe_steps(I0, 0, 0.0, now_s)
        took_s = slow * 199 * decode_step_time_s(C, 1, 500)
        now_s += took_s
        s.members.observe_steps(I0, 199, took_s, now_s)
        if s.members.slowness[I0].since_s is not None and found_s is None:
            found_s = now_s
        s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
    return s.members, found_s


@pytest.mark.parametrize("http_s", [0.0, 0.003, 0.015])
def test_a_short_prefill_behind_http_is_no_drift(http_s: float) -> None:
    """6 ms of prefill: with HTTP's own time they look half as long again, or worse."""
    members, found_s = one_by_one(http_s, 1.0, 600)
    assert found_s is None
    assert not members.drifts[I0].drifted
    assert members.drifts[I0].verdict().prefill == pytest.approx(1.0, abs=0.02)


def test_a_slow_one_is_found_with_its_factor_behind_http_too() -> None:
    members, found_s = one_by_one(0.003, 5.4, 200)
    assert found_s is not None
    assert found_s <= 15
    assert members.snapshot(I0).slowness == pytest.approx(5.4, rel=0.05)
    assert members.drifts[I0].drifted
