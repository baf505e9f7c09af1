"""How far reports of other gateways are believed. Pure.

A row comes from a peer that may be broken or hostile, and it decides where this gateway sends its
requests. So the sum of the others' rows on an instance is bounded by what its engine can hold, and
by what the engine itself reported when it was last scraped:

    not contradicted   at most twice the engine's seats (two gateways that collide), or what the
                       engine reported plus a quarter of its seats, if that is more
    contradicted       since the last scrape the others have always claimed more than the engine
                       reported plus a quarter of its seats: then that is what counts, all of it as
                       streaming
    in doubt           this gateway's own queue does not move, it has nothing on the instance, and
                       the engine did not report that it is full: the others leave a seat free

Any excess is scaled down as a whole, so that a row stays coherent. Tokens per sequence are bounded
by the instance's context, seconds per sequence by ``MOST_REQUEST_TIMES`` times the average of this
gateway's own requests. The engine's gauges do not count by themselves: they only bound what peers
claim. ``instances/speed.py`` limits how far a peer can move a speed factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.profile import DEFAULT_MAX_NUM_SEQS
from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.sharing.message import Rows
from hetero_gateway.core.types import InstanceSpec

# Multiple of an engine's seats that two gateways may fill before they hear of each other.
_COLLIDING = 2.0
# A scrape is older than a row, and a request in transit is in only one of them.
SLACK = 0.25
# Requests of one gateway can be longer than another's by this factor, on average.
MOST_REQUEST_TIMES = 32.0
# Before this gateway has had a request: longer than nearly all take.
_UNKNOWN_REQUEST_S = 600.0
# The context of an engine that does not report one.
_MOST_CONTEXT_TOKENS = 2.0**24

(
    _LOAD_S, _KV, _IN_FLIGHT, _WAITING, _STREAMING, _WAITING_PROMPT, _WAITING_PREFILL,
    _WAITING_OUTPUT, _CONTEXT,
) = map(
    PeerLoad._fields.index,
    ("load_s", "kv_tokens", "in_flight", "waiting", "streaming", "waiting_prompt",
     "waiting_prefill", "waiting_output", "context"),
)  # fmt: skip
LOADS = slice(_LOAD_S, _CONTEXT + 1)


class EngineReport(NamedTuple):
    """What an engine's own /metrics reported at a scrape.

    Args:
        requests: running and waiting there, of all senders.
        own: sequences of this gateway there at that moment.
        full: it has requests waiting, or runs as many as it can.
        kv_usage: share of its KV cache in use, 0 to 1; None: not reported.
    """

    requests: float
    own: float
    full: bool
    kv_usage: float | None = None


class Belief:
    """The part of others' rows that counts, for a list of instances.

    Args:
        specs: of the instances, in the order of all rows.
    """

    def __init__(self, specs: Sequence[InstanceSpec]) -> None:
        count = len(specs)
        self._seats = np.empty(count)
        self._kv = np.empty(count)
        self._context = np.empty(count)
        self._confirmed = np.full(count, np.nan)  # sequences of others by its engine; NaN: unknown
        self._kv_confirmed = np.full(count, np.inf)
        self._full = np.zeros(count, dtype=bool)
        self._contradicted = np.zeros(count, dtype=bool)
        self._kv_contradicted = np.zeros(count, dtype=bool)
        # The minimum that the others have claimed since the last scrape.
        self._least = np.full(count, np.inf)
        self._least_context = np.full(count, np.inf)
        self._request_s = math.nan
        for position, spec in enumerate(specs):
            self.change(position, spec)

    def change(self, position: int, spec: InstanceSpec) -> None:
        """Note that an instance's profile, context or KV cache may have changed."""
        profile = spec.profile
        seats = DEFAULT_MAX_NUM_SEQS if profile is None else profile.max_num_seqs
        kv = spec.kv_capacity_tokens if profile is None else profile.kv_capacity_tokens
        self._seats[position] = seats
        self._kv[position] = kv or math.inf
        self._context[position] = min(spec.max_model_len or math.inf, kv or _MOST_CONTEXT_TOKENS)

    def report(self, position: int, report: EngineReport | None) -> None:
        """Note an engine's scrape; None: it reports nothing."""
        if report is None:
            self._confirmed[position] = np.nan
            self._kv_confirmed[position] = np.inf
            self._full[position] = False
            self._contradicted[position] = self._kv_contradicted[position] = False
        else:
            self._confirmed[position] = confirmed = max(0.0, report.requests - report.own)
            self._full[position] = report.full
            allowed = confirmed + SLACK * self._seats[position]
            self._contradicted[position] = math.inf > self._least[position] > allowed
            usage = 1.0 if report.kv_usage is None else report.kv_usage
            self._kv_confirmed[position] = most = (usage + SLACK) * self._kv[position]
            self._kv_contradicted[position] = math.inf > self._least_context[position] > most
        self._least[position] = self._least_context[position] = np.inf

    def note_own(self, load_s: float, in_flight: float) -> None:
        """Note this gateway's own requests, over all instances."""
        if in_flight > 0:
            self._request_s = load_s / in_flight

    def believed(self, rows: Rows, doubted: NDArray[np.bool_] | None = None) -> Rows:
        """The part of the sums of others' rows that counts, one for each instance; a new array.

        Args:
            doubted: where this gateway has nothing, while its own queue does not move.
        """
        result = rows.copy()
        claimed = np.maximum(rows[:, _IN_FLIGHT], rows[:, _WAITING] + rows[:, _STREAMING])
        np.minimum(self._least, claimed, out=self._least)
        np.minimum(self._least_context, rows[:, _CONTEXT], out=self._least_context)
        confirmed = np.where(np.isnan(self._confirmed), 0.0, self._confirmed)
        most = confirmed + SLACK * self._seats
        most = np.where(self._contradicted, most, np.maximum(most, _COLLIDING * self._seats))
        streams = self._contradicted & (claimed > most)
        if doubted is not None:
            doubted = doubted & ~self._full
            most = np.where(doubted, np.minimum(most, self._seats - 1.0), most)
            streams |= doubted
        loads = result[:, LOADS]
        over = claimed > most
        if over.any():
            loads[over] *= (most[over] / claimed[over])[:, np.newaxis]
        if streams.any():
            result[streams, _STREAMING] += result[streams, _WAITING]
            result[streams, _WAITING : _WAITING + 1] = 0.0
        self._bound_tokens(result, doubted)
        return result

    def _bound_tokens(self, rows: Rows, doubted: NDArray[np.bool_] | None) -> None:
        """Bound tokens by the context of a sequence, and its time."""
        waiting, context = rows[:, _WAITING], self._context
        sequences = np.maximum(rows[:, _IN_FLIGHT], waiting + rows[:, _STREAMING])
        for column in (_WAITING_PROMPT, _WAITING_OUTPUT):
            np.minimum(rows[:, column], waiting * context, out=rows[:, column])
        prompts = rows[:, _WAITING_PROMPT]
        np.minimum(rows[:, _WAITING_PREFILL], prompts, out=rows[:, _WAITING_PREFILL])
        times = np.where(np.isnan(self._confirmed), 0.0, self._confirmed) / self._seats
        kv = np.where(self._contradicted, times + SLACK, _COLLIDING * np.maximum(times, 1.0))
        kv = np.minimum(sequences * context, kv * self._kv)
        np.minimum(rows[:, _KV], kv, out=rows[:, _KV])
        held = rows[:, _STREAMING] * context
        held = np.where(self._kv_contradicted, np.minimum(held, self._kv_confirmed), held)
        if doubted is not None:
            held = np.where(doubted, np.minimum(held, 0.5 * self._kv), held)
        np.minimum(rows[:, _CONTEXT], held, out=rows[:, _CONTEXT])
        known = not math.isnan(self._request_s)
        longest_s = MOST_REQUEST_TIMES * self._request_s if known else _UNKNOWN_REQUEST_S
        np.minimum(rows[:, _LOAD_S], sequences * longest_s, out=rows[:, _LOAD_S])
