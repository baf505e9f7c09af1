"""Policies that place every request on arrival: their rules, and the loop.

``choose`` has the rules of ``core/policies``: ties are drawn by the scheduler's own generator, in
the same order.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.policies.estimates import holds, request_time_s
from hetero_gateway.core.policies.member import Member
from hetero_gateway.sim.compiled import loads
from hetero_gateway.sim.compiled.tables import (
    DIGITS,
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
    set_members,
    start,
    table,
)
from hetero_gateway.sim.kernel import FINISHED, FIRST, PREEMPTED, advance, change_slowdown

# The rules.
TURNS, RANDOM, LEAST_REQUESTS, CAPACITY, POWER_OF_TWO, SINGLE = range(6)
# These use the load: what they charge matters.
MIN_MAX, PAPER, MEMORY, LEAST_WORK = range(6, 10)

# What is on an instance: requests, KV tokens, load in s and as ``loads.py`` has it; and the turns
# that it is ``owed``, of how many, ``share``. Of the current request: whether it ``takes`` it, its
# cost, and the resulting increase of its load.
INSTANCE = record(
    ("member", MEMBER),
    *fields("i8", "in_flight kv_tokens"),
    ("digits", "i8", (DIGITS,)),
    *fields("f8", "load_s owed share score charge_s"),
    *fields("?", "takes"),
)
# ``single``: index of the one that gets everything; -1: none is named. ``smallest_tokens``: a
# request that takes no more fits everywhere. ``arrived``, ``slowed``: the requests and the
# slowdowns that came already.
RULE = record(*fields("i8", "kind single arrived slowed"), *fields("f8", "theta smallest_tokens"))


class Placing(NamedTuple):
    """Everything of a simulation except the engines, whose tables grow. ``rule``: one row."""

    requests: Table
    instances: Table
    slowdowns: Table
    rule: Table
    means: BucketMeans


def new_placing(
    requests: Table,
    members: Sequence[Member],
    slowdowns: Table,
    means: BucketMeans,
    kind: int,
    theta: float,
) -> Placing:
    instances, rule = table(len(members), INSTANCE), table(1, RULE)
    set_members(instances["member"], members)
    instances["share"] = 1.0
    rule["kind"], rule["single"], rule["theta"] = kind, -1, theta
    rule["smallest_tokens"] = instances["member"]["kv_limit_tokens"].min()
    return Placing(requests, instances, slowdowns, rule, means)


def place_all(e: EngineTables, w: Placing, rng: np.random.Generator) -> bool:
    """Run the workload to its end; False: up to a request for which there is no slot."""
    requests, slowdowns, rule = w.requests, w.slowdowns, w.rule[0]
    while True:
        arrival_s = slowed_s = math.inf
        if rule.arrived < len(requests):
            arrival_s = requests[rule.arrived].arrival_s
        if rule.slowed < len(slowdowns):
            slowed_s = slowdowns[rule.slowed].at_s
        now_s = min(arrival_s, slowed_s)
        complete = advance(e.q, e.n, e.x, e.c, e.k, e.first, e.log, e.log_s, now_s, False)
        _tell(e, w)
        if not complete:
            continue
        if now_s == math.inf:
            return True
        if slowed_s <= arrival_s:
            slow = slowdowns[rule.slowed]
            change_slowdown(e.n, e.x, e.first, slow.instance, slow.factor, now_s)
            rule.slowed += 1
            continue
        if e.free[0] == 0:
            return False
        r = requests[rule.arrived]
        predict(w.means, r)
        count = _candidates(w, r.prompt_tokens + r.predicted_tokens)
        if count > 0:
            r.instance = choose(w, r, count, rng)
            _start(e, w, rule.arrived)
        rule.arrived += 1


# What happens on the instances


def _candidates(w: Placing, tokens: float) -> int:
    """Set who can hold a request of so many tokens; returns how many can."""
    count, all_can = 0, tokens <= w.rule[0].smallest_tokens
    for there in w.instances:
        there.takes = all_can or holds(member_of(there.member), tokens)
        count += there.takes
    return count


def _start(e: EngineTables, w: Placing, request: int) -> None:
    r = w.requests[request]
    slot = start(e, r, request, r.arrival_s)
    if slot < 0:
        return
    there, s = w.instances[r.instance], e.slots[slot]
    s.charged_tokens = r.prompt_tokens + round(r.predicted_tokens)
    there.kv_tokens += s.charged_tokens
    there.in_flight += 1
    if w.rule[0].kind >= MIN_MAX:
        loads.set_units(s.charged_units, there.charge_s)
        loads.add(there.digits, s.charged_units)
        there.load_s = loads.seconds(there.digits)


def _tell(e: EngineTables, w: Placing) -> None:
    """Report the engines' logged events."""
    for at in range(1, 1 + e.log[0]):
        slot, kind = e.log[at] // 4, e.log[at] % 4
        r = w.requests[e.slots[slot].request]
        if kind == FIRST:
            r.first_token_s = e.log_s[at]
        elif kind == PREEMPTED:
            r.preemptions += 1
        elif kind == FINISHED:
            r.finish_s = e.log_s[at]
            learn(w.means, r)
            _settle(w.instances[r.instance], e.slots[slot])
            give_back(e, slot)


def _settle(there: Row, s: Row) -> None:
    there.in_flight -= 1
    there.kv_tokens -= s.charged_tokens
    loads.subtract(there.digits, s.charged_units)
    there.load_s = loads.seconds(there.digits)


# The rules


def choose(w: Placing, r: Row, count: int, rng: np.random.Generator) -> int:
    """The chosen instance; its ``charge_s`` is the increase of its load, if a rule uses that.

    ``count``: of the instances that can take the request, at least one.
    """
    kind, single, instances = w.rule[0].kind, w.rule[0].single, w.instances
    if kind == TURNS:
        return _whose_turn(instances)
    if kind == RANDOM:
        return _at_random(instances, rng)
    if kind == SINGLE:
        return single if single >= 0 and instances[single].takes else _nth(instances, 0)
    if kind == POWER_OF_TWO:
        return _better_of_two(instances, count, rng)
    if kind >= MIN_MAX:
        return _by_load(instances, kind, w.rule[0].theta, r, rng)
    for there in instances:
        there.score = there.in_flight
        if kind == CAPACITY:
            there.score = _per_capacity(there)
    return _lowest(instances, rng)


def _by_load(instances: Table, kind: int, theta: float, r: Row, rng: np.random.Generator) -> int:
    """``core/policies/workload.py``: the resulting loads are compared."""
    highest = -math.inf
    for there in instances:
        if not there.takes:
            continue
        time_s = 1.0
        if kind != MEMORY:
            time_s = request_time_s(member_of(there.member), r.prompt_tokens, r.predicted_tokens)
        usage = there.kv_tokens / there.member.kv_capacity_tokens
        there.charge_s = time_s if kind == LEAST_WORK else workload(time_s, usage, theta)
        there.score = there.load_s + there.charge_s
        highest = max(highest, there.load_s)
    if kind != PAPER:
        return _lowest(instances, rng)
    i, lowest = -1, math.inf
    for j in range(len(instances)):
        if instances[j].takes and (i < 0 or max(highest, instances[j].score) < lowest):
            i, lowest = j, max(highest, instances[j].score)
    return i


def _lowest(instances: Table, rng: np.random.Generator) -> int:
    """``base.lowest_with_random_ties``."""
    best, ties, first = math.inf, 0, -1
    for i in range(len(instances)):
        there = instances[i]
        if not there.takes:
            continue
        if first < 0 or there.score < best:
            best, ties, first = there.score, 1, i
        elif there.score == best:
            ties += 1
    if ties == 1:
        return first
    left = int(rng.random() * ties)
    for i in range(first, len(instances)):
        if instances[i].takes and instances[i].score == best:
            if left == 0:
                return i
            left -= 1
    return first


def _nth(instances: Table, number: int) -> int:
    """The candidate with that number, from 0."""
    for i in range(len(instances)):
        if instances[i].takes:
            if number == 0:
                return i
            number -= 1
    return -1


def _better_of_two(instances: Table, count: int, rng: np.random.Generator) -> int:
    first = int(rng.random() * count)
    if count == 1:
        return _nth(instances, first)
    second = (first + 1 + int(rng.random() * (count - 1))) % count
    one, other = _nth(instances, first), _nth(instances, second)
    return one if _per_capacity(instances[one]) <= _per_capacity(instances[other]) else other


def _per_capacity(there: Row) -> float:
    return float((there.in_flight + 1) / there.member.capacity)


def _whose_turn(instances: Table) -> int:
    """``rotation.RoundRobin``'s turns."""
    total = 0.0
    for there in instances:
        if there.takes:
            total += there.share
    chosen, most = -1, 0.0
    for i in range(len(instances)):
        there = instances[i]
        if there.takes:
            there.owed = min(max(there.owed, -total), total) + there.share
            if chosen < 0 or there.owed > most:
                chosen, most = i, there.owed
    instances[chosen].owed -= total
    return chosen


def _at_random(instances: Table, rng: np.random.Generator) -> int:
    total = 0.0
    for there in instances:
        if there.takes:
            total += there.share
    drawn = rng.random() * total
    chosen, reached = -1, 0.0
    for i in range(len(instances)):
        if instances[i].takes:
            chosen = i
            reached += instances[i].share
            if reached > drawn:
                break
    return chosen
