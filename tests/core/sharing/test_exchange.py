"""What a gateway says of itself, and what it makes of what others say."""

from typing import Any

import numpy as np
import pytest

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.sharing.exchange import OTHERS, LoadExchange, Mode
from hetero_gateway.core.sharing.message import Message, MessageError, pack, unpack
from hetero_gateway.core.types import InstanceId, Outcome, Reject
from tests.core.builders import SLOW, request, scheduler, spec

TTL_S, INTERVAL_S = 3.0, 0.05
A, B = InstanceId("a"), InstanceId("b")
INSTANCES = [(A, "http://a"), (B, "http://b")]


def told(message: Message | None) -> Message:
    assert message is not None
    return message


class Gateway:
    """A scheduler over a and b, and its exchange."""

    def __init__(self, instances: list[tuple[InstanceId, str]] = INSTANCES) -> None:
        specs = [spec(i, SLOW if i == "b" else spec("x").profile) for i, _ in instances]
        self.scheduler: Scheduler = scheduler(*specs, policy="finish-time")
        self.exchange = LoadExchange(self.scheduler, ttl_s=TTL_S, interval_s=INTERVAL_S)
        self.exchange.set_instances(instances)

    def place(self, now_s: float, **lengths: int) -> Any:
        ticket = self.scheduler.place(request(**lengths), now_s)
        assert not isinstance(ticket, Reject)
        assert ticket.dispatch is not None
        return ticket.dispatch

    def say(self, now_s: float) -> Message | None:
        """As it arrives with others."""
        message = self.exchange.say(now_s)
        if message is None:
            return None
        self.exchange.said()
        return unpack(pack(message))

    def apply(self, now_s: float) -> None:
        for change in self.exchange.changes(now_s):
            self.scheduler.members.table[change.instance_id].set_peer(OTHERS, change.load, now_s)

    def hear(self, message: Message | None, now_s: float = 0.0, replica: str = "him") -> None:
        self.exchange.hear(replica, told(message), now_s)
        self.apply(now_s)

    def candidates(self, now_s: float) -> list[tuple[float | None, ...]]:
        decision = self.scheduler.explain(request(), now_s)
        assert not isinstance(decision, Reject)
        return [
            (c.load_s, c.in_flight, c.kv_usage, *c.estimates.values()) for c in decision.explain()
        ]


# What prompts took lately is remembered for some seconds, whosever they were.
AFTER_S = 1000.0


def test_the_others_rows_and_ones_own_are_what_one_scheduler_would_see() -> None:
    one, first, second = Gateway(), Gateway(), Gateway()
    for i in range(12):
        gateway = (first, second)[i % 2]
        dispatched = gateway.place(0.0, prompt_tokens=60 + i, output_tokens=50 + i)
        # The same request on the same instance.
        same = one.scheduler.members.table[dispatched.instance_id]
        same.dispatch(dispatched.request, dispatched.workload, 0.0)
        for gateway, other in ((first, second), (second, first)):
            if (message := gateway.say(0.0)) is not None:
                other.exchange.hear("him", message, 0.0)
            other.apply(0.0)
    want = one.candidates(0.0)
    for gateway in (first, second):
        for got, expected in zip(gateway.candidates(0.0), want, strict=True):
            # The typical request, which prices memory, is of what each has met.
            assert got[:5] == expected[:5], "loads, counts, tokens and times are exact"


def test_a_message_comes_with_a_change_or_after_a_third_of_the_lease() -> None:
    g = Gateway()
    assert g.say(0.0) is not None
    assert g.say(0.5) is None
    dispatch = g.place(0.6)
    assert told(g.say(0.6)).rows.shape[0] == 1, "what has nothing is not sent"
    assert g.say(0.7) is None
    assert g.say(0.6 + TTL_S / 3) is not None
    g.scheduler.settle(dispatch, Outcome.COMPLETED, 2.0)
    assert told(g.say(2.0)).keys.size == 0


def test_what_the_store_did_not_take_is_said_again() -> None:
    g = Gateway()
    g.place(0.0)
    first, again = told(g.exchange.say(0.0)), told(g.exchange.say(0.01))
    assert again.sequence > first.sequence
    assert (again.rows == first.rows).all()
    g.exchange.said()
    assert g.exchange.say(0.02) is None
    g.exchange.unsaid()
    assert g.exchange.say(0.03) is not None


def test_the_load_of_who_is_silent_is_gone_with_the_lease() -> None:
    g, other = Gateway(), Gateway()
    idle = g.candidates(0.0)
    other.place(0.0)
    message = other.say(0.0)
    g.hear(message)
    assert g.candidates(0.0) != idle
    # The store still has it: the same message again is no sign of life.
    g.hear(message, TTL_S - 0.1)
    assert g.exchange.replicas == 1
    g.apply(TTL_S)
    assert g.exchange.replicas == 0
    assert g.candidates(AFTER_S) == idle, "exactly nothing is left"


def test_a_replica_that_says_good_bye_is_gone_at_once() -> None:
    g, other = Gateway(), Gateway()
    idle = g.candidates(0.0)
    other.place(0.0)
    g.hear(other.say(0.0))
    g.exchange.forget("him")
    g.exchange.forget("nobody")
    g.apply(0.0)
    assert g.candidates(AFTER_S) == idle


def test_news_are_of_some_instances_and_leave_the_others_as_they_were() -> None:
    g, other = Gateway(), Gateway()
    other.place(0.0)  # on a, the fast one
    on_b = other.scheduler.members.table[B].dispatch(request(), 1.0, 0.0)
    g.hear(other.say(0.0))
    other.scheduler.settle(on_b, Outcome.COMPLETED, 0.0)
    before = dict(g.exchange.totals())
    dispatch = other.scheduler.members.table[A].dispatch(request(), 1.0, 0.0)
    news = told(other.exchange.say_news({A}, 0.0))
    assert news.keys.size == 1
    g.hear(unpack(pack(news)))
    after = dict(g.exchange.totals())
    assert after[A].in_flight == before[A].in_flight + 1
    assert after[B] == before[B], "that something ended there was not said"
    # What ended in between differs in nothing from what was said last: it is said all the same.
    other.scheduler.settle(dispatch, Outcome.COMPLETED, 0.0)
    g.hear(other.say(0.0))
    assert g.exchange.totals() == [(A, other.scheduler.members.table[A].own_load(0.0))]


def test_news_of_what_nobody_knows_are_none() -> None:
    g = Gateway()
    assert g.exchange.say_news({InstanceId("gone")}, 0.0) is None
    assert g.exchange.say_news((), 0.0) is None


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_lost_or_late_the_next_whole_makes_it_exact(seed: int) -> None:
    """News and wholes that are dropped, doubled and swapped at random, and never a row too old."""
    rng = np.random.default_rng(seed)
    g, other = Gateway(), Gateway()
    outstanding: list[Any] = []
    late: list[Message] = []
    newest: dict[int, float] = {}
    for step in range(60):
        now_s = 0.01 * step
        if outstanding and rng.random() < 0.4:
            done = outstanding.pop(int(rng.integers(len(outstanding))))
            other.scheduler.settle(done, Outcome.COMPLETED, now_s)
        else:
            state = other.scheduler.members.table[(A, B)[step % 2]]
            outstanding.append(state.dispatch(request(prompt_tokens=10 + step), 1.0, now_s))
        message = (
            other.exchange.say_news([A, B][: int(rng.integers(1, 3))], now_s)
            if rng.random() < 0.7
            else other.exchange.say(now_s)
        )
        if message is not None and rng.random() < 0.8:
            late.append(message)
        while late and rng.random() < 0.6:
            arrived = late.pop(int(rng.integers(len(late))))
            for _ in range(int(rng.integers(1, 3))):
                g.exchange.hear("him", unpack(pack(arrived)), now_s)
            heard = g.exchange._replicas["him"]
            for key, (sequence, _) in heard.news.items():
                assert sequence >= newest.get(key, 0), "never back"
                newest[key] = sequence
            g.apply(now_s)
    g.hear(other.say(1.0), 1.0)
    for late_one in late:
        g.hear(late_one, 1.0)
    want = {i: other.scheduler.members.table[i].own_load(1.0) for i in (A, B)}
    for instance_id, load in g.exchange.totals():
        # Counts of prompts are relative to when the other was heard first.
        assert load[:9] == want[instance_id][:9]


def test_news_of_more_instances_than_there_can_be_are_not_kept() -> None:
    g = Gateway()
    many = np.arange(60_000, dtype=np.uint64)
    rows = np.ones((many.size, 13))
    g.exchange.hear("him", Message(1, many, rows, whole=False), 0.0)
    for name, sequence, whole in (("him", 2, False), ("her", 3, False), ("her", 4, True)):
        keys = many + np.uint64(sequence * 10**6)
        with pytest.raises(MessageError, match="too many"):
            g.exchange.hear(name, Message(sequence, keys, rows, whole=whole), 0.0)
    assert g.exchange.unmatched == many.size
    assert g.exchange.replicas == 1
    # What replaces the rows of the one that has many is none too many.
    g.exchange.hear("him", Message(5, many, rows), 0.0)


def test_rows_of_instances_that_are_not_here_are_counted_and_charged_to_nobody() -> None:
    g = Gateway()
    other = Gateway([(A, "http://elsewhere"), (InstanceId("c"), "http://c")])
    other.scheduler.members.table[A].set_peer("x", None)
    for _ in range(3):
        other.place(0.0)
    message = told(other.say(0.0))
    g.exchange.hear("him", message, 0.0)
    assert g.exchange.unmatched == message.keys.size > 0
    assert all(change.load is None for change in g.exchange.changes(0.0))


def test_an_instance_that_comes_later_gets_what_was_said_of_it() -> None:
    g, other = Gateway(INSTANCES[1:]), Gateway()
    other.place(0.0)  # on a, the fast one
    g.hear(other.say(0.0))
    assert g.exchange.unmatched == 1
    g.scheduler.add(spec("a"))
    g.exchange.set_instances(INSTANCES)
    g.apply(0.0)
    assert g.exchange.unmatched == 0
    assert [i for i, _ in g.exchange.totals()] == ["a"]


def test_the_mode_says_what_the_view_is_worth() -> None:
    g = Gateway()
    assert g.exchange.mode(0.0) is Mode.LOCAL
    g.exchange.exchanged_s = 1.0
    assert g.exchange.mode(1.2) is Mode.SHARED
    assert g.exchange.mode(1.3) is Mode.STALE
    assert g.exchange.mode(1.0 + TTL_S) is Mode.LOCAL


def test_what_others_saw_of_an_engines_speed_is_averaged_by_modelled_time() -> None:
    g = Gateway()
    state = g.scheduler.members.table[A]
    seen = PeerLoad(observed_s=4.0, modelled_s=2.0)
    g.scheduler.members.table[A].set_peer(OTHERS, seen)
    assert state.speed == pytest.approx((0.2 + 4.0) / (0.2 + 2.0))
    g.scheduler.members.table[A].set_peer(OTHERS, None)
    assert state.speed == 1.0


def test_an_engine_shared_with_another_gateway_is_not_taken_for_slow() -> None:
    """Its steps are those of both batches, and the prompts between them are of both."""

    def speed(*, told: bool) -> float:
        g = Gateway(INSTANCES[:1])
        state = g.scheduler.members.table[A]
        dispatches = [g.place(0.0, prompt_tokens=1000, output_tokens=400) for _ in range(4)]
        for dispatch in dispatches:
            g.scheduler.first_token(dispatch, 0.0)
        # 60 sequences of 4000 tokens of another one, and a prompt of 2000 every tenth of a second.
        for tick in range(41):
            now_s = tick / 10
            if told:
                load = PeerLoad(
                    9.0, 260_000, 60, 0, 60, 0, 0.0, 0.0, 240_000.0, 0, 0, tick, 2000 * tick
                )
                g.scheduler.members.table[A].set_peer(OTHERS, load, now_s)
            if tick and tick % 10 == 0:
                c = state.constants
                assert c is not None
                context = 4 * 1000 + 240_000
                step_s = c.p5 * context + c.p6 * 64 + c.p7 * context / 64 + c.p8
                prompts_s = 10 * (c.p1 * 2000 + c.p2 + c.p4)
                steps = (1.0 - prompts_s) / step_s
                g.scheduler.members.observe_steps(A, steps, 1.0, now_s)
        return state.speed

    assert speed(told=False) > 1.5
    assert speed(told=True) == pytest.approx(1.0, abs=0.12)


def test_a_replica_that_comes_or_goes_is_no_burst_of_prompts() -> None:
    g = Gateway()
    state = g.scheduler.members.table[A]
    dispatch = g.place(0.0)
    g.scheduler.first_token(dispatch, 0.0)
    other = Gateway()
    for _ in range(5):
        other.scheduler.first_token(other.place(0.0), 0.0)
    message = told(other.say(0.0))
    for name in ("him", "her"):
        g.hear(message, replica=name)
    g.exchange.forget("him")
    g.apply(0.0)
    assert state.interval.prompts == 0
    later = message._replace(sequence=99, rows=message.rows.copy())
    later.rows[:, -2] += 2
    g.hear(later, 0.1, "her")
    assert state.interval.prompts == 2


def test_an_empty_gateway_has_nothing_to_say_and_takes_everything() -> None:
    g = Gateway([])
    assert told(g.say(0.0)).keys.size == 0
    g.exchange.hear("him", Message(1, np.array([5], dtype=np.uint64), np.ones((1, 13))), 0.0)
    assert list(g.exchange.changes(0.0)) == []
    assert g.exchange.unmatched == 1
