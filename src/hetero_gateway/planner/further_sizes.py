"""Sizes beyond tensor parallelism that are worth a simulation.

Stages where an all-reduce is slow or the heads do not divide, spread experts with and without
copies of the rest, and stages over equal machines that a network joins. Most lose to tensor
parallelism alone: all are reckoned in closed form, and few go into the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.parallelism import refusal
from hetero_gateway.planner.plan import InstanceType
from hetero_gateway.planner.sizes import Size, as_size

# Machines that one instance stretches over, at most.
_MOST_MACHINES = 8
# Of what the best plain size makes per accelerator: below it, a further one is not simulated. The
# closed form is off by up to a tenth against the simulator.
_NEAR = 0.9


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """Prompt and output tokens in the mean, and what a running request holds in the cache."""

    prompt: float
    output: float
    held: float


def within(model: ModelShape, most: int) -> Iterator[Size]:
    """Sizes that cut so many accelerators of one machine into equal parts, as vLLM takes them."""
    for t in range(1, most + 1):
        more = [n for n in range(2, most // t + 1) if most % (n * t) == 0]
        sizes = [Size(t, pipeline) for pipeline in more]
        if model.moe_layers:
            if refusal(model, t) is not None:
                sizes.append(Size(t, experts=True))
            sizes += [Size(t, data=data, experts=True) for data in more]
        yield from (size for size in sizes if refusal(model, size) is None)


def across(model: ModelShape, count: int, machines: int) -> Iterator[Size]:
    """Sizes that take all of so many accelerators on each of several machines, fewest first."""
    for together in range(2, min(machines, _MOST_MACHINES) + 1):
        for t in range(count, 0, -1):
            if count % t:
                continue
            size = Size(t, together * count // t, machines=together)
            if refusal(model, size) is None:
                yield size


def promising(
    plain: Sequence[InstanceType], further: Sequence[InstanceType], mean: MeanRequest
) -> list[InstanceType]:
    """Of ``further``, what makes most per accelerator, and the smallest that comes near.

    Near what ``plain`` ones make, and above it by as much as they are more uncertain: what nobody
    measured is not to win by a little. Where no plain one fits, the smallest serves at all.
    """
    known = [(worth(f, mean), f.time_uncertainty) for f in plain]

    def least(uncertainty: float) -> float:
        shares = (value * max(_NEAR, 1 + uncertainty - own) for value, own in known)
        return max(shares, default=0.0)

    per_accelerator = [(worth(f, mean), f) for f in further]
    near = [(value, f) for value, f in per_accelerator if value >= least(f.time_uncertainty)]
    if not near:
        return []
    best = max(near, key=lambda pair: pair[0])[1]
    smallest = min(near, key=lambda pair: (as_size(pair[1].size).accelerators, -pair[0]))[1]
    return [best] if best is smallest else [best, smallest]


def worth(found: InstanceType, mean: MeanRequest) -> float:
    """Tokens/s of one accelerator with a full batch of mean requests, in closed form."""
    profile = found.profile
    batch = max(1.0, min(profile.max_num_seqs, profile.kv_capacity_tokens / mean.held))
    step_s = decode_step_time_s(profile.constants, batch, mean.held)
    prefill_s = prefill_time_s(profile.constants, 1, mean.prompt) - profile.constants.p4
    stay_s = mean.output * step_s + batch * max(0.0, prefill_s)
    return batch * (mean.prompt + mean.output) / stay_s / as_size(found.size).accelerators
