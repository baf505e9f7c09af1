"""Facts about a model: its size, what vLLM accepts, and where it fits."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.memory import EngineOptions, StartUp, is_feasible
from hetero_gateway.planner.model_shape import ModelShape, Quantization
from hetero_gateway.planner.parallelism import precision_refusal, refusal

# Checked tensor parallelisms: no more than most boxes have.
SIZES = range(1, 9)
# Common storage types of weights, besides this checkpoint's.
_STORAGES = (
    ("bfloat16", None),
    ("fp8", Quantization("fp8", 8)),
    ("int4 (groups of 128)", Quantization("gptq", 4, 128, zero_points=True)),
)


@dataclass(frozen=True, slots=True)
class SizeFit:
    """One accelerator at one tensor parallelism.

    Args:
        reason: why not; empty if it fits.
        kv_tokens: room for KV; of the longest requests if layers keep a window or a state.
        uncertainty: relative, of ``kv_tokens``.
        sequences: requests of the given context at once.
        shortfall_bytes: missing on each accelerator, if memory is the reason.
    """

    accelerator: str
    tensor_parallel: int
    reason: str
    kv_tokens: int = 0
    uncertainty: float = 0.0
    sequences: float = 0.0
    shortfall_bytes: float = 0.0
    tight: bool = False


@dataclass(frozen=True, slots=True)
class Support:
    """The result of ``plan support``; vLLM accepts ``sizes``; ``refused`` says why not the
    others."""

    model: ModelShape
    context: int
    weight_bytes: Mapping[str, float]
    sizes: tuple[int, ...]
    refused: Mapping[int, str]
    fits: tuple[SizeFit, ...]


def support(
    model: ModelShape,
    accelerators: Sequence[Accelerator],
    options: EngineOptions,
) -> Support:
    """Every accelerator at every size that vLLM accepts.

    Args:
        options: ``max_model_len`` is the context in question.
    """
    context = options.max_model_len or model.max_position or 1

    def fit(device: Accelerator, t: int) -> SizeFit:
        if (why := precision_refusal(model, device)) is not None:
            return SizeFit(device.name, t, why)
        if t > 1 and device.link_bytes_per_s <= 0:
            return SizeFit(device.name, t, "no link between two is known")
        if t > device.max_group:
            return SizeFit(device.name, t, f"at most {device.max_group} work on one instance")
        start = StartUp(model, device, t, options)
        memory = start.memory(needed_tokens=context)
        if not is_feasible(memory, context):
            missing = start.shortfall_bytes(memory, context)
            return SizeFit(device.name, t, "too little memory", shortfall_bytes=missing)
        tokens, spread = memory.kv_capacity_tokens, memory.uncertainty
        return SizeFit(device.name, t, "", tokens, spread, tokens / context, tight=memory.tight)

    refused = {t: why for t in SIZES if (why := refusal(model, t)) is not None}
    sizes = tuple(t for t in SIZES if t not in refused)
    fits = tuple(fit(device, t) for device in accelerators for t in sizes)
    return Support(model, context, _weights(model), sizes, refused, fits)


def _weights(model: ModelShape) -> dict[str, float]:
    """As loaded on one accelerator: as it is stored, and as it might be."""
    stored = model.quantization
    own = model.dtype if stored is None else stored.method
    found = {own: model.weight_bytes()}
    for name, other in _STORAGES:
        same = stored is None if other is None else stored and stored.bits == other.bits
        if not same:
            found[name] = dataclasses.replace(
                model, quantization=other, dtype="bfloat16", wide_weights=0
            ).weight_bytes()
    return found


def layer_lines(model: ModelShape) -> list[str]:
    """The kinds of its layers, one kind a line."""
    lines = []
    for cache in model.layer_caches:
        if not cache.layers:
            continue
        kept = f"a window of {cache.window} tokens" if cache.window else "every token"
        if cache.copied:
            what = f"one vector of {cache.elements} for all heads (latent attention)"
        elif cache.element_bytes is not None:
            what = f"an index of {cache.elements} a token"
        else:
            what = f"{cache.heads} KV heads of {cache.elements // 2}"
        lines.append(f"{cache.layers} layers keep {kept}: {what}")
    if model.state_bytes:
        lines.append(f"a state of {model.state_bytes} bytes a sequence, whatever its length")
    if model.moe_layers:
        lines.append(
            f"{model.moe_layers} layers with {model.experts} experts, {model.experts_per_token} a "
            f"token: {active_parameters(model) / 1e9:.1f} billion parameters are active"
        )
    return lines


def active_parameters(model: ModelShape) -> int:
    """Those that one token passes, including embeddings."""
    return model.parameters - model.layer_weights + model.active_layer_weights
