"""How long an answer will be: predictors that learn from what finished.

The paper (section 4.1) leaves the output-length predictor open and evaluates a normal draw. Here
are that one, a constant, and the default, a conditional mean; ``length_model`` has the one that is
trained offline. What is learnt is kept per model, as in ``estimates``.

Reading a request's bytes is the gateway's work; those here see only counts. A predictor of the
user's own may ask ``LengthFeatures`` for the prompt's text (docs/design/predictors.md).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.lengths.estimates import OTHER_MODELS, bounded_model

# A mean over about the last thousand requests of a bucket: it follows a change of traffic within
# minutes and still averages the heavy tail of output lengths.
MEMORY_REQUESTS = 1000.0

# Prompts' beginnings that are kept apart, the ones used least recently forgotten first. Some 200
# bytes each.
_MOST_BEGINNINGS = 4096

# A value that is this many times the mean counts as that.
FAR = 8.0


def _no_text(body: bytes) -> str:
    return ""


class LengthFeatures:
    """What is known of a request before it is answered.

    Not a dataclass: one is made for every request, and a frozen one costs four times as much.

    Attributes:
        model: the name that the request asks for.
        prompt_tokens: of one sequence, estimated or exact; at least 1.
        max_output_tokens: the client's limit, at least 1; None: none was given.
        body: the request's JSON as it came; empty in the simulator and in ``explain``.
        beginning: a number that all prompts with the same beginning have (``core/prefixes/keys``),
            the system prompt's mostly; None: it is not known.
        memo: for the predictor's own use: ``observe`` gets the object that ``predict`` got.
    """

    __slots__ = (
        "_read_text",
        "beginning",
        "body",
        "max_output_tokens",
        "memo",
        "model",
        "prompt_tokens",
    )

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        max_output_tokens: int | None = None,
        body: bytes = b"",
        read_text: Callable[[bytes], str] = _no_text,
        beginning: int | None = None,
    ) -> None:
        self.model = model
        self.beginning = beginning
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.body = body
        self.memo: Any = None
        self._read_text = read_text

    def prompt_text(self) -> str:
        """The prompt's text, decoded now: what the hot path never does. "" where there is none."""
        return self._read_text(self.body)


class OutputLengthPredictor(Protocol):
    """Predicts the output tokens of one sequence.

    Both methods are called on the gateway's event loop, once per request, and must not wait.
    """

    def predict(self, features: LengthFeatures) -> float:
        """Expected output tokens, at least 1; the caller caps it by what the request allows."""
        ...

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        """Learn from a finished request: its output tokens, the mean where it had n sequences."""
        ...


def capped_output_tokens(
    predicted_tokens: float,
    max_output_tokens: int | None,
    context_tokens: int | None,
    prompt_tokens: int,
) -> float:
    """A prediction capped by the client's limit and by what the context window leaves; at least 1.

    vLLM clamps the output silently when prompt + max_tokens is more than the context.
    """
    if max_output_tokens is not None:
        predicted_tokens = min(predicted_tokens, max_output_tokens)
    if context_tokens is not None:
        predicted_tokens = min(predicted_tokens, context_tokens - prompt_tokens)
    return max(1.0, predicted_tokens)


def learn(
    predictor: OutputLengthPredictor, finished: Sequence[tuple[LengthFeatures, float]]
) -> None:
    """Have a predictor observe some finished requests, at once if it has a way to."""
    at_once = getattr(predictor, "observe_many", None)
    if at_once is not None:
        at_once(finished)
        return
    for features, output_tokens in finished:
        predictor.observe(features, output_tokens)


class ConstantPredictor:
    """Always the same number of tokens."""

    def __init__(self, mean_tokens: float) -> None:
        self.mean_tokens = max(1.0, mean_tokens)

    def predict(self, features: LengthFeatures) -> float:
        return self.mean_tokens

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        pass


class NormalPredictor:
    """The paper's: a normal draw, clipped at 1 token (erratum 13: it would go negative)."""

    def __init__(self, mean_tokens: float, sd_tokens: float, rng: np.random.Generator) -> None:
        self._mean_tokens = mean_tokens
        self._sd_tokens = sd_tokens
        self._rng = rng

    def predict(self, features: LengthFeatures) -> float:
        return max(1.0, self._rng.normal(self._mean_tokens, self._sd_tokens))

    def next_predictions(self, count: int) -> FloatArray:
        """What it would say this many times from now on."""
        rng = copy.deepcopy(self._rng)
        return np.maximum(1.0, rng.normal(self._mean_tokens, self._sd_tokens, count))

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        pass


class _RunningMean:
    """A mean that starts at a prior and forgets slowly; far more than itself moves it little."""

    __slots__ = ("value", "weight")

    def __init__(self, prior: float, prior_weight: float) -> None:
        self.value = prior
        self.weight = prior_weight

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, MEMORY_REQUESTS)
        # Of memoryless lengths 1 in 3 000 is beyond: an engine that makes them up is held back.
        self.value += (min(value, FAR * self.value) - self.value) / self.weight


class BucketMeanPredictor:
    """The default: the mean output length by prompt-length bucket (log2) and model, learnt online.

    A bucket starts at the model's mean over all lengths, which starts at ``prior_tokens``; each
    prior weighs as much as ``prior_requests`` finished requests. Never a random draw: the spread
    of a draw only moves requests to where they do not belong.

    Prompts that begin alike are of one application, which has answers of its own: where beginnings
    are known, a bucket has a mean for each of them, too, and that starts at the bucket's. The
    bucket then learns from beginnings that are new: they are what it predicts.
    """

    def __init__(self, prior_tokens: float, prior_requests: float = 8.0) -> None:
        self.prior_tokens = prior_tokens
        self.prior_requests = prior_requests
        self._models: dict[str, _RunningMean] = {}
        self._buckets: dict[tuple[str, int], _RunningMean] = {}
        # By bucket and beginning, which says the model, too; least recently used first. (A plain
        # dict walks past all that were deleted at its front.)
        self._beginnings: OrderedDict[tuple[int, int], _RunningMean] = OrderedDict()

    @property
    def has_learnt(self) -> bool:
        """It has seen a request finish."""
        return bool(self._models)

    def predict(self, features: LengthFeatures) -> float:
        model = features.model
        if model not in self._models:
            model = OTHER_MODELS
        size = features.prompt_tokens.bit_length()
        mean = None
        if features.beginning is not None:
            mean = self._beginnings.get((size, features.beginning))
        if mean is None:
            mean = self._buckets.get((model, size)) or self._models.get(model)
        return max(1.0, self.prior_tokens if mean is None else mean.value)

    def observe_many(self, finished: Iterable[tuple[LengthFeatures, float]]) -> None:
        for features, output_tokens in finished:
            self.observe(features, output_tokens)

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        model = features.model
        overall = self._models.get(model)
        if overall is None:
            model = bounded_model(model, self._models)
            overall = self._models.get(model)
        if overall is None:
            overall = _RunningMean(self.prior_tokens, self.prior_requests)
            self._models[model] = overall
        size = features.prompt_tokens.bit_length()
        bucket = self._buckets.get((model, size))
        if bucket is None:
            bucket = _RunningMean(overall.value, self.prior_requests)
            self._buckets[model, size] = bucket
        if features.beginning is not None:
            means, key = self._beginnings, (size, features.beginning)
            mean = means.get(key)
            if mean is None:
                if len(means) >= _MOST_BEGINNINGS:
                    means.popitem(last=False)
                mean = means[key] = _RunningMean(bucket.value, self.prior_requests)
            else:
                means.move_to_end(key)
            mean.add(output_tokens)
            if mean.weight >= 2 * self.prior_requests:
                return
        overall.add(output_tokens)
        bucket.add(output_tokens)
