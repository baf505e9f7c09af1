"""Estimates the non-batch traffic of each instance from counters polled over time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from hetero_gateway.core.batches.shares import Interactive
from hetero_gateway.core.types import InstanceId

# Rates: an increase beyond so many deviations of chance is noticed early; a decrease late.
_SOON_S, _LATE_S, _DEVIATIONS = 10.0, 60.0, 3.0
_LENGTHS_S: Final = 300.0
# Traffic unseen for this long counts as gone.
_QUIET_S: Final = 120.0
_USUAL = (512.0, 256.0)


class InstanceCounts(NamedTuple):
    """Counters of one instance: requests sent and answered, and tokens of the answered ones.

    ``there``: requests there now.
    """

    sent: int
    answered: int
    prompt_tokens: int
    output_tokens: int
    there: int


class _Rates:
    __slots__ = ("answered", "before", "late", "output", "prompt", "soon", "watched_s")

    def __init__(self, before: InstanceCounts) -> None:
        self.before = before
        self.watched_s = 0.0
        self.soon = self.late = 0.0
        # Exponentially decaying sums.
        self.answered = self.prompt = self.output = 0.0

    def per_s(self) -> tuple[float, float]:
        """(early, late) rates. Time that was not watched counts as having been like the rest."""
        if not self.watched_s:
            return 0.0, 0.0
        return (
            self.soon / (1 - math.exp(-self.watched_s / _SOON_S)),
            self.late / (1 - math.exp(-self.watched_s / _LATE_S)),
        )


class Others:
    """Rates and lengths of non-batch requests, by instance."""

    def __init__(self) -> None:
        self._rates: dict[InstanceId, _Rates] = {}
        self._looked_s = math.nan
        self._asked_s = -math.inf

    def look(self, counts: Mapping[InstanceId, InstanceCounts], now_s: float) -> None:
        """Take new counters of all instances: about once a second, also while no batch runs."""
        for gone in [each for each in self._rates if each not in counts]:
            del self._rates[gone]
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        for each, now in counts.items():
            rates = self._rates.get(each)
            if now.there:
                self._asked_s = now_s
            if rates is None or not passed_s > 0:
                self._rates[each] = rates or _Rates(now)
                continue
            before, rates.before = rates.before, now
            # Counters that restarted say nothing.
            sent = max(0, now.sent - before.sent)
            rates.watched_s += passed_s
            if sent:
                self._asked_s = now_s
            for name, over_s in (("soon", _SOON_S), ("late", _LATE_S)):
                weight = 1 - math.exp(-passed_s / over_s)
                rate = getattr(rates, name)
                setattr(rates, name, rate + weight * (sent / passed_s - rate))
            kept = math.exp(-passed_s / _LENGTHS_S)
            rates.answered = kept * rates.answered + max(0, now.answered - before.answered)
            rates.prompt = kept * rates.prompt + max(0, now.prompt_tokens - before.prompt_tokens)
            rates.output = kept * rates.output + max(0, now.output_tokens - before.output_tokens)

    def on(self, instances: Iterable[InstanceId], now_s: float) -> Interactive:
        """Traffic to all of these together; an infinite rate before anything was watched."""
        those = [self._rates[each] for each in instances if each in self._rates]
        if not any(each.watched_s for each in those):
            return Interactive(math.inf, *_USUAL)
        if now_s - self._asked_s > _QUIET_S:
            return Interactive(0.0, *_USUAL)
        rates = [each.per_s() for each in those]
        soon, late = sum(each[0] for each in rates), sum(each[1] for each in rates)
        # More than chance: of a weighted mean over T of independent arrivals, by √(rate / 2T).
        chance = _DEVIATIONS * math.sqrt(late / (2 * _SOON_S))
        rate = soon if soon > late + chance else late
        answered = sum(r.answered for r in those)
        if answered < 1:
            return Interactive(rate, *_USUAL)
        prompt, output = sum(r.prompt for r in those), sum(r.output for r in those)
        return Interactive(rate, max(1.0, prompt / answered), output / answered)
