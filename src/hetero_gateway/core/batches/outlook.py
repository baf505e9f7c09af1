"""When batches will be done: what is left of them over what is done in a second. Pure.

A line's *kind* is its model, and the powers of two of its prompt and of its limit. What lines of a
kind took, so far as any are done, is what the others of it will take; before that, their estimates
are taken times what estimates were worth so far. Work is in seconds of all instances together, so
that long lines, which go last and fill caches, count for more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

# Lines of a kind that are done, from which on they speak for the others.
_FEW: Final = 8
# The work of so long says how fast it goes, or of half of the time so far where that is more.
_WINDOW_S: Final = 60.0
_MOST_SAMPLES: Final = 4096
# Where few are done beside those that are out, little is known of either.
_LEAST_DONE, _MOST_VARIATION = 0.5, 4.0

# (model, prompt tokens, output tokens) of a line: the seconds that it takes.
Work = Callable[[str, float, float], float]


class Kind(NamedTuple):
    """Lines that are alike: ``prompt`` and ``output`` as powers of two of tokens."""

    model: str
    prompt: int
    output: int


def kind_of(model: str, prompt_tokens: int, output_tokens: int) -> Kind:
    """``output_tokens``: the line's limit, or what it is thought to be."""
    return Kind(model, prompt_tokens.bit_length(), output_tokens.bit_length())


class Sums:
    """Of the lines of a kind that are not done: how many, and their tokens as estimated."""

    __slots__ = ("lines", "output_tokens", "prompt_tokens")

    def __init__(self, lines: int = 0, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self.lines = lines
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens

    def add(self, prompt_tokens: int, output_tokens: int, lines: int = 1) -> None:
        self.lines += lines
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens


class LineLengths:
    """What lines were estimated to be, and what they were."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, _Known] = {}
        self._all = _Known()

    def note(self, kind: Kind, told: tuple[int, int], real: tuple[int, int]) -> None:
        """A line is done. ``told``, ``real``: its (prompt, output) tokens, estimated and so."""
        for known in (self._kinds.setdefault(kind, _Known()), self._all):
            known.estimated.add(*told)
            known.actual.add(*real)
            known.squares += real[1] ** 2

    def mean(self, kind: Kind, sums: Sums, out: int = 0) -> tuple[float, float, float]:
        """(prompt, output) tokens of a line of a kind, and the square of the output's variation.

        Those that are out are longer than those that are done: of what is cut off at a time, it is
        the long ones that are there yet, by as much as lengths vary (length-biased sampling).

        Args:
            sums: of some of them, as estimated.
            out: how many lines of the kind are out.
        """
        prompt, output = sums.prompt_tokens / sums.lines, sums.output_tokens / sums.lines
        known = self._kinds.get(kind)
        if known is None or known.actual.lines < _FEW:
            known = self._all
        estimated, actual = known.estimated, known.actual
        varies = known.variation()
        if actual.lines:
            output /= max(_LEAST_DONE, 1 - out * varies / (actual.lines + out))
        return (
            prompt * _ratio(actual.prompt_tokens, estimated.prompt_tokens),
            output * _ratio(actual.output_tokens, estimated.output_tokens),
            varies,
        )


class _Known:
    """Lines that are done: as estimated, and as they were; the sum of their outputs' squares."""

    __slots__ = ("actual", "estimated", "squares")

    def __init__(self) -> None:
        self.estimated, self.actual, self.squares = Sums(), Sums(), 0

    def variation(self) -> float:
        """The square of the outputs' coefficient of variation."""
        lines, tokens = self.actual.lines, self.actual.output_tokens
        if not tokens:
            return 0.0
        return min(_MOST_VARIATION, max(0.0, self.squares * lines / tokens**2 - 1))


def _ratio(actual: int, estimated: int) -> float:
    return actual / estimated if actual and estimated else 1.0


def work_of(
    left: Mapping[Kind, Sums], out: Mapping[Kind, int], seen: LineLengths, work_s: Work
) -> tuple[float, float]:
    """What lines that are not done take yet, and what those that are out took, s.

    ``out``: how many of them are out. One that is found out at some time has half of its length
    before it, and is longer than others: (1 + cv²)/2 of the mean.
    """
    todo_s = begun_s = 0.0
    for kind, sums in left.items():
        if sums.lines <= 0:
            continue
        running = min(sums.lines, out.get(kind, 0))
        prompt, output, varies = seen.mean(kind, sums, running)
        one_s, half = work_s(kind.model, prompt, output), (1 + varies) / 2
        todo_s += (sums.lines - running + running * half) * one_s
        begun_s += running * half * one_s
    return todo_s, begun_s


class Pace:
    """How much work is done in a second. ``done_s``: of lines that are done."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MOST_SAMPLES)
        self.done_s = 0.0

    def begin(self, now_s: float) -> None:
        """Lines are out from now on, and were not before."""
        self._samples.clear()
        self._samples.append((now_s, self.done_s))

    def note(self, work_s: float) -> None:
        """A line is done that took so much."""
        self.done_s += work_s

    def look(self, now_s: float, begun_s: float) -> float | None:
        """Work per second lately; None: that is not known yet. To be called about once a second.

        Args:
            begun_s: what lines that are out have taken so far.
        """
        done_s, samples = self.done_s + begun_s, self._samples
        if not samples:
            samples.append((now_s, done_s))
        first_s = samples[0][0]
        since_s = now_s - max(_WINDOW_S, (now_s - first_s) / 2)
        at_s, before_s = next(
            (each for each in reversed(samples) if each[0] <= since_s), samples[0]
        )
        samples.append((now_s, done_s))
        if now_s <= at_s or done_s <= before_s:
            return None
        return (done_s - before_s) / (now_s - at_s)


def ends_in_s(works_s: Sequence[float], per_s: float | None) -> list[float]:
    """In how many seconds each of these is done, one after the other; inf: not known."""
    told, before_s = [], 0.0
    for work in works_s:
        before_s += work
        told.append(before_s / per_s if per_s and before_s else math.inf)
    return told
