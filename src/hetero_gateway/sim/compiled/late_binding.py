"""``finish-time``: requests wait in the gateway until an instance has room.

What an instance is expected to do is ``core/policies/estimates.py``'s own ``room`` and
``estimate``, compiled as they are; here are the choice among a few candidates
(``FinishTime.choose``), the queue and its means (``ModelQueue``) in the order of ``Fifo`` or
``Shortest``, residual lives, and the loop of ``cluster.py``.
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
    Prospect,
    cheapest,
    cost,
    estimate,
    late_from_s,
    no_price,
    request_time_s,
    room,
)
from hetero_gateway.core.policies.finish_time import idle_before_drain_s
from hetero_gateway.core.policies.slo import VIOLATION_PRICE_S, Slo, violations
from hetero_gateway.core.scheduling.disciplines import later_s
from hetero_gateway.core.scheduling.pool import work_s
from hetero_gateway.core.scheduling.probes import sent
from hetero_gateway.core.scheduling.queue import MEAN_OVER_GAPS, MEAN_OVER_REQUESTS
from hetero_gateway.sim.compiled import progress
from hetero_gateway.sim.compiled.progress import PROBES, Progress
from hetero_gateway.sim.compiled.tables import (
    MEMBER,
    BucketMeans,
    EngineTables,
    Row,
    Table,
    fields,
    give_back,
    learn,
    member_of,
    predict,
    record,
    start,
    table,
)
from hetero_gateway.sim.kernel import (
    FINISHED,
    FIRST,
    PREEMPTED,
    advance,
    change_slowdown,
    decoded_by,
)

# ``queued``: requests that wait. ``arrivals``: that ever came. ``prompts``, ``outputs``: sums of
# those that wait. ``seen``, ``unseen``: lengths that finished, and since the table of ``residual``
# lives was made. ``started``: requests in engines. ``tick``: the last one. Lengths and gaps are
# means of what arrives. ``lengths`` that finished lately, in a ring, and ``ordered``, as sorting is
# what that table takes longest for. And what the policy and the discipline were made with:
# ``always_drains`` is the objective makespan; where it ``sorts``, work is what the ``yardstick``
# would take for it.
QUEUE = record(
    *fields("i8", "queued arrivals prompts seen unseen started tick prefill_depth"),
    *fields("f8", "outputs last_arrival_s mean_gap_s mean_prompt mean_output pumped_s now_s"),
    *fields("f8", "typical_prompt typical_output prior_tokens drain_factor interval_s"),
    *fields("f8", "mean_work_s patience_s"),
    *fields("?", "always_drains has_slo sorts"),
    ("yardstick", MEMBER),
    ("slo", record(*fields("f8", " ".join(Slo._fields)))),
    ("probes", PROBES),
    ("residual", "f8", (len(STAGE_MIDDLES),)),
    ("lengths", "f8", (HISTORY,)),
    ("ordered", "f8", (HISTORY,)),
)


class World(NamedTuple):
    """All of a simulation but the engines, whose tables grow.

    ``queue``: one row. ``waiting``: the numbers of those that wait, as a heap: the first has its
    turn. ``placed``: of those that are placed in one pump.
    """

    p: Progress
    queue: Table
    means: BucketMeans
    waiting: Integers
    placed: Integers


def new_world(p: Progress, means: BucketMeans, prior_tokens: float) -> World:
    queue = table(1, QUEUE)
    queue["pumped_s"] = -math.inf
    queue["prior_tokens"] = queue["residual"] = prior_tokens
    progress.set_probes(queue["probes"])
    numbers = np.zeros((2, len(p.requests)), np.int64)
    return World(p, queue, means, numbers[0], numbers[1])


# The loop


def run_all(e: EngineTables, w: World, slowdowns: Table, rng: np.random.Generator) -> None:
    """Run the workload to its end."""
    queue, requests = w.queue[0], w.p.requests
    arrived, slowed, ticking = 0, 0, False
    while True:
        if queue.started > 0 and not ticking:
            ticking = True
            queue.tick = max(queue.tick, math.floor(queue.now_s / queue.interval_s)) + 1
        fault_s, arrival_s, tick_s = math.inf, math.inf, math.inf
        if slowed < len(slowdowns):
            fault_s = slowdowns[slowed].at_s
        if arrived < len(requests):
            arrival_s = requests[arrived].arrival_s
        if ticking:
            tick_s = queue.tick * queue.interval_s
        until_s, waking = min(fault_s, arrival_s, tick_s), False
        queued = queue.queued > 0
        if queued:
            wake_s = _next_wakeup_s(queue)
            if queue.now_s < wake_s < until_s:
                until_s, waking = wake_s, True
        if until_s == math.inf:
            return
        complete = advance(e.q, e.n, e.x, e.c, e.k, e.first, e.log, e.log_s, until_s, queued)
        if e.log[0] > 0:
            _tell(e, w)
            if queued:
                queue.now_s = e.log_s[e.log[0]]
                _pump(e, w, rng)
        if not complete:
            continue
        queue.now_s = until_s
        if waking:
            _pump(e, w, rng)
        elif fault_s == until_s:
            slow = slowdowns[slowed]
            change_slowdown(e.n, e.x, e.first, slow.instance, slow.factor, until_s)
            slowed += 1
        elif arrival_s == until_s:
            _arrive(w, arrived)
            arrived += 1
            _pump(e, w, rng)
        else:
            ticking = False
            _observe_steps(e, w.p, until_s)


def _tell(e: EngineTables, w: World) -> None:
    """Pass on what the engines have logged."""
    queue = w.queue[0]
    for at in range(1, 1 + e.log[0]):
        slot, kind, at_s = e.log[at] // 4, e.log[at] % 4, e.log_s[at]
        request = e.slots[slot].request
        r = w.p.requests[request]
        if kind == FIRST:
            r.first_token_s = at_s
            progress.first_token(w.p, r.instance, request, at_s)
        elif kind == PREEMPTED:
            r.preemptions += 1
        elif kind == FINISHED:
            r.finish_s = at_s
            learn(w.means, r)
            _remember(queue, r.output_tokens)
            progress.settle(w.p, r.instance, r, at_s)
            queue.started -= 1
            give_back(e, slot)


def _observe_steps(e: EngineTables, p: Progress, now_s: float) -> None:
    for i in range(len(p.states)):
        steps, steps_s = decoded_by(e.n[i], e.x[i], now_s)
        s = p.states[i]
        if steps > s.told_steps:
            made, took_s = steps - s.told_steps, steps_s - s.told_s
            progress.observe_steps(p, i, made, took_s, now_s)
        s.told_steps, s.told_s = steps, steps_s


# The queue


def _arrive(w: World, request: int) -> None:
    """A request takes its place; all instances can hold it."""
    queue, r = w.queue[0], w.p.requests[request]
    predict(w.means, r)
    if queue.arrivals > 0:
        gap_s = queue.now_s - queue.last_arrival_s
        queue.mean_gap_s += (gap_s - queue.mean_gap_s) / MEAN_OVER_GAPS
    queue.last_arrival_s = queue.now_s
    queue.arrivals += 1
    share = 1 / min(queue.arrivals, MEAN_OVER_REQUESTS)
    queue.mean_prompt += share * (r.prompt_tokens - queue.mean_prompt)
    queue.mean_output += share * (r.predicted_tokens - queue.mean_output)
    if queue.sorts:
        # ``Shortest.join``.
        work = work_s(member_of(queue.yardstick), r.prompt_tokens, r.predicted_tokens)
        queue.mean_work_s += share * (work - queue.mean_work_s)
        r.turn_s = queue.now_s + later_s(work, queue.mean_work_s, queue.patience_s)
    queue.prompts += r.prompt_tokens
    queue.outputs += r.predicted_tokens
    waiting, at = w.waiting, queue.queued
    queue.queued += 1
    while at > 0 and _goes_before(w.p.requests, request, waiting[(at - 1) // 2]):
        waiting[at] = waiting[(at - 1) // 2]
        at = (at - 1) // 2
    waiting[at] = request


def _goes_before(requests: Table, one: int, other: int) -> bool:
    one_s, other_s = requests[one].turn_s, requests[other].turn_s
    return bool(one_s < other_s or (one_s == other_s and one < other))


def _leave(w: World, r: Row) -> None:
    """The first one waits no more."""
    queue, waiting = w.queue[0], w.waiting
    queue.queued -= 1
    size = queue.queued
    last, at = waiting[size], 0
    # The hole goes down to where the last one belongs.
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _goes_before(w.p.requests, waiting[child + 1], waiting[child]):
            child += 1
        if not _goes_before(w.p.requests, waiting[child], last):
            break
        waiting[at] = waiting[child]
        at = child
    waiting[at] = last
    if size > 0:
        queue.prompts -= r.prompt_tokens
        queue.outputs -= r.predicted_tokens
    else:
        queue.prompts = 0
        queue.outputs = 0.0


def _next_wakeup_s(queue: Row) -> float:
    """``Scheduler.next_wakeup_s`` while somebody waits, who was tried at once."""
    patience_ends_s = queue.pumped_s + MOST_PATIENCE_S
    drain_begins_s = queue.last_arrival_s + idle_before_drain_s(queue.mean_gap_s)
    if drain_begins_s > queue.pumped_s:
        patience_ends_s = min(patience_ends_s, drain_begins_s)
    return float(patience_ends_s)


def _pump(e: EngineTables, w: World, rng: np.random.Generator) -> None:
    """Place all that can be placed now, and start it; what is refused makes room for another."""
    queue, requests = w.queue[0], w.p.requests
    now_s = queue.now_s
    refused = True
    while refused and queue.queued > 0:
        queue.pumped_s = now_s
        count = 0
        while queue.queued > 0:
            r = requests[w.waiting[0]]
            r.instance = _place(w, r, now_s, rng)
            if r.instance < 0:
                break
            progress.dispatch(w.p, r.instance, r, now_s)
            w.placed[count] = w.waiting[0]
            count += 1
            _leave(w, r)
        refused = False
        for at in range(count):
            if not _start(e, w, w.placed[at], now_s):
                refused = True


def _start(e: EngineTables, w: World, request: int, now_s: float) -> bool:
    """Put a placed request into its engine; False when it refuses."""
    r = w.p.requests[request]
    if start(e, r, request, now_s) < 0:
        progress.settle(w.p, r.instance, r, now_s)
        return False
    w.queue[0].started += 1
    return True


# The choice


def _place(w: World, r: Row, now_s: float, rng: np.random.Generator) -> int:
    """``Scheduler._place``: where the first one goes; -1: it has to wait."""
    p, probes = w.p, w.queue[0].probes
    progress.revise(p.states, probes, now_s)
    one = progress.due(p.states, probes, now_s)
    if one >= 0:
        chosen = _choose(w, r, one, one + 1, now_s, rng)
        if chosen >= 0:
            sent(probes, now_s)
            return chosen
    return _choose(w, r, 0, len(p.states), now_s, rng)


def _remember(queue: Row, output_tokens: float) -> None:
    """A length has finished: it takes the place of the oldest that is kept."""
    lengths, ordered = queue.lengths, queue.ordered
    oldest = queue.seen % HISTORY
    at = queue.seen
    if queue.seen >= HISTORY:
        at = _up_to(ordered, HISTORY, lengths[oldest] - 1)  # they are whole numbers
    lengths[oldest] = output_tokens
    last = min(queue.seen, HISTORY - 1)
    # The hole moves to where the new one belongs.
    while at > 0 and ordered[at - 1] > output_tokens:
        ordered[at] = ordered[at - 1]
        at -= 1
    while at < last and ordered[at + 1] < output_tokens:
        ordered[at] = ordered[at + 1]
        at += 1
    ordered[at] = output_tokens
    queue.seen += 1
    queue.unseen += 1


def _refresh(queue: Row, states: Table) -> None:
    """What is typical, and what streams have still to come, as of now."""
    if queue.unseen >= REFRESH_EVERY:
        queue.unseen = 0
        renew_residual(queue)
    prompt, output = queue.mean_prompt, queue.mean_output
    if (
        abs(prompt - queue.typical_prompt) <= queue.typical_prompt / 20
        and abs(output - queue.typical_output) <= queue.typical_output / 20
    ):
        return
    for s in states:
        s.typical_s = max(request_time_s(member_of(s.constants), prompt, output), 1e-9)
    queue.typical_prompt = prompt
    queue.typical_output = output


def renew_residual(queue: Row) -> None:
    """The table of residual lives, of the lengths that finished lately."""
    size = min(queue.seen, HISTORY)
    ordered, prior = queue.ordered, queue.prior_tokens
    farthest = FARTHEST * ordered[size * 9 // 10]
    far = _up_to(ordered, size, farthest)
    for stage in range(len(STAGE_MIDDLES)):
        middle = STAGE_MIDDLES[stage]
        first, tokens = min(_up_to(ordered, size, middle), far), 0.0
        for at in range(first, far):
            tokens += ordered[at]
        queue.residual[stage] = residual(
            middle, size - first, size - far, tokens, farthest, prior, PRIOR_REQUESTS
        )


def _up_to(ordered: FloatArray, size: int, value: float) -> int:
    """How many of the first ones are ``value`` or less; they are in order."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low


def _choose(w: World, r: Row, first: int, last: int, now_s: float, rng: np.random.Generator) -> int:
    """``FinishTime.choose`` among the instances from ``first`` up to ``last``."""
    queue, states = w.queue[0], w.p.states[first:last]
    _refresh(queue, w.p.states)
    prompt, output = float(r.prompt_tokens), r.predicted_tokens
    there_is_room = False
    for s in states:
        s.slot, s.room = room(
            s, member_of(s.constants), prompt, prompt + output, queue.prefill_depth, now_s
        )
        there_is_room |= s.room
    if not there_is_room:
        return -1
    ended = now_s - queue.last_arrival_s >= idle_before_drain_s(queue.mean_gap_s)
    soonest_s, soonest_ttft_s = math.inf, math.inf
    for s in states:
        member = member_of(s.constants)
        one = estimate(
            s, member, prompt, None, 1.0, prompt, output, queue.residual, s.typical_s, now_s,
            not ended,
        )  # fmt: skip
        s.latency_s = one[4]
        s.delay_s = one[5]
        s.price = one[6]
        s.ttft_s = one[7]
        if queue.has_slo:
            waited_s = now_s - r.arrival_s
            missed = violations(
                s, member, one[7], one[8], prompt, 1.0, prompt, output, now_s, waited_s, queue.slo
            )
            s.slo_price_s = VIOLATION_PRICE_S * missed
        # A policy's own rule stands here in place of ``no_price`` (``jit.with_function``).
        prospect = Prospect(
            one[4], one[5], one[7], one[8], 1.0, prompt, output, 0.0, now_s - r.arrival_s, now_s
        )
        s.own_price_s = no_price(s, member, prospect)
        soonest_s = min(soonest_s, one[4])
        soonest_ttft_s = min(soonest_ttft_s, one[7])
    late_s = late_from_s(soonest_ttft_s, False)
    for s in states:
        s.cost_s = cost(s.latency_s, s.delay_s, s.price, s.ttft_s, soonest_s, late_s, 0.0)[2]
        if queue.has_slo:
            s.cost_s += s.slo_price_s
        s.cost_s += s.own_price_s
    latest_s, takes_s = math.inf, _drain_s(queue, states)
    if queue.always_drains or ended:
        latest_s = soonest_s + takes_s / queue.drain_factor
    chosen = cheapest(
        states,
        states.cost_s,
        states.slot,
        states.room,
        states.latency_s,
        latest_s,
        takes_s,
        1.0,
        rng,
    )
    return chosen if chosen < 0 else first + chosen


def _drain_s(queue: Row, states: Table) -> float:
    """How long all that wait take at full speed (``finish_time.drain_s``)."""
    prompt, output = queue.prompts / queue.queued, queue.outputs / queue.queued
    rate_per_s = 0.0
    for s in states:
        rate_per_s += 1 / (s.speed * request_time_s(member_of(s.constants), prompt, output))
    return float(queue.queued / rate_per_s)
