"""Sizes beyond tensor parallelism that are worth a simulation.

Within a machine: stages where an all-reduce is slow or the heads do not divide; experts spread over
all accelerators, with and without copies of the rest. Over several equal machines that a network
joins: stages, as tensor parallelism needs more than a network has. There are many, and most lose
to tensor parallelism alone; so all are reckoned in closed form, and of each accelerator only the
few that come near what plain sizes make per accelerator go into the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.parallelism import refusal
from hetero_gateway.planner.plan import InstanceType
from hetero_gateway.planner.sizes import Size, as_size

# Machines that one instance stretches over, at most.
_MOST_MACHINES = 8
# Kept of each accelerator, within a machine and over machines.
_KEPT = 2
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
    """Sizes of at most so many accelerators of one machine, as vLLM takes them."""
    for t in range(1, most + 1):
        for pipeline in range(2, most // t + 1):
            if refusal(model, size := Size(t, pipeline)) is None:
                yield size
        if not model.moe_layers:
            continue
        if refusal(model, t) is not None and refusal(model, size := Size(t, experts=True)) is None:
            yield size
        for data in range(2, most // t + 1):
            if refusal(model, size := Size(t, data=data, experts=True)) is None:
                yield size


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
    """Those of ``further`` that may win against ``plain``, or serve where nothing else does."""
    best = max((worth(found.profile, found.size, mean) for found in plain), default=0.0)
    ranked = sorted(further, key=lambda found: -worth(found.profile, found.size, mean))
    return [f for f in ranked if worth(f.profile, f.size, mean) >= _NEAR * best][:_KEPT]


def worth(profile: Profile, size: int, mean: MeanRequest) -> float:
    """Tokens/s of one accelerator with a full batch of mean requests, in closed form."""
    batch = max(1.0, min(profile.max_num_seqs, profile.kv_capacity_tokens / mean.held))
    step_s = decode_step_time_s(profile.constants, batch, mean.held)
    prefill_s = prefill_time_s(profile.constants, 1, mean.prompt) - profile.constants.p4
    stay_s = mean.output * step_s + batch * max(0.0, prefill_s)
    return batch * (mean.prompt + mean.output) / stay_s / as_size(size).accelerators
