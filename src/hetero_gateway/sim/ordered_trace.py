"""A trace that is run in its order, because its prompts begin alike. Pure.

docs/design/search.md explains why its rows are not sampled, and the use of a share of its sessions.
A run that is longer than the trace repeats it with other text: nothing of an earlier lap is found.
"""

import math
from dataclasses import dataclass

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray, Integers
from hetero_gateway.sim.prefixes import FIRST_OWN_ID, KnownText, Prefixes, Run
from hetero_gateway.sim.workload import (
    Workload,
    at_rate,
    gamma_arrivals,
    mean_rate_per_s,
)

_SESSIONS, _ARRIVALS, _HALF_DONE = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedTrace:
    """The rows of a trace, which are also lengths to draw from (``workload.Lengths``).

    Args:
        arrival_s: (rows,), never decreasing; at least one row.
        prompt_tokens, output_tokens: (rows,), at least 1.
        sessions: (rows,), the session of each.
        texts: one per row, in blocks of ``block_tokens``.
    """

    arrival_s: FloatArray
    prompt_tokens: Integers
    output_tokens: Integers
    sessions: Integers
    texts: tuple[KnownText, ...]
    block_tokens: int

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Rows sampled with replacement, for callers that only need lengths."""
        chosen = rng.integers(self.prompt_tokens.size, size=count)
        return self.prompt_tokens[chosen], self.output_tokens[chosen]

    def workload(
        self, count: int, rate_per_s: float, *, share: float = 1.0, seed: int = 0
    ) -> Workload:
        """The trace's next ``count`` requests, with their texts.

        Args:
            rate_per_s: their times are stretched to it, in the mean; infinite: all at once.
            share: of the sessions, above 0, at most 1.
            seed: 0 begins with the first row, each further one where the one before has
                ended.
        """
        rows = self._rows(share, seed)
        row, laps = _next(rows, count, seed)
        arrival_s = self._arrivals(rows, row, laps, rate_per_s, seed)
        return self._workload(arrival_s, row, laps, np.zeros(count, np.int64))

    def under_way(
        self, half_done: int, fresh: int, *, share: float = 1.0, seed: int = 0
    ) -> Workload:
        """All at once: requests as a running engine would hold them, then the trace's next ones.

        The half-done ones have other text, as of an earlier lap; see ``Mix.requests``.
        """
        rows = self._rows(share, seed)
        row, laps = _next(rows, fresh, seed)
        rng = np.random.default_rng((seed, _HALF_DONE))
        weight = self.output_tokens[rows] / self.output_tokens[rows].sum()
        old = rng.choice(rows, size=half_done, replace=half_done > rows.size, p=weight)
        done = np.floor(rng.random(half_done) * self.output_tokens[old]).astype(np.int64)
        return self._workload(
            np.zeros(half_done + fresh),
            np.concatenate((old, row)),
            np.concatenate((np.zeros(half_done, np.int64), laps + 1)),
            np.concatenate((done, np.zeros(fresh, np.int64))),
        )

    def _workload(
        self, arrival_s: FloatArray, row: Integers, laps: Integers, done: Integers
    ) -> Workload:
        prompt, output = self.prompt_tokens[row] + done, self.output_tokens[row] - done
        prefixes = Prefixes(self._texts(row, laps), prompt, output, self.block_tokens)
        return Workload(arrival_s, prompt, output, prefixes)

    def _rows(self, share: float, seed: int) -> Integers:
        if share >= 1:
            return np.arange(self.sessions.size)
        names = np.unique(self.sessions)
        np.random.default_rng((seed, _SESSIONS)).shuffle(names)
        return np.flatnonzero(np.isin(self.sessions, names[: math.ceil(share * names.size)]))

    def _texts(self, row: Integers, laps: Integers) -> list[KnownText]:
        if not laps[-1]:
            return [self.texts[i] for i in row.tolist()]
        ids = 1 + max((r.first + r.count for text in self.texts for r in text.runs), default=0)
        # Later laps have other ids, as far as there are ids.
        most = max(1, FIRST_OWN_ID // ids)
        return [
            KnownText(tuple(Run(run.first + lap % most * ids, run.count) for run in text.runs))
            for text, lap in zip((self.texts[i] for i in row.tolist()), laps.tolist(), strict=True)
        ]

    def _arrivals(
        self, rows: Integers, row: Integers, laps: Integers, rate_per_s: float, seed: int
    ) -> FloatArray:
        if math.isinf(rate_per_s):
            return np.zeros(row.size)
        times_s = self.arrival_s[rows]
        own_per_s = mean_rate_per_s(times_s) if rows.size > 1 else math.inf
        if math.isinf(own_per_s):  # it has no times
            rng = np.random.default_rng((seed, _ARRIVALS))
            return gamma_arrivals(row.size, rate_per_s, 1.0, rng)
        lap_s = float(times_s[-1] - times_s[0]) + 1 / own_per_s
        begin = laps * lap_s
        return at_rate(self.arrival_s[row] + begin, rate_per_s)


def _next(rows: Integers, count: int, seed: int) -> tuple[Integers, Integers]:
    """The next ``count`` of the rows, and the lap of each."""
    positions = seed * count + np.arange(count)
    laps = positions // rows.size
    return rows[positions % rows.size], laps - laps[0]
