"""A model's shape, adjusted to its checkpoint's tensors.

The config.json says how the weights are used: the cache per token, the experts that it passes. The
tensors say how many there are, whatever the family: so they take precedence if both say it.
"""

import dataclasses
from typing import Final

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.checkpoints.shape import ENCODERS, UNKNOWN_ERROR, VISION_ERROR
from hetero_gateway.files.checkpoints.tensors import Tensors
from hetero_gateway.planner.model_shape import Doubt, ModelShape

# With a larger relative difference, config and tensors are not of one model.
FARTHEST: Final = 3.0
# For an index, whose sum nothing checks, the difference accepted silently.
_NEAR: Final = 0.03


def as_stored(
    shape: ModelShape, tensors: Tensors, *, quantised: bool, own_dtype: str, where: str
) -> ModelShape:
    """The shape with the checkpoint's own weights.

    Args:
        quantised: the checkpoint is stored as ``shape.quantization`` says; else vLLM quantises
            it while loading, or not at all.
        own_dtype: that the config.json names; "": none.
        where: the directory, for messages.

    Raises:
        ConfigError: the tensors are not those of this config.json.
    """
    if not quantised and tensors.exact:
        # Not in floats: stored in a way that the config does not mention.
        return _by_parameters(shape, tensors, where) if tensors.float_bits else shape
    if not quantised and (shape.quantization is not None or own_dtype != shape.dtype):
        return shape  # an index has bytes as stored, and these are loaded otherwise
    counted = shape.weight_bytes() - shape.max_position * shape.head_dim * shape.dtype_bytes
    _check(tensors.stored_bytes, counted, "bytes", where)
    missing = tensors.stored_bytes - counted
    doubts = _settled(shape)
    if not tensors.exact and abs(missing) > _NEAR * counted:
        told = f"its config.json comes to {counted / 1e9:.1f} GB, its index to "
        told += f"{tensors.stored_bytes / 1e9:.1f}, and what the difference is"
        doubts = (*doubts, Doubt(told, min(UNKNOWN_ERROR, abs(missing) / counted)))
    return dataclasses.replace(
        shape,
        other_weights=shape.other_weights + round(missing / shape.dtype_bytes),
        unmodelled=doubts,
    )


def _by_parameters(shape: ModelShape, tensors: Tensors, where: str) -> ModelShape:
    """Each count in its own place: experts, the layers' other matrices, and the rest."""
    _check(tensors.parameters, shape.parameters, "parameters", where)
    experts = shape.moe_layers * shape.experts * shape.expert_weights
    # If no names identify experts, everything in a layer is one sum.
    own = tensors.expert_weights or experts
    layers = tensors.layer_weights + tensors.expert_weights - own - shape.router_weights
    return dataclasses.replace(
        shape,
        attention_weights=shape.mixing_weights + layers - (shape.layer_weights - experts),
        other_weights=tensors.other_weights - shape.embedding_weights + own - experts,
        unmodelled=_settled(shape),
    )


def _settled(shape: ModelShape) -> tuple[Doubt, ...]:
    """The remaining doubts: an encoder's weights are no longer one."""
    return tuple(
        Doubt(doubt.what, min(doubt.kv_error, VISION_ERROR)) if doubt.what == ENCODERS else doubt
        for doubt in shape.unmodelled
    )


def _check(stored: float, counted: float, what: str, where: str) -> None:
    if not counted / FARTHEST <= stored <= counted * FARTHEST:
        raise ConfigError(
            f"{where}: its tensors have {stored / 1e9:.2f} billion {what}, its config.json comes "
            f"to {counted / 1e9:.2f}: they are not of one model"
        )
