"""Fits p1..p9 to live traffic: the rows of ``observation.py``, with the old constants as a prior.

Traffic seldom spans the grid that a profiling run would choose. Batches of one size and contexts of
one length cannot tell the four constants of a decode step apart, so every constant has its present
value as a prior: the fit is the present profile, scaled by its drift, and moved as far as the rows
insist. By Bayes' rule for a linear model, with y the seconds of a row and X its terms,

    minimise  Σ ((X·c − y) / (σ·X·c₀))²  +  Σ ((c − c₀) / (s·u))²,   c ≥ 0

    symbol  is
    c₀      the present constants, prefill's and decode's each times its observed ratio
    σ       relative scatter of the rows, from the fit itself
    s·u     how far a constant may be off: s = 1 of its own size u, or, if c₀ is 0, of the size
            at which it would make up a tenth of the rows' time

Rows are divided by their modelled time, not their observed time: both contain the noise, but in
the divisor it would bias the result. Rows far off the fit count less (Huber's weights).
A constant is *identified* when the rows leave it less than half of that freedom. Attention (p9)
that was not known before must also be above two standard errors: a small p9 is a large share of a
prompt far longer than those seen. Otherwise it stays 0, and the others are fitted without it. The
same holds for p3, which prompts that run alone cannot tell from p1: noise in the steps would.

``bounded`` is what ``scheduler.recalibrate`` puts between such a fit and the scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.least_squares import non_negative_solution
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.observation import FirstTokenRow, StepRow

NAMES = tuple(f.name for f in dataclasses.fields(Constants))
# With fewer rows of steps there is too little to fit.
LEAST_ROWS = 20
# A recalibrated constant stays within this factor of the profile's, either way, and so does every
# prefill and step time, since both are sums of constants times what they multiply.
MOST_CHANGE = 4.0

# Which constants are prefill's; the others are decode's.
_PREFILL = np.array([name in ("p1", "p2", "p3", "p4", "p9") for name in NAMES])
_PER_LENGTH, _ATTENTION = NAMES.index("p3"), NAMES.index("p9")

_ZERO_SHARE = 0.1
_IDENTIFIED = 0.5
_SURE_DEVIATIONS = 2.0
_ROUNDS = 4
_HUBER = 2.0
_LEAST_SCATTER = 0.02
# Every fifth row is held out for the reported error.
_HOLD_OUT = 5
# A ratio of prefill or decode is believed within these bounds.
_MOST_RATIO = 100.0


class Errors(NamedTuple):
    """Relative errors of predicted times on rows that were not fitted; None: no such row."""

    median: float | None
    p90: float | None


class Refit(NamedTuple):
    """The result of a fit to rows.

    ``identified``: constants that the rows determine; the others are the old ones, scaled.
    ``decode``, ``prefill``: errors on held-out rows of steps, and of first tokens.
    """

    constants: Constants
    identified: frozenset[str]
    step_rows: int
    first_token_rows: int
    decode: Errors
    prefill: Errors


def refit(
    steps: Sequence[StepRow],
    first_tokens: Sequence[FirstTokenRow],
    present: Constants,
    first_token_s: float = 0.0,
) -> Refit | None:
    """Fit the constants; None if there are fewer than ``LEAST_ROWS`` rows with steps.

    Args:
        steps, first_tokens: the rows, of any order and age. Steps with an unknown number of
            prefilled tokens, and first tokens that are not ``clear``, are left out.
        present: constants that the rows are assumed to be close to, up to a factor.
        first_token_s: of the profile: time of its first tokens beside their steps.
    """
    steps = [row for row in steps if row.steps > 0 and row.known]
    clear = [
        row._replace(ttft_s=row.ttft_s - first_token_s)
        for row in first_tokens
        if row.clear and row.ttft_s > first_token_s
    ]
    if len(steps) < LEAST_ROWS:
        return None
    terms = np.array([r.terms for r in steps] + [r.terms for r in clear])
    times = np.array([*(row.duration_s for row in steps), *(row.ttft_s for row in clear)])
    is_step = np.arange(len(times)) < len(steps)
    held = np.arange(len(times)) % _HOLD_OUT == _HOLD_OUT - 1
    c0 = np.array(dataclasses.astuple(present))
    if c0[_PER_LENGTH] == 0 and all(row.prompts == 1 for row in clear):
        terms[:, _PER_LENGTH] = 0
    solution, spread, deviation = _fit(terms, times, c0)
    if c0[_ATTENTION] == 0 and not (
        spread[_ATTENTION] < _IDENTIFIED
        and solution[_ATTENTION] > _SURE_DEVIATIONS * deviation[_ATTENTION]
    ):
        terms[:, _ATTENTION] = 0
        solution, spread, _ = _fit(terms, times, c0)
    trial, _, _ = _fit(terms[~held], times[~held], c0)
    errors = np.abs(terms[held] @ trial / times[held] - 1)
    identified = frozenset(n for n, s in zip(NAMES, spread, strict=True) if s < _IDENTIFIED)
    return Refit(
        _constants(solution, present),
        identified,
        len(steps),
        len(clear),
        _errors(errors[is_step[held]]),
        _errors(errors[~is_step[held]]),
    )


def bounded(fitted: Constants, original: Constants) -> Constants:
    """``fitted``, no constant further than ``MOST_CHANGE`` from ``original``; a 0 stays 0."""
    values = []
    for name in NAMES:
        value, base = getattr(fitted, name), getattr(original, name)
        values.append(min(max(value, base / MOST_CHANGE), base * MOST_CHANGE))
    return Constants(*values)


def _errors(errors: FloatArray) -> Errors:
    if not errors.size:
        return Errors(None, None)
    return Errors(float(np.median(errors)), float(np.percentile(errors, 90)))


def _fit(
    terms: FloatArray, times: FloatArray, present: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The constants, the share of its freedom that each has left, and its standard error, s.

    A share of 1 means that the rows say nothing.
    """
    base = _scaled(terms, times, present)
    unit = base.copy()
    mean_s, mean_terms = times.mean(), terms.mean(axis=0)
    free = (unit == 0) & (mean_terms > 0)
    unit[free] = _ZERO_SHARE * mean_s / mean_terms[free]
    unit[unit == 0] = 1.0  # 0 and never observed: it stays 0
    solution = base
    weights, scatter = np.ones(len(times)), 1.0
    for _ in range(_ROUNDS):
        # The model's time of each row, not too far from the observed one.
        scale = np.clip(terms @ solution, times / 3, times * 3)
        rows, wanted = terms / scale[:, None] * unit, times / scale
        misses = rows @ (solution / unit) - wanted
        scatter = max(_LEAST_SCATTER, float(1.4826 * np.median(np.abs(misses))))
        weights = 1 / np.sqrt(np.maximum(1.0, np.abs(misses) / (_HUBER * scatter)))
        weighted = rows * (weights / scatter)[:, None]
        lhs = np.concatenate((weighted, np.eye(len(base))))
        rhs = np.concatenate((wanted * weights / scatter, base / unit))
        found = non_negative_solution(lhs, rhs)
        solution = found * unit
    covariance = np.linalg.inv(lhs.T @ lhs)
    spread = np.sqrt(np.diag(covariance))
    return solution, spread, spread * unit


def _scaled(terms: FloatArray, times: FloatArray, present: FloatArray) -> FloatArray:
    """The present constants, prefill's and decode's each scaled to fit the rows best."""
    each = (_PREFILL, ~_PREFILL)
    phases = np.stack([terms[:, phase] @ present[phase] for phase in each], axis=1)
    total = phases.sum(axis=1)
    usable = total > 0
    ratio = float(times[usable].sum() / total[usable].sum()) if usable.any() else 1.0
    ratio = min(_MOST_RATIO, max(1 / _MOST_RATIO, ratio))
    # A common factor is certain; that the two differ needs evidence from the rows: a weak prior.
    rows = phases[usable] * ratio / times[usable, None]
    lhs = np.concatenate((rows, 0.5 * np.eye(2)))
    rhs = np.concatenate((np.ones(len(rows)), 0.5 * np.ones(2)))
    found = non_negative_solution(lhs, rhs)
    low, high = 1 / _MOST_RATIO, _MOST_RATIO
    prefill, decode = (float(np.clip(ratio * f, low, high)) for f in found)
    result: FloatArray = present * np.where(_PREFILL, prefill, decode)
    return result


def _constants(values: FloatArray, present: Constants) -> Constants:
    if values[~_PREFILL].sum() <= 0:
        # Only possible if the rows are nonsense; a step must take some time.
        return present
    return Constants(*(float(v) for v in values))
