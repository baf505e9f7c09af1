"""Whether a profile still holds: observed over modelled time, over minutes of traffic.

The speed factor of ``speed.py`` forgets within seconds and decides; this forgets within minutes of
observed time and only reports. Each row of ``observation.py`` has its observed seconds, and the
modelled seconds of its decode steps (D) and its prefills (P). The two ratios of

    observed = decode · D + prefill · P

are fitted, with exponential forgetting. Rows differ in their share of prefill, which tells the two
ratios apart; a ratio with a large standard error is left out. The noise is in D (a second has a
step more or less), where least squares would be biased by its square. So the shares D/(D+P) and
P/(D+P) are the instruments; with them, a single ratio is a ratio of sums.

    a profile drifts    once a ratio has been outside of 1/1.25 .. 1.25 for 60 s of observed time,
                        or the spread of the rows around the fit above its bound for as long
    it has recovered    once all have been back (1/1.15 .. 1.15) for as long

Nothing here logs or changes a profile.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

# Long compared with the noise of single rows, short compared with a day. Observed seconds.
FORGET_S = 120.0
HOLD_S = 60.0
# At a quarter off, the policies that do not correct themselves begin to lose (the second table of
# docs/evidence/scheduling.md is of a factor of 2); closer to 1 than 1.15 is noise of the fit.
TOLERANCE = 1.25
RECOVERED = 1.15
# Of single rows around the fit: the scatter of seconds with few streams over HTTP, plus twice the
# error that the profile states for its own fit.
_NOISE = 0.3
# A ratio is reported when its standard error is below this, and this many seconds were seen.
_MOST_ERROR = 0.08
_LEAST_S = 20.0
# Observed seconds between two judgements: a fit costs more than a row.
_EVERY_S = 5.0
# A row that is off by less than this, s, counts as modelled: of a first token after 6 ms it is
# HTTP and other processes, and of a second it is nothing.
_SMALL_S = 0.04
# The most that one row can say against the fit.
_MOST_MISS = 1.0

Phase = Literal["decode", "prefill"]


class Verdict(NamedTuple):
    """What the rows show now; None: not known (yet). ``spread``: relative, of single rows."""

    decode: float | None
    prefill: float | None
    spread: float | None


class _Fit(NamedTuple):
    """The two ratios, their standard errors (infinite: not distinguished), and the spread."""

    decode: float
    prefill: float
    decode_error: float
    prefill_error: float
    spread: float


class Drift:
    """The drift of one instance's profile.

    Args:
        stated_error: relative error of decode that the profile states; 0 if it states none.
    """

    def __init__(self, stated_error: float = 0.0) -> None:
        self.most_spread = _NOISE + 2 * stated_error
        self.drifted = False
        self.since_s: float | None = None
        self._observed_s = 0.0
        # By the instruments z = (D, P) / (D + P) and x = (D, P) / observed: the number of rows,
        # Σ z1, z2, z1·x1, z1·x2, z2·x1, z2·x2, z1², z1·z2, z2², and of squared misses.
        self._sums = [0.0] * 11
        self._held_s = 0.0  # how long the verdict has contradicted ``drifted``
        self._unjudged_s = 0.0
        self._known: _Fit | None = None  # as of the last judgement

    def observe(self, observed_s: float, prefill_s: float, decode_s: float) -> None:
        """Add a row that took ``observed_s``, with the modelled time of its two parts."""
        modelled_s = decode_s + prefill_s
        if observed_s <= 0 or modelled_s <= 0:
            return  # an engine that makes no steps concerns the speed factor
        keep = math.exp(-observed_s / FORGET_S)
        self._observed_s = self._observed_s * keep + observed_s
        x1, x2 = decode_s / observed_s, prefill_s / observed_s
        z1, z2 = decode_s / modelled_s, prefill_s / modelled_s
        fit = self._known
        miss = 0.0 if fit is None else fit.decode * x1 + fit.prefill * x2 - 1
        if abs(miss) * observed_s < _SMALL_S:
            miss = 0.0
        if miss > _MOST_MISS:
            x1, x2 = (x * (1 + _MOST_MISS) / (1 + miss) for x in (x1, x2))
            miss = _MOST_MISS
        row = (1.0, z1, z2, z1 * x1, z1 * x2, z2 * x1, z2 * x2, z1 * z1, z1 * z2, z2 * z2)
        for i, value in enumerate((*row, miss * miss)):
            self._sums[i] = self._sums[i] * keep + value

    def judge(self, observed_s: float, now_s: float) -> bool:
        """Judge ``observed_s`` more seconds; True if ``drifted`` has changed."""
        self._unjudged_s += observed_s
        if self._unjudged_s < _EVERY_S:
            return False
        observed_s, self._unjudged_s = self._unjudged_s, 0.0
        self._known = self._fit()
        told = self.verdict()
        ratios = [ratio for ratio in (told.decode, told.prefill) if ratio is not None]
        if not ratios:
            return False
        bound = RECOVERED if self.drifted else TOLERANCE
        away = any(not 1 / bound <= ratio <= bound for ratio in ratios)
        away = away or (told.spread is not None and told.spread > self.most_spread)
        self._held_s = self._held_s + observed_s if away != self.drifted else 0.0
        if self._held_s < HOLD_S:
            return False
        self.drifted, self._held_s = away, 0.0
        self.since_s = now_s if away else None
        return True

    def verdict(self) -> Verdict:
        fit = self._fit()
        if fit is None or self._observed_s < _LEAST_S:
            return Verdict(None, None, None)
        return Verdict(
            fit.decode if fit.decode_error < _MOST_ERROR * fit.decode else None,
            fit.prefill if fit.prefill_error < _MOST_ERROR * fit.prefill else None,
            fit.spread,
        )

    def _fit(self) -> _Fit | None:
        """None: not enough rows."""
        rows, b1, b2, a11, a12, a21, a22, zz11, zz12, zz22, squares = self._sums
        if rows < 3:
            return None
        variance = squares / rows
        spread = math.sqrt(variance)
        determinant = a11 * a22 - a12 * a21
        if determinant > 1e-6 * a11 * a22 > 0:
            decode = (b1 * a22 - b2 * a12) / determinant
            prefill = (b2 * a11 - b1 * a21) / determinant
            if decode > 0 and prefill > 0:
                # A⁻¹ B A⁻ᵀ with B = Σ z·zᵀ.
                of_decode = a22 * a22 * zz11 - 2 * a22 * a12 * zz12 + a12 * a12 * zz22
                of_prefill = a21 * a21 * zz11 - 2 * a21 * a11 * zz12 + a11 * a11 * zz22
                scale = variance / determinant**2
                return _Fit(
                    decode,
                    prefill,
                    math.sqrt(max(0.0, scale * of_decode)),
                    math.sqrt(max(0.0, scale * of_prefill)),
                    spread,
                )
        # One ratio for both; the part that was observed has it.
        both = (b1 + b2) / (a11 + a12 + a21 + a22)
        error = both * spread / math.sqrt(rows)
        return _Fit(
            both,
            both,
            error if b1 > 0.9 * rows else math.inf,
            error if b2 > 0.9 * rows else math.inf,
            spread,
        )
