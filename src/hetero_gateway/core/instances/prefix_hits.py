"""How much of the prompts an engine found in its prefix cache, and so did not prefill.

vLLM keeps the KV blocks of prompts and skips what a new prompt shares with them. If those tokens
counted as prefilled, every machine with such a cache would look faster than it is. Three sources
say how many there were, and each has its limits:

    source               what it says                            exact
    -------------------  --------------------------------------  ----------------------------------
    ``usage``            the cached tokens of one answer, at     for one sequence; of several, the
                         its end                                 engine reports one's
    counters             tokens queried and hit, of the whole    as a sum over a scrape's interval,
                         engine, at each scrape                  of all its clients
    caching is off       that there are none                     yes

A prompt is prefilled when its request begins, and its cached part is known when that ends. So a row
of observation (a second or so, ``observation.py``) is complete only when all requests with prompts
in it have ended; until then it has no ``hit_tokens`` and is not used. Rows with prompts whose
answers report nothing are merged into one for each interval between two scrapes, with that
interval's share by the counters; engines are scraped where rows end. That is right except for
prompts that were counted on one side of a scrape and had their first token on the other, and for
other clients of the engine. Without counters such rows stay incomplete for good: nothing is
assumed that nothing reports.

The speed factor cannot wait. It uses what has ended, and for all others ``ratio``: the recent share
of charged tokens that was prefilled. That is right on average, but a single second with a long
uncached prompt may look slow.

Prompts of other gateways (``PeerLoad``) are known by the counters alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

from hetero_gateway.core.instances.observation import StepRow
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Usage

# Of the counters: long compared with a scrape, so that a prompt counted in one interval with its
# first token in the next does no harm; short compared with a change of traffic.
_FORGET_S: Final = 20.0
# The weight, in tokens, of what an engine counted before it was first scraped.
_PRIOR_TOKENS: Final = 4096.0
# Of answers, per answer.
_KEEP: Final = 0.98


class Prompted(Protocol):
    """The prompts of a dispatch; tokens of all its sequences."""

    request: Request
    prompt_tokens: int
    prefill_tokens: float  # charged
    hit_tokens: float | None  # as its answer reported


class PrefixHits:
    """What is known of one engine's prefix cache. Nothing here reads a clock.

    ``off``: it certainly has none. ``counts``: whether the engine's counters are known. ``ratio``:
    recently prefilled tokens per charged token; None: unknown.
    ``predicted_tokens``, ``actual_tokens``: of all completed prompts with known hits, since the
    engine was first seen: tokens charged as cached, and tokens that were.
    """

    __slots__ = (
        "_caching",
        "_charged",
        "_counted",
        "_hits",
        "_lately",
        "_prompts",
        "_queries",
        "_told_charged",
        "_told_prefilled",
        "actual_tokens",
        "counts",
        "off",
        "predicted_tokens",
        "ratio",
    )

    def __init__(self) -> None:
        self.predicted_tokens = 0.0
        self.actual_tokens = 0.0
        # The engine's counters (queries, hits), our own sums of prompt tokens, whole and charged,
        # and their time; None: it has none.
        self._counted: tuple[float, float, float, float, float] | None = None
        self.counts = False
        self._lately: float | None = None  # the ratio between the last two scrapes
        # The same, with forgetting.
        self._queries = self._hits = self._prompts = self._charged = 0.0
        # Of answers that reported hits.
        self._told_prefilled = self._told_charged = 0.0
        # What every request asks for is computed when it changes.
        self.ratio: float | None = None
        self.caching = False  # unless told otherwise

    @property
    def caching(self) -> bool | None:
        """Whether it has a prefix cache; None: not known."""
        return self._caching

    @caching.setter
    def caching(self, caching: bool | None) -> None:
        self._caching = caching
        self.off = caching is False
        self._set_ratio()

    @property
    def share(self) -> float | None:
        """Recent hits over queried tokens, 0 to 1, by the counters; None: unknown."""
        if self.off:
            return 0.0
        if not self.counts:
            return None
        return self._hits / self._queries if self._queries > 0 else 0.0

    def _set_ratio(self) -> None:
        if self.off:
            self.ratio = 1.0
        elif self.counts:
            missed = 1.0 if self._queries <= 0 else 1 - self._hits / self._queries
            self.ratio = missed if self._charged <= 0 else missed * (self._prompts / self._charged)
        elif self._told_charged > 0:
            self.ratio = self._told_prefilled / self._told_charged
        else:
            self.ratio = None

    @property
    def scraped_ratio(self) -> float | None:
        """``ratio`` between the last two scrapes; None: there are no counters."""
        return self._lately if self.counts else None

    @property
    def answers_tell(self) -> bool:
        """Whether any answer has reported its cached tokens."""
        return self._told_charged > 0

    @property
    def none_hit(self) -> bool:
        """Whether the counters had no recent hits: then no single prompt was cached."""
        return self.counts and self._hits == 0

    def count(
        self,
        counters: tuple[float, float] | None,
        prompt_tokens: float,
        charged_tokens: float,
        now_s: float,
    ) -> bool:
        """Take a scrape's counters; returns whether the engine has restarted since the last one.

        Args:
            counters: tokens queried and hit since it started; None: not reported.
            prompt_tokens, charged_tokens: of prompts that we had prefilled, whole, and as charged;
                both counted since the beginning.
        """
        self.counts = counters is not None
        if counters is None:
            self._counted = None
            self._set_ratio()
            return False
        queries, hits = counters
        known = self._counted
        self._counted = (queries, hits, prompt_tokens, charged_tokens, now_s)
        if known is None or queries < known[0] or hits < known[1]:
            # The first scrape; or it has restarted, and its cache is empty.
            worth = min(1.0, _PRIOR_TOKENS / queries) if queries > 0 else 0.0
            self._queries, self._hits = worth * queries, worth * min(hits, queries)
            self._prompts = self._charged = 0.0
            if known is not None:
                self._told_prefilled = self._told_charged = 0.0
            self._set_ratio()
            self._lately = self.ratio
            return known is not None
        keep = math.exp(-max(0.0, now_s - known[4]) / _FORGET_S)
        queried, prompts = queries - known[0], prompt_tokens - known[2]
        found, charged = min(hits - known[1], queried), charged_tokens - known[3]
        self._queries = keep * self._queries + queried
        self._hits = keep * self._hits + found
        self._prompts = keep * self._prompts + prompts
        self._charged = keep * self._charged + charged
        self._set_ratio()
        self._lately = self.ratio
        if queried > 0 and charged > 0:
            self._lately = (1 - found / queried) * (prompts / charged)
        return False

    def end(self, entry: Prompted) -> None:
        """Note a completed request; ``entry.hit_tokens`` is what its answer reported, if
        anything."""
        prompt, charged, hits = entry.prompt_tokens, entry.prefill_tokens, entry.hit_tokens
        if hits is not None:
            self._told_prefilled = _KEEP * self._told_prefilled + (prompt - hits)
            self._told_charged = _KEEP * self._told_charged + charged
            self._set_ratio()
        hits = self.believed_hits(entry)
        if hits is not None:
            self.predicted_tokens += prompt - charged
            self.actual_tokens += hits

    def believed_hits(self, entry: Prompted) -> float | None:
        """Cached tokens of an ended request's prompt: by its answer, else by the counters."""
        if entry.hit_tokens is not None:
            return entry.hit_tokens
        if not self.counts or self.ratio is None:
            return None
        return max(0.0, entry.prompt_tokens - self.ratio * entry.prefill_tokens)


@dataclass(slots=True, eq=False, repr=False)
class Interval:
    """What happened between two looks at an instance, for its row of steps.

    ``open``: requests prefilled in it that have not ended. ``untold``: prompts for which no answer
    has reported hits, including those of ``open``, and their tokens, whole and as charged.
    ``ratio``: the counters', between two scrapes of which the second was the first after it, at
    ``scraped_s``. ``row``: made from it, with its ``number``; -1: no row is waiting.
    ``shown``: the share of it that its row covers.
    """

    streamed_s: float = 0.0  # time in which anything streamed
    sequences: float = 0.0  # ∫ of streaming sequences, and of their context, over that time
    context: float = 0.0
    # Prompts prefilled between the decode steps.
    prompts: float = 0.0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0  # as reported
    open: int = 0
    untold: int = 0
    untold_tokens: float = 0.0
    untold_charged: float = 0.0
    ratio: float | None = None
    scraped_s: float = 0.0
    row: StepRow | None = None
    number: int = -1
    shown: float = 1.0

    def hits(self, ratio: float | None) -> float:
        """Cached tokens of all its prompts, if the untold ones have this ratio; NaN: unknown."""
        if self.untold == 0:
            return self.hit_tokens
        if ratio is None:
            return math.nan
        return self.hit_tokens + max(0.0, self.untold_tokens - ratio * self.untold_charged)


def reported_hits(entry: Prompted, usage: Usage) -> float | None:
    """Cached tokens of a request's prompt by its answer, scaled to its estimated length."""
    if usage.cached_tokens is None or entry.request.sequences != 1:
        return None
    whole = usage.prompt_tokens or entry.prompt_tokens
    return entry.prompt_tokens * min(1.0, usage.cached_tokens / max(1, whole))
