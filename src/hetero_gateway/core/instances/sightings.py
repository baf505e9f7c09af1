"""Observed rows of one engine, kept until the cached part of their prompts is known.

A row of steps, or of a first token, can be used once it is known how much of its prompts the engine
had to compute: at the ends of its requests, or at the next scrape (``prefix_hits.py``).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.observation import FirstTokenRow, Observations, StepRow
from hetero_gateway.core.instances.prefix_hits import Interval, PrefixHits, reported_hits
from hetero_gateway.core.types import COMPLETED, Usage

# Rows, about one a second, that wait for their requests to end.
_MOST_AWAITED: Final = 1024


class Sightings:
    """The rows of one instance, and what completes them.

    ``prefix``: what is known of its prefix cache; ``observations``: the rows, of which only
    complete ones may be used.
    """

    __slots__ = ("_awaited", "observations", "prefix")

    def __init__(self) -> None:
        self.prefix = PrefixHits()
        self.observations = Observations()
        self._awaited: deque[Interval] = deque()  # their rows are not complete

    def keep_steps(self, row: StepRow, interval: Interval) -> None:
        """Keep a row of decode steps, over this interval."""
        number = self.observations.add_steps(row)
        if row.known:
            return
        interval.row, interval.number = row, number
        awaited = self._awaited
        awaited.append(interval)
        while awaited and (awaited[0].number < 0 or len(awaited) > _MOST_AWAITED):
            awaited.popleft().number = -1

    def keep_first_token(
        self, entry: Dispatch, before: tuple[float, float, float, float, float], now_s: float
    ) -> None:
        """Keep a first token; ``before``: when it was placed, and the load then (``Dispatch``)."""
        placed_s, waiting, tokens, streaming, context = before
        if now_s <= placed_s:
            return
        row = FirstTokenRow(
            now_s - placed_s,
            entry.request.sequences,
            entry.prompt_tokens,
            waiting,
            tokens,
            streaming,
            context / streaming if streaming else 0.0,
        )
        if self.prefix.off:
            self.observations.add_first_token(row)
        else:
            entry.first_token = row

    def end(self, entry: Dispatch, usage: Usage | None) -> None:
        """Note the end of a request, and what its answer reported as cached, if anything."""
        prefix = self.prefix
        if usage is not None and usage.cached_tokens is not None:
            entry.hit_tokens = reported_hits(entry, usage)
        if entry.outcome is COMPLETED and (entry.hit_tokens is not None or prefix.counts):
            prefix.end(entry)
        interval, entry.interval = entry.interval, None
        if interval is not None:
            interval.open -= 1
            if entry.hit_tokens is not None:
                interval.hit_tokens += entry.hit_tokens
                interval.untold -= 1
                interval.untold_tokens -= entry.prompt_tokens
                interval.untold_charged -= entry.prefill_tokens
            if interval.untold == 0 and interval.number >= 0:
                self.observations.complete(interval.number, interval.shown * interval.hit_tokens)
                interval.number = -1
        row, entry.first_token = entry.first_token, None
        if row is not None:
            hit_tokens = entry.hit_tokens
            if hit_tokens is None:
                # A share of many prompts says nothing about one, unless it is none.
                hit_tokens = 0.0 if prefix.none_hit else math.nan
            self.observations.add_first_token(row._replace(hit_tokens=hit_tokens))

    def scraped(self, now_s: float) -> None:
        """Take the engine's counters: they complete the rows that no answer completes."""
        prefix = self.prefix
        ratio = prefix.scraped_ratio
        spans: dict[float, list[Interval]] = {}  # by the scrape that ended them
        for interval in self._awaited:
            if interval.number < 0:
                continue
            if interval.ratio is None:
                interval.ratio, interval.scraped_s = ratio, now_s
            spans.setdefault(interval.scraped_s, []).append(interval)
        self._awaited = deque()
        for intervals in spans.values():
            if prefix.answers_tell and any(interval.open for interval in intervals):
                self._awaited += intervals  # their answers may report it
            elif intervals[0].ratio is not None:
                self._merge(intervals)

    def _merge(self, intervals: list[Interval]) -> None:
        """Complete these intervals by the counters, where no answer reported hits."""
        rows, number = [], intervals[0].number
        for interval in intervals:
            assert interval.row is not None
            hit_tokens = interval.shown * interval.hits(interval.ratio)
            rows.append(interval.row._replace(hit_tokens=hit_tokens))
            interval.number = -1
        if len(rows) == 1:
            self.observations.complete(number, rows[0].hit_tokens)
        else:
            self.observations.add_merged(rows)
