"""From measured batches to p1..p8: least squares of relative errors, no constant below 0.

Paper section 3.1 fits Eqs. (3) and (4) by plain least squares. That weighs a millisecond of a long
batch as much as one of a short step, and lets constants turn negative (erratum 14): here each row
is divided by its time, and the solution is bounded by 0 (non-negative least squares).

Where a sample comes from, and files, are the profiler's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from hetero_gateway.core.cost_model import FloatArray


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


def prefill_terms(samples: list[Sample]) -> FloatArray:
    """What p1..p4 multiply in Eq. (3), a row per sample: (b·I, b, I, 1)."""
    return np.array(
        [(s.batch_size * s.prompt_tokens, s.batch_size, s.prompt_tokens, 1.0) for s in samples]
    ).reshape(len(samples), 4)


def decode_terms(samples: list[Sample]) -> FloatArray:
    """What p5..p8 multiply in Eq. (4), a row per sample, summed over its steps."""
    rows = []
    for s in samples:
        n, b = s.steps, s.batch_size
        cached = n * s.prompt_tokens + n * (n + 1) / 2  # Σ (I + k), k = 1..n
        rows.append((b * cached, b * n, cached, n))
    return np.array(rows).reshape(len(samples), 4)


def fit_rows(terms: FloatArray, seconds: FloatArray) -> FloatArray:
    """Non-negative constants c that minimise Σ (terms·c / seconds − 1)².

    Args:
        terms: shape (samples, constants).
        seconds: shape (samples,), all above 0.
    """
    shares = terms / seconds[:, None]
    # Columns of one size: b·I and 1 are five orders of magnitude apart.
    scale = shares.max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(shares / scale, np.ones(len(seconds)))
    result: FloatArray = solution / scale
    return result
