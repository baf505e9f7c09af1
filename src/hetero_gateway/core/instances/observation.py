"""What the gateway has seen of one instance: rows that a profile can be checked and fitted with.

    row        one interval in which the instance streamed, or one first token
    StepRow    so many decode steps took so long, with so many prompts prefilled between them
    FirstTokenRow  so long from sending a request to its first token, and what was there before it

No row knows a prompt, a request's id or a client. Memory is bounded: the oldest rows go first.
``drift.py`` and ``calibration.py`` use them; ``progress.py`` makes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.profile import Constants

# More than an hour of one row a second.
MOST_ROWS = 4096
# One step of vLLM's default token budget (vllm/engine/arg_utils.py): what is longer takes several
# steps, and how many decode steps come between them is not seen.
_CHUNK_TOKENS = 2048


class StepRow(NamedTuple):
    """An interval of decoding: means over it, and sums.

    Args:
        duration_s: its length, s, above 0.
        steps: decode steps made in it.
        sequences: how many streamed, mean over the interval.
        cached_tokens: tokens cached by each of them, mean.
        prompts, prompt_tokens: whose prefill came between the steps, summed.
    """

    duration_s: float
    steps: float
    sequences: float
    cached_tokens: float
    prompts: float
    prompt_tokens: float

    @property
    def terms(self) -> tuple[float, ...]:
        """What p1..p9 multiply. p3 and p4 take no part: in a mixed step their work is p8's.

        Of attention it knows the prompts' mean length: as if all were of that.
        """
        return (
            self.prompt_tokens,
            self.prompts,
            0.0,
            0.0,
            self.steps * self.sequences * self.cached_tokens,
            self.steps * self.sequences,
            self.steps * self.cached_tokens,
            self.steps,
            self.prompts and self.prompts * attended_pairs(self.prompt_tokens / self.prompts),
        )


class FirstTokenRow(NamedTuple):
    """A request's first token, and what was on the instance when it was sent.

    Args:
        ttft_s: from sending it to its first token, s, above 0.
        prompts, prompt_tokens: its own, summed over its sequences.
        waiting, waiting_tokens: sequences that waited for a first token before it, their prompts.
        streaming, cached_tokens: sequences that streamed, and the tokens cached by each, mean.
    """

    ttft_s: float
    prompts: float
    prompt_tokens: float
    waiting: float
    waiting_tokens: float
    streaming: float
    cached_tokens: float

    @property
    def clear(self) -> bool:
        """Whether it was its own prefill, in one step, that took the time: nobody else was there.

        Beside streams it would wait for the rest of a step first, and what is left of so short a
        time is noise; such prefills are in the rows of steps.
        """
        return self.waiting == 0 and self.streaming == 0 and self.prompt_tokens <= _CHUNK_TOKENS

    @property
    def terms(self) -> tuple[float, ...]:
        """What p1..p9 multiply, where it is ``clear``."""
        tokens, n = self.prompt_tokens, self.prompts
        return (tokens, n, tokens / n, 1.0, 0.0, 0.0, 0.0, 0.0, n * attended_pairs(tokens / n))


def seconds(terms: tuple[float, ...], c: Constants) -> tuple[float, float]:
    """(prefill, decode) time of a row by the model, s."""
    t1, t2, t3, t4, t5, t6, t7, t8, t9 = terms
    return c.p1 * t1 + c.p2 * t2 + c.p3 * t3 + c.p4 * t4 + c.p9 * t9, (
        c.p5 * t5 + c.p6 * t6 + c.p7 * t7 + c.p8 * t8
    )


RowT = TypeVar("RowT", StepRow, FirstTokenRow)


class Rows(Generic[RowT]):
    """The last ``MOST_ROWS`` rows of a kind, as plain numbers: 50 bytes a row, where tuples of
    floats would take 250.

    Args:
        make: makes a row of its numbers.
        width: how many they are.
    """

    __slots__ = ("_make", "_next", "_values", "_width")

    def __init__(self, make: Callable[[array[float]], RowT], width: int) -> None:
        self._make: Callable[[array[float]], RowT] = make
        self._width = width
        self._values = array("d")
        self._next = 0  # where the next row goes, once all places are taken

    def __len__(self) -> int:
        return len(self._values) // self._width

    def __iter__(self) -> Iterator[RowT]:
        """Oldest first."""
        size = len(self)
        for i in range(size):
            yield self._at((self._next + i) % size)

    def append(self, row: RowT) -> None:
        if len(self) < MOST_ROWS:
            self._values.extend(row)
            return
        begin = self._next * self._width
        self._values[begin : begin + self._width] = array("d", row)
        self._next = (self._next + 1) % MOST_ROWS

    def last(self, count: int) -> list[RowT]:
        """At most so many of the newest, newest first."""
        size = len(self)
        return [self._at((self._next - 1 - i) % size) for i in range(min(count, size))]

    def _at(self, place: int) -> RowT:
        begin = place * self._width
        return self._make(self._values[begin : begin + self._width])


class Observations:
    """The last rows of one instance."""

    __slots__ = ("_fresh", "first_tokens", "observed_s", "steps")

    def __init__(self) -> None:
        self.steps: Rows[StepRow] = Rows(StepRow._make, len(StepRow._fields))
        self.first_tokens: Rows[FirstTokenRow] = Rows(
            FirstTokenRow._make, len(FirstTokenRow._fields)
        )
        self.observed_s = 0.0  # of all step rows that ever came
        self._fresh: list[FirstTokenRow] = []

    def add_steps(self, row: StepRow) -> None:
        self.steps.append(row)
        self.observed_s += row.duration_s

    def add_first_token(self, row: FirstTokenRow) -> None:
        self.first_tokens.append(row)
        if row.clear and len(self._fresh) < MOST_ROWS:
            self._fresh.append(row)

    def take_fresh(self) -> list[FirstTokenRow]:
        """The clear first tokens since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh
