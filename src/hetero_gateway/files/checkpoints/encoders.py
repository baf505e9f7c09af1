"""Weights of a multimodal model besides its decoder: encoders, projectors, adapters.

    vision     a layer has 4·width² + 2·width·intermediate (3 with a gate), besides the embedding of
               patches. A merger takes m×m patches together: (m²·width)² + m²·width·hidden
    audio      Whisper's: the same layers, two convolutions over the mel bands, learned positions
    Q-Former   BERT's layers, every n-th with cross-attention to the vision encoder
    adapters   two narrow matrices for each of a layer's matrices (Phi-4-multimodal)

families.json has under ``parts`` what published files leave to their classes' defaults, and under
``undescribed`` the weights of encoders that a config.json does not describe.
"""

from collections.abc import Mapping
from typing import Any, Final

from hetero_gateway.files.checkpoints.families import UNDESCRIBED, part_defaults
from hetero_gateway.files.checkpoints.fields import TEXT, Fields

# model_types whose vision encoder's MLP has a gate.
_GATED: Final = {"qwen2_5_vl", "qwen2_5_omni_vision_encoder", "pixtral", "glm4v", "glm4v_moe"}
# Parts that are built like Whisper's encoder, Qwen3-Omni's preceded by three convolutions in two
# dimensions.
_WHISPER: Final = {
    "qwen2_audio_encoder", "qwen2_5_omni_audio_encoder", "qwen3_omni_moe_audio_encoder",
    "voxtral_encoder", "whisper",
}  # fmt: skip
_LORA: Final = ("vision_lora", "speech_lora")
# Objects with a width or layers that are not loaded encoders: the decoder itself, and the speech
# output of Qwen's models.
_NO_ENCODERS: Final = {*TEXT, "talker_config", "code2wav_config", "token2wav_config"}
_SIZES: Final = {"hidden_size", "num_hidden_layers", "depth", "num_layers", "hidden_dim", "d_model"}


def encoder_weights(fields: Fields, hidden: int, intermediate: int) -> tuple[int, bool] | None:
    """(weights, whether all parts are counted) besides the decoder; None: it has no such part.

    Args:
        hidden, intermediate: of the decoder's layers.
    """
    outer = str(fields.config.get("model_type", ""))
    found: list[int | None] = []
    for key, weigh in (("vision_config", _vision), ("audio_config", _audio)):
        said = fields.said(key)
        if isinstance(said, Mapping):
            part = fields.inner(key, {**part_defaults(outer, key), **said})
            found.append(weigh(part, outer, hidden))
    if isinstance(said := fields.said("qformer_config"), Mapping):
        part = fields.inner("qformer_config", {**part_defaults(outer, "qformer_config"), **said})
        found.append(_qformer(part, hidden))
    if fields.family in UNDESCRIBED:
        found.append(UNDESCRIBED[fields.family] + _adapters(fields, hidden, intermediate))
    names = {"vision_config", "audio_config", "qformer_config", *_NO_ENCODERS}
    if fields.config is not fields.decoder and any(
        key not in names and isinstance(value, Mapping) and not _SIZES.isdisjoint(value)
        for key, value in fields.config.items()
    ):
        found.append(None)  # an encoder under another name (Granite's for speech)
    if not found:
        return None
    return sum(weights or 0 for weights in found), None not in found


def _vision(part: Fields, outer: str, hidden: int) -> int | None:
    """Of encoder and projector; None if the configuration does not say enough."""
    width = part.optional("embed_dim") or part.optional("hidden_size", "width")
    layers = part.optional("depth", "num_hidden_layers", "layers")
    if not width or not layers:
        return None
    layers += part.optional("num_global_layers")
    intermediate = part.optional("intermediate_size") or int(width * part.get("mlp_ratio", 4))
    out = part.optional("out_hidden_size")
    glm = outer.startswith("glm4v") and out
    gated = outer in _GATED or part.family in _GATED
    inner: int = out if glm else intermediate
    encoder: int = layers * (4 * width * width + (3 if gated else 2) * width * inner)
    # Some say height and width (InternVL for transformers).
    sides = part.items("patch_size") or [part.optional("patch_size") or 14]
    if not all(isinstance(side, int) and side > 0 for side in sides):
        raise part.error(f"patch_size is {sides}, it must be one or two whole numbers above 0")
    pixels: int = sides[0] * sides[-1]
    encoder += 3 * (part.optional("temporal_patch_size") or 1) * pixels * width
    encoder += width * part.optional("num_position_embeddings")
    merge = part.optional("spatial_merge_size") or 1
    taken = merge * merge * width
    if glm:  # a convolution merges, and what follows has the width that the encoder's MLP would
        return encoder + taken * out + out * out + 3 * out * intermediate
    if tiles := part.optional("max_num_tiles"):  # Llama 3.2's: a table of positions for each tiling
        side = part.optional("image_size") // sides[0]
        tilings = len(part.items("supported_aspect_ratios")) or tiles * 2
        encoder += (tilings + 1) * tiles * (side * side + 1) * width
        return encoder + part.optional("vision_output_dim") * hidden
    mergers = 1 + len(part.items("deepstack_visual_indexes"))
    projector = taken * hidden + (taken * taken if merge > 1 else 0)
    return encoder + mergers * projector


def _audio(part: Fields, outer: str, hidden: int) -> int | None:
    """Of encoder and projector; None if it is not built like Whisper's."""
    width = part.optional("d_model", "hidden_size")
    layers = part.optional("encoder_layers", "num_hidden_layers")
    if part.family not in _WHISPER or not width or not layers:
        return None
    intermediate = part.optional("encoder_ffn_dim", "intermediate_size") or 4 * width
    bands = part.optional("num_mel_bins") or 128
    encoder = layers * (4 * width * width + 2 * width * intermediate)
    if channels := part.optional("downsample_hidden_size"):
        encoder += 9 * channels + 2 * 9 * channels * channels + channels * -(-bands // 8) * width
        return encoder + width * width + width * (part.optional("output_dim") or hidden)
    encoder += 3 * bands * width + 3 * width * width
    encoder += width * part.optional("max_source_positions")
    if outer.startswith("voxtral"):
        return encoder + intermediate * hidden + hidden * hidden
    return encoder + width * hidden


def _qformer(part: Fields, hidden: int) -> int:
    """BLIP-2's, with the projection to the decoder."""
    width, layers = part.count("hidden_size"), part.count("num_hidden_layers")
    seen, every = part.count("encoder_hidden_size"), part.count("cross_attention_frequency")
    crossing = -(-layers // every) * (2 * width * width + 2 * seen * width)
    mlp = 2 * width * part.count("intermediate_size")
    return layers * (4 * width * width + mlp) + crossing + width * hidden


def _adapters(fields: Fields, hidden: int, intermediate: int) -> int:
    """Of every matrix of every layer, in the ranks that the file names."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    mixed = hidden // heads * (heads + 2 * kv_heads)
    # In and out of: queries, keys and values; output; gate and up; down.
    ends = (hidden + mixed) + 2 * hidden + (hidden + 2 * intermediate) + (intermediate + hidden)
    ranks = 0
    for key in _LORA:
        said: Mapping[str, Any] | None = fields.said(key)
        if isinstance(said, Mapping):
            ranks += fields.inner(key, said).optional("r")
    layers = fields.count("num_hidden_layers")
    return layers * ranks * ends
