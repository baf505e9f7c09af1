"""Which tensor parallelism vLLM accepts for a model, and which storage for an accelerator.

vLLM checks these when it loads a model; here they are checked before, so that a plan never has an
instance that would not start. Lines are of vLLM 0.32:

    heads % t                       config/model.py:1546
    KV heads % t, or t % KV heads   model_executor/layers/linear.py, QKVParallelLinear: divide()
    vocabulary, padded to 64, % t   model_executor/layers/vocab_parallel_embedding.py:304
    MLP, experts % t                model_executor/layers/linear.py: divide()
    groups, words, tiles            layers/quantization/utils/marlin_utils.py:173
    blocks of fp8                   layers/quantization/utils/fp8_utils.py
    state heads % t                 layers/mamba/mamba_mixer2.py, gated_delta_net
    pipelines                       config/model.py:1557, models' SupportsPP
    expert parallelism              config/model.py:1485; whole experts: fused_moe/config.py:1217
    capability                      layers/quantization/*.py: get_min_capability()

tests/real_vllm/test_parallelism.py asks vLLM's own model classes.
"""

from collections.abc import Iterator

from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.model_shape import VOCABULARY_PADDING, ModelShape, Quantization
from hetero_gateway.planner.sizes import as_size

# Marlin, vLLM's kernels for four and eight bit weights, work on tiles of (input, output) weights.
_MARLIN_TILE = (128, 64)
# Four-bit weights are packed into 32 bits.
_WORD_BITS = 32
_EXPERTS = "experts' intermediate size"


# Families whose classes lack SupportsPP: vLLM's registry was asked about all modelled ones.
_NO_PIPELINE = {"mamba2", "zamba2", "gemma3n", "gemma3n_text"}


def refusal(model: ModelShape, size: int) -> str | None:
    """Why vLLM does not accept an instance of this size; None: it does.

    Args:
        size: a ``Size``, or a tensor parallelism.
    """
    if size < 1:
        return f"tensor parallelism {size} is below 1"
    size = as_size(size)
    if size.experts and not model.moe_layers:
        return "there are no experts to spread"
    if size.data > 1 and not size.experts:
        return "copies without experts between them are instances of their own"
    if size.pipeline > 1 and model.family in _NO_PIPELINE:
        return f"vLLM has no pipeline of {model.family}"
    if size.pipeline > model.layers:
        return f"{model.layers} layers do not fill {size.pipeline} stages"
    return _tensor_refusal(model, size.tensor, whole_experts=size.experts)


def _tensor_refusal(model: ModelShape, t: int, *, whole_experts: bool) -> str | None:
    if t == 1:
        return None
    if model.heads % t:
        return f"{model.heads} attention heads do not divide by {t}"
    for heads in sorted({cache.heads for cache in model.layer_caches if not cache.copied}):
        if t < heads and heads % t:
            return f"{heads} KV heads do not divide by {t}"
        if t >= heads and t % heads:
            return f"{t} is no multiple of the {heads} KV heads"
    padded = -(-model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % t:
        return f"the vocabulary, padded to {padded}, does not divide by {t}"
    if model.state_heads % t:
        return f"{model.state_heads} heads of the state-space layers do not divide by {t}"
    sizes = [
        (size, what)
        for size, what in _intermediates(model)
        if not (whole_experts and what == _EXPERTS)
    ]
    for size, what in sizes:
        if size % t:
            return f"the {what} of {size} does not divide by {t}"
    if model.quantization is not None:
        return _quantized_refusal(model, model.quantization, t, sizes)
    return None


def _intermediates(model: ModelShape) -> Iterator[tuple[int, str]]:
    if model.mlp_layers:
        yield model.intermediate, "intermediate size"
    if model.moe_layers:
        yield model.moe_intermediate, _EXPERTS
        if model.shared_intermediate:
            yield model.shared_intermediate, "shared experts' intermediate size"


def _quantized_refusal(
    model: ModelShape, stored: Quantization, t: int, sizes: list[tuple[int, str]]
) -> str | None:
    """Shards must hold whole groups, words, tiles or blocks.

    Output and down projections are cut along their input (K), the others along their output (N).
    """
    cut = [(model.heads * model.head_dim, "attention width")] if not model.latent else []
    for size, what in [*cut, *sizes]:
        shard = size // t
        for step, why in _steps(stored):
            if shard % step:
                return f"{stored.method}: the {what} of {size} over {t} is no multiple of {why}"
    return None


def _steps(stored: Quantization) -> list[tuple[int, str]]:
    """The required divisor of a shard's size, and why."""
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
_LOWEST_CAPABILITY = {
    "fp8": 7.5, "fbgemm_fp8": 8.0, "awq": 7.5, "gptq": 6.0, "bitsandbytes": 7.0, "mxfp4": 8.0,
    "compressed-tensors": 7.5, "modelopt": 8.0, "modelopt_fp4": 7.5, "modelopt_mixed": 8.0,
    "modelopt_mxfp8": 8.0,
}  # fmt: skip


def precision_refusal(model: ModelShape, accelerator: Accelerator) -> str | None:
    """Why vLLM does not load this storage on that accelerator; None: it does, or nobody knows.

    bfloat16 on hardware without it (V100, T4) is not refused: float16 is as large, and
    ``vllm serve --dtype half`` accepts it.
    """
    stored, capability = model.quantization, accelerator.cuda_capability
    if stored is None or capability is None:
        return None
    lowest = _LOWEST_CAPABILITY.get(stored.method)
    if lowest is not None and capability < lowest:
        return (
            f"{stored.method} needs CUDA capability {lowest:g}, {accelerator.name} has "
            f"{capability:g}"
        )
    return None
