"""The last finished requests: lengths and times, for tools that learn from real traffic.

No prompts, ids, keys or addresses; bounded; served as a trace by /admin/requests.
"""

from __future__ import annotations

import csv
import io
import struct
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

# About half a MB; hours of traffic of a small fleet, and enough to train a length model.
MAX_REQUESTS = 10_000
COLUMNS = (
    "arrival_s", "input_tokens", "output_tokens", "model", "max_tokens", "sequences",
    "arrival_unix_s",
)  # fmt: skip


class FinishedRequest(NamedTuple):
    """One request that an engine answered completely.

    Args:
        arrival_s: on the monotonic clock.
        model: the name that it asked for.
        prompt_tokens, output_tokens: of one sequence, at least 1.
        max_output_tokens: the client's limit, None without one.
        sequences: how many it asked for.
    """

    arrival_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int | None
    sequences: int


# Columns of a row.
_WIDTH: Final = 5
_ROW = struct.Struct(f"{_WIDTH}d")
_ROW_BYTES: Final = 8 * _WIDTH


class RequestHistory:
    """The last ``MAX_REQUESTS`` of them, oldest first.

    Kept as plain numbers: of objects, each request would have to free some that are as old as the
    whole history, and no longer in any cache.
    """

    __slots__ = ("_count", "_models", "_numbers")

    def __init__(self) -> None:
        self._numbers = array("d")
        self._models: list[str] = []
        self._count = 0  # ever added: a request's number is its place

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[FinishedRequest]:
        size, numbers = len(self._models), self._numbers
        for i in range(self._count - size, self._count):
            place = i % MAX_REQUESTS
            begin = place * _WIDTH
            arrival_s, prompt, output, limit, sequences = numbers[begin : begin + _WIDTH]
            yield FinishedRequest(
                arrival_s,
                self._models[place],
                int(prompt),
                int(output),
                int(limit) or None,
                int(sequences),
            )

    def last_lengths(self, models: Container[str], most: int, of: int) -> list[tuple[int, int]]:
        """(prompt, output) tokens of the last ``most`` requests for some models, oldest first.

        Args:
            of: how many of the last requests are examined.
        """
        numbers, found = self._numbers, []
        for i in range(self._count - 1, self._count - 1 - min(of, len(self._models)), -1):
            place = i % MAX_REQUESTS
            if self._models[place] in models:
                begin = place * _WIDTH
                found.append((int(numbers[begin + 1]), int(numbers[begin + 2])))
                if len(found) == most:
                    break
        return found[::-1]

    def extend(self, finished: Iterable[tuple[float, str, int, int, int | None, int]]) -> None:
        """Add the fields of some ``FinishedRequest``."""
        for arrival_s, model, prompt_tokens, output_tokens, limit, sequences in finished:
            row = (arrival_s, prompt_tokens, output_tokens, limit or 0, sequences)
            place = self._count % MAX_REQUESTS
            if place == len(self._models):
                self._numbers.frombytes(_ROW.pack(*row))
                self._models.append(model)
            else:
                _ROW.pack_into(self._numbers, place * _ROW_BYTES, *row)
                self._models[place] = model
            self._count += 1


def as_trace(history: Sequence[FinishedRequest], unix_less_monotonic_s: float) -> str:
    """The history as a trace (``load.trace``) with further columns, in order of arrival.

    Args:
        history: in the order in which requests finished.
        unix_less_monotonic_s: to be added to an arrival for its Unix time.
    """
    rows = sorted(history, key=lambda row: row.arrival_s)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(
            (
                f"{row.arrival_s - rows[0].arrival_s:.4f}",
                row.prompt_tokens,
                row.output_tokens,
                row.model,
                row.max_output_tokens or "",
                row.sequences,
                f"{row.arrival_s + unix_less_monotonic_s:.3f}",
            )
        )
    return text.getvalue()
