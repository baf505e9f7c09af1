"""Policies that send every request on as it comes: what they choose by, and the loop.

``choose`` has their rules as ``core/policies`` has them: equals are drawn by the scheduler's own
generator, in the same order.
"""

import math
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import Flags, FloatArray, Integers
from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.policies.estimates import request_time_s
from hetero_gateway.sim.compiled import loads
from hetero_gateway.sim.compiled.tables import (
    CAPACITY_PER_S,
    KV_CAPACITY_TOKENS,
    KV_LIMIT_TOKENS,
    BucketMeans,
    EngineTables,
    PoolTable,
    Requests,
    Slowdowns,
    candidates,
    give_back,
    learn,
    member_of,
    predicted_tokens,
    start,
)
from hetero_gateway.sim.kernel import FINISHED, FIRST, PREEMPTED, advance, change_slowdown

# The rules.
TURNS, RANDOM, LEAST_REQUESTS, CAPACITY, POWER_OF_TWO, SINGLE = range(6)
# These look at the load: what they charge is of account.
MIN_MAX, PAPER, MEMORY, LEAST_WORK = range(6, 10)


class Rule(NamedTuple):
    """Which rule it is, and what is its own. ``weights``: of turns and of random draws.

    ``single``: position of the one that gets everything; -1: none is named.
    """

    kind: int
    weights: FloatArray
    single: int


class Loads(NamedTuple):
    """What is on each instance: requests, KV tokens, load in s and as ``loads.py`` has it; and the
    turns that it is ``owed``."""

    in_flight: Integers
    kv_tokens: Integers
    load_s: FloatArray
    digits: Integers
    owed: FloatArray


class Placing(NamedTuple):
    """All of a simulation but the engines, whose tables grow.

    ``smallest_tokens``: a request that takes no more can be held by all. ``takes``: who can have
    it; ``scores``: room for two numbers per instance. ``done``: the requests and the slowdowns that
    came already.
    """

    r: Requests
    pool: PoolTable
    rule: Rule
    there: Loads
    means: BucketMeans
    slowdowns: Slowdowns
    smallest_tokens: float
    takes: Flags
    scores: FloatArray
    done: Integers


def new_placing(
    r: Requests, pool: PoolTable, rule: Rule, means: BucketMeans, slowdowns: Slowdowns
) -> Placing:
    size = len(pool.members)
    there = Loads(
        np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size),
        np.zeros((size, loads.DIGITS), np.int64), np.zeros(size),
    )  # fmt: skip
    takes, scores, done = np.ones(size, np.bool_), np.zeros((2, size)), np.zeros(2, np.int64)
    smallest_tokens = float(pool.members[:, KV_LIMIT_TOKENS].min())
    return Placing(r, pool, rule, there, means, slowdowns, smallest_tokens, takes, scores, done)


def place_all(e: EngineTables, w: Placing, rng: np.random.Generator) -> bool:
    """Run the workload to its end; False: to a request for which there is no slot."""
    r, takes, slowdowns, done = w.r, w.takes, w.slowdowns, w.done
    while True:
        request, slowed = done[0], done[1]
        arrival_s = slowed_s = math.inf
        if request < len(r.arrival_s):
            arrival_s = r.arrival_s[request]
        if slowed < len(slowdowns.at_s):
            slowed_s = slowdowns.at_s[slowed]
        now_s = min(arrival_s, slowed_s)
        complete = advance(e.q, e.n, e.x, e.c, e.k, e.first, e.log, e.log_s, now_s, False)
        _tell(e, w)
        if not complete:
            continue
        if now_s == math.inf:
            return True
        if slowed_s <= arrival_s:
            i, factor = slowdowns.instance[slowed], slowdowns.factor[slowed]
            change_slowdown(e.n, e.x, e.first, i, factor, now_s)
            done[1] += 1
            continue
        output_tokens = predicted_tokens(w.means, r, request)
        prompt_tokens = r.prompt_tokens[request]
        tokens = prompt_tokens + output_tokens
        count = len(takes)
        if tokens <= w.smallest_tokens:
            takes[:] = True
        else:
            count = candidates(w.pool, tokens, takes)
        if count > 0:
            if e.free[0] == 0:
                return False
            i, charge_s = choose(w, prompt_tokens, output_tokens, count, rng)
            _start(e, w, request, i, charge_s, output_tokens)
        done[0] += 1


# What happens on the instances


def _start(
    e: EngineTables, w: Placing, request: int, i: int, charge_s: float, output_tokens: float
) -> None:
    there = w.there
    slot = start(e, w.r, request, i, w.r.arrival_s[request])
    if slot < 0:
        return
    e.charged_tokens[slot] = w.r.prompt_tokens[request] + round(output_tokens)
    there.kv_tokens[i] += e.charged_tokens[slot]
    there.in_flight[i] += 1
    if w.rule.kind >= MIN_MAX:
        loads.set_units(e.charged_units[slot], charge_s)
        loads.add(there.digits[i], e.charged_units[slot])
        there.load_s[i] = loads.seconds(there.digits[i])


def _tell(e: EngineTables, w: Placing) -> None:
    """Pass on what the engines have logged."""
    r = w.r
    for at in range(1, 1 + e.log[0]):
        slot, kind = e.log[at] // 4, e.log[at] % 4
        request = e.request[slot]
        if kind == FIRST:
            r.first_token_s[request] = e.log_s[at]
        elif kind == PREEMPTED:
            r.preemptions[request] += 1
        elif kind == FINISHED:
            r.finish_s[request] = e.log_s[at]
            learn(w.means, r.length_class[request], r.output_tokens[request])
            _settle(e, w.there, r.instance[request], slot)
            give_back(e, slot)


def _settle(e: EngineTables, there: Loads, i: int, slot: int) -> None:
    there.in_flight[i] -= 1
    there.kv_tokens[i] -= e.charged_tokens[slot]
    loads.subtract(there.digits[i], e.charged_units[slot])
    there.load_s[i] = loads.seconds(there.digits[i])


# The rules


def choose(
    w: Placing, prompt_tokens: int, output_tokens: float, count: int, rng: np.random.Generator
) -> tuple[int, float]:
    """The chosen instance, and what its load grows by, s (0 where no rule looks at it).

    ``count``: of those who can have the request, at least one.
    """
    kind, there, takes, scores = w.rule.kind, w.there, w.takes, w.scores[0]
    if kind == TURNS:
        return _whose_turn(w.rule.weights, there.owed, takes), 0.0
    if kind == RANDOM:
        return _at_random(w.rule.weights, takes, rng), 0.0
    if kind == SINGLE:
        single = w.rule.single >= 0 and takes[w.rule.single]
        return w.rule.single if single else _nth(takes, 0), 0.0
    if kind == POWER_OF_TWO:
        return _better_of_two(w.pool, there, takes, count, rng), 0.0
    if kind >= MIN_MAX:
        return _by_load(w, prompt_tokens, output_tokens, rng)
    for i in range(len(takes)):
        scores[i] = there.in_flight[i]
        if kind == CAPACITY:
            scores[i] = (there.in_flight[i] + 1) / w.pool.members[i, CAPACITY_PER_S]
    return _lowest(scores, takes, rng), 0.0


def _by_load(
    w: Placing, prompt_tokens: int, output_tokens: float, rng: np.random.Generator
) -> tuple[int, float]:
    """``core/policies/workload.py``: the loads that would result are compared."""
    kind, pool, there, takes = w.rule.kind, w.pool, w.there, w.takes
    after_s, charges_s = w.scores[0], w.scores[1]
    highest = -math.inf
    for i in range(len(takes)):
        if not takes[i]:
            continue
        time_s = 1.0
        if kind != MEMORY:
            time_s = request_time_s(member_of(pool.members, i), prompt_tokens, output_tokens)
        usage = there.kv_tokens[i] / pool.members[i, KV_CAPACITY_TOKENS]
        charges_s[i] = time_s if kind == LEAST_WORK else workload(time_s, usage, pool.theta)
        after_s[i] = there.load_s[i] + charges_s[i]
        highest = max(highest, there.load_s[i])
    if kind != PAPER:
        i = _lowest(after_s, takes, rng)
        return i, charges_s[i]
    i = -1
    for j in range(len(takes)):
        if takes[j] and (i < 0 or max(highest, after_s[j]) < max(highest, after_s[i])):
            i = j
    return i, charges_s[i]


def _lowest(scores: FloatArray, takes: Flags, rng: np.random.Generator) -> int:
    """``base.lowest_with_random_ties``."""
    best, ties, first = math.inf, 0, -1
    for i in range(len(scores)):
        if not takes[i]:
            continue
        if first < 0 or scores[i] < best:
            best, ties, first = scores[i], 1, i
        elif scores[i] == best:
            ties += 1
    if ties == 1:
        return first
    left = int(rng.random() * ties)
    for i in range(first, len(scores)):
        if takes[i] and scores[i] == best:
            if left == 0:
                return i
            left -= 1
    return first


def _nth(takes: Flags, number: int) -> int:
    """The candidate of that number, from 0."""
    for i in range(len(takes)):
        if takes[i]:
            if number == 0:
                return i
            number -= 1
    return -1


def _better_of_two(
    pool: PoolTable, there: Loads, takes: Flags, count: int, rng: np.random.Generator
) -> int:
    first = int(rng.random() * count)
    if count == 1:
        return _nth(takes, first)
    second = (first + 1 + int(rng.random() * (count - 1))) % count
    one, other = _nth(takes, first), _nth(takes, second)
    capacity = pool.members[:, CAPACITY_PER_S]
    score = (there.in_flight[one] + 1) / capacity[one]
    return one if score <= (there.in_flight[other] + 1) / capacity[other] else other


def _whose_turn(weights: FloatArray, owed: FloatArray, takes: Flags) -> int:
    """``rotation.RoundRobin``'s turns."""
    total = 0.0
    for i in range(len(owed)):
        if takes[i]:
            total += weights[i]
    chosen = -1
    for i in range(len(owed)):
        if takes[i]:
            owed[i] = min(max(owed[i], -total), total) + weights[i]
            if chosen < 0 or owed[i] > owed[chosen]:
                chosen = i
    owed[chosen] -= total
    return chosen


def _at_random(weights: FloatArray, takes: Flags, rng: np.random.Generator) -> int:
    total = 0.0
    for i in range(len(weights)):
        if takes[i]:
            total += weights[i]
    drawn = rng.random() * total
    chosen, reached = -1, 0.0
    for i in range(len(weights)):
        if takes[i]:
            chosen = i
            reached += weights[i]
            if reached > drawn:
                break
    return chosen
