"""When batches will be done: what is left of them over what is done in a second. Pure.

A line's *kind* is its model, and the powers of two of its prompt and of its limit. What lines of a
kind took, so far as any are done, is what the others of it will take; before that, their estimates
are taken times what estimates were worth so far. Work is in seconds of the fastest instance, so
that long lines, which go last, count for more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

# Lines of a kind that are done, from which on they speak for the others.
_FEW: Final = 8
# The work of so long says how fast it goes, or of a third of the time so far where that is more.
_WINDOW_S: Final = 60.0
_SAMPLE_S: Final = 1.0
_MOST_SAMPLES: Final = 4096

# (prompt tokens, output tokens) of a line on the fastest instance, in seconds.
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


class Seen:
    """What lines were estimated to be, and what they were."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, tuple[Sums, Sums]] = {}
        self._all = Sums(), Sums()

    def note(self, kind: Kind, told: tuple[int, int], real: tuple[int, int]) -> None:
        """A line is done. ``told``, ``real``: its (prompt, output) tokens, estimated and so."""
        for estimated, actual in (self._kinds.setdefault(kind, (Sums(), Sums())), self._all):
            estimated.add(*told)
            actual.add(*real)

    def mean(self, kind: Kind, sums: Sums) -> tuple[float, float]:
        """(prompt, output) tokens of a line of a kind; ``sums``: of some, as estimated."""
        prompt, output = sums.prompt_tokens / sums.lines, sums.output_tokens / sums.lines
        known = self._kinds.get(kind)
        if known is not None and known[0].lines >= _FEW:
            estimated, actual = known
        else:
            estimated, actual = self._all
        return (
            prompt * _ratio(actual.prompt_tokens, estimated.prompt_tokens),
            output * _ratio(actual.output_tokens, estimated.output_tokens),
        )


def _ratio(actual: int, estimated: int) -> float:
    return actual / estimated if actual and estimated else 1.0


def work_of(left: Mapping[Kind, Sums], seen: Seen, work_s: Work) -> float:
    """What these lines take of the fastest instance, s."""
    return sum(
        sums.lines * work_s(kind.model, *seen.mean(kind, sums))
        for kind, sums in left.items()
        if sums.lines > 0
    )


class Pace:
    """How much work is done in a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MOST_SAMPLES)
        self.done_s = 0.0

    def begin(self, now_s: float) -> None:
        """Lines are out from now on, and were not before."""
        self._samples.clear()
        self._samples.append((now_s, self.done_s))

    def note(self, work_s: float) -> None:
        """A line is done that took so much of the fastest instance."""
        self.done_s += work_s

    def look(self, now_s: float) -> None:
        """To be called often."""
        if not self._samples or now_s - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now_s, self.done_s))

    def per_s(self, now_s: float) -> float | None:
        """Work per second; None: nothing is known yet."""
        if not self._samples:
            return None
        first_s = self._samples[0][0]
        since_s = now_s - max(_WINDOW_S, (now_s - first_s) / 3)
        at_s, done_s = self._samples[0]
        for sample_s, sample_done_s in self._samples:
            if sample_s > since_s:
                break
            at_s, done_s = sample_s, sample_done_s
        if now_s <= at_s or self.done_s <= done_s:
            return None
        return (self.done_s - done_s) / (now_s - at_s)


def ends_in_s(works_s: list[float], per_s: float | None) -> list[float]:
    """In how many seconds each of these is done, one after the other; inf: not known."""
    told, before_s = [], 0.0
    for work in works_s:
        before_s += work
        told.append(before_s / per_s if per_s else math.inf)
    return told
