"""Counts what each client uses, by day and model, and its refusals.

Each request is counted once, when it has ended: tokens as its engine reported them if plausible,
otherwise as estimated and seen. A month of days with requests is kept in memory;
``serve/usage/keeper`` saves what outlasts a restart.
"""

from __future__ import annotations

import csv
import heapq
import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

_DAY_S = 86400
# Sorted at once, in one uninterrupted call: some milliseconds.
_SORTED_AT_ONCE = 10_000
MOST_DAYS = 31
# Clients without a label of their own in metrics, and models beyond ``_MOST_ROWS``.
OTHER = "other"
# Per day, and for everything older: 10 000 clients with 30 models, and adapters that come and go.
_MOST_ROWS = 300_000
# (requests, input tokens, cached ones of them, output tokens)
Amounts = tuple[int, int, int, int]
NO_AMOUNTS: Amounts = (0, 0, 0, 0)
# Tuples of numbers, which the garbage collector does not traverse: with 100 000 lists, each of its
# passes would delay every stream by 80 ms.
_Rows = dict[tuple[str, str], Amounts]


class UsageRow(NamedTuple):
    """A client's usage of a model on a day (UTC); ``client``: its name."""

    day: str
    client: str
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class KeptRow(NamedTuple):
    """The same in stored form; ``day``: since 1970."""

    day: int
    client: str
    model: str
    amounts: Amounts


class UsageStoreError(Exception):
    """The usage store cannot be written or read. The text says where and why."""


class ClientUsage:
    """Usage counts. ``denied``: refusals, by client and limit.

    Args:
        clock: the time since 1970 in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # By day, and by client and model; days that are no longer kept, all together.
        self._days: dict[int, _Rows] = {}
        self._earlier: _Rows = {}
        self._today: _Rows = {}
        self._until_s = -1.0  # that is today
        self.denied: Counter[tuple[str, str]] = Counter()

    def count(
        self, client: str, model: str, input_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """Count one request of a named client."""
        now_s = self._clock()
        if now_s >= self._until_s:
            day = int(now_s // _DAY_S)
            self._until_s = (day + 1.0) * _DAY_S
            self._today = self._rows_of(day)
        today, key = self._today, (client, model)
        amounts = today.get(key)
        if amounts is None:
            if len(today) >= _MOST_ROWS:
                key = client, OTHER
            amounts = today.get(key, NO_AMOUNTS)
        requests, before, cached_before, output_before = amounts
        today[key] = (
            requests + 1,
            before + input_tokens,
            cached_before + cached_tokens,
            output_before + output_tokens,
        )

    def _rows_of(self, day: int) -> _Rows:
        rows = self._days.setdefault(day, {})
        for old in sorted(self._days)[:-MOST_DAYS]:
            for key, amounts in self._days.pop(old).items():
                _add(self._earlier, key, amounts)
        return rows

    def take(self) -> list[tuple[int, str, str, Amounts]]:
        """Take all counts and start over: for a process whose counts another one adds (``add``)."""
        days, self._days = self._days, {}
        self._until_s = -1.0
        return [
            (day, client, model, amounts)
            for day, rows in days.items()
            for (client, model), amounts in rows.items()
        ]

    def counted(self) -> dict[tuple[int, str, str], Amounts]:
        """All counts, by day, client and model. May run in a thread."""
        return {
            (day, client, model): amounts
            for day, rows in tuple(self._days.items())
            for (client, model), amounts in tuple(rows.items())
        }

    def add(self, taken: Iterable[tuple[int, str, str, Amounts]]) -> None:
        """Add another process's counts."""
        for day, client, model, amounts in taken:
            _add(self._rows_of(day), (client, model), amounts)

    def days(self) -> list[int]:
        """The days that are kept, oldest first, as days since 1970."""
        return sorted(self._days)

    def rows(self, day: int, elsewhere: Iterable[KeptRow] = ()) -> Iterator[UsageRow]:
        """The counts of one day, by client and model. May run in a thread; concurrent requests may
        or may not be included. ``elsewhere``: counts of that day to be added.
        """
        date = datetime.fromtimestamp(day * _DAY_S, UTC).date().isoformat()
        entries = tuple(self._days.get(day, {}).items())
        if elsewhere:
            sums = dict(entries)
            for row in elsewhere:
                key = row.client, row.model
                sums[key] = added(sums.get(key, NO_AMOUNTS), row.amounts)
            entries = tuple(sums.items())
        parts = (
            sorted(entries[start : start + _SORTED_AT_ONCE])
            for start in range(0, len(entries), _SORTED_AT_ONCE)
        )
        for (client, model), (a, b, c, d) in heapq.merge(*parts):
            yield UsageRow(date, client, model, a, b, c, d)

    def entries(self) -> Iterator[tuple[tuple[str, str], Amounts]]:
        """((client, model), amounts) of each day and of older ones; counting may go on."""
        for rows in (self._earlier, *self._days.values()):
            yield from tuple(rows.items())


def added(before: Amounts, more: Amounts) -> Amounts:
    """The sum of both."""
    a, b, c, d = before
    return a + more[0], b + more[1], c + more[2], d + more[3]


def _add(rows: _Rows, key: tuple[str, str], amounts: Amounts) -> None:
    if key not in rows and len(rows) >= _MOST_ROWS:
        key = key[0], OTHER
    rows[key] = added(rows.get(key, NO_AMOUNTS), amounts)


CSV_HEAD = ",".join(("day", "client", "group", *UsageRow._fields[2:])) + "\n"


def as_csv(rows: Iterable[UsageRow], groups: dict[str, str]) -> str:
    """Rows, to follow ``CSV_HEAD``; ``groups``: of clients that have one."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow((row.day, row.client, groups.get(row.client, ""), *row[2:]))
    return text.getvalue()
