"""p1..p9 of an instance whose layers are cut into stages, from those of the same without.

docs/design/search.md says how stages take turns. vLLM keeps as many batches in flight as there are
stages (config/vllm.py:577, max_concurrent_batches), and a sequence is in one of them at a time. So
with P stages, what is in proportion to a round's sequences (p5, p6) takes 1/P of what it does
without, what a batch pays whatever its size (the weights, p8) as much, and prompts something
between, as a stage waits behind the batch that has more of their tokens. A profile says what an
instance does with much to do: a lone prompt's TTFT is up to P times what it says.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.roofline import STEP_OVERHEAD_S, link_share
from hetero_gateway.planner.sizes import Size, layer_partition

# Both are fitted to a simulation of vLLM's queue of batches, benchmarks/planner/pipelines.py.
# Of a prompt's share of a round, between 1/P (all batches alike) and 1 (one at a time).
BUBBLES = 0.3
# Of a round, relative, for each doubling of the stages.
UNEVEN = 0.05
# A hop begins with a message between processes that says what comes (parallel_state.py:1162,
# isend_tensor_dict); a round figure, not measured.
HOP_S = 2e-4
# What is uncertain of a pipelined instance's step beside its profile: see the benchmark.
UNCERTAINTY = 0.2


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
    """The profile of ``size.pipeline`` stages of ``base``'s tensor parallelism each.

    Args:
        base: of the whole model at ``size.tensor``; its capacity is passed on.
        network: needed where the size stretches over machines.
    """
    p, c = size.pipeline, base.constants
    slowest = p * max(layer_partition(model.layers, p)) / model.layers
    slowest *= 1 + UNEVEN * math.log2(p)
    hops_s, token_s = _hops(model, device, size, network)
    output_s = model.output_weights * model.dtype_bytes / size.tensor
    output_s /= device.memory_bytes_per_s * device.memory_efficiency
    fixed_s = (p - 1) * (STEP_OVERHEAD_S + output_s) + hops_s
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
    return dataclasses.replace(base, constants=constants, source=source)


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
