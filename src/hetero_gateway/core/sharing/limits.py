"""Clients' usage at other gateways, so that limits hold over all of them. Pure.

Each gateway reports what its own accounts have used within the last minute and have in flight; the
others' reports are added up into each account's ``others``. As with loads, there is no common
total: a message has everything again, or, as news, the accounts that have changed.

A limit is exceeded by no more than what the other gateways admit until they have heard, which is
``news_s`` and a trip through the store. For a gateway that is gone, requests in flight are
forgotten with its lease, and usage counts for a minute, as always.

A peer may be broken or hostile, and only its own word says what a client has used there. So reports
of the others count up to a limit, not beyond it; and once they alone have locked a client out for
``MOST_CROWDED_S``, this gateway grants a share of the limit: by the number of gateways, up to
``_MOST_SHARERS``, and at least one request. Among honest gateways that is fair: those that admitted
everything hear of what this one grants, and admit less. Until then the limit is exceeded by that
share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from hetero_gateway.core.limits.accounts import Account
from hetero_gateway.core.limits.window import SLOTS
from hetero_gateway.core.sharing.message import ACCOUNT_FIELDS, Keys, Message, Rows

_NOTHING = (0, 0, 0)
# Twice the minute that a request counts for; for requests in flight, a request's likely duration.
MOST_CROWDED_S = (2 * SLOTS, 2 * SLOTS, 600)
_MOST_SHARERS = 16
# A gateway whose name keeps changing counts as this many that are gone.
_MOST_OTHERS = 256
_Used = tuple[int, int, int]


def account_key(name: str) -> int:
    """The account's name for all replicas: 8 bytes of a hash."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class _Other:
    """Another gateway's report. ``gone``: it counts until its minute is over."""

    __slots__ = ("gone", "heard_s", "sequence", "used")

    def __init__(self) -> None:
        self.sequence = 0
        self.heard_s = 0.0
        self.gone = False
        self.used: dict[int, _Used] = {}


class SharedLimits:
    """One gateway's side of shared limits.

    Args:
        accounts: the present ones.
    """

    def __init__(self, accounts: Callable[[], Iterable[Account]]) -> None:
        self._accounts = accounts
        self._keys: dict[str, int] = {}
        self._said: dict[int, _Used] = {}
        self._others: dict[str, _Other] = {}
        self._applied: set[int] = set()
        # Since when the others leave less than a share, by account and by limit.
        self._crowded_s: dict[tuple[int, int], float] = {}

    def changed(self, now_s: float) -> bool:
        """Whether anything has changed since the last report."""
        return self._used(now_s) != self._said

    def say(self, now_s: float, *, whole: bool) -> tuple[Keys, Rows]:
        """The usage of each account here: all that have used anything, or those that changed."""
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
        """Take another gateway's report; one older than the last has no effect.

        Clients unknown here are dropped: the next complete message has them again.
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
        """Note that it is gone: its requests have ended."""
        if replica in self._others:
            self._others[replica].gone = True

    def apply(self, now_s: float) -> None:
        """Make the accounts count the others' usage."""
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
