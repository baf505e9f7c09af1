"""How far the assumed contents of an instance's prefix cache can be trusted.

    η = min(1, (Σ actual + 4096) / (Σ predicted + 4096)),   both sums × 0.98 per request

in tokens. It begins at 1 and learns from what an engine reports: ``cached_tokens`` of an answer,
or, if answers have none, its share of the hit counter (``instances/prefix_hits``). An instance
whose cache is smaller than it looks ends below 1 by itself, one without a cache near 0; if the
engine reports that it is off, it is 0 at once.

An excess over a prediction of more than a quarter is not counted: an unpredicted hit does not make
up for one that failed to come. That also bounds the influence of an engine's counter, which mixes
all of its clients; it is used for nothing else.
"""

from __future__ import annotations

from typing import Final

# The weight of the prior in tokens: a few prompts.
_PRIOR_TOKENS: Final = 4096.0
# The share of the sums that is kept with each request: a memory of 50.
_KEEP: Final = 0.98
# Lengths are estimated, some too long and some too short.
_MOST_SURPLUS: Final = 1.25
# More than any request has; an engine's figure may be anything.
_MOST_TOKENS: Final = 2.0**40


class Trust:
    """η of one instance.

    Attributes:
        eta: what a predicted hit is worth, between 0 and 1.
    """

    __slots__ = ("_actual", "_off", "_predicted", "eta")

    def __init__(self) -> None:
        self._off = False
        self.reset()

    def __repr__(self) -> str:
        return f"<Trust {self.eta:.3f}: {self._actual:.0f} of {self._predicted:.0f} tokens>"

    def reset(self) -> None:
        """Its cache is empty, and may be another one: back to the prior."""
        self._actual = 0.0
        self._predicted = 0.0
        self.eta = 0.0 if self._off else 1.0

    def switch(self, *, on: bool) -> None:
        """Its engine reports whether it has a prefix cache; if not, there are no hits."""
        if self._off == on:
            self._off = not on
            self.reset()

    def sums(self) -> tuple[float, float]:
        """(predicted, actual) tokens, as remembered."""
        return self._predicted, self._actual

    def take_over(self, predicted_tokens: float, actual_tokens: float) -> None:
        """Continue from another process's ``sums``."""
        self.reset()
        self.observe(predicted_tokens, actual_tokens)

    def observe(self, predicted_tokens: float, actual_tokens: float) -> None:
        """Note a completed request whose cached tokens its answer or the counters report.

        Args:
            predicted_tokens: the match at dispatch, not multiplied by η.
        """
        if not (0 <= predicted_tokens <= _MOST_TOKENS and 0 <= actual_tokens <= _MOST_TOKENS):
            return
        actual_tokens = min(actual_tokens, _MOST_SURPLUS * predicted_tokens)
        self._predicted = _KEEP * self._predicted + predicted_tokens
        self._actual = _KEEP * self._actual + actual_tokens
        if not self._off:
            prior = _PRIOR_TOKENS
            self.eta = min(1.0, (self._actual + prior) / (self._predicted + prior))
