"""One simulated engine, and when its requests were sent, had their first tokens and ended."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray, Integers
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.kernel import FINISHED, FIRST

BLOCK_TOKENS = 16


class Times(NamedTuple):
    """Of each request, (N,), in s, without ``first_token_s``."""

    sent_s: FloatArray
    first_s: FloatArray
    end_s: FloatArray


def times_of(
    profile: Profile,
    budget: int,
    prompt: Integers,
    output: Integers,
    arrival_s: FloatArray,
    streams: float = math.inf,
    *,
    cached: bool,
) -> Times:
    """Requests as they arrive, at most ``streams`` at a time; ``cached``: all but last blocks."""
    fleet = EngineFleet([profile], max_batched_tokens=budget)
    size = prompt.size
    times = Times(*(np.full(size, math.nan) for _ in Times._fields))
    owners: dict[int, int] = {}
    following = 0

    def send(at_s: float) -> None:
        nonlocal following
        i, slot = following, fleet.new_slot()
        owners[slot], times.sent_s[i], following = i, at_s, following + 1
        # Of a cached prompt's last block, half in the mean is computed.
        known = max(0, int(prompt[i]) - BLOCK_TOKENS // 2) if cached else 0
        fleet.submit(0, slot, int(prompt[i]), int(output[i]), at_s, fetched=known)

    def advance(until_s: float) -> None:
        while True:
            complete = fleet.advance(until_s, True)
            for k in range(1, 1 + fleet.log[0]):
                slot, kind, now_s = fleet.log[k] >> 2, fleet.log[k] & 3, fleet.log_s[k]
                if kind == FIRST:
                    times.first_s[owners[slot]] = now_s
                elif kind == FINISHED:
                    times.end_s[owners.pop(slot)] = now_s
                    fleet.free_slots.append(slot)
                    if following < size and arrival_s[following] <= now_s:
                        send(now_s)
            if complete:
                return

    while following < size and len(owners) < streams:
        at_s = float(arrival_s[following])
        advance(at_s)
        send(at_s)
    advance(math.inf)
    return times
