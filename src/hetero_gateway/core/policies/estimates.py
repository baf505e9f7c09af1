"""``finish-time``'s estimates for each candidate (docs/design/scheduling.md): arithmetic only.

Functions of plain numbers for one instance at a time. numba compiles these same functions for the
compiled simulation (``sim/compiled``), with the same results to the bit.

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

Steps wait for the prompts computed in between, including those that arrive later: an answer of P
tokens takes P·step/(1 − ρ). ρ follows what was sent there recently. Each machine has its own: long
prompts go to some machines and short ones to others.

Tokens that several sequences share are in the cache once, and each sequence reads them: memory
counts ``tokens`` without the shared ones, steps count all.

Attention over the prompts (p9 of ``cost_model``): if u of I prompt tokens are to be computed,
behind C = I − u, they attend to u·(C + u/2) = u·(I − u/2) pairs. Of waiting prompts only the sums
of I and u are known; they are treated as sequences of the mean I and u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from hetero_gateway.core.instances.dispatch import NO_PEERS
from hetero_gateway.core.instances.state import PREFILL_OVER_S, InstanceState
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.types import Draws

# Sequences sent beyond max_num_seqs, so that the engine has the next request at hand when one
# finishes: one per this many seats, as that many finish between two looks, within these bounds.
# With few seats, a request waiting in an engine waits long, and can no longer be moved.
_SEATS_FOR_ONE: Final = 32.0
_MOST_BEYOND: Final = 8.0
# An engine admits prompts as long as its cache has blocks for them, and running sequences grow.
# Beyond this share of the cache, a request would wait in the engine's own queue, or evict another;
# here it goes to the first instance with room.
KV_ROOM: Final = 0.95
# No request is admitted if everything there, at its end, would exceed the cache by this much:
# otherwise answers of thousands of tokens evict each other again and again. They do not all end at
# once, so the whole of it does not count. With half, there are 4 to 16 times as many evictions.
GROWN_SHARE: Final = 0.65
# Prompt tokens without a first token that are always allowed: two steps of vLLM's default budget
# (vllm/engine/arg_utils.py). One is being computed, one must be ready: with short prompts, a few
# requests do not suffice for that. But no more than are computed in ``LATE_S``.
PREFILL_TOKENS: Final = 4096
# An instance that has slots, but too many prompts to begin with, will take the next one within a
# few steps. It is worth that wait if the best of the others would cost this many times more, unless
# that one is idle and loses less by it than the queue behind it gains (``cheapest``).
WORTH_WAITING: Final = 1.25
# Unprofiled instances whose predicted costs differ by no more than this count as equal: their known
# speeds are only noise, and if speed does not fall with load, the noise of one moment would choose
# again and again, as an instance that gets nothing is not observed.
NEAR: Final = 1.05
# But not if it has been silent for this long: an engine that hangs must not hold up everything.
MOST_PATIENCE_S: Final = 1.0
# With this much of its prompt cached, a request waits for its instance rather than be computed
# elsewhere: in the engine's queue, where it is not overtaken, up to this many times the usual
# depth.
MATCHED_SHARE: Final = 0.5
MATCHED_WAIT: Final = 3
# A first token is late beyond this, or beyond this multiple of the soonest on offer if that is
# late, too. The first second more costs as much as this many seconds of latency, and each further
# one less, so that a very late one does not outweigh everything else. Without it, long prompts go
# to slow machines, since on a fast one they hold up a hundred streams for a moment: right for the
# mean, but the tail of the first tokens is up to three times as long.
LATE_S: Final = 0.5
LATE_FACTOR: Final = 2.0
LATE_WEIGHT: Final = 30.0
# Prompts are not assumed to keep taking more of a machine's time than this.
MOST_BUSY: Final = 0.7


# Of one instance, in this order: T of the request, KV usage, load and requests in flight there, as
# in ``base.COLUMNS``; latency, delay, the memory price without the lowest latency on offer (its
# unit), the time to the first token, and one decode step. A bare tuple: one is made for each
# candidate.
Estimate = tuple[float, float, float, float, float, float, float, float, float]


class Prospect(NamedTuple):
    """A request on one candidate, for a custom price rule.

    ``latency_s`` to ``step_s``: as in ``Estimate``. Tokens are those of each of its sequences.
    ``waited_s``: since it arrived.
    """

    latency_s: float
    delay_s: float
    ttft_s: float
    step_s: float
    sequences: float
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float
    waited_s: float
    now_s: float


# A custom price rule: seconds that a placement costs beside everything else; below 0 in its favour.
# It reads only fields of state and member, so that numba can compile it.
Price = Callable[[InstanceState, Member, Prospect], float]


def no_price(state: InstanceState, member: Member, prospect: Prospect) -> float:
    """The ``Price`` if there is none."""
    return 0.0


def seats(max_num_seqs: float) -> float:
    """The most sequences sent to an engine: one or a few more than it runs at once."""
    return max_num_seqs + min(_MOST_BEYOND, max(1.0, max_num_seqs // _SEATS_FOR_ONE))


def request_time_s(member: Member, prompt_tokens: float, output_tokens: float) -> float:
    """Eqs. (5) and (6): T of one sequence, as ``cost_model.request_time_s`` computes it for a
    profile; if it does not fit, as if it ran alone, a batch of 1.

    T = A + B/b, where A and B are linear in (I, 1, O·I, O, O(O+1)/2): dividing Eq. (3) + Eq. (4)
    by b leaves p1, p2, p5, p6 in A and p3, p4, p7, p8 over b in B.
    """
    p1, p2, p3, p4, p5, p6, p7, p8, p9, _, kv_limit_tokens, batch, _, _, _, _, _, _, _, _ = member
    tokens = prompt_tokens + output_tokens
    if tokens > 0 and kv_limit_tokens / tokens < batch:
        batch = kv_limit_tokens / tokens
    if batch < 1.0:
        batch = 1.0
    product = output_tokens * prompt_tokens
    triangle = output_tokens * (output_tokens + 1) / 2
    own = p1 * prompt_tokens + p2 + p5 * product + p6 * output_tokens + p5 * triangle
    shared = p3 * prompt_tokens + p4 + p7 * product + p8 * output_tokens + p7 * triangle
    return own + shared / batch + p9 * (prompt_tokens * (prompt_tokens / 2))


def holds(member: Member, tokens: float) -> bool:
    """Whether a sequence of this many tokens fits its KV cache: a batch of 1 or more in Eq. (5)."""
    return member.kv_limit_tokens >= tokens and member.max_num_seqs >= 1


def busy(state: InstanceState, p1: float, now_s: float) -> float:
    """ρ, the share of an instance's time spent on prompts over the last seconds; it may exceed 1 if
    more was sent there than it can compute."""
    recent, since_s = state.recent_prefill, state.recent_prefill_s - now_s
    if since_s < 0.0:  # otherwise a caller's clock is behind
        recent *= math.exp(since_s / PREFILL_OVER_S)
    return state.speed * p1 * recent / PREFILL_OVER_S


def room(
    state: InstanceState,
    member: Member,
    needed: float,
    grown: float,
    prefill_depth: int,
    now_s: float,
) -> tuple[bool, bool]:
    """Whether an instance is worth waiting for, and whether it may be sent a request now.

    Args:
        needed: tokens that a request's prompts take in a cache when it is admitted; -inf, which
            always fits, if part of it is cached: running requests may share that.
        grown: the same including its answers.
    """
    peers = state.peers
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
        grown += state.kv_tokens + peers.kv_tokens - state.shared_tokens
        if GROWN_SHARE * grown > held:
            held = GROWN_SHARE * grown
        if held > KV_ROOM * member.kv_limit_tokens:
            return False, False
    if waiting < prefill_depth:
        return True, True
    tokens = state.waiting_prefill + peers.waiting_prefill
    if tokens < PREFILL_TOKENS and state.speed * member.p1 * tokens < LATE_S:
        return True, True
    return now_s - state.heard_s < MOST_PATIENCE_S, False


def at_hand(state: InstanceState, member: Member) -> bool:
    """Whether one request is to wait in an engine whose learnt seats, like all others', are taken,
    so that it begins as soon as one finishes; if it begins at once, there are more seats."""
    peers = state.peers
    streaming = state.streaming + peers.streaming
    return state.seats <= streaming < member.seats and state.waiting + peers.waiting == 0


def matched_room(
    state: InstanceState, member: Member, prefill_depth: int, now_s: float
) -> tuple[bool, bool]:
    """The same for an instance without room, if much of the request is cached there."""
    peers = state.peers
    waiting = state.waiting + peers.waiting
    there = waiting + state.streaming + peers.streaming
    if there >= state.seats:
        return False, False
    if waiting < MATCHED_WAIT * prefill_depth and there < member.max_num_seqs + MATCHED_WAIT * (
        member.seats - member.max_num_seqs
    ):
        return True, True
    return now_s - state.heard_s < MOST_PATIENCE_S, False


def cheapest(
    states: Sequence[InstanceState],
    costs: Sequence[float],
    slots: Sequence[bool],
    rooms: Sequence[bool],
    latencies: Sequence[float],
    latest_s: float,
    takes_s: float,
    near: float,
    rng: Draws,
) -> int:
    """The cheapest instance with room; of those up to ``near`` times as dear, the one with the
    fewest requests; of those, a draw.

    -1: none finishes by ``latest_s``, or one of ``slots`` that lacks room is worth waiting for. It
    is not if the cheapest with room is idle and costs no more than another ``takes_s``, the time in
    which all waiting requests are served: while one waits for a fast machine, so do those behind
    it, and the slow ones stand still (the threshold for a slow server of queueing theory).
    """
    lowest = best = math.inf
    chosen, ties = -1, 0
    for i in range(len(costs)):
        if not slots[i] or latencies[i] > latest_s:
            continue
        cost = costs[i]
        if cost < lowest:
            lowest = cost
        if not rooms[i] or cost > best:
            continue
        if cost < best:
            best, chosen, ties = cost, i, 0
        ties += 1
    if chosen < 0:
        return -1
    if best > WORTH_WAITING * lowest:
        there = states[chosen].in_flight + states[chosen].peers.in_flight
        if there > 0 or best - lowest > takes_s:
            return -1
    if ties == 1 and near == 1.0:
        return chosen
    fewest, most = math.inf, near * best
    for i in range(len(costs)):
        if rooms[i] and costs[i] <= most and latencies[i] <= latest_s:
            there = states[i].in_flight + states[i].peers.in_flight
            if there < fewest:
                fewest, chosen, ties = there, i, 0
            if there == fewest:
                ties += 1
    left = int(rng.random() * ties) if ties > 1 else 0
    while left > 0:
        chosen += 1
        if rooms[chosen] and costs[chosen] <= most and latencies[chosen] <= latest_s:
            if states[chosen].in_flight + states[chosen].peers.in_flight == fewest:
                left -= 1
    return chosen


def late_from_s(soonest_ttft_s: float, cached: bool) -> float:
    """From when on a first token is late, given the soonest on offer. Never if something is cached:
    then every second counts, by ``first_token_weight``."""
    if cached:
        return math.inf
    return LATE_S if LATE_S > LATE_FACTOR * soonest_ttft_s else LATE_FACTOR * soonest_ttft_s


def cost(
    latency_s: float,
    delay_s: float,
    price: float,
    ttft_s: float,
    soonest_s: float,
    late_s: float,
    first_token_weight: float,
) -> tuple[float, float, float]:
    """The cost of a placement, s: its memory price, its late price, and the total.

    Args:
        latency_s, delay_s, price, ttft_s: of its ``Estimate``.
        soonest_s: the lowest latency on offer.
        late_s: of ``late_from_s``.
        first_token_weight: of the time to the first token; 0 if nothing is cached.
    """
    price_s = price * soonest_s
    late_price_s = LATE_WEIGHT * late_s * (1.0 - late_s / ttft_s) if ttft_s > late_s else 0.0
    late_price_s += first_token_weight * ttft_s
    return price_s, late_price_s, latency_s + delay_s + price_s + late_price_s


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
    """Estimate a request on one instance, T included.

    Args:
        prefill: prompt tokens to compute, of all the request's sequences.
        cached: prompt tokens of each sequence that need not be computed; None: none anywhere.
        n_r, prompt_tokens, output: its sequences, and the tokens of each.
        residual: as in ``Backlog``.
        expects_prompts: further prompts are to be expected.
    """
    (
        p1, p2, _, p4, p5, p6, p7, p8, p9, kv, _, max_num_seqs, _, _, _, _,
        first_s, ahead, awake, idle_s,
    ) = member  # fmt: skip
    waiting, streaming = float(state.waiting), float(state.streaming)
    waiting_prompt = float(state.waiting_prompt)
    waiting_prefill, waiting_output = state.waiting_prefill, state.waiting_output
    f, load_s = state.speed, state.load_s
    kv_tokens, in_flight = float(state.kv_tokens), float(state.in_flight)
    context = state.context
    remaining = shared = 0.0
    if streaming:
        for count, left in zip(state.stages, residual):  # noqa: B905 - numba has no strict
            if count:
                remaining += count * left
                shared += count * (left if left < output else output)
    peers = state.peers
    if peers is not NO_PEERS:
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
    if batch < awake:
        step_s -= f * idle_s * (awake - batch)
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
    ttft_s += first_s
    if n > 0:
        ttft_s += ahead * step_s
    rho = busy(state, p1, now_s) if expects_prompts else 0.0
    if rho > MOST_BUSY:
        rho = MOST_BUSY
    latency_s = ttft_s
    if output > 1.0:  # the prefill makes the first one
        latency_s += (output - 1.0) * step_s / (1.0 - rho)
    own_output = n_r * output
    shared += own_output if own_output < waiting_output else waiting_output
    delay_s = shared * f * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    delay_s += n * f * (p1 * prefill + own_s + p2 * n_r)
    usage = kv_there / kv
    if n > usage * max_num_seqs:  # seats run out before memory does
        usage = n / max_num_seqs
    time_s = n_r * request_time_s(member, prompt_tokens, output)
    computed_s = time_s
    if cached is not None:
        # Cached tokens take none of the machine's time.
        computed_s -= n_r * cached * (p1 + 0.5 * p9 * cached)
    price = computed_s / typical_request_time_s * usage * usage
    usage = kv_tokens / kv
    return time_s, usage, load_s, in_flight, latency_s, delay_s, price, ttft_s, step_s
