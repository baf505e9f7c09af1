"""The weights of a multimodal model's vision part, from its own configuration.

a layer      4·width² + 2·width·intermediate (3 with a gate), plus what embeds patches
a merger     takes m×m patches together: (m²·width)² + m²·width·hidden of the decoder
"""

from __future__ import annotations

from typing import Final

from hetero_gateway.planner.checkpoints.fields import Fields

# model_types whose encoder's MLP has a gate.
_GATED: Final = {"qwen2_5_vl", "pixtral", "glm4v", "glm4v_moe"}


def vision_weights(fields: Fields, hidden: int) -> int | None:
    """Of encoder and projector; None where the configuration does not say enough."""
    part = fields.part("vision_config")
    if part is None:
        return None
    width = part.optional("embed_dim") if part.optional("embed_dim") else 0
    width = width or part.optional("hidden_size", "width")
    layers = part.optional("depth", "num_hidden_layers", "layers")
    if not width or not layers:
        return None
    ratio = part.get("mlp_ratio", 4)
    intermediate = part.optional("intermediate_size") or int(width * ratio)
    outer = str(fields.config.get("model_type", ""))
    gated = outer in _GATED or str(part.get("model_type", "")) in _GATED
    encoder = layers * (4 * width * width + (3 if gated else 2) * width * intermediate)
    patch = part.optional("patch_size") or 14
    frames = part.optional("temporal_patch_size") or 1
    encoder += 3 * frames * patch * patch * width
    encoder += width * part.optional("num_position_embeddings")
    merge = part.optional("spatial_merge_size") or 1
    taken = merge * merge * width
    mergers = 1 + len(part.items("deepstack_visual_indexes"))
    projector = taken * hidden + (taken * taken if merge > 1 else hidden * hidden * (width < 0))
    return encoder + mergers * projector
