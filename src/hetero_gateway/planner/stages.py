"""The memory of each accelerator of an instance with more than tensor parallelism.

    pipeline   a stage has its layers (``sizes.layer_partition``), the first the embeddings, the
               last the output layer and the sampler. The stage with the least room decides: vLLM
               gives all as many blocks as that one has (v1/core/kv_cache_utils.py)
    data       every copy has its own attention, shared experts and KV; a request lives in one
    experts    whole experts, distributed over the accelerators of all copies

Layers of different kinds are assumed to be spread evenly over the stages, rounded up.
"""

import dataclasses
import math
from collections.abc import Iterator

from hetero_gateway.planner.accelerators import GIB, Accelerator
from hetero_gateway.planner.memory import FITTED, EngineOptions, Method, StartUp, is_feasible
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.plan import MemoryEstimate
from hetero_gateway.planner.sizes import Size, as_size, layer_partition

# Of a communicator that passes activations on, GiB: as for one of tensor parallelism over a slot;
# not measured.
_COMMUNICATOR_GIB = FITTED.slow_link


def instance_memory(
    model: ModelShape,
    accelerator: Accelerator,
    size: int,
    options: EngineOptions,
    method: Method = "fitted",
    *,
    needed_tokens: int = 1,
) -> MemoryEstimate:
    """``StartUp.memory`` of an instance of any size.

    The parts are those of the accelerator with the least room; the capacity is the instance's,
    of all its data-parallel copies together (``holds_request`` judges one).
    """
    size = as_size(size)
    if size.plain:
        start = StartUp(model, accelerator, size.tensor, options)
        return start.memory(method, needed_tokens)
    # One of the data-parallel copies, with its part of the experts.
    copy = dataclasses.replace(model, experts=math.ceil(model.experts / size.data))
    buffers_bytes = _buffers_bytes(model, size, options.batched_tokens(accelerator))
    starts = [
        StartUp(stage, accelerator, size.tensor, options)
        for stage in _distinct_stages(copy, size.pipeline)
    ]
    held = [(start.model, start.memory(method, needed_tokens, buffers_bytes)) for start in starts]
    stage, memory = min(held, key=lambda pair: (pair[1].kv_capacity_tokens, pair[1].kv_bytes))
    own = stage.kv_request_bytes(needed_tokens, size.tensor, options.kv_dtype)
    whole = model.kv_request_bytes(needed_tokens, size.tensor, options.kv_dtype)
    spread = memory.uncertainty
    if memory.kv_bytes > 0 and size.tensor == 1:
        spread = min(1.0, math.hypot(spread, FITTED.sigma_link * GIB / memory.kv_bytes))
    return dataclasses.replace(
        memory,
        kv_bytes=memory.kv_bytes * (whole / own if own else 1.0) * size.data,
        kv_capacity_tokens=memory.kv_capacity_tokens * size.data,
        uncertainty=spread,
    )


def holds_request(memory: MemoryEstimate, size: int, needed_tokens: int) -> bool:
    """``memory.is_feasible`` of each of an instance's data-parallel copies."""
    return is_feasible(memory, needed_tokens * as_size(size).data)


def _buffers_bytes(model: ModelShape, size: Size, tokens: int) -> float:
    """Buffers that pass activations on, to the next stage or to the experts of other copies."""
    taken = _COMMUNICATOR_GIB * GIB
    each = tokens * model.hidden * model.dtype_bytes
    if size.pipeline > 1:
        taken += 2 * each  # hidden states and residual
    if size.data > 1:
        taken += 2 * each * size.data  # all copies' tokens, gathered and scattered
    return taken


def _distinct_stages(model: ModelShape, stages: int) -> Iterator[ModelShape]:
    """The stages of a pipeline, equal ones once."""
    if stages == 1:
        yield model
        return
    partition = layer_partition(model.layers, stages)
    kinds = [(n, i == 0, i == stages - 1) for i, n in enumerate(partition)]
    for layers, first, last in dict.fromkeys(kinds):
        yield _stage(model, layers, first, last)


def _stage(model: ModelShape, layers: int, first: bool, last: bool) -> ModelShape:
    """So many of the model's layers."""

    def share(count: int) -> int:
        return math.ceil(count * layers / model.layers)

    def part(weights: int | None) -> int | None:
        return None if weights is None else share(weights)

    return dataclasses.replace(
        model,
        layers=layers,
        moe_layers=share(model.moe_layers),
        dense_layers=part(model.dense_layers),
        attention_weights=part(model.attention_weights),
        dense_weights=part(model.dense_weights),
        wide_weights=share(model.wide_weights),
        state_bytes=share(model.state_bytes),
        caches=tuple(dataclasses.replace(c, layers=share(c.layers)) for c in model.caches),
        tables=first + last,
        samples=last,
    )
