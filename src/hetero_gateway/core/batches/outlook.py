"""Predicts when batches finish: the work that is left over the work done per second. Pure.

A line's *kind* is its model, and the powers of two of its prompt and of its limit. Finished lines
of a kind predict what its other lines will take; until there are any, the estimates are scaled by
how accurate estimates have been so far. Work is measured in seconds of the batches' share of all
instances, so that long lines, which are sent last and fill caches, count for more.

At any cut-off, short lines have finished and long ones are still running. So lengths are estimated
from all lines that have started: those that still run are at least as long as what they have made
(the Kaplan-Meier estimate). Once nothing is waiting, the running lines finish one by one, on
engines that get emptier and faster: up to that point, the remaining work is done at the recent
pace; from there it takes as long as the longest of the running lines.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from hetero_gateway.core.types import InstanceId

# With this many finished lines, a kind predicts its other lines.
_FEW: Final = 32
# The pace is measured over this long, or over half of the time so far if that is more.
_WINDOW_S: Final = 60.0
_MOST_SAMPLES: Final = 4096
# Bins of a length as a share of its estimate, by its logarithm: from 2^-16 to 2^4.
_BINS: Final = 160
_PER_DOUBLING: Final = 8
_FIRST: Final = -16
_STEPS: Final = 32

# (model, prompt tokens, output tokens) of a line: the seconds that it takes.
Work = Callable[[str, float, float], float]
# An instance, and how many of a batch's lines it runs: seconds of a step.
Step = Callable[[InstanceId, float], float]


class Kind(NamedTuple):
    """A group of similar lines: ``prompt`` and ``output`` as powers of two of tokens."""

    model: str
    prompt: int
    output: int


def kind_of(model: str, prompt_tokens: int, output_tokens: int) -> Kind:
    """The kind of a line. ``output_tokens``: its limit, or its predicted length."""
    return Kind(model, prompt_tokens.bit_length(), output_tokens.bit_length())


class Sums:
    """The unfinished lines of a kind: their number, and their estimated tokens."""

    __slots__ = ("lines", "output_tokens", "prompt_tokens")

    def __init__(self, lines: int = 0, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self.lines = lines
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens

    def add(self, prompt_tokens: int, output_tokens: int, lines: int = 1) -> None:
        self.lines += lines
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens


class LineOut(NamedTuple):
    """A running line. ``told``: its estimated (prompt, output) tokens; ``made``: output so far."""

    kind: Kind
    at: InstanceId
    told: tuple[int, int]
    made: float


_SHARES: Final = tuple(2.0 ** (_FIRST + each / _PER_DOUBLING) for each in range(_BINS))


def _bin(share: float) -> int:
    if share <= 0:
        return 0
    return min(_BINS - 1, max(0, round(_PER_DOUBLING * (math.log2(share) - _FIRST))))


class _Curve:
    """The distribution of lengths over their estimates, of finished and of running lines.

    ``longer``: the share of lines longer than each bin. Beyond what was seen, lines end as they did
    in the upper half of it, and at their estimates at the latest.
    """

    __slots__ = ("last", "longer", "mean")

    def __init__(self, done: Counter[int], cut: Counter[int]) -> None:
        risk = done.total() + cut.total()
        seen = max([*done, *cut])
        left, self.mean, self.longer = 1.0, 0.0, [0.0] * _BINS
        ended = exposed = before = 0.0
        for each in range(seen + 1):
            share = _SHARES[each]
            if each > seen - _PER_DOUBLING:
                ended += done[each]
                exposed += risk * (share - before)
            self.mean += left * (share - before)
            left *= 1 - done[each] / risk
            risk -= done[each] + cut[each]
            self.longer[each], before = left, share
        self.last = seen
        if exposed:
            rate, end = ended / exposed, max(1.0, before)
            while left > 0 and before < end:
                self.last += 1
                share = min(end, _SHARES[self.last])
                self.mean += left * (share - before)
                left *= math.exp(-rate * (share - before))
                self.longer[self.last], before = left, share
        self.longer[self.last] = 0.0


class LineLengths:
    """Estimated and actual lengths of lines."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, _Known] = {}
        self._all = _Known()

    def note(self, kind: Kind, told: tuple[int, int], real: tuple[int, int]) -> None:
        """A line finished. ``told``, ``real``: its (prompt, output) tokens, estimated and real."""
        for known in (self._kinds.setdefault(kind, _Known()), self._all):
            known.told_prompt += told[0]
            known.prompt += real[0]
            known.lines += 1
            if told[1]:
                known.done[_bin(real[1] / told[1])] += 1

    def look(self, out: Iterable[LineOut]) -> None:
        """Also learn from running lines; call it about once a second."""
        cuts: dict[Kind | None, Counter[int]] = {None: Counter()}
        for each in out:
            if each.told[1]:
                share = _bin(each.made / each.told[1])
                cuts[None][share] += 1
                cuts.setdefault(each.kind, Counter())[share] += 1
        for kind, known in ((None, self._all), *self._kinds.items()):
            cut = cuts.get(kind)
            # Lines none of which is running have changed at most once.
            if known.done and (cut or known.cut):
                known.curve = _Curve(known.done, cut or Counter())
            known.cut = bool(cut)

    def longer(self, share: float) -> float:
        """The share of lines that are longer than this share of their estimate."""
        curve = self._all.curve
        return 0.0 if curve is None else curve.longer[_bin(share)]

    @property
    def longest(self) -> float:
        """The longest line, as a share of its estimate."""
        curve = self._all.curve
        return 1.0 if curve is None else _SHARES[curve.last]

    def mean(self, kind: Kind, sums: Sums) -> tuple[float, float]:
        """Mean (prompt, output) tokens of a kind's line. ``sums``: of some lines, as estimated."""
        prompt, output = sums.prompt_tokens / sums.lines, sums.output_tokens / sums.lines
        known = self._kinds.get(kind)
        if known is None or known.lines < _FEW:
            known = self._all
        if known.told_prompt:
            prompt *= known.prompt / known.told_prompt
        if (curve := known.curve or self._all.curve) is not None:
            output *= curve.mean
        return prompt, output


class _Known:
    """Finished lines. ``cut``: some of them were running at the last look."""

    __slots__ = ("curve", "cut", "done", "lines", "prompt", "told_prompt")

    def __init__(self) -> None:
        self.lines = self.prompt = self.told_prompt = 0
        self.done: Counter[int] = Counter()
        self.cut = True
        self.curve: _Curve | None = None


def work_of(
    left: Mapping[Kind, Sums], out: Sequence[LineOut], seen: LineLengths, work_s: Work
) -> tuple[float, float]:
    """Work left in waiting lines, and work already done on running ones, s.

    ``left``: sums of all unfinished lines.
    """
    there: dict[Kind, Sums] = {}
    begun: dict[Kind, list[float]] = {}
    for each in out:
        there.setdefault(each.kind, Sums()).add(*each.told)
        if each.made:
            sums = begun.setdefault(each.kind, [0.0, 0.0, 0.0])
            for i, more in enumerate((1.0, each.told[0], each.made)):
                sums[i] += more
    waits_s = 0.0
    for kind, all_of in left.items():
        running = there.get(kind, Sums())
        if (lines := all_of.lines - running.lines) > 0:
            waiting = Sums(
                lines,
                all_of.prompt_tokens - running.prompt_tokens,
                all_of.output_tokens - running.output_tokens,
            )
            waits_s += lines * work_s(kind.model, *seen.mean(kind, waiting))
    begun_s = sum(n * work_s(kind.model, p / n, o / n) for kind, (n, p, o) in begun.items())
    return waits_s, begun_s


def drain_s(out: Iterable[LineOut], seen: LineLengths, step_s: Step) -> float:
    """Time until all running lines have finished, if no new ones follow, s.

    By their lengths, the longest has finished when fewer than one is left. Faster instances run
    more of the lines, so means are weighted by their number.
    """
    places: dict[InstanceId, dict[int, list[float]]] = {}
    for each in out:
        if each.told[1]:
            groups = places.setdefault(each.at, {})
            group = groups.setdefault(_bin(each.made / each.told[1]), [0.0, 0.0, 0.0])
            for i, more in enumerate((1.0, float(each.told[1]), each.made)):
                group[i] += more
    lines = takes_s = 0.0
    longest = seen.longest
    for at, groups in places.items():
        rows = []
        for n, told, made in groups.values():
            share = made / told
            rows.append((n, n / told, share, max(1e-9, seen.longer(share))))
        most = max((longest - share) / per_token for _, per_token, share, _ in rows)
        tokens, here_s = max(0.0, most) / _STEPS, 0.0
        for step in range(_STEPS):
            left = sum(
                n * min(1.0, seen.longer(share + step * tokens * per_token) / longer)
                for n, per_token, share, longer in rows
            )
            if left < math.log(2):
                break
            here_s += tokens * step_s(at, left)
        n = sum(row[0] for row in rows)
        lines, takes_s = lines + n, takes_s + n * here_s
    return takes_s / lines if lines else 0.0


class Pace:
    """How much work is done per second. ``done_s``: the work of finished lines."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MOST_SAMPLES)
        self.done_s = 0.0

    def begin(self, now_s: float) -> None:
        """Start: lines are running from now on, and were not before."""
        self._samples.clear()
        self._samples.append((now_s, self.done_s))

    def note(self, work_s: float) -> None:
        """Note a finished line that took this much work."""
        self.done_s += work_s

    def look(self, now_s: float, begun_s: float) -> float | None:
        """Recent work per second; None: not known yet. Call it about once a second.

        Args:
            begun_s: work already done on running lines.
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


def ends_in_s(
    works_s: Sequence[float], drains_s: Sequence[float], per_s: float | None
) -> list[float]:
    """How long until each of these batches finishes, one after the other, s; inf: not known.

    Args:
        works_s: work of waiting lines. drains_s: time that their last lines take.
    """
    told, before_s = [], 0.0
    for work, drain in zip(works_s, drains_s, strict=True):
        before_s += work
        waits_s = before_s / per_s if per_s else math.inf
        told.append(drain + (waits_s if before_s else 0.0))
    return told
