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

The figures come from ``core/instances/progress.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.instances.progress import (
    CONTEXT,
    SILENT_S,
    SPEED,
    STREAMING,
    WAITING,
    WAITING_OUTPUT,
    WAITING_PROMPT,
    Estimates,
    Outlook,
)
from hetero_gateway.core.policies.base import (
    Candidates,
    Jit,
    Objective,
    PolicyOptions,
    WorkloadCharge,
    argmin_with_random_ties,
)
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
        self._room = _room
        self._estimate = _estimate
        self._cheapest = _cheapest

    def compile(self, jit: Jit) -> None:
        self._room, self._estimate, self._cheapest = jit(_room), jit(_estimate), jit(_cheapest)

    def choose(
        self, request: Request, candidates: Candidates, rng: np.random.Generator
    ) -> int | None:
        outlook = candidates.outlook
        assert outlook is not None
        slots, room = self._room(outlook.rows, outlook.max_num_seqs, self._prefill_depth)
        if outlook.profiled:
            output = float(request.predicted_output_tokens)
            estimates = Estimates(
                *self._estimate(
                    outlook.constants,
                    outlook.rows,
                    outlook.kv_capacity_tokens,
                    outlook.max_num_seqs,
                    outlook.stages.dot(outlook.residual),
                    outlook.stages.dot(np.minimum(outlook.residual, output)),
                    candidates.request_time_s,
                    outlook.typical_request_time_s,
                    float(request.sequences),
                    float(request.prompt_tokens),
                    output,
                ),
                room,
            )
        else:
            estimates = _counts(candidates, outlook, room)
        candidates.estimates = estimates
        if self._drains(outlook):
            slots &= _worth_it(outlook, estimates)
        position, tied = self._cheapest(estimates.cost_s, slots, room)
        if tied:
            cost = estimates.cost_s
            ties = (slots & room & (cost == cost[position])).nonzero()[0]
            position = int(ties[argmin_with_random_ties(estimates.latency_s[ties], rng)])
        return None if position < 0 else position

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


# The next three are the arithmetic of a decision: pure functions of arrays with one entry per
# instance, which run as they are written, or compiled by numba, with the same results to the bit.


def _room(
    rows: FloatArray, max_num_seqs: FloatArray, prefill_depth: int
) -> tuple[BoolArray, BoolArray]:
    """Who is worth waiting for, and who of them may be sent a request now."""
    waiting = rows[WAITING]
    slots = waiting + rows[STREAMING] < max_num_seqs + _BEYOND_MAX_NUM_SEQS
    room = slots & ((waiting < prefill_depth) | (rows[WAITING_PROMPT] < _PREFILL_TOKENS))
    return slots & (room | (rows[SILENT_S] < MOST_PATIENCE_S)), room


def _cheapest(cost_s: FloatArray, slots: BoolArray, room: BoolArray) -> tuple[int, bool]:
    """The cheapest instance with room, and whether others cost the same.

    -1: none, or one of ``slots`` that lacks room is worth waiting for.
    """
    cost = np.where(slots, cost_s, np.inf)
    lowest = cost[cost.argmin()]
    cost = np.where(room, cost, np.inf)
    position = int(cost.argmin())
    best = cost[position]
    if best == np.inf or best > _WORTH_WAITING * lowest:
        return -1, False
    return position, bool(np.count_nonzero(cost == best) > 1)


def _estimate(
    constants: FloatArray,
    rows: FloatArray,
    kv: FloatArray,
    max_num_seqs: FloatArray,
    remaining: FloatArray,
    shared: FloatArray,
    request_time_s: FloatArray,
    typical_request_time_s: FloatArray,
    n_r: float,
    prompt_tokens: float,
    output: float,
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """lat, ext, price, their sum, and the time to the first token, s.

    Args:
        constants, rows, kv, max_num_seqs: as in ``Outlook``.
        remaining: output tokens that those that stream have still to come.
        shared: how many of them come before the request is done.
        request_time_s, typical_request_time_s: T of the request, and of the typical one.
        n_r, prompt_tokens, output: its sequences, and the tokens of each.
    """
    p1, p2, p4, p5 = constants[0], constants[1], constants[3], constants[4]
    p6, p7, p8 = constants[5], constants[6], constants[7]
    waiting, waiting_prompt, waiting_output = (
        rows[WAITING],
        rows[WAITING_PROMPT],
        rows[WAITING_OUTPUT],
    )
    f = rows[SPEED]
    prompt = n_r * prompt_tokens
    n = waiting + rows[STREAMING]
    joined = n + n_r
    tokens = rows[CONTEXT] + 0.5 * remaining + waiting_prompt + 0.5 * waiting_output
    tokens += prompt + 0.5 * n_r * output
    batch_cap = np.maximum(np.minimum(max_num_seqs, kv * joined / tokens), 1.0)
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
    shared = shared + np.minimum(n_r * output, waiting_output)
    delay_s = shared * f * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    delay_s += n * f * (p1 * prompt + p2 * n_r)
    usage = np.minimum((tokens - prompt - 0.5 * n_r * output) / kv, _MOST_USAGE)
    price_s = request_time_s / typical_request_time_s
    price_s *= usage * usage * latency_s[latency_s.argmin()]
    return latency_s, delay_s, price_s, latency_s + delay_s + price_s, ttft_s


def _counts(
    candidates: Candidates,
    outlook: Outlook,
    room: BoolArray,
) -> Estimates:
    """Without constants: the sequences there per weight, in place of seconds."""
    after: FloatArray = (outlook.rows[WAITING] + outlook.rows[STREAMING] + 1) / candidates.weight
    none = np.zeros(after.size)
    return Estimates(after, none, none, after, none, room)
