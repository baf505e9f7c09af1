"""What is estimated of lengths beside the prediction itself: tokens of a prompt, what a stream has
still to come, and how far a prediction is believed.

What is learnt is kept per model and bounded: at most ``MAX_MODELS`` names, the rest share one
entry, which is also what is known of a model that was never seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray

MAX_MODELS = 256
# The name of the entry that all further models share.
OTHER_MODELS = ""

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
        # The same as lists, for who takes a few of their numbers.
        self._plain: dict[str, list[float]] = {}
        self._unknown_plain: list[float] = self._unknown.tolist()

    def table(self, model: str) -> FloatArray:
        """Expected further output tokens of one sequence, by stage; do not write to it."""
        return self._tables.get(self._current(model), self._unknown)

    def plain(self, model: str) -> list[float]:
        """``table`` as a list."""
        return self._plain.get(self._current(model), self._unknown_plain)

    def _current(self, model: str) -> str:
        """The entry that a model's table is under, made anew where it is due."""
        if model not in self._lengths:
            model = OTHER_MODELS
        # Made only when someone asks: most policies never do.
        if self._unseen.get(model, 0) >= self._REFRESH_EVERY:
            self._unseen[model] = 0
            table = self._residuals(np.array(self._lengths[model]))
            self._tables[model], self._plain[model] = table, table.tolist()
        return model

    def observe(self, model: str, output_tokens: float) -> None:
        """Learn from one finished sequence."""
        lengths = self._lengths.get(model)
        if lengths is None:
            model = bounded_model(model, self._lengths)
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
        sums = self._sums.get(model) or self._sums.get(OTHER_MODELS)
        return self._prior if sums is None else sums[0] / sums[1]

    def tokens(self, model: str, text_bytes: int) -> int:
        """Estimated tokens of ``text_bytes`` bytes of prompt, at least 1."""
        return max(1, round(text_bytes / self.ratio(model)))

    def observe(self, model: str, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from one finished request whose prompt length the engine told."""
        if text_bytes <= 0 or prompt_tokens <= 0:
            return
        model = bounded_model(model, self._sums)
        total_bytes, total_tokens = self._sums.get(
            model, (self._prior * self._prior_tokens, self._prior_tokens)
        )
        # Forget so that about the last 2000 prior weights' worth of tokens count.
        keep = min(1.0, 2000 * self._prior_tokens / (total_tokens + prompt_tokens))
        self._sums[model] = (
            (total_bytes + text_bytes) * keep,
            (total_tokens + prompt_tokens) * keep,
        )


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


def bounded_model(model: str, known: Mapping[str, object]) -> str:
    """The entry that a model is learnt under: its own, or that of all others."""
    return model if model in known or len(known) < MAX_MODELS else OTHER_MODELS
