"""How much of each instance batches may have beside requests that somebody waits for. Pure.

A step with n sequences takes s0 + s1·n, so that of an engine an answer takes B/(1 − w): B alone
there, w the share that is in use of what it could do with seats and a cache without end. Requests
that come at a rate λ are spread over instances so that their mean latency is lowest: where batches
have the part β of an instance, the others have u = (1 − β) − √((1 − β)·B/μ) of it. For a given w
of each, their latency is linear in u, so that it is lowest where they have the fast ones to
themselves: of all instances one at most is shared. Slow ones are given to batches as a whole, as
many as leave the mean latency within a factor, and of the next one batches get what the rest of
that factor allows (docs/design/batches.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies.estimates import request_time_s
from hetero_gateway.core.policies.member import Member

_HALVINGS: Final = 60
# The search for μ, above the lowest B.
_MOST_TIMES: Final = 1e9
# Of what the law leaves: it has no prompts that hold up others, and with all of it latencies rise
# by more than is meant (benchmarks/scheduling/batches.py).
_TAKEN: Final = 0.4
# Of so many instances each is tried as the first one that is given: one that is a little faster
# may do twice as many lines. Of more, one more or less makes no difference.
_TRIED: Final = 8
_WORTH: Final = 1.05
# Of what an instance could do.
_MOST_BUSY: Final = 0.99


class Interactive(NamedTuple):
    """What comes that is not of a batch: requests per second, and the mean tokens of one."""

    rate_per_s: float
    prompt_tokens: float
    output_tokens: float


class BatchShare(NamedTuple):
    """What of an instance batches may have.

    ``given``: all of it. ``part``: of its capacity, 0 to 1; ``busy``: what others have of it.
    """

    given: bool
    part: float = 1.0
    busy: float = 0.0


def alone_s(state: InstanceState, member: Member, prompt_tokens: float, output: float) -> float:
    """B: how long a request takes that has an instance to itself, s."""
    p1, p2, p3, p4, p5, p6, p7, p8, p9 = member[:9]
    prompt_s = (p1 + p3) * prompt_tokens + p2 + p4 + p9 * prompt_tokens * prompt_tokens / 2
    step_s = (p5 + p7) * (prompt_tokens + output / 2) + p6 + p8
    return state.speed * (prompt_s + output * step_s)


def per_s(state: InstanceState, member: Member, prompt_tokens: float, output: float) -> float:
    """How many such requests an instance can do in a second, with its seats and its cache full."""
    return 1.0 / (state.speed * max(1e-9, request_time_s(member, prompt_tokens, output)))


def endless_per_s(
    state: InstanceState, member: Member, prompt_tokens: float, output: float
) -> float:
    """C: how many it could do with seats and a cache without end, where one more in a step costs
    only what it adds to that."""
    p1, _, _, _, p5, p6, _, _, p9 = member[:9]
    prompt_s = p1 * prompt_tokens + p9 * prompt_tokens * prompt_tokens / 2
    added_s = prompt_s + output * (p6 + p5 * (prompt_tokens + output / 2))
    return 1.0 / (state.speed * max(1e-9, added_s))


class Capacity(NamedTuple):
    """An instance, to requests of some lengths.

    ``alone_s``: B. ``per_s``: C, what it could do in a second without an end of seats.
    ``most``: the share of that which it can do with those that it has, 0 to 1; ``free``: what
    batches leave of it.
    """

    alone_s: float
    per_s: float
    most: float
    free: float = 1.0

    def used(self, mu: float) -> float:
        """u."""
        free = self.free
        return min(self.most, max(0.0, free - math.sqrt(free * self.alone_s / mu)))

    def without(self, part: float) -> Capacity:
        """Where batches have so much of it."""
        return self._replace(most=max(0.0, self.most - part), free=self.free - part)


def spread(capacities: Sequence[Capacity], rate_per_s: float) -> tuple[list[float], float]:
    """(u of each instance, mean latency in s) of requests that are spread for the lowest latency.

    The latency is infinite where they cannot do it all.
    """
    if rate_per_s >= sum(each.per_s * each.most for each in capacities):
        return [each.most for each in capacities], math.inf
    low = min(each.alone_s for each in capacities)
    if rate_per_s <= 0:
        return [0.0] * len(capacities), low
    high = low * _MOST_TIMES
    for _ in range(_HALVINGS):
        mu = math.sqrt(low * high)
        if sum(each.per_s * each.used(mu) for each in capacities) < rate_per_s:
            low = mu
        else:
            high = mu
    used = [each.used(high) for each in capacities]
    spent_s = sum(
        u * each.per_s * each.alone_s / (each.free - u)
        for u, each in zip(used, capacities, strict=True)
        if u
    )
    return used, spent_s / rate_per_s


def shares(
    states: Sequence[InstanceState],
    members: Sequence[Member],
    others: Interactive,
    slowdown: float,
) -> list[BatchShare]:
    """What batches may have of each instance.

    Args:
        slowdown: how many times as long others' requests may take, above 1.
    """
    rate = others.rate_per_s
    if rate <= 0:
        return [BatchShare(True)] * len(states)
    lengths = others.prompt_tokens, others.output_tokens
    full, capacities = [], list[Capacity]()
    for state, member in zip(states, members, strict=True):
        full.append(per_s(state, member, *lengths))
        endless = endless_per_s(state, member, *lengths)
        most = min(_MOST_BUSY, full[-1] / endless)
        capacities.append(Capacity(alone_s(state, member, *lengths), endless, most))
    _, least_s = spread(capacities, rate)
    if least_s == math.inf:
        return [BatchShare(False, 0.0, 1.0)] * len(states)
    by_speed = sorted(range(len(full)), key=lambda i: (capacities[i].alone_s, -full[i]))
    best, most_lines = list[BatchShare](), -1.0
    for first in reversed(by_speed) if len(by_speed) <= _TRIED else by_speed[-1:]:
        order = [i for i in by_speed if i != first] + [first]
        told, lines = _given(capacities, full, order, rate, slowdown * least_s)
        # A slower one is as good where another is worth next to nothing more.
        if lines > _WORTH * most_lines:
            best, most_lines = told, lines
    return best


def _given(
    capacities: Sequence[Capacity],
    full: Sequence[float],
    order: Sequence[int],
    rate_per_s: float,
    most_s: float,
) -> tuple[list[BatchShare], float]:
    """(shares, lines per second) where instances are given in an order, the last one first.

    Args:
        full: lines per second of each.
        most_s: how long others' requests may take, in the mean.
    """
    least, kept = 0, list(order)
    while len(kept) - least > 1:
        # Between too few for the others, and enough.
        half = (least + len(kept)) // 2
        if spread([capacities[i] for i in order[:half]], rate_per_s)[1] <= most_s:
            del kept[half:]
        else:
            least = half
    those, shared = [capacities[i] for i in kept], capacities[kept[-1]]
    used, _ = spread(those, rate_per_s)
    low, high = 0.0, shared.most
    for _ in range(_HALVINGS // 2):
        part = (low + high) / 2
        those[-1] = shared.without(part)
        their, latency_s = spread(those, rate_per_s)
        if latency_s <= most_s:
            low, used = part, their
        else:
            high = part
    part = _TAKEN * low
    told = [BatchShare(True)] * len(full)
    for i, u in zip(kept, used, strict=True):
        told[i] = BatchShare(False, 0.0, u)
    told[kept[-1]] = BatchShare(False, part, used[-1])
    return told, sum(full[i] for i in order[len(kept) :]) + part * shared.per_s


def most_there(
    share: BatchShare, state: InstanceState, member: Member, prompt_tokens: float, output: float
) -> float:
    """How many such lines may be on an instance at a time; the room that it has is another matter.

    A part β of C is β·C lines per second, each for B/(1 − u − β).
    """
    if share.given:
        return math.inf
    free = 1 - share.busy - share.part
    if share.part <= 0 or free <= 0:
        return 0.0
    lasts_s = alone_s(state, member, prompt_tokens, output) / free
    return share.part * endless_per_s(state, member, prompt_tokens, output) * lasts_s


def step_s(state: InstanceState, others: float, lines: float) -> float:
    """How long a step takes of an instance that has so many sequences and computes no prompts, s.

    Each holds as many tokens as those that are there now.
    """
    constants, there = state.constants, state.waiting + state.streaming
    if constants is None:
        return 0.0
    held = (state.context + state.waiting_prompt) / max(1, there)
    batch = others + lines
    step = constants.p8 + constants.p6 * batch + (constants.p5 * batch + constants.p7) * held
    return state.speed * step


def done_in_s(state: InstanceState, member: Member, prompt_tokens: float, output: float) -> float:
    """How long a line takes on an instance beside what is there, s."""
    p5, p6, p7, p8 = member.p5, member.p6, member.p7, member.p8
    batch = float(state.waiting + state.streaming)
    held = state.context + state.waiting_prompt + state.waiting_output / 2
    held += prompt_tokens + output / 2
    step_s = p6 * batch + p5 * held + p7 * held / (batch + 1)
    prompts_s = member.p1 * state.waiting_prefill
    ours_s = alone_s(state, member, prompt_tokens, output)
    own_step_s = (p5 + p7) * (prompt_tokens + output / 2) + p8 + p6
    return ours_s + state.speed * (prompts_s + output * max(0.0, step_s + p8 + p6 - own_step_s))
