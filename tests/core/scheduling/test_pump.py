"""Who waits, who goes on and in which order; and what a request that breaks the pump costs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.policies.base import Choice
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, Outcome, Reject
from tests.core.builders import (
    SLOW,
    Changed,
    is_empty,
    loads,
    profile,
    request,
    scheduler,
    spec,
    state,
    submitted,
)

POLICIES = ("finish-time", "min-max", "round-robin")


class Bug(Exception):
    """What a policy of this module's raises."""


def breaking(name: str, broken: Any) -> Any:
    """A policy that does ``broken`` to its choice for a request of 13 prompt tokens."""
    policy = make_policy(name)

    def choose(view: Any, rng: Any) -> Choice | None:
        choice = policy.choose(view, rng)
        if choice is None or view.request.prompt_tokens != 13:
            return choice
        return broken(choice)  # type: ignore[no-any-return]

    return Changed(policy, choose=choose)


def raises(choice: Choice) -> Choice:
    raise Bug


def changed(name: str, value: float) -> Callable[[Choice], Choice]:
    def change(choice: Choice) -> Choice:
        setattr(choice, name, value)
        return choice

    return change


BREAKS = {
    "raises": raises,
    "charge is nan": changed("charge", math.nan),
    "charge is infinite": changed("charge", math.inf),
    "charge is negative": changed("charge", -1.0),
    "charge is huge": changed("charge", 10**310),
    "nobody is there": changed("position", 99),
    "first token never": changed("ttft_s", math.nan),
}
CASES = [
    (name, break_by)
    for name in POLICIES
    for break_by in BREAKS
    if name == "finish-time" or break_by != "first token never"  # it alone predicts one
]


@pytest.mark.parametrize(("name", "break_by"), CASES)
def test_what_breaks_the_pump_fails_alone_and_leaves_nothing(name: str, break_by: str) -> None:
    s = scheduler(spec("a"), spec("b", SLOW), policy=breaking(name, BREAKS[break_by]))
    lengths = (512, 13, 100, 13, 700)
    tickets = [submitted(s, request(tokens)) for tokens in lengths]
    done = s.pump(0.0)
    assert done == tickets
    assert s.queued == 0
    for tokens, ticket in zip(lengths, tickets, strict=True):
        if tokens == 13:
            assert ticket.failed is not None
            assert (ticket.dispatch, ticket.rejected, ticket.waits) == (None, None, False)
        else:
            assert ticket.failed is None
            assert ticket.dispatch is not None
    assert sum(s.members.snapshot(each).in_flight for each in s.members.specs) == 3
    for ticket in tickets:
        if ticket.dispatch is not None:
            assert s.settle(ticket.dispatch, Outcome.COMPLETED, 1.0)
    assert loads(s) == [0.0, 0.0]
    # The next is placed as if nothing had been.
    after = s.place(request(), 2.0)
    assert after.dispatch is not None


@pytest.mark.parametrize("name", POLICIES)
def test_one_that_fails_when_it_is_placed_at_once_leaves_the_queue(name: str) -> None:
    s = scheduler(spec("a"), policy=breaking(name, raises))
    ticket = s.place(request(13), 0.0)
    assert isinstance(ticket.failed, Bug)
    assert s.queued == 0
    assert not s.cancel(ticket)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "body",
    [
        request(sequences=10**310),
        request(sequences=0),
        request(prompt_tokens=10**310),
        request(prompt_tokens=-1),
        request(output_tokens=math.nan),
        request(output_tokens=math.inf),
        request(output_tokens=1e308),
    ],
)
def test_absurd_numbers_are_refused_at_the_door_and_hurt_nobody(name: str, body: Request) -> None:
    s = scheduler(spec("a"), spec("b", SLOW), policy=name)
    for door in (partial(s.place, at_once=False), s.place):
        with pytest.raises(ValueError, match="must be within"):
            door(body, 0.0)
    for judge in (s.choose, s.explain):
        with pytest.raises(ValueError, match="must be within"):
            judge(body)
    assert (s.queued, loads(s)) == (0, [0.0, 0.0])
    assert submitted(s, request()) in s.pump(0.0)


bodies = st.builds(
    request,
    st.one_of(st.integers(1, 4000), st.just(13), st.just(10**310)),
    st.one_of(st.floats(1, 2000), st.just(math.nan)),
    st.just("m"),
    st.one_of(st.integers(1, 300), st.just(10**310)),
)


@given(
    st.sampled_from(POLICIES),
    st.sampled_from(sorted(BREAKS)),
    st.lists(st.tuples(st.sampled_from(("submit", "place", "settle", "token")), bodies)),
)
def test_whatever_fails_in_between_every_sum_ends_at_zero(name, break_by, events):
    specs = spec("a", profile(max_num_seqs=4)), spec("b", SLOW)
    s = scheduler(*specs, policy=breaking(name, BREAKS[break_by]))
    tickets: list[Ticket] = []
    now_s = 0.0
    for event, body in events:
        now_s += 0.05
        placed = [t.dispatch for t in tickets if t.dispatch is not None]
        if event in ("submit", "place"):
            try:
                ticket = s.place(body, now_s, at_once=event != "submit")
            except ValueError:
                continue
            assert not isinstance(ticket, Reject)
            tickets.append(ticket)
        elif event == "token" and placed:
            s.first_token(placed[body.prompt_tokens % len(placed)], now_s)
        elif placed:
            s.settle(placed[body.prompt_tokens % len(placed)], Outcome.COMPLETED, now_s)
        s.pump(now_s)
    # Each has one outcome, and none is lost.
    for _ in range(2 * len(tickets) + 1):
        now_s += 10.0
        for ticket in tickets:
            if ticket.dispatch is not None:
                s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
        s.pump(now_s)
    for ticket in tickets:
        outcomes = (ticket.dispatch, ticket.rejected, ticket.failed)
        assert sum(outcome is not None for outcome in outcomes) == 1
    assert s.queued == 0
    for each in s.members.specs:
        assert is_empty(state(s, each))
        assert s.members.snapshot(each).in_flight == 0


# Who passes whom


LARGE = spec("large", profile(max_num_seqs=1), max_model_len=32_768)
SMALL = spec("small", profile(SLOW.constants, 100_000), max_model_len=4096)
LONG, SHORT = request(prompt_tokens=20_000), request(prompt_tokens=100)


def fill(s: Scheduler, instance_id: str, seats: int, now_s: float = 0.0) -> list[Any]:
    """Streams that take so many seats of an instance."""
    result = []
    for _ in range(seats):
        dispatch = state(s, instance_id).dispatch(request(), 1.0, now_s)
        s.first_token(dispatch, now_s)
        result.append(dispatch)
    return result


def where(ticket: Ticket) -> str | None:
    return None if ticket.dispatch is None else ticket.dispatch.instance_id


def test_a_long_request_that_waits_for_the_large_instance_holds_no_short_one_up() -> None:
    s = scheduler(LARGE, SMALL, policy="finish-time")
    there = fill(s, "large", 2)
    long = submitted(s, LONG, 1.0)
    assert s.pump(1.0) == []
    short = [submitted(s, SHORT, 1.0 + i) for i in range(5)]
    assert s.pump(6.0) == short
    assert {where(ticket) for ticket in short} == {"small"}
    # What it waits for is kept for it, however many come.
    s.settle(there[0], Outcome.COMPLETED, 7.0)
    later = submitted(s, SHORT, 7.0)
    assert s.pump(7.0)[0] is long
    assert where(long) == "large"
    assert where(later) == "small"


def test_the_passed_one_is_not_starved_by_those_that_pass() -> None:
    s = scheduler(LARGE, SMALL, policy="finish-time")
    there = fill(s, "large", 2)
    long = submitted(s, LONG, 0.0)
    for i in range(200):
        now_s = i * 0.01
        submitted(s, SHORT, now_s)
        for ticket in s.pump(now_s):
            assert where(ticket) == "small"
            s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
    s.settle(there[0], Outcome.COMPLETED, 3.0)
    submitted(s, SHORT, 3.0)
    assert s.pump(3.0)[0] is long


def test_who_passes_is_told_what_it_was_kept_from() -> None:
    s = scheduler(LARGE, SMALL, policy="finish-time")
    fill(s, "large", 2)
    submitted(s, LONG)
    short = submitted(s, SHORT)
    s.pump(0.0)
    (row,) = [c for c in short.decision.explain() if c.instance_id == "large"]
    assert row.excluded == "kept for who waits longer"


def test_a_retry_that_waits_holds_nobody_up() -> None:
    s = scheduler(spec("a", profile(max_num_seqs=1)), spec("b"), policy="finish-time")
    fill(s, "a", 2)
    retry = submitted(s, SHORT, exclude=(InstanceId("b"),), first=True)
    others = [submitted(s, SHORT) for _ in range(3)]
    assert s.pump(0.0) == others
    assert {where(ticket) for ticket in others} == {"b"}
    assert retry.waits


def test_those_with_the_same_instances_keep_their_order() -> None:
    s = scheduler(LARGE, SMALL, spec("other", SLOW, max_model_len=4096), policy="finish-time")
    there = fill(s, "large", 2) + fill(s, "small", 264) + fill(s, "other", 264)
    rng = np.random.default_rng(3)
    order = [LONG if rng.random() < 0.3 else SHORT for _ in range(60)]
    tickets = [submitted(s, body, i * 1e-3) for i, body in enumerate(order)]
    done: list[Ticket] = []
    for i, dispatch in enumerate(rng.permutation(np.array(there, dtype=object))):
        s.settle(dispatch, Outcome.COMPLETED, 1.0 + i * 0.01)
        done += s.pump(1.0 + i * 0.01)
    for body in (LONG, SHORT):
        mine = [ticket for ticket in done if ticket.request is body]
        assert mine == [t for t in tickets if t.request is body][: len(mine)]
    assert len(done) > 30


def test_a_crowd_leaves_the_last_instance_with_room_to_the_others_for_a_while() -> None:
    s = scheduler(spec("a"), spec("b"), policy="finish-time")
    first = submitted(s, request(sequences=1000))
    second = submitted(s, request(sequences=1000), 0.1)
    assert s.pump(0.1) == [first]
    short = [submitted(s, SHORT, 0.2) for _ in range(4)]
    assert s.pump(0.2) == short
    assert {where(t) for t in short} == {"a", "b"} - {where(first)}
    assert second.waits
    # When the first is done, or after half a minute, it has its turn.
    assert s.pump(30.0) == []
    assert s.pump(30.2) == [second]


def test_a_crowd_goes_on_where_there_is_one_instance() -> None:
    s = scheduler(spec("a"), policy="finish-time")
    ticket = submitted(s, request(sequences=1000))
    assert s.pump(0.0) == [ticket]
    assert where(ticket) == "a"


def test_lines_follow_a_change_of_the_instances() -> None:
    s = scheduler(LARGE, SMALL, policy="finish-time")
    fill(s, "large", 2)
    fill(s, "small", 264)
    tickets = [submitted(s, body, i * 0.1) for i, body in enumerate((SHORT, LONG, SHORT, LONG))]
    retry = submitted(s, SHORT, 1.0, exclude=(InstanceId("small"),), first=True)
    assert s.pump(1.0) == []
    s.add(spec("third", max_model_len=32_768))
    assert s.pump(2.0) == [retry, *tickets]
    assert s.queued == 0


def test_with_the_large_instance_gone_the_long_ones_are_refused_and_the_short_ones_wait() -> None:
    s = scheduler(LARGE, SMALL, policy="finish-time")
    fill(s, "large", 2)
    fill(s, "small", 264)
    short, long = submitted(s, SHORT), submitted(s, LONG)
    assert s.pump(0.0) == []
    s.remove(InstanceId("large"), 1.0)
    assert s.pump(1.0) == [long]
    assert long.rejected is not None
    assert (short.waits, s.queued) == (True, 1)
    assert s.cancel(short)
    assert s.queued == 0


def test_who_waited_as_an_instance_left_is_judged_anew_though_somebody_came_since() -> None:
    s = scheduler(LARGE, SMALL, policy="finish-time")
    fill(s, "large", 2)
    there = fill(s, "small", 264)
    waiting = submitted(s, SHORT)
    assert s.pump(0.0) == []
    s.remove(InstanceId("large"), 1.0)
    since = submitted(s, SHORT, 1.0)
    assert s.pump(1.0) == []
    for dispatch in there:
        s.settle(dispatch, Outcome.COMPLETED, 2.0)
    assert s.pump(2.0) == [waiting, since]
    assert (waiting.failed, where(waiting), where(since)) == (None, "small", "small")


def test_a_pump_that_places_nobody_looks_at_few_of_many() -> None:
    policy, asked = make_policy("finish-time"), []
    counted = Changed(policy, choose=lambda *args: asked.append(1) or policy.choose(*args))
    big = spec("big", profile(max_num_seqs=1), max_model_len=16_000)
    s = scheduler(LARGE, SMALL, big, policy=counted)
    for name, seats in (("large", 2), ("small", 264), ("big", 9)):
        fill(s, name, seats)
    sizes = (20_000, 10_000, 100)
    for i in range(10_000):
        submitted(s, request(sizes[i % 3]))
    assert not asked
    assert s.pump(1.0) == []
    assert 1 <= len(asked) <= 8
