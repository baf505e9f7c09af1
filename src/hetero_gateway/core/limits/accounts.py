"""Who has used how much: a key's account and its group's, and what one request is charged. Pure.

    admit      every account has room: a request, its tokens as estimated, one more at a time
    extend     a session goes on: more tokens than were charged, if every account has room
    settle     the tokens that it really was; once, later calls change nothing
    end        one less at a time; once

A request that is never settled keeps its estimate. The estimate that is charged is at most the
smallest limit, so that no request is refused for good because somebody guessed its length too long;
what it was beyond that is charged as it is settled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hetero_gateway.core.limits.window import SLOTS, Window


class Limits(NamedTuple):
    """Args:
    requests_per_minute, tokens_per_minute: in any 60 s; None: no limit.
    concurrency: requests that are not over, at a time; None: no limit.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Limit(enum.Enum):
    """Which of them there is no room under."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


class Denial(NamedTuple):
    """A request that may not be served now.

    Args:
        account: whose limit it is.
        limit: which.
        allowed: how much that is.
        wait_s: until it may be, if nothing else comes in between; None: not known.
    """

    account: str
    limit: Limit
    allowed: int
    wait_s: float | None


class LimitStanding(NamedTuple):
    """How a client stands once a request is charged: of its accounts, where least is left.

    What was used last counts for ``SLOTS`` seconds from now. None: no limit.
    """

    limit_requests: int | None
    remaining_requests: int
    limit_tokens: int | None
    remaining_tokens: int


# One for every request: a NamedTuple's own constructor is a function in Python.
_new_standing: Callable[[type[LimitStanding], tuple[Any, ...]], LimitStanding] = tuple.__new__


class Account:
    """What a key, or all keys of a group, have used. ``name``: unique; ``in_flight``: now, here."""

    __slots__ = ("concurrency", "in_flight", "name", "others_in_flight", "requests", "tokens")

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
        """Other limits from now on; what was used stays so."""
        self.requests.set_limit(limits.requests_per_minute)
        self.tokens.set_limit(limits.tokens_per_minute)
        self.concurrency = limits.concurrency

    def denial(self, tokens: int, now_s: float) -> Denial:
        """Why a request of this many tokens may not be served now; the windows are of now."""
        most = self.concurrency
        if most is not None and self.in_flight + self.others_in_flight >= most:
            return Denial(self.name, Limit.CONCURRENCY, most, None)
        which, window, amount = Limit.REQUESTS, self.requests, 1
        if window.remaining():
            which, window, amount = Limit.TOKENS, self.tokens, tokens
        return Denial(self.name, which, window.limit or 0, window.wait_s(amount, now_s))


class Charge:
    """What one request was charged. ``tokens``: as estimated; ``standing``: with them."""

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
        """Charge this many tokens more, which are used now, to every account or to none."""
        second = int(now_s)
        for account in self._accounts:
            window = account.tokens
            window.advance(second)
            if window.used + tokens > window.room:
                wait_s = window.wait_s(tokens, now_s)
                return Denial(account.name, Limit.TOKENS, window.limit or 0, wait_s)
        for account in self._accounts:
            account.tokens.use(tokens)
        self.tokens += tokens
        return None

    def settle(self, tokens: int, now_s: float) -> None:
        """It was this many tokens. Only the first call counts."""
        if self._settled:
            return
        self._settled = True
        difference = tokens - self.tokens
        if difference:
            second = int(now_s)
            for account in self._accounts:
                account.tokens.correct(self._second, difference, second)

    def end(self) -> None:
        """The request is over. Only the first call counts."""
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
    for account in accounts:
        window = account.tokens
        if window.second != second:
            account.requests.advance(second)
            window.advance(second)
        limit = window.limit
        if limit is not None and tokens > limit:
            tokens = limit
    # ``Account.denial``, ``standing`` and ``Window.use``, written out: this is done for every
    # request, and what it reads has to be fetched from memory.
    requests_limit = tokens_limit = None
    requests_left = tokens_left = 0
    for account in accounts:
        requests, window, most = account.requests, account.tokens, account.concurrency
        free = requests.room - requests.used - 1
        tokens_free = window.room - window.used - tokens
        if (
            free < 0
            or tokens_free < 0
            or (most is not None and account.in_flight + account.others_in_flight >= most)
        ):
            return account.denial(tokens, now_s)
        limit = requests.limit
        if limit is not None and (requests_limit is None or free < requests_left):
            requests_limit, requests_left = limit, free
        limit = window.limit
        if limit is not None and (tokens_limit is None or tokens_free < tokens_left):
            tokens_limit, tokens_left = limit, tokens_free
    slot = second % SLOTS
    for account in accounts:
        window = account.requests
        window.slots[slot] += 1
        window.used += 1
        window = account.tokens
        window.slots[slot] += tokens
        window.used += tokens
        account.in_flight += 1
    stands = (requests_limit, requests_left, tokens_limit, tokens_left)
    return Charge(accounts, tokens, second, _new_standing(LimitStanding, stands))


def adopt(accounts: Sequence[Account], tokens: int, now_s: float) -> Charge:
    """Charge a request that is being served already, whatever the limits are."""
    second = int(now_s)
    for account in accounts:
        for window, amount in ((account.requests, 1), (account.tokens, tokens)):
            window.advance(second)
            window.use(amount)
        account.in_flight += 1
    return Charge(accounts, tokens, second, standing(accounts))


def standing(accounts: Sequence[Account]) -> LimitStanding:
    """How the client with these accounts stands, as of the last request."""
    requests, tokens = (
        min(
            ((w.remaining(), w.limit) for w in windows if w.limit is not None),
            key=lambda left: left[0],
            default=(0, None),
        )
        for windows in ([a.requests for a in accounts], [a.tokens for a in accounts])
    )
    return LimitStanding(requests[1], requests[0], tokens[1], tokens[0])
