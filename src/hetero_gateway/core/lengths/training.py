"""Trains the trees of ``length_model``, and measures how far predictions are off.

A tree splits where that lowers the squared error most: a placement's cost is close to linear in the
output length, so the mean is what is needed. The number of leaves is chosen by the error on the
last quarter of the rows, so that a trace whose lengths depend on nothing gets one leaf.
docs/evidence/predictors.md has the errors, and why not log2 buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.lengths.length_model import (
    ANY_MODEL,
    FEATURES,
    Leaf,
    LengthModel,
    Node,
    Split,
)
from hetero_gateway.core.lengths.predictors import LengthFeatures, OutputLengthPredictor

MIN_ROWS = 50
# With fewer rows, a model's own tree says less than the common one.
MIN_MODEL_ROWS = 500
_LEAVES = (1, 2, 4, 8, 16, 32)
# A leaf has at least this many requests, and at least this share of them.
_MIN_LEAF, _MIN_LEAF_SHARE = 20, 0.005
# A part's mean is drawn to that of the part it was split from as if it had this many more requests.
_SHRINKAGE = 4.0
_VALIDATION_SHARE = 0.25

Features = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthSamples:
    """Finished requests, in the order of their arrival; all (N,).

    ``max_tokens`` is infinite if the client gave no limit; ``models`` is "" where unknown.
    """

    prompt_tokens: FloatArray
    max_tokens: FloatArray
    output_tokens: FloatArray
    models: Sequence[str]

    def __len__(self) -> int:
        return int(self.output_tokens.size)

    def part(self, start: int, stop: int) -> LengthSamples:
        """The requests from ``start`` to before ``stop``."""
        numbers = self.prompt_tokens, self.max_tokens, self.output_tokens
        prompt, limit, output = (column[start:stop] for column in numbers)
        return LengthSamples(prompt, limit, output, self.models[start:stop])

    def features(self) -> Iterator[tuple[LengthFeatures, float]]:
        """Each request as a predictor sees it, and its true output tokens."""
        for model, prompt, limit, output in zip(
            self.models, self.prompt_tokens, self.max_tokens, self.output_tokens, strict=True
        ):
            limit_tokens = int(limit) if math.isfinite(limit) else None
            yield LengthFeatures(model, int(prompt), limit_tokens), float(output)


def fit_length_model(samples: LengthSamples) -> LengthModel:
    """Fit a tree for all requests, and one for each model with ``MIN_MODEL_ROWS`` of them.

    Raises:
        ValueError: fewer than ``MIN_ROWS`` requests.
    """
    if len(samples) < MIN_ROWS:
        raise ValueError(f"{len(samples)} requests are too few: at least {MIN_ROWS} are needed")
    columns = np.stack([samples.prompt_tokens, samples.max_tokens])
    trees = {ANY_MODEL: _fit_tree(columns, samples.output_tokens)}
    names = np.array(samples.models, dtype=object)
    for name in sorted(set(samples.models) - {ANY_MODEL}):
        own = names == name
        if own.sum() >= MIN_MODEL_ROWS:
            trees[name] = _fit_tree(columns[:, own], samples.output_tokens[own])
    return LengthModel(trees)


def _fit_tree(columns: Features, output: FloatArray) -> Node:
    earlier = round(output.size * (1 - _VALIDATION_SHARE))
    errors = []
    for leaves in _LEAVES:
        tree = _grow(columns[:, :earlier], output[:earlier], leaves)
        guess = np.array([_leaf(tree, row).tokens for row in columns[:, earlier:].T])
        errors.append(float(np.mean((guess - output[earlier:]) ** 2)))
    # Of trees within 1 % of the best, take the smaller: the rest is chance, and it is easier to
    # read.
    enough = next(i for i, error in enumerate(errors) if error <= 1.01 * min(errors))
    return _grow(columns, output, _LEAVES[enough])


@dataclass(slots=True, eq=False)
class _Part:
    """The requests of a future leaf, and the best way to split them (gain 0: none)."""

    rows: NDArray[np.intp]
    gain: float
    feature: int
    at: float
    below: _Part | None = None
    above: _Part | None = None


def _grow(columns: Features, output: FloatArray, leaves: int) -> Node:
    """Best first: the split that lowers the squared error most, until there are enough leaves."""
    smallest = max(_MIN_LEAF, math.ceil(_MIN_LEAF_SHARE * output.size))

    def part(rows: NDArray[np.intp]) -> _Part:
        candidates = [
            (*_best_split(columns[i][rows], output[rows], smallest), i) for i in range(len(columns))
        ]
        gain, at, feature = max(candidates)
        return _Part(rows, gain, feature, at)

    root = part(np.arange(output.size))
    open_parts = [root]
    while len(open_parts) < leaves:
        widest = max(open_parts, key=lambda candidate: candidate.gain)
        if widest.gain <= 0:
            break
        below = columns[widest.feature][widest.rows] <= widest.at
        widest.below, widest.above = part(widest.rows[below]), part(widest.rows[~below])
        open_parts.remove(widest)
        open_parts += (widest.below, widest.above)
    return _node(root, output, float(output.mean()))


def _best_split(values: FloatArray, output: FloatArray, smallest: int) -> tuple[float, float]:
    """(gain in squared error, threshold); the gain is 0 if no split is allowed."""
    count = output.size
    if count < 2 * smallest:
        return 0.0, 0.0
    order = np.argsort(values, kind="stable")
    values = values[order]
    sums = np.cumsum(output[order])
    below = np.arange(1, count)
    gain = (
        sums[:-1] ** 2 / below
        + (sums[-1] - sums[:-1]) ** 2 / (count - below)
        - sums[-1] ** 2 / count
    )
    allowed = (values[1:] > values[:-1]) & (below >= smallest) & (below <= count - smallest)
    gain = np.where(allowed, gain, 0.0)
    best = int(gain.argmax())
    # At the lower value itself: half way to "no limit" would not be a number.
    return float(gain[best]), float(values[best])


def _node(part: _Part, output: FloatArray, around: float) -> Node:
    """Convert the grown tree to the kept form; ``around`` is the mean it was split from."""
    own = output[part.rows]
    mean = (float(own.sum()) + _SHRINKAGE * around) / (own.size + _SHRINKAGE)
    if part.below is None or part.above is None:
        return Leaf(max(1.0, round(mean, 2)), int(own.size))
    below, above = _node(part.below, output, mean), _node(part.above, output, mean)
    return Split(FEATURES[part.feature], part.at, below, above)


def _leaf(node: Node, row: FloatArray) -> Leaf:
    while isinstance(node, Split):
        node = node.below if row[FEATURES.index(node.by)] <= node.at else node.above
    return node


# Errors

# Upper ends, in prompt tokens, of the buckets by which errors are reported.
ERROR_BUCKETS = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class LengthError:
    """The error of predicted minus true output tokens, over ``requests`` requests."""

    requests: int
    mae_tokens: float
    bias_tokens: float
    rmse_tokens: float


def replay(predictor: OutputLengthPredictor, samples: LengthSamples) -> FloatArray:
    """Predict each request, capped by its limit, learning from each one afterwards."""
    result = np.empty(len(samples))
    for i, (features, output_tokens) in enumerate(samples.features()):
        tokens = predictor.predict(features)
        limit = features.max_output_tokens
        result[i] = tokens if limit is None else min(tokens, limit)
        predictor.observe(features, output_tokens)
    return result


def error_of(predicted: FloatArray, samples: LengthSamples) -> LengthError:
    """The error over all requests; there must be at least one."""
    return _error(predicted - samples.output_tokens)


def errors_by_prompt(predicted: FloatArray, samples: LengthSamples) -> list[LengthError | None]:
    """The error by prompt length: up to each of ERROR_BUCKETS, and above; None: no requests."""
    buckets = np.searchsorted(np.array(ERROR_BUCKETS), samples.prompt_tokens)
    residuals = predicted - samples.output_tokens
    parts = [residuals[buckets == i] for i in range(len(ERROR_BUCKETS) + 1)]
    return [_error(part) if part.size else None for part in parts]


def _error(residuals: FloatArray) -> LengthError:
    return LengthError(
        int(residuals.size),
        float(np.abs(residuals).mean()),
        float(residuals.mean()),
        float(np.sqrt((residuals**2).mean())),
    )
