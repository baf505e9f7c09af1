"""What each client has used, by day and model, and what it was refused.

Counted once per request, as it is over: tokens as its engine stated them where that can be true,
else as they were estimated and seen. Kept in memory for a month of days that had requests; what has
to outlast a restart is read from the metrics, or from the CSV once a day.
"""

from __future__ import annotations

import csv
import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

_DAY_S = 86400
_MOST_DAYS = 31
# Clients that have no label of their own in metrics.
OTHER = "other"
# (requests, input tokens, cached ones of them, output tokens)
Amounts = tuple[int, int, int, int]


class UsageRow(NamedTuple):
    """What a client has used of a model on a day (UTC); ``client``: its name."""

    day: str
    client: str
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class Usage:
    """Counts. ``denied``: refusals, by client and limit.

    Args:
        clock: the time since 1970 in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # By day, and by client and model; of days that are not kept any more, all together.
        self._days: dict[int, dict[tuple[str, str], list[int]]] = {}
        self._earlier: dict[tuple[str, str], list[int]] = {}
        self._today: dict[tuple[str, str], list[int]] = {}
        self._until_s = -1.0  # that is today
        self.denied: Counter[tuple[str, str]] = Counter()

    def count(
        self, client: str, model: str, input_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """One request of a client that has a name."""
        now_s = self._clock()
        if now_s >= self._until_s:
            day = int(now_s // _DAY_S)
            self._until_s = (day + 1.0) * _DAY_S
            self._today = self._rows_of(day)
        entry = self._today.get((client, model))
        if entry is None:
            entry = self._today[client, model] = [0, 0, 0, 0]
        entry[0] += 1
        entry[1] += input_tokens
        entry[2] += cached_tokens
        entry[3] += output_tokens

    def _rows_of(self, day: int) -> dict[tuple[str, str], list[int]]:
        rows = self._days.setdefault(day, {})
        for old in sorted(self._days)[:-_MOST_DAYS]:
            for key, amounts in self._days.pop(old).items():
                _add(self._earlier, key, amounts)
        return rows

    def take(self) -> list[tuple[int, str, str, Amounts]]:
        """All that was counted; it begins anew. For who counts elsewhere (``add``)."""
        days, self._days = self._days, {}
        self._until_s = -1.0
        return [
            (day, client, model, (a, b, c, d))
            for day, rows in days.items()
            for (client, model), (a, b, c, d) in rows.items()
        ]

    def add(self, taken: Iterable[tuple[int, str, str, Amounts]]) -> None:
        """What another process has counted."""
        for day, client, model, amounts in taken:
            _add(self._rows_of(day), (client, model), amounts)

    def rows(self) -> Iterator[UsageRow]:
        """By day, oldest first, and within it by client and model."""
        for day in sorted(self._days):
            date = datetime.fromtimestamp(day * _DAY_S, UTC).date().isoformat()
            for (client, model), (a, b, c, d) in sorted(self._days[day].items()):
                yield UsageRow(date, client, model, a, b, c, d)

    def totals(self) -> dict[tuple[str, str], list[int]]:
        """(requests, input, cached, output tokens) since the start, by (client, model)."""
        sums: dict[tuple[str, str], list[int]] = {}
        for rows in (self._earlier, *self._days.values()):
            for key, amounts in rows.items():
                _add(sums, key, amounts)
        return sums

    def of_client(self, name: str) -> dict[str, Any]:
        """Its sums since the start."""
        mine = [entry for (client, _), entry in self.totals().items() if client == name]
        sums = [sum(column) for column in zip(*mine, strict=True)] or [0, 0, 0, 0]
        names = ("requests", "input_tokens", "cached_tokens", "output_tokens")
        denied = {limit: n for (client, limit), n in self.denied.items() if client == name}
        return {**dict(zip(names, sums, strict=True)), "denied": denied}


def _add(
    rows: dict[tuple[str, str], list[int]], key: tuple[str, str], amounts: Iterable[int]
) -> None:
    entry = rows.setdefault(key, [0, 0, 0, 0])
    for i, amount in enumerate(amounts):
        entry[i] += amount


def as_csv(rows: Iterable[UsageRow], groups: dict[str, str]) -> str:
    """Rows with a head; ``groups``: of clients that have one."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("day", "client", "group", *UsageRow._fields[2:]))
    for row in rows:
        writer.writerow((row.day, row.client, groups.get(row.client, ""), *row[2:]))
    return text.getvalue()
