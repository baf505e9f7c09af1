"""What the gateway has observed of one instance: rows to check and fit a profile with.

    row        one interval in which the instance streamed, or one first token
    StepRow    the duration of some decode steps, and the prompts prefilled between them
    FirstTokenRow  the time from sending a request to its first token, and the load before it

Prompts count as prefilled without the part found in the engine's prefix cache (``hit_tokens``,
``prefix_hits.py``); a row with prompts for which that is unknown is kept, but not used.

No row contains a prompt, a request's id or a client. Memory is bounded: the oldest rows go first.
``drift.py`` and ``calibration.py`` use them; ``state.py`` makes them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.profile import Constants

# More than an hour of one row a second.
MOST_ROWS = 4096
# One step of vLLM's default token budget (vllm/engine/arg_utils.py): a longer prompt takes several
# steps, and the number of decode steps between them is not seen.
_CHUNK_TOKENS = 2048


Terms = tuple[float, float, float, float, float, float, float, float, float]


class StepRow(NamedTuple):
    """An interval of decoding: means over it, and sums.

    Args:
        duration_s: its length, s, above 0.
        steps: decode steps made in it.
        sequences: streaming sequences, mean over the interval.
        cached_tokens: tokens cached by each of them, mean.
        prompts, prompt_tokens: prefilled between the steps, summed.
        hit_tokens: those of ``prompt_tokens`` that were not prefilled; NaN: not known.
    """

    duration_s: float
    steps: float
    sequences: float
    cached_tokens: float
    prompts: float
    prompt_tokens: float
    hit_tokens: float = 0.0

    @property
    def known(self) -> bool:
        """Whether the number of prefilled tokens is known; otherwise the row must not be used."""
        return not math.isnan(self.hit_tokens)

    @property
    def terms(self) -> Terms:
        """The factors of p1..p9."""
        return step_terms(self)


def step_terms(row: StepRow) -> Terms:
    """The factors of p1..p9. p3 and p4 are left out: in a mixed step their work is p8's.

    Attention is that of prompts of the mean length.
    """
    n, hits, attended = row.prompts, row.hit_tokens, 0.0
    tokens = row.prompt_tokens - hits
    if n:
        attended = n * attended_pairs(tokens / n, hits / n)
    return (
        tokens,
        n,
        0.0,
        0.0,
        row.steps * row.sequences * row.cached_tokens,
        row.steps * row.sequences,
        row.steps * row.cached_tokens,
        row.steps,
        attended,
    )


class FirstTokenRow(NamedTuple):
    """A request's first token, and the load of the instance when it was sent.

    Args:
        ttft_s: from sending it to its first token, s, above 0.
        prompts, prompt_tokens: its own, summed over its sequences.
        waiting, waiting_tokens: sequences waiting for a first token before it, and their prompt
            tokens to prefill.
        streaming, cached_tokens: sequences that streamed, and the tokens cached by each, mean.
        hit_tokens: as above, of its own.
    """

    ttft_s: float
    prompts: float
    prompt_tokens: float
    waiting: float
    waiting_tokens: float
    streaming: float
    cached_tokens: float
    hit_tokens: float = 0.0

    @property
    def clear(self) -> bool:
        """Whether the time was that of its own prefill, in one step, with nothing else there.

        Beside streams it would first wait for the rest of a step, and what is left of so short a
        time is noise; such prefills are in the rows of steps. Unknown hits are not clear.
        """
        prefilled = self.prompt_tokens - self.hit_tokens
        return self.waiting == 0 and self.streaming == 0 and prefilled <= _CHUNK_TOKENS

    @property
    def terms(self) -> Terms:
        """The factors of p1..p9 of a ``clear`` row."""
        n, hits = self.prompts, self.hit_tokens
        tokens = self.prompt_tokens - hits
        attended = n * attended_pairs(tokens / n, hits / n)
        return (tokens, n, tokens / n, 1.0, 0.0, 0.0, 0.0, 0.0, attended)


_HIT_TOKENS = StepRow._fields.index("hit_tokens")


def merged(rows: Sequence[StepRow]) -> StepRow:
    """Merge several non-empty rows into one: sums, and means weighted by steps."""
    steps = sum(row.steps for row in rows)
    weights = [row.steps if steps else row.duration_s for row in rows]
    sequences = sum(w * row.sequences for w, row in zip(weights, rows, strict=True))
    cached = sum(
        w * row.sequences * row.cached_tokens for w, row in zip(weights, rows, strict=True)
    )
    return StepRow(
        sum(row.duration_s for row in rows),
        steps,
        sequences / sum(weights),
        cached / sequences if sequences else 0.0,
        sum(row.prompts for row in rows),
        sum(row.prompt_tokens for row in rows),
        sum(row.hit_tokens for row in rows),
    )


def seconds(terms: Terms, c: Constants) -> tuple[float, float]:
    """(prefill, decode) time of a row by the model, s."""
    t1, t2, t3, t4, t5, t6, t7, t8, t9 = terms
    return c.p1 * t1 + c.p2 * t2 + c.p3 * t3 + c.p4 * t4 + c.p9 * t9, (
        c.p5 * t5 + c.p6 * t6 + c.p7 * t7 + c.p8 * t8
    )


RowT = TypeVar("RowT", StepRow, FirstTokenRow)


class Rows(Generic[RowT]):
    """The last ``MOST_ROWS`` rows of a kind, as plain numbers: 60 bytes a row, where tuples of
    floats would take 280.

    Args:
        make: makes a row from its numbers.
        width: how many numbers it has.
    """

    __slots__ = ("_count", "_make", "_values", "_width")

    def __init__(self, make: Callable[[array[float]], RowT], width: int) -> None:
        self._make: Callable[[array[float]], RowT] = make
        self._width = width
        self._values = array("d")
        self._count = 0  # ever added: a row's number is its place

    def __len__(self) -> int:
        return min(self._count, MOST_ROWS)

    def __iter__(self) -> Iterator[RowT]:
        """Iterate, oldest first."""
        for i in range(self._count - len(self), self._count):
            yield self._at(i)

    def append(self, row: RowT) -> int:
        """Append a row; returns its number, counted from 0."""
        number = self._count
        self._count += 1
        if number < MOST_ROWS:
            self._values.extend(row)
        else:
            begin = self._begin(number)
            self._values[begin : begin + self._width] = array("d", row)
        return number

    def amend(self, number: int, column: int, value: float) -> RowT | None:
        """The row with another value; None: it has been dropped."""
        if number < self._count - MOST_ROWS:
            return None
        self._values[self._begin(number) + column] = value
        return self._at(number)

    def last(self, count: int) -> list[RowT]:
        """At most this many of the newest rows, newest first."""
        return [self._at(self._count - 1 - i) for i in range(min(count, len(self)))]

    def _begin(self, number: int) -> int:
        return number % MOST_ROWS * self._width

    def _at(self, number: int) -> RowT:
        begin = self._begin(number)
        return self._make(self._values[begin : begin + self._width])


class Observations:
    """The last rows of one instance."""

    __slots__ = ("_fresh", "_fresh_steps", "first_tokens", "observed_s", "steps")

    def __init__(self) -> None:
        self.steps: Rows[StepRow] = Rows(StepRow._make, len(StepRow._fields))
        self.first_tokens: Rows[FirstTokenRow] = Rows(
            FirstTokenRow._make, len(FirstTokenRow._fields)
        )
        self.observed_s = 0.0  # of all step rows ever added
        self._fresh: list[FirstTokenRow] = []
        self._fresh_steps: list[StepRow] = []

    def add_steps(self, row: StepRow) -> int:
        """Add a row; returns its number, for ``complete``."""
        self.observed_s += row.duration_s
        if row.known and len(self._fresh_steps) < MOST_ROWS:
            self._fresh_steps.append(row)
        return self.steps.append(row)

    def complete(self, number: int, hit_tokens: float) -> None:
        """Set how many tokens of a row's prompts were not prefilled, now that it is known."""
        row = self.steps.amend(number, _HIT_TOKENS, hit_tokens)
        if row is not None and len(self._fresh_steps) < MOST_ROWS:
            self._fresh_steps.append(row)

    def add_first_token(self, row: FirstTokenRow) -> None:
        self.first_tokens.append(row)
        if row.clear and len(self._fresh) < MOST_ROWS:
            self._fresh.append(row)

    def add_merged(self, rows: Sequence[StepRow]) -> None:
        """Add one row for several incomplete ones, by the engine's counters."""
        row = merged(rows)
        self.steps.append(row)
        if len(self._fresh_steps) < MOST_ROWS:
            self._fresh_steps.append(row)

    def take_fresh(self) -> list[FirstTokenRow]:
        """The clear first tokens since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_fresh_steps(self) -> list[StepRow]:
        """The rows of steps that became known since the last call."""
        fresh, self._fresh_steps = self._fresh_steps, []
        return fresh
