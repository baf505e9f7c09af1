"""p1..p9 of instances beyond tensor parallelism: layers cut into stages, experts distributed whole.

docs/design/search.md explains the parts of a step. vLLM keeps as many batches in flight as there
are stages (config/vllm.py:577, max_concurrent_batches). The inputs of the experts are gathered from
all copies, and their outputs scattered back (its default, allgather_reducescatter,
config/parallel.py:219); its balancing (``--enable-eplb``) works against uneven routing. A profile
is of a busy instance; a lone prompt takes longer, up to by the number of stages or copies.
"""

import dataclasses
import math
from dataclasses import dataclass

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.planner import roofline
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.roofline import StepTime, link_share
from hetero_gateway.planner.sizes import Size, layer_partition

# Both are fitted to a simulation of vLLM's queue of batches, benchmarks/planner/pipelines.py.
# A prompt's share of a round, between 1/P (all batches alike) and 1 (one at a time).
BUBBLES = 0.3
# Relative cost of a round, for each doubling of the stages.
UNEVEN = 0.05
# A hop begins with a message between processes that announces the data (parallel_state.py:1162,
# isend_tensor_dict); a round figure, not measured.
HOP_S = 2e-4
# Uncertainty of a pipelined instance's step besides its profile's: see the benchmark.
UNCERTAINTY = 0.2
# Added to a step: copies agree on its size before it begins, and pad to the largest of them; a
# round figure, not measured.
AGREEMENT_S = 1e-3
# Relative, of a step's time: it was not compared with any measurement.
EXPERTS_UNCERTAINTY = 0.4


@dataclass(frozen=True, slots=True)
class Network:
    """Between machines: one direction of one machine's connection, and the time of a message."""

    bytes_per_s: float
    latency_s: float = 5e-5


def pipelined_profile(
    base: Profile,
    model: ModelShape,
    device: Accelerator,
    size: Size,
    network: Network | None,
) -> Profile:
    """The profile of ``size.pipeline`` stages, each with ``base``'s tensor parallelism.

    Args:
        base: of the whole model at ``size.tensor``; its capacity is kept.
        network: needed if the size spans machines.
    """
    p, c = size.pipeline, base.constants
    slowest = p * max(layer_partition(model.layers, p)) / model.layers
    slowest *= 1 + UNEVEN * math.log2(p)
    hops_s, token_s = _hops(model, device, size, network)
    output_s = model.output_weights * model.dtype_bytes / size.tensor
    output_s /= device.memory_bytes_per_s * device.memory_efficiency
    fixed_s = (p - 1) * (roofline.STEP_OVERHEAD_S + output_s) + hops_s
    prompts = slowest * (1 / p + BUBBLES * (1 - 1 / p))
    constants = Constants(
        p1=c.p1 * prompts + token_s / p,
        p2=c.p2 * prompts,
        p3=c.p3 * prompts,
        p4=c.p4 * slowest + fixed_s,
        p5=c.p5 * slowest / p,
        p6=c.p6 * slowest / p + token_s / p,
        p7=c.p7 * slowest,
        p8=c.p8 * slowest + fixed_s,
        p9=c.p9 * prompts,
    )
    note = f"{p} stages of tp{size.tensor}, reckoned from {base.source.get('how', 'derived')} times"
    source = dict(base.source) | {"how": "roofline", "note": note, "pipeline_parallel": p}
    # In a mixture all stages read all experts here: p8 includes them.
    return dataclasses.replace(
        base, constants=constants, source=source, experts_awake_at=0.0, idle_expert_s=0.0
    )


def _hops(
    model: ModelShape, device: Accelerator, size: Size, network: Network | None
) -> tuple[float, float]:
    """Seconds of a round's hops, and of one token's activations on all of its hops."""
    between = size.machines - 1
    inside = size.pipeline - 1 - between
    # Hidden states and residual.
    token_bytes = 2 * model.hidden * model.dtype_bytes
    hops_s = (between + inside) * HOP_S
    token_s = (
        inside * token_bytes / (device.link_bytes_per_s * link_share(device, 2)) if inside else 0.0
    )
    if between:
        assert network is not None
        hops_s += between * network.latency_s
        token_s += between * token_bytes / network.bytes_per_s
    return hops_s, token_s


# Distributed experts


def expert_parallel_profile(
    accelerator: Accelerator,
    model: ModelShape,
    size: Size,
    max_num_seqs: int,
    kv_capacity_tokens: int,
) -> Profile:
    """The profile of one instance; ``max_num_seqs`` and the capacity are of all copies together."""
    times = expert_parallel_times(accelerator, model, size)
    profile = roofline.roofline_profile(
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
    own_prefill, own_decode = roofline.step_times(accelerator, rest, size.tensor)
    flop_per_s = roofline.matrix_flop_per_s(accelerator, model)
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
        return model.moe_layers * 2 * (roofline.ALL_REDUCE_START_S + passed / link)

    def added(tokens: float) -> float:
        agreed_s = AGREEMENT_S if copies > 1 else 0.0
        return of_experts(tokens) + all_to_all(tokens) + agreed_s

    def prefill(batch: float, prompt_tokens: float) -> float:
        return own_prefill(batch / copies, prompt_tokens) + added(batch * prompt_tokens)

    def decode(batch: float, cached_tokens: float) -> float:
        return own_decode(max(1.0, batch / copies), cached_tokens) + added(batch)

    return prefill, decode
