"""``finish-time``: where the request, and those it would join, finish soonest.

The description is in docs/design/scheduling.md.

Goes beyond the paper. Requests wait in the gateway, first in, first out, and are placed when an
instance has room: late binding. The cost of a placement is the request's own predicted latency,
plus the delay it imposes on the requests that are there, plus a price for the memory it takes
from those to come. Two more things make it robust: times are multiplied by each instance's
observed speed factor, and at the end of a batch the drain rule keeps the slow machines from taking
work that a fast one would finish sooner, after waiting.

The price is about comparative advantage. T_r^s over T of the pool's typical request says how well
a request suits an instance next to what else comes: a long one is dearer on a small cache. It
counts as the instance's memory fills, by the square of its usage, and is in units of the lowest
latency on offer.

The arithmetic is in ``estimates.py``; here are the rules.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray, workload
from hetero_gateway.core.instances.dispatch import NO_PEERS
from hetero_gateway.core.instances.table import SPEED, STREAMING, WAITING
from hetero_gateway.core.policies import estimates as arithmetic
from hetero_gateway.core.policies.base import (
    COLUMNS,
    Backlog,
    Choice,
    Decided,
    Figures,
    Jit,
    Numbers,
    Objective,
    Outlook,
    PlacesAtOnce,
    PolicyOptions,
    Prefix,
    SmallView,
    View,
    argmin_with_random_ties,
    lowest,
    number,
)
from hetero_gateway.core.policies.estimates import (
    LATE_CACHED_S,
    LATE_FACTOR,
    LATE_S,
    LATE_WEIGHT,
    MATCHED_SHARE,
    MOST_PATIENCE_S,
    BoolArray,
    Estimate,
    busy_wide,
    cheapest_small,
    estimate,
    matched_room_of,
    room_of,
)
from hetero_gateway.core.policies.slo import (
    VIOLATION_PRICE_S,
    Slos,
    violations,
    violations_wide,
)
from hetero_gateway.core.types import Request

# The drain rule: what waits is the end of a batch when nothing has arrived for so many mean gaps
# between arrivals, within these bounds (s). Poisson arrivals pause that long once in 20 000.
_GAPS_BEFORE_DRAIN = 10.0
_IDLE_BOUNDS_S = (0.02, 2.0)
# A part of a cost below this is not worth a word.
_WORTH_SAYING_S = 0.0005
# How many times the wait that draining the queue takes must cover what a request would finish
# later than elsewhere. Twice makes the batch end sooner, but its mean request finishes later.
DRAIN_FACTOR: dict[Objective, float] = {"latency": 1.0, "makespan": 2.0}

# What its choices report of each candidate; without any constants the cost is a count.
_ESTIMATES = (
    "latency_s", "delay_s", "memory_price_s", "late_price_s", "cost_s", "ttft_s", "room",
)  # fmt: skip
_NAMES = (*COLUMNS, *_ESTIMATES)
_NAMES_WITH_SLO = (*_NAMES, "slo_price_s")
_NAMES_OF_COUNTS = (*COLUMNS, "cost_s", "room")

# Made for every request: a NamedTuple's own constructor is a function in Python.
_new_figures: Callable[[type[Figures], tuple[Any, ...]], Figures] = tuple.__new__

__all__ = ["MOST_PATIENCE_S", "FinishTime", "idle_before_drain_s"]


def idle_before_drain_s(mean_gap_s: float) -> float:
    """How long nothing must arrive for a batch to be at its end, given the mean gap before."""
    low, high = _IDLE_BOUNDS_S
    return min(high, max(low, _GAPS_BEFORE_DRAIN * mean_gap_s))


class FinishTime(PlacesAtOnce):
    """Section "finish-time" of docs/design/scheduling.md.

    Args:
        options: ``objective`` "makespan" has the drain rule always, "latency" only when nothing
            has arrived for ``idle_before_drain_s``; and ``prefill_depth``.
    """

    name = "finish-time"
    queues = True
    has_small_form = True

    def __init__(self, options: PolicyOptions) -> None:
        self.objective: Objective = options.objective
        self.prefill_depth = options.prefill_depth
        self._first_token_weight = options.first_token_weight
        self.slos = options.slos
        self._room = arithmetic.room
        self._matched_room = arithmetic.matched_room
        self._estimates = arithmetic.estimates
        self._cheapest = arithmetic.cheapest

    def compile(self, jit: Jit) -> None:
        self._room = jit(arithmetic.room)
        self._matched_room = jit(arithmetic.matched_room)
        self._estimates = jit(arithmetic.estimates)
        self._cheapest = jit(arithmetic.cheapest)

    # In arrays

    def choose(self, view: View, rng: np.random.Generator) -> Choice | None:  # type: ignore[override]
        outlook = view.outlook
        assert outlook is not None
        slots, room = self._rooms(view, outlook)
        if not room.any():
            return None
        choice = self._choose(view, outlook, slots, room, rng)
        return None if choice.waits else choice

    def would_choose(self, view: View, rng: np.random.Generator) -> Choice:
        outlook = view.outlook
        assert outlook is not None
        return self._choose(view, outlook, *self._rooms(view, outlook), rng)

    def _rooms(self, view: View, outlook: Outlook) -> tuple[BoolArray, BoolArray]:
        """Who is worth waiting for, and who of them may be sent the request now."""
        rows, seats, depth = outlook.rows, outlook.max_num_seqs, self.prefill_depth
        cached = _cached(view.demand.prefix)
        needed = float(view.request.sequences * view.request.prompt_tokens)
        if cached is not None:
            needed = -math.inf
        slots, room = self._room(rows, seats, outlook.kv_limit_tokens, needed, depth)
        if cached is None or room.all():
            return slots, room
        matched = cached >= MATCHED_SHARE * view.request.prompt_tokens
        return self._matched_room(rows, seats, depth, slots, room, matched)

    def _choose(
        self,
        view: View,
        outlook: Outlook,
        slots: BoolArray,
        room: BoolArray,
        rng: np.random.Generator,
    ) -> Choice:
        backlog = outlook.backlog
        ended = _has_ended(backlog)
        told = (view.request_time_s, view.kv_usage, view.load, view.in_flight)
        if not backlog.profiled:
            rows = outlook.rows
            # Without constants: the sequences there per weight, in place of seconds.
            cost: FloatArray = (rows[WAITING] + rows[STREAMING] + 1) / view.weight
            # As seconds they are wrong, but they let go of those whose first token nobody sees.
            latency_s = ttft_s = cost
            figures = Figures(_NAMES_OF_COUNTS, (*told, cost, room))
        else:
            output = float(view.request.predicted_output_tokens)
            latency_s, delay_s, price_s, late_s, cost, ttft_s, step_s = self._estimates(
                outlook.constants,
                outlook.rows,
                outlook.kv_capacity_tokens,
                outlook.max_num_seqs,
                backlog.residual.dot(outlook.stages),
                np.minimum(backlog.residual, output).dot(outlook.stages),
                # How long prompts take by themselves nobody has seen of a stand-in.
                busy_wide(outlook.constants[0], outlook.rows) * (not (ended or backlog.stands_in)),
                view.request_time_s,
                backlog.typical_request_time_s,
                view.demand.prefill_tokens,  # type: ignore[arg-type]  # a View has no lists
                _cached(view.demand.prefix),
                self._first_token_weight,
                float(view.request.sequences),
                float(view.request.prompt_tokens),
                output,
            )
            names: tuple[str, ...] = _NAMES
            data: tuple[FloatArray | BoolArray, ...]
            data = (*told, latency_s, delay_s, price_s, late_s, cost, ttft_s, room)
            if self.slos is not None:
                slo_s = self._slo_prices_wide(view, outlook, ttft_s, step_s)
                cost = cost + slo_s
                names = _NAMES_WITH_SLO
                data = (*told, latency_s, delay_s, price_s, late_s, cost, ttft_s, room, slo_s)
            figures = Figures(names, data, by_speed=backlog.stands_in)
        if (ended or self.objective == "makespan") and backlog.mean_request_times_s is not None:
            slots = slots & self._worth_it(outlook, backlog, latency_s)
            room = room & slots
        position, tied = self._cheapest(cost, slots, room)
        waits = position < 0
        if waits:
            position = int(cost.argmin())
        elif tied:
            ties = (room & (cost == cost[position])).nonzero()[0]
            position = int(ties[argmin_with_random_ties(latency_s[ties], rng)])
        return Choice(
            position,
            view.workload_at(position),
            figures,
            waits,
            float(ttft_s[position]),
            float(latency_s[position]) if backlog.profiled else None,
        )

    def _slo_prices_wide(
        self, view: View, outlook: Outlook, ttft_s: FloatArray, step_s: FloatArray
    ) -> FloatArray:
        assert self.slos is not None
        request = view.request
        return VIOLATION_PRICE_S * violations_wide(
            outlook.constants,
            outlook.rows,
            ttft_s,
            step_s,
            float(request.sequences),
            float(request.prompt_tokens),
            float(request.predicted_output_tokens),
            outlook.backlog.waited_s,
            self.slos.of(request),
        )

    def _worth_it(
        self, outlook: Outlook, backlog: Backlog[Any], latency_s: FloatArray
    ) -> BoolArray:
        """The drain rule: not where the fastest is done sooner after the queue is drained."""
        drain_s = _drain_s(backlog, outlook.rows[SPEED])
        result: BoolArray = DRAIN_FACTOR[self.objective] * (latency_s - latency_s.min()) <= drain_s
        return result

    # In plain floats

    def choose_small(self, view: SmallView, rng: np.random.Generator) -> Choice | None:
        request, _, states, members, demand, theta, now_s, backlog = view
        n_r, prompt_tokens = float(request.sequences), float(request.prompt_tokens)
        prefills, prefix, cached = demand.prefill_tokens, demand.prefix, None
        if isinstance(prefills, float):
            prefills = [prefills] * len(states)
        needed = n_r * prompt_tokens
        if prefix is not None and any(prefix.cached_tokens):
            cached, needed = prefix.cached_tokens, -math.inf
        depth, has_room = self.prefill_depth, False
        rooms: list[tuple[bool, bool]] = []
        for i, state in enumerate(states):
            room = room_of(state, members[i], needed, depth, now_s)
            if not room[1] and prefix is not None:
                if prefix.cached_tokens[i] >= MATCHED_SHARE * prompt_tokens:
                    room = matched_room_of(state, members[i], depth, now_s)
            has_room = has_room or room[1]
            rooms.append(room)
        if not has_room:
            return None
        # Nothing is at an end so soon after an arrival.
        ended = backlog.idle_s >= _IDLE_BOUNDS_S[0] and _has_ended(backlog)
        caches: Sequence[float | None] = [None] * len(states) if cached is None else cached
        if not backlog.profiled:
            return self._count_small(view, rooms, prefills, caches, ended, rng)
        output = float(request.predicted_output_tokens)
        found: list[Estimate] = []
        soonest_s = soonest_ttft_s = math.inf
        for i, state in enumerate(states):
            one = estimate(
                state,
                members[i],
                prefills[i],
                caches[i],
                n_r,
                prompt_tokens,
                output,
                backlog.residual,
                backlog.typical_request_time_s[i],
                now_s,
                # How long prompts take by themselves nobody has seen of a stand-in.
                not (ended or backlog.stands_in),
            )
            found.append(one)
            if one[4] < soonest_s:
                soonest_s = one[4]
            if one[7] < soonest_ttft_s:
                soonest_ttft_s = one[7]
        late_s = LATE_S if cached is None else LATE_CACHED_S
        late_s = max(late_s, LATE_FACTOR * soonest_ttft_s)
        slo_prices = None if self.slos is None else self._slo_prices(view, self.slos, found)
        latencies: list[float] = []
        costs: list[float] = []
        told: list[float] = []
        for i, one in enumerate(found):
            time_s, usage, load_s, in_flight, lat_s, delay_s, price, ttft_s, _ = one
            price_s = price * soonest_s
            late_price_s = LATE_WEIGHT * (ttft_s - late_s) if ttft_s > late_s else 0.0
            if cached is not None:
                late_price_s += self._first_token_weight * ttft_s
            cost_s = lat_s + delay_s + price_s + late_price_s
            if slo_prices is not None:
                cost_s += slo_prices[i]
            latencies.append(lat_s)
            costs.append(cost_s)
            told += (
                time_s, usage, load_s, in_flight, lat_s, delay_s, price_s, late_price_s, cost_s,
                ttft_s, rooms[i][1],
            )  # fmt: skip
            if slo_prices is not None:
                told.append(slo_prices[i])
        latest_s = math.inf
        if (ended or self.objective == "makespan") and backlog.mean_request_times_s is not None:
            latest_s = self._latest_small(view, soonest_s)
        position = cheapest_small(costs, rooms, latencies, latest_s, rng)
        if position is None:
            return None
        best = found[position]
        names = _NAMES if slo_prices is None else _NAMES_WITH_SLO
        figures = _new_figures(Figures, (names, array("d", told), backlog.stands_in))
        charge = workload(best[0], best[1], theta)
        return Choice(position, charge, figures, False, best[7], best[4])

    def _slo_prices(self, view: SmallView, slos: Slos, found: list[Estimate]) -> list[float]:
        """What the limits that would be missed cost beside latency, by candidate, s."""
        slo, lengths = slos.of(view.request), _lengths(view.request)
        return [
            VIOLATION_PRICE_S
            * violations(
                state, member, one[7], one[8], *lengths, view.now_s, view.backlog.waited_s, slo
            )
            for state, member, one in zip(view.states, view.members, found, strict=True)
        ]

    def _count_small(
        self,
        view: SmallView,
        rooms: list[tuple[bool, bool]],
        prefills: Sequence[float] | FloatArray,
        caches: Sequence[float | None],
        ended: bool,
        rng: np.random.Generator,
    ) -> Choice | None:
        """Without constants: the sequences there per weight, in place of seconds."""
        lengths = _lengths(view.request)
        none = [0.0] * len(view.backlog.residual)
        costs, told = [], []
        for state, member, prefill, cached in zip(
            view.states, view.members, prefills, caches, strict=True
        ):
            peers = state.peers or NO_PEERS
            there = state.waiting + state.streaming + peers.waiting + peers.streaming
            costs.append((there + 1) / member.weight)
            one = estimate(state, member, prefill, cached, *lengths, none, 1.0, view.now_s, False)
            told.append(one)
        latest_s = math.inf
        if (
            ended or self.objective == "makespan"
        ) and view.backlog.mean_request_times_s is not None:
            latest_s = self._latest_small(view, min(costs))
        position = cheapest_small(costs, rooms, costs, latest_s, rng)
        if position is None:
            return None
        data = array("d")
        for row, cost, (_, has_room) in zip(told, costs, rooms, strict=True):
            data.extend((*row[: len(COLUMNS)], cost, has_room))
        charge = workload(told[position][0], told[position][1], view.theta)
        figures = Figures(_NAMES_OF_COUNTS, data)
        return Choice(position, charge, figures, ttft_s=costs[position])

    def _latest_small(self, view: SmallView, soonest_s: float) -> float:
        """The drain rule: until when a request may be done, where the soonest is ``soonest_s``."""
        speeds = np.array([state.speed for state in view.states])
        return soonest_s + _drain_s(view.backlog, speeds) / DRAIN_FACTOR[self.objective]

    # In words

    def because(self, decision: Decided) -> str:
        figures, position = decision.choice.figures, decision.choice.position
        room, costs = figures.column("room") > 0, figures.column("cost_s")
        if not room.any():
            return "no instance has room"
        if room.sum() == 1 and room[position]:
            return "no other instance has room"
        cost = np.where(room, costs, math.inf)
        if "latency_s" not in figures:
            ours = "it would have {} sequences for its weight, the fewest"
            return lowest(decision, cost, ours, "{} would have {}")
        if cost.min() < cost[position]:
            late = decision.ids[int(cost.argmin())]
            return f"it will be done soonest; {late} is left out, as the end of a batch is near"
        mine_s = number(float(figures.column("latency_s")[position]))
        delay_s = number(float(figures.column("delay_s")[position]))
        memory = _part(float(figures.column("memory_price_s")[position]), "scarce memory")
        cached = self._because_cached(decision)
        first = _part(float(figures.column("late_price_s")[position]), "its first token")
        slo_s = figures.at("slo_price_s", position) if "slo_price_s" in figures else 0.0
        missed = _part(slo_s, "limits that would be missed")
        ours = (
            f"done in {mine_s} s{cached} and holding others up for {delay_s} s{memory}{first}"
            f"{missed} costs {{}} s, the lowest"
        )
        told = lowest(decision, cost, ours, "{} would cost {} s")
        if figures.by_speed:
            told += " (where there is no profile, by observed speed)"
        return told

    def _because_cached(self, decision: Decided) -> str:
        """What of the prompt is cached where it goes."""
        cached = _cached(decision.prefix)
        if cached is None:
            return ""
        tokens = round(float(cached[decision.choice.position]))
        return f" with {tokens} of {decision.request.prompt_tokens} prompt tokens cached"


def _lengths(request: Request) -> tuple[float, float, float]:
    """Its sequences, and the prompt and output tokens of each."""
    return (
        float(request.sequences),
        float(request.prompt_tokens),
        float(request.predicted_output_tokens),
    )


def _cached(prefix: Prefix[Numbers] | None) -> Numbers | None:
    """Cached prompt tokens of each sequence, by candidate; None: none anywhere."""
    return None if prefix is None or not any(prefix.cached_tokens) else prefix.cached_tokens


def _has_ended(backlog: Backlog[Any]) -> bool:
    """Whether nothing has arrived for so long that no more is to be expected."""
    return backlog.idle_s >= idle_before_drain_s(backlog.mean_gap_s)


def _drain_s(backlog: Backlog[Any], speeds: FloatArray) -> float:
    """How long the queue would take at full speed, s."""
    assert backlog.mean_request_times_s is not None
    times = speeds * backlog.mean_request_times_s()
    return backlog.queued / float((1 / times).cumsum()[-1])


def _part(price_s: float, what: str) -> str:
    """A part of a cost in words; "" where it is next to nothing."""
    return f", with {number(price_s)} s for {what}," if price_s >= _WORTH_SAYING_S else ""
