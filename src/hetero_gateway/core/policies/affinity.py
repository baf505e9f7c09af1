"""Policies that keep related requests together: baselines to compare ``finish-time`` with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from hetero_gateway.core.policies.at_once import Candidates, PlacesAtOnce, lowest_with_random_ties
from hetero_gateway.core.policies.base import Decision, number
from hetero_gateway.core.policies.counting import per_capacity
from hetero_gateway.core.types import Draws, InstanceId

# vllm-router's and smg's defaults for ``cache_aware``: --balance-abs-threshold,
# --balance-rel-threshold and --cache-threshold.
_BALANCE_REQUESTS: Final = 32
_BALANCE_RATIO: Final = 1.1
_LEAST_MATCH: Final = 0.5

# A session's own instance may have a quarter more than its share, as in Google's "Consistent
# Hashing with Bounded Loads" (arXiv 1608.01350), whose examples use 1.25.
_MOST_SHARE: Final = 1.25
# Sessions are hashed with the ids of instances; this many ids are kept.
_MOST_IDS: Final = 1 << 14
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_64_BITS = (1 << 64) - 1


class PrefixAffinity(PlacesAtOnce):
    """The rule of vllm-router's ``cache_aware``, with this gateway's index in place of its tree.

    If requests in flight are out of balance, the fewest; else the deepest match, if it is more than
    half of the prompt; else the fewest. It knows neither how fast an instance is nor how far a
    match can be trusted.
    """

    name = "prefix-affinity"

    def position(self, candidates: Candidates, rng: Draws) -> int:
        in_flight: Sequence[float] = candidates.in_flight
        if not _out_of_balance(in_flight):
            matches = _matches(candidates)
            best = max(matches)
            if best > _LEAST_MATCH * candidates.request.prompt_tokens:
                # Of equally deep matches, the least loaded.
                in_flight = [
                    there if match == best else math.inf
                    for there, match in zip(in_flight, matches, strict=True)
                ]
        return lowest_with_random_ties(in_flight, rng)

    def told(self, candidates: Candidates) -> dict[str, Sequence[float]]:
        return {"match_tokens": _matches(candidates)}

    def because(self, decision: Decision) -> str:
        figures, position = decision.choice.figures, decision.choice.position
        in_flight = figures.column("in_flight")
        mine = int(in_flight[position])
        if _out_of_balance(in_flight):
            return (
                f"the instances are out of balance ({int(min(in_flight))} to "
                f"{int(max(in_flight))} requests in flight), and it had {mine}, the fewest"
            )
        match = figures.at("match_tokens", position)
        prompt_tokens = decision.request.prompt_tokens
        if match > _LEAST_MATCH * prompt_tokens:
            return f"it has most of the prompt: {match:.0f} of {prompt_tokens} tokens"
        return (
            f"no instance has half of the prompt, and it had {mine} requests in flight, the fewest"
        )


def _out_of_balance(in_flight: Sequence[float]) -> bool:
    low, high = min(in_flight), max(in_flight)
    return high - low > _BALANCE_REQUESTS and high > _BALANCE_RATIO * low


def _matches(candidates: Candidates) -> Sequence[float]:
    prefix = candidates.view.prefix
    return [0.0] * len(candidates.ids) if prefix is None else prefix.match_tokens


class Session(PlacesAtOnce):
    """Hashes a session's requests to one instance, as long as that one is not overloaded.

    Each session has its own order of the instances (rendezvous hashing, weighted by fitted
    capacity), and takes the first one that would not exceed 1.25 times its share of the requests in
    flight. An instance that comes or goes moves only its own sessions. A request without a session
    goes where (in flight + 1) / capacity is lowest.
    """

    name = "session"

    def __init__(self) -> None:
        self._hashes: dict[InstanceId, int] = {}

    def position(self, candidates: Candidates, rng: Draws) -> int:
        session = candidates.request.session
        capacity, in_flight = candidates.capacity, candidates.in_flight
        if session is None:
            return lowest_with_random_ties(per_capacity(in_flight, capacity), rng)
        most, total = _MOST_SHARE * (sum(in_flight) + 1), math.fsum(capacity)
        scores = [
            self._score(session, instance_id, per_s)
            if there + 1 <= math.ceil(most * per_s / total)
            else -math.inf
            for instance_id, per_s, there in zip(candidates.ids, capacity, in_flight, strict=True)
        ]
        return scores.index(max(scores))

    def _score(self, session: int, instance_id: InstanceId, capacity: float) -> float:
        """The session's order: an instance comes first as often as its capacity warrants."""
        hashed = self._hashes.get(instance_id)
        if hashed is None:
            if len(self._hashes) >= _MOST_IDS:
                self._hashes.clear()
            hashed = self._hashes[instance_id] = xxh3_64_intdigest(instance_id.encode())
        uniform = (_mixed(hashed ^ session) >> 11) * 2.0**-53
        return capacity / -math.log(max(uniform, 2.0**-54))

    def told(self, candidates: Candidates) -> dict[str, Sequence[float]]:
        return {"capacity": candidates.capacity}

    def because(self, decision: Decision) -> str:
        figures, position = decision.choice.figures, decision.choice.position
        after = figures.at("in_flight", position) + 1
        capacity = figures.at("capacity", position)
        if decision.request.session is None:
            return (
                "the request names no session, and its requests in flight over its capacity would "
                f"be {number(after / capacity)} s, the lowest"
            )
        return (
            "it is the first in the order of this session that has room: "
            f"{int(after)} requests in flight, at a share of "
            f"{capacity / math.fsum(figures.column('capacity')):.0%}"
        )


def _mixed(value: int) -> int:
    """Mix the bits: every bit depends on every other (the finaliser of splitmix64)."""
    value ^= value >> 30
    value = value * _MULTIPLIERS[0] & _64_BITS
    value ^= value >> 27
    value = value * _MULTIPLIERS[1] & _64_BITS
    return value ^ value >> 31
