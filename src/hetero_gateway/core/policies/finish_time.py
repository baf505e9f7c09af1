"""``finish-time``: where the request, and those it would join, finish soonest.

The description is in docs/design/scheduling.md.

Goes beyond the paper. Requests wait in the gateway, first in, first out, and are placed when an
instance has room: late binding. The cost of a placement is the request's own predicted latency,
plus the delay it imposes on the requests already there, plus a price for the memory it takes from
later ones. Two more things make it robust: times are multiplied by each instance's observed speed
factor, and at the end of a batch the drain rule keeps slow machines from taking work that a fast
one would finish sooner, after waiting.

The price is about comparative advantage. T_r^s over T of the pool's typical request says how well
a request suits an instance compared with other traffic: a long one is dearer on a small cache. It
counts as the instance's memory fills, by the square of its usage, in units of the lowest latency on
offer.

The arithmetic is in ``estimates.py``; this module has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies.at_once import PlacesAtOnce, lowest
from hetero_gateway.core.policies.base import (
    COLUMNS,
    Backlog,
    Choice,
    Decision,
    Objective,
    PolicyOptions,
    View,
    number,
)
from hetero_gateway.core.policies.estimates import (
    MATCHED_SHARE,
    MOST_PATIENCE_S,
    NEAR,
    Estimate,
    Price,
    Prospect,
    at_hand,
    cheapest,
    cost,
    estimate,
    late_from_s,
    matched_room,
    request_time_s,
    room,
)
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.policies.slo import VIOLATION_PRICE_S, Slos, violations
from hetero_gateway.core.types import Draws

# The drain rule: waiting requests are the end of a batch when nothing has arrived for this many
# mean gaps between arrivals, within these bounds (s). Poisson arrivals pause that long once
# in 20 000.
_GAPS_BEFORE_DRAIN: Final = 10.0
_IDLE_BOUNDS_S = (0.02, 2.0)
# A part of a cost below this is not worth mentioning.
_WORTH_SAYING_S: Final = 0.0005
# How many times the wait for the queue to drain must cover the time by which a request would finish
# later than elsewhere. Twice makes the batch end sooner, but its mean request finish later.
DRAIN_FACTOR: dict[Objective, float] = {"latency": 1.0, "makespan": 2.0}

# Columns its choices report for each candidate; without any constants the cost is a count.
_ESTIMATES = (
    "latency_s", "delay_s", "memory_price_s", "late_price_s", "cost_s", "ttft_s", "room",
)  # fmt: skip
_NAMES = (*COLUMNS, *_ESTIMATES)
# Further columns, and their names in words.
_FURTHER = {"slo_price_s": "limits that would be missed", "own_price_s": "a rule of its own"}
_NAMES_OF_COUNTS = (*COLUMNS, "cost_s", "room")

__all__ = ["MOST_PATIENCE_S", "FinishTime", "drain_s", "idle_before_drain_s"]


def idle_before_drain_s(mean_gap_s: float) -> float:
    """How long nothing must arrive for a batch to have ended, given the previous mean gap."""
    low, high = _IDLE_BOUNDS_S
    return min(high, max(low, _GAPS_BEFORE_DRAIN * mean_gap_s))


class FinishTime(PlacesAtOnce):
    """Section "finish-time" of docs/design/scheduling.md.

    Args:
        options: ``objective`` "makespan" always applies the drain rule, "latency" only when nothing
            has arrived for ``idle_before_drain_s``; and ``prefill_depth``.
        own_price: a custom price rule, if there are times at all.
    """

    name = "finish-time"
    queues = True
    samples = True

    def __init__(self, options: PolicyOptions, own_price: Price | None = None) -> None:
        self.objective: Objective = options.objective
        self.prefill_depth = options.prefill_depth
        self._first_token_weight = options.first_token_weight
        self.slos = options.slos
        self.own_price = own_price

    def would_choose(self, view: View, rng: Draws) -> Choice:
        choice = self.choose(view, rng, waits=True)
        assert choice is not None
        return choice

    def choose(  # type: ignore[override]
        self, view: View, rng: Draws, *, waits: bool = False
    ) -> Choice | None:
        """``waits``: instead of None, return the best candidate, which has to be waited for."""
        request, states, members, now_s = view.request, view.states, view.members, view.now_s
        backlog = view.backlog
        assert backlog is not None
        n_r, prompt_tokens = float(request.sequences), float(request.prompt_tokens)
        prefills, prefix, cached = view.prefill_tokens, view.prefix, None
        needed, depth = n_r * prompt_tokens, self.prefill_depth
        grown = needed + n_r * request.predicted_output_tokens
        if prefix is not None and any(prefix.cached_tokens):
            cached, needed, grown = prefix.cached_tokens, -math.inf, -math.inf
        slots: list[bool] = []
        rooms: list[bool] = []
        for i, state in enumerate(states):
            slot, has_room = room(state, members[i], needed, grown, depth, now_s)
            if cached is not None and not has_room:
                if cached[i] >= MATCHED_SHARE * prompt_tokens:
                    slot, has_room = matched_room(state, members[i], depth, now_s)
            slots.append(slot)
            rooms.append(has_room)
        if True not in rooms:
            if backlog.stands_in:
                rooms = [at_hand(s, m) for s, m in zip(states, members, strict=True)]
                slots = [slot or has_room for slot, has_room in zip(slots, rooms, strict=True)]
            if True not in rooms and not waits:
                return None
        # So soon after an arrival, no batch has ended.
        ended = backlog.idle_s >= _IDLE_BOUNDS_S[0] and _has_ended(backlog)
        output, residual = float(request.predicted_output_tokens), backlog.residual
        typical_s = backlog.typical_request_time_s
        # The prompt times of a stand-in were never observed.
        expects_prompts = not (ended or backlog.stands_in)
        found: list[Estimate] = []
        soonest_s = soonest_ttft_s = math.inf
        for i, state in enumerate(states):
            one = estimate(
                state,
                members[i],
                prefills[i],
                None if cached is None else cached[i],
                n_r,
                prompt_tokens,
                output,
                residual,
                typical_s[i],
                now_s,
                expects_prompts,
            )
            found.append(one)
            if one[4] < soonest_s:
                soonest_s = one[4]
            if one[7] < soonest_ttft_s:
                soonest_ttft_s = one[7]
        latencies: list[float] = []
        costs: list[float] = []
        told: list[float] = []
        names: tuple[str, ...] = _NAMES
        if backlog.profiled:
            late_s = late_from_s(soonest_ttft_s, cached is not None)
            weight = 0.0 if cached is None else self._first_token_weight
            further: list[list[float]] = []
            if self.slos is not None:
                names = (*names, "slo_price_s")
                further.append(self._slo_prices(view, self.slos, found))
            if self.own_price is not None:
                names = (*names, "own_price_s")
                further.append(self._own_prices(view, self.own_price, found))
            for i, one in enumerate(found):
                time_s, usage, load_s, in_flight, latency_s, delay_s, price, ttft_s, _ = one
                price_s, late_price_s, cost_s = cost(
                    latency_s, delay_s, price, ttft_s, soonest_s, late_s, weight
                )
                for prices in further:
                    cost_s += prices[i]
                latencies.append(latency_s)
                costs.append(cost_s)
                told += (
                    time_s, usage, load_s, in_flight, latency_s, delay_s, price_s, late_price_s,
                    cost_s, ttft_s, rooms[i],
                )  # fmt: skip
                for prices in further:
                    told.append(prices[i])
        else:
            # As seconds they are wrong, but they release requests whose first token is not seen.
            names, latencies = _NAMES_OF_COUNTS, costs
            for i, one in enumerate(found):
                costs.append(_sequences_for_weight(states[i], members[i]))
                told += (*one[: len(COLUMNS)], costs[i], rooms[i])
            soonest_s = min(costs)
        latest_s, takes_s = math.inf, 0.0
        drains = ended or self.objective == "makespan"
        if (drains or False in rooms) and backlog.mean_lengths is not None:
            takes_s = drain_s(states, members, backlog.mean_lengths, backlog.queued)
            if drains:
                # The drain rule: not if the fastest finishes sooner after the queue is drained.
                latest_s = soonest_s + takes_s / DRAIN_FACTOR[self.objective]
        near = NEAR if backlog.stands_in else 1.0
        position = cheapest(states, costs, slots, rooms, latencies, latest_s, takes_s, near, rng)
        it_waits = position < 0
        if it_waits:
            if not waits:
                return None
            position = costs.index(min(costs))
        best = found[position]
        by_speed = backlog.profiled and backlog.stands_in
        charge = workload(best[0], best[1], view.theta)
        if not backlog.profiled:
            return Choice(position, charge, names, told, it_waits, costs[position])
        return Choice(position, charge, names, told, it_waits, best[7], best[4], by_speed)

    def _slo_prices(self, view: View, slos: Slos, found: list[Estimate]) -> list[float]:
        """The price of limits that would be missed, beside latency, by candidate, s."""
        request, backlog = view.request, view.backlog
        assert backlog is not None
        slo, n_r, prompt = slos.of(request), float(request.sequences), float(request.prompt_tokens)
        output = float(request.predicted_output_tokens)
        return [
            VIOLATION_PRICE_S
            * violations(
                state, member, one[7], one[8], prefill, n_r, prompt, output, view.now_s,
                backlog.waited_s, slo,
            )
            for state, member, prefill, one in zip(
                view.states, view.members, view.prefill_tokens, found, strict=True
            )
        ]  # fmt: skip

    def _own_prices(self, view: View, own_price: Price, found: list[Estimate]) -> list[float]:
        """The custom price of each candidate, s."""
        request, prefix, backlog = view.request, view.prefix, view.backlog
        assert backlog is not None
        n_r, prompt = float(request.sequences), float(request.prompt_tokens)
        output, prices = float(request.predicted_output_tokens), []
        for i, one in enumerate(found):
            cached = 0.0 if prefix is None else prefix.cached_tokens[i]
            prospect = Prospect(
                one[4], one[5], one[7], one[8], n_r, prompt, output, cached, backlog.waited_s,
                view.now_s,
            )  # fmt: skip
            prices.append(own_price(view.states[i], view.members[i], prospect))
        return prices

    # In words

    def because(self, decision: Decision) -> str:
        figures, position = decision.choice.figures, decision.choice.position
        rooms = figures.column("room")
        if not any(rooms):
            return "no instance has room"
        if rooms.count(1.0) == 1 and rooms[position]:
            return "no other instance has room"
        costs = [
            cost_s if has_room else math.inf
            for cost_s, has_room in zip(figures.column("cost_s"), rooms, strict=True)
        ]
        if "latency_s" not in figures:
            ours = "it would have {} sequences for its weight, the fewest"
            return lowest(decision, costs, ours, "{} would have {}")
        if min(costs) < costs[position]:
            late = decision.ids[costs.index(min(costs))]
            return f"it will be done soonest; {late} is left out, as the end of a batch is near"
        mine_s = number(figures.at("latency_s", position))
        delay_s = number(figures.at("delay_s", position))
        memory = _part(figures.at("memory_price_s", position), "scarce memory")
        cached = self._because_cached(decision)
        first = _part(figures.at("late_price_s", position), "its first token")
        further = "".join(
            _part(figures.at(name, position), what)
            for name, what in _FURTHER.items()
            if name in figures
        )
        ours = (
            f"done in {mine_s} s{cached} and holding others up for {delay_s} s{memory}{first}"
            f"{further} costs {{}} s, the lowest"
        )
        told = lowest(decision, costs, ours, "{} would cost {} s")
        if figures.by_speed:
            told += " (where there is no profile, by observed speed)"
        return told

    def _because_cached(self, decision: Decision) -> str:
        """The cached part of the prompt where it goes."""
        prefix = decision.prefix
        if prefix is None or not any(prefix.cached_tokens):
            return ""
        tokens = round(prefix.cached_tokens[decision.choice.position])
        return f" with {tokens} of {decision.request.prompt_tokens} prompt tokens cached"


def _sequences_for_weight(state: InstanceState, member: Member) -> float:
    """Stands for a cost if there are no constants: sequences per weight."""
    peers = state.peers
    there = state.waiting + state.streaming + peers.waiting + peers.streaming
    return (there + 1) / member.weight


def _has_ended(backlog: Backlog) -> bool:
    """Whether nothing has arrived for so long that no more is to be expected."""
    return backlog.idle_s >= idle_before_drain_s(backlog.mean_gap_s)


def drain_s(
    states: Sequence[InstanceState],
    members: Sequence[Member],
    lengths: tuple[float, float],
    queued: int,
) -> float:
    """How long this many requests of these mean (prompt, output) tokens take at full speed, s."""
    rate_per_s, (prompt_tokens, output_tokens) = 0.0, lengths
    for state, member in zip(states, members, strict=True):
        rate_per_s += 1 / (state.speed * request_time_s(member, prompt_tokens, output_tokens))
    return queued / rate_per_s


def _part(price_s: float, what: str) -> str:
    """A part of a cost in words; "" if it is negligible."""
    return f", with {number(price_s)} s for {what}," if price_s >= _WORTH_SAYING_S else ""
