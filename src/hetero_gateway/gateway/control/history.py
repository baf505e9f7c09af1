"""The last finished requests: their lengths and times, for tools that learn from real traffic.

No prompts, ids, keys or addresses; bounded; served as a trace by /admin/requests.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# About 3 MB; hours of traffic of a small fleet, and enough to train a length model.
MAX_REQUESTS = 10_000
COLUMNS = (
    "arrival_s", "input_tokens", "output_tokens", "model", "max_tokens", "sequences",
    "arrival_unix_s",
)  # fmt: skip


class FinishedRequest(NamedTuple):
    """One request that an engine answered to its end.

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


RequestHistory = deque[FinishedRequest]


def new_history() -> RequestHistory:
    return deque(maxlen=MAX_REQUESTS)


def as_trace(history: Sequence[FinishedRequest], unix_less_monotonic_s: float) -> str:
    """The history as a trace (``load.trace``) with further columns, in order of arrival.

    Args:
        history: as it was kept, in the order in which requests finished.
        unix_less_monotonic_s: what to add to an arrival for its Unix time.
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
