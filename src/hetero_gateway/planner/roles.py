"""Which instances should compute prompts, and which answer: roles, found by simulation. Pure.

docs/design/disaggregation.md explains why each request's own best is not the best of all. Here the
recent mix is simulated under candidate roles, including *nothing is split* and *no roles*, and the
best one is used. Run it in a process of its own: it takes a second of CPU time or more.

Candidates follow comparative advantage: instances are ordered by their prompt's time over their
answer's; the first m get prompts and the others answers, for some m about the one at which both
have as much to do. A role is a price; a high one is a rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.core.instances.pairs import Link, Pairs
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.policies.legs import RolePrice
from hetero_gateway.core.policies.slo import Slo, Slos
from hetero_gateway.core.scheduling.discipline_settings import DEFAULT_DISCIPLINE
from hetero_gateway.core.scheduling.disciplines import make_discipline
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.result import RunResult, summarise
from hetero_gateway.sim.workload import Workload

Roles = Mapping[InstanceId, RolePrice] | None


@dataclass(frozen=True, slots=True)
class RoleQuestion:
    """Which roles are best for a mix.

    Args:
        instances: all that serve it.
        mix: recent requests, with their times.
        links: of pairs, as far as they are known.
        kv_bytes_per_token: of handed-over prompts.
        slo: limits; empty if there are none.
    """

    instances: tuple[SimulatedInstance, ...]
    mix: Workload
    links: Mapping[tuple[InstanceId, InstanceId], Link]
    kv_bytes_per_token: float
    slo: Slo | None


# Seconds: one that is paid in a burst, and one that never is.
SOFT_S, HARD_S = 10.0, 1000.0
# The first look at every candidate uses so many requests, the second, of the best ones, all of them
# twice in a row, since a backlog that grows shows late.
_FIRST_LOOK, _SECOND_LOOKS = 500, 3
# Shares within the limits that differ by no more are equal: then the latency decides.
_NOISE = 0.01
# Splitting at all must gain more than ``_NOISE`` of either, and not cost more of the latency than
# this; if more than ``_MUCH`` of the requests are within the limits by it, each further share of
# them is worth so many of the latency.
_MOST_LATENCY, _MUCH, _MISS_WEIGHT = 1.02, 0.05, 4.0


def legs_of(roles: Roles) -> dict[InstanceId, str]:
    """``prefill`` or ``decode``, for each instance that has a role."""
    return {
        instance: "prefill" if price.decode_s > price.prefill_s else "decode"
        for instance, price in (roles or {}).items()
    }


def told(roles: Roles) -> str:
    """In words."""
    if roles is None:
        return "no request is split"
    if not roles:
        return "each request is split where that is cheaper"
    legs = legs_of(roles)
    prompts, answers = (
        ", ".join(sorted(i for i in legs if legs[i] == leg)) for leg in ("prefill", "decode")
    )
    return f"prompts on {prompts}; answers on {answers}"


def roles_for(question: RoleQuestion) -> Roles:
    """The answer: see ``find_roles``."""
    return find_roles(
        question.instances,
        question.mix,
        lambda: Pairs(question.kv_bytes_per_token, question.links),
        question.slo or Slo(),
        heeds_slo=question.slo is not None,
    )


def split_of(order: Sequence[InstanceId], prefills: int, price_s: float) -> Roles:
    """The first so many get prompts, the others answers."""
    return {
        instance: RolePrice(decode_s=price_s) if k < prefills else RolePrice(prefill_s=price_s)
        for k, instance in enumerate(order)
    }


def advantage_order(
    instances: Sequence[SimulatedInstance], prompt_tokens: float, output_tokens: float
) -> tuple[list[InstanceId], int]:
    """Instances, those best suited to prompts first; and how many of them balance the work."""
    told = []
    for one in instances:
        if one.believed is not None:
            prompt_s = max(1e-9, request_time_s(one.believed, prompt_tokens, 0.0))
            answer_s = request_time_s(one.believed, prompt_tokens, output_tokens) - prompt_s
            told.append((prompt_s / max(1e-9, answer_s), one.instance_id, prompt_s, answer_s))
    told.sort()
    balanced = 1
    for m in range(1, len(told)):
        prompts = sum(1 / prompt_s for _, _, prompt_s, _ in told[:m])
        answers = sum(1 / max(1e-9, answer_s) for _, _, _, answer_s in told[m:])
        balanced = m
        if prompts >= answers:
            break
    return [instance for _, instance, _, _ in told], balanced


def candidates(
    instances: Sequence[SimulatedInstance], prompt_tokens: float, output_tokens: float
) -> list[Roles]:
    """The candidates; the first splits nothing."""
    order, balanced = advantage_order(instances, prompt_tokens, output_tokens)
    found: list[Roles] = [None, {}]
    about = sorted({balanced - 2, balanced - 1, balanced, balanced + 1})
    for m in about:
        if 1 <= m < len(order):
            found += [split_of(order, m, SOFT_S), split_of(order, m, HARD_S)]
    return found


def find_roles(
    instances: Sequence[SimulatedInstance],
    mix: Workload,
    pairs: Callable[[], Pairs],
    slo: Slo,
    *,
    heeds_slo: bool = True,
    max_batched_tokens: int = 2048,
    seed: int = 0,
) -> Roles:
    """The best roles for this mix; None: it is best not to split.

    Args:
        mix: recent requests, with their times.
        pairs: makes new ones: a simulation notes its transfers in them.
        slo: limits; the share of requests within them goes before the mean latency.
    """
    reference = float(np.mean(mix.prompt_tokens)), float(np.mean(mix.output_tokens))
    if len(pairs()) == 0 or reference[1] <= 1:
        return None

    def run(roles: Roles, workload: Workload) -> RunResult:
        return run_under(
            roles, instances, workload, pairs, slo, reference,
            heeds_slo=heeds_slo, max_batched_tokens=max_batched_tokens, seed=seed,
        )  # fmt: skip

    tried = candidates(instances, *reference)
    if len(mix) > _FIRST_LOOK:
        few = _first(mix, _FIRST_LOOK)
        best = _in_order([run(roles, few) for roles in tried[1:]])[:_SECOND_LOOKS]
        tried = [None, *(tried[1 + k] for k in best)]
    twice = _once_more(mix)
    unsplit, *runs = [run(roles, twice) for roles in tried]
    worth = [k for k, split in enumerate(runs) if _is_worth(split, unsplit)]
    best = _in_order([runs[k] for k in worth])
    return tried[1 + worth[best[0]]] if best else None


def run_under(
    roles: Roles,
    instances: Sequence[SimulatedInstance],
    workload: Workload,
    pairs: Callable[[], Pairs],
    slo: Slo,
    reference: tuple[float, float],
    *,
    heeds_slo: bool = True,
    max_batched_tokens: int = 2048,
    seed: int = 0,
) -> RunResult:
    """The result of a workload under these roles, and ``finish-time``.

    Args:
        reference: (prompt, output) tokens of the mean request.

    See ``find_roles`` for the others.
    """
    options = PolicyOptions(slos=Slos(slo) if heeds_slo else None)
    scheduler = Scheduler(
        make_policy("finish-time", options),
        np.random.default_rng((seed, 2)),
        reference=reference,
        discipline=make_discipline(DEFAULT_DISCIPLINE),
        prefix_cache=False,
    )
    records = simulate(
        instances, workload, scheduler, BucketMeanPredictor(reference[1]),
        max_batched_tokens=max_batched_tokens, compiled=False,
        pairs=None if roles is None else pairs(), roles=roles,
    )  # fmt: skip
    return summarise(workload, records, len(instances), slo)


def _in_order(runs: Sequence[RunResult]) -> list[int]:
    """Their indices, the best one first."""
    most = max((run.slo_share for run in runs), default=0.0) - _NOISE

    def rank(k: int) -> tuple[float, float]:
        share = runs[k].slo_share
        return min(share, most), -runs[k].latency_s.mean

    return sorted(range(len(runs)), key=rank, reverse=True)


def _is_worth(split: RunResult, unsplit: RunResult) -> bool:
    """Whether this splitting is better than none."""
    gain = split.slo_share - unsplit.slo_share
    ratio = split.latency_s.mean / unsplit.latency_s.mean
    if gain <= _NOISE:
        return gain >= -_NOISE / 2 and ratio < 1 - _NOISE
    return ratio <= _MOST_LATENCY + _MISS_WEIGHT * max(0.0, gain - _MUCH)


def _once_more(workload: Workload) -> Workload:
    """Itself, and the same again as it ends."""
    arrival_s, count = workload.arrival_s, len(workload)
    mean_s = float(arrival_s[-1] - arrival_s[0]) / max(1, count - 1)
    return Workload(
        np.concatenate((arrival_s, arrival_s + count * mean_s)),
        np.tile(workload.prompt_tokens, 2),
        np.tile(workload.output_tokens, 2),
    )


def _first(workload: Workload, count: int) -> Workload:
    return Workload(
        workload.arrival_s[:count], workload.prompt_tokens[:count], workload.output_tokens[:count]
    )
