"""Which simulations the compiled loops cover, and what they are made of.

All else is left to the objects of ``cluster.py``: prefix caches, instances that die or that the
scheduler has no constants for, policies and predictors that are not built in, queue disciplines.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    NormalPredictor,
    OutputLengthPredictor,
)
from hetero_gateway.core.policies.affinity import PrefixAffinity, Session
from hetero_gateway.core.policies.base import Policy
from hetero_gateway.core.policies.counting import CapacityWeighted, LeastRequests, PowerOfTwo
from hetero_gateway.core.policies.finish_time import DRAIN_FACTOR, FinishTime
from hetero_gateway.core.policies.rotation import RoundRobin, SingleInstance, WeightedRoundRobin
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.policies.workload import LeastWork, MemoryBased, MinMax, Paper
from hetero_gateway.core.scheduling import pool as core_pool
from hetero_gateway.core.scheduling.decider import MOST_CANDIDATES
from hetero_gateway.core.scheduling.scheduler import Fresh, Scheduler
from hetero_gateway.core.types import MOST_TOKENS
from hetero_gateway.sim.compiled import late_binding, loads, placing, progress
from hetero_gateway.sim.compiled.tables import (
    BucketMeans,
    EngineTables,
    PoolTable,
    Requests,
    Slowdowns,
    bucket_means,
    with_room,
)
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.workload import Fault, FaultKind, Workload, fault_events

# Rules that look at nothing but what is on an instance; without sessions and prefixes, two more
# are the same.
_PLAIN_RULES: dict[type[Any], int] = {
    LeastRequests: placing.LEAST_REQUESTS,
    PrefixAffinity: placing.LEAST_REQUESTS,
    CapacityWeighted: placing.CAPACITY,
    Session: placing.CAPACITY,
    PowerOfTwo: placing.POWER_OF_TWO,
    MinMax: placing.MIN_MAX,
    Paper: placing.PAPER,
    MemoryBased: placing.MEMORY,
    LeastWork: placing.LEAST_WORK,
}

# All that ``FinishTime`` consists of. Whatever else it may get is a rule that is not known here.
_FINISH_TIME = {"objective", "prefill_depth", "_first_token_weight", "slos"}

# Runs a workload to its end, given how to compile a loop.
Run = Callable[[Callable[[Any], Any]], None]


def covered(
    scheduler: object,
    predictor: OutputLengthPredictor,
    fleet: EngineFleet,
    model: str,
    workload: Workload,
    faults: Sequence[Fault],
    predictions: FloatArray | None,
    interval_s: float,
    records: Any,
) -> Run | None:
    """What runs this simulation over arrays, into ``records``; None: the objects have to.

    Args:
        scheduler: has its instances, and has placed nothing yet.
        interval_s: between two looks at the engines' steps.
    """
    if type(scheduler) is not Scheduler or workload.prefixes is not None:
        return None
    fresh = scheduler.fresh(model)
    if fresh is None or (fresh.policy.samples and len(fresh.pool.ids) > MOST_CANDIDATES):
        return None
    if any(fault.kind is not FaultKind.SLOW for fault in faults):
        return None
    if type(predictor) is NormalPredictor and predictions is None:
        predictions = predictor.next_predictions(len(workload.arrival_s))
    means = _means(predictor)
    if means is None:
        if predictions is None:
            return None
        means = bucket_means(1.0, learns=False)  # nobody asks
    requests = _requests(workload, predictions, records)
    if not _bounded(fresh, requests, means):
        return None
    slowdowns = slowdowns_of(faults)
    if isinstance(fresh.policy, FinishTime):
        world = _world(fresh, fresh.policy, requests, means, interval_s)
        if world is None:
            return None

        def run_late(compiled: Callable[[Any], Any]) -> None:
            # A slot for each that may be on an instance, so that the loop needs no more.
            engines = engines_of(fleet, world.p.there.size)
            compiled(late_binding.run_all)(engines, world, slowdowns, fresh.rng)

        return run_late
    rule = _rule(fresh.policy, fresh.pool)
    if rule is None:
        return None
    pool = pool_of(fresh)

    def run(compiled: Callable[[Any], Any]) -> None:
        world = placing.new_placing(requests, pool, rule, means, slowdowns)
        loop, engines = compiled(placing.place_all), engines_of(fleet, 0)
        while not loop(engines, world, fresh.rng):
            engines = with_room(engines)

    return run


def _rule(policy: Policy, pool: core_pool.Pool) -> placing.Rule | None:
    kind, weights, single = _PLAIN_RULES.get(type(policy)), np.ones(len(pool.ids)), -1
    if isinstance(policy, RoundRobin) and type(policy) in (RoundRobin, WeightedRoundRobin):
        if policy.owed:  # it has been used
            return None
        kind = placing.RANDOM if policy.randomised else placing.TURNS
        if type(policy) is WeightedRoundRobin:
            weights = np.array([member.weight for member in pool.members])
    elif type(policy) is SingleInstance:
        kind = placing.SINGLE
        if policy.instance_id is not None:
            single = pool.position.get(policy.instance_id, -1)
    return None if kind is None else placing.Rule(kind, weights, single)


def _world(
    fresh: Fresh, policy: FinishTime, requests: Requests, means: BucketMeans, interval_s: float
) -> late_binding.World | None:
    """None: not all instances can hold all requests, or these have not all the same limits."""
    pool = fresh.pool
    slo = Slo() if policy.slos is None else policy.slos.everyones()
    tokens = float(requests.prompt_tokens.max()) + _longest(requests, means)
    if (
        type(policy) is not FinishTime
        or slo is None
        or not vars(policy).keys() <= _FINISH_TIME
        or tokens > pool.smallest_capacity_tokens
    ):
        return None
    table = pool_of(fresh)
    # As many as may be sent there, and one that finds out whether it is still slow.
    most_streams = int(max(member.seats for member in pool.members)) + 2
    there = progress.new_progress(table.members, most_streams, len(requests.arrival_s))
    rules = late_binding.Rules(
        policy.prefill_depth,
        policy.objective == "makespan",
        DRAIN_FACTOR[policy.objective],
        interval_s,
        policy.slos is not None,
        slo,
    )
    reference_tokens = float(fresh.reference[1])
    return late_binding.new_world(requests, table, there, rules, means, reference_tokens)


def _means(predictor: OutputLengthPredictor) -> BucketMeans | None:
    """The predictor as arrays; None: it is another one, or has learnt something already."""
    if type(predictor) is ConstantPredictor:
        return bucket_means(predictor.mean_tokens, learns=False)
    if type(predictor) is BucketMeanPredictor and predictor.prior_requests > 0:
        if not predictor.has_learnt:
            prior = float(predictor.prior_tokens), float(predictor.prior_requests)
            return bucket_means(*prior, learns=True)
    return None


def _requests(workload: Workload, predictions: FloatArray | None, records: Any) -> Requests:
    prompt_tokens = np.ascontiguousarray(workload.prompt_tokens, np.int64)
    if predictions is None:
        predictions = np.zeros(0)
    return Requests(
        np.ascontiguousarray(workload.arrival_s, np.float64),
        prompt_tokens,
        np.ascontiguousarray(workload.output_tokens, np.int64),
        np.frexp(prompt_tokens.astype(np.float64))[1].astype(np.int64),  # ``int.bit_length``
        np.ascontiguousarray(predictions, np.float64),
        records.instance,
        records.placed_s,
        records.first_token_s,
        records.finish_s,
        records.preemptions,
    )


def _bounded(fresh: Fresh, requests: Requests, means: BucketMeans) -> bool:
    """Whether every number is one that a scheduler takes, and sums stay within ``loads``."""
    prompt, longest = float(requests.prompt_tokens.max()), _longest(requests, means)
    lowest = min(means.prior_tokens, requests.predictions.min(initial=1.0))
    if not (lowest >= 0 and prompt + longest <= MOST_TOKENS):
        return False
    longest_s = max(fresh.pool.request_times_s(prompt, longest))
    return longest_s * len(requests.arrival_s) < loads.MOST_SUM_S and fresh.theta > 0


def _longest(requests: Requests, means: BucketMeans) -> float:
    """The most output tokens that a request has or is predicted."""
    lengths = requests.output_tokens.max(), requests.predictions.max(initial=0.0)
    return float(max(means.prior_tokens, *lengths))


# Arrays of objects


def engines_of(fleet: EngineFleet, slots: int) -> EngineTables:
    """The engines of a fleet, whose tables are arrays; nothing is in them.

    ``slots``: so many are added to those that it has.
    """
    q, n, x, c, k, first, log, log_s = fleet.tables()
    nobodys = [*range(len(q) + slots - 1, len(q) - 1, -1), *fleet.free_slots]
    q = np.concatenate((q, np.zeros((slots, q.shape[1]), np.int64)))
    free = np.zeros(len(q) + 1, np.int64)
    free[0], free[1 : 1 + len(nobodys)] = len(nobodys), nobodys
    capacity = np.array(fleet.capacity_tokens, np.int64)
    return EngineTables(
        q, n, x, c, k, first, log, log_s, np.full(len(q), -1, np.int64), free, capacity,
        np.zeros(len(q), np.int64), np.zeros((len(q), loads.DIGITS), np.int64),
    )  # fmt: skip


def pool_of(fresh: Fresh) -> PoolTable:
    return PoolTable(np.array(fresh.pool.members, np.float64), fresh.theta)


def slowdowns_of(faults: Sequence[Fault]) -> Slowdowns:
    """When the steps of which instance begin to take how many times as long."""
    events = fault_events(faults)
    return Slowdowns(
        np.array([event.at_s for event in events], np.float64),
        np.array([event.fault.instance for event in events], np.int64),
        np.array([math.prod(event.holding) for event in events], np.float64),
    )
