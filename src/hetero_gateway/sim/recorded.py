"""A recorded run repeated in simulated engines. Pure.

It answers two questions on one record. *As placed*: every request is on its recorded instance, from
the time of its placement: differences to the measured times are the engines' (profiles, networks).
*By the policy*: the gateway's scheduler decides again, from the same arrivals and the same
predictions: differences to "as placed" are the scheduler's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero_gateway.core.costs.arrays import Flags, FloatArray, Integers
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.lengths.predictors import ConstantPredictor
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.sim.cluster import (
    Records,
    SimulatedInstance,
    simulate,
    with_first_token_s,
)
from hetero_gateway.sim.engine import DEFAULT_MAX_BATCHED_TOKENS, Scheduling
from hetero_gateway.sim.figures import Distribution
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.kernel import FINISHED, FIRST, PREEMPTED
from hetero_gateway.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Placements:
    """Requests on their instances, in any order; all (N,).

    Args:
        instance: index.
        placed_s: when it was sent there, at least 0.
        prompt_tokens, output_tokens: at least 1.
    """

    instance: Integers
    placed_s: FloatArray
    prompt_tokens: Integers
    output_tokens: Integers


def run_as_placed(
    profiles: Sequence[Profile],
    placements: Placements,
    scheduling: Scheduling = "chunked",
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
) -> Records:
    """The times in engines with these profiles; in the order of the placements.

    A request that an engine can never hold is refused: its times are nan.
    """
    records = replace(
        Records.empty(placements.placed_s.size),
        instance=placements.instance.astype(np.int64),
        placed_s=placements.placed_s.astype(np.float64),
    )
    fleet = EngineFleet(profiles, scheduling=scheduling, max_batched_tokens=max_batched_tokens)
    owners: dict[int, int] = {}
    columns = (
        records.instance,
        records.placed_s,
        placements.prompt_tokens,
        placements.output_tokens,
    )
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    until_s = 0.0
    for request in np.argsort(records.placed_s, kind="stable").tolist():
        i, now_s, prompt, output = rows[request]
        if now_s > until_s:
            _work_until(fleet, now_s, owners, records)
            until_s = now_s
        if prompt + output - 1 <= fleet.capacity_tokens[i]:
            slot = fleet.new_slot()
            owners[slot] = request
            fleet.submit(i, slot, prompt, output, now_s)
    _work_until(fleet, math.inf, owners, records)
    return with_first_token_s(records, profiles)


def _work_until(
    fleet: EngineFleet, until_s: float, owners: Mapping[int, int], records: Records
) -> None:
    """Let time pass and record the fleet's log; slots of finished requests are free again."""
    complete = False
    while not complete:
        complete = fleet.advance(until_s, False)
        for at in range(1, 1 + fleet.log[0]):
            slot, kind = fleet.log[at] >> 2, fleet.log[at] & 3
            if kind == FIRST:
                records.first_token_s[owners[slot]] = fleet.log_s[at]
            elif kind == PREEMPTED:
                records.preemptions[owners[slot]] += 1
            elif kind == FINISHED:
                records.finish_s[owners[slot]] = fleet.log_s[at]
                fleet.free_slots.append(slot)


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests of a recorded run, in the order of arrival; all (N,). Times as in ``Records``.

    Args:
        placements: where and when they went.
        arrival_s: at least 0, never decreasing.
        predicted_tokens: their output, as the gateway predicted it.
        first_token_s, finish_s: as measured.
        streams: whether the first token was seen when it was made.
    """

    placements: Placements
    arrival_s: FloatArray
    predicted_tokens: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    streams: Flags


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Of one set of requests: s, and output tokens/s over all of them."""

    requests: int
    latency_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    output_tokens_per_s: float


def figures(
    recording: Recording,
    instance: Integers,
    first_token_s: FloatArray,
    finish_s: FloatArray,
    only: int,
) -> RequestFigures:
    """Summarise times, measured or simulated; of one instance (index), or -1: of all.

    TTFT and TPOT are of those that stream.
    """
    chosen = np.isfinite(finish_s)
    if only >= 0:
        chosen &= instance == only
    seen = chosen & recording.streams
    output = recording.placements.output_tokens
    several = seen & (output > 1)
    tokens = float(output[chosen].sum())
    start_s = float(recording.arrival_s[chosen].min(initial=math.inf))
    end_s = float(finish_s[chosen].max(initial=-math.inf))
    return RequestFigures(
        int(chosen.sum()),
        Distribution.of((finish_s - recording.arrival_s)[chosen]),
        Distribution.of((first_token_s - recording.arrival_s)[seen]),
        Distribution.of((finish_s - first_token_s)[several] / (output[several] - 1)),
        tokens / (end_s - start_s) if end_s > start_s else math.nan,
    )


@dataclass(frozen=True, slots=True)
class Replayed:
    """Measured, as placed and by each policy that decided again: of all, then of each instance."""

    measured: tuple[RequestFigures, ...]
    as_placed: tuple[RequestFigures, ...]
    by_policy: dict[str, tuple[RequestFigures, ...]]


def replay(
    recording: Recording,
    instances: Sequence[SimulatedInstance],
    policies: Sequence[str],
    scheduling: Scheduling = "chunked",
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
) -> Replayed:
    """Run a recording again.

    Args:
        policies: by name; none: only as placed.

    Raises:
        KeyError: there is no such policy.
    """
    placements = recording.placements
    profiles = [instance.profile for instance in instances]
    placed = run_as_placed(profiles, placements, scheduling, max_batched_tokens)
    runs = [
        (placements.instance, recording.first_token_s, recording.finish_s),
        (placements.instance, placed.first_token_s, placed.finish_s),
    ]
    for policy in policies:
        means = float(placements.prompt_tokens.mean()), float(placements.output_tokens.mean())
        first = PolicyOptions(single_instance=instances[0].instance_id)
        rng = np.random.default_rng(0)
        decided = simulate(
            instances,
            Workload(recording.arrival_s, placements.prompt_tokens, placements.output_tokens),
            Scheduler(make_policy(policy, first), rng, reference=means, prefix_cache=False),
            ConstantPredictor(means[1]),
            scheduling=scheduling,
            max_batched_tokens=max_batched_tokens,
            predictions=recording.predicted_tokens,
        )
        runs.append((decided.instance, decided.first_token_s, decided.finish_s))
    measured, as_placed, *by_policy = (
        tuple(figures(recording, *run, only) for only in range(-1, len(instances))) for run in runs
    )
    return Replayed(measured, as_placed, dict(zip(policies, by_policy, strict=True)))
