"""How far what an instance is thought to have in its prefix cache can be believed.

    η = min(1, (Σ actual + 4096) / (Σ predicted + 4096)),   both sums × 0.98 per request

in tokens. It begins at 1 and learns from what an engine says: ``cached_tokens`` of an answer, or,
where answers have none, what its hit counter makes of one (``instances/prefix_hits``). An instance
whose cache is smaller than it looks ends below 1 by itself, one that has none near 0; where the
engine says that it is off, it is 0 at once.

What exceeds a prediction by more than a quarter is not counted: a hit that nobody predicted does
not make up for one that failed to come. That also bounds what an engine's counter can do, which
mixes all of its clients; what it says is used for nothing else.
"""

from __future__ import annotations

from typing import Final

# Tokens that the prior weighs as much as: a few prompts.
_PRIOR_TOKENS: Final = 4096.0
# What is kept of the sums with each request: a memory of 50.
_KEEP: Final = 0.98
# Lengths are estimated, some too long and some too short.
_MOST_SURPLUS: Final = 1.25
# What no request has; an engine's figure may be anything.
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
        """Its cache is empty, and maybe another one: back to the prior."""
        self._actual = 0.0
        self._predicted = 0.0
        self.eta = 0.0 if self._off else 1.0

    def switch(self, *, on: bool) -> None:
        """Its engine says whether it has a prefix cache; where it has none, there is no hit."""
        if self._off == on:
            self._off = not on
            self.reset()

    def sums(self) -> tuple[float, float]:
        """(predicted, actual) tokens, as they are remembered."""
        return self._predicted, self._actual

    def take_over(self, predicted_tokens: float, actual_tokens: float) -> None:
        """Go on from another process's ``sums``."""
        self.reset()
        self.observe(predicted_tokens, actual_tokens)

    def observe(self, predicted_tokens: float, actual_tokens: float) -> None:
        """A request was completed, and its answer or its engine's counters say what was cached.

        Args:
            predicted_tokens: the match at dispatch, not times η.
        """
        if not (0 <= predicted_tokens <= _MOST_TOKENS and 0 <= actual_tokens <= _MOST_TOKENS):
            return
        actual_tokens = min(actual_tokens, _MOST_SURPLUS * predicted_tokens)
        self._predicted = _KEEP * self._predicted + predicted_tokens
        self._actual = _KEEP * self._actual + actual_tokens
        if not self._off:
            prior = _PRIOR_TOKENS
            self.eta = min(1.0, (self._actual + prior) / (self._predicted + prior))
