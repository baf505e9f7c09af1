"""What clients have used at other gateways, so that limits hold over all of them. Pure.

Each gateway says what its own accounts have used within the last minute and have in flight; what
the others say is added up into each account's ``others``. As with loads, there is no common total:
a message says all again, or, as news, of the accounts that have changed.

A limit is passed by no more than what the other gateways let in until they have heard, which is a
``news_s`` and a trip through the store. Of a gateway that is gone, what is in flight is forgotten
with its lease, and what was used counts for a minute, like everything.

A peer may be broken or hostile, and nothing but its word says what a client has used there. So what
the others report counts up to a limit, not beyond it; and where it alone has kept a client out for
``MOST_CROWDED_S``, this gateway grants a share of the limit: by the number of gateways, as far as
``_MOST_SHARERS``, and at least one. Among honest gateways that is fair: those that have let in all
hear of what this one grants, and let in less. Until then the limit is passed by that share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from hetero_gateway.core.limits.accounts import Account
from hetero_gateway.core.limits.window import SLOTS
from hetero_gateway.core.sharing.message import ACCOUNT_FIELDS, Keys, Message, Rows

_NOTHING = (0, 0, 0)
# Twice the minute that a request counts for; of requests in flight, what one may last.
MOST_CROWDED_S = (2 * SLOTS, 2 * SLOTS, 600)
_MOST_SHARERS = 16
# A gateway whose name changes all the time is as many that are gone.
_MOST_OTHERS = 256
_Used = tuple[int, int, int]


def account_key(name: str) -> int:
    """Names an account to all replicas: 8 bytes of a hash."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class _Other:
    """What another gateway has said. ``gone``: it counts until its minute is over."""

    __slots__ = ("gone", "heard_s", "sequence", "used")

    def __init__(self) -> None:
        self.sequence = 0
        self.heard_s = 0.0
        self.gone = False
        self.used: dict[int, _Used] = {}


class SharedLimits:
    """One gateway's side.

    Args:
        accounts: those that there are now.
    """

    def __init__(self, accounts: Callable[[], Iterable[Account]]) -> None:
        self._accounts = accounts
        self._keys: dict[str, int] = {}
        self._said: dict[int, _Used] = {}
        self._others: dict[str, _Other] = {}
        self._applied: set[int] = set()
        # Since when the others leave less than a share, by account and by which of its limits.
        self._crowded_s: dict[tuple[int, int], float] = {}

    def changed(self, now_s: float) -> bool:
        """Whether there is anything to say since the last time."""
        return self._used(now_s) != self._said

    def say(self, now_s: float, *, whole: bool) -> tuple[Keys, Rows]:
        """What each account has used here: all that have used anything, or those that changed."""
        told = used = self._used(now_s)
        if not whole:
            told = {key: each for key, each in used.items() if self._said.get(key) != each}
            told |= dict.fromkeys(self._said.keys() - used.keys(), _NOTHING)
        self._said = used
        keys = np.fromiter(told, np.uint64, len(told))
        rows = np.array([*told.values()], dtype=float).reshape(len(told), ACCOUNT_FIELDS)
        return keys, rows

    def _used(self, now_s: float) -> dict[int, _Used]:
        result, second = {}, int(now_s)
        for account in self._accounts():
            account.requests.advance(second)
            account.tokens.advance(second)
            used = (account.requests.used, account.tokens.used, account.in_flight)
            if used != _NOTHING:
                result[self._key_of(account.name)] = used
        return result

    def hear(self, replica: str, message: Message, now_s: float) -> None:
        """What another gateway says; what is older than what it has said counts for nothing.

        Of clients that are not known here nothing is kept: the next whole message says it again.
        """
        other = self._others.pop(replica, None) or _Other()
        self._others[replica] = other
        if len(self._others) > _MOST_OTHERS:
            gone = (name for name, each in self._others.items() if each.gone)
            del self._others[next(gone, next(iter(self._others)))]
        if message.sequence <= other.sequence:
            return
        other.sequence, other.heard_s, other.gone = message.sequence, now_s, False
        if message.whole:
            other.used = {}
        if not message.account_keys.size:
            return
        known = {self._key_of(account.name) for account in self._accounts()}
        for key, row in zip(message.account_keys.tolist(), message.accounts.tolist(), strict=True):
            if key in known:
                other.used[key] = (int(row[0]), int(row[1]), int(row[2]))

    def forget(self, replica: str) -> None:
        """It is gone: its requests are over."""
        if replica in self._others:
            self._others[replica].gone = True

    def apply(self, now_s: float) -> None:
        """Have the accounts count what the others have used."""
        over = [n for n, o in self._others.items() if o.gone and now_s - o.heard_s >= SLOTS]
        for name in over:
            del self._others[name]
        sums: dict[int, list[int]] = {}
        living = 0
        for other in self._others.values():
            living += not other.gone
            for key, (requests, tokens, in_flight) in other.used.items():
                entry = sums.setdefault(key, [0, 0, 0])
                entry[0] += requests
                entry[1] += tokens
                entry[2] += 0 if other.gone else in_flight
        if not sums and not self._applied:
            return
        self._applied = set(sums)
        crowded_s, self._crowded_s = self._crowded_s, {}
        sharers = min(living + 1, _MOST_SHARERS)
        for account in self._accounts():
            key = self._key_of(account.name)
            used = sums.get(key)
            if used is None:
                account.requests.others = account.tokens.others = account.others_in_flight = 0
                continue
            limits = account.requests.limit, account.tokens.limit, account.concurrency
            for which, limit in enumerate(limits):
                if limit is None:
                    continue
                left = limit - max(1, limit // sharers)
                if used[which] > left:
                    since_s = crowded_s.get((key, which), now_s)
                    self._crowded_s[key, which] = since_s
                    lasts = now_s - since_s >= MOST_CROWDED_S[which]
                    used[which] = left if lasts else min(used[which], limit)
            account.requests.others, account.tokens.others, account.others_in_flight = used

    def _key_of(self, name: str) -> int:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = account_key(name)
        return key
