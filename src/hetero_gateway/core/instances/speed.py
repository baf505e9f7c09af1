"""The speed factor of one instance: observed over modelled time, and how long that is believed.

    factor    Σ observed / Σ modelled, both exponentially forgotten over seconds of observed time

While an instance has traffic, that is all. But a factor that once was high keeps traffic away, and
without traffic nothing is observed: it would stay for ever. So what was not seen for a while is
*doubted*, if it is well above the best that is known of comparable instances:

- it goes to that best by itself, as wall time passes, and what it was made from loses its weight,
  so that the first new observation counts;
- the scheduler sends it a request now and then (``scheduling/probes.py``), which is how it is
  observed long before it looks good again.

What other gateways have observed counts beside it, as a factor within ``MOST_APART`` of this
gateway's own, or within ``MOST_UNSEEN_APART`` while this one has observed nothing: a peer that lies
keeps no instance idle, and makes none look much faster than it is.

An instance that really is that slow costs one request in a while; see docs/design/corrections.md.
Nothing here reads a clock.
"""

from __future__ import annotations

import math

from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.prefix_hits import PrefixHits

# Long enough to average the noise of a network, short enough to notice a slow-down within a few
# answers. It starts as if 0.2 s had been as modelled.
FORGET_S = 5.0
PRIOR_S = 0.2
# Much faster than thought, after this much was seen: whatever held it up is over. What was seen
# before says little then.
MENDED, MATURE_S, FORGET_MENDED_S = 1.5, 3.0, 1.0
# Doubted: not seen for so long, and this many times above the best; until it is that near to it.
UNSEEN_S = 2.0
DOUBTED, CLEARED = 1.25, 1.02
# How fast a doubted one goes to the best, in wall time, and loses its weight. The former is slow
# next to the pace of probes: where there is traffic, they find out.
DECAY_S = 5.0
WEIGHT_S = 1.0
LEAST_WEIGHT_S = 0.02
# How many times above or below our own factor others' may be, at most.
MOST_APART, MOST_UNSEEN_APART = 2.0, 4.0


class SpeedEstimate:
    """Makes one instance's factor of what is observed.

    ``factor``: the last one, within the bounds. ``seen_s``: when it was last observed.
    ``doubted``: it is too high for not having been seen so long.
    """

    __slots__ = (
        "_modelled_s",
        "_observed_s",
        "_own",
        "_revised_s",
        "bounds",
        "doubted",
        "factor",
        "seen_s",
    )

    def __init__(self, bounds: tuple[float, float]) -> None:
        self.bounds = bounds
        self.factor = self._own = 1.0
        self.seen_s = 0.0
        self.doubted = False
        self._revised_s = 0.0
        self._observed_s = self._modelled_s = PRIOR_S

    def sums(self) -> tuple[float, float]:
        """What was observed and modelled lately, s; zeros before anything was observed."""
        if self._observed_s == self._modelled_s == PRIOR_S:
            return 0.0, 0.0  # there is only what the factor begins with
        return self._observed_s, self._modelled_s

    def observe(
        self,
        observed_s: float,
        modelled_s: float,
        now_s: float,
        others_observed_s: float = 0.0,
        others_modelled_s: float = 0.0,
    ) -> float:
        """So long took what the model has so much time for; returns the factor, as ``weigh``."""
        forget_s = FORGET_S
        if (
            observed_s * MENDED < self.factor * modelled_s
            and self.factor > MENDED
            and (self.doubted or self._observed_s > MATURE_S)
        ):
            forget_s = FORGET_MENDED_S
        keep = math.exp(-observed_s / forget_s)
        self._observed_s = self._observed_s * keep + observed_s
        self._modelled_s = self._modelled_s * keep + modelled_s
        self.seen_s = now_s
        return self.weigh(others_observed_s, others_modelled_s)

    def weigh(self, others_observed_s: float = 0.0, others_modelled_s: float = 0.0) -> float:
        """The factor of all that was observed, by other gateways too."""
        low, high = self.bounds
        own = self._own = min(high, max(low, self._observed_s / self._modelled_s))
        if others_modelled_s <= 0:
            self.factor = own
            return own
        apart = MOST_UNSEEN_APART if self.sums() == (0.0, 0.0) else MOST_APART
        theirs = min(own * apart, max(own / apart, others_observed_s / others_modelled_s))
        observed_s = self._observed_s + theirs * others_modelled_s
        self.factor = min(high, max(low, observed_s / (self._modelled_s + others_modelled_s)))
        return self.factor

    def assume(self, factor: float) -> None:
        """Take this factor until something is observed."""
        self.factor = self._own = factor

    def revise(self, best: float, now_s: float) -> bool:
        """Let time pass; whether the factor is doubted. ``best``: of comparable instances."""
        if self.doubted:
            if self.factor <= CLEARED * best:
                self.doubted = False
                if now_s - self.seen_s >= UNSEEN_S:
                    # So near is equal: nothing is to keep traffic away.
                    self.factor = self._own = best
        elif self.factor > DOUBTED * best and now_s - self.seen_s >= UNSEEN_S:
            self.doubted = True
            self._revised_s = now_s
            self._lose_weight(now_s - self.seen_s)
        if not self.doubted:
            return False
        elapsed_s = now_s - max(self._revised_s, self.seen_s + UNSEEN_S)
        self._revised_s = now_s
        if elapsed_s > 0:
            keep = math.exp(-elapsed_s / DECAY_S)
            self.factor = best * (self.factor / best) ** keep
            self._own = best * (self._own / best) ** keep
            self._lose_weight(elapsed_s)
        return True

    def _lose_weight(self, elapsed_s: float) -> None:
        keep = math.exp(-elapsed_s / WEIGHT_S)
        self._modelled_s = max(LEAST_WEIGHT_S, self._modelled_s * keep)
        # Without what others report: else their factor would become ours, again and again.
        self._observed_s = self._modelled_s * self._own


# An answer whose tokens nobody saw says something of the speed, too, by the time that it took: with
# how long its first token may have taken.


def first_token_times_s(
    entry: Dispatch,
    ttft_s: float,
    hits: float | None,
    prefix: PrefixHits,
    constants: Constants,
    speed: float,
) -> list[float]:
    """The time to a first token, s, as predicted, had it been known what was prefilled of its
    prompt and of those in front of it; where that is not known, the most and the least.

    Args:
        ttft_s: as predicted when it was sent, with what was charged.
        hits: cached tokens of its prompt, as its answer reported; None: it did not.
        speed: the factor f, observed over modelled time.
    """
    if prefix.off:
        return [ttft_s]
    ratio, c = prefix.ratio, constants
    prompt, charged = entry.prompt_tokens, entry.prefill_tokens
    in_front = 0.0 if entry.before is None else entry.before[2]
    # What of its prompt was prefilled, and which part of what was to be in front of it.
    may_be: tuple[tuple[float, float], ...]
    if ratio is None:
        least = 0.0 if hits is None else prompt - hits
        may_be = ((charged if hits is None else least, 1.0), (least, 0.0))
    else:
        new = min(float(prompt), ratio * charged) if hits is None else prompt - hits
        may_be = ((new, ratio),)
    times_s = []
    for new, of_others in may_be:
        spared_s = c.p1 * (charged - new + (1 - of_others) * in_front)
        if c.p9:
            pairs = attended_pairs(charged, prompt - charged)
            pairs -= attended_pairs(new, prompt - new)
            # In front of it, as if all prompts were of this one's length.
            spared_s += c.p9 * (pairs + (1 - of_others) * in_front * prompt / 2)
        times_s.append(max(0.0, ttft_s - speed * spared_s))
    return times_s
