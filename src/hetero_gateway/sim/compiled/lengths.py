"""``core/lengths/predictors`` over tables: one model's, from its first request on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.core.lengths.predictors import add_to
from hetero_gateway.sim.compiled.tables import Requests

# More than the bits of any prompt's length.
CLASSES = 64
_ALL = 0  # the row of all lengths; the others are those of a length's bits, from 1 on


class BucketMeans(NamedTuple):
    """``BucketMeanPredictor``. ``means``: rows of ``RunningMean``; weight 0: none yet.

    ``learns``: or else ``prior_tokens`` is all that is known (``ConstantPredictor``).
    """

    means: Any
    prior_tokens: float
    prior_requests: float
    learns: bool


def bucket_means(prior_tokens: float, prior_requests: float = 1.0, *, learns: bool) -> BucketMeans:
    means = np.zeros(CLASSES, [("value", "f8"), ("weight", "f8")]).view(np.recarray)
    return BucketMeans(means, prior_tokens, prior_requests, learns)


def length_classes(prompt_tokens: Integers) -> Integers:
    """``int.bit_length`` of each."""
    return np.frexp(prompt_tokens.astype(np.float64))[1].astype(np.int64)


def predicted_tokens(b: BucketMeans, r: Requests, request: int) -> float:
    if len(r.predictions) > 0:
        return float(r.predictions[request])
    for mean in (b.means[r.length_class[request]], b.means[_ALL]):
        if mean.weight > 0:
            return float(max(1.0, mean.value))
    return max(1.0, b.prior_tokens)


def learn(b: BucketMeans, length_class: int, output_tokens: int) -> None:
    if not b.learns:
        return
    mean, overall = b.means[length_class], b.means[_ALL]
    if overall.weight == 0:
        overall.value, overall.weight = b.prior_tokens, b.prior_requests
    if mean.weight == 0:
        mean.value, mean.weight = overall.value, b.prior_requests
    add_to(overall, output_tokens)
    add_to(mean, output_tokens)
