"""Limits hold in every 60 s, whatever is charged, settled and ended, and in whatever order."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.limits.accounts import (
    Account,
    Charge,
    Denial,
    Limit,
    Limits,
    admit,
    adopt,
    standing,
)
from hetero_gateway.core.limits.window import WINDOW_S, Window

AMOUNTS = st.integers(0, 400)
# (seconds that pass, what happens, how much)
KINDS = st.sampled_from(("admit", "settle", "end"))
EVENTS = st.lists(st.tuples(st.floats(0, 45), KINDS, AMOUNTS), max_size=80)


def account(requests: int | None = None, tokens: int | None = None, most: int = 99) -> Account:
    return Account("a", Limits(requests, tokens, most))


def admitted(accounts: Sequence[Account], tokens: int, now_s: float) -> Charge:
    charge = admit(accounts, tokens, now_s)
    assert isinstance(charge, Charge)
    return charge


def denied(accounts: Sequence[Account], tokens: int, now_s: float) -> Denial:
    denial = admit(accounts, tokens, now_s)
    assert isinstance(denial, Denial)
    return denial


@given(EVENTS, st.integers(1, 6), st.integers(1, 900), st.integers(1, 5))
def test_no_limit_is_passed_in_any_minute(events, requests, tokens, concurrency):
    """Estimates that were never too low keep the tokens within their limit, too."""
    a = account(requests, tokens, concurrency)
    now_s, open_charges, let_in = 1000.0, [], []
    for passed_s, event, amount in events:
        now_s += passed_s
        if event == "admit":
            charge = admit((a,), amount, now_s)
            if isinstance(charge, Charge):
                open_charges.append(charge)
                let_in.append((now_s, charge))
        elif open_charges and event == "settle":
            open_charges[0].settle(min(amount, open_charges[0].tokens), now_s)
        elif open_charges:
            open_charges.pop(0).end()
        assert a.in_flight == len(open_charges) <= concurrency
    used = {id(charge): charge.tokens for _, charge in let_in}
    for at_s, _ in let_in:
        within = [charge for s, charge in let_in if at_s - WINDOW_S < s <= at_s]
        assert len(within) <= requests
        assert sum(used[id(charge)] for charge in within if not charge._settled) <= tokens


@given(EVENTS)
def test_whatever_happens_all_of_it_is_given_back(events: list[tuple[float, str, int]]) -> None:
    accounts = [Account("key", Limits(50, 5000, 20)), Account("group", Limits(60, 3000, None))]
    now_s, charges = 0.0, []
    for passed_s, event, amount in events:
        now_s += passed_s
        if event == "admit":
            charge = admit(accounts, amount, now_s)
            charges += [charge] if isinstance(charge, Charge) else []
        elif charges and event == "settle":
            charges[amount % len(charges)].settle(amount, now_s)
        elif charges:
            charges[amount % len(charges)].end()
        for account in accounts:
            for window in (account.requests, account.tokens):
                assert window.used == sum(window.slots)
                assert min(window.slots) >= 0
    for charge in charges:
        charge.end()
        charge.settle(7, now_s)
    for account in accounts:
        account.requests.advance(int(now_s) + 61)
        account.tokens.advance(int(now_s) + 61)
        assert (account.in_flight, account.requests.used, account.tokens.used) == (0, 0, 0)


@given(st.lists(st.tuples(st.floats(0, 70), AMOUNTS), max_size=40))
def test_a_window_is_the_sum_of_what_is_younger_than_it(steps: list[tuple[float, int]]) -> None:
    window, now_s, used = Window(100), 5.0, []
    for passed_s, amount in steps:
        now_s += passed_s
        window.advance(int(now_s))
        window.use(amount)
        used.append((now_s, amount))
        young = sum(each for at_s, each in used if now_s - at_s <= WINDOW_S)
        counted = sum(each for at_s, each in used if int(now_s) - int(at_s) <= WINDOW_S)
        assert young <= counted == window.used
        # Once that is over, there is room; a moment earlier there was none.
        wait_s = window.wait_s(1, now_s)
        later = Window(100)
        for at_s, each in used:
            later.advance(int(at_s))
            later.use(each)
        later.advance(int(now_s + wait_s + 1e-9))
        assert later.used + 1 <= 100
        assert (wait_s == 0) == (window.used + 1 <= 100)


def test_a_token_bucket_would_let_more_through() -> None:
    """At the end of a minute and the beginning of the next."""
    a = account(requests=10)
    for at_s in (59.0, 59.5, 59.9):
        for _ in range(3):
            admitted((a,), 0, at_s)
    admitted((a,), 0, 60.0)
    assert denied((a,), 0, 60.1) == ("a", Limit.REQUESTS, 10, 59 + 61 - 60.1)
    assert denied((a,), 0, 119.9).limit is Limit.REQUESTS
    admitted((a,), 0, 120.0)


def test_what_is_settled_counts_instead_of_the_estimate() -> None:
    a = account(tokens=1000)
    charge = admitted((a,), 800, 10.0)
    assert denied((a,), 300, 11.0).wait_s == 10 + 61 - 11.0
    charge.settle(100, 12.0)
    charge.settle(0, 12.0)  # only the first counts
    assert a.tokens.used == 100
    admitted((a,), 300, 12.0)


def test_more_is_charged_when_it_is_known_and_what_is_too_long_ago_is_not_given_back() -> None:
    a, other = account(tokens=1000), account(tokens=1000)
    charge = admitted((a,), 100, 0.0)
    charge.settle(3000, 100.0)  # what was charged at first is over a minute old
    assert a.tokens.used == 2900
    assert denied((a,), 1, 100.0).wait_s == 61.0
    admitted((a,), 1000, 161.0)
    charge = admitted((other,), 900, 0.0)
    other.tokens.advance(61)
    charge.settle(10, 61.0)
    assert other.tokens.used == 0


def test_an_estimate_alone_never_refuses() -> None:
    a = account(tokens=1000)
    assert admitted((a,), 10**9, 0.0).tokens == 1000
    assert denied((a,), 10**9, 1.0).limit is Limit.TOKENS
    admitted((a,), 10**9, 61.0)


def test_a_group_s_limit_holds_over_its_keys_and_a_denial_charges_nobody() -> None:
    group = Account("team", Limits(3, None, None))
    one, other = Account("one", Limits(2, None, None)), Account("other", Limits(None, None, None))
    for _ in range(2):
        admitted((one, group), 5, 0.0)
    assert denied((one, group), 5, 0.0).account == "one"
    admitted((other, group), 5, 0.0)
    assert denied((other, group), 5, 0.0).account == "team"
    assert (one.requests.used, other.requests.used, group.requests.used) == (2, 1, 3)


def test_others_count_as_well_but_not_for_what_is_adopted() -> None:
    a = account(10, 100, 4)
    a.requests.others, a.tokens.others, a.others_in_flight = 9, 90, 3
    admitted((a,), 10, 0.0)
    assert denied((a,), 0, 0.0).limit is Limit.CONCURRENCY
    a.others_in_flight = 0
    assert denied((a,), 0, 0.0).limit is Limit.REQUESTS
    a = account(1, 1, 1)
    charges = [adopt((a,), 50, 0.0) for _ in range(3)]
    assert (a.in_flight, a.requests.used, a.tokens.used) == (3, 3, 150)
    for charge in charges * 2:
        charge.end()
    assert a.in_flight == 0


def test_a_client_is_told_of_the_account_that_has_least_left() -> None:
    key, group = Account("key", Limits(100, None, None)), Account("team", Limits(4, 1000, None))
    admitted((key, group), 200, 30.5)
    assert standing((key, group)) == (4, 3, 1000, 800)
    assert standing(()) == (None, 0, None, 0)


def test_what_is_settled_as_a_second_begins_hides_no_request_of_it() -> None:
    a = account(requests=2)
    admitted((a,), 10, 0.0).settle(20, 50.0)  # the tokens' window is of that second alone
    admitted((a,), 0, 50.5)
    assert denied((a,), 0, 51.0).wait_s == 10.0
    admitted((a,), 0, 61.0)
    assert denied((a,), 0, 110.9).limit is Limit.REQUESTS
    admitted((a,), 0, 111.0)
