"""What is estimated of lengths beside the prediction itself: tokens of a prompt, what a stream has
still to come, and how far a prediction is believed.

What is learnt is kept per model and bounded: at most ``MAX_MODELS`` names, the rest share one
entry, which is also what is known of a model that was never seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray

MAX_MODELS = 256
# The name of the entry that all further models share.
OTHER_MODELS = ""

# How far a stream is, in powers of two: what is left of it changes with the order of magnitude.
STAGE_TOKENS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)


# So many times the length that nine of ten answers are within is as long as one is believed to be.
_FAR = 4.0
# Of residual lives: lengths that are kept, how many finish until a table is made of them (which
# costs as much as a few decisions), and how many requests the prior counts as.
HISTORY = 2048
REFRESH_EVERY = 32
PRIOR_REQUESTS = 8.0


class _Finished:
    """The last finished lengths of one model, as plain numbers, and the ``table`` that was made of
    them, ``plain`` as a list; ``unseen``: how many have finished since.
    """

    __slots__ = ("lengths", "oldest", "plain", "table", "unseen")

    def __init__(self, table: FloatArray) -> None:
        self.lengths = array("d")
        self.oldest = 0  # its place, once all are taken
        self.unseen = 0
        self.table = table
        self.plain: list[float] = table.tolist()


class ResidualLives:
    """E[O − g | O > g] by stage of g and model: what a stream has still to come (tokens).

    From the last finished lengths, with a prior of ``prior_requests`` requests of a memoryless
    length, for which it is ``prior_tokens`` at every stage.
    """

    def __init__(self, prior_tokens: float, prior_requests: float = PRIOR_REQUESTS) -> None:
        self._prior_tokens = prior_tokens
        self._prior_requests = prior_requests
        self._models: dict[str, _Finished] = {}
        # What ``of`` has as ``plain`` for models that need not be made anew.
        self.plain: dict[str, list[float]] = {}
        self._unknown = _Finished(np.full(len(STAGE_TOKENS), prior_tokens))

    def __len__(self) -> int:
        """Entries that are kept, the shared one among them."""
        return len(self._models)

    def table(self, model: str) -> FloatArray:
        """Expected further output tokens of one sequence, by stage; do not write to it."""
        return self.of(model).table

    def of(self, model: str) -> _Finished:
        """A model's entry, whose ``table`` and ``plain`` are made anew where that is due."""
        finished = self._models.get(model) or self._models.get(OTHER_MODELS) or self._unknown
        # Made only when someone asks: most policies never do.
        if finished.unseen >= REFRESH_EVERY:
            finished.unseen = 0
            lengths = np.array(finished.lengths)
            finished.table = residuals(lengths, self._prior_tokens, self._prior_requests)
            finished.plain = finished.table.tolist()
        if model in self._models:
            self.plain[model] = finished.plain
        return finished

    def observe_many(self, finished: Iterable[tuple[str, float]]) -> None:
        """Learn from finished sequences: (model, output tokens) of each."""
        for model, output_tokens in finished:
            self.observe(model, output_tokens)

    def observe(self, model: str, output_tokens: float) -> None:
        """Learn from one finished sequence."""
        finished = self._models.get(model)
        if finished is None:
            model = bounded_model(model, self._models)
            finished = self._models.setdefault(model, _Finished(self._unknown.table))
        lengths = finished.lengths
        if len(lengths) < HISTORY:
            lengths.append(output_tokens)
        else:
            lengths[finished.oldest] = output_tokens
            finished.oldest = (finished.oldest + 1) % HISTORY
        finished.unseen += 1
        if finished.unseen == REFRESH_EVERY:
            self.plain.pop(model, None)


def residuals(lengths: FloatArray, prior_tokens: float, prior_requests: float) -> FloatArray:
    """E[O − g | O > g] by stage, of these lengths, of which there is one, and the prior."""
    # Those in a stage are on average in its middle; the last one has no end.
    starts = np.array(STAGE_TOKENS, dtype=np.float64)
    middles = starts + np.append(np.diff(starts), starts[-1]) / 2
    ordered = np.sort(lengths)
    # A tenth of them may be made up: what is far beyond the others counts as the farthest.
    ordered = np.minimum(ordered, _FAR * ordered[ordered.size * 9 // 10])
    sums = np.append(np.cumsum(ordered[::-1])[::-1], 0.0)
    first = np.searchsorted(ordered, middles, side="right")
    counts = ordered.size - first
    left = sums[first] - counts * middles
    result: FloatArray = (left + prior_requests * prior_tokens) / (counts + prior_requests)
    return result


class _Reports:
    """The last reports of one model, as plain numbers. ``unseen``: since the model's ratio was
    worked out.
    """

    __slots__ = ("oldest", "ratios", "sizes_bytes", "unseen")

    def __init__(self) -> None:
        self.ratios, self.sizes_bytes = array("d"), array("d")
        self.oldest = 0  # its place, once all are taken
        self.unseen = 0


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
        self._models: dict[str, _Reports] = {}
        self._ratios: dict[str, float] = {}  # as worked out last
        self._ratio_of_others = prior

    def __len__(self) -> int:
        """Entries that are kept, the shared one among them."""
        return len(self._models)

    def ratio(self, model: str) -> float:
        return self._ratios.get(model, self._ratio_of_others)

    def tokens(self, model: str, text_bytes: int) -> int:
        """Estimated tokens of ``text_bytes`` bytes of prompt, at least 1."""
        return max(1, round(text_bytes / self._ratios.get(model, self._ratio_of_others)))

    def observe_many(self, prompts: Iterable[tuple[str, int, int]]) -> None:
        """``observe`` some (model, text bytes, prompt tokens)."""
        for prompt in prompts:
            self.observe(*prompt)

    def observe(self, model: str, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from one finished request whose prompt length the engine told."""
        if text_bytes <= 0 or prompt_tokens <= 0:
            return
        if prompt_tokens > text_bytes and not can_hold(text_bytes, prompt_tokens):
            return
        reports = self._models.get(model)
        if reports is None:
            model = bounded_model(model, self._models)
            reports = self._models.setdefault(model, _Reports())
        ratios, sizes_bytes = reports.ratios, reports.sizes_bytes
        if len(ratios) < self._HISTORY:
            ratios.append(text_bytes / prompt_tokens)
            sizes_bytes.append(text_bytes)
        else:
            place = reports.oldest
            ratios[place], sizes_bytes[place] = text_bytes / prompt_tokens, text_bytes
            reports.oldest = (place + 1) % self._HISTORY
        reports.unseen += 1
        if reports.unseen >= min(self._REFRESH_EVERY, len(ratios)) or model not in self._ratios:
            reports.unseen = 0
            ratio = self._ratios[model] = self._work_out(np.array(ratios), np.array(sizes_bytes))
            if model == OTHER_MODELS:
                self._ratio_of_others = ratio

    def _work_out(self, ratios: FloatArray, sizes_bytes: FloatArray) -> float:
        total_bytes = total_tokens = 0.0
        known, weights = ratios, sizes_bytes
        if ratios.size < self._HISTORY:
            # As one report more, until there are enough.
            total_bytes, total_tokens = self._prior * self._prior_tokens, self._prior_tokens
            known, weights = np.append(known, self._prior), np.append(weights, total_bytes)
        order = known.argsort()
        up_to = weights[order].cumsum()
        middle = known[order[up_to.searchsorted(up_to[-1] / 2)]]
        believed = np.minimum(np.maximum(ratios, middle / self._FACTOR), middle * self._FACTOR)
        total_bytes += float(sizes_bytes.sum())
        total_tokens += float((sizes_bytes / believed).sum())
        least, most = self._BOUNDS
        return min(max(total_bytes / total_tokens, least), most)


# What a chat template or an engine's own instructions may add to a prompt.
_TEMPLATE_TOKENS = 4096


def can_hold(text_bytes: int, prompt_tokens: int) -> bool:
    """Whether this many bytes of text can be this many tokens: no token is shorter than a byte."""
    return prompt_tokens <= text_bytes + _TEMPLATE_TOKENS


def bounded_model(model: str, known: Mapping[str, object]) -> str:
    """The entry that a model is learnt under: its own, or that of all others."""
    return model if model in known or len(known) < MAX_MODELS else OTHER_MODELS
