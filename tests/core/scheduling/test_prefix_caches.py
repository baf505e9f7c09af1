"""What a prompt has cached, by candidate: what is charged, kept in mind, and forgotten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.policies import POLICY_NAMES, PolicyOptions, make_policy
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.decision_log import DecisionLog
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import CachedPrefix, InstanceId, Outcome, PrefixKeys
from tests.core.builders import (
    SLOW,
    chosen,
    is_empty,
    placed,
    profile,
    request,
    scheduler,
    spec,
    state,
    submitted,
)

A, B = InstanceId("a"), InstanceId("b")


def text(name: int, pieces: int, *, piece_bytes: int = 1000) -> PrefixKeys:
    """A text of so many pieces; those of one name begin alike."""
    hashes = tuple(1000 * name + i for i in range(pieces))
    ends = tuple(piece_bytes * (i + 1) for i in range(pieces))
    return PrefixKeys(hashes, ends, piece_bytes * pieces)


def asking(name: int, pieces: int, output_tokens: float = 100.0) -> Request:
    """A prompt of 250 tokens a piece, of 4 bytes each."""
    return request(250 * pieces, output_tokens).replace(prefix=text(name, pieces))


def two(policy: str = "finish-time", **options: object) -> Scheduler:
    return scheduler(spec("a"), spec("b"), policy=policy, options=PolicyOptions(**options))  # type: ignore[arg-type]


def finish(s: Scheduler, ticket: Ticket, now_s: float = 1.0) -> str:
    s.first_token(ticket.dispatch, now_s)
    s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
    return ticket.dispatch.instance_id


def cached_of(s: Scheduler, body: Request) -> dict[str, CachedPrefix | None]:
    return {row.instance_id: row.cached for row in chosen(s.explain(body)).explain()}


def caches(s: Scheduler) -> PrefixCaches:
    assert s.caches is not None
    return s.caches


def test_the_next_turn_goes_where_the_last_one_was() -> None:
    s = two()
    for _ in range(20):
        first = finish(s, placed(s, asking(1, 8)))
        assert finish(s, placed(s, asking(1, 10))) == first
        s.remove(InstanceId(first))
        s.add(spec(first))


def test_what_is_cached_is_not_computed_but_held() -> None:
    s = two()
    home = finish(s, placed(s, asking(1, 8)))
    ticket = placed(s, asking(1, 10))
    there = state(s, home)
    assert (there.waiting_prompt, there.waiting_prefill) == (2500, 500.0)
    assert there.kv_tokens == 2600
    assert (ticket.dispatch.prefill_tokens, ticket.dispatch.match_tokens) == (500.0, 2000.0)


def test_explaining_shows_match_trust_and_what_is_left() -> None:
    s = two()
    home = finish(s, placed(s, asking(1, 8)))
    for i in range(100):
        dispatch = placed(s, asking(1, 8), 10.0 * i).dispatch
        caches(s).observe(dispatch, dispatch.match_tokens / 2)
        s.settle(dispatch, Outcome.COMPLETED, 10.0 * i)
    told = cached_of(s, asking(1, 10))
    other = B if home == "a" else A
    there, elsewhere = told[home], told[other]
    assert there.trust == pytest.approx(0.5, abs=0.05)
    assert there.match_tokens == pytest.approx(2000)
    assert there.prefill_tokens == pytest.approx(2500 - there.trust * 2000)
    assert elsewhere == CachedPrefix(0.0, elsewhere.trust, 0.0, 2500.0)


def test_the_log_keeps_what_was_cached() -> None:
    s, log = two(), DecisionLog(3)
    finish(s, placed(s, asking(1, 8)))
    for body in (asking(1, 10), asking(2, 10)):
        decision = placed(s, body).decision
        assert decision is not None
        log.append(0.0, b"id", decision, 0.0)
    rows = [[row.cached for row in logged.decision.explain()] for logged in log.newest_first()]
    assert rows[0] == [None, None]
    assert sorted(cached.match_tokens for cached in rows[1] if cached) == [0.0, 2000.0]


def test_the_last_token_is_always_computed() -> None:
    s = two()
    finish(s, placed(s, asking(1, 8)))
    again = placed(s, asking(1, 8)).dispatch
    assert again.prefill_tokens == 1.0


def test_a_faster_instance_is_worth_more_than_a_short_match() -> None:
    s = scheduler(spec("slow", SLOW), spec("fast"), policy="finish-time")
    sent = placed(s, asking(1, 1).replace(only=InstanceId("slow")))
    assert finish(s, sent) == "slow"
    assert finish(s, placed(s, asking(1, 2))) == "fast"


def test_a_queued_request_is_matched_when_it_is_placed() -> None:
    s = scheduler(spec("a"), policy="finish-time")
    tickets = [placed(s, asking(i, 20)) for i in range(9)]
    assert tickets[8].waits
    # It waits; meanwhile its beginning is computed there for somebody else.
    first = tickets[0].dispatch
    assert first is not None
    late = s.place(asking(0, 24), 0.1, at_once=False)
    s.cancel(tickets[8])
    finish(s, tickets[0], 0.2)
    assert s.pump(0.2) == [late]
    assert late.dispatch.match_tokens == 5000.0


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.COMPLETED])
def test_what_was_never_computed_is_not_kept(outcome: Outcome) -> None:
    s = two()
    home = finish(s, placed(s, asking(1, 8)))
    before = caches(s).index.bytes_on(InstanceId(home))
    dispatch = placed(s, asking(1, 20)).dispatch
    s.settle(dispatch, outcome)
    assert not s.settle(dispatch, outcome)
    assert caches(s).index.bytes_on(InstanceId(home)) == before
    told = cached_of(s, asking(1, 20))[home]
    assert told.match_tokens == 2000.0  # what was there before, still is


def test_what_broke_off_after_its_first_token_is_kept() -> None:
    s = two()
    dispatch = placed(s, asking(1, 8)).dispatch
    s.first_token(dispatch, 0.1)
    s.settle(dispatch, Outcome.CLIENT_DISCONNECTED, 0.2)
    told = cached_of(s, asking(1, 8))[dispatch.instance_id]
    assert told.match_tokens == 1999.0


def test_a_retry_elsewhere_inherits_no_match() -> None:
    s = two()
    home = finish(s, placed(s, asking(1, 8)))
    dispatch = placed(s, asking(1, 10)).dispatch
    assert dispatch.instance_id == home
    s.settle(dispatch, Outcome.UPSTREAM_ERROR)
    retry = s.place(asking(1, 10), 0.1, [dispatch.instance_id], first=True)
    assert (retry.dispatch.match_tokens, retry.dispatch.prefill_tokens) == (0.0, 2500.0)


@pytest.mark.parametrize("how", ["lost", "removed", "restarted"])
def test_an_instance_that_lost_its_cache_begins_anew(how: str) -> None:
    s = two()
    home = InstanceId(finish(s, placed(s, asking(1, 8))))
    dispatch = placed(s, asking(1, 8)).dispatch
    assert dispatch is not None
    for _ in range(50):
        caches(s).observe(dispatch, 0.0)
    assert caches(s).eta(home) < 0.3
    if how == "lost":
        s.replace(spec(home, available=False))
        s.replace(spec(home))
    elif how == "removed":
        s.remove(home)
        s.add(spec(home))
    else:
        caches(s).forget(home)
    assert caches(s).eta(home) == 1.0
    assert cached_of(s, asking(1, 8)) == {"a": None, "b": None}
    s.settle(dispatch, Outcome.COMPLETED)  # of the cache that is gone
    assert s.members.snapshot(home).in_flight == 0


def test_a_new_weight_forgets_nothing() -> None:
    s = two()
    home = InstanceId(finish(s, placed(s, asking(1, 8))))
    s.replace(spec(home, weight=2.0))
    assert cached_of(s, asking(1, 8))[home] is not None


def test_an_instance_without_a_cache_is_taken_for_what_it_is() -> None:
    s = scheduler(spec("slow", SLOW), spec("fast"), policy="finish-time")
    caches(s).switch(InstanceId("fast"), on=False)
    slow = placed(s, asking(1, 30).replace(only=InstanceId("slow")))
    assert finish(s, slow) == "slow"
    fast = placed(s, asking(1, 30).replace(only=InstanceId("fast")))
    assert fast.dispatch.prefill_tokens == 7500.0
    finish(s, fast)
    told = cached_of(s, asking(1, 30))["fast"]
    assert (told.trust, told.prefill_tokens) == (0.0, 7500.0)


def test_counters_teach_where_answers_do_not_say() -> None:
    s = scheduler(spec("a"), policy="finish-time")
    s.observe_cache(A, True, (0.0, 0.0), 0.0)
    finish(s, placed(s, asking(1, 20)))
    queries = hits = 0.0
    for i in range(1, 200):
        ticket = placed(s, asking(1, 20), float(i))
        queries += 5000.0
        hits += 0.25 * ticket.dispatch.match_tokens
        finish(s, ticket, i + 0.5)
        s.observe_cache(A, True, (queries, hits), i + 0.9)
    assert caches(s).eta(A) == pytest.approx(0.25, abs=0.08)


def test_the_index_is_as_large_as_the_caches_by_the_bytes_of_a_token() -> None:
    s = scheduler(spec("a", profile(kv_capacity_tokens=10_000)), policy="min-max")
    for i in range(400):
        body = request(100, 10.0).replace(prefix=text(i, 2, piece_bytes=100))
        finish(s, placed(s, body))
    used, room = caches(s).index.bytes_on(A)
    assert room == pytest.approx(2 * 10_000, rel=0.15)
    assert 0.9 * room < used <= room


@pytest.mark.parametrize("policy", sorted({*POLICY_NAMES} - {"finish-time", "prefix-affinity"}))
def test_other_policies_choose_as_they_did(policy: str) -> None:
    specs = (spec("a"), spec("b", SLOW))
    aware, blind = (scheduler(*specs, policy=policy, prefix_cache=on) for on in (True, False))
    for i in range(60):
        one, other = (placed(s, asking(i % 5, 4 + i % 7), 0.1 * i) for s in (aware, blind))
        assert one.decision.instance_id == other.decision.instance_id
        assert one.decision.choice.charge == other.decision.choice.charge


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(1, 300)))


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_without_keys_or_without_the_index_all_is_as_before(bodies):
    policy = make_policy("finish-time", PolicyOptions(first_token_weight=7.0))
    specs = (spec("a"), spec("b", SLOW))
    # Without the index, without keys, and without a match.
    every = [scheduler(*specs, policy=policy, prefix_cache=on) for on in (False, True, True)]
    for i, (name, pieces, output) in enumerate(bodies):
        body = asking(name, pieces, output)
        fresh = body.replace(prefix=text(1000 + i, pieces))
        tickets = [
            s.place(b, 0.1 * i, at_once=False)
            for s, b in zip(every, (body, body.replace(prefix=None), fresh), strict=True)
        ]
        for s in every:
            s.pump(0.1 * i)
        figures = []
        for ticket in tickets:
            decision = ticket.decision
            if decision is not None:
                choice = decision.choice
                columns = [choice.figures.column(n) for n in choice.figures.names]
                figures.append((decision.instance_id, choice.charge, choice.ttft_s, columns))
            else:
                figures.append(None)
        assert figures[0] == figures[1] == figures[2]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "first", "settle", "trust", "lose"]),
        st.integers(0, 30),
        st.integers(1, 12),
        st.floats(0, 1),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.sampled_from(["finish-time", "min-max"]))
def test_whatever_trust_does_what_was_charged_comes_off(events, policy):
    s = scheduler(spec("a"), spec("b", SLOW), policy=policy)
    tickets: list[Ticket] = []
    now_s = 0.0
    for kind, pick, pieces, wait_s in events:
        now_s += wait_s
        name = "ab"[pick % 2]
        open_tickets = [t for t in tickets if t.dispatch and t.dispatch.outcome is None]
        if kind == "submit":
            tickets.append(submitted(s, asking(pick % 4, pieces), now_s))
        elif kind == "lose":
            caches(s).forget(InstanceId(name))
        elif open_tickets:
            dispatch = open_tickets[pick % len(open_tickets)].dispatch
            assert dispatch is not None
            if kind == "first":
                s.first_token(dispatch, now_s)
            elif kind == "trust":
                caches(s).observe(dispatch, wait_s * dispatch.match_tokens)
            else:
                s.settle(dispatch, list(Outcome)[pick % 4], now_s)
        s.pump(now_s)
        for name in "ab":
            there = state(s, name)
            waiting = [d for d in there.outstanding() if d.tracked and not d.streaming]
            assert there.waiting_prefill == pytest.approx(sum(d.prefill_tokens for d in waiting))
            assert there.waiting_prompt == sum(d.prompt_tokens for d in waiting)
    for _ in range(len(tickets) + 1):
        for ticket in tickets:
            if ticket.dispatch is not None:
                s.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
        s.pump(now_s)
    for name in "ab":
        assert is_empty(state(s, name))


def test_what_several_have_in_common_is_held_once() -> None:
    s = scheduler(spec("a"), policy="finish-time")
    first = placed(s, asking(1, 8))
    assert state(s, "a").shared_tokens == 0
    second, third = placed(s, asking(1, 10)), placed(s, asking(2, 4))
    assert state(s, "a").shared_tokens == pytest.approx(2000)
    # The longer one is left, and holds what both had.
    assert finish(s, first) == "a"
    assert state(s, "a").shared_tokens == 0
    finish(s, second)
    finish(s, third)
    assert state(s, "a").shared_tokens == 0


def test_a_cache_that_many_share_is_not_full() -> None:
    """Sixty prompts of 2500 tokens are twice what it holds, but 2250 of each are the same."""
    s = scheduler(spec("a", profile(kv_capacity_tokens=75_000)), policy="finish-time")
    alike = [request(2500, 100.0).replace(prefix=PrefixKeys((1, 100 + i), (9000, 10_000), 10_000))
             for i in range(60)]  # fmt: skip
    tickets = [placed(s, body) for body in alike]
    for ticket in tickets:
        if ticket.dispatch is not None:
            s.first_token(ticket.dispatch, 0.1)
            s.pump(0.1)
    for ticket in tickets:
        if ticket.dispatch is not None:
            s.first_token(ticket.dispatch, 0.2)
    assert state(s, "a").streaming == 60
    figures = chosen(s.explain(alike[0], 0.2)).choice.figures
    assert figures.at("ttft_s", 0) < 0.1, "it waits for nobody's memory"


def test_who_is_cached_somewhere_may_wait_there_beyond_its_room() -> None:
    large = spec("a", profile(max_num_seqs=64, kv_capacity_tokens=1_000_000))
    s = scheduler(large, policy="finish-time")

    def go(name: int) -> bool:
        """Whether it is sent; if so, it has its first token at once."""
        ticket = placed(s, asking(name, 8), 0.1)
        if ticket.dispatch is None:
            s.cancel(ticket)
            return False
        s.first_token(ticket.dispatch, 0.1)
        return True

    assert [go(i) for i in range(67)] == [True] * 66 + [False], "64 seats, and two beyond"
    assert [go(i) for i in range(5)] == [True] * 4 + [False], "three times two, what is cached"
    assert state(s, "a").in_flight == 64 + 3 * 2


def test_the_reason_says_what_was_cached() -> None:
    s = two()
    home = finish(s, placed(s, asking(1, 8)))
    decision = placed(s, asking(1, 10)).decision
    assert decision.instance_id == home
    assert "with 2000 of 2500 prompt tokens cached" in decision.reason()
    assert "s for its first token, costs" in decision.reason()
    blind = placed(s, asking(2, 10)).decision
    assert "first token" not in blind.reason()


def test_what_an_engine_has_told_to_be_gone_is_not_there_again_when_a_request_is_over() -> None:
    s = two("round-robin")
    one, other = (placed(s, asking(n, 4)) for n in (1, 2))
    blocks = EngineBlocks(caches(s).index, A, 1000)
    caches(s).listen(A, blocks)
    for ticket in (one, other):
        for key in ticket.request.prefix.hashes[2:]:
            caches(s).index.drop(ticket.dispatch.instance_id, key)
    assert {finish(s, one), finish(s, other)} == {"a", "b"}
    # Of who tells nothing it is a guess what is gone, and what was used last is there.
    assert {t.dispatch.instance_id: caches(s).index.keys_on(t.dispatch.instance_id)
            for t in (one, other)} == {A: 2, B: 4}  # fmt: skip
