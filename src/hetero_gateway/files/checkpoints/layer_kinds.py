"""The kinds of a decoder's layers: how each mixes tokens, and its feed-forward part.

Mixers: FULL attention over all tokens, a WINDOW of them, a STATE per sequence (state-space and
linear attention), BOTH attention and a state side by side, CROSS attention to an encoder, which
keeps nothing of the text, SHARED attention to the keys and values of an earlier layer, NONE.
Families state it by a list, by a pattern's letters, or by an interval; the rules are from vLLM's
model classes and transformers' configurations.
"""

from collections.abc import Collection
from typing import Final

from hetero_gateway.files.checkpoints.families import STATE_ONLY
from hetero_gateway.files.checkpoints.fields import Fields

FULL, WINDOW, STATE, BOTH, NONE = "full", "window", "state", "both", "none"
CROSS, SHARED = "cross", "shared"
MLP, MOE = "mlp", "moe"

# One letter a layer: state space, attention, MLP, experts.
_LETTERS: Final = {"M": (STATE, NONE), "*": (FULL, NONE), "-": (NONE, MLP), "E": (NONE, MOE)}
_NAMED: Final = {
    "mamba": (STATE, NONE),
    "attention": (FULL, NONE),
    "mlp": (NONE, MLP),
    "moe": (NONE, MOE),
}
_FULL_NAMES: Final = {
    "full_attention", "attention", "indexed_attention", "global_attention",
    "deepseek_sparse_attention",
}  # fmt: skip
# A window in every layer except each n-th, if the file does not say it.
_INTERVALS: Final = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4}
# gemma-2's windows get the same blocks as its other layers in vLLM's logs.
_WINDOWS_AS_FULL: Final = {"gemma2"}


def layer_kinds(fields: Fields, layers: int) -> tuple[list[str], list[str]]:
    """(mixers, feed-forwards), one of each per layer; a feed-forward may be BOTH: MLP and experts.

    Raises:
        ConfigError: a kind of layer that is not modelled.
    """
    single = _one_thing_per_layer(fields, layers)
    if single is not None:
        return [mixer for mixer, _ in single], [feed for _, feed in single]
    mixers = _mixers(fields, layers)
    for layer in fields.items("cross_attention_layers"):
        if isinstance(layer, int) and 0 <= layer < layers:
            mixers[layer] = CROSS
    sharing = (fields.optional("cla_share_factor") or 1) if fields.get("use_cla") else 1
    mixers = [SHARED if i % sharing else mixer for i, mixer in enumerate(mixers)]
    return mixers, _feeds(fields, layers)


def experts_of(fields: Fields) -> int:
    """Routed experts of a layer; 0: dense."""
    found = fields.first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return found if found > 1 else 0


def _one_thing_per_layer(fields: Fields, layers: int) -> list[tuple[str, str]] | None:
    """For families whose layers are a mixer or a feed-forward, never both (Nemotron-H)."""
    if fields.family != "nemotron_h":
        return None
    pattern = fields.get("hybrid_override_pattern") or ""
    listed = fields.items("layers_block_type")
    try:
        kinds = [_LETTERS[c] for c in pattern] or [_NAMED[str(kind)] for kind in listed]
    except KeyError as error:
        raise fields.error(f"layers of kind {error} are not modelled") from error
    if len(kinds) < layers:
        raise fields.error(f"hybrid_override_pattern says what {len(kinds)} of {layers} layers are")
    return kinds[:layers]


def _mixers(fields: Fields, layers: int) -> list[str]:
    if fields.family in STATE_ONLY:
        return [STATE] * layers
    if fields.family == "falcon_h1":
        return [BOTH] * layers
    listed = fields.items("layer_types", "layers_block_type", "attn_type_list")
    if listed:
        if len(listed) < layers:
            raise fields.error(f"layer_types says what {len(listed)} of {layers} layers are")
        return [_mixer(fields, kind) for kind in listed[:layers]]
    full = _full_layers(fields, layers)
    if full is not None:
        return [FULL if i in full else STATE for i in range(layers)]
    return _windows(fields, layers)


def _mixer(fields: Fields, kind: object) -> str:
    name = str(kind)
    if name in ("1", "0"):  # attn_type_list of MiniMax
        return FULL if name == "1" else STATE
    if "sliding" in name or "chunked" in name:
        return FULL if fields.family in _WINDOWS_AS_FULL or not window_of(fields) else WINDOW
    if name == "hybrid":
        return BOTH
    if any(word in name for word in ("linear", "mamba", "conv", "recurrent")):
        return STATE
    if name in _FULL_NAMES:
        return FULL
    raise fields.error(f"layers of type {name!r} are not modelled")


def _full_layers(fields: Fields, layers: int) -> Collection[int] | None:
    """For hybrids that list the numbers of attending layers; None: not a hybrid."""
    linear = fields.part("linear_attn_config")
    if linear is not None:  # counted from 1
        return {int(i) - 1 for i in linear.items("full_attn_layers")}
    listed = fields.items("attn_layer_indices", "full_attn_idxs")
    if listed:
        return {int(i) for i in listed}
    if fields.family == "jamba":
        period, offset = fields.count("attn_layer_period"), fields.optional("attn_layer_offset")
        return {i for i in range(layers) if i % period == offset}
    if fields.family == "plamo2" and fields.get("mamba_enabled"):
        step = fields.count("mamba_step")
        if layers <= step // 2:
            return {layers - 1}
        return {i for i in range(layers) if i % step == step // 2}
    if fields.family.startswith(("qwen3_next", "qwen3_5")):
        interval = fields.optional("full_attention_interval") or 4
        return {i for i in range(layers) if (i + 1) % interval == 0}
    return None


def _windows(fields: Fields, layers: int) -> list[str]:
    """Which layers of a plain decoder keep only a window."""
    if not window_of(fields) or fields.family in _WINDOWS_AS_FULL:
        return [FULL] * layers
    listed = fields.items("hybrid_layer_pattern")
    if listed:  # 1: a window
        return [WINDOW if kind == 1 else FULL for kind in listed[:layers]]
    if fields.family.startswith("llama4"):
        # Layers without rotary positions attend to everything; 1: has them.
        rotary = fields.items("no_rope_layers")
        step = fields.optional("no_rope_layer_interval") or 4
        flags = rotary or [int((i + 1) % step != 0) for i in range(layers)]
        return [WINDOW if flag else FULL for flag in flags[:layers]]
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern"))
    if isinstance(pattern, str) and pattern:
        letters = (pattern * layers)[:layers]
        return [WINDOW if letter == "L" else FULL for letter in letters]
    interval = pattern if isinstance(pattern, int) else _INTERVALS.get(fields.family)
    if interval:
        return [FULL if (i + 1) % interval == 0 else WINDOW for i in range(layers)]
    return [WINDOW] * layers


def window_of(fields: Fields) -> int:
    """Tokens that a layer with a window attends to; 0: the model uses none."""
    if fields.family.startswith("llama4"):
        return fields.optional("attention_chunk_size")
    if fields.get("use_sliding_window", True) is False:
        return 0
    return fields.optional("sliding_window", "sliding_window_size")


def _feeds(fields: Fields, layers: int) -> list[str]:
    if fields.family in STATE_ONLY:
        return [NONE] * layers
    if not experts_of(fields):
        return [MLP] * layers
    # Beside the MLP: gemma-4, Arctic; LongCat's layers have two MLPs and one set of experts.
    if fields.get("enable_moe_block") or fields.family in ("arctic", "longcat_flash"):
        return [BOTH] * layers
    for key, sparse in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
        if listed := fields.items(key):
            return [MOE if kind == sparse else MLP for kind in listed[:layers]]
    moe = _moe_layers(fields, layers)
    return [MOE if i in moe else MLP for i in range(layers)]


def _moe_layers(fields: Fields, layers: int) -> set[int]:
    """The numbers of the layers with experts."""
    listed = fields.get("moe_layers_enum")
    if isinstance(listed, str):
        return {int(i) for i in listed.split(",") if i.strip().isdigit()}
    if fields.family.startswith("llama4"):
        named = fields.items("moe_layers")
        step = fields.optional("interleave_moe_layer_step") or 1
        return {int(i) for i in named} or {i for i in range(layers) if (i + 1) % step == 0}
    if fields.family == "jamba":
        period, offset = fields.count("expert_layer_period"), fields.optional("expert_layer_offset")
        return {i for i in range(layers) if i % period == offset}
    step = fields.optional("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval") or 1
    first = fields.first("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    last = fields.first("moe_layer_end_index") or layers
    dense = {int(layer) for layer in fields.items("mlp_only_layers")}
    return {
        i
        for i in range(first, min(layers, last + 1))
        if i not in dense and (step == 1 or (i + 1) % step == 0)
    }
