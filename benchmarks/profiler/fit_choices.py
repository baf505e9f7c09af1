"""Why the fit is as it is: what becomes of planted constants under four ways of fitting.

    python benchmarks/profiler/fit_choices.py [--engines 40]

Random engines with constants of everyday size (some of them 0) are measured on a grid of 24 cells,
three times each, with noise; then predictions are compared with the times without noise. Printed is
the mean over engines of the error of the worst cell.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.fitting import Sample, eq_3_terms, fit_robustly, fit_rows

CELLS = [
    Sample(b, i, 2, None, None) for b, i in product((1, 2, 4, 8, 16, 32), (32, 128, 512, 1500))
]
REPEATS = 3
TYPICAL = np.array((1e-4, 1e-3, 1e-5, 2e-2))

Fitter = Callable[[FloatArray, FloatArray], FloatArray]
Noise = Callable[[np.random.Generator, int], FloatArray]


def plain(terms: FloatArray, seconds: FloatArray) -> FloatArray:
    """Least squares of seconds, as in the paper; unbounded."""
    solution, *_ = np.linalg.lstsq(terms, seconds, rcond=None)
    return np.asarray(solution)


def soft(terms: FloatArray, seconds: FloatArray) -> FloatArray:
    return fit_robustly(terms, seconds, np.ones(len(seconds)))


def of_repeats(take: Callable[..., FloatArray], fitter: Fitter) -> Fitter:
    """Fit one row per cell."""

    def fit_cells(terms: FloatArray, seconds: FloatArray) -> FloatArray:
        return fitter(terms[::REPEATS], take(seconds.reshape(-1, REPEATS), axis=1))

    return fit_cells


FITTERS: dict[str, Fitter] = {
    "squares of seconds (the paper's)": plain,
    "relative squares": fit_rows,
    "soft L1 of relative residuals (ours)": soft,
    "the same, median of each cell": of_repeats(np.median, soft),
    "the same, minimum of each cell": of_repeats(np.min, soft),
}


def normal(rng: np.random.Generator, size: int) -> FloatArray:
    return 1 + 0.03 * rng.normal(size=size)


def strong(rng: np.random.Generator, size: int) -> FloatArray:
    return np.maximum(0.2, 1 + 0.1 * rng.normal(size=size))


def with_outliers(rng: np.random.Generator, size: int) -> FloatArray:
    return normal(rng, size) * np.where(rng.random(size) < 0.05, 3, 1)


def one_sided(rng: np.random.Generator, size: int) -> FloatArray:
    return 1 + 0.05 * rng.exponential(size=size)


NOISES: dict[str, Noise] = {
    "3 % normal": normal,
    "and 5 % of times × 3": with_outliers,
    "5 % one-sided": one_sided,
    "10 % normal": strong,
}


def worst_errors(fitter: Fitter, noise: Noise, engines: int) -> FloatArray:
    """Of each engine, the relative error of its worst cell. The same engines for every fitter."""
    rng = np.random.default_rng(0)
    terms = eq_3_terms(CELLS)
    rows = np.repeat(terms, REPEATS, axis=0)
    result = []
    for _ in range(engines):
        planted = TYPICAL * np.exp(rng.uniform(-1.5, 1.5, 4)) * (rng.random(4) > 0.25)
        planted[3] = max(planted[3], 1e-3)
        measured = rows @ planted * noise(rng, len(rows))
        found = fitter(rows, measured)
        result.append(np.abs(terms @ found / (terms @ planted) - 1).max())
    return np.array(result)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=40)
    args = parser.parse_args(argv)
    print("| fit | " + " | ".join(NOISES) + " |")
    print("|---|" + "---:|" * len(NOISES))
    for name, fitter in FITTERS.items():
        cells = [f"{worst_errors(fitter, n, args.engines).mean():.1%}" for n in NOISES.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
