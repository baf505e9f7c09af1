"""Which simulations the compiled loops cover, and their input.

Everything else is left to the objects of ``cluster.py``: prefix caches, instances that die or
without constants for the scheduler, policies and predictors that are not built in, queue
disciplines of several rows.
"""

import math
from collections.abc import Callable, Sequence
from types import FunctionType
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
from hetero_gateway.core.policies.counting import CapacityWeighted, LeastRequests, PowerOfTwo
from hetero_gateway.core.policies.estimates import no_price
from hetero_gateway.core.policies.finish_time import DRAIN_FACTOR, FinishTime
from hetero_gateway.core.policies.rotation import RoundRobin, SingleInstance, WeightedRoundRobin
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.policies.workload import LeastWork, MemoryBased, MinMax, Paper
from hetero_gateway.core.scheduling.decider import MOST_CANDIDATES
from hetero_gateway.core.scheduling.disciplines import Shortest
from hetero_gateway.core.scheduling.scheduler import Fresh, Scheduler
from hetero_gateway.core.types import MOST_TOKENS
from hetero_gateway.sim.compiled import late_binding, loads, placing, progress
from hetero_gateway.sim.compiled.tables import (
    REQUEST,
    SLOT,
    SLOWDOWN,
    BucketMeans,
    EngineTables,
    Table,
    bucket_means,
    set_members,
    table,
    with_room,
)
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.jit import with_function
from hetero_gateway.sim.workload import Fault, FaultKind, Workload, fault_events

# Rules that use only the load on an instance; without sessions and prefixes, two more are the same.
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

# All parts of ``FinishTime``. Any other it may get is a rule unknown here.
_FINISH_TIME = {"name", "objective", "prefill_depth", "_first_token_weight", "slos", "own_price"}

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
    """A function that runs this simulation over arrays, into ``records``; None: use the objects.

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
    if predictions is not None:
        means = bucket_means(1.0, learns=False, told=True)
    if means is None:
        return None
    requests = _requests(workload, predictions)
    if not _bounded(fresh, requests, means):
        return None
    slowdowns = slowdowns_of(faults)
    if isinstance(fresh.policy, FinishTime):
        world = _world(fresh, fresh.policy, requests, means, interval_s)
        if world is None:
            return None

        loop = late_binding.run_all
        if fresh.policy.own_price is not None:
            loop = with_function(loop, no_price, fresh.policy.own_price)

        def run_late(compiled: Callable[[Any], Any]) -> None:
            # A slot for each that may be on an instance, so that the loop needs no more.
            engines = engines_of(fleet, world.p.there.size)
            compiled(loop)(engines, world, slowdowns, fresh.rng)
            _tell(requests, records)

        return run_late
    world_at_once = _placing(fresh, requests, slowdowns, means)
    if world_at_once is None:
        return None

    def run(compiled: Callable[[Any], Any]) -> None:
        loop, engines = compiled(placing.place_all), engines_of(fleet, 0)
        while not loop(engines, world_at_once, fresh.rng):
            engines = with_room(engines)
        _tell(requests, records)

    return run


def _tell(requests: Table, records: Any) -> None:
    """Write their outcomes."""
    for name in ("instance", "placed_s", "first_token_s", "finish_s", "preemptions"):
        getattr(records, name)[:] = requests[name]


def _placing(
    fresh: Fresh, requests: Table, slowdowns: Table, means: BucketMeans
) -> placing.Placing | None:
    """None: an unknown policy, or one that has been used."""
    policy, pool = fresh.policy, fresh.pool
    kind = _PLAIN_RULES.get(type(policy))
    if isinstance(policy, RoundRobin) and type(policy) in (RoundRobin, WeightedRoundRobin):
        if policy.owed:
            return None
        kind = placing.RANDOM if policy.randomised else placing.TURNS
    elif type(policy) is SingleInstance:
        kind = placing.SINGLE
    if kind is None:
        return None
    world = placing.new_placing(requests, pool.members, slowdowns, means, kind, fresh.theta)
    if type(policy) is WeightedRoundRobin:
        world.instances["share"] = world.instances["member"]["weight"]
    if isinstance(policy, SingleInstance) and policy.instance_id is not None:
        world.rule["single"] = pool.position.get(policy.instance_id, -1)
    return world


def _world(
    fresh: Fresh, policy: FinishTime, requests: Table, means: BucketMeans, interval_s: float
) -> late_binding.World | None:
    """None: not all instances can hold all requests, or these have different limits."""
    pool = fresh.pool
    slo = Slo() if policy.slos is None else policy.slos.everyones()
    tokens = float(requests.prompt_tokens.max()) + _longest(requests, means)
    if (
        type(policy) is not FinishTime
        or slo is None
        or not isinstance(policy.own_price, FunctionType | None)
        or not vars(policy).keys() <= _FINISH_TIME
        or tokens > pool.smallest_capacity_tokens
    ):
        return None
    # As many as may be sent there, and one that tests whether it is still slow.
    most_streams = int(max(member.seats for member in pool.members)) + 2
    there = progress.new_progress(requests, pool.members, most_streams)
    world = late_binding.new_world(there, means, float(fresh.reference[1]))
    queue = world.queue
    queue["prefill_depth"] = policy.prefill_depth
    queue["always_drains"] = policy.objective == "makespan"
    queue["drain_factor"] = DRAIN_FACTOR[policy.objective]
    queue["interval_s"] = interval_s
    queue["has_slo"], queue["slo"] = policy.slos is not None, slo
    if isinstance(fresh.discipline, Shortest):
        queue["sorts"], queue["patience_s"] = True, fresh.discipline.patience_s
        assert pool.yardstick is not None
        set_members(queue["yardstick"], [pool.yardstick])
    return world


def _means(predictor: OutputLengthPredictor) -> BucketMeans | None:
    """The predictor as arrays; None: it is another one, or has already learnt something."""
    if type(predictor) is ConstantPredictor:
        return bucket_means(predictor.mean_tokens, learns=False)
    if type(predictor) is BucketMeanPredictor and predictor.prior_requests > 0:
        if not predictor.has_learnt:
            prior = float(predictor.prior_tokens), float(predictor.prior_requests)
            return bucket_means(*prior, learns=True)
    return None


def _requests(workload: Workload, predictions: FloatArray | None) -> Table:
    requests = table(len(workload.arrival_s), REQUEST)
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        requests[name] = getattr(workload, name)
    # ``int.bit_length``.
    requests["length_class"] = np.frexp(requests["prompt_tokens"].astype(np.float64))[1]
    requests["instance"] = -1
    requests["placed_s"] = requests["first_token_s"] = requests["finish_s"] = math.nan
    if predictions is not None:
        requests["predicted_tokens"] = predictions
    return requests


def _bounded(fresh: Fresh, requests: Table, means: BucketMeans) -> bool:
    """Whether every number is one that a scheduler accepts, and sums stay within ``loads``."""
    prompt, longest = float(requests.prompt_tokens.max()), _longest(requests, means)
    lowest = min(means.prior_tokens, requests.predicted_tokens.min())
    if not (lowest >= 0 and prompt + longest <= MOST_TOKENS):
        return False
    longest_s = max(fresh.pool.request_times_s(prompt, longest))
    return longest_s * len(requests.arrival_s) < loads.MOST_SUM_S and fresh.theta > 0


def _longest(requests: Table, means: BucketMeans) -> float:
    """The most output tokens that a request has or is predicted."""
    lengths = requests.output_tokens.max(), requests.predicted_tokens.max()
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
    slots_table = table(len(q), SLOT)
    slots_table["request"] = -1
    capacity = np.array(fleet.capacity_tokens, np.int64)
    k = None if c is None else k
    return EngineTables(q, n, x, c, k, first, log, log_s, slots_table, free, capacity)


def slowdowns_of(faults: Sequence[Fault]) -> Table:
    """When the steps of which instance begin to take how many times as long."""
    events = fault_events(faults)
    slowdowns = table(len(events), SLOWDOWN)
    slowdowns["at_s"] = [event.at_s for event in events]
    slowdowns["instance"] = [event.fault.instance for event in events]
    slowdowns["factor"] = [math.prod(event.holding) for event in events]
    return slowdowns
