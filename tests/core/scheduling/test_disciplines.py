"""Who is next of those that wait."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.scheduling.disciplines import (
    Classes,
    ClassRule,
    Clients,
    Shortest,
    make_discipline,
)
from hetero_gateway.core.scheduling.queue import QueueDiscipline, Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, Outcome, Usage
from tests.core import builders
from tests.core.builders import profile, request, scheduler, spec, state


def seats(discipline: QueueDiscipline, count: int, **changes: Any) -> Scheduler:
    """One instance of so many seats, all free."""
    one = spec("a", profile(max_num_seqs=count), **changes)
    return scheduler(one, policy="finish-time", discipline=discipline)


def full(discipline: QueueDiscipline) -> Scheduler:
    """One instance of one seat, which is taken, as is the one beyond it."""
    s = seats(discipline, 1)
    for _ in range(2):
        ticket = submitted(s, 0.0)
        assert s.pump(0.0) == [ticket]
    return s


def submitted(s: Scheduler, now_s: float, *, first: bool = False, **changes: object) -> Ticket:
    asked = request().replace(**changes)  # type: ignore[arg-type]
    return builders.submitted(s, asked, now_s, first=first)


def order(s: Scheduler, now_s: float) -> list[Ticket]:
    """Who goes, one after the other, as seats get free."""
    result: list[Ticket] = []
    while s.queued:
        s.settle(next(iter(state(s, "a").outstanding())), Outcome.COMPLETED, now_s)
        result += s.pump(now_s)
    return result


def test_first_come_first_served_unless_another_is_named() -> None:
    s = full(make_discipline("fifo"))
    tickets = [submitted(s, 0.1 * i, prompt_tokens=1000 - 10 * i) for i in range(6)]
    assert order(s, 1.0) == tickets


def test_the_shortest_goes_first() -> None:
    s = full(make_discipline("shortest"))
    long = submitted(s, 0.0, prompt_tokens=4000, predicted_output_tokens=900.0)
    middle = submitted(s, 0.0, prompt_tokens=1000, predicted_output_tokens=200.0)
    short = submitted(s, 0.0, prompt_tokens=10, predicted_output_tokens=10.0)
    assert order(s, 1.0) == [short, middle, long]


def test_an_answer_that_is_predicted_long_counts_as_a_prompt_does() -> None:
    s = full(make_discipline("shortest"))
    long = submitted(s, 0.0, prompt_tokens=10, predicted_output_tokens=2000.0)
    short = submitted(s, 0.0, prompt_tokens=500, predicted_output_tokens=10.0)
    assert order(s, 1.0) == [short, long]


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 4000)), min_size=2, max_size=30))
def test_nobody_is_passed_by_who_comes_later_than_patience(arrivals):
    s = full(Shortest(patience_s=5.0))
    tickets, now_s = [], 0.0
    for gap_s, prompt in arrivals:
        now_s += gap_s
        tickets.append(submitted(s, now_s, prompt_tokens=prompt))
    gone = order(s, now_s)
    assert set(gone) == set(tickets)
    for i, ticket in enumerate(gone):
        assert all(ticket.enqueued_s <= later.enqueued_s + 5.0 for later in gone[i + 1 :])


def test_who_leaves_from_the_middle_is_never_next() -> None:
    s = full(make_discipline("shortest"))
    tickets = [submitted(s, 0.0, prompt_tokens=10 + i) for i in range(300)]
    for ticket in tickets[:200]:
        assert s.cancel(ticket)
        assert not s.cancel(ticket)
    assert order(s, 1.0) == tickets[200:]


@pytest.mark.parametrize("name", ["fifo", "shortest", "classes", "clients"])
def test_a_retry_goes_ahead_of_all(name: str) -> None:
    s = full(make_discipline(name))  # type: ignore[arg-type]
    submitted(s, 0.0, prompt_tokens=10)
    retry = submitted(s, 1.0, first=True, prompt_tokens=4000, request_class="batch")
    assert order(s, 1.0)[0] is retry


def test_who_asks_for_less_than_its_share_does_not_wait_for_the_others() -> None:
    s = full(make_discipline("classes"))
    batch = [submitted(s, 0.0, request_class="batch") for _ in range(40)]
    late = [submitted(s, 1.0) for _ in range(3)]
    # One of the batch is due as much as the first of the others, and came before it.
    assert order(s, 1.0)[:4] in ([batch[0], *late], [late[0], batch[0], *late[1:]])


def test_classes_that_all_want_more_get_their_shares() -> None:
    s = full(Classes({"a": ClassRule(3.0), "b": ClassRule(1.0)}))
    for _ in range(60):
        submitted(s, 0.0, request_class="b")
        submitted(s, 0.0, request_class="a")
    went = [ticket.request.request_class for ticket in order(s, 1.0)]
    assert 28 <= went[:40].count("a") <= 32
    assert went[85:] == ["b"] * 35


def test_a_share_that_was_not_asked_for_is_not_saved_up() -> None:
    s = full(Classes({"a": ClassRule(1.0), "b": ClassRule(1.0)}))
    for _ in range(50):
        submitted(s, 0.0, request_class="a")
    order(s, 1.0)
    for _ in range(20):
        submitted(s, 2.0, request_class="a")
        submitted(s, 2.0, request_class="b")
    went = [ticket.request.request_class for ticket in order(s, 3.0)]
    assert 9 <= went[:20].count("a") <= 11


def test_who_has_waited_long_enough_goes_ahead_of_every_class() -> None:
    s = full(Classes({"now": ClassRule(100.0), "later": ClassRule(1.0, max_wait_s=10.0)}))
    later = [submitted(s, 0.0, request_class="later") for _ in range(2)]
    for i in range(10):
        submitted(s, 5.0 + i, request_class="now")
    assert order(s, 10.0)[:2] == later


def test_a_class_that_nobody_configured_counts_as_the_first() -> None:
    s = full(Classes({"a": ClassRule(1.0), "b": ClassRule(1.0)}))
    strange = submitted(s, 0.0, request_class="nobody knows it")
    assert order(s, 0.0) == [strange]


def test_a_request_that_takes_no_time_is_placed() -> None:
    s = full(make_discipline("shortest"))
    ticket = submitted(s, 0.0, prompt_tokens=0, predicted_output_tokens=0.0)
    assert order(s, 0.0) == [ticket]
    assert math.isfinite(ticket.rank[0])


def test_models_that_share_an_instance_share_it_by_class() -> None:
    s = seats(make_discipline("classes"), 1, models=frozenset({"x", "y"}))
    for _ in range(2):
        submitted(s, 0.0, model="x")
        s.pump(0.0)
    batch = [submitted(s, 0.0, model="x", request_class="batch") for _ in range(5)]
    asked = submitted(s, 1.0, model="y")
    went = order(s, 1.0)
    assert went.index(asked) <= 1
    assert set(went) == {asked, *batch}


def test_one_clients_backlog_does_not_stand_in_front_of_anothers_request() -> None:
    for name, place in (("fifo", 500), ("clients", 0)):
        s = full(make_discipline(name))  # type: ignore[arg-type]
        for _ in range(500):
            submitted(s, 0.0, client="flood")
        ticket = submitted(s, 1.0, client="quiet")
        assert order(s, 2.0).index(ticket) <= place + 1, name


def test_clients_that_all_want_more_get_their_shares_within_their_class() -> None:
    discipline = Clients({"interactive": ClassRule(3.0), "batch": ClassRule(1.0)})
    discipline.shares = {"two": 2.0}
    s = full(discipline)
    for _ in range(60):
        submitted(s, 0.0, client="one")
        submitted(s, 0.0, client="two")
        submitted(s, 0.0, client="two", request_class="batch")
    went = [(t.request.client, t.request.request_class) for t in order(s, 1.0)][:66]
    counts = {each: went.count(each) for each in set(went)}
    # 3 to 3 * 2 to 1 * 2
    assert counts["one", "interactive"] == pytest.approx(18, abs=1)
    assert counts["two", "interactive"] == pytest.approx(36, abs=1)
    assert counts["two", "batch"] == pytest.approx(12, abs=1)


def test_who_was_away_has_not_saved_up() -> None:
    s = full(make_discipline("clients"))
    for _ in range(20):
        submitted(s, 0.0, client="stays")
    order(s, 1.0)
    for client in ("back", "stays"):
        for _ in range(10):
            submitted(s, 2.0, client=client)
    went = [ticket.request.client for ticket in order(s, 3.0)][:10]
    assert went.count("back") <= 6


def settle(s: Scheduler, ticket: Ticket, output_tokens: int, now_s: float) -> None:
    s.settle(ticket.dispatch, Outcome.COMPLETED, now_s, Usage(100, output_tokens, 0))


def asks_lately(s: Scheduler) -> None:
    """A quiet client has just had an answer."""
    ticket = submitted(s, 0.0, client="quiet")
    s.pump(0.0)
    settle(s, ticket, 10, 0.1)


@pytest.mark.parametrize("told", [True, False])
def test_shares_are_of_what_answers_were_and_not_of_what_was_predicted(told: bool) -> None:
    """Both are predicted alike; one's answers are four times as long."""
    s = full(make_discipline("clients"))
    for _ in range(300):
        for client in ("long", "short"):
            submitted(s, 0.0, client=client, prompt_tokens=100, predicted_output_tokens=100.0)
    going = list(s.members.table[InstanceId("a")].outstanding())
    tokens = {"long": 0, "short": 0, "": 0}
    for i in range(200):
        dispatch = going.pop(0)
        output = 400 if dispatch.request.client == "long" else 100
        tokens[dispatch.request.client] += output
        usage = Usage(100, output if told else None, 0)
        s.settle(dispatch, Outcome.COMPLETED, float(i), usage)
        going += [t.dispatch for t in s.pump(float(i)) if t.dispatch is not None]
    assert tokens["long"] / tokens["short"] == pytest.approx(1.0 if told else 4.0, rel=0.15)


def test_who_leaves_early_is_counted_for_what_was_made() -> None:
    discipline = Clients()
    s = seats(discipline, 4)
    ticket = submitted(s, 0.0, client="leaves", predicted_output_tokens=1000.0)
    s.pump(0.0)
    charged_s = discipline._counters_s["interactive\nleaves"]
    s.first_token(ticket.dispatch, 1.0)
    s.settle(ticket.dispatch, Outcome.CLIENT_DISCONNECTED, 1.1)
    assert discipline._counters_s["interactive\nleaves"] < charged_s / 10


def test_a_lie_of_an_instance_does_not_bar_a_client() -> None:
    discipline = Clients()
    s = seats(discipline, 4)
    ticket = submitted(s, 0.0, client="one")
    s.pump(0.0)
    charged_s = discipline._counters_s["interactive\none"]
    settle(s, ticket, 2**60, 1.0)
    assert discipline._counters_s["interactive\none"] <= 32 * charged_s


def test_a_backlog_leaves_a_seat_for_who_has_asked_lately() -> None:
    s = seats(make_discipline("clients", reserve=0.0), 32)
    asks_lately(s)
    flood = [submitted(s, 1.0, client="flood") for _ in range(100)]
    assert len(begun(s, flood, 1.0)) == 31
    asked = submitted(s, 4.0, client="quiet")
    assert s.pump(4.0) == [asked]
    # Once it is long since anybody else has asked, all seats are the flood's.
    settle(s, asked, 10, 4.1)
    assert s.pump(30.0) == []
    late = submitted(s, 65.0, client="flood")
    assert flood[31] in s.pump(65.0)
    assert late.waits


@pytest.mark.parametrize(
    ("seats_there", "reserve", "taken"), [(32, 0.25, 24), (8, 0.25, 6), (8, 0.1, 9), (64, 0.1, 57)]
)
def test_a_reserve_is_for_the_others_while_they_ask(seats_there, reserve, taken):
    s = seats(make_discipline("clients", reserve=reserve), seats_there)
    asks_lately(s)
    going = begun(s, [submitted(s, 1.0, client="flood") for _ in range(100)], 1.0)
    assert len(going) == taken
    # They get all of it; and when they have their part, they leave as much as the others do.
    asked = [submitted(s, 4.0, client="quiet") for _ in range(seats_there)]
    assert len(begun(s, asked, 4.0)) >= seats_there - taken
    late = seats(make_discipline("clients", reserve=reserve), seats_there)
    assert len(begun(late, [submitted(late, 1.0, client="alone") for _ in range(100)], 1.0)) >= (
        seats_there
    )


def test_long_prompts_of_a_backlog_go_one_at_a_time_and_short_ones_together() -> None:
    for tokens, there in ((2000, 1), (200, 2), (20, 20)):
        s = seats(make_discipline("clients"), 32)
        asks_lately(s)
        for _ in range(100):
            submitted(s, 1.0, client="flood", prompt_tokens=tokens)
        assert len(s.pump(1.0)) == pytest.approx(there, abs=there // 4), tokens


def begun(s: Scheduler, wanted: list[Ticket], now_s: float) -> list[Ticket]:
    """Who of these has a place, once prompts are computed and while nobody ends."""
    for step in range(200):
        for ticket in s.pump(now_s + step / 100):
            s.first_token(ticket.dispatch, now_s + step / 100)
    return [ticket for ticket in wanted if ticket.dispatch is not None]


def test_two_backlogs_fill_all_seats_half_and_half() -> None:
    s = seats(make_discipline("clients"), 32)
    tickets = [submitted(s, 0.0, client=name) for _ in range(100) for name in ("one", "two")]
    going = begun(s, tickets, 0.0)
    assert len(going) >= 32
    clients = [ticket.request.client for ticket in going]
    assert abs(clients.count("one") - clients.count("two")) <= 1


def test_shares_end_at_nothing_whatever_becomes_of_instances() -> None:
    discipline = Clients()
    s = seats(discipline, 8)
    tickets = [submitted(s, 0.0, client=str(i % 3)) for i in range(8)]
    s.pump(0.0)
    gone = s.remove(InstanceId("a"), 1.0)
    for dispatch in gone:
        s.settle(dispatch, Outcome.INSTANCE_REMOVED, 1.0)
    for ticket in tickets:
        s.cancel(ticket)
    assert gone
    assert (discipline._total, discipline._out) == (0, {})


@pytest.mark.parametrize("before", ["fifo", "shortest", "classes", "clients"])
def test_those_who_wait_stand_by_another_discipline_as_they_came(before: str) -> None:
    s = full(make_discipline(before))  # type: ignore[arg-type]
    tickets = [
        submitted(s, 0.1 * i, prompt_tokens=1000 - 10 * i, client=str(i % 2)) for i in range(6)
    ]
    retry = submitted(s, 1.0, first=True)
    s.set_discipline(make_discipline("fifo"))
    assert order(s, 2.0) == [retry, *tickets]


def test_shares_that_begin_while_requests_are_out_count_what_goes_from_then_on() -> None:
    s = full(make_discipline("clients"))
    discipline = Clients()
    flood = [submitted(s, 0.0, client="flood") for _ in range(20)]
    ticket = submitted(s, 1.0, client="quiet")
    s.set_discipline(discipline)
    went = order(s, 2.0)
    assert went.index(ticket) <= 1
    assert set(went) == {ticket, *flood}
    for dispatch in s.members.table[InstanceId("a")].outstanding():
        s.settle(dispatch, Outcome.COMPLETED, 3.0)
    assert (discipline._total, discipline._out) == (0, {})
