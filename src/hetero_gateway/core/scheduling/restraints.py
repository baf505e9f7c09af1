"""Holds requests back from eligible instances that fail, or did a moment ago.

An instance is here only while ``Outcomes`` says so, which is rare, so this is asked after
eligibility and not as a part of it: while no instance is here, a decision costs one look at an
empty mapping. It never refuses a first attempt. If all are barred, those with the lowest rank take
part as if nothing had happened; only a second attempt goes nowhere rather than to an instance that
fails.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.outcomes import (
    RETRY_RANK,
    Bar,
    BreakerState,
    Outcomes,
    is_quick,
)
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.pool import Eligible
from hetero_gateway.core.types import InstanceId, Reject, RejectReason

_MOST_NAMED: Final = 5


class Restraints:
    """The instances whose circuit breaker is not closed. ``by_id``: their outcomes."""

    __slots__ = ("_last", "by_id")

    def __init__(self) -> None:
        self.by_id: dict[InstanceId, Outcomes] = {}
        # The last result, and the instances it was computed from: the next one is usually the same.
        self._last: tuple[Eligible, dict[int, Bar], Eligible | None] | None = None

    def __repr__(self) -> str:
        return f"<Restraints {self.by_id!r}>"

    def heed(self, instance_id: InstanceId, outcomes: Outcomes) -> None:
        """Restrain an instance while its circuit breaker is not closed."""
        if outcomes.breaker is BreakerState.CLOSED:
            self.by_id.pop(instance_id, None)
        else:
            self.by_id[instance_id] = outcomes

    def judge(
        self, eligible: Eligible, request: Request, exclude: Collection[InstanceId], now_s: float
    ) -> Eligible | Reject:
        """Those that may take part now. Reject: a second attempt has nowhere to go."""
        barred = self._barred(eligible, bool(exclude) or is_quick(request), now_s)
        if not barred:
            return eligible
        left = self._without(eligible, barred)
        if left is not None:
            return left
        rank = min(bar.rank for bar in barred.values())
        if exclude and rank > RETRY_RANK:
            ids = eligible.pool.ids
            why = ", ".join(f"{ids[i]} {bar.why}" for i, bar in [*barred.items()][:_MOST_NAMED])
            detail = f"no other instance can take the request now: {why}"
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, detail)
        worse = {position: bar for position, bar in barred.items() if bar.rank > rank}
        left = self._without(eligible, worse) if worse else eligible
        return left or eligible

    def strictly(self, eligible: Eligible, request: Request, now_s: float) -> Eligible | None:
        """Those that are not barred; None: none."""
        barred = self._barred(eligible, is_quick(request), now_s)
        return self._without(eligible, barred) if barred else eligible

    def trial(self, eligible: Eligible) -> Eligible | None:
        """A half-open instance among these unbarred ones, alone; None: there is none.

        It is tried, and not left to the policy: one that looks slow would stay half-open for ever.
        """
        for position, outcomes in self._here(eligible):
            if outcomes.breaker is BreakerState.HALF_OPEN:
                others = [i for i in eligible.positions() if i != position]
                name = eligible.pool.ids[position]
                return eligible.without(others, f"{name} is tried after its ejection")
        return None

    def _here(self, eligible: Eligible) -> list[tuple[int, Outcomes]]:
        """Restrained instances among these, by position in the pool: usually few of many."""
        position_of = eligible.pool.position
        return sorted(
            (position, outcomes)
            for instance_id, outcomes in self.by_id.items()
            if (position := position_of.get(instance_id)) is not None and eligible.has(position)
        )

    def _barred(self, eligible: Eligible, quick: bool, now_s: float) -> dict[int, Bar]:
        """Barred instances, by position in the pool."""
        barred, states = {}, eligible.pool.states
        for position, outcomes in self._here(eligible):
            bar = outcomes.bar(now_s, states[position].in_flight, quick=quick)
            if bar is not None:
                barred[position] = bar
        return barred

    def _without(self, eligible: Eligible, barred: dict[int, Bar]) -> Eligible | None:
        if self._last is not None and self._last[0] is eligible and self._last[1] == barred:
            return self._last[2]
        pool, kept = eligible.pool, [i for i in eligible.positions() if i not in barred]
        out = tuple((pool.specs[position], bar.why) for position, bar in barred.items())
        left = Eligible(pool, kept, eligible.excluded + out) if kept else None
        self._last = eligible, barred, left
        return left

    def sent(self, dispatch: Dispatch, now_s: float) -> None:
        """Note that a request went to an instance: it may be a trial."""
        outcomes = self.by_id.get(dispatch.instance_id)
        if outcomes is not None:
            outcomes.sent(dispatch, now_s)

    def next_change_s(self, now_s: float) -> float:
        """When an instance here may get requests again without an event; infinite: none.

        A slow start grows all the time; once a second is soon enough.
        """
        times = [
            min(o.until_s, now_s + 1.0) if o.breaker is BreakerState.SLOW_START else o.until_s
            for o in self.by_id.values()
        ]
        return min(times, default=math.inf)
