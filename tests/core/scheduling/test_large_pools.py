"""Where few of many cannot take part: who they are, and that no decision pays for the many."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetero_gateway.core.instances.speed import UNSEEN_S
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling import members
from hetero_gateway.core.scheduling.pool import Eligible
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import (
    InstanceId,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
)
from tests.core.builders import FAST, FAST_CONSTANTS, eject, profile, request, scheduler, spec

MANY = 24
TINY = profile(FAST_CONSTANTS, 1000)

specs = st.lists(
    st.tuples(st.sampled_from([FAST, TINY, None]), st.sampled_from([None, 600, 4096])),
    min_size=1,
    max_size=8,
)


@given(
    specs,
    st.integers(1, 5000),
    st.sampled_from([0.0, 1.0, 800.0]),
    st.sets(st.integers(0, 9), max_size=3),
    st.one_of(st.none(), st.integers(0, 9)),
)
# At the bounds: a context must hold one token of output where any is generated, a cache all of it.
@example([(FAST, 600), (FAST, None)], 599, 1.0, set(), None)
@example([(FAST, 600), (FAST, None)], 600, 1.0, set(), None)
@example([(FAST, 600)], 600, 0.0, set(), None)
@example([(TINY, None), (FAST, None)], 200, 800.0, set(), None)
@example([(TINY, None), (FAST, 100)], 200, 800.0, set(), None)
@example([(TINY, None), (FAST, None)], 201, 800.0, set(), None)
@example([(TINY, None), (None, None)], 500_000, 1.0, set(), None)
def test_who_may_get_a_request_is_judged_one_by_one(told, prompt, output, tried, only):
    s = scheduler(*(spec(f"i{i}", p, max_model_len=m) for i, (p, m) in enumerate(told)))  # type: ignore[arg-type]
    exclude = [InstanceId(f"i{i}") for i in tried]
    wanted = Request("m", prompt, output, only=None if only is None else InstanceId(f"i{only}"))
    pool = s.members.pool("m")
    for _ in range(2):  # the second time from what was kept
        judged = pool.eligible(wanted, exclude)
        reasons = [_why_not(each, wanted, exclude) for each in s.members.specs.values()]
        chosen = s.choose(wanted, exclude)
        if isinstance(judged, Eligible):
            assert reasons[list(s.members.specs).index(chosen.instance_id)] is None
            assert list(judged.positions()) == [i for i, why in enumerate(reasons) if why is None]
            assert [(e.instance_id, why) for e, why in judged.excluded] == [
                (InstanceId(f"i{i}"), why) for i, why in enumerate(reasons) if why is not None
            ]
            assert all(judged.has(i) == (why is None) for i, why in enumerate(reasons))
        else:
            assert None not in reasons
            fits_none = not any("tried" in why or "continues" in why for why in reasons)
            no_room = chosen.reason is RejectReason.FITS_NO_INSTANCE
            assert no_room if fits_none else isinstance(chosen, Reject)


def _why_not(each: InstanceSpec, wanted: Request, exclude: list[InstanceId]) -> str | None:
    tokens = wanted.prompt_tokens + wanted.predicted_output_tokens
    capacity = each.profile.kv_capacity_tokens if each.profile else math.inf
    if each.instance_id in exclude:
        return "tried already"
    if wanted.only is not None and each.instance_id != wanted.only:
        return f"what it continues is on {wanted.only}"
    if wanted.prompt_tokens + (wanted.predicted_output_tokens > 0) > (
        each.max_model_len or math.inf
    ):
        return f"context of {each.max_model_len} tokens is too short"
    if tokens > capacity:
        return f"KV capacity of {capacity} tokens is too small"
    return None


def many(*, policy: str = "finish-time", context: int = 8192, without: int = 0) -> Scheduler:
    """Unequal instances, so that nothing is drawn; the first ``without`` are not there."""
    return scheduler(
        *(
            spec(
                f"i{i}",
                profile(FAST_CONSTANTS.scaled(1 + i / 10), 100_000),
                max_model_len=context if i < 3 else 8192,
            )
            for i in range(without, MANY)
        ),
        policy=policy,
    )


def picks(of: Scheduler, prompt_tokens: int = 512) -> list[str]:
    result = []
    for turn in range(40):
        ticket = of.place(request(prompt_tokens), 0.1 * turn)
        of.first_token(ticket.dispatch, 0.1 * turn + 0.05)
        result.append(str(ticket.dispatch.instance_id))
    return result


def eject_for_long(of: Scheduler, *names: str) -> None:
    for name in names:
        eject(of, name, base_s=1000.0, max_s=1000.0)


@pytest.mark.parametrize("policy", ["finish-time", "min-max", "capacity-weighted"])
def test_among_those_left_it_is_decided_as_if_the_others_were_not_there(policy: str) -> None:
    expected = picks(many(policy=policy, without=3))
    restrained = many(policy=policy)
    eject_for_long(restrained, "i0", "i1", "i2")
    assert picks(restrained) == expected
    assert picks(many(policy=policy, context=100)) == expected


def test_the_same_few_cost_one_look_at_the_many() -> None:
    s = many()
    eject_for_long(s, "i1")
    eligible = s.members.eligible(request(), ())
    assert isinstance(eligible, Eligible)
    left = s.restraints.judge(eligible, request(), (), 1.0)
    assert isinstance(left, Eligible)
    assert s.restraints.judge(eligible, request(), (), 2.0) is left
    assert left.kept == [i for i in range(MANY) if i != 1]
    eject_for_long(s, "i2")
    other = s.restraints.judge(eligible, request(), (), 3.0)
    assert isinstance(other, Eligible)
    assert [why for _, why in other.excluded] == ["ejected", "ejected"]


def test_an_instance_of_another_model_restrains_nobody() -> None:
    s = many()
    s.add(spec("other", models=frozenset({"else"})))
    eject_for_long(s, "other")
    eligible = s.members.eligible(request(), ())
    assert isinstance(eligible, Eligible)
    assert s.restraints.judge(eligible, request(), (), 1.0) is eligible


def test_a_doubted_one_among_many_is_tried() -> None:
    s = many()
    state = s.members.table[InstanceId("i20")]
    state.set_speed(8.0)
    now_s = 100.0
    assert now_s - max(state.estimate.seen_s, state.heard_s) >= UNSEEN_S
    # Among so many the slow one would get nothing for long.
    sent = []
    for turn in range(60):
        ticket = s.place(request(), now_s + turn)
        sent.append(str(ticket.dispatch.instance_id))
        s.settle(ticket.dispatch, Outcome.COMPLETED, now_s + turn)
    assert sent.count("i20") >= 1


@pytest.mark.interpreted("it replaces a function")
def test_what_stands_in_for_the_unknown_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    made = members.typical_constants
    monkeypatch.setattr(members, "typical_constants", lambda s: calls.append(1) or made(s))
    s = scheduler(
        *(spec(f"i{i}", None if i % 2 else FAST, weight=1.0 + i) for i in range(MANY)),
        policy="finish-time",
    )
    pool = s.members.pool("m")
    assert len(calls) == 1
    assert pool.members[3].p8 == pytest.approx(FAST.constants.p8 / 4)
    assert pool.members[2].p8 == FAST.constants.p8


def test_two_models_are_decided_as_by_two_schedulers() -> None:
    """Pools by model: sharding a fleet so changes nothing."""
    fleets = {
        model: [
            spec(
                f"{model}{i}", profile(FAST_CONSTANTS.scaled(1 + i / 7)), models=frozenset({model})
            )
            for i in range(size)
        ]
        for model, size in (("a", 5), ("b", MANY))
    }
    both = scheduler(*fleets["a"], *fleets["b"], policy="finish-time")
    alone = {m: scheduler(*fleet, policy="finish-time") for m, fleet in fleets.items()}
    rng = np.random.default_rng(0)
    outstanding = []
    for turn in range(400):
        now_s, model = 0.01 * turn, "ab"[int(rng.integers(2))]
        wanted = request(int(rng.integers(10, 3000)), float(rng.integers(10, 900)), model)
        tickets = [s.place(wanted, now_s) for s in (both, alone[model])]
        dispatches = [t.dispatch for t in tickets if isinstance(t, Ticket)]
        first, second = dispatches
        assert first.instance_id == second.instance_id
        for s, dispatch in ((both, first), (alone[model], second)):
            s.first_token(dispatch, now_s)
            outstanding.append((s, dispatch))
        if turn >= 50:
            for _ in range(2):
                s, dispatch = outstanding.pop(0)
                s.settle(dispatch, Outcome.COMPLETED, now_s)


# Very many: a sample is looked at


def very_many(policy: str = "finish-time") -> Scheduler:
    """150 of three kinds, of which a few are much the fastest; each runs two requests."""
    factors = [0.2 if i % 50 == 7 else 1.0 + i % 2 for i in range(150)]
    return scheduler(
        *(
            spec(f"i{i}", profile(FAST_CONSTANTS.scaled(factor), 100_000, max_num_seqs=2))
            for i, factor in enumerate(factors)
        ),
        policy=policy,
    )


@pytest.mark.parametrize("policy", ["finish-time", "min-max", "capacity-weighted"])
def test_of_very_many_the_fastest_and_some_that_are_drawn_are_looked_at(policy: str) -> None:
    s, seen = very_many(policy), set()
    for _ in range(100):
        ticket = s.place(request(), 0.0)
        assert isinstance(ticket, Ticket)
        assert ticket.dispatch is not None
        assert {"i7", "i57", "i107"} < set(ticket.decision.ids)
        assert len(ticket.decision.ids) <= 24 + 8
        seen.update(ticket.decision.ids)
        if policy != "capacity-weighted":
            assert ticket.dispatch.instance_id in {"i7", "i57", "i107"}
        s.settle(ticket.dispatch, Outcome.COMPLETED, 0.0)
    assert len(seen) > 130


@pytest.mark.parametrize("policy", ["round-robin", "paper", "single-instance"])
def test_who_needs_all_is_shown_all(policy: str) -> None:
    ticket = very_many(policy).place(request(), 0.0)
    assert isinstance(ticket, Ticket)
    assert len(ticket.decision.ids) == 150


def test_no_request_waits_while_one_of_very_many_has_room() -> None:
    s, tickets = very_many(), []
    seats = sum(int(member.seats) for member in s.members.pool("m").members)
    for i in range(seats):
        ticket = s.place(request(), 0.2 * i)
        assert isinstance(ticket, Ticket)
        assert ticket.dispatch is not None, f"{i} of {seats} are placed"
        s.first_token(ticket.dispatch, 0.2 * i)
        tickets.append(ticket)
    now_s = 0.2 * seats
    assert s.place(request(), now_s).waits
    # The next two are looked for within no time: the one that is free is known.
    for ticket in tickets[:2]:
        s.place(request(), now_s)
        s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
        (placed,) = s.pump(now_s)
        assert placed.dispatch.instance_id == ticket.dispatch.instance_id


def test_an_explanation_is_what_is_chosen_next_among_very_many() -> None:
    s = very_many("capacity-weighted")
    for _ in range(20):
        explained = s.explain(request(), 0.0)
        ticket = s.place(request(), 0.0)
        assert explained.ids == ticket.decision.ids
        assert explained.instance_id == ticket.decision.instance_id
