"""p1..p9 of a mixture of experts whose experts are spread whole over many accelerators.

docs/design/search.md says what a step is made of. What the tokens of all copies need of the experts
is gathered from all, and scattered back (vLLM's default, allgather_reducescatter,
config/parallel.py:219). Routing is taken to be even, by chance alone: real routing is not, which
vLLM's own balancing (``--enable-eplb``) works against. The profile is of an instance with much to
do in every copy; a lone prompt is worked on by one of them and takes up to d times as long.
"""

from __future__ import annotations

import dataclasses
import math

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.roofline import (
    ALL_REDUCE_START_S,
    StepTime,
    link_share,
    matrix_flop_per_s,
    roofline_profile,
    step_times,
)
from hetero_gateway.planner.sizes import Size

# Of a step: copies agree on its size before it begins, and fill up to the largest of them; a round
# figure, not measured.
AGREEMENT_S = 1e-3
# Relative, of a step's time: nothing of it was held against a measurement.
UNCERTAINTY = 0.4


def expert_parallel_profile(
    accelerator: Accelerator,
    model: ModelShape,
    size: Size,
    max_num_seqs: int,
    kv_capacity_tokens: int,
) -> Profile:
    """The profile of one instance; ``max_num_seqs`` and the capacity are of all copies together."""
    times = expert_parallel_times(accelerator, model, size)
    profile = roofline_profile(
        accelerator, model, size.tensor, max_num_seqs, kv_capacity_tokens, times, size.data
    )
    note = f"experts on {size.accelerators} accelerators, {size.data} copies of the rest"
    source = dict(profile.source) | {"note": f"{profile.source['note']}; {note}"}
    return dataclasses.replace(profile, source=source)


def expert_parallel_times(
    accelerator: Accelerator, model: ModelShape, size: Size
) -> tuple[StepTime, StepTime]:
    """Seconds of a prefill and of a decode step of (batch of all copies, tokens each)."""
    ranks, copies = size.tensor * size.data, size.data
    experts = model.moe_layers * model.expert_weights
    rest = dataclasses.replace(
        model, attention_weights=model.layer_weights - model.experts * experts, dense_weights=0,
        dense_layers=0, moe_layers=0, shared_intermediate=0, caches=model.layer_caches,
    )  # fmt: skip
    own_prefill, own_decode = step_times(accelerator, rest, size.tensor)
    flop_per_s = matrix_flop_per_s(accelerator, model)
    bytes_per_s = accelerator.memory_bytes_per_s * accelerator.memory_efficiency
    row_bytes = (3 * model.moe_intermediate + 2 * model.hidden) * model.dtype_bytes
    link = accelerator.link_bytes_per_s * link_share(accelerator, max(2, copies))

    def of_experts(tokens: float) -> float:
        assignments = max(tokens * model.experts_per_token / ranks, 1e-9)
        most = min(float(ranks), 1 + math.sqrt(2 * math.log(ranks) / assignments))
        untouched: float = (1 - model.experts_per_token / model.experts) ** tokens
        weights = experts * model.experts * (1 - untouched) * model.bytes_per_weight / ranks
        work = 2 * experts * assignments / flop_per_s
        rows = model.moe_layers * assignments * row_bytes / bytes_per_s
        return weights / bytes_per_s + most * (work + rows)

    def all_to_all(tokens: float) -> float:
        if copies == 1:
            return 0.0
        passed = (1 - 1 / copies) * tokens * model.hidden * model.dtype_bytes / size.tensor
        return model.moe_layers * 2 * (ALL_REDUCE_START_S + passed / link)

    def added(tokens: float) -> float:
        agreed_s = AGREEMENT_S if copies > 1 else 0.0
        return of_experts(tokens) + all_to_all(tokens) + agreed_s

    def prefill(batch: float, prompt_tokens: float) -> float:
        return own_prefill(batch / copies, prompt_tokens) + added(batch * prompt_tokens)

    def decode(batch: float, cached_tokens: float) -> float:
        return own_decode(max(1.0, batch / copies), cached_tokens) + added(batch)

    return prefill, decode
