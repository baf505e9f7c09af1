"""What ``finish-time`` expects of each candidate (docs/design/scheduling.md): the arithmetic alone.

Twice: for arrays with one entry per instance, and in plain floats for one instance at a time, which
is faster for up to some 16 of them. Both compute the same; a property test compares them. The
functions of arrays run as they are written, or compiled by numba, with the same results to the
bit.

    symbol  here                         unit
    n       sequences there              sequences
    tok     context they will hold       tokens
    b_cap   most that run at once        sequences
    step    one decode step              s
    ρ       machine's time for prompts   –
    lat     latency_s                    s
    ext     delay_s                      s
    price   memory_price_s               s
    late    late_price_s                 s

Steps wait for the prompts that are computed in between, those that come later among them: an answer
of P tokens takes P·step/(1 − ρ). ρ is what was sent there lately. Each machine has its own: long
prompts go to some machines and short ones to others.

What several sequences have in common is in the cache once, and each of them reads it: memory goes
by ``tokens`` less what is shared, steps by all.

Attention over the prompts (p9 of ``cost_model``): where u of I prompt tokens are to be computed,
behind C = I − u, they attend to u·(C + u/2) = u·(I − u/2) pairs. Of those that wait only the sums
of I and u are known; they are taken for sequences of the mean I and u.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.instances.dispatch import NO_PEERS
from hetero_gateway.core.instances.state import PREFILL_OVER_S, InstanceState
from hetero_gateway.core.instances.table import (
    CONTEXT,
    PREFILL_AGE_S,
    RECENT_PREFILL,
    SEATS,
    SHARED,
    SILENT_S,
    SPEED,
    STREAMING,
    WAITING,
    WAITING_OUTPUT,
    WAITING_PREFILL,
    WAITING_PROMPT,
)
from hetero_gateway.core.policies.member import Member

BoolArray = NDArray[np.bool_]

# Sent beyond max_num_seqs, so that the engine has the next request at hand when one finishes: one
# for each so many seats, as that many finish between two looks, and within these bounds. With few
# seats a request that waits for one in an engine waits long, and nobody can help it any more.
_SEATS_FOR_ONE = 32.0
_MOST_BEYOND = 8.0
# An engine admits prompts as long as its cache has blocks for them, and running sequences grow.
# What would come to more than this share of the cache waits in the engine, behind its queue, or
# evicts somebody; here it goes to whoever has room first.
KV_ROOM = 0.95
# Prompt tokens without a first token that are always allowed: two steps of vLLM's default budget
# (vllm/engine/arg_utils.py). One is being computed, one must lie ready: where prompts are short, a
# few requests are not enough for that.
PREFILL_TOKENS = 4096
# An instance that has slots, but too many prompts to begin with, will take the next one within a
# few steps. It is worth that wait when the best of the others would cost so many times more.
WORTH_WAITING = 1.25
# But not when it has been silent for so long: an engine that hangs must not hold everybody up.
MOST_PATIENCE_S = 1.0
# Where so much of a prompt is cached, it waits for its instance rather than be computed elsewhere:
# in the engine's queue, where it is not passed, up to so many times as many as may wait else.
MATCHED_SHARE = 0.5
MATCHED_WAIT = 3
# A first token is late beyond so long, or beyond so many times the soonest on offer where that is
# late, too. Each second more is as dear as so many seconds of latency. Without it long prompts go
# to slow machines, as on a fast one they hold up a hundred streams for a moment: right for the
# mean, and the tail of the first tokens is three times as long.
LATE_S = 0.5
# Where something is cached every second counts by ``first_token_weight``, and so late is later:
# with 0.5 s agents' answers took 5 % longer at 90 % load.
LATE_CACHED_S = 1.0
LATE_FACTOR = 2.0
LATE_WEIGHT = 30.0
# The predicted usage may be far above 1; how far is noise, that it is above is what counts.
MOST_USAGE = 1.5
# Where prompts come from caches, an engine's seats (max_num_seqs) can run out before its memory.
# They have the same price: half of them taken is as dear as a full memory.
SEATS_USAGE = 2.0
# More of a machine's time than this is not taken to go on being spent on prompts.
_MOST_BUSY = 0.7


# Of one instance, in this order: T of the request, KV usage, load and requests in flight there, as
# in ``base.COLUMNS``; latency, delay, the memory price without the lowest latency on offer (its
# unit), the time to the first token, and one decode step. A bare tuple: one is made for each
# candidate.
Estimate = tuple[float, float, float, float, float, float, float, float, float]


def seats(max_num_seqs: float) -> float:
    """The most sequences that are sent to an engine: one or a few more than it runs at once."""
    return max_num_seqs + min(_MOST_BEYOND, max(1.0, max_num_seqs // _SEATS_FOR_ONE))


def busy(state: InstanceState, p1: float, now_s: float) -> float:
    """ρ, the share of an instance's time that prompts take, as of the last seconds; it may be
    above 1, where more was sent there than it can compute."""
    recent, since_s = state.recent_prefill, state.recent_prefill_s - now_s
    if since_s < 0.0:  # or else a caller's clock is behind
        recent *= math.exp(since_s / PREFILL_OVER_S)
    return state.speed * p1 * recent / PREFILL_OVER_S


def busy_wide(p1: FloatArray, rows: FloatArray) -> FloatArray:
    """The same, one entry per instance; ``rows`` as in ``Outlook``."""
    recent = rows[RECENT_PREFILL] * np.exp(np.minimum(-rows[PREFILL_AGE_S], 0.0) / PREFILL_OVER_S)
    result: FloatArray = rows[SPEED] * p1 * recent / PREFILL_OVER_S
    return result


def room(
    rows: FloatArray,
    max_num_seqs: FloatArray,
    kv_limit: FloatArray,
    needed: float,
    prefill_depth: int,
) -> tuple[BoolArray, BoolArray]:
    """Who is worth waiting for, and who of them may be sent a request now.

    Args:
        rows, max_num_seqs, kv_limit: as in ``Outlook``.
        needed: tokens that a request's prompts take of a cache as it is admitted; -inf, which fits
            everywhere, where some of it is cached: those that run may share that.
    """
    waiting = rows[WAITING]
    there = waiting + rows[STREAMING]
    most = max_num_seqs + np.minimum(_MOST_BEYOND, np.maximum(1.0, max_num_seqs // _SEATS_FOR_ONE))
    slots = there < np.minimum(most, rows[SEATS])
    held = rows[CONTEXT] + rows[WAITING_PROMPT] - rows[SHARED] + needed
    slots &= (there == 0) | (held <= KV_ROOM * kv_limit)
    has_room = slots & ((waiting < prefill_depth) | (rows[WAITING_PREFILL] < PREFILL_TOKENS))
    return slots & (has_room | (rows[SILENT_S] < MOST_PATIENCE_S)), has_room


def room_of(
    state: InstanceState, member: Member, needed: float, prefill_depth: int, now_s: float
) -> tuple[bool, bool]:
    """The same for one instance."""
    peers = NO_PEERS if state.peers is None else state.peers
    waiting = state.waiting + peers.waiting
    streaming = state.streaming + peers.streaming
    there = waiting + streaming
    if there >= member.seats or there >= state.seats:
        return False, False
    if there:
        held = state.context + peers.context + state.waiting_prompt + peers.waiting_prompt
        held += needed - state.shared_tokens
        if now_s > state.read_s:
            held += streaming * (now_s - state.read_s) * state.steps_per_s
        if held > KV_ROOM * member.kv_limit_tokens:
            return False, False
    if waiting < prefill_depth or state.waiting_prefill + peers.waiting_prefill < PREFILL_TOKENS:
        return True, True
    return now_s - state.heard_s < MOST_PATIENCE_S, False


def matched_room(
    rows: FloatArray,
    max_num_seqs: FloatArray,
    prefill_depth: int,
    slots: BoolArray,
    has_room: BoolArray,
    matched: BoolArray,
) -> tuple[BoolArray, BoolArray]:
    """What ``room`` returned, for a request that much is cached of where ``matched`` says so."""
    waiting = rows[WAITING]
    there = waiting + rows[STREAMING]
    matched = matched & (there < rows[SEATS])
    beyond = np.minimum(_MOST_BEYOND, np.maximum(1.0, max_num_seqs // _SEATS_FOR_ONE))
    room = matched & (there < max_num_seqs + MATCHED_WAIT * beyond)
    room &= waiting < MATCHED_WAIT * prefill_depth
    return slots | room | (matched & (rows[SILENT_S] < MOST_PATIENCE_S)), has_room | room


def matched_room_of(
    state: InstanceState, member: Member, prefill_depth: int, now_s: float
) -> tuple[bool, bool]:
    """The same for one instance without room, where much of the request is cached."""
    peers = state.peers or NO_PEERS
    waiting = state.waiting + peers.waiting
    there = waiting + state.streaming + peers.streaming
    if there >= state.seats:
        return False, False
    if waiting < MATCHED_WAIT * prefill_depth and there < member.max_num_seqs + MATCHED_WAIT * (
        member.seats - member.max_num_seqs
    ):
        return True, True
    return now_s - state.heard_s < MOST_PATIENCE_S, False


def cheapest(cost_s: FloatArray, slots: BoolArray, has_room: BoolArray) -> tuple[int, bool]:
    """The cheapest instance with room, and whether others cost the same.

    -1: none, or one of ``slots`` that lacks room is worth waiting for.
    """
    cost = np.where(slots, cost_s, np.inf)
    lowest = cost[cost.argmin()]
    cost = np.where(has_room, cost, np.inf)
    position = int(cost.argmin())
    best = cost[position]
    if best == np.inf or best > WORTH_WAITING * lowest:
        return -1, False
    return position, bool(np.count_nonzero(cost == best) > 1)


def cheapest_small(
    costs: list[float],
    rooms: list[tuple[bool, bool]],
    latencies: list[float],
    latest_s: float,
    rng: np.random.Generator,
) -> int | None:
    """The same with its ties drawn, for a few; None: none, or done too late everywhere."""
    lowest_cost = best = math.inf
    ties: list[int] = []
    for i, (slot, room) in enumerate(rooms):
        if not slot or latencies[i] > latest_s:
            continue
        cost = costs[i]
        if cost < lowest_cost:
            lowest_cost = cost
        if not room:
            continue
        if cost < best:
            best, ties = cost, [i]
        elif cost == best:
            ties.append(i)
    if not ties or best > WORTH_WAITING * lowest_cost:
        return None
    if len(ties) > 1:
        least_s = min(latencies[i] for i in ties)
        ties = [i for i in ties if latencies[i] == least_s]
    return ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]


def estimates(
    constants: FloatArray,
    rows: FloatArray,
    kv: FloatArray,
    max_num_seqs: FloatArray,
    remaining: FloatArray,
    shared: FloatArray,
    busy: FloatArray,
    request_time_s: FloatArray,
    typical_request_time_s: FloatArray,
    prefill: float | FloatArray,
    cached: FloatArray | None,
    first_token_weight: float,
    n_r: float,
    prompt_tokens: float,
    output: float,
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """lat, ext, price, late, their sum, the time to the first token, and one decode step, s.

    Args:
        constants, rows, kv, max_num_seqs: as in ``Outlook``.
        remaining: output tokens that those that stream have still to come.
        shared: how many of them come before the request is done.
        busy: as of ``busy_wide``; 0: no further prompts are to be reckoned with.
        request_time_s, typical_request_time_s: T of the request, and of the typical one.
        prefill: prompt tokens to compute, of all the request's sequences.
        cached: prompt tokens of each sequence that need not be computed; None: none anywhere.
        first_token_weight: of the time to the first token, where something is cached.
        n_r, prompt_tokens, output: its sequences, and the tokens of each.
    """
    p1, p2, p4, p5 = constants[0], constants[1], constants[3], constants[4]
    p6, p7, p8, p9 = constants[5], constants[6], constants[7], constants[8]
    waiting, waiting_output = rows[WAITING], rows[WAITING_OUTPUT]
    waiting_prefill = rows[WAITING_PREFILL]
    f = rows[SPEED]
    prompt = n_r * prompt_tokens
    n = waiting + rows[STREAMING]
    joined = n + n_r
    tokens = rows[CONTEXT] + 0.5 * remaining + rows[WAITING_PROMPT] + 0.5 * waiting_output
    tokens += prompt + 0.5 * n_r * output
    kv_held = np.maximum(tokens - rows[SHARED], prompt + 0.5 * n_r * output)
    batch_cap = np.maximum(np.minimum(max_num_seqs, kv * joined / kv_held), 1.0)
    batch = np.minimum(joined, batch_cap)
    held = np.minimum(tokens, kv * (tokens / kv_held))
    step_s = f * (p6 * batch + p8 + p5 * held + p7 * held / batch)
    own_s = p9 * (prefill * (prompt_tokens - 0.5 * prefill / n_r))
    attended = (rows[WAITING_PROMPT] - 0.5 * waiting_prefill) / np.maximum(waiting, 1)
    others_s = p9 * (waiting_prefill * attended)
    ttft_s = f * (p1 * (waiting_prefill + prefill) + (others_s + own_s) + p2 * (waiting + n_r) + p4)
    queued = joined > batch_cap
    if queued.any():
        # It waits in the engine until so many of those before it are done.
        turn_s = f * ((p1 * waiting_prefill + others_s) / np.maximum(waiting, 1) + p2)
        turn_s += (remaining + waiting_output) / np.maximum(n, 1) * step_s / batch_cap
        in_turn_s = (joined - batch_cap) * turn_s + f * (p1 * prefill + own_s + p4)
        ttft_s = np.where(queued, in_turn_s, ttft_s)
    latency_s = ttft_s + output * step_s / (1.0 - np.minimum(busy, _MOST_BUSY))
    # Each step that they share gets longer by what this sequence adds to it, and its prefill
    # stops them all once.
    shared = shared + np.minimum(n_r * output, waiting_output)
    delay_s = shared * f * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    delay_s += n * f * (p1 * prefill + own_s + p2 * n_r)
    usage = np.minimum((kv_held - prompt - 0.5 * n_r * output) / kv, MOST_USAGE)
    if cached is not None:
        usage = np.maximum(usage, SEATS_USAGE * n / max_num_seqs)
        # What is cached takes no time of the machine.
        request_time_s = request_time_s - n_r * cached * (p1 + 0.5 * p9 * cached)
    price_s = request_time_s / typical_request_time_s
    price_s *= usage * usage * latency_s[latency_s.argmin()]
    cost_s = latency_s + delay_s + price_s
    late_s = LATE_S if cached is None else LATE_CACHED_S
    late_s = max(late_s, LATE_FACTOR * ttft_s[ttft_s.argmin()])
    late_price_s = LATE_WEIGHT * np.maximum(ttft_s - late_s, 0.0)
    if cached is not None:
        late_price_s += first_token_weight * ttft_s
    cost_s += late_price_s
    return latency_s, delay_s, price_s, late_price_s, cost_s, ttft_s, step_s


def estimate(
    state: InstanceState,
    member: Member,
    prefill: float,
    cached: float | None,
    n_r: float,
    prompt_tokens: float,
    output: float,
    residual: list[float],
    typical_request_time_s: float,
    now_s: float,
    expects_prompts: bool,
) -> Estimate:
    """The same for one instance, T among it, in plain floats.

    Args:
        prefill: prompt tokens to compute, of all the request's sequences.
        cached: prompt tokens of each sequence that need not be computed; None: none anywhere.
        n_r, prompt_tokens, output: its sequences, and the tokens of each.
        residual: as in ``Backlog``.
        expects_prompts: further ones are to be reckoned with.
    """
    p1, p2, p3, p4, p5, p6, p7, p8, p9, kv, kv_limit, max_num_seqs, _, _ = member
    waiting: float = state.waiting
    streaming: float = state.streaming
    waiting_prompt: float = state.waiting_prompt
    waiting_prefill, waiting_output = state.waiting_prefill, state.waiting_output
    f, load_s = state.speed, state.load_s
    kv_tokens: float = state.kv_tokens
    in_flight: float = state.in_flight
    context = state.context
    remaining = shared = 0.0
    if streaming:
        for count, left in zip(state.stages, residual):  # noqa: B905 - numba has no strict
            if count:
                remaining += count * left
                shared += count * (left if left < output else output)
    peers = state.peers
    if peers is not None:
        waiting += peers.waiting
        streaming += peers.streaming
        waiting_prompt += peers.waiting_prompt
        waiting_prefill += peers.waiting_prefill
        waiting_output += peers.waiting_output
        context += peers.context
        remaining += peers.streaming * residual[0]
        shared += peers.streaming * min(residual[0], output)
        load_s += peers.load_s
        kv_tokens += peers.kv_tokens
        in_flight += peers.in_flight
    if streaming and now_s > state.read_s:
        context += streaming * (now_s - state.read_s) * state.steps_per_s
    prompt = n_r * prompt_tokens
    n = waiting + streaming
    joined = n + n_r
    there = context + 0.5 * remaining + waiting_prompt + 0.5 * waiting_output
    own = prompt + 0.5 * n_r * output
    tokens = there + own
    kv_there = there - state.shared_tokens
    if kv_there < 0:
        kv_there = 0.0
    kv_held = kv_there + own
    batch_cap = kv * joined / kv_held
    if batch_cap > max_num_seqs:
        batch_cap = max_num_seqs
    if batch_cap < 1.0:
        batch_cap = 1.0
    batch = joined if joined < batch_cap else batch_cap
    most_held = kv * (tokens / kv_held)
    held = tokens if tokens < most_held else most_held
    step_s = f * (p6 * batch + p8 + p5 * held + p7 * held / batch)
    own_s = others_s = 0.0
    if p9:
        own_s = p9 * (prefill * (prompt_tokens - 0.5 * prefill / n_r))
        attended = (waiting_prompt - 0.5 * waiting_prefill) / (waiting if waiting > 1 else 1)
        others_s = p9 * (waiting_prefill * attended)
    if joined > batch_cap:
        turn_s = f * ((p1 * waiting_prefill + others_s) / (waiting if waiting > 1 else 1) + p2)
        turn_s += (remaining + waiting_output) / (n if n > 1 else 1) * step_s / batch_cap
        ttft_s = (joined - batch_cap) * turn_s + f * (p1 * prefill + own_s + p4)
    else:
        prefill_s = p1 * (waiting_prefill + prefill) + (others_s + own_s)
        ttft_s = f * (prefill_s + p2 * (waiting + n_r) + p4)
    rho = busy(state, p1, now_s) if expects_prompts else 0.0
    if rho > _MOST_BUSY:
        rho = _MOST_BUSY
    latency_s = ttft_s + output * step_s / (1.0 - rho)
    own_output = n_r * output
    shared += own_output if own_output < waiting_output else waiting_output
    delay_s = shared * f * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    delay_s += n * f * (p1 * prefill + own_s + p2 * n_r)
    usage = kv_there / kv
    if usage > MOST_USAGE:
        usage = MOST_USAGE
    # Eqs. (5) and (6); it fits, or it were no candidate.
    ideal_batch = kv_limit / (prompt_tokens + output)
    if ideal_batch > max_num_seqs:
        ideal_batch = max_num_seqs
    triangle = output * (output + 1) / 2
    request_time_s = n_r * (
        p1 * prompt_tokens + p2 + p5 * (output * prompt_tokens + triangle) + p6 * output
        + (p3 * prompt_tokens + p4 + p7 * (output * prompt_tokens + triangle) + p8 * output)
        / ideal_batch
        + p9 * (prompt_tokens * prompt_tokens / 2)
    )  # fmt: skip
    computed_s = request_time_s
    if cached is not None:
        seats = SEATS_USAGE * n / max_num_seqs
        if seats > usage:
            usage = seats
        # What is cached takes no time of the machine.
        computed_s -= n_r * cached * (p1 + 0.5 * p9 * cached)
    price = computed_s / typical_request_time_s * usage * usage
    usage = kv_tokens / kv
    return request_time_s, usage, load_s, in_flight, latency_s, delay_s, price, ttft_s, step_s
