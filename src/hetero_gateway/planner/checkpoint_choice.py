"""Which of several checkpoints of one model to serve: a plan for each, and the best for the goal.

The planner does not know how much quality a narrower checkpoint loses: naming it means that it is
good enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.planner.goals import GoalName
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Tried:
    """One checkpoint with its plan, or with the reason why there is none."""

    name: str
    storage: str
    plan: Plan | None
    error: HeteroGatewayError | None = None


def storage(model: ModelShape) -> str:
    """The storage type of its weights, in one word."""
    return model.dtype if model.quantization is None else model.quantization.method


def choose(tried: Sequence[Tried], goal: GoalName) -> int:
    """The index of the one to serve; of equal ones the first.

    Raises:
        HeteroGatewayError: none has a plan; the error is of the one named first.
    """
    planned = [i for i, each in enumerate(tried) if each.plan is not None]
    if not planned:
        raise tried[0].error or ConfigError("there is no checkpoint")
    return min(planned, key=lambda i: _rank(tried[i].plan, goal))


def _rank(plan: Plan | None, goal: GoalName) -> tuple[float, ...]:
    assert plan is not None
    best, tokens = plan.best, plan.best.tokens_per_s
    if goal == "cost":
        return best.usd_per_million_tokens or 0.0, -tokens
    if goal == "fewest":
        return best.accelerators, -tokens
    if goal == "goodput":
        return -(best.goodput_per_s or 0.0), -tokens
    return (-tokens,)


def line(tried: Sequence[Tried], chosen: int) -> str:
    """The choice, and the others' results."""
    parts = []
    for i, each in enumerate(tried):
        if each.plan is None:
            text = str(each.error)
        else:
            best = each.plan.best
            text = f"{best.tokens_per_s:.0f} tokens/s on {best.accelerators} accelerators"
        chose = "chosen, " if i == chosen else ""
        parts.append(f"{each.name} ({each.storage}): {chose}{text}")
    return "checkpoints: " + "; ".join(parts) + ". Whether its quality will do is yours to judge"


def document(tried: Sequence[Tried], chosen: int) -> list[dict[str, Any]]:
    """The part of ``--json``'s document."""
    found = []
    for i, each in enumerate(tried):
        best = each.plan.best if each.plan else None
        found.append(
            {
                "name": each.name,
                "storage": each.storage,
                "chosen": i == chosen,
                "throughput_tokens_per_s": best and best.tokens_per_s,
                "accelerators": best and best.accelerators,
                "goodput_per_s": best and best.goodput_per_s,
                "usd_per_million_tokens": best and best.usd_per_million_tokens,
                "reason": str(each.error or ""),
            }
        )
    return found
