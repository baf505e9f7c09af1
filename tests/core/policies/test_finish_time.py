"""The queue with late binding, and what ``finish-time`` makes of it."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.core.instances.dispatch import Dispatch, PeerLoad
from hetero_gateway.core.policies import PolicyOptions
from hetero_gateway.core.policies.estimates import LATE_WEIGHT, cost
from hetero_gateway.core.policies.finish_time import FinishTime, _part, idle_before_drain_s
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import (
    InstanceId,
    Outcome,
    PrefixKeys,
    Reject,
    RejectReason,
)
from tests.core import builders
from tests.core.builders import (
    FAST,
    SLOW,
    candidates,
    chosen,
    is_empty,
    profile,
    profiles,
    request,
    scheduler,
    spec,
    state,
    view_of,
)

DEPTH = 8


def submitted(s: Scheduler, now_s: float = 0.0, **changes: object) -> Ticket:
    return builders.submitted(s, request(**changes), now_s)  # type: ignore[arg-type]


def finish_time(*specs: object, **changes: object) -> Scheduler:
    return scheduler(*specs, policy="finish-time", **changes)  # type: ignore[arg-type]


def place(s: Scheduler, count: int, now_s: float = 0.0) -> list[Ticket]:
    for _ in range(count):
        submitted(s, now_s)
    return s.pump(now_s)


# The queue


def test_every_policy_but_finish_time_places_at_once() -> None:
    s = scheduler(spec("a"), spec("b", SLOW))
    assert len(place(s, 100)) == 100
    assert s.queued == 0


def test_an_instance_gets_eight_prompts_ahead_and_no_more() -> None:
    s = finish_time(spec("a"))
    assert len(place(s, 30)) == DEPTH
    assert s.queued == 30 - DEPTH


def test_it_gets_more_of_short_prompts() -> None:
    s = finish_time(spec("a"))
    for _ in range(100):
        submitted(s, prompt_tokens=100)
    # Two steps of 2048 tokens keep an engine busy while the next first tokens come back.
    assert len(s.pump(0.0)) == math.ceil(4096 / 100)
    c = dataclasses.replace(FAST.constants, p1=5e-4)
    s = finish_time(spec("a", profile(c)))
    for _ in range(100):
        submitted(s, prompt_tokens=100)
    # A slow one gets as many as it computes in half a second.
    assert len(s.pump(0.0)) == math.ceil(0.5 / 5e-4 / 100)


def test_a_first_token_makes_room_for_one() -> None:
    s = finish_time(spec("a"))
    placed = place(s, 30)
    s.first_token(placed[0].dispatch, 0.1)
    assert len(s.pump(0.1)) == 1
    assert s.pump(0.1) == []


@pytest.mark.parametrize(("seats", "more"), [(4, 1), (8, 1), (64, 2), (256, 8), (1024, 8)])
def test_no_more_are_in_flight_than_the_engine_runs_and_a_few(seats: int, more: int) -> None:
    s = finish_time(spec("a", profile(max_num_seqs=seats)))
    for _ in range(seats + 20):
        submitted(s, prompt_tokens=8)
    for _ in range(seats):
        s.pump(0.0)
        for slot_dispatch in s.members.table[InstanceId("a")].outstanding():
            s.first_token(slot_dispatch, 0.0)
    assert state(s, "a").in_flight == seats + more


def test_prompts_that_a_cache_has_no_room_for_wait_in_the_gateway() -> None:
    s = finish_time(spec("a", profile(kv_capacity_tokens=10_000)))
    for _ in range(4):
        submitted(s, prompt_tokens=3000)
    placed = s.pump(0.0)
    assert len(placed) == 3  # 9000 of the 9500 that may be taken
    for ticket in placed:
        s.first_token(ticket.dispatch, 0.0)
    assert s.pump(0.0) == []
    # What streams grows: by 600 tokens in all it is still too much, though no one has joined.
    s.settle(placed[0].dispatch, Outcome.COMPLETED, 0.5)
    assert len(s.pump(0.5)) == 1


def test_what_fills_a_cache_alone_is_taken_by_one_that_is_empty() -> None:
    s = finish_time(spec("a", profile(kv_capacity_tokens=4000), max_model_len=None))
    submitted(s, prompt_tokens=3900, output_tokens=50.0)
    assert len(s.pump(0.0)) == 1


def test_answers_that_would_not_fit_beside_each_other_wait_in_the_gateway() -> None:
    s = finish_time(spec("a", profile(kv_capacity_tokens=10_000)))
    for _ in range(6):
        submitted(s, prompt_tokens=100, output_tokens=3000.0)
    placed = s.pump(0.0)
    assert len(placed) == 4  # 0.65 of 12 400 tokens fit 9500, of 15 500 they do not
    for ticket in placed:
        s.first_token(ticket.dispatch, 0.0)
    assert s.pump(0.0) == []
    s.settle(placed[0].dispatch, Outcome.COMPLETED, 0.5)
    assert len(s.pump(0.5)) == 1


def test_cached_prompts_are_left_to_the_engine_s_memory() -> None:
    s = finish_time(spec("a", profile(kv_capacity_tokens=10_000)))
    keys = PrefixKeys((1, 2, 3), (4000, 8000, 12_000), 12_000)
    body = request(3000, 10.0).replace(prefix=keys)
    # Those that run share what is cached: four prompts of 3000 take far less than 12 000 tokens.
    assert [t.dispatch is not None for t in (s.place(body, 0.0) for _ in range(4))] == [True] * 4  # type: ignore[union-attr]


def test_tickets_are_placed_in_the_order_they_came() -> None:
    s = finish_time(spec("a"))
    tickets = [submitted(s, i * 0.01) for i in range(20)]
    placed = s.pump(0.5)
    while s.queued:
        for ticket in placed[-DEPTH:]:
            s.first_token(ticket.dispatch, 1.0)
        placed += s.pump(1.0)
    assert placed == tickets


def test_a_retry_goes_to_the_head_and_not_where_it_failed() -> None:
    s = finish_time(spec("a"), spec("b"))
    place(s, 40)
    retry = s.place(request(), 0.5, [InstanceId("a")], first=True, at_once=False)
    on_b = next(iter(s.members.table[InstanceId("b")].outstanding()))
    s.first_token(on_b, 0.6)
    (placed,) = s.pump(0.6)
    assert placed is retry
    assert placed.decision.instance_id == "b"


def test_a_cancelled_ticket_leaves_the_queue_once() -> None:
    s = finish_time(spec("a"))
    place(s, DEPTH)
    first, second = submitted(s), submitted(s)
    assert s.cancel(first)
    assert not s.cancel(first)
    assert s.queued == 1
    for dispatch in s.members.table[InstanceId("a")].outstanding():
        s.first_token(dispatch, 1.0)
    assert s.pump(1.0) == [second]
    assert not s.cancel(second)


def test_a_full_queue_refuses() -> None:
    s = finish_time(spec("a"), max_queued=3)
    for _ in range(DEPTH + 3):
        place(s, 1)
    result = s.place(request(), 0.0, at_once=False)
    assert isinstance(result, Reject)
    assert result.reason is RejectReason.QUEUE_FULL
    assert s.queued == 3


def test_a_retry_keeps_its_place_in_a_full_queue() -> None:
    s = finish_time(spec("a"), spec("b"), max_queued=3)
    first = place(s, 1)[0]
    for _ in range(2 * DEPTH + 2):
        place(s, 1)
    assert s.queued == 3
    s.settle(first.dispatch, Outcome.UPSTREAM_ERROR)
    retry = s.place(first.request, 1.0, (first.decision.instance_id,), first=True, at_once=False)
    assert isinstance(retry, Ticket)
    assert s.queued == 4


def test_a_wake_up_is_always_to_come() -> None:
    # A timer at a time that is over would pump without end.
    s = finish_time(spec("a"))
    place(s, DEPTH + 1)
    drain_s = s.next_wakeup_s()
    s.pump(drain_s)
    assert s.queued == 1
    following_s = s.next_wakeup_s()
    assert following_s > drain_s
    s.place(request().replace(streams=False), drain_s + 1, at_once=False)
    s.pump(drain_s + 1)
    following_s = s.next_wakeup_s()
    assert following_s > drain_s + 1


def test_who_can_never_be_served_is_refused_at_once() -> None:
    s = finish_time(spec("a"))
    place(s, 50)
    reasons = []
    for body in (request(model="other"), request(9000)):
        result = s.place(body, 0.0, at_once=False)
        assert isinstance(result, Reject)
        reasons.append(result.reason)
    assert reasons == [RejectReason.UNKNOWN_MODEL, RejectReason.FITS_NO_INSTANCE]


def test_when_the_last_instance_goes_those_that_wait_are_told() -> None:
    s = finish_time(spec("a"))
    place(s, 20)
    s.replace(spec("a", available=False))
    told = s.pump(1.0)
    assert len(told) == 20 - DEPTH
    assert {t.rejected.reason for t in told if t.rejected} == {RejectReason.NO_AVAILABLE_INSTANCE}
    assert s.queued == 0


def test_an_instance_that_comes_up_takes_from_the_queue() -> None:
    s = finish_time(spec("a"))
    place(s, 20)
    s.add(spec("b"))
    assert {t.decision.instance_id for t in s.pump(1.0)} == {"b"}


def test_models_do_not_block_each_other() -> None:
    s = finish_time(spec("a"), spec("b", models=frozenset({"other"})))
    place(s, 20)
    other = submitted(s, model="other")
    assert s.pump(0.0) == [other]


def test_models_on_one_instance_share_its_room_by_arrival() -> None:
    s = finish_time(spec("a", models=frozenset({"x", "y"})))
    tickets = [submitted(s, i * 0.1, model="xy"[i % 2]) for i in range(12)]
    assert s.pump(2.0) == tickets[:DEPTH]


def test_a_request_that_does_not_stream_leaves_its_place_when_its_prefill_is_predicted() -> None:
    s = finish_time(spec("a"))
    for _ in range(DEPTH + 1):
        s.place(request().replace(streams=False), 0.0, at_once=False)
    assert len(s.pump(0.0)) == DEPTH
    while s.queued:
        wake_s = s.next_wakeup_s()
        assert wake_s < 2
        s.pump(wake_s)
    assert state(s, "a").in_flight == DEPTH + 1


def test_removing_an_instance_leaves_no_trace_of_its_requests() -> None:
    s = finish_time(spec("a"), spec("b"))
    tickets = place(s, 10)
    s.first_token(tickets[0].dispatch, 0.1)
    s.remove(InstanceId("a"))
    s.add(spec("a"))
    assert is_empty(state(s, "a"))


def test_settled_requests_leave_exactly_nothing() -> None:
    s = finish_time(spec("a"), spec("b", SLOW))
    now_s = 0.0
    placed = place(s, 200)
    while placed:
        now_s += 0.1
        for ticket in placed:
            s.first_token(ticket.dispatch, now_s)
            assert s.settle(ticket.dispatch, Outcome.COMPLETED, now_s + 0.05)
        placed = s.pump(now_s + 0.05)
    assert is_empty(state(s, "a"))
    assert is_empty(state(s, "b"))
    assert s.queued == 0


# The choice


def test_an_idle_fast_instance_is_preferred() -> None:
    s = finish_time(spec("slow", SLOW), spec("fast"))
    assert place(s, 1)[0].decision.instance_id == "fast"


def streaming(s: Scheduler, count: int, now_s: float = 0.0) -> list[str]:
    """Place so many, each with its first token at once; returns where they went."""
    chosen = []
    for _ in range(count):
        for ticket in place(s, 1, now_s):
            s.first_token(ticket.dispatch, now_s)
            chosen.append(ticket.decision.instance_id)
    return chosen


def test_a_slow_instance_helps_when_the_fast_one_is_full() -> None:
    s = finish_time(spec("slow", SLOW), spec("fast", profile(max_num_seqs=16)))
    chosen = streaming(s, 40)
    assert chosen[0] == "fast"
    assert chosen.count("fast") == 16 + 1
    assert chosen.count("slow") == 23


def test_equal_instances_do_not_wait_for_each_other() -> None:
    s = finish_time(spec("a"), spec("b"))
    chosen = [t.decision.instance_id for t in place(s, 2 * DEPTH)]
    assert chosen.count("a") == chosen.count("b") == DEPTH


def test_a_much_faster_instance_is_worth_the_wait_for_its_next_first_token() -> None:
    s = finish_time(spec("slow", SLOW), spec("fast"))
    placed = place(s, 2 * DEPTH)
    assert {t.decision.instance_id for t in placed} == {"fast"}
    assert s.queued == DEPTH
    s.first_token(placed[0].dispatch, 0.1)
    assert [t.decision.instance_id for t in s.pump(0.1)] == ["fast"]


def test_an_instance_that_hangs_is_not_worth_any_wait() -> None:
    s = finish_time(spec("slow", SLOW), spec("hangs"))
    place(s, DEPTH)
    submitted(s, 0.5)
    assert s.pump(0.5) == []
    wake_s = s.next_wakeup_s()
    assert wake_s is not None
    submitted(s, 0.9)  # arrivals do not put it off
    s.pump(0.9)
    submitted(s, 1.1)
    assert [t.decision.instance_id for t in s.pump(1.1)] == ["slow"] * 3


def test_an_instance_observed_to_be_slow_gets_less() -> None:
    s = finish_time(spec("a"), spec("b"))
    for ticket in place(s, 8):
        s.first_token(ticket.dispatch, 0.1)
    for i in range(20):
        s.members.observe_steps(InstanceId("a"), 10, 1.0, 0.2 + i)
    chosen = {t.decision.instance_id for t in place(s, 6, 30.0)}
    assert chosen == {"b"}


def test_equal_instances_share_and_their_order_does_not_matter() -> None:
    counts = {"a": 0, "b": 0}
    for seed in range(200):
        s = finish_time(spec("a"), spec("b"), seed=seed)
        counts[place(s, 1)[0].decision.instance_id] += 1
    assert 70 < counts["a"] < 130


@pytest.mark.parametrize("count", [2, 5, 8])
def test_unprofiled_instances_that_differ_by_noise_share(count: int) -> None:
    """Whichever was seen to be fastest by 2 %, and though nobody else is there."""
    ids = [f"i{i}" for i in range(count)]
    s = finish_time(*(spec(name, None) for name in ids))
    place(s, count)  # gives all their constants
    for k, name in enumerate(ids):
        there = state(s, name)
        there.observed = True
        there.set_speed(1.0 + 0.02 * k / count)
        for dispatch in there.outstanding():
            s.settle(dispatch, Outcome.COMPLETED, 0.0)
    counts = dict.fromkeys(ids, 0)
    for at in range(100 * count):
        ticket = s.place(request(50, 3.0), 1.0 + at)
        counts[ticket.dispatch.instance_id] += 1
        s.settle(ticket.dispatch, Outcome.COMPLETED, 1.5 + at)
    assert all(80 <= got <= 120 for got in counts.values()), counts


def test_without_constants_it_counts_by_weight() -> None:
    s = finish_time(spec("a", None, weight=3.0), spec("b", None))
    chosen = [t.decision.instance_id for t in place(s, 8)]
    assert chosen.count("a") == 6


def test_a_stand_in_is_the_middle_of_the_known_ones_and_stays() -> None:
    s = finish_time(
        spec("slow", SLOW), spec("middle", profile(FAST.constants.scaled(1.5))), spec("fast", FAST),
        spec("new", None, weight=2.0),
    )  # fmt: skip
    place(s, 1)
    taken_for = s.members.stand_in(InstanceId("new"))
    assert taken_for.p8 == pytest.approx(1.5 * FAST.constants.p8 / 2)
    s.remove(InstanceId("slow"))
    s.remove(InstanceId("middle"))
    place(s, 1)
    assert s.members.stand_in(InstanceId("new")) == taken_for


def test_an_unprofiled_engine_that_tells_its_capacity_refuses_what_does_not_fit() -> None:
    small = dataclasses.replace(spec("small", None), kv_capacity_tokens=1000)
    s = finish_time(small)
    told = s.place(request(2000, 10.0), 0.0, at_once=False)
    assert isinstance(told, Reject)
    assert told.reason is RejectReason.FITS_NO_INSTANCE
    assert not isinstance(
        finish_time(spec("any", None)).place(request(2000, 10.0), 0.0, at_once=False), Reject
    )


def test_an_estimate_that_waits_is_made_to_fit_who_is_left() -> None:
    s = finish_time(spec("small", max_model_len=1024), spec("large", max_model_len=4096))
    place(s, 60)
    asked = request(3000, 10.0).replace(certain_tokens=0)
    tickets = [s.place(asked, 0.0, at_once=False) for _ in range(3)]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)
    s.remove(InstanceId("large"))
    s.pump(1.0)
    for ticket in tickets:
        assert ticket.rejected is None
        assert ticket.request.prompt_tokens == 1023
    queue = s.queues["m"]
    assert queue.prompt_tokens == sum(
        t.request.prompt_tokens for line in queue._lines.values() for t in line
    )


CRAWLING = profile(SLOW.constants.scaled(20), 100_000)


def full_but_for_the_slow(**changes: object) -> Scheduler:
    s = finish_time(spec("slow", CRAWLING), spec("fast", profile(max_num_seqs=8)), **changes)
    assert streaming(s, 9) == ["fast"] * 9
    return s


@pytest.mark.parametrize(
    ("behind", "there", "idle"), [(0, 0, False), (2000, 0, True), (2000, 1, False)]
)
def test_an_idle_slow_instance_is_used_where_the_queue_gains_more_by_it(
    behind: int, there: int, idle: bool
) -> None:
    """Who waits for the fast one holds up those behind it; a slow one that works is left to it."""
    s = finish_time(spec("slow", profile(FAST.constants.scaled(40))), spec("fast"))
    for _ in range(there):
        s.place(request(512, 8.0).replace(only=InstanceId("slow")), 0.0)
    for _ in range(DEPTH + 1 + behind):
        submitted(s, prompt_tokens=1024, output_tokens=8.0)
    placed = [t.decision.instance_id for t in s.pump(0.0)]
    assert placed.count("fast") == DEPTH
    assert ("slow" in placed) == idle


def test_the_prefill_makes_the_first_token() -> None:
    s = finish_time(spec("a"))
    none, one, two = (
        chosen(s.choose(request(512, output))).choice.figures for output in (0.0, 1.0, 2.0)
    )
    assert none.at("latency_s", 0) == one.at("latency_s", 0) == one.at("ttft_s", 0)
    assert two.at("latency_s", 0) > two.at("ttft_s", 0)


def test_while_requests_arrive_a_slow_instance_is_better_than_none() -> None:
    s = full_but_for_the_slow()
    for arrival in range(1, 20):
        submitted(s, arrival * 1.0)
    assert [t.decision.instance_id for t in s.pump(19.1)] == ["slow"] * 8


def test_the_drain_rule_keeps_the_end_of_a_batch_from_the_slow_instance() -> None:
    s = full_but_for_the_slow()
    submitted(s, 0.0)
    assert s.pump(0.1) == []
    s.settle(next(iter(s.members.table[InstanceId("fast")].outstanding())), Outcome.COMPLETED, 1.0)
    assert [t.decision.instance_id for t in s.pump(1.0)] == ["fast"]


def test_the_makespan_objective_has_the_drain_rule_always() -> None:
    s = full_but_for_the_slow(options=PolicyOptions(objective="makespan"))
    for arrival in range(1, 20):
        submitted(s, arrival * 1.0)
        assert s.pump(arrival * 1.0) == []


@given(st.floats(0, 100))
def test_the_drain_rule_begins_after_ten_gaps_within_bounds(gap_s: float) -> None:
    assert idle_before_drain_s(gap_s) == pytest.approx(min(2.0, max(0.02, 10 * gap_s)))


def test_the_drain_rule_never_leaves_everything_idle() -> None:
    s = finish_time(spec("slow", SLOW), spec("fast"), options=PolicyOptions(objective="makespan"))
    submitted(s, 0.0)
    assert len(s.pump(100.0)) == 1


def test_explaining_a_full_cluster_says_that_it_waits() -> None:
    s = finish_time(spec("a"), spec("b", SLOW))
    place(s, 600)
    while s.queued and any(state(s, name).waiting for name in "ab"):
        for name in "ab":
            for dispatch in s.members.table[InstanceId(name)].outstanding():
                s.first_token(dispatch, 0.0)
        s.pump(0.0)
    result = s.explain(request())
    assert result.waits
    assert not any(result.choice.figures.column("room"))


@given(
    st.lists(profiles(), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=30),
)
def test_estimates_equal_the_pseudo_code_by_walking_every_request(machines, there):
    s = finish_time(*(spec(f"i{i}", p, max_model_len=None) for i, p in enumerate(machines)))  # type: ignore[arg-type]
    for i, (prompt, output) in enumerate(there):
        s.place(request(prompt, output), 0.0, at_once=False)
        for ticket in s.pump(0.0):
            if ticket.dispatch is not None and i % 3:
                s.first_token(ticket.dispatch, 0.0)
    body = request(200, 100.0)
    decision = s.choose(body)
    if isinstance(decision, Reject):
        return
    figures, typical_s = decision.choice.figures, typical(s, body)
    latency_s = figures.column("latency_s")
    residual = 256.0
    for k, instance_id in enumerate(decision.ids):
        machine = s.members.specs[instance_id].profile
        c, kv = machine.constants, machine.kv_capacity_tokens
        outstanding = list(s.members.table[instance_id].outstanding())
        waiting = [d.request for d in outstanding if not d.streaming]
        streaming = [d.request for d in outstanding if d.streaming]
        n = len(outstanding)
        ui = sum(r.prompt_tokens for r in waiting)
        up = sum(r.predicted_output_tokens for r in waiting)
        ctx = sum(r.prompt_tokens + 1 for r in streaming)
        rem = residual * len(streaming)
        tok = ctx + 0.5 * rem + ui + 0.5 * up + 200 + 50
        cap = max(1.0, min(machine.max_num_seqs, kv / (tok / (n + 1))))
        b, held = min(n + 1, cap), min(tok, kv)
        step = c.p6 * b + c.p8 + c.p5 * held + c.p7 * held / b
        # Attention: its own, and of those that wait as if all were of their mean length.
        own = c.p1 * 200 + c.p9 * 200**2 / 2
        # All prompts were sent just now, over the 10 s that ρ is of.
        left = 1 - min(0.7, c.p1 * sum(d.request.prompt_tokens for d in outstanding) / 10)
        others = c.p1 * ui + c.p9 * ui * (ui / max(len(waiting), 1)) / 2
        if n + 1 <= cap:
            latency = others + own + c.p2 * (len(waiting) + 1) + c.p4 + 99 * step / left
        else:
            turn = others / max(len(waiting), 1) + c.p2 + (rem + up) / n * step / cap
            latency = (n + 1 - cap) * turn + own + c.p4 + 99 * step / left
        shared = min(residual, 100) * len(streaming) + min(100, up)
        delay = shared * (c.p6 + c.p5 * 250) + n * (own + c.p2)
        usage = max((tok - 250) / kv, n / machine.max_num_seqs)
        price = request_time_s(machine, 200, 100) / typical_s[k] * usage**2 * min(latency_s)
        assert figures.column("memory_price_s")[k] == pytest.approx(price, rel=1e-9)
        assert latency_s[k] == pytest.approx(latency, rel=1e-9)
        assert figures.column("delay_s")[k] == pytest.approx(delay, rel=1e-9)


def test_what_is_cached_changes_the_terms_of_the_prefill_and_weighs_the_first_token() -> None:
    options = PolicyOptions(first_token_weight=2.5)
    s = finish_time(spec("a"), spec("b", SLOW), options=options)
    keys = PrefixKeys((1, 2, 3, 4), (1000, 2000, 3000, 4000), 4000)
    beginning = PrefixKeys(keys.hashes[:3], keys.ends[:3], 3000)
    first = s.place(request(750, 10.0).replace(prefix=beginning, only=InstanceId("a")), 0.0)
    s.settle(first.dispatch, Outcome.COMPLETED, 0.0)
    place(s, 5)
    waiting = {name: state(s, name).waiting for name in "ab"}
    ticket = s.place(request(1000, 100.0).replace(prefix=keys), 0.0)
    assert ticket.decision is not None
    decision = ticket.decision
    lengths = (750 + 5 * 512) / 6, (10 + 5 * 256) / 6
    typical_s = {name: request_time_s(p, *lengths) for name, p in (("a", FAST), ("b", SLOW))}
    rows = decision.explain()
    soonest_s = min(row.estimates["latency_s"] for row in rows)
    for row, machine, new in zip(rows, (FAST, SLOW), (250.0, 1000.0), strict=True):
        assert row.cached.prefill_tokens == new
        n, c = waiting[row.instance_id], machine.constants
        ttft_s = c.p1 * (512 * n + new) + c.p2 * (n + 1) + c.p4
        # All 1000 are there: the step, the usage and the room are those of the whole prompt.
        tokens = 512 * n + 0.5 * 256 * n + 1000 + 50
        step_s = c.p6 * (n + 1) + c.p8 + c.p5 * tokens + c.p7 * tokens / (n + 1)
        # What was sent there lately takes so much of the 10 s that ρ is of.
        sent = {"a": 750, "b": 0}[row.instance_id] + 512 * n
        latency_s = ttft_s + 99 * step_s / (1 - c.p1 * sent / 10)
        shared = min(100, 256 * n)
        delay_s = shared * (c.p6 + c.p5 * 1050) + n * (c.p1 * new + c.p2)
        usage = (tokens - 1050) / machine.kv_capacity_tokens
        usage = max(usage, n / machine.max_num_seqs)
        time_s = request_time_s(machine, 1000, 100)
        assert row.request_time_s == pytest.approx(time_s)
        price_s = (time_s - c.p1 * (1000 - new)) / typical_s[row.instance_id]
        price_s *= usage**2 * soonest_s
        assert row.estimates["latency_s"] == pytest.approx(latency_s)
        assert row.estimates["delay_s"] == pytest.approx(delay_s)
        assert row.estimates["memory_price_s"] == pytest.approx(price_s, rel=0.06)
        cost_s = sum(row.estimates[k] for k in ("latency_s", "delay_s", "memory_price_s"))
        assert row.estimates["cost_s"] == pytest.approx(cost_s + 2.5 * ttft_s)


def test_prompts_that_keep_coming_make_an_answer_longer() -> None:
    s = finish_time(spec("a"), spec("b"))
    one = s.place(request(8000, 10.0).replace(only=InstanceId("a")), 0.0)
    s.settle(one.dispatch, Outcome.COMPLETED, 0.5)

    def latency_s(now_s: float) -> tuple[float, float]:
        ticket = s.place(request(1, 1000.0), now_s)
        s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
        a, b = ticket.decision.choice.figures.column("latency_s")
        return a, b

    busy = FAST.constants.p1 * 8000 / 10
    a_s, b_s = latency_s(1.0)
    assert a_s == pytest.approx(b_s / (1 - busy * math.exp(-0.1)), rel=1e-3)
    a_s, b_s = latency_s(1e6)
    assert a_s == pytest.approx(b_s, rel=1e-3)
    # A clock that is behind is no age.
    assert math.isfinite(latency_s(0.0)[0])


def test_at_the_end_of_a_batch_no_prompt_is_expected_to_come_in_between() -> None:
    s = finish_time(spec("a", profile(max_num_seqs=8)))
    streaming(s, 9)
    submitted(s, 0.0)
    dispatch = next(iter(s.members.table[InstanceId("a")].outstanding()))

    def latency_s(now_s: float) -> float:
        figures = chosen(s.choose(request(), now_s=now_s)).choice.figures
        return float(figures.column("latency_s")[0])

    s.settle(dispatch, Outcome.COMPLETED, 0.0)
    soon_s = latency_s(0.01)
    # Nine prompts took a quarter of one of the 10 s.
    assert latency_s(0.03) == pytest.approx(0.975 * soon_s, rel=0.005)


def typical(s: Scheduler, body: Request) -> list[float]:
    return view_of(s, body).backlog.typical_request_time_s


def test_a_long_request_is_dearer_where_memory_is_short_and_filling() -> None:
    s = finish_time(spec("small", SLOW), spec("large"))
    ratios = []
    for there in (0, 300):
        for ticket in place(s, there):
            s.first_token(ticket.dispatch, 0.0)
        while s.queued:
            for ticket in s.pump(0.0):
                s.first_token(ticket.dispatch, 0.0)
        price = []
        for body in (request(100, 50.0), request(4000, 3000.0)):
            decision = chosen(s.choose(body))
            price.append(decision.choice.figures.column("memory_price_s"))
        ratios.append([long / max(short, 1e-12) for short, long in zip(*price, strict=True)])
    assert not any(ratios[0])  # idle: memory has no price
    assert ratios[1][0] > 1.2 * ratios[1][1]


def test_a_seat_is_as_dear_as_memory_where_seats_run_out_first() -> None:
    s = finish_time(spec("few", profile(max_num_seqs=16)), spec("many"))
    for only in ("few", "many"):
        s.place(request(10, 10.0).replace(only=InstanceId(only), sequences=8), 0.0)
    few, many = chosen(s.choose(request(10, 10.0))).choice.figures.column("memory_price_s")
    assert few > 100 * many > 0


def test_no_first_token_is_late_beyond_all_measure() -> None:
    prices = [cost(0.0, 0.0, 0.0, ttft_s, 0.0, 0.5, 0.0)[1] for ttft_s in (0.4, 0.51, 1.0, 1e3)]
    assert prices == pytest.approx([0.0, LATE_WEIGHT * 0.01, 7.5, 15.0], rel=0.03)


def test_typical_is_what_arrives() -> None:
    s = finish_time(spec("a"), spec("b", SLOW))
    for _ in range(40):
        s.settle(place_one(s, 900, 60.0), Outcome.COMPLETED, 0.0)
    expected = [request_time_s(p, 900, 60) for p in (FAST, SLOW)]
    assert typical(s, request(10, 10.0)) == pytest.approx(expected, rel=0.06)


def place_one(s: Scheduler, prompt_tokens: int, output_tokens: float) -> Dispatch:
    submitted(s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    (ticket,) = s.pump(0.0)
    assert ticket.dispatch is not None
    return ticket.dispatch


def test_the_drain_bound_is_the_queue_over_the_sum_of_the_speeds() -> None:
    s = finish_time(spec("a"), spec("b", SLOW))
    for _ in range(10):
        submitted(s, 0.0, prompt_tokens=400, output_tokens=100.0)
    expected = 10 / sum(1 / request_time_s(p, 400, 100) for p in (FAST, SLOW))
    assert s.drain_time_s("m") == pytest.approx(expected)


def test_the_policy_draws_among_full_ties_only() -> None:
    c = candidates([0.0, 0.0])
    choices = [FinishTime(PolicyOptions()).choose(c, np.random.default_rng(i)) for i in range(30)]
    assert {choice.position for choice in choices if choice is not None} == {0, 1}


# In one step


def test_placing_in_one_step_is_submitting_and_pumping() -> None:
    s, twin = (finish_time(spec("a"), spec("b", SLOW)) for _ in range(2))
    for i in range(60):
        body = request(100 + i, 50.0)
        ticket = s.place(body, 0.01 * i, owner=i)
        again = submitted(twin, 0.01 * i, prompt_tokens=100 + i, output_tokens=50.0)
        twin.pump(0.01 * i)
        assert ticket.waits == again.waits
        if ticket.decision is not None:
            assert ticket.decision.instance_id == again.decision.instance_id
    assert s.queued == twin.queued > 0
    # Whoever waits goes first: nobody overtakes.
    assert s.place(request(), 1.0).waits  # type: ignore[union-attr]


def test_asking_gives_no_stand_in() -> None:
    s = finish_time(spec("new", None), spec("slow", SLOW), spec("fast", FAST))
    s.explain(request())
    assert s.members.knows("m")
    assert s.members.pool("m").context_tokens
    s.remove(InstanceId("slow"))
    place(s, 3)
    # The middle of those that are there when it is used, not of those that somebody looked at.
    assert s.members.stand_in(InstanceId("new")).p8 == pytest.approx(FAST.constants.p8)


def test_the_load_of_a_peer_counts_like_our_own() -> None:
    s = finish_time(spec("a"), spec("b"))
    s.members.table[InstanceId("a")].set_peer(
        "other", PeerLoad(5.0, 9000, 8, 8, 0, 6400, 6400.0, 2000.0, 0.0)
    )
    assert {t.decision.instance_id for t in place(s, 4)} == {"b"}
    s.members.table[InstanceId("a")].set_peer("other", None)
    assert place_one(s, 100, 50.0).instance_id == "a"


def test_a_part_of_a_cost_that_is_next_to_nothing_is_not_in_the_sentence() -> None:
    assert _part(3e-13, "scarce memory") == ""
    assert _part(0.25, "scarce memory") == ", with 0.250 s for scarce memory,"
