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


# So many times the length that nine of ten answers are within is as long as one is believed to be.
_FAR = 4.0


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
        # A tenth of them may be made up: what is far beyond the others counts as the farthest.
        ordered = np.minimum(ordered, _FAR * ordered[ordered.size * 9 // 10])
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
    tokens weigh most, then count by their size. It is of the last ``_HISTORY`` reports, each of
    them taken to be within a factor of their median by bytes: what a few engines make up moves
    it little, and is forgotten.
    """

    _HISTORY = 128
    _REFRESH_EVERY = 16  # reports, once there are as many
    # No text has fewer or more bytes per token.
    _BOUNDS = (0.25, 64.0)
    # Honest prompts of one model are within it: prose has 4 to 5 bytes per token, digits 1 to 3.
    _FACTOR = 2.0

    def __init__(self, prior: float, prior_tokens: float = 4096.0) -> None:
        self._prior = prior
        self._prior_tokens = prior_tokens
        self._reports: dict[str, deque[tuple[float, int]]] = {}  # ratio, bytes
        self._unseen: dict[str, int] = {}  # reports since the ratio was worked out
        self._ratios: dict[str, float] = {}

    def ratio(self, model: str) -> float:
        return self._ratios.get(model) or self._ratios.get(OTHER_MODELS) or self._prior

    def tokens(self, model: str, text_bytes: int) -> int:
        """Estimated tokens of ``text_bytes`` bytes of prompt, at least 1."""
        return max(1, round(text_bytes / self.ratio(model)))

    def observe(self, model: str, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from one finished request whose prompt length the engine told."""
        if text_bytes <= 0 or prompt_tokens <= 0 or not can_hold(text_bytes, prompt_tokens):
            return
        reports = self._reports.get(model)
        if reports is None:
            model = bounded_model(model, self._reports)
            reports = self._reports.setdefault(model, deque(maxlen=self._HISTORY))
        reports.append((text_bytes / prompt_tokens, text_bytes))
        unseen = self._unseen.get(model, 0) + 1
        if unseen >= min(self._REFRESH_EVERY, len(reports)) or model not in self._ratios:
            unseen = 0
            self._ratios[model] = self._work_out(reports)
        self._unseen[model] = unseen

    def _work_out(self, reports: deque[tuple[float, int]]) -> float:
        total_bytes = total_tokens = 0.0
        known = list(reports)
        if len(known) < self._HISTORY:
            # As one report more, until there are enough.
            total_bytes, total_tokens = self._prior * self._prior_tokens, self._prior_tokens
            known.append((self._prior, round(total_bytes)))
        known.sort()
        half, last = sum(size for _, size in known) / 2, -1
        while half > 0:
            last += 1
            half -= known[last][1]
        middle = known[last][0]
        low, high = middle / self._FACTOR, middle * self._FACTOR
        for ratio, size in reports:
            total_bytes += size
            total_tokens += size / min(max(ratio, low), high)
        least, most = self._BOUNDS
        return min(max(total_bytes / total_tokens, least), most)


# What a chat template or an engine's own instructions may add to a prompt.
_TEMPLATE_TOKENS = 4096


def can_hold(text_bytes: int, prompt_tokens: int) -> bool:
    """Whether so many bytes of text can be so many tokens: no token is shorter than a byte."""
    return prompt_tokens <= text_bytes + _TEMPLATE_TOKENS


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
