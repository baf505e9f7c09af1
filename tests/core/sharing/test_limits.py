"""Limits over several gateways: what each has used is the others' to heed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.limits.accounts import Account, Charge, Denial, Limits, admit
from hetero_gateway.core.sharing.exchange import LoadExchange
from hetero_gateway.core.sharing.limits import SharedLimits, account_key
from hetero_gateway.core.sharing.message import FIELDS, Message, MessageError, pack, unpack
from tests.core.builders import scheduler, spec


def message(sequence: int, keys: np.ndarray, accounts: np.ndarray, whole: bool = True) -> Message:
    """Of accounts and no instances."""
    empty = np.empty(0, dtype=np.uint64), np.empty((0, FIELDS))
    return Message(sequence, *empty, whole, keys, accounts)


def reported(sequence: int, *used: float) -> Message:
    """What a peer says that a client has used there."""
    return message(sequence, np.array([account_key("key a")], dtype=np.uint64), np.array([used]))


class Gateway:
    """One account of a client, and what is exchanged about it."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.account = Account("key a", limits)
        self.shared = SharedLimits(lambda: (self.account,))
        self.sequence = 0

    def ask(self, tokens: int, now_s: float) -> Charge | Denial:
        return admit((self.account,), tokens, now_s)

    def say(self, now_s: float, *, whole: bool = True) -> Message:
        """As it arrives with others."""
        self.sequence += 1
        return unpack(pack(message(self.sequence, *self.shared.say(now_s, whole=whole), whole)))

    def hear(self, other: "Gateway", message: Message, now_s: float) -> None:
        self.shared.hear(other.name, message, now_s)
        self.shared.apply(now_s)


def two(limits: Limits) -> tuple[Gateway, Gateway]:
    return Gateway("0", limits), Gateway("1", limits)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 50), st.floats(0, 20)), max_size=60))
def test_once_each_has_heard_the_limit_is_one_for_all(events: list[tuple[int, int, float]]) -> None:
    gateways = two(Limits(7, 120, 5))
    alone = Account("alone", Limits(7, 120, 5))
    now_s = 1000.0
    for which, tokens, passed_s in events:
        now_s += passed_s
        for gateway, other in (gateways, gateways[::-1]):
            gateway.hear(other, other.say(now_s), now_s)
        got = gateways[which].ask(tokens, now_s)
        want = admit((alone,), tokens, now_s)
        assert isinstance(got, Charge) == isinstance(want, Charge)
        if isinstance(got, Denial) and isinstance(want, Denial):
            assert got.limit is want.limit


def test_news_are_of_what_changed_and_what_is_late_counts_for_nothing() -> None:
    first, second = two(Limits(10, None, None))
    first.ask(0, 5.0)
    old = first.say(5.0)
    first.ask(0, 5.1)
    news = first.say(5.1, whole=False)
    assert news.accounts.tolist() == [[2.0, 0.0, 2.0]]
    assert not first.say(5.1, whole=False).accounts.size
    second.hear(first, news, 5.1)
    assert second.account.requests.others == 2
    second.hear(first, old, 5.2)
    assert second.account.requests.others == 2
    assert second.account.others_in_flight == 2


def test_what_has_run_out_of_its_minute_is_said_too() -> None:
    first, second = two(Limits(10, None, None))
    charge = first.ask(0, 5.0)
    assert isinstance(charge, Charge)
    second.hear(first, first.say(5.0), 5.0)
    charge.end()
    assert first.shared.changed(70.0)
    second.hear(first, first.say(70.0, whole=False), 70.0)
    assert (second.account.requests.others, second.account.others_in_flight) == (0, 0)


def test_who_is_gone_has_nothing_in_flight_and_its_minute_still_counts() -> None:
    first, second = two(Limits(3, None, 9))
    for _ in range(3):
        first.ask(0, 5.0)
    second.hear(first, first.say(5.0), 5.0)
    second.shared.forget("0")
    second.shared.apply(8.0)
    assert (second.account.requests.others, second.account.others_in_flight) == (3, 0)
    assert isinstance(second.ask(0, 30.0), Denial)
    second.shared.apply(66.0)
    assert isinstance(second.ask(0, 66.0), Charge)


def test_an_account_that_comes_later_heeds_what_others_say_next() -> None:
    accounts: list[Account] = []
    shared = SharedLimits(lambda: accounts)
    first = Gateway("0", Limits(3, None, None))
    first.ask(0, 5.0)
    shared.hear("0", first.say(5.0), 5.0)
    accounts.append(Account("key a", Limits(3, None, None)))
    shared.apply(5.1)
    assert accounts[0].requests.others == 0, "of clients that are not here nothing is kept"
    shared.hear("0", first.say(5.2), 5.2)
    shared.apply(5.2)
    assert accounts[0].requests.others == 1


def test_an_exchange_carries_them_and_says_so_when_they_alone_have_changed() -> None:
    account = Account("key a", Limits(5, 100, None))
    shared = SharedLimits(lambda: (account,))
    exchange = LoadExchange(scheduler(spec("a")), ttl_s=3.0, interval_s=0.05, limits=shared)
    exchange.set_instances([("a", "http://a")])  # type: ignore[list-item]
    assert exchange.say(0.0) is not None
    exchange.said()
    assert exchange.say(0.1) is None
    admit((account,), 30, 0.2)
    said = exchange.say(0.2)
    assert said is not None
    assert said.account_keys.tolist() == [account_key("key a")]
    assert said.accounts.tolist() == [[1.0, 30.0, 1.0]]


def test_what_others_report_counts_up_to_a_limit_and_leaves_a_share_after_a_while() -> None:
    """A peer that claims any number kept a client out for as long as it said so."""
    gateway = Gateway("0", Limits(20, 1000, 4))
    refused: set[str] = set()
    for second in range(1000):
        gateway.shared.hear("liar", reported(second + 1, 1e12, 1e12, 1e12), second)
        gateway.shared.apply(second)
        account = gateway.account
        assert account.requests.others <= 20
        assert account.tokens.others <= 1000
        assert account.others_in_flight <= 4
        answer = gateway.ask(10, second)
        if isinstance(answer, Denial):
            refused.add(answer.limit.value)
            assert second < 600 or account.requests.used >= 10
        else:
            assert second >= 600, "the concurrency is the last to be doubted"
            answer.end()
    assert refused == {"concurrency", "requests_per_minute"}
    # Half of it, by the liar's count of gateways: two.
    assert 8 <= gateway.account.requests.used <= 10


def test_a_busy_gateway_and_one_that_was_kept_out_share_what_there_is() -> None:
    """Both honest: what one grants itself the other hears of, and lets in less."""
    greedy, kept_out = two(Limits(20, None, None))
    for second in range(900):
        for gateway, other in ((greedy, kept_out), (kept_out, greedy)):
            gateway.hear(other, other.say(second), second)
            for _ in range(20 if gateway is greedy else 3):
                if isinstance(charge := gateway.ask(0, second), Charge):
                    charge.end()
        used = greedy.account.requests.used + kept_out.account.requests.used
        # A share beyond the limit while the greedy one's last minute runs out, and less after.
        assert used <= (20 if second < 122 else 20 + 10 if second < 122 + 61 else 20 + 5)
    assert kept_out.account.requests.used == 10


def test_names_that_change_all_the_time_are_not_kept() -> None:
    gateway = Gateway("0", Limits(20, None, None))
    for number in range(5000):
        gateway.shared.hear(f"{number:016x}", reported(1, 1, 1, 1), 1.0)
        gateway.shared.forget(f"{number:016x}")
    assert len(gateway.shared._others) <= 256


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, 2.0**51])
def test_numbers_that_no_gateway_could_have_counted_are_refused(value: float) -> None:
    with pytest.raises(MessageError):
        unpack(pack(reported(1, 1.0, value, 0.0)))
