"""Fits p1..p9 to measured batches: least squares of relative errors, no constant below 0.

Paper section 3.1 fits Eqs. (3) and (4) by plain least squares. That weighs a millisecond of a long
batch as much as one of a short step, and lets constants turn negative (erratum 14). Here each row
is divided by its time, and the solution is bounded by 0 (non-negative least squares).

Attention over the prompt (p9, not in the paper: see ``cost_model``) is fitted with p1..p4, and kept
if the samples determine it or it predicts held-out cells better. That takes three prompt lengths
or more. Otherwise p9 is 0, and p1..p4 are as if there were no p9.

Terms used here:

- A *cell* is one combination of batch size, prompt and, for decode, output length. Each counts
  once, however often it was repeated.
- A *soft L1* loss: the square of small relative residuals, the absolute value of large ones, so
  that neither a bad sample nor a corner where the equation does not hold has much influence.
- An *outlier* is a sample too far from the rest to be noise; it is left out and counted.
- The errors are those of cells the fit has not seen (``PartFit.validation``), without outliers.
- Intervals come from a bootstrap over cells.

Where samples and files come from is the profiler's concern. docs/design/profiling.md has the
reasons and the figures.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.least_squares import non_negative_solution
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.errors import ProfileError

IntArray = NDArray[np.int64]

# Columns of ``prefill_terms`` and ``decode_terms``.
PREFILL_NAMES = ("p1", "p2", "p3", "p4", "p9")
DECODE_NAMES = ("p5", "p6", "p7", "p8")
# As many cells as constants: with fewer, the constants are not determined at all.
MIN_CELLS = 4
# Up to this many cells are held out one at a time; more, in this many parts.
PARTS = 5
MIN_CELLS_FOR_PARTS = 15
# Where the loss turns from squares to absolute values: above the noise of an engine, 1 to 3 %.
SOFT_L1_SCALE = 0.05
# A sample is an outlier beyond this many robust standard deviations, and beyond this factor.
OUTLIER_DEVIATIONS = 5.0
OUTLIER_FACTOR = 1.5
# A larger share than this are not outliers: the equation does not hold, and the error must show it.
MAX_OUTLIER_SHARE = 0.2
# Cells this close in ln(batch) and ln(prompt) are held out together: they are near-repeats.
HOLD_OUT_STEP = 0.15
# A column is not its own if the part that the others cannot express is below this.
RANK_TOLERANCE = 1e-6
# In standard errors; and the interval must stay above this share of the value.
IDENTIFIED_DEVIATIONS = 2.0
IDENTIFIED_SHARE = 0.05
# p9 is kept if it lowers Eq. (3)'s mean error on held-out cells below this share of it.
WORTH_HAVING = 0.9
# Pulls constants that the samples cannot distinguish to those that dominate on real engines. Too
# weak to matter where the samples can.
TIE_BREAK = 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured batch of equal requests, or the mean of a batch of nearly equal ones.

    Args:
        batch_size: sequences that ran together.
        prompt_tokens, output_tokens: of each sequence; the prefill emits the first output token.
        prefill_s: from sending the batch to the last first token, in seconds; None: not measured.
        decode_s: of the ``output_tokens - 1`` decode steps that follow; None: not measured.
    """

    batch_size: float
    prompt_tokens: float
    output_tokens: float
    prefill_s: float | None
    decode_s: float | None

    @property
    def steps(self) -> float:
        """Decode steps: the prefill has emitted the first token (erratum 12)."""
        return self.output_tokens - 1


@dataclass(frozen=True, slots=True)
class PartFit:
    """The constants of one equation, and how far they can be trusted.

    Args:
        constants: p1..p4 and p9, or p5..p8, in seconds.
        r2: share of the variance of the seconds that is explained, of held-out cells.
        median_error, worst_error, mean_error: relative, of held-out cells.
        validation: how cells were held out.
        used, outliers: samples.
        intervals: 95 % of the bootstrap's values, for each constant.
        identified: whether the samples determine the constant. If not, the value is what the
            least squares gave: right where the samples are, a guess elsewhere.
        notes: why a constant is not identified, and other cautions; a sentence each.
        eq_3_error: mean error of the paper's Eq. (3), fitted without p9; None for decode. Where p9
            is not kept, it is ``mean_error``.
    """

    constants: tuple[float, ...]
    r2: float
    median_error: float
    worst_error: float
    mean_error: float
    validation: str
    used: int
    outliers: int
    intervals: tuple[tuple[float, float], ...]
    identified: tuple[bool, ...]
    notes: tuple[str, ...]
    eq_3_error: float | None


@dataclass(frozen=True, slots=True)
class Fit:
    """Both equations' constants."""

    prefill: PartFit
    decode: PartFit

    @property
    def constants(self) -> Constants:
        values = (*self.prefill.constants, *self.decode.constants)
        return Constants(**dict(zip((*PREFILL_NAMES, *DECODE_NAMES), values, strict=True)))


def eq_3_terms(samples: Sequence[Sample]) -> FloatArray:
    """What p1..p4 multiply in Eq. (3), a row per sample: (b·I, b, I, 1)."""
    return np.array(
        [(s.batch_size * s.prompt_tokens, s.batch_size, s.prompt_tokens, 1.0) for s in samples]
    ).reshape(len(samples), 4)


def prefill_terms(samples: Sequence[Sample]) -> FloatArray:
    """The same, and what p9 multiplies: b·I²/2, the pairs of tokens that attend to each other."""
    pairs = [s.batch_size * attended_pairs(s.prompt_tokens) for s in samples]
    return np.column_stack((eq_3_terms(samples), np.array(pairs)))


def decode_terms(samples: Sequence[Sample]) -> FloatArray:
    """What p5..p8 multiply in Eq. (4), a row per sample, summed over its steps."""
    rows = []
    for s in samples:
        n, b = s.steps, s.batch_size
        cached = n * s.prompt_tokens + n * (n + 1) / 2  # Σ (I + k), k = 1..n
        rows.append((b * cached, b * n, cached, n))
    return np.array(rows).reshape(len(samples), 4)


def fit_rows(
    terms: FloatArray, seconds: FloatArray, weights: FloatArray | None = None
) -> FloatArray:
    """Non-negative constants c that minimise Σ weight·(terms·c / seconds − 1)².

    Where the rows leave a choice, the second and third constants stay small: a batch's cost per
    token (p1, p5) and its fixed cost (p4, p8) are what real engines show.

    Args:
        terms: shape (rows, constants).
        seconds: shape (rows,), all above 0.
        weights: shape (rows,), at least 0; None: all 1.
    """
    shares = terms / seconds[:, None]
    # Columns of one size: b·I and 1 are five orders of magnitude apart.
    scale = shares.max(axis=0)
    scale[scale == 0] = 1.0
    root = np.ones(len(seconds)) if weights is None else np.sqrt(weights)
    ties = TIE_BREAK * np.eye(terms.shape[1])[1:3]
    rows = np.vstack((shares / scale * root[:, None], ties))
    solution = non_negative_solution(rows, np.concatenate((root, np.zeros(len(ties)))))
    result: FloatArray = solution / scale
    return result


def fit_robustly(
    terms: FloatArray, seconds: FloatArray, weights: FloatArray, rounds: int = 30
) -> FloatArray:
    """``fit_rows`` with the soft L1 loss instead of squares, by reweighting at most so often."""
    constants = fit_rows(terms, seconds, weights)
    for _ in range(rounds):
        residuals = terms @ constants / seconds - 1
        soft = 1 / np.sqrt(1 + (residuals / SOFT_L1_SCALE) ** 2)
        before, constants = constants, fit_rows(terms, seconds, weights * soft)
        if (np.abs(constants - before) <= 1e-4 * constants).all():
            break
    return constants


def fit(samples: Sequence[Sample], *, rng: np.random.Generator, resamples: int = 200) -> Fit:
    """Fit p1..p9 and judge them.

    Args:
        samples: in any order; one part of a sample may be missing.
        rng: draws the held-out parts and the bootstrap.
        resamples: of the bootstrap.

    Raises:
        ProfileError: the samples cannot give a fit; one line that says what is missing.
    """
    prefill = [s for s in samples if s.prefill_s is not None and s.prefill_s > 0]
    decode = [s for s in samples if s.decode_s is not None and s.decode_s > 0 and s.steps >= 1]
    prefill_rows = _Rows(
        "prefill",
        PREFILL_NAMES,
        prefill,
        prefill_terms(prefill),
        np.array([s.prefill_s or 0.0 for s in prefill]),
        _numbered([(s.batch_size, s.prompt_tokens) for s in prefill]),
    )
    decode_rows = _Rows(
        "decode",
        DECODE_NAMES,
        decode,
        decode_terms(decode),
        np.array([s.decode_s or 0.0 for s in decode]),
        _numbered([(s.batch_size, s.prompt_tokens, s.output_tokens) for s in decode]),
    )
    for rows in (prefill_rows, decode_rows):
        _check_enough(rows)
    return Fit(
        prefill=_fit_prefill(prefill_rows, rng, resamples),
        decode=_fit_part(decode_rows, rng, resamples),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The samples of one equation; ``cells`` numbers theirs."""

    part: str
    names: tuple[str, ...]
    samples: Sequence[Sample]
    terms: FloatArray
    seconds: FloatArray
    cells: IntArray

    def chosen(self, keep: NDArray[np.bool_] | IntArray) -> _Rows:
        """Those rows alone."""
        return dataclasses.replace(
            self,
            samples=[self.samples[i] for i in np.arange(len(self.seconds))[keep]],
            terms=self.terms[keep],
            seconds=self.seconds[keep],
            cells=self.cells[keep],
        )

    def without_attention(self) -> _Rows:
        """Rows of Eq. (3) as the paper has it."""
        return dataclasses.replace(self, names=self.names[:-1], terms=self.terms[:, :-1])

    def weights(self) -> FloatArray:
        """1 over the number of repeats: a cell counts once."""
        result: FloatArray = 1 / np.bincount(self.cells)[self.cells]
        return result

    def merged(self) -> _Rows:
        """One row per cell: the repeat with the lower median of the times."""
        order = np.lexsort((self.seconds, self.cells))
        cells = self.cells[order]
        starts = np.flatnonzero(np.diff(cells, prepend=-1))
        counts = np.diff(np.append(starts, len(cells)))
        return self.chosen(order[starts + (counts - 1) // 2])


def _fit_prefill(rows: _Rows, rng: np.random.Generator, resamples: int) -> PartFit:
    """With p9 where the samples speak for it; else as if there were no such constant."""
    interval = (0.0, 0.0)
    if _own_shares(rows.merged())[-1] >= RANK_TOLERANCE:
        found = _fit_part(rows, copy.deepcopy(rng), resamples)
        worth = WORTH_HAVING * (found.eq_3_error or 0.0)
        if found.identified[-1] or found.mean_error < worth:
            return found
        interval = found.intervals[-1]
    plain = _fit_part(rows.without_attention(), rng, resamples)
    return dataclasses.replace(
        plain,
        constants=(*plain.constants, 0.0),
        intervals=(*plain.intervals, interval),
        identified=(*plain.identified, False),
        eq_3_error=plain.mean_error,
    )


def _fit_part(rows: _Rows, rng: np.random.Generator, resamples: int) -> PartFit:
    kept, notes = _without_outliers(rows)
    constants = fit_robustly(kept.terms, kept.seconds, kept.weights())
    folds, validation = _folds(kept, rng)
    predicted = _held_out(kept, folds)
    errors = np.abs(predicted / kept.seconds - 1)
    low, high = np.percentile(_bootstrap(kept, rng, resamples), (2.5, 97.5), axis=0)
    identified, reasons = _identified(kept.merged(), constants, low)
    return PartFit(
        constants=tuple(float(value) for value in constants),
        r2=_r2(kept.seconds, predicted),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
        mean_error=float(errors.mean()),
        validation=validation,
        used=len(kept.seconds),
        outliers=len(rows.seconds) - len(kept.seconds),
        intervals=tuple((float(a), float(b)) for a, b in zip(low, high, strict=True)),
        identified=tuple(identified),
        notes=(*notes, *reasons),
        eq_3_error=_eq_3_error(kept, folds) if rows.names == PREFILL_NAMES else None,
    )


def _numbered(keys: Sequence[Hashable]) -> IntArray:
    """Equal keys, equal numbers, from 0."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _neighbourhoods(samples: Sequence[Sample]) -> IntArray:
    return _numbered(
        [
            (
                round(math.log(max(s.batch_size, 1e-9)) / HOLD_OUT_STEP),
                round(math.log(max(s.prompt_tokens, 1.0)) / HOLD_OUT_STEP),
            )
            for s in samples
        ]
    )


def _check_enough(rows: _Rows) -> None:
    cells = len(np.unique(rows.cells))
    if cells >= MIN_CELLS:
        return
    lengths = "prompt lengths" if rows.part == "prefill" else "prompt or output lengths"
    have = f"only {cells}" if cells else "none"
    raise ProfileError(
        f"the samples have {have} of the {MIN_CELLS} {rows.part} cells that a fit needs: measure "
        f"more combinations of batch sizes and {lengths}"
    )


def _limit(absolute_residuals: FloatArray) -> float:
    """What is beyond it is an outlier. Half of the residuals cannot spoil it."""
    deviation = 1.4826 * float(np.median(absolute_residuals)) if len(absolute_residuals) else 0.0
    return max(math.log(OUTLIER_FACTOR), OUTLIER_DEVIATIONS * deviation)


def _without_outliers(rows: _Rows) -> tuple[_Rows, list[str]]:
    """The rows that are no outliers.

    A repeat is compared with its cell: two that agree are right, however far from them the equation
    is. Of two that differ, the one far from the fit is the outlier, and so is a lonely sample.
    """
    merged = rows.merged()
    constants = fit_robustly(merged.terms, merged.seconds, merged.weights())
    middle = np.zeros(int(rows.cells.max()) + 1)
    middle[merged.cells] = merged.seconds
    apart = np.zeros(len(middle))
    from_cell = np.abs(np.log(rows.seconds / middle[rows.cells]))
    np.maximum.at(apart, rows.cells, from_cell)
    # ln(measured / predicted): a factor of 3 weighs the same in both directions.
    from_fit = np.abs(np.log(rows.seconds / np.maximum(rows.terms @ constants, 1e-300)))
    repeats = np.bincount(rows.cells)[rows.cells]
    cell_limit = _limit(from_cell[repeats >= 3])
    alone = (repeats == 1) | ((repeats == 2) & (apart[rows.cells] > cell_limit))
    far = np.where(repeats >= 3, from_cell > cell_limit, alone & (from_fit > _limit(from_fit)))
    kept = rows.chosen(~far)
    if not far.any():
        return rows, []
    if far.mean() > MAX_OUTLIER_SHARE or len(np.unique(kept.cells)) < MIN_CELLS:
        return rows, [
            f"{int(far.sum())} of {len(far)} {rows.part} samples are far from the fit: too many to "
            "leave out, so they stay and count in the error"
        ]
    return kept, []


def _folds(rows: _Rows, rng: np.random.Generator) -> tuple[IntArray, str]:
    """Which part each row is held out with: a cell whole, cells near each other together."""
    groups = _neighbourhoods(rows.samples)
    name = "combinations of batch size and prompt length"
    if groups.max() + 1 < MIN_CELLS:
        groups, name = _numbered(rows.cells.tolist()), "cells"
    count = int(groups.max()) + 1
    if count < MIN_CELLS_FOR_PARTS:
        return groups, f"each of {count} {name} held out in turn"
    parts = rng.permutation(np.arange(count) % PARTS)
    return parts[groups], f"{count} {name}, a fifth of them held out in turn"


def _held_out(rows: _Rows, folds: IntArray) -> FloatArray:
    """What a fit to the other parts predicts for each row."""
    predicted = np.zeros(len(rows.seconds))
    weights = rows.weights()
    for part in np.unique(folds):
        out = folds == part
        constants = fit_robustly(rows.terms[~out], rows.seconds[~out], weights[~out])
        predicted[out] = rows.terms[out] @ constants
    return predicted


def _eq_3_error(rows: _Rows, folds: IntArray) -> float:
    """Mean held-out error without p9, of the same rows and parts."""
    predicted = _held_out(rows.without_attention(), folds)
    return float(np.mean(np.abs(predicted / rows.seconds - 1)))


def _bootstrap(rows: _Rows, rng: np.random.Generator, resamples: int) -> FloatArray:
    """Constants of as many fits to cells drawn with replacement, each with its repeats."""
    cells = _numbered(rows.cells.tolist())
    count = int(cells.max()) + 1
    weights = rows.weights()
    draws = []
    for _ in range(resamples):
        drawn = np.bincount(rng.integers(count, size=count), minlength=count)[cells]
        chosen = drawn > 0
        kept = rows.terms[chosen], rows.seconds[chosen], (weights * drawn)[chosen]
        draws.append(fit_robustly(*kept, rounds=8))
    return np.array(draws)


def _r2(seconds: FloatArray, predicted: FloatArray) -> float:
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    missed = float(np.sum((seconds - predicted) ** 2))
    return 1 - missed / spread if spread > 0 else math.nan


def _identified(
    merged: _Rows, constants: FloatArray, low: FloatArray
) -> tuple[list[bool], list[str]]:
    """Which constants the samples determine, and why not."""
    names = merged.names
    notes = []
    own = _own_shares(merged)
    tied = own < RANK_TOLERANCE
    if tied.any():
        notes.append(_tie_note(merged, [n for n, t in zip(names, tied, strict=True) if t]))
    errors = _standard_errors(merged, constants, own)
    unclear = (low <= IDENTIFIED_SHARE * constants) | (constants <= IDENTIFIED_DEVIATIONS * errors)
    weak = [n for n, u, t in zip(names, unclear, tied, strict=True) if u and not t]
    if weak:
        notes.append(f"{', '.join(weak)} cannot be distinguished from 0")
    return [not (u or t) for u, t in zip(unclear, tied, strict=True)], notes


def _own_shares(merged: _Rows) -> FloatArray:
    """Of each column, the share (of its norm) that the other columns cannot express."""
    shares = merged.terms / merged.seconds[:, None]
    unit = shares / np.maximum(np.linalg.norm(shares, axis=0), 1e-300)
    own = []
    for i in range(unit.shape[1]):
        others = np.delete(unit, i, axis=1)
        solution, *_ = np.linalg.lstsq(others, unit[:, i], rcond=None)
        own.append(float(np.linalg.norm(unit[:, i] - others @ solution)))
    return np.array(own)


def _standard_errors(merged: _Rows, constants: FloatArray, own: FloatArray) -> FloatArray:
    """Of ordinary least squares: the bootstrap alone is blind to ties that the bound decides."""
    shares = merged.terms / merged.seconds[:, None]
    residuals = shares @ constants - 1
    freedom = max(1, len(residuals) - len(constants))
    deviation = math.sqrt(float(residuals @ residuals) / freedom)
    result: FloatArray = deviation / np.maximum(own * np.linalg.norm(shares, axis=0), 1e-300)
    return result


def _tie_note(merged: _Rows, tied: list[str]) -> str:
    batches = Counter(s.batch_size for s in merged.samples)
    prompts = Counter(s.prompt_tokens for s in merged.samples)
    (batch, _), (prompt, _) = batches.most_common(1)[0], prompts.most_common(1)[0]
    if len(batches) == 1:
        why = f"every {merged.part} sample has batch size {batch:g}"
    elif len(prompts) == 1:
        why = f"every {merged.part} sample has {prompt:g} prompt tokens"
    elif all(s.batch_size == batch or s.prompt_tokens == prompt for s in merged.samples):
        why = (
            f"batch size and prompt length are never both away from {batch:g} and {prompt:g} in "
            f"a {merged.part} sample"
        )
    else:
        why = f"batch sizes and lengths of the {merged.part} samples vary together"
    return f"{', '.join(tied)} cannot be distinguished: {why}"
