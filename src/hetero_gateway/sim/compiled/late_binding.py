"""``finish-time``: requests wait in the gateway until an instance has room, first in, first out.

What an instance is expected to do is ``core/policies/estimates.py``'s own ``room`` and
``estimate``, compiled as they are; here are the choice among a few candidates
(``FinishTime.choose``), the queue and its means (``ModelQueue``), residual lives, and the
loop of ``cluster.py``.
"""

import math
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray, Integers
from hetero_gateway.core.lengths.predictors import (
    FARTHEST,
    HISTORY,
    PRIOR_REQUESTS,
    REFRESH_EVERY,
    STAGE_MIDDLES,
    residual,
)
from hetero_gateway.core.policies.estimates import (
    MOST_PATIENCE_S,
    cheapest,
    cost,
    estimate,
    late_from_s,
    request_time_s,
    room,
)
from hetero_gateway.core.policies.finish_time import idle_before_drain_s
from hetero_gateway.core.policies.slo import VIOLATION_PRICE_S, Slo, violations
from hetero_gateway.core.scheduling.probes import sent
from hetero_gateway.core.scheduling.queue import MEAN_OVER_GAPS, MEAN_OVER_REQUESTS
from hetero_gateway.sim.compiled import progress
from hetero_gateway.sim.compiled.progress import Progress
from hetero_gateway.sim.compiled.tables import (
    BucketMeans,
    EngineTables,
    KernelTable,
    PoolTable,
    Requests,
    Slowdowns,
    give_back,
    learn,
    member_of,
    predicted_tokens,
    start,
)
from hetero_gateway.sim.kernel import (
    FINISHED,
    FIRST,
    PREEMPTED,
    advance,
    change_slowdown,
    decoded,
)

# Requests wait in the order of their numbers: those from HEAD up to TAIL. ARRIVALS: that ever came.
# PROMPTS: the sum of their prompts. SEEN, UNSEEN: lengths that finished, and since the table of
# residual lives was made. STARTED: requests in engines. TICK: the last one.
HEAD, TAIL, ARRIVALS, PROMPTS, SEEN, UNSEEN, STARTED, TICK = range(8)
# OUTPUTS: the sum of what is predicted of them; lengths and gaps are means of what arrives.
OUTPUTS, LAST_ARRIVAL_S, MEAN_GAP_S, MEAN_PROMPT, MEAN_OUTPUT, PUMPED_S, NOW_S = range(7)
TYPICAL_PROMPT, TYPICAL_OUTPUT, PRIOR_TOKENS = range(7, 10)


class Rules(NamedTuple):
    """Options of ``FinishTime``: ``always_drains`` for the objective makespan."""

    prefill_depth: int
    always_drains: bool
    drain_factor: float
    interval_s: float
    has_slo: bool
    slo: Slo


class Queue(NamedTuple):
    """Fields as above; ``lengths`` that finished lately in a ring, and ``ordered``, as sorting is
    what a table of ``residual`` lives takes longest for;
    ``typical_s``: T of a typical request by instance; ``placed``: in this pump, and where."""

    n: Integers
    x: FloatArray
    lengths: FloatArray
    ordered: FloatArray
    residual: KernelTable
    typical_s: FloatArray
    placed: Integers


class CandidateFigures(NamedTuple):
    """Room for what is thought of each candidate."""

    slots: KernelTable
    room: KernelTable
    latency_s: KernelTable
    delay_s: FloatArray
    cost_s: KernelTable
    price: FloatArray
    ttft_s: FloatArray
    slo_price_s: FloatArray


class World(NamedTuple):
    """All of a simulation but the engines, whose tables grow."""

    r: Requests
    pool: PoolTable
    p: Progress
    queue: Queue
    scratch: CandidateFigures
    rules: Rules
    means: BucketMeans
    steps: KernelTable
    seconds: KernelTable
    told_steps: Integers
    told_s: FloatArray


def new_world(
    r: Requests, pool: PoolTable, p: Progress, rules: Rules, means: BucketMeans, prior_tokens: float
) -> World:
    size = len(pool.members)
    x = np.zeros(10)
    x[PUMPED_S] = -math.inf
    x[PRIOR_TOKENS] = prior_tokens
    residual = np.full(len(STAGE_MIDDLES), prior_tokens)
    placed = np.zeros((len(r.arrival_s), 2), np.int64)
    lengths, ordered = np.zeros((2, HISTORY))
    queue = Queue(np.zeros(8, np.int64), x, lengths, ordered, residual, np.ones(size), placed)
    flags, floats = np.zeros((2, size), np.bool_), np.zeros((6, size))
    scratch = CandidateFigures(*flags, *floats)
    return World(
        r, pool, p, queue, scratch, rules, means,
        np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.int64), np.zeros(size),
    )  # fmt: skip


# The loop


def run_all(e: EngineTables, w: World, slowdowns: Slowdowns, rng: np.random.Generator) -> None:
    """Run the workload to its end."""
    n, x = w.queue.n, w.queue.x
    arrived, slowed, ticking = 0, 0, False
    while True:
        if n[STARTED] > 0 and not ticking:
            ticking = True
            n[TICK] = max(n[TICK], math.floor(x[NOW_S] / w.rules.interval_s)) + 1
        fault_s, arrival_s, tick_s = math.inf, math.inf, math.inf
        if slowed < len(slowdowns.at_s):
            fault_s = slowdowns.at_s[slowed]
        if arrived < len(w.r.arrival_s):
            arrival_s = w.r.arrival_s[arrived]
        if ticking:
            tick_s = n[TICK] * w.rules.interval_s
        until_s, waking = min(fault_s, arrival_s, tick_s), False
        queued = n[TAIL] > n[HEAD]
        if queued:
            wake_s = _next_wakeup_s(w.queue)
            if x[NOW_S] < wake_s < until_s:
                until_s, waking = wake_s, True
        if until_s == math.inf:
            return
        complete = advance(e.q, e.n, e.x, e.c, e.k, e.first, e.log, e.log_s, until_s, queued)
        if e.log[0] > 0:
            _tell(e, w)
            if queued:
                x[NOW_S] = e.log_s[e.log[0]]
                _pump(e, w, rng)
        if not complete:
            continue
        x[NOW_S] = until_s
        if waking:
            _pump(e, w, rng)
        elif fault_s == until_s:
            i, factor = slowdowns.instance[slowed], slowdowns.factor[slowed]
            change_slowdown(e.n, e.x, e.first, i, factor, until_s)
            slowed += 1
        elif arrival_s == until_s:
            _arrive(w, arrived)
            arrived += 1
            _pump(e, w, rng)
        else:
            ticking = False
            _observe_steps(e, w)


def _tell(e: EngineTables, w: World) -> None:
    """Pass on what the engines have logged."""
    r, n = w.r, w.queue.n
    for at in range(1, 1 + e.log[0]):
        slot, kind, at_s = e.log[at] // 4, e.log[at] % 4, e.log_s[at]
        request = e.request[slot]
        i, prompt = r.instance[request], r.prompt_tokens[request]
        if kind == FIRST:
            r.first_token_s[request] = at_s
            progress.first_token(w.p, i, request, prompt, at_s)
        elif kind == PREEMPTED:
            r.preemptions[request] += 1
        elif kind == FINISHED:
            r.finish_s[request] = at_s
            learn(w.means, r.length_class[request], r.output_tokens[request])
            _remember(w.queue, r.output_tokens[request])
            progress.settle(w.p, i, request, prompt, at_s)
            n[STARTED] -= 1
            give_back(e, slot)


def _observe_steps(e: EngineTables, w: World) -> None:
    now_s = w.queue.x[NOW_S]
    decoded(e.n, e.x, now_s, w.steps, w.seconds)
    for i in range(len(w.steps)):
        made = w.steps[i] - w.told_steps[i]
        if made > 0:
            progress.observe_steps(w.p, i, made, w.seconds[i] - w.told_s[i], now_s)
        w.told_steps[i] = w.steps[i]
        w.told_s[i] = w.seconds[i]


# The queue


def _arrive(w: World, request: int) -> None:
    """A request stands last; all instances can hold it."""
    n, x, r = w.queue.n, w.queue.x, w.r
    predicted = predicted_tokens(w.means, r, request)
    w.p.predicted[request] = predicted
    now_s, prompt = x[NOW_S], r.prompt_tokens[request]
    if n[ARRIVALS] > 0:
        gap_s = now_s - x[LAST_ARRIVAL_S]
        x[MEAN_GAP_S] += (gap_s - x[MEAN_GAP_S]) / MEAN_OVER_GAPS
    x[LAST_ARRIVAL_S] = now_s
    n[ARRIVALS] += 1
    share = 1 / min(n[ARRIVALS], MEAN_OVER_REQUESTS)
    x[MEAN_PROMPT] += share * (prompt - x[MEAN_PROMPT])
    x[MEAN_OUTPUT] += share * (predicted - x[MEAN_OUTPUT])
    n[TAIL] = request + 1
    n[PROMPTS] += prompt
    x[OUTPUTS] += predicted


def _leave(w: World, request: int) -> None:
    """The first one waits no more."""
    n, x = w.queue.n, w.queue.x
    n[HEAD] = request + 1
    if n[HEAD] < n[TAIL]:
        n[PROMPTS] -= w.r.prompt_tokens[request]
        x[OUTPUTS] -= w.p.predicted[request]
    else:
        n[PROMPTS] = 0
        x[OUTPUTS] = 0.0


def _next_wakeup_s(queue: Queue) -> float:
    """``Scheduler.next_wakeup_s`` while somebody waits, who was tried at once."""
    x = queue.x
    patience_ends_s = x[PUMPED_S] + MOST_PATIENCE_S
    drain_begins_s = x[LAST_ARRIVAL_S] + idle_before_drain_s(x[MEAN_GAP_S])
    if drain_begins_s > x[PUMPED_S]:
        patience_ends_s = min(patience_ends_s, drain_begins_s)
    return float(patience_ends_s)


def _pump(e: EngineTables, w: World, rng: np.random.Generator) -> None:
    """Place all that can be placed now, and start it; what is refused makes room for another."""
    n, now_s = w.queue.n, w.queue.x[NOW_S]
    while True:
        w.queue.x[PUMPED_S] = now_s
        count = 0
        while n[HEAD] < n[TAIL]:
            request = n[HEAD]
            i = _place(w, request, now_s, rng)
            if i < 0:
                break
            progress.dispatch(w.p, i, request, w.r.prompt_tokens[request], now_s)
            _leave(w, request)
            w.queue.placed[count, 0] = request
            w.queue.placed[count, 1] = i
            count += 1
        refused = 0
        for at in range(count):
            if not _start(e, w, w.queue.placed[at, 0], w.queue.placed[at, 1], now_s):
                refused += 1
        if refused == 0 or n[HEAD] == n[TAIL]:
            return


def _start(e: EngineTables, w: World, request: int, i: int, now_s: float) -> bool:
    """Put a placed request into its engine; False when it refuses."""
    if start(e, w.r, request, i, now_s) < 0:
        progress.settle(w.p, i, request, w.r.prompt_tokens[request], now_s)
        return False
    w.queue.n[STARTED] += 1
    return True


# The choice


def _place(w: World, request: int, now_s: float, rng: np.random.Generator) -> int:
    """``Scheduler._place``: where the first one goes; -1: it has to wait."""
    p = w.p
    progress.revise(p, now_s)
    one = progress.due(p, now_s)
    if one >= 0:
        chosen = _choose(w, request, one, one + 1, now_s, rng)
        if chosen >= 0:
            sent(p.probes[0], now_s)
            return chosen
    return _choose(w, request, 0, len(w.steps), now_s, rng)


def _remember(queue: Queue, output_tokens: float) -> None:
    """A length has finished: it takes the place of the oldest that is kept."""
    n, lengths, ordered = queue.n, queue.lengths, queue.ordered
    oldest = n[SEEN] % HISTORY
    at = n[SEEN]
    if n[SEEN] >= HISTORY:
        at = np.searchsorted(ordered, lengths[oldest])
    lengths[oldest] = output_tokens
    last = min(n[SEEN], HISTORY - 1)
    # The hole moves to where the new one belongs.
    while at > 0 and ordered[at - 1] > output_tokens:
        ordered[at] = ordered[at - 1]
        at -= 1
    while at < last and ordered[at + 1] < output_tokens:
        ordered[at] = ordered[at + 1]
        at += 1
    ordered[at] = output_tokens
    n[SEEN] += 1
    n[UNSEEN] += 1


def _refresh(w: World) -> None:
    """What is typical, and what streams have still to come, as of now."""
    n, x, typical_s = w.queue.n, w.queue.x, w.queue.typical_s
    if n[UNSEEN] >= REFRESH_EVERY:
        n[UNSEEN] = 0
        renew_residual(w.queue)
    prompt, output = x[MEAN_PROMPT], x[MEAN_OUTPUT]
    if (
        abs(prompt - x[TYPICAL_PROMPT]) <= x[TYPICAL_PROMPT] / 20
        and abs(output - x[TYPICAL_OUTPUT]) <= x[TYPICAL_OUTPUT] / 20
    ):
        return
    for i in range(len(typical_s)):
        typical_s[i] = max(request_time_s(member_of(w.pool.members, i), prompt, output), 1e-9)
    x[TYPICAL_PROMPT] = prompt
    x[TYPICAL_OUTPUT] = output


def renew_residual(queue: Queue) -> None:
    """The table of residual lives, of the lengths that finished lately."""
    size = min(queue.n[SEEN], HISTORY)
    ordered, prior = queue.ordered[:size], queue.x[PRIOR_TOKENS]
    farthest = FARTHEST * ordered[size * 9 // 10]
    far = np.searchsorted(ordered, farthest, side="right")
    for stage in range(len(queue.residual)):
        middle = STAGE_MIDDLES[stage]
        first = min(np.searchsorted(ordered, middle, side="right"), far)
        queue.residual[stage] = residual(
            middle, size - first, size - far, ordered[first:far].sum(), farthest, prior,
            PRIOR_REQUESTS,
        )  # fmt: skip


def _choose(
    w: World, request: int, first: int, last: int, now_s: float, rng: np.random.Generator
) -> int:
    """``FinishTime.choose`` among the instances from ``first`` up to ``last``."""
    _refresh(w)
    s, p = w.scratch, w.p
    prompt, output = float(w.r.prompt_tokens[request]), p.predicted[request]
    there_is_room = False
    for i in range(first, last):
        s.slots[i], s.room[i] = room(
            p.states[i], member_of(p.members, i), prompt, w.rules.prefill_depth, now_s
        )
        there_is_room |= s.room[i]
    if not there_is_room:
        return -1
    ended = now_s - w.queue.x[LAST_ARRIVAL_S] >= idle_before_drain_s(w.queue.x[MEAN_GAP_S])
    soonest_s, soonest_ttft_s = math.inf, math.inf
    for i in range(first, last):
        row, member = p.states[i], member_of(p.members, i)
        one = estimate(
            row, member, prompt, None, 1.0, prompt, output, w.queue.residual,
            w.queue.typical_s[i], now_s, not ended,
        )  # fmt: skip
        s.latency_s[i] = one[4]
        s.delay_s[i] = one[5]
        s.price[i] = one[6]
        s.ttft_s[i] = one[7]
        if w.rules.has_slo:
            waited_s = now_s - w.r.arrival_s[request]
            missed = violations(
                row, member, one[7], one[8], 1.0, prompt, output, now_s, waited_s, w.rules.slo
            )
            s.slo_price_s[i] = VIOLATION_PRICE_S * missed
        soonest_s = min(soonest_s, one[4])
        soonest_ttft_s = min(soonest_ttft_s, one[7])
    late_s = late_from_s(soonest_ttft_s, False)
    for i in range(first, last):
        s.cost_s[i] = cost(
            s.latency_s[i], s.delay_s[i], s.price[i], s.ttft_s[i], soonest_s, late_s, 0.0
        )[2]
        if w.rules.has_slo:
            s.cost_s[i] += s.slo_price_s[i]
    latest_s = math.inf
    if w.rules.always_drains or ended:
        latest_s = _latest_s(w, first, last, soonest_s)
    chosen = cheapest(
        s.cost_s[first:last], s.slots[first:last], s.room[first:last], s.latency_s[first:last],
        latest_s, rng,
    )  # fmt: skip
    return chosen if chosen < 0 else first + chosen


def _latest_s(w: World, first: int, last: int, soonest_s: float) -> float:
    """The drain rule: until when a request may be done."""
    n, x = w.queue.n, w.queue.x
    waiting = n[TAIL] - n[HEAD]
    prompt, output = n[PROMPTS] / waiting, x[OUTPUTS] / waiting
    rate_per_s = 0.0
    for i in range(first, last):
        time_s = request_time_s(member_of(w.pool.members, i), prompt, output)
        rate_per_s += 1 / (w.p.states[i].speed * time_s)
    return float(soonest_s + waiting / rate_per_s / w.rules.drain_factor)
