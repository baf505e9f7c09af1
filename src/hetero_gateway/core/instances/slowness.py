"""Detects whether an instance is slow now, and how slow: its last seconds, over the model's.

Three figures compare observation with the model. The speed factor (``speed.py``) decides, and
forgets what it has not seen for a while. Drift (``drift.py``) looks at minutes and says that a
profile should be measured again. This one looks at seconds and says that something has happened to
a machine; it changes no decision.

    an instance is slow    once ``WINDOW_S`` seconds of observed time took ``SLOW`` times as long as
                           modelled or longer
    it is slow no longer   once they took less than ``NORMAL`` times as long

In between, and while nothing is observed, the state stays: a policy that keeps requests away from
a slow instance must not end its alarm. Nothing here logs or reads a clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

# A quarter more is for drift, which has minutes to be sure of it.
SLOW: Final = 2.0
NORMAL: Final = 1.5
# Of observed time: long compared with the noise of single seconds, short for someone who waits.
WINDOW_S: Final = 5.0
# The least that is judged: by its time, and by looks, each of which may be one long answer.
_LEAST_S: Final = 3.0
_LEAST_LOOKS: Final = 2
# Anything older says nothing about something new, however little was seen since.
_MOST_AGE_S: Final = 30.0
# An engine that stands still has no factor; it is reported as this slow.
MOST: Final = 100.0
# What HTTP, two event loops and a network may add to a first token or an answer. It says nothing
# about an engine, and is a lot beside a model of a few milliseconds.
HTTP_S: Final = 0.02


def engine_time_s(observed_s: float, modelled_s: float) -> float:
    """The engine's part of an observed time: without what HTTP may have added to the model's."""
    over_s = observed_s - modelled_s
    if over_s <= 0:
        return observed_s
    return modelled_s if over_s <= HTTP_S else observed_s - HTTP_S


class Slowness:
    """The short view of one instance with a profile.

    Attributes:
        since_s: since when it has been slow, on the scheduler's clock; None: it is not.
        factor: observed over modelled time of its last seconds, at most ``MOST``; None: not known.
    """

    __slots__ = ("_excused_s", "_looks", "factor", "since_s")

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.factor: float | None = None
        # (observed s, modelled s, end), oldest first.
        self._looks: deque[tuple[float, float, float]] = deque()
        self._excused_s = 0.0

    def excused(
        self, observed_s: float, prefill_s: float, decode_s: float, waiting_s: float
    ) -> float:
        """The modelled time of a row, s, with an allowance that makes the comparison fair.

        An engine that computes a long prompt makes few steps, or none, and the model learns of that
        prompt with its first token. So the time of the waiting prefills is granted in advance,
        once, and taken off when it is counted.

        Args:
            observed_s: duration of the row.
            prefill_s, decode_s: the model's time for it.
            waiting_s: the model's time for the prompts that wait for their first token.
        """
        counted_s = min(self._excused_s, prefill_s)
        modelled_s = prefill_s + decode_s - counted_s
        self._excused_s = min(self._excused_s - counted_s, waiting_s)
        granted_s = min(observed_s - modelled_s, waiting_s - self._excused_s)
        if granted_s > 0:
            modelled_s += granted_s
            self._excused_s += granted_s
        return modelled_s

    def start_anew(self) -> None:
        """Discard the current window, because the observer was late. The verdict stays."""
        self._looks.clear()
        self._excused_s = 0.0

    def look(self, observed_s: float, modelled_s: float, now_s: float) -> bool:
        """Add an observation and its modelled time; True if ``since_s`` was set or cleared."""
        if observed_s <= 0:
            return False
        looks = self._looks
        looks.append((observed_s, modelled_s, now_s))
        total_s = sum(look[0] for look in looks)
        while (len(looks) > _LEAST_LOOKS and total_s - looks[0][0] >= WINDOW_S) or looks[0][
            2
        ] < now_s - _MOST_AGE_S:
            total_s -= looks.popleft()[0]
        if total_s < _LEAST_S or len(looks) < _LEAST_LOOKS:
            return False
        expected_s = sum(look[1] for look in looks)
        self.factor = min(MOST, total_s / max(expected_s, total_s / MOST))
        if self.since_s is None and self.factor >= SLOW:
            self.since_s = looks[0][2] - looks[0][0]
        elif self.since_s is not None and self.factor < NORMAL:
            self.since_s = None
        else:
            return False
        return True
