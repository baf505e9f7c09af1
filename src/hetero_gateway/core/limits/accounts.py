"""Accounts of what a key and its group have used, and the charge of one request. Pure.

    admit      every account has room: a request, its estimated tokens, one more in flight
    extend     a session goes on: more tokens than were charged, if every account has room
    settle     the tokens it really used; once, later calls change nothing
    end        one fewer in flight; once

A request that is never settled keeps its estimate. The charged estimate is at most the smallest
limit, so that no request is refused for good because of a length estimated too high; tokens beyond
that are charged when it is settled.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from hetero_gateway.core.limits.window import UNLIMITED, Window


class Limits(NamedTuple):
    """Args:
    requests_per_minute, tokens_per_minute: in any 60 s; None: no limit.
    concurrency: requests in flight at once; None: no limit.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Limit(enum.Enum):
    """The limit that was reached."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


class Denial(NamedTuple):
    """Why a request may not be served now.

    Args:
        account: the account whose limit was reached.
        limit: which limit.
        allowed: its value.
        wait_s: until the request may be served, if nothing else comes in between; None: not known.
    """

    account: str
    limit: Limit
    allowed: int
    wait_s: float | None


# A client's standing once a request is charged, by the account with the least left: the limit of
# requests, what remains of it, and the same for tokens. What was used last counts for ``SLOTS``
# seconds from now. A limit of None means no limit, and the remaining value says nothing.
LimitStanding = tuple[int | None, int, int | None, int]


class Account:
    """What a key, or all keys of a group, have used.

    ``name``: unique. ``in_flight``: now, here; ``room``: the most that may be in flight.
    """

    __slots__ = ("_elsewhere", "concurrency", "in_flight", "name", "requests", "room", "tokens")

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.requests = Window(limits.requests_per_minute)
        self.tokens = Window(limits.tokens_per_minute)
        self.concurrency = limits.concurrency
        self.in_flight = 0
        self.others_in_flight = 0

    def __repr__(self) -> str:
        return f"<Account {self.name}: {self.requests}, {self.tokens}, {self.in_flight} in flight>"

    def set_limits(self, limits: Limits) -> None:
        """Apply other limits from now on; past usage stays."""
        self.requests.set_limit(limits.requests_per_minute)
        self.tokens.set_limit(limits.tokens_per_minute)
        self.concurrency = limits.concurrency
        self.others_in_flight = self._elsewhere

    @property
    def others_in_flight(self) -> int:
        """Requests in flight at other gateways."""
        return self._elsewhere

    @others_in_flight.setter
    def others_in_flight(self, requests: int) -> None:
        self._elsewhere = requests
        most = UNLIMITED if self.concurrency is None else self.concurrency
        self.room = most - requests

    def denial(self, tokens: int, now_s: float) -> Denial:
        """Why a request of this many tokens may not be served now; the windows are current."""
        most = self.concurrency
        if most is not None and self.in_flight >= self.room:
            return Denial(self.name, Limit.CONCURRENCY, most, None)
        which, window, amount = Limit.REQUESTS, self.requests, 1
        if window.remaining():
            which, window, amount = Limit.TOKENS, self.tokens, tokens
        return Denial(self.name, which, window.limit or 0, window.wait_s(amount, now_s))


class Charge:
    """The charge of one request. ``tokens``: as estimated; ``standing``: with them."""

    __slots__ = ("_accounts", "_ended", "_second", "_settled", "standing", "tokens")

    def __init__(
        self, accounts: Sequence[Account], tokens: int, second: int, standing: LimitStanding
    ) -> None:
        self._accounts = accounts
        self._second = second
        self._settled = self._ended = False
        self.standing = standing
        self.tokens = tokens

    def __repr__(self) -> str:
        state = "over" if self._ended else "settled" if self._settled else "open"
        return f"<Charge of {self.tokens} tokens, {state}>"

    def extend(self, tokens: int, now_s: float) -> Denial | None:
        """Charge this many more tokens, used now, to every account or to none."""
        second = int(now_s)
        for account in self._accounts:
            window = account.tokens
            window.advance(second)
            if tokens > window.free:
                wait_s = window.wait_s(tokens, now_s)
                return Denial(account.name, Limit.TOKENS, window.limit or 0, wait_s)
        for account in self._accounts:
            account.tokens.use(tokens)
        self.tokens += tokens
        return None

    def settle(self, tokens: int, now_s: float) -> None:
        """Set the tokens it really used. Only the first call counts."""
        if self._settled:
            return
        self._settled = True
        difference = tokens - self.tokens
        if difference:
            second = int(now_s)
            for account in self._accounts:
                window = account.tokens
                if window.second == second == self._second:
                    window.free -= difference  # the usual case: a slot is noted once it has passed
                else:
                    window.correct(self._second, difference, second)

    def end(self) -> None:
        """Note that the request has ended. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        for account in self._accounts:
            account.in_flight -= 1


def admit(accounts: Sequence[Account], tokens: int, now_s: float) -> Charge | Denial:
    """Charge a request to all of these accounts, or to none.

    Args:
        tokens: as estimated, at least 0.
        now_s: of a clock that never goes back.
    """
    second = int(now_s)
    requests_limit = tokens_limit = None
    requests_left = tokens_left = UNLIMITED
    for account in accounts:
        requests, window = account.requests, account.tokens
        if requests.second != second:
            requests.advance(second)
            window.advance(second)
        requests_free = requests.free - 1
        tokens_free = window.free - tokens
        if requests_free < 0 or tokens_free < 0 or account.in_flight >= account.room:
            return _without_room(accounts, account, tokens, now_s)
        requests.free = requests_free
        window.free = tokens_free
        account.in_flight += 1
        if requests_free < requests_left:
            requests_limit, requests_left = requests.limit, requests_free
        if tokens_free < tokens_left:
            tokens_limit, tokens_left = window.limit, tokens_free
    stands = (requests_limit, requests_left, tokens_limit, tokens_left)
    return Charge(accounts, tokens, second, stands)


def _without_room(
    accounts: Sequence[Account], full: Account, tokens: int, now_s: float
) -> Charge | Denial:
    """Return their charge to the accounts before this one.

    If the estimate alone exceeds what is allowed, the allowed amount is charged instead.
    """
    for account in accounts[: accounts.index(full)]:
        account.requests.free += 1
        account.tokens.free += tokens
        account.in_flight -= 1
    for account in accounts:
        account.requests.advance(int(now_s))
        account.tokens.advance(int(now_s))
    limits = [account.tokens.limit for account in accounts]
    most = min((limit for limit in limits if limit is not None), default=tokens)
    return admit(accounts, most, now_s) if most < tokens else full.denial(tokens, now_s)


def adopt(accounts: Sequence[Account], tokens: int, now_s: float) -> Charge:
    """Charge a request that is already being served, whatever the limits."""
    second = int(now_s)
    for account in accounts:
        for window, amount in ((account.requests, 1), (account.tokens, tokens)):
            window.advance(second)
            window.use(amount)
        account.in_flight += 1
    return Charge(accounts, tokens, second, standing(accounts))


def standing(accounts: Sequence[Account]) -> LimitStanding:
    """The standing of the client with these accounts, as of the last request."""
    requests, tokens = (
        min(
            ((w.remaining(), w.limit) for w in windows if w.limit is not None),
            key=lambda left: left[0],
            default=(0, None),
        )
        for windows in ([a.requests for a in accounts], [a.tokens for a in accounts])
    )
    return requests[1], requests[0], tokens[1], tokens[0]
