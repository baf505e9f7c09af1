"""Decides how much of each instance batches may have beside interactive requests. Pure.

On an engine that shares its time among running requests, an answer takes B/(1 − w): B alone, and
w the share of its capacity in use. Requests that arrive at a rate λ are spread over instances for
the lowest mean latency: where batches have the part β of an instance, the others have
u = (1 − β) − √((1 − β)·B/μ) of it. For a given w of each instance, their latency is linear in u,
and so lowest if they have the fast instances to themselves: at most one instance is shared. The
slowest instances are given to batches entirely, as many as keep the mean latency within a factor;
of the next one, batches get what the rest of that factor allows (docs/design/batches.md).
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
# Share of what the model leaves that batches get: it ignores that prompts hold up other requests,
# and with all of it latencies rise by more than intended (benchmarks/scheduling/batches.py).
_TAKEN: Final = 0.4


class Interactive(NamedTuple):
    """Requests that are not of a batch: their rate per second, and mean tokens of one."""

    rate_per_s: float
    prompt_tokens: float
    output_tokens: float


class BatchShare(NamedTuple):
    """The share of an instance that batches may have.

    ``given``: all of it. ``part``: of its capacity, 0 to 1; ``busy``: share that others use.
    """

    given: bool
    part: float = 1.0
    busy: float = 0.0


def alone_s(state: InstanceState, member: Member, prompt_tokens: float, output: float) -> float:
    """B: how long a request takes on an otherwise idle instance, s."""
    p1, p2, p3, p4, p5, p6, p7, p8, p9 = member[:9]
    prompt_s = (p1 + p3) * prompt_tokens + p2 + p4 + p9 * prompt_tokens * prompt_tokens / 2
    step_s = (p5 + p7) * (prompt_tokens + output / 2) + p6 + p8
    return state.speed * (prompt_s + output * step_s)


def per_s(state: InstanceState, member: Member, prompt_tokens: float, output: float) -> float:
    """C: such requests that an instance can complete per second."""
    return 1.0 / (state.speed * max(1e-9, request_time_s(member, prompt_tokens, output)))


def spread(
    alone: Sequence[float],
    capacities: Sequence[float],
    rate_per_s: float,
    taken: Sequence[float] | None = None,
) -> tuple[list[float], float]:
    """(u of each instance, mean latency in s) when requests are spread for the lowest latency.

    Args:
        alone: B of each, s. capacities: C of each, requests per second.
        taken: parts of the capacities that are not available to them; None: none.

    The latency is infinite if the instances cannot serve the rate.
    """
    free = [1.0] * len(alone) if taken is None else [1 - part for part in taken]
    rows = list(zip(alone, capacities, free, strict=True))
    if rate_per_s >= sum(c * f for _, c, f in rows):
        return free, math.inf
    if rate_per_s <= 0:
        return [0.0] * len(alone), min(alone)
    low = min(alone)
    high = low * _MOST_TIMES
    for _ in range(_HALVINGS):
        mu = math.sqrt(low * high)
        if sum(c * max(0.0, f - math.sqrt(f * b / mu)) for b, c, f in rows) < rate_per_s:
            low = mu
        else:
            high = mu
    used = [max(0.0, f - math.sqrt(f * b / high)) for b, _, f in rows]
    spent_s = sum(u * c * b / (f - u) for u, (b, c, f) in zip(used, rows, strict=True) if u)
    return used, spent_s / rate_per_s


def shares(
    states: Sequence[InstanceState],
    members: Sequence[Member],
    others: Interactive,
    slowdown: float,
) -> list[BatchShare]:
    """The share that batches may have of each instance.

    Args:
        slowdown: how many times as long other requests may take, above 1.
    """
    if others.rate_per_s <= 0:
        return [BatchShare(True)] * len(states)
    lengths = others.prompt_tokens, others.output_tokens
    alone = [alone_s(s, m, *lengths) for s, m in zip(states, members, strict=True)]
    capacities = [per_s(s, m, *lengths) for s, m in zip(states, members, strict=True)]
    order = sorted(range(len(states)), key=lambda i: (alone[i], -capacities[i]))
    _, least_s = spread(alone, capacities, others.rate_per_s)
    if least_s == math.inf:
        return [BatchShare(False, 0.0, 1.0)] * len(states)
    most_s, kept = slowdown * least_s, order
    while len(kept) > 1:
        those = [alone[i] for i in kept[:-1]], [capacities[i] for i in kept[:-1]]
        if not spread(*those, others.rate_per_s)[1] <= most_s:
            break
        kept = kept[:-1]
    those = [alone[i] for i in kept], [capacities[i] for i in kept]
    used, _ = spread(*those, others.rate_per_s)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS // 2):
        part = (low + high) / 2
        taken = [0.0] * (len(kept) - 1) + [part]
        their, latency_s = spread(*those, others.rate_per_s, taken)
        if latency_s <= most_s:
            low, used = part, their
        else:
            high = part
    told = [BatchShare(True)] * len(states)
    for i, u in zip(kept, used, strict=True):
        told[i] = BatchShare(False, 0.0, u)
    told[kept[-1]] = BatchShare(False, _TAKEN * low, used[-1])
    return told


def most_there(
    share: BatchShare, state: InstanceState, member: Member, prompt_tokens: float, output: float
) -> float:
    """How many such lines may run on an instance at once, apart from its free capacity.

    A part β of its capacity C is β·C lines per second, each taking B/(1 − u − β).
    """
    if share.given:
        return math.inf
    free = 1 - share.busy - share.part
    if share.part <= 0 or free <= 0:
        return 0.0
    lasts_s = alone_s(state, member, prompt_tokens, output) / free
    return share.part * per_s(state, member, prompt_tokens, output) * lasts_s


def step_s(state: InstanceState, others: float, lines: float) -> float:
    """Duration of a step with this many sequences and no prompts to compute, s.

    Each sequence holds as many tokens as the present ones do.
    """
    constants, there = state.constants, state.waiting + state.streaming
    if constants is None:
        return 0.0
    held = (state.context + state.waiting_prompt) / max(1, there)
    batch = others + lines
    step = constants.p8 + constants.p6 * batch + (constants.p5 * batch + constants.p7) * held
    return state.speed * step


def done_in_s(state: InstanceState, member: Member, prompt_tokens: float, output: float) -> float:
    """How long a line takes on an instance beside its present load, s."""
    p5, p6, p7, p8 = member.p5, member.p6, member.p7, member.p8
    batch = float(state.waiting + state.streaming)
    held = state.context + state.waiting_prompt + state.waiting_output / 2
    held += prompt_tokens + output / 2
    step_s = p6 * batch + p5 * held + p7 * held / (batch + 1)
    prompts_s = member.p1 * state.waiting_prefill
    ours_s = alone_s(state, member, prompt_tokens, output)
    own_step_s = (p5 + p7) * (prompt_tokens + output / 2) + p8 + p6
    return ours_s + state.speed * (prompts_s + output * max(0.0, step_s + p8 + p6 - own_step_s))
