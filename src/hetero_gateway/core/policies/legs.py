"""``finish-time`` if a prompt may be computed on one instance and answered by another.

docs/design/disaggregation.md has the description. ``FinishTime``'s estimate of a whole request on
each candidate is split into the cost of its prompt and of its answer there, so that a pair is
priced in the same seconds, without looking at the candidates again:

    prefill leg on i   its first token's time there, and the delay of those that wait for its prompt
    transfer           the KV that j lacks, over the pair's link
    decode leg on j    its steps there, with the first token's, their delay for others, memory

A cost is a sum of one part by i, one by j, and one by the pair that is never below 0. So pairs are
examined in the order of the parts, until no other can be cheaper: the best of all n² is found after
a few.

Roles are prices: seconds that a prompt costs on an instance that should rather not compute prompts,
and an answer on one that should rather not decode (``planner/roles.py`` finds them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.instances.pairs import Pairs
from hetero_gateway.core.policies.base import Choice, Decision, View, number
from hetero_gateway.core.policies.estimates import (
    WORTH_WAITING,
    cost,
    late_from_s,
    request_time_s,
    room,
)
from hetero_gateway.core.policies.finish_time import FinishTime, drain_s
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.policies.slo import (
    VIOLATION_PRICE_S,
    missed_by_answer,
    missed_by_prompt,
)
from hetero_gateway.core.types import Draws, InstanceId

# Further columns its choices report for each candidate.
_LEG_NAMES = ("prefill_cost_s", "decode_cost_s")


class RolePrice(NamedTuple):
    """Extra cost of computing a prompt on an instance, and of answering there, s."""

    prefill_s: float = 0.0
    decode_s: float = 0.0


_NO_PRICE: Final = RolePrice()


# One leg on one candidate: its cost, s, without the price of a late first token; the first token's
# time there, s; and its position.
_Part = tuple[float, float, int]


class _Pair(NamedTuple):
    """A way over two candidates: its cost, s, both positions, and the time of its transfer, s.

    Initially none, at a price that is never paid.
    """

    cost_s: float = math.inf
    prefill: int = -1
    decode: int = -1
    transfer_s: float = 0.0


_NO_PAIR: Final = _Pair()


class FinishTimeOfLegs(FinishTime):
    """``FinishTime``, for requests that may be split.

    Args:
        of: the policy whose rules it uses.
        pairs: which instance can hand over to which.
        roles: prices by instance; an instance without an entry has none.
        models: whose requests may be split; None: all.
    """

    def __init__(
        self,
        of: FinishTime,
        pairs: Pairs,
        roles: Mapping[InstanceId, RolePrice],
        models: frozenset[str] | None = None,
    ) -> None:
        self.objective, self.prefill_depth = of.objective, of.prefill_depth
        self._first_token_weight = of._first_token_weight
        self.slos, self.own_price = of.slos, of.own_price
        self.pairs, self.roles, self.models = pairs, roles, models

    def choose(  # type: ignore[override]
        self, view: View, rng: Draws, *, waits: bool = False
    ) -> Choice | None:
        whole = super().choose(view, rng, waits=True)
        assert whole is not None
        found = self._cheapest(view, whole)
        return found if waits or not found.waits else None

    def _cheapest(self, view: View, whole: Choice) -> Choice:
        """The cheapest of all ways, given the estimates of a whole request."""
        request, backlog = view.request, view.backlog
        assert backlog is not None
        output = float(request.predicted_output_tokens)
        if request.whole or output <= 1 or not backlog.profiled or len(view.ids) < 2:
            return whole
        if self.models is not None and request.model not in self.models:
            return whole
        names, data = whole.names, whole.data
        width, at = len(names), names.index
        at_latency, at_delay, at_cost = at("latency_s"), at("delay_s"), at("cost_s")
        at_ttft, at_room, at_price = at("ttft_s"), at("room"), at("memory_price_s")
        n_r, prompt = float(request.sequences), float(request.prompt_tokens)
        prefix, now_s = view.prefix, view.now_s
        cached = None if prefix is None or not any(prefix.cached_tokens) else prefix.cached_tokens
        weight = 0.0 if cached is None else self._first_token_weight
        soonest_ttft_s = min(data[at_ttft::width])
        late_s = late_from_s(soonest_ttft_s, cached is not None)
        slo = None if self.slos is None else self.slos.of(request)
        if slo is not None and backlog.waited_s >= slo.ttft_s:
            slo = None
        needed, grown = n_r * prompt, n_r * (prompt + output)
        if cached is not None:
            needed = grown = -math.inf
        prefills: list[_Part] = []
        decodes: list[_Part] = []
        told: list[float] = []
        costs_s: list[float] = []
        shares: dict[float, float] = {}
        # Whether each may be sent a prompt, and an answer; and whether it is worth waiting for.
        for i, state in enumerate(view.states):
            member, row, fresh = view.members[i], i * width, view.prefill_tokens[i]
            price = self.roles.get(view.ids[i], _NO_PRICE)
            here = state.waiting + state.streaming + state.peers.waiting + state.peers.streaming
            own_s = member.p1 * fresh + member.p2 * n_r
            if member.p9:
                own_s += member.p9 * (fresh * (prompt - 0.5 * fresh / n_r))
            held_up_s = here * state.speed * own_s
            ttft_s, latency_s = data[row + at_ttft], data[row + at_latency]
            step_s = (latency_s - ttft_s) / (output - 1.0)
            prefill_s = ttft_s + held_up_s + price.prefill_s
            share = shares.get(member.kind)
            if share is None:
                share = _answer_share(
                    member, prompt, data[row] / n_r, 0.0 if cached is None else cached[i]
                )
                if cached is None:
                    shares[member.kind] = share
            decode_s = latency_s - ttft_s + step_s + data[row + at_delay] - held_up_s
            decode_s += share * data[row + at_price] + price.decode_s
            # Its server reads the request, too, and starts the answer.
            begin_s = step_s + member.first_token_s
            decode_s += member.first_token_s
            if slo is not None:
                prefill_s += VIOLATION_PRICE_S * missed_by_prompt(
                    state, member, ttft_s, step_s, fresh, n_r, output, here, now_s,
                    backlog.waited_s, slo,
                )  # fmt: skip
                decode_s += VIOLATION_PRICE_S * missed_by_answer(
                    state, member, step_s, n_r, prompt, output, here, now_s, slo
                )
            prefills.append((prefill_s, ttft_s, i))
            decodes.append((decode_s, begin_s, i))
            costs_s.append(data[row + at_cost] + price.prefill_s + price.decode_s)
            told += data[row : row + width]
            told += (prefill_s, decode_s)
        rooms = data[at_room::width]
        slots: Sequence[float] = rooms
        if not all(rooms):
            slots = [
                has or room(state, member, needed, grown, self.prefill_depth, now_s)[0]
                for state, member, has in zip(view.states, view.members, rooms, strict=True)
            ]
        # An answer computes no prompt, so waiting prompts there do not matter.
        best = self._best_pair(
            view, late_s, weight,
            [p for p in prefills if rooms[p[2]]], [d for d in decodes if slots[d[2]]],
        )  # fmt: skip
        soon = best
        if slots != rooms:
            parts = [p for p in prefills if slots[p[2]]], [d for d in decodes if slots[d[2]]]
            soon = self._best_pair(view, late_s, weight, *parts)
        position = whole.position
        if self.roles:
            open_to = [i for i in range(len(rooms)) if rooms[i]]
            if open_to:
                position = min(open_to, key=lambda i: (costs_s[i], i != whole.position))
            waits = not open_to
        else:
            waits = whole.waits
        whole_s = math.inf if waits else costs_s[position]
        lowest_s = min([soon.cost_s, *(c for c, slot in zip(costs_s, slots, strict=True) if slot)])
        chosen_s = min(whole_s, best.cost_s)
        names = (*names, *_LEG_NAMES)
        if chosen_s > WORTH_WAITING * lowest_s or chosen_s == math.inf:
            idle = position if whole_s <= best.cost_s else best.decode
            there = idle >= 0 and view.states[idle].in_flight + view.states[idle].peers.in_flight
            if there or chosen_s - lowest_s > self._takes_s(view) or chosen_s == math.inf:
                waits_for = soon if soon.cost_s < min(costs_s) else _NO_PAIR
                if waits_for.prefill < 0:
                    position = costs_s.index(min(costs_s))
                return self._answer(view, whole, names, told, position, waits_for, True)
        pair = best if best.cost_s < whole_s else _NO_PAIR
        return self._answer(view, whole, names, told, position, pair, False)

    def _best_pair(
        self,
        view: View,
        late_s: float,
        weight: float,
        prefills: list[_Part],
        decodes: list[_Part],
    ) -> _Pair:
        """The cheapest of the pairs."""
        best = _NO_PAIR
        if not prefills or not decodes:
            return best
        prefills.sort()
        decodes.sort()
        pairs, ids, now_s = self.pairs, view.ids, view.now_s
        prefix, request = view.prefix, view.request
        n_r, prompt = request.sequences, request.prompt_tokens
        link_s = 0.0 if prefix is not None else pairs.least_s(n_r * prompt)
        least_s = decodes[0][0] + link_s
        for p in prefills:
            if p[0] + least_s >= best.cost_s:
                break
            for d in decodes:
                if p[0] + d[0] + link_s >= best.cost_s:
                    break
                i, j = p[2], d[2]
                if i == j:
                    continue
                tokens = prompt if prefix is None else prompt - prefix.cached_tokens[j]
                transfer_s = pairs.transfer_s(ids[i], ids[j], n_r * tokens, now_s)
                ttft_s = p[1] + transfer_s + d[1]
                cost_s = p[0] + d[0] + transfer_s
                cost_s += cost(0.0, 0.0, 0.0, ttft_s, 0.0, late_s, weight)[1]
                if cost_s < best.cost_s:
                    best = _Pair(cost_s, i, j, transfer_s)
        return best

    def _answer(
        self,
        view: View,
        whole: Choice,
        names: tuple[str, ...],
        told: list[float],
        position: int,
        pair: _Pair,
        waits: bool,
    ) -> Choice:
        request = view.request
        n_r, prompt = float(request.sequences), float(request.prompt_tokens)
        prefill, transfer_s = pair.prefill, pair.transfer_s
        if prefill >= 0:
            position = pair.decode
        row, at = position * len(names), names.index
        time_s, usage = told[row], told[row + 1]
        ttft_s, latency_s = told[row + at("ttft_s")], told[row + at("latency_s")]
        if prefill < 0:
            charge = workload(time_s, usage, view.theta)
            return Choice(position, charge, names, told, waits, ttft_s, latency_s, whole.by_speed)
        member, of_prefill = view.members[position], prefill * len(names)
        decoding_s = latency_s - ttft_s
        begin_s = decoding_s / (request.predicted_output_tokens - 1.0) + member.first_token_s
        ttft_s = told[of_prefill + at("ttft_s")] + transfer_s + begin_s
        time_s -= n_r * request_time_s(member, prompt, 0.0)
        charge = workload(max(0.0, time_s), usage, view.theta)
        choice = Choice(
            position, charge, names, told, waits, ttft_s, ttft_s + decoding_s, whole.by_speed
        )
        choice.prefill_position, choice.transfer_s = prefill, transfer_s
        prefill_time_s = n_r * request_time_s(view.members[prefill], prompt, 0.0)
        choice.prefill_charge = workload(prefill_time_s, told[of_prefill + 1], view.theta)
        choice.prefill_s = told[of_prefill + at("ttft_s")]
        return choice

    def _takes_s(self, view: View) -> float:
        """How long all waiting requests take, s."""
        backlog = view.backlog
        if backlog is None or backlog.mean_lengths is None:
            return 0.0
        return drain_s(view.states, view.members, backlog.mean_lengths, backlog.queued)

    def because(self, decision: Decision) -> str:
        choice = decision.choice
        if choice.prefill_position < 0:
            return super().because(decision)
        figures, ids = choice.figures, decision.ids
        cost_s = figures.at("prefill_cost_s", choice.prefill_position)
        cost_s += figures.at("decode_cost_s", choice.position) + choice.transfer_s
        return (
            f"{ids[choice.prefill_position]} computes the prompt in {number(choice.prefill_s)} s "
            f"and hands it over in {number(choice.transfer_s)} s; both cost {number(cost_s)} s, "
            f"and all of it there {number(figures.at('cost_s', choice.position))} s"
        )


def _answer_share(
    member: Member, prompt_tokens: float, whole_s: float, cached_tokens: float
) -> float:
    """The answer's share of a whole request's time on an instance, 0 to 1."""
    prompt_s = request_time_s(member, prompt_tokens, 0.0)
    cached_s = cached_tokens * (member.p1 + 0.5 * member.p9 * cached_tokens)
    computed_s = whole_s - cached_s
    if computed_s <= 0:
        return 1.0
    return max(0.0, min(1.0, (whole_s - prompt_s) / computed_s))
