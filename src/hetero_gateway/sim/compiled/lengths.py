"""``core/lengths/predictors`` over arrays: one model's, from its first request on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.lengths.predictors import FAR, MEMORY_REQUESTS
from hetero_gateway.sim.arrays import Integers

# More than the bits of any prompt's length.
CLASSES = 64
_VALUE, _WEIGHT = range(2)
_ALL = 0  # the row of all lengths; the others are those of a length's bits, from 1 on


class BucketMeans(NamedTuple):
    """``BucketMeanPredictor``. ``means``: (``CLASSES``, 2), a mean and its weight; 0: none yet.

    ``learns``: or else ``prior_tokens`` is all that is known (``ConstantPredictor``).
    """

    means: FloatArray
    prior_tokens: float
    prior_requests: float
    learns: bool


def length_classes(prompt_tokens: Integers) -> Integers:
    """``int.bit_length`` of each."""
    return np.frexp(prompt_tokens.astype(np.float64))[1].astype(np.int64)


def predict(b: BucketMeans, length_class: int) -> float:
    mean = b.prior_tokens
    if b.means[length_class, _WEIGHT] > 0:
        mean = b.means[length_class, _VALUE]
    elif b.means[_ALL, _WEIGHT] > 0:
        mean = b.means[_ALL, _VALUE]
    return max(1.0, mean)


def learn(b: BucketMeans, length_class: int, output_tokens: int) -> None:
    if not b.learns:
        return
    if b.means[_ALL, _WEIGHT] == 0:
        b.means[_ALL, _VALUE] = b.prior_tokens
        b.means[_ALL, _WEIGHT] = b.prior_requests
    if b.means[length_class, _WEIGHT] == 0:
        b.means[length_class, _VALUE] = b.means[_ALL, _VALUE]
        b.means[length_class, _WEIGHT] = b.prior_requests
    _add(b.means[_ALL], output_tokens)
    _add(b.means[length_class], output_tokens)


def _add(mean: FloatArray, value: float) -> None:
    mean[_WEIGHT] = min(mean[_WEIGHT] + 1, MEMORY_REQUESTS)
    mean[_VALUE] += (min(value, FAR * mean[_VALUE]) - mean[_VALUE]) / mean[_WEIGHT]
