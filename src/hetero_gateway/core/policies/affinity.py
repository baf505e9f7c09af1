"""Policies that send what belongs together to one place: peers to compare ``finish-time`` with."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.policies.base import (
    COLUMNS,
    Decided,
    Figures,
    PlacesAtOnce,
    View,
    argmin_with_random_ties,
    number,
)
from hetero_gateway.core.types import InstanceId

# vllm-router's and smg's defaults for ``cache_aware``: --balance-abs-threshold,
# --balance-rel-threshold and --cache-threshold.
_BALANCE_REQUESTS = 32
_BALANCE_RATIO = 1.1
_LEAST_MATCH = 0.5

# A session's own instance may have a quarter more than its share, as in Google's "Consistent
# Hashing with Bounded Loads" (arXiv 1608.01350), where 1.25 is the factor of the examples.
_MOST_SHARE = 1.25
# Sessions are hashed with the ids of instances; so many ids are kept.
_MOST_IDS = 1 << 14
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class PrefixAffinity(PlacesAtOnce):
    """The rule of vllm-router's ``cache_aware``, with this gateway's index in place of its tree.

    Where requests in flight are out of balance, the fewest; else the deepest match, if it is more
    than half of the prompt; else the fewest. It knows neither how fast an instance is nor how far
    a match can be trusted.
    """

    name = "prefix-affinity"

    def position(self, view: View, rng: np.random.Generator) -> int:
        in_flight = view.in_flight
        if not _out_of_balance(in_flight):
            matches = _matches(view)
            best = matches.max()
            if best > _LEAST_MATCH * view.request.prompt_tokens:
                # Of equally deep ones the least loaded.
                return argmin_with_random_ties(np.where(matches == best, in_flight, math.inf), rng)
        return argmin_with_random_ties(in_flight, rng)

    def figures(self, view: View) -> Figures:
        data = (view.request_time_s, view.kv_usage, view.load, view.in_flight, _matches(view))
        return Figures((*COLUMNS, "match_tokens"), data)

    def because(self, decision: Decided) -> str:
        figures, position = decision.choice.figures, decision.choice.position
        in_flight = figures.column("in_flight")
        mine = int(in_flight[position])
        if _out_of_balance(in_flight):
            return (
                f"the instances are out of balance ({int(in_flight.min())} to "
                f"{int(in_flight.max())} requests in flight), and it had {mine}, the fewest"
            )
        match = float(figures.column("match_tokens")[position])
        prompt_tokens = decision.request.prompt_tokens
        if match > _LEAST_MATCH * prompt_tokens:
            return f"it has most of the prompt: {match:.0f} of {prompt_tokens} tokens"
        return (
            f"no instance has half of the prompt, and it had {mine} requests in flight, the fewest"
        )


def _out_of_balance(in_flight: FloatArray) -> bool:
    low, high = float(in_flight.min()), float(in_flight.max())
    return high - low > _BALANCE_REQUESTS and high > _BALANCE_RATIO * low


def _matches(view: View) -> FloatArray:
    prefix = view.demand.prefix
    if prefix is None:
        return np.zeros(len(view.ids))
    return np.asarray(prefix.match_tokens, dtype=float)


class Session(PlacesAtOnce):
    """A session's requests go to one instance, by hash, as long as that has not too many.

    Each session has an order of the instances of its own (rendezvous hashing, weighted by fitted
    capacity), and takes the first one that would not have more than 1.25 times its share of what
    is in flight. An instance that comes or goes moves its own sessions only. A request without a
    session goes where (in flight + 1) / capacity is lowest.
    """

    name = "session"

    def __init__(self) -> None:
        self._hashes: dict[InstanceId, int] = {}

    def position(self, view: View, rng: np.random.Generator) -> int:
        session = view.request.session
        capacity, in_flight = view.capacity, view.in_flight
        if session is None:
            return argmin_with_random_ties((in_flight + 1) / capacity, rng)
        most = np.ceil(_MOST_SHARE * (in_flight.sum() + 1) * capacity / capacity.sum())
        scores = self._scores(session, view)
        scores[in_flight + 1 > most] = -math.inf
        return int(scores.argmax())

    def _scores(self, session: int, view: View) -> FloatArray:
        """The session's order: an instance is ahead of all others as often as its capacity says."""
        hashes = self._hashes
        if len(hashes) > _MOST_IDS:
            hashes.clear()
        for instance_id in view.ids:
            if instance_id not in hashes:
                hashes[instance_id] = xxh3_64_intdigest(instance_id.encode())
        mixed = np.array([hashes[i] for i in view.ids], np.uint64) ^ np.uint64(session)
        uniform = (_mixed(mixed) >> np.uint64(11)) * 2.0**-53
        scores: FloatArray = view.capacity / -np.log(np.maximum(uniform, 2.0**-54))
        return scores

    def figures(self, view: View) -> Figures:
        data = (view.request_time_s, view.kv_usage, view.load, view.in_flight, view.capacity)
        return Figures((*COLUMNS, "capacity"), data)

    def because(self, decision: Decided) -> str:
        figures, position = decision.choice.figures, decision.choice.position
        after = figures.column("in_flight")[position] + 1
        share = figures.column("capacity") / figures.column("capacity").sum()
        if decision.request.session is None:
            per_capacity = after / figures.column("capacity")[position]
            return (
                "the request names no session, and its requests in flight over its capacity would "
                f"be {number(float(per_capacity))} s, the lowest"
            )
        return (
            "it is the first in the order of this session that has room: "
            f"{int(after)} requests in flight, at a share of {share[position]:.0%}"
        )


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit depends on every other (the finaliser of splitmix64)."""
    values ^= values >> np.uint64(30)
    values *= _MULTIPLIERS[0]
    values ^= values >> np.uint64(27)
    values *= _MULTIPLIERS[1]
    values ^= values >> np.uint64(31)
    return values
