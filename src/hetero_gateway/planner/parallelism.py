"""Which tensor parallelism vLLM accepts for a model, and which storage for an accelerator.

vLLM checks these when it loads a model (vllm/config, model_executor/layers); here they are asked
before, so that a plan never holds an instance that would not start.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.model_shape import ModelShape, Quantization

# Marlin, vLLM's kernels for four and eight bit weights, work on tiles of (input, output) weights.
_MARLIN_TILE = (128, 64)
# Four-bit weights are packed into 32 bits.
_WORD_BITS = 32


def refusal(model: ModelShape, tensor_parallel: int) -> str | None:
    """Why vLLM does not take this tensor parallelism; None: it does."""
    t = tensor_parallel
    if t < 1:
        return f"tensor parallelism {t} is below 1"
    if t == 1:
        return None
    if model.heads % t:
        return f"{model.heads} attention heads do not divide by {t}"
    if not model.latent:
        if t < model.kv_heads and model.kv_heads % t:
            return f"{model.kv_heads} KV heads do not divide by {t}"
        if t >= model.kv_heads and t % model.kv_heads:
            return f"{t} is no multiple of the {model.kv_heads} KV heads"
    for size, what in _intermediates(model):
        if size % t:
            return f"the {what} of {size} does not divide by {t}"
    if model.quantization is not None:
        return _quantized_refusal(model, model.quantization, t)
    return None


def _intermediates(model: ModelShape) -> Iterator[tuple[int, str]]:
    if model.moe_layers < model.layers:
        yield model.intermediate, "intermediate size"
    if model.moe_layers:
        yield model.moe_intermediate, "experts' intermediate size"
        if model.shared_intermediate:
            yield model.shared_intermediate, "shared experts' intermediate size"


def _quantized_refusal(model: ModelShape, stored: Quantization, t: int) -> str | None:
    """Shards must hold whole groups, words, tiles or blocks.

    Output and down projections are cut along their input (K), the others along their output (N).
    """
    cut = [(model.heads * model.head_dim, "attention width")] if not model.latent else []
    cut += [(size, what) for size, what in _intermediates(model)]
    for size, what in cut:
        shard = size // t
        for step, why in _steps(stored):
            if shard % step:
                return f"{stored.method}: the {what} of {size} over {t} is no multiple of {why}"
    return None


def _steps(stored: Quantization) -> list[tuple[int, str]]:
    """What a shard's size must be a multiple of, and why."""
    if stored.block is not None:
        out, inner = stored.block
        return [(inner, f"its block of {inner}"), (out, f"its block of {out}")]
    if stored.bits >= 8 and stored.group_size <= 0:
        return []
    steps = []
    if stored.group_size > 0:
        steps.append((stored.group_size, f"its group size {stored.group_size}"))
    if stored.method in ("awq", "gptq", "compressed-tensors"):
        word = int(_WORD_BITS // stored.bits)
        steps.append((word, f"its pack factor {word}"))
        k, n = _MARLIN_TILE
        steps += [(k, f"the kernel's tile of {k}"), (n, f"the kernel's tile of {n}")]
    return steps


# Lowest CUDA capability that vLLM loads a storage on (its get_min_capability).
_LOWEST_CAPABILITY = {"fp8": 8.0, "awq": 7.5, "gptq": 6.0, "bitsandbytes": 7.0, "mxfp4": 8.0}


def precision_refusal(model: ModelShape, accelerator: Accelerator) -> str | None:
    """Why vLLM does not load this storage on that accelerator; None: it does, or nobody knows.

    bfloat16 where there is none (V100, T4) is no refusal: float16 is as large, and
    ``vllm serve --dtype half`` takes it.
    """
    stored, capability = model.quantization, accelerator.cuda_capability
    if stored is None or capability is None:
        return None
    lowest = _LOWEST_CAPABILITY.get(stored.method)
    if stored.method == "compressed-tensors":
        lowest = 7.5 if stored.bits >= 8 else 8.0
    if lowest is not None and capability < lowest:
        return (
            f"{stored.method} needs CUDA capability {lowest:g}, {accelerator.name} has "
            f"{capability:g}"
        )
    return None
