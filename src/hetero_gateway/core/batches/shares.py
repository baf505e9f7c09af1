"""How much of each instance batches may have beside requests that somebody waits for. Pure.

Of an engine that shares its time among those that run, an answer takes B/(1 − u): B alone there,
u the share of its capacity that is in use. Requests that come at a rate λ are spread over instances
so that their mean latency is lowest, where B_s/(1 − u_s)² is the same for all that get any:
u_s = 1 − √(B_s/μ). Without the slowest instances it is higher; as many of them as leave it within a
factor are given to batches as a whole, and of the others batches get what the rest of that factor,
φ, allows: β = 0.4·(1 − u)(1 − 1/φ) (docs/design/batches.md).
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
# Of what the law leaves: it has no prompts that hold up others, and with all of it latencies rose
# by 2.5 times as much as meant (benchmarks/scheduling/batches.py).
_TAKEN: Final = 0.4


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
    """C: how many such requests an instance can do in a second."""
    return 1.0 / (state.speed * max(1e-9, request_time_s(member, prompt_tokens, output)))


def spread(
    alone: Sequence[float], capacities: Sequence[float], rate_per_s: float
) -> tuple[list[float], float]:
    """(u of each instance, mean latency in s) of requests that are spread for the lowest latency.

    Args:
        alone: B of each, s. capacities: C of each, requests per second.

    The latency is infinite where they cannot do it all.
    """
    if rate_per_s >= sum(capacities):
        return [1.0] * len(alone), math.inf
    if rate_per_s <= 0:
        return [0.0] * len(alone), min(alone)
    low = min(alone)
    high = low * _MOST_TIMES
    for _ in range(_HALVINGS):
        mu = math.sqrt(low * high)
        done = sum(c * max(0.0, 1 - math.sqrt(b / mu)) for b, c in zip(alone, capacities))  # noqa: B905
        if done < rate_per_s:
            low = mu
        else:
            high = mu
    used = [max(0.0, 1 - math.sqrt(b / high)) for b in alone]
    spent_s = sum(u * c * b / (1 - u) for u, c, b in zip(used, capacities, alone, strict=True))
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
    if others.rate_per_s <= 0:
        return [BatchShare(True)] * len(states)
    lengths = others.prompt_tokens, others.output_tokens
    alone = [alone_s(s, m, *lengths) for s, m in zip(states, members, strict=True)]
    capacities = [per_s(s, m, *lengths) for s, m in zip(states, members, strict=True)]
    order = sorted(range(len(states)), key=lambda i: (alone[i], -capacities[i]))
    _, least_s = spread(alone, capacities, others.rate_per_s)
    if least_s == math.inf:
        return [BatchShare(False, 0.0, 1.0)] * len(states)
    kept, used, rest = order, [1.0] * len(order), 1.0
    for count in range(len(order), 0, -1):
        fastest = order[:count]
        those = [alone[i] for i in fastest], [capacities[i] for i in fastest]
        their, latency_s = spread(*those, others.rate_per_s)
        if not latency_s <= slowdown * least_s:
            break
        kept, used, rest = fastest, their, slowdown * least_s / latency_s
    told = [BatchShare(True)] * len(states)
    for i, u in zip(kept, used, strict=True):
        told[i] = BatchShare(False, max(0.0, _TAKEN * (1 - u) * (1 - 1 / rest)), u)
    return told


def most_there(
    share: BatchShare, state: InstanceState, member: Member, prompt_tokens: float, output: float
) -> float:
    """How many such lines may be on an instance at a time; the room that it has is another matter.

    A part β of its capacity C is β·C lines per second, each for B/(1 − u − β).
    """
    if share.given:
        return math.inf
    free = 1 - share.busy - share.part
    if share.part <= 0 or free <= 0:
        return 0.0
    lasts_s = alone_s(state, member, prompt_tokens, output) / free
    return share.part * per_s(state, member, prompt_tokens, output) * lasts_s


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
