"""The document of ``plan --json``, and the plan's machines in words."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hetero_gateway.deploy.command import transfer_arguments
from hetero_gateway.files.plan_request import PlanRequest
from hetero_gateway.planner.goals import Goals, usd_per_hour
from hetero_gateway.planner.plan import (
    InstanceType,
    Layout,
    Machine,
    Plan,
    PlanCandidate,
    SplitVerdict,
    SystemFigures,
    Unfit,
)
from hetero_gateway.planner.sizes import as_size
from hetero_gateway.sim.figures import finite


def document(plan: Plan, request: PlanRequest, seconds: float) -> dict[str, Any]:
    """The whole document.

    Args:
        seconds: how long the plan took.
    """
    best = plan.best
    return {
        "config": request.source,
        "model": request.model.name,
        "max_model_len": request.max_model_len,
        "goal": plan.goal,
        "policy": plan.policy,
        "memory": request.memory,
        "estimator": request.question.estimator,
        "seed": request.question.seed,
        "mean_prompt_tokens": plan.mean_prompt_tokens,
        "mean_output_tokens": plan.mean_output_tokens,
        "rate_per_s": plan.rate_per_s,
        "slo": _slo(request.question.goals),
        "lower_bound": plan.lower_bound,
        "took_s": round(seconds, 2),
        "best": _candidate(best, plan),
        "candidates": [_candidate(c, plan) for c in plan.candidates],
        "pareto": [plan.candidates.index(c) for c in plan.pareto],
        "types": [_type(key, t, plan) for key, t in sorted(plan.types.items())],
        "infeasible": _infeasible(plan),
        "notes": list(plan.notes),
        **({} if plan.splitting is None else {"splitting": _splitting(plan.splitting, plan)}),
    }


def _splitting(found: SplitVerdict, plan: Plan) -> dict[str, Any]:
    link = found.transfers.link
    counts = Counter(
        (machine.accelerator, t) for machine in plan.machines for t in plan.best.layouts[machine.id]
    )
    return {
        "transfer": {
            "gbit_per_s": found.transfers.gbit_per_s,
            "start_s": link.start_s,
            "kv_bytes_per_token": found.transfers.kv_bytes_per_token,
        },
        "pays": found.pays,
        "why_not": found.why_not,
        "rate_per_s": plan.rate_per_s,
        **{
            name: {"latency_mean_s": finite(figures[0]), "slo_share": finite(figures[1])}
            for name, figures in (("unsplit", found.unsplit), ("split", found.split))
        },
        "holds_per_s": found.holds_per_s,
        "instances": [
            {
                "accelerator": key[0],
                **size_document(key[1]),
                "count": counts[key],
                "group": group,
                "prefill": found.prefills.get(key),
                "arguments": transfer_arguments() if found.pays else [],
            }
            for key, group in sorted(found.groups.items())
        ],
    }


def _slo(goals: Goals) -> dict[str, Any] | None:
    if goals.slo is None:
        return None
    return {
        "ttft_s": finite(goals.slo.ttft_s),
        "tpot_s": finite(goals.slo.tpot_s),
        "share": goals.share,
    }


def _candidate(candidate: PlanCandidate, plan: Plan) -> dict[str, Any]:
    simulated, at_rate = candidate.simulated, candidate.at_rate
    return {
        "machines": [
            _machine(machine, candidate.layouts[machine.id], plan.types)
            for machine in plan.machines
        ],
        "throughput_tokens_per_s": simulated.tokens_per_s if simulated else None,
        "output_tokens_per_s": simulated.output_tokens_per_s if simulated else None,
        "alone_tokens_per_s": candidate.alone_tokens_per_s or None,
        "algorithm_1_tokens_per_s": {
            "paper": finite(candidate.estimate_paper_tokens_per_s),
            "unpadded": finite(candidate.estimate_tokens_per_s),
        },
        "batch": simulated.batch if simulated else None,
        "cached_share": finite(simulated.cached_share) if simulated else None,
        "at_rate": _figures(at_rate),
        "holds": candidate.holds,
        "goodput_per_s": candidate.goodput_per_s,
        "goodput_tokens_per_s": None
        if candidate.goodput_per_s is None
        else candidate.goodput_per_s * (plan.mean_prompt_tokens + plan.mean_output_tokens),
        "accelerators": candidate.accelerators,
        "idle_accelerators": candidate.idle_accelerators,
        "usd_per_million_tokens": candidate.usd_per_million_tokens,
        "usd_per_hour": usd_per_hour(plan.machines, candidate.layouts),
        "why_not": candidate.why_not,
    }


def _machine(
    machine: Machine, layout: Layout, types: Mapping[tuple[str, int], InstanceType]
) -> dict[str, Any]:
    return {
        "id": machine.id,
        "accelerator": machine.accelerator,
        "count": machine.count,
        "instances": [
            {
                **size_document(t),
                "count": n,
                "kv_capacity_tokens": types[machine.accelerator, t].memory.kv_capacity_tokens,
            }
            for t, n in sorted(Counter(layout).items(), reverse=True)
        ],
    }


def size_document(size: int) -> dict[str, Any]:
    """The dimensions of a size; those beyond tensor parallelism only if used."""
    size = as_size(size)
    told: dict[str, Any] = {"tensor_parallel": size.tensor}
    if size.pipeline > 1:
        told["pipeline_parallel"] = size.pipeline
    if size.data > 1:
        told["data_parallel"] = size.data
    if size.experts:
        told["expert_parallel"] = True
    if size.machines > 1:
        told["machines"] = size.machines
    return told


def _figures(figures: SystemFigures | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    return {
        "throughput_tokens_per_s": finite(figures.tokens_per_s),
        "latency_s": {
            "mean": finite(figures.latency_mean_s),
            "p99": finite(figures.latency_p99_s),
        },
        "ttft_s": {"mean": finite(figures.ttft_mean_s), "p99": finite(figures.ttft_p99_s)},
        "tpot_s": {"mean": finite(figures.tpot_mean_s), "p99": finite(figures.tpot_p99_s)},
        "batch": finite(figures.batch),
        "slo_share": finite(figures.slo_share),
        "cached_share": finite(figures.cached_share),
    }


def _type(key: tuple[str, int], found: InstanceType, plan: Plan) -> dict[str, Any]:
    alone = plan.alone.get(key)
    memory = found.memory
    return {
        "accelerator": key[0],
        **size_document(key[1]),
        "kv_capacity_tokens": memory.kv_capacity_tokens,
        "kv_uncertainty": memory.uncertainty,
        "tight": memory.tight,
        "memory": memory.how,
        "memory_bytes_per_accelerator": dict(memory.parts),
        "max_num_seqs": found.profile.max_num_seqs,
        "times": found.profile.source.get("how", "not said"),
        "time_uncertainty": found.time_uncertainty,
        "alone_tokens_per_s": alone.tokens_per_s if alone else None,
        "alone_batch": alone.batch if alone else None,
        "limit": alone.limit if alone else None,
    }


def _infeasible(plan: Plan) -> list[dict[str, Any]]:
    """By machine, as far as its accelerators go."""
    by_accelerator: dict[str, list[Unfit]] = {}
    for unfit in plan.unfit:
        by_accelerator.setdefault(unfit.accelerator, []).append(unfit)
    return [
        {
            "machine": machine.id,
            "accelerator": machine.accelerator,
            **size_document(unfit.size),
            "reason": unfit.reason,
            "shortfall_bytes": unfit.shortfall_bytes,
            "remedies": list(unfit.remedies),
        }
        for machine in plan.machines
        for unfit in by_accelerator.get(machine.accelerator, [])
        if int(unfit.size) <= machine.count
    ]
