"""``finish-time``: where the request, and those it would join, finish soonest (docs/scheduling.md).

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

    symbol  here                         unit
    n       sequences there              sequences
    tok     context they will hold       tokens
    b_cap   most that run at once        sequences
    step    one decode step              s
    lat     latency_s                    s
    ext     delay_s                      s
    price   memory_price_s               s

The figures come from ``core/progress.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.cost_model import FloatArray
from hetero_gateway.core.policies.base import (
    Candidates,
    Objective,
    PolicyOptions,
    WorkloadCharge,
    argmin_with_random_ties,
)
from hetero_gateway.core.progress import SPEED, STREAMING, WAITING, Estimates, Outlook
from hetero_gateway.core.types import Request

BoolArray = NDArray[np.bool_]

# Sent beyond max_num_seqs, so that the engine has the next request at hand when one finishes.
_BEYOND_MAX_NUM_SEQS = 8
# Prompt tokens without a first token that are always allowed: two steps of vLLM's default budget
# (vllm/engine/arg_utils.py). One is being computed, one must lie ready: where prompts are short, a
# few requests are not enough for that.
_PREFILL_TOKENS = 4096
# An instance that has slots, but too many prompts to begin with, will take the next one within a
# few steps. It is worth that wait when the best of the others would cost so many times more.
_WORTH_WAITING = 1.25
# But not when it has been silent for so long: an engine that hangs must not hold everybody up.
MOST_PATIENCE_S = 1.0
# The drain rule: what waits is the end of a batch when nothing has arrived for so many mean gaps
# between arrivals, within these bounds (s). Poisson arrivals pause that long once in 20 000.
_GAPS_BEFORE_DRAIN = 10.0
_IDLE_BOUNDS_S = (0.02, 2.0)
# Of the wait that draining the queue takes, how much later than elsewhere a request may finish.
_DRAIN_FACTOR = 2.0
# The predicted usage may be far above 1; how far is noise, that it is above is what counts.
_MOST_USAGE = 1.5


def idle_before_drain_s(mean_gap_s: float) -> float:
    """How long nothing must arrive for the drain rule to begin, given the mean gap before."""
    low, high = _IDLE_BOUNDS_S
    return min(high, max(low, _GAPS_BEFORE_DRAIN * mean_gap_s))


class FinishTime(WorkloadCharge):
    """Section "finish-time" of docs/scheduling.md.

    Args:
        options: ``objective`` "makespan" has the drain rule always, "latency" only when nothing
            has arrived for ``idle_before_drain_s``; and ``prefill_depth``.
    """

    queues = True

    def __init__(self, options: PolicyOptions) -> None:
        self._objective: Objective = options.objective
        self._prefill_depth = options.prefill_depth

    def choose(
        self, request: Request, candidates: Candidates, rng: np.random.Generator
    ) -> int | None:
        outlook = candidates.outlook
        assert outlook is not None
        waiting, streaming, waiting_prompt = outlook.rows[:3]
        slots = waiting + streaming < outlook.max_num_seqs + _BEYOND_MAX_NUM_SEQS
        room = slots & ((waiting < self._prefill_depth) | (waiting_prompt < _PREFILL_TOKENS))
        if outlook.profiled:
            estimates = _estimates(request, candidates, outlook, room)
        else:
            estimates = _counts(candidates, outlook, room)
        candidates.estimates = estimates
        if self._drains(outlook):
            slots &= _worth_it(outlook, estimates)
        slots &= room | (outlook.silent_s < MOST_PATIENCE_S)
        return _cheapest(estimates, slots, rng)

    def _drains(self, outlook: Outlook) -> bool:
        if outlook.mean_request_times_s is None:
            return False
        idle_s = idle_before_drain_s(outlook.mean_gap_s)
        return self._objective == "makespan" or outlook.idle_s >= idle_s


def _worth_it(outlook: Outlook, estimates: Estimates) -> BoolArray:
    """The drain rule: not where the fastest would be done sooner after the queue is drained."""
    assert outlook.mean_request_times_s is not None
    times = outlook.rows[SPEED] * outlook.mean_request_times_s()
    drain_s = outlook.queued / float((1 / times).sum())
    later_s = estimates.latency_s - estimates.latency_s.min()
    result: BoolArray = _DRAIN_FACTOR * later_s <= drain_s
    return result


def _cheapest(estimates: Estimates, slots: BoolArray, rng: np.random.Generator) -> int | None:
    """The cheapest instance with room, unless one that only lacks room is worth waiting for."""
    if not slots.any():
        return None
    cost = np.where(slots, estimates.cost_s, np.inf)
    lowest = cost.min()
    open_to = slots & estimates.room
    if not open_to.all():
        cost = np.where(open_to, cost, np.inf)
        best = cost.min()
        if best == np.inf or best > _WORTH_WAITING * lowest:
            return None
        lowest = best
    ties = (cost == lowest).nonzero()[0]
    if ties.size == 1:
        return int(ties[0])
    return int(ties[argmin_with_random_ties(estimates.latency_s[ties], rng)])


def _estimates(
    request: Request, candidates: Candidates, outlook: Outlook, room: BoolArray
) -> Estimates:
    p1, p2, _, p4, p5, p6, p7, p8 = outlook.constants
    waiting, streaming, waiting_prompt, waiting_output, context, f = outlook.rows[:6]
    kv = outlook.kv_capacity_tokens
    n_r, output = request.sequences, request.predicted_output_tokens
    prompt = n_r * request.prompt_tokens
    n = waiting + streaming
    joined = n + n_r
    remaining = outlook.stages @ outlook.residual
    tokens = context + 0.5 * remaining + waiting_prompt + 0.5 * waiting_output
    tokens += prompt + 0.5 * n_r * output
    batch_cap = np.maximum(np.minimum(outlook.max_num_seqs, kv * joined / tokens), 1.0)
    batch = np.minimum(joined, batch_cap)
    held = np.minimum(tokens, kv)
    step_s = f * (p6 * batch + p8 + p5 * held + p7 * held / batch)
    ttft_s = f * (p1 * (waiting_prompt + prompt) + p2 * (waiting + n_r) + p4)
    queued = joined > batch_cap
    if queued.any():
        # It waits in the engine until so many of those before it are done.
        turn_s = f * (p1 * waiting_prompt / np.maximum(waiting, 1) + p2)
        turn_s += (remaining + waiting_output) / np.maximum(n, 1) * step_s / batch_cap
        in_turn_s = (joined - batch_cap) * turn_s + f * (p1 * prompt + p4)
        ttft_s = np.where(queued, in_turn_s, ttft_s)
    latency_s = ttft_s + output * step_s
    # Each step that they share gets longer by what this sequence adds to it, and its prefill
    # stops them all once.
    shared = outlook.stages @ np.minimum(outlook.residual, output)
    shared += np.minimum(n_r * output, waiting_output)
    delay_s = shared * f * n_r * (p6 + p5 * (request.prompt_tokens + output / 2))
    delay_s += n * f * (p1 * prompt + p2 * n_r)
    usage = np.minimum((tokens - prompt - 0.5 * n_r * output) / kv, _MOST_USAGE)
    price_s = candidates.request_time_s / outlook.typical_request_time_s
    price_s *= usage * usage * latency_s.min()
    return Estimates(latency_s, delay_s, price_s, latency_s + delay_s + price_s, ttft_s, room)


def _counts(
    candidates: Candidates,
    outlook: Outlook,
    room: BoolArray,
) -> Estimates:
    """Without constants: the sequences there per weight, in place of seconds."""
    after: FloatArray = (outlook.rows[WAITING] + outlook.rows[STREAMING] + 1) / candidates.weight
    none = np.zeros(after.size)
    return Estimates(after, none, none, after, none, room)
