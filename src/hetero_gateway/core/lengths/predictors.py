"""How long a prompt is and how long its answer will be: estimates that learn from what finished.

The paper (section 4.1) leaves the output-length predictor open and evaluates a normal draw. Here
are that one, a constant, and the default, a conditional mean; ``length_model`` has the one that is
trained offline. What is learnt is kept per model and bounded: at most ``MAX_MODELS`` names, the
rest share one entry.

Reading a request's bytes is the gateway's work; those here see only counts. A predictor of the
user's own may ask ``LengthFeatures`` for the prompt's text (docs/predictors.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray

MAX_MODELS = 256
# A mean over about the last thousand requests of a bucket: it follows a change of traffic within
# minutes and still averages the heavy tail of output lengths.
_MEMORY_REQUESTS = 1000.0
_OTHER_MODELS = ""


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
        memo: for the predictor's own use: ``observe`` gets the object that ``predict`` got.
    """

    __slots__ = ("_read_text", "body", "max_output_tokens", "memo", "model", "prompt_tokens")

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        max_output_tokens: int | None = None,
        body: bytes = b"",
        read_text: Callable[[bytes], str] = _no_text,
    ) -> None:
        self.model = model
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


class ConstantPredictor:
    """Always the same number of tokens."""

    def __init__(self, mean_tokens: float) -> None:
        self._mean_tokens = max(1.0, mean_tokens)

    def predict(self, features: LengthFeatures) -> float:
        return self._mean_tokens

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

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        pass


class _RunningMean:
    """A mean that starts at a prior and forgets slowly."""

    __slots__ = ("value", "weight")

    def __init__(self, prior: float, prior_weight: float) -> None:
        self.value = prior
        self.weight = prior_weight

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, _MEMORY_REQUESTS)
        self.value += (value - self.value) / self.weight


class BucketMeanPredictor:
    """The default: the mean output length by prompt-length bucket (log2) and model, learnt online.

    A bucket starts at the model's mean over all lengths, which starts at ``prior_tokens``; each
    prior weighs as much as ``prior_requests`` finished requests. Never a random draw: the spread
    of a draw only moves requests to where they do not belong.
    """

    def __init__(self, prior_tokens: float, prior_requests: float = 8.0) -> None:
        self._prior_tokens = prior_tokens
        self._prior_requests = prior_requests
        self._models: dict[str, _RunningMean] = {}
        self._buckets: dict[tuple[str, int], _RunningMean] = {}

    def predict(self, features: LengthFeatures) -> float:
        model = features.model
        if model not in self._models:
            model = _OTHER_MODELS
        key = (model, features.prompt_tokens.bit_length())
        mean = self._buckets.get(key) or self._models.get(model)
        return max(1.0, self._prior_tokens if mean is None else mean.value)

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        model = _bounded(features.model, self._models)
        overall = self._models.get(model)
        if overall is None:
            overall = _RunningMean(self._prior_tokens, self._prior_requests)
            self._models[model] = overall
        key = (model, features.prompt_tokens.bit_length())
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _RunningMean(overall.value, self._prior_requests)
        overall.add(output_tokens)
        bucket.add(output_tokens)


# How far a stream is, in powers of two: what is left of it changes with the order of magnitude.
STAGE_TOKENS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ResidualLives:
    """E[O − g | O > g] by stage of g and model: what a stream has still to come (tokens).

    From the last finished lengths, with a prior of ``prior_requests`` requests of a memoryless
    length, for which it is ``prior_tokens`` at every stage.
    """

    _HISTORY = 2048
    _REFRESH_EVERY = 32  # finished requests; a table costs as much as a few decisions

    def __init__(self, prior_tokens: float, prior_requests: float = 8.0) -> None:
        self._prior_tokens = prior_tokens
        self._prior_requests = prior_requests
        self._lengths: dict[str, deque[float]] = {}
        self._tables: dict[str, FloatArray] = {}
        self._unseen: dict[str, int] = {}  # finished since the table was made
        self._unknown = np.full(len(STAGE_TOKENS), prior_tokens)

    def table(self, model: str) -> FloatArray:
        """Expected further output tokens of one sequence, by stage; do not write to it."""
        # Made only when someone asks: most policies never do.
        if self._unseen.get(model, 0) >= self._REFRESH_EVERY:
            self._unseen[model] = 0
            self._tables[model] = self._residuals(np.array(self._lengths[model]))
        return self._tables.get(model, self._unknown)

    def observe(self, model: str, output_tokens: float) -> None:
        """Learn from one finished sequence."""
        lengths = self._lengths.get(model)
        if lengths is None:
            model = _bounded(model, self._lengths)
            lengths = self._lengths.setdefault(model, deque(maxlen=self._HISTORY))
        lengths.append(output_tokens)
        self._unseen[model] = self._unseen.get(model, 0) + 1

    def _residuals(self, lengths: FloatArray) -> FloatArray:
        # Those in a stage are on average in its middle; the last one has no end.
        starts = np.array(STAGE_TOKENS, dtype=float)
        middles = starts + np.append(np.diff(starts), starts[-1]) / 2
        ordered = np.sort(lengths)
        sums = np.append(np.cumsum(ordered[::-1])[::-1], 0.0)
        first = np.searchsorted(ordered, middles, side="right")
        counts = ordered.size - first
        left = sums[first] - counts * middles
        result: FloatArray = (left + self._prior_requests * self._prior_tokens) / (
            counts + self._prior_requests
        )
        return result


class BytesPerToken:
    """The bytes-per-token ratio per model, learnt from the prompt tokens that engines report.

    The ratio is of sums, not the mean of ratios: short prompts, where the chat template's own
    tokens weigh most, then count by their size.
    """

    def __init__(self, prior: float, prior_tokens: float = 4096.0) -> None:
        self._prior = prior
        self._prior_tokens = prior_tokens
        self._sums: dict[str, tuple[float, float]] = {}

    def ratio(self, model: str) -> float:
        sums = self._sums.get(model) or self._sums.get(_OTHER_MODELS)
        return self._prior if sums is None else sums[0] / sums[1]

    def tokens(self, model: str, text_bytes: int) -> int:
        """Estimated tokens of ``text_bytes`` bytes of prompt, at least 1."""
        return max(1, round(text_bytes / self.ratio(model)))

    def observe(self, model: str, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from one finished request whose prompt length the engine told."""
        if text_bytes <= 0 or prompt_tokens <= 0:
            return
        model = _bounded(model, self._sums)
        total_bytes, total_tokens = self._sums.get(
            model, (self._prior * self._prior_tokens, self._prior_tokens)
        )
        # Forget so that about the last 2000 prior weights' worth of tokens count.
        keep = min(1.0, 2000 * self._prior_tokens / (total_tokens + prompt_tokens))
        self._sums[model] = (
            (total_bytes + text_bytes) * keep,
            (total_tokens + prompt_tokens) * keep,
        )


def _bounded(model: str, known: Mapping[str, object]) -> str:
    return model if model in known or len(known) < MAX_MODELS else _OTHER_MODELS


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
