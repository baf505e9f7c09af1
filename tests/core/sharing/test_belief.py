"""What peers report is bounded by what engines can hold, and by what engines report themselves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.instances.speed import MOST_APART, MOST_UNSEEN_APART
from hetero_gateway.core.instances.state import observe_speed, revise_speed
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.sharing.belief import LOADS, SLACK, Belief, EngineReport
from hetero_gateway.core.sharing.exchange import OTHERS, LoadExchange
from hetero_gateway.core.sharing.message import FIELDS, Message, instance_key
from hetero_gateway.core.types import InstanceId, Reject
from tests.core.builders import request, scheduler, spec

A = InstanceId("a")
URL = "http://a"
SPEC = spec("a")
assert SPEC.profile is not None
SEATS, KV = SPEC.profile.max_num_seqs, SPEC.profile.kv_capacity_tokens
MOST = 2.0**50


def row(**fields: float) -> np.ndarray:
    return np.array([[*PeerLoad(**fields)]])


def load_of(rows: np.ndarray) -> PeerLoad:
    return PeerLoad(*rows[0].tolist())


def honest(n: int) -> np.ndarray:
    """n requests of 100 tokens each, 100 to come, half of them waiting."""
    half = n / 2
    return row(
        load_s=2.0 * n,
        kv_tokens=200 * n,
        in_flight=n,
        waiting=half,
        streaming=half,
        waiting_prompt=100 * half,
        waiting_prefill=100 * half,
        waiting_output=100 * half,
        context=120 * half,
    )


def absurd() -> np.ndarray:
    return np.full((1, FIELDS), MOST)


@pytest.mark.parametrize("n", [1, 7, SEATS, 2 * SEATS, 10 * SEATS])
def test_what_an_engine_can_hold_or_confirms_counts_as_it_is(n: int) -> None:
    belief = Belief([SPEC])
    if n > 2 * SEATS:
        belief.report(0, EngineReport(requests=n + 5, own=5, full=True))
    assert (belief.believed(honest(n)) == honest(n)).all()


def test_an_absurd_row_is_two_engines_full_and_no_field_is_above_what_fits() -> None:
    got = load_of(Belief([SPEC]).believed(absurd()))
    assert got.in_flight <= 2 * SEATS
    assert got.waiting + got.streaming <= 2 * SEATS
    assert got.kv_tokens <= 2 * KV
    context = min(SPEC.max_model_len or math.inf, KV)
    assert got.waiting_prompt <= got.waiting * context
    assert got.waiting_prefill <= got.waiting_prompt
    assert got.waiting_output <= got.waiting * context
    assert got.context <= got.streaming * context
    assert got.load_s <= 2 * SEATS * 600


def test_what_its_engine_contradicts_counts_a_quarter_of_its_seats() -> None:
    belief = Belief([SPEC])
    belief.believed(absurd())
    belief.report(0, EngineReport(requests=3, own=2, full=False, kv_usage=0.1))
    got = load_of(belief.believed(absurd()))
    assert got.in_flight <= 1 + SLACK * SEATS
    assert got.streaming <= 1 + SLACK * SEATS
    assert got.waiting == got.waiting_prefill == got.waiting_prompt == 0, "no prompt blocks others"
    assert got.kv_tokens <= KV * (SLACK + 1 / SEATS)
    assert got.context <= (0.1 + SLACK) * KV
    # What is smaller counts, while the engine is not asked again.
    assert (belief.believed(honest(10)) == honest(10)).all()
    # It is believed again once engine and rows agree.
    belief.report(0, EngineReport(requests=12, own=2, full=False, kv_usage=0.1))
    assert (belief.believed(honest(100)) == honest(100)).all()


def test_a_burst_since_the_last_scrape_is_no_contradiction() -> None:
    belief = Belief([SPEC])
    belief.believed(honest(0))
    belief.believed(honest(200))
    belief.report(0, EngineReport(requests=0, own=0, full=False))
    assert (belief.believed(honest(200)) == honest(200)).all()
    # If it is there from one scrape to the next, it is one.
    belief.report(0, EngineReport(requests=0, own=0, full=False))
    assert load_of(belief.believed(honest(200))).in_flight == SLACK * SEATS
    # An engine without metrics contradicts nothing.
    belief.report(0, None)
    assert load_of(belief.believed(honest(SEATS))).in_flight == SEATS


def test_in_doubt_a_seat_is_left_unless_the_engine_says_that_it_is_full() -> None:
    belief, doubted = Belief([SPEC]), np.array([True])
    got = load_of(belief.believed(absurd(), doubted))
    assert got.waiting + got.streaming <= SEATS - 1
    assert got.waiting == 0
    assert got.context <= KV / 2
    belief.report(0, EngineReport(requests=SEATS + 3, own=0, full=True))
    assert (belief.believed(honest(SEATS), doubted) == honest(SEATS)).all()


def test_seconds_are_bounded_by_what_own_requests_take() -> None:
    belief = Belief([SPEC])
    belief.note_own(load_s=6.0, in_flight=3)
    belief.note_own(load_s=0.0, in_flight=0)
    got = load_of(belief.believed(row(load_s=1e6, in_flight=2, streaming=2)))
    assert got.load_s == 2 * 32 * 2.0


@given(
    st.lists(st.floats(0, MOST), min_size=FIELDS, max_size=FIELDS),
    st.floats(0, 1e15),
    st.floats(0, 1e15),
    st.booleans(),
)
def test_whatever_is_claimed_what_counts_is_finite_smaller_and_within_the_engine(
    fields: list[float], requests: float, own: float, doubted: bool
) -> None:
    belief = Belief([SPEC])
    rows = np.array([fields])
    for _ in range(2):
        got = belief.believed(rows, np.array([doubted]))
        assert np.isfinite(got).all()
        assert (got >= 0).all()
        merged = got.copy()
        streams = PeerLoad._fields.index("streaming")
        merged[0, streams] = min(merged[0, streams], rows[0, streams])
        assert (merged[:, LOADS] <= rows[:, LOADS] * (1 + 1e-9) + 1e-9).all()
        assert (got[:, LOADS.stop :] == rows[:, LOADS.stop :]).all(), "speeds are not its own"
        sequences = max(got[0, 2], got[0, 3] + got[0, 4])
        confirmed = max(0.0, requests - own)
        assert sequences <= 2 * max(2 * SEATS, confirmed + SEATS) * (1 + 1e-9)
        belief.report(0, EngineReport(requests, own, full=False))


class Gateway:
    """A scheduler over one instance, and a peer that reports what it likes."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = scheduler(SPEC, policy="finish-time")
        self.exchange = LoadExchange(self.scheduler, ttl_s=1e9, interval_s=0.05)
        self.exchange.set_instances([(A, URL)])
        self.state = self.scheduler.members.table[A]
        self.sequence = 0

    def hear(self, rows: np.ndarray, now_s: float) -> None:
        self.sequence += 1
        keys = np.array([instance_key(A, URL)], dtype=np.uint64)
        self.exchange.hear("liar", Message(self.sequence, keys, rows), now_s)
        self.apply(now_s)

    def apply(self, now_s: float) -> None:
        for change in self.exchange.changes(now_s):
            self.scheduler.members.table[change.instance_id].set_peer(OTHERS, change.load, now_s)

    def scrape(self, requests: float, *, full: bool = False) -> None:
        own = self.scheduler.members.table[A].own_load(0.0)
        self.exchange.note_report(A, EngineReport(requests, own.in_flight, full))


def placed(gateway: Gateway, now_s: float, count: int = 20) -> int:
    """How many of so many requests are placed now."""
    done = 0
    for _ in range(count):
        ticket = gateway.scheduler.place(request(prompt_tokens=10), now_s)
        assert not isinstance(ticket, Reject)
        done += ticket.dispatch is not None
    return done


@pytest.mark.parametrize(
    "lie",
    [
        row(in_flight=10_000),
        row(in_flight=10_000, streaming=10_000, kv_tokens=1e9, context=1e9),
        row(in_flight=10_000, waiting=10_000, waiting_prompt=1e12, waiting_prefill=1e12),
        row(context=MOST, streaming=1),
        row(load_s=MOST, kv_tokens=MOST, in_flight=1),
        absurd(),
    ],
)
def test_a_peer_that_claims_all_seats_starves_nobody(lie: np.ndarray) -> None:
    """It did: 0 of 20 requests were placed while the peer was heard."""
    g = Gateway()
    g.hear(lie, 0.0)
    g.scrape(0)
    g.hear(lie, 0.1)
    assert placed(g, 0.1) == 20


def test_without_metrics_each_gateway_still_gets_a_seat_after_a_second() -> None:
    g = Gateway()
    g.hear(absurd(), 0.0)
    assert placed(g, 0.0) == 0
    g.apply(0.1)
    g.apply(1.2)
    # One, and the few that an engine may have in its own queue.
    assert 1 <= len(g.scheduler.pump(1.2)) <= 9
    # With something of its own there, it believes them again.
    g.apply(1.3)
    assert g.scheduler.pump(1.3) == []


def test_speeds_of_peers_move_a_factor_by_two_and_do_not_creep() -> None:
    for observed_s, modelled_s, bound in ((MOST, 1e-9, MOST_APART), (1e-9, MOST, 1 / MOST_APART)):
        g = Gateway()
        g.state.streaming = 1  # no more is needed of a stream here
        observe_speed(g.state, 5.0, 5.0, 0.0)
        low, high = sorted((1.0, bound))
        for step in range(200):
            now_s = 0.1 * step
            g.hear(row(observed_s=observed_s, modelled_s=modelled_s + 1e-9 * step), now_s)
            revise_speed(g.state, 1.0, now_s)
            assert low * 0.99 <= g.state.speed <= high * 1.01
        g.state.streaming = 0


def test_before_anything_was_seen_here_peers_move_it_by_four() -> None:
    g = Gateway()
    g.hear(row(observed_s=MOST, modelled_s=1.0), 0.0)
    assert 2.0 < g.state.speed <= MOST_UNSEEN_APART


def test_prompts_that_no_engine_could_have_begun_say_nothing_of_its_speed() -> None:
    g = Gateway()
    ticket = g.scheduler.place(request(), 0.0)
    assert not isinstance(ticket, Reject)
    assert ticket.dispatch is not None
    g.scheduler.first_token(ticket.dispatch, 0.0)
    c = g.state.constants
    assert c is not None
    for step in range(1, 21):
        now_s = step / 10
        g.hear(row(in_flight=1, prompts=1e12 * step, prompt_tokens=1e13 * step), now_s)
    interval = g.state.interval
    assert c.p1 * interval.prompt_tokens + c.p2 * interval.prompts < 2.0 + 2.0 + 1.0
    # And what it says of prompts sent lately is no more than the engine can do in that time.
    assert c.p1 * g.state.recent_prefill <= 10.0 * 1.001
