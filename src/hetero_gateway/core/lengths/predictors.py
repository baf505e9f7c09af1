"""Predicts how long an answer will be, from finished requests.

The paper (section 4.1) leaves the output-length predictor open and evaluates a normal draw. This
module has that one, a constant, and the default, a conditional mean; ``length_model`` has the one
that is trained offline.

Reading a request's bytes is the gateway's work; these predictors see only counts. A predictor of
the user's own may ask ``LengthFeatures`` for the prompt's text (docs/design/predictors.md).

Other estimates of lengths are here too: the tokens of a prompt, the remaining tokens of a stream,
and how far a prediction is believed.

Everything is learnt per model and bounded: at most ``MAX_MODELS`` names; the rest share one entry,
which also stands for models never seen.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import truediv
from typing import TYPE_CHECKING, Any, Final, Protocol

from mypy_extensions import mypyc_attr

from hetero_gateway.core.request import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_MODELS: Final = 256
# The entry that all further models share.
OTHER_MODELS: Final = ""

# The progress of a stream, in powers of two: what is left of it changes with the order of
# magnitude.
STAGE_TOKENS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Streams in a stage are on average at its middle; the last stage has no end.
STAGE_MIDDLES: tuple[float, ...] = (16.0, 48.0, 96.0, 192.0, 384.0, 768.0, 1536.0, 3072.0, 6144.0)

# No length is believed to be more than this many times the one that nine of ten answers are within.
FARTHEST: Final = 4.0
# Of residual lives: lengths kept, lengths that finish until a new table is made (which costs as
# much as a few decisions), and the number of requests that the prior counts as.
HISTORY: Final = 2048
REFRESH_EVERY: Final = 32
PRIOR_REQUESTS: Final = 8.0


class _Finished:
    """The last finished lengths of one model, by arrival and ``ordered``; the table made from them;
    ``unseen``: finished since then. ``sums``: of the lengths beyond each of ``STAGE_MIDDLES``.
    """

    __slots__ = ("lengths", "ordered", "plain", "sums", "unseen")

    def __init__(self, table: list[float]) -> None:
        self.lengths: deque[float] = deque()
        self.ordered: list[float] = []
        self.sums = [0.0] * (len(STAGE_MIDDLES) + 1)
        self.unseen = 0
        self.plain = table


class ResidualLives:
    """E[O − g | O > g] by stage of g and model: the expected remaining tokens of a stream.

    Computed from the last finished lengths, with a prior of ``prior_requests`` requests of a
    memoryless length, for which it is ``prior_tokens`` at every stage.
    """

    def __init__(self, prior_tokens: float, prior_requests: float = PRIOR_REQUESTS) -> None:
        self._prior_tokens = prior_tokens
        self._prior_requests = prior_requests
        self._models: dict[str, _Finished] = {}
        # ``of``'s ``plain`` for models whose table is up to date.
        self.plain: dict[str, list[float]] = {}
        self._unknown = _Finished([prior_tokens] * len(STAGE_TOKENS))

    def __len__(self) -> int:
        """Number of entries, including the shared one."""
        return len(self._models)

    def of(self, model: str) -> _Finished:
        """A model's entry; ``plain`` has the expected remaining output tokens of one sequence, by
        stage, recomputed when due: do not write to it.
        """
        finished = self._models.get(model) or self._models.get(OTHER_MODELS) or self._unknown
        # Made only when asked for: most policies never do.
        if finished.unseen >= REFRESH_EVERY:
            finished.unseen = 0
            finished.plain = residuals(finished, self._prior_tokens, self._prior_requests)
        if model in self._models:
            self.plain[model] = finished.plain
        return finished

    def after(self, model: str, tokens: int) -> float:
        """Expected remaining tokens of a sequence with this much output, at least 1."""
        plain = self.plain.get(model) or self.of(model).plain
        return max(1.0, plain[bisect_right(STAGE_TOKENS, tokens) - 1])

    def rest_of(self, request: Request, told_tokens: int) -> Request:
        """What is left for another instance once an answer broke off: a further leg of the request.

        Tokens already delivered join its prompt and come off its output. If the output was
        predicted to be no longer, the remaining length of such sequences is used.

        Args:
            told_tokens: delivered tokens of its one sequence, at least 0.
        """
        left = request.predicted_output_tokens - told_tokens
        certain = request.certain_tokens
        return request.replace(
            prompt_tokens=request.prompt_tokens + told_tokens,
            predicted_output_tokens=left if left >= 1 else self.after(request.model, told_tokens),
            certain_tokens=None if certain is None else certain + told_tokens,
        )

    def finished(self) -> list[tuple[str, float]]:
        """The kept lengths, as ``observe_many`` takes them."""
        return [(model, tokens) for model, each in self._models.items() for tokens in each.lengths]

    def observe_many(self, finished: Iterable[tuple[str, float]]) -> None:
        """Learn from finished sequences: (model, output tokens) of each."""
        for model, output_tokens in finished:
            self.observe(model, output_tokens)

    def observe(self, model: str, output_tokens: float) -> None:
        """Learn from one finished sequence."""
        finished = self._models.get(model)
        if finished is None:
            model = bounded_model(model, self._models)
            finished = self._models.setdefault(model, _Finished(self._unknown.plain))
        lengths, ordered, sums = finished.lengths, finished.ordered, finished.sums
        if len(lengths) == HISTORY:
            oldest = lengths.popleft()
            del ordered[bisect_left(ordered, oldest)]
            sums[bisect_left(STAGE_MIDDLES, oldest)] -= oldest
        lengths.append(output_tokens)
        insort(ordered, output_tokens)
        sums[bisect_left(STAGE_MIDDLES, output_tokens)] += output_tokens
        finished.unseen += 1
        if finished.unseen == REFRESH_EVERY:
            self.plain.pop(model, None)


def residuals(finished: _Finished, prior_tokens: float, prior_requests: float) -> list[float]:
    """``residual`` by stage, of these lengths (at least one) and the prior."""
    ordered, sums = finished.ordered, finished.sums
    size = len(ordered)
    # A tenth of them may be made up: lengths far beyond the others count as the farthest.
    farthest = FARTHEST * ordered[size * 9 // 10]
    far = bisect_right(ordered, farthest)
    result, tokens = [], -float(sum(ordered[far:]))
    for stage in range(len(STAGE_MIDDLES) - 1, -1, -1):
        middle = STAGE_MIDDLES[stage]
        tokens += sums[stage + 1]
        longer = size - bisect_right(ordered, middle), size - far
        result.append(residual(middle, *longer, tokens, farthest, prior_tokens, prior_requests))
    return result[::-1]


def residual(
    middle: float,
    longer: int,
    farther: int,
    tokens: float,
    farthest: float,
    prior_tokens: float,
    prior_requests: float,
) -> float:
    """E[O − g | O > g] in a stage, with the prior. The simulator's compiled loop runs it, too.

    Args:
        middle: of the stage.
        longer: the number of longer lengths; ``farther`` of them exceed the ``farthest`` and count
            as that.
        tokens: of the others that are longer.
    """
    if middle >= farthest:
        longer, left = 0, 0.0
    else:
        left = tokens + farther * farthest - longer * middle
    return (left + prior_requests * prior_tokens) / (longer + prior_requests)


class _Reports:
    """The last reports of one model. ``unseen``: since the model's ratio was computed."""

    __slots__ = ("oldest", "ratios", "sizes_bytes", "unseen")

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.sizes_bytes: list[float] = []
        self.oldest = 0  # its place, once all places are taken
        self.unseen = 0


class BytesPerToken:
    """The bytes-per-token ratio per model, learnt from the prompt tokens that engines report.

    It is a ratio of sums, not a mean of ratios, so that short prompts, in which the chat template's
    own tokens weigh most, count by their size. It covers the last ``_HISTORY`` reports, each
    limited to a factor of their median by bytes: numbers invented by a few engines move it little,
    and are forgotten. It is recomputed when half of the reports are new.
    """

    _HISTORY = 128
    # No text has fewer or more bytes per token.
    _BOUNDS = (0.25, 64.0)
    # Honest prompts of one model are within this: prose has 4 to 5 bytes per token, digits 1 to 3.
    _FACTOR = 2.0

    def __init__(self, prior: float, prior_tokens: float = 4096.0) -> None:
        self._prior = prior
        self._prior_tokens = prior_tokens
        self._models: dict[str, _Reports] = {}
        self._ratios: dict[str, float] = {}  # as last computed
        self._ratio_of_others = prior

    def __len__(self) -> int:
        """Number of entries, including the shared one."""
        return len(self._models)

    def ratio(self, model: str) -> float:
        return self._ratios.get(model, self._ratio_of_others)

    def tokens(self, model: str, text_bytes: int) -> int:
        """Estimated tokens of ``text_bytes`` bytes of prompt, at least 1."""
        return max(1, round(text_bytes / self._ratios.get(model, self._ratio_of_others)))

    def reports(self) -> list[tuple[str, int, int]]:
        """The kept reports, the oldest of each model first, as ``observe_many`` takes them."""
        return [
            (model, round(sizes[i]), round(sizes[i] / of.ratios[i]))
            for model, of in self._models.items()
            for sizes in (of.sizes_bytes,)
            for i in (*range(of.oldest, len(sizes)), *range(of.oldest))
        ]

    def observe_many(self, prompts: Iterable[tuple[str, int, int]]) -> None:
        """``observe`` some (model, text bytes, prompt tokens)."""
        for model, text_bytes, prompt_tokens in prompts:
            self.observe(model, text_bytes, prompt_tokens)

    def observe(self, model: str, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from a finished request whose engine reported the prompt's length."""
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
        if 2 * reports.unseen >= len(ratios):
            reports.unseen = 0
            ratio = self._ratios[model] = self._work_out(ratios, sizes_bytes)
            if model == OTHER_MODELS:
                self._ratio_of_others = ratio

    def _work_out(self, ratios: list[float], sizes_bytes: list[float]) -> float:
        known, known_bytes = ratios.copy(), sizes_bytes.copy()
        prior_bytes = 0.0
        if len(known) < self._HISTORY:
            # Counts as one report, until there are enough.
            prior_bytes = self._prior * self._prior_tokens
            known.append(self._prior)
            known_bytes.append(prior_bytes)
        order = sorted(range(len(known)), key=known.__getitem__)
        ordered, sizes = [known[i] for i in order], [known_bytes[i] for i in order]
        up_to: list[float] = list(accumulate(sizes, initial=0.0))
        total_bytes = up_to[-1]
        middle = ordered[bisect_left(up_to, total_bytes / 2) - 1]
        low, high = middle / self._FACTOR, middle * self._FACTOR
        first, last = bisect_left(ordered, low), bisect_right(ordered, high)
        total_tokens: float = sum(map(truediv, sizes[first:last], ordered[first:last]))
        total_tokens += up_to[first] / low + (total_bytes - up_to[last]) / high
        if prior_bytes:  # which is not doubted itself
            total_tokens += self._prior_tokens - prior_bytes / min(max(self._prior, low), high)
        least, most = self._BOUNDS
        return min(max(total_bytes / total_tokens, least), most)


# Tokens that a chat template or an engine's own instructions may add to a prompt.
_TEMPLATE_TOKENS: Final = 4096


def can_hold(text_bytes: int, prompt_tokens: int) -> bool:
    """Whether this many bytes of text can be this many tokens: a token has at least one byte."""
    return prompt_tokens <= text_bytes + _TEMPLATE_TOKENS


def bounded_model(model: str, known: Mapping[str, object]) -> str:
    """The entry that a model is learnt under: its own, or the shared one."""
    return model if model in known or len(known) < MAX_MODELS else OTHER_MODELS


# A mean over about the last thousand requests of a bucket: it follows a change of traffic within
# minutes and still averages the heavy tail of output lengths.
MEMORY_REQUESTS: Final = 1000.0

# Prompt beginnings that are kept apart; the least recently used are forgotten first. Some 200 bytes
# each.
_MOST_BEGINNINGS: Final = 4096

# A value above this many times the mean counts as that.
FAR: Final = 8.0


def _no_text(body: bytes) -> str:
    return ""


class LengthFeatures:
    """The features of a request before it is answered.

    Attributes:
        model: the name that the request asks for.
        prompt_tokens: of one sequence, estimated or exact; at least 1.
        max_output_tokens: the client's limit, at least 1; None: not given.
        body: the request's JSON as received; empty in the simulator and in ``explain``.
        beginning: a number shared by all prompts with the same beginning (``request``), mostly the
            system prompt; None: not known.
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
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.body = body
        self._read_text = read_text
        self.beginning = beginning
        self.memo: Any = None

    def prompt_text(self) -> str:
        """The prompt's text, decoded now, which the hot path never does; "" if there is none."""
        return self._read_text(self.body)


class OutputLengthPredictor(Protocol):
    """Predicts the output tokens of one sequence.

    Both methods are called on the gateway's event loop, once per request, and must not wait.
    """

    def predict(self, features: LengthFeatures) -> float:
        """Expected output tokens, at least 1; the caller caps it by what the request allows."""
        ...

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        """Learn from a finished request: its output tokens, the mean if it had n sequences."""
        ...


def capped_output_tokens(
    predicted_tokens: float,
    max_output_tokens: int | None,
    context_tokens: int | None,
    prompt_tokens: int,
) -> float:
    """Cap a prediction by the client's limit and by the rest of the context window; at least 1.

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
    """Let a predictor observe some finished requests."""
    for features, output_tokens in finished:
        predictor.observe(features, output_tokens)


class ConstantPredictor:
    """Always predicts the same number of tokens."""

    def __init__(self, mean_tokens: float) -> None:
        self.mean_tokens = max(1.0, mean_tokens)

    def predict(self, features: LengthFeatures) -> float:
        return self.mean_tokens

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        pass


class NormalPredictor:
    """The paper's predictor: a normal draw, clipped at 1 token (erratum 13: it could go
    negative)."""

    def __init__(self, mean_tokens: float, sd_tokens: float, rng: np.random.Generator) -> None:
        self._mean_tokens = mean_tokens
        self._sd_tokens = sd_tokens
        self._rng = rng

    def predict(self, features: LengthFeatures) -> float:
        return max(1.0, self._rng.normal(self._mean_tokens, self._sd_tokens))

    def next_predictions(self, count: int) -> NDArray[np.float64]:
        """Return its next predictions, this many of them."""
        rng = copy.deepcopy(self._rng)
        return rng.normal(self._mean_tokens, self._sd_tokens, count).clip(1.0)

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        pass


class RunningMean:
    """A mean that starts at a prior and forgets slowly; outliers move it little."""

    __slots__ = ("value", "weight")

    def __init__(self, prior: float, prior_weight: float) -> None:
        self.value = prior
        self.weight = prior_weight


def add_to(mean: RunningMean, value: float) -> None:
    """Add one value to a mean; the simulator's compiled loop runs it, too."""
    if mean.weight < MEMORY_REQUESTS:
        mean.weight += 1
    # Of memoryless lengths, 1 in 3 000 is beyond this: it limits an engine that invents lengths.
    if value > FAR * mean.value:
        value = FAR * mean.value
    mean.value += (value - mean.value) / mean.weight


# One mean of ``BucketMeanPredictor``: what it covers ("": a model), model, bucket and beginning,
# the mean and its weight.
LearntMean = tuple[str, str, int, int, float, float]


@mypyc_attr(allow_interpreted_subclasses=True)
class BucketMeanPredictor:
    """The default: the mean output length by prompt-length bucket (log2) and model, learnt online.

    A bucket starts at the model's mean over all lengths, which starts at ``prior_tokens``; each
    prior weighs as much as ``prior_requests`` finished requests. Never a random draw: the spread of
    a draw only sends requests to the wrong instances.

    Prompts with the same beginning come from one application, whose answers are alike: if
    beginnings are known, a bucket also has a mean for each of them, which starts at the bucket's.
    The bucket itself then learns only from new beginnings, since those are what it predicts.
    """

    def __init__(self, prior_tokens: float, prior_requests: float = 8.0) -> None:
        self.prior_tokens = prior_tokens
        self.prior_requests = prior_requests
        self._models: dict[str, RunningMean] = {}
        self._buckets: dict[tuple[str, int], RunningMean] = {}
        # By bucket and beginning, which implies the model; least recently used first. (A plain dict
        # walks past all deleted entries at its front.)
        self._beginnings: OrderedDict[tuple[int, int], RunningMean] = OrderedDict()

    @property
    def has_learnt(self) -> bool:
        """Whether it has seen a request finish."""
        return bool(self._models)

    def means(self) -> list[LearntMean]:
        """All it has learnt, for another predictor's ``take_over``."""
        rows = [("", model, 0, 0, of.value, of.weight) for model, of in self._models.items()]
        for (model, size), of in self._buckets.items():
            rows.append(("bucket", model, size, 0, of.value, of.weight))
        for (size, beginning), of in self._beginnings.items():
            rows.append(("beginning", "", size, beginning, of.value, of.weight))
        return rows

    def take_over(self, means: Iterable[LearntMean]) -> None:
        """Take over what another predictor with the same bounds has learnt."""
        for kind, model, size, beginning, value, weight in means:
            mean = RunningMean(value, min(weight, MEMORY_REQUESTS))
            if kind == "beginning":
                if len(self._beginnings) < _MOST_BEGINNINGS:
                    self._beginnings[size, beginning] = mean
                continue
            if model not in self._models and len(self._models) > MAX_MODELS:
                continue
            if kind == "bucket":
                self._buckets[model, size] = mean
            else:
                self._models[model] = mean

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

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        model = features.model
        overall = self._models.get(model)
        if overall is None:
            model = bounded_model(model, self._models)
            overall = self._models.get(model)
        if overall is None:
            overall = RunningMean(self.prior_tokens, self.prior_requests)
            self._models[model] = overall
        size = features.prompt_tokens.bit_length()
        bucket = self._buckets.get((model, size))
        if bucket is None:
            bucket = RunningMean(overall.value, self.prior_requests)
            self._buckets[model, size] = bucket
        if features.beginning is not None:
            means, key = self._beginnings, (size, features.beginning)
            mean = means.get(key)
            if mean is None:
                if len(means) >= _MOST_BEGINNINGS:
                    means.popitem(last=False)
                mean = means[key] = RunningMean(bucket.value, self.prior_requests)
            else:
                means.move_to_end(key)
            add_to(mean, output_tokens)
            if mean.weight >= 2 * self.prior_requests:
                return
        add_to(overall, output_tokens)
        add_to(bucket, output_tokens)
