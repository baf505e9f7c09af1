"""A model's shape from its Hugging Face ``config.json``: layer by layer, family by family.

For the families known here, a test compares parameters and caches with the published ones. An
unknown family that looks like a plain decoder is counted as one, with a doubt that makes its memory
uncertain; one that names parts which a plain decoder does not have is refused: an error is better
than a wrong size.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.checkpoints.encoders import encoder_weights
from hetero_gateway.files.checkpoints.families import ALL_EXPERTS, FOURFOLD, KNOWN, REFUSED, UNGATED
from hetero_gateway.files.checkpoints.fields import Fields
from hetero_gateway.files.checkpoints.layer_kinds import (
    BOTH,
    CROSS,
    FULL,
    MLP,
    MOE,
    SHARED,
    STATE,
    WINDOW,
    experts_of,
    layer_kinds,
    window_of,
)
from hetero_gateway.files.checkpoints.mixers import (
    full_attention,
    head_sizes,
    index_cache,
    state_space,
    window_attention,
)
from hetero_gateway.files.checkpoints.quantizations import (
    kv_dtype_of,
    left_wide,
    mean_bits,
    quantization_of,
)
from hetero_gateway.planner.model_shape import DTYPE_BYTES, Cache, Doubt, ModelShape

# Relative error of the KV memory if the size is counted but vLLM's packing is not: blocks of
# different layers share pages, and remainders of pages are lost.
WINDOWS_ERROR, STATES_ERROR, LATENT_ERROR, VISION_ERROR = 0.07, 0.1, 0.07, 0.07
ENCODERS: Final = "the vision or audio part"
# Of a family that was not compared with published figures.
UNKNOWN_ERROR = 0.3

# Parts that a plain decoder does not have.
_UNUSUAL: Final = re.compile(
    r"expert|moe|mamba|ssm|linear_attn|linear_num|lora_rank|recurrent|rwkv|conv_kernel|conv_l_|"
    r"compress|kv_shared|per_layer|block_configs|index_head|lightning|retention|sparse_attention",
    re.IGNORECASE,
)
_EXPERTS: Final = re.compile(r"expert|moe", re.IGNORECASE)
# The MLP's width is two thirds of the multiple, rounded up to this (vllm/.../nemotron_nas.py).
_WIDTH_STEP = 256
# Families whose MLP is an expert's, and may be absent.
MAY_BE_DENSE: Final = {"granitemoehybrid", "jamba", "minicpm"}
_DTYPES: Final = {"half": "float16", "float": "float32"}


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    dtype: str | None = None,
    quantization: str | Mapping[str, Any] | None = None,
    weighed: bool = False,
) -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Args:
        dtype: vLLM's ``--dtype``; None or "auto": the file's, float16 if that is float32.
        quantization: "fp8", "int8", "int4", "awq", "gptq", or a ``quantization_config``, or the
            content of ``hf_quant_config.json``; None: the file's own.
        weighed: its tensors are counted afterwards, so that experts may be of any family.

    Raises:
        ConfigError: naming the missing or unusable field, or why the family is refused.
    """
    fields = Fields(config, name)
    _check_family(fields, weighed)
    stored = quantization
    if stored is None:
        stored = fields.said("quantization_config")
    shape = _shape(fields, own_dtype(dtype, fields))
    if stored is None:
        return shape
    kinds = _matrices(fields, shape)
    found = quantization_of(stored)
    if found is not None and (bits := mean_bits(stored, kinds)):
        found = dataclasses.replace(found, method="modelopt_mixed", bits=bits)
    if found is not None and _image_experts(fields, shape.hidden):
        doubt = Doubt("whether experts of images are stored as those of text", UNKNOWN_ERROR)
        shape = dataclasses.replace(shape, unmodelled=(*shape.unmodelled, doubt))
    return dataclasses.replace(
        shape,
        quantization=found,
        kv_dtype=kv_dtype_of(stored),
        wide_weights=sum(
            left_wide(stored, kind, layers) * each for kind, (layers, each) in kinds.items()
        ),
    )


def _shape(fields: Fields, dtype: str) -> ModelShape:
    """As the file describes it, nothing quantised."""
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    layers = _layer_count(fields)
    mixers, feeds = layer_kinds(fields, layers)
    attends = any(kind in (FULL, WINDOW, BOTH) for kind in mixers)
    heads, kv_heads, head_dim = head_sizes(fields) if attends else (1, 1, 1)
    shape = ModelShape(
        name=fields.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=fields.count("vocab_size", "padded_vocab_size"),
        intermediate=_intermediate(fields, hidden, feeds),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        gated=fields.family not in UNGATED,
        other_weights=_positions(fields, hidden) + _per_layer_tables(fields, hidden, layers),
        max_position=fields.optional(
            "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"
        ),
        dtype=dtype,
        unmodelled=_doubts(fields, mixers),
        family=fields.family,
    )
    if fields.get("block_configs") is not None:
        return _with_blocks(shape, fields)
    shape = _with_mixers(shape, fields, mixers)
    shape = _with_experts(shape, fields, feeds)
    if fields.family == "longcat_flash":
        shape = _doubled(shape)
    return _with_encoders(shape, fields)


def _doubled(shape: ModelShape) -> ModelShape:
    """LongCat-Flash's layers: two attentions and two MLPs each, and experts once."""
    assert shape.attention_weights is not None
    return dataclasses.replace(
        shape,
        attention_weights=2 * shape.attention_weights,
        dense_layers=2 * shape.layers,
        caches=tuple(dataclasses.replace(c, layers=2 * c.layers) for c in shape.caches),
    )


def _layer_count(fields: Fields) -> int:
    if fields.family == "longcat_flash":  # transformers' num_hidden_layers counts attentions
        return fields.count("num_layers")
    listed = fields.items("layers_block_type") or list(fields.get("hybrid_override_pattern", ""))
    if fields.family == "nemotron_h" and listed and not fields.optional("num_hidden_layers"):
        return len(listed)
    return fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _intermediate(fields: Fields, hidden: int, feeds: list[str]) -> int:
    """Of a dense MLP."""
    if fields.family == "arctic":  # of the MLP beside the experts
        return hidden
    if not {MLP, BOTH} & set(feeds) or fields.family == "dbrx":
        return fields.optional("intermediate_size") if fields.family not in ALL_EXPERTS else 0
    if fields.get("block_configs") is not None:
        return 0
    keys: tuple[str, ...] = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    if fields.family.startswith("llama4"):
        keys = ("intermediate_size_mlp", *keys)
    if fields.family == "granitemoehybrid":
        keys = ("shared_intermediate_size", *keys)
    if not fields.optional(*keys) and fields.family in FOURFOLD:
        return 4 * hidden
    width = fields.count(*keys)
    if fields.get("block_auto_adjust_ff_dim"):  # LFM2: two thirds, rounded up
        step = fields.optional("block_multiple_of") or 256
        width = int(float(fields.get("block_ffn_dim_multiplier", 1.0)) * (2 * width // 3))
        width = -(-width // step) * step
    return width


def _with_mixers(shape: ModelShape, fields: Fields, mixers: list[str]) -> ModelShape:
    """With the weights, caches and states of its layers."""
    weights = state_bytes = state_heads = 0
    caches: list[Cache] = []
    shared = fields.optional("num_kv_shared_layers")
    own = mixers[: len(mixers) - shared]
    for kinds, of in (((FULL, BOTH), full_attention), ((WINDOW,), window_attention)):
        count = sum(kind in kinds for kind in mixers)
        if not count:
            continue
        layer = of(fields, shape.hidden)
        weights += count * layer.weights
        keeping = sum(kind in kinds for kind in own)
        window = window_of(fields) if kinds == (WINDOW,) else 0
        caches.append(Cache(keeping, layer.heads, layer.elements, window, layer.copied))
        if layer.copied and (index := index_cache(fields, count)) is not None:
            caches.append(index)
    if CROSS in mixers or SHARED in mixers:
        layer = full_attention(fields, shape.hidden)
        weights += mixers.count(CROSS) * layer.weights
        shared_kv = shape.hidden * layer.heads * layer.elements
        weights += mixers.count(SHARED) * (layer.weights - shared_kv)
    states = sum(kind in (STATE, BOTH) for kind in mixers)
    if states:
        state = state_space(fields, shape.hidden, shape.dtype)
        weights += states * state.weights
        state_bytes = states * state.state_bytes
        state_heads = fields.optional(
            "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "n_mamba_heads",
            "num_heads",
        )  # fmt: skip
    plain = (Cache(shape.layers, shape.kv_heads, 2 * shape.head_dim),)
    plain_weights = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    if tuple(caches) == plain and weights == shape.layers * plain_weights:
        return shape
    if not caches:  # no cache grows with the tokens
        caches.append(Cache(0, 1, 1))
    return dataclasses.replace(
        shape,
        attention_weights=weights,
        caches=tuple(caches),
        state_bytes=state_bytes,
        state_heads=state_heads,
    )


def _with_experts(shape: ModelShape, fields: Fields, feeds: list[str]) -> ModelShape:
    """The same with its experts, if the configuration has some."""
    moe_layers = sum(kind in (MOE, BOTH) for kind in feeds)
    dense = sum(kind in (MLP, BOTH) for kind in feeds)
    experts = experts_of(fields)
    if fields.family == "dbrx":
        return _dbrx(shape, fields)
    if not moe_layers or not experts:
        none = fields.get("num_local_experts") == 0  # Llama-Guard-4
        if fields.family in ALL_EXPERTS and not none and fields.family not in MAY_BE_DENSE:
            fields.count("num_local_experts", "num_experts")
        return shape if dense == shape.layers else dataclasses.replace(shape, dense_layers=dense)
    own = "intermediate_size" if fields.family in ALL_EXPERTS else "moe_intermediate_size"
    if fields.family == "longcat_flash":
        own = "expert_ffn_hidden_size"
    intermediate = fields.first(own) or fields.count(own)
    drawn = fields.first(
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_k",
        "moe_topk",
        "top_k_experts",
        "moe_top_k",
    ) or fields.count("num_experts_per_tok")
    idle = fields.optional("zero_expert_num")  # chosen like the others, but they do nothing
    return dataclasses.replace(
        shape,
        moe_layers=moe_layers,
        dense_layers=None if dense == shape.layers - moe_layers else dense,
        experts=experts,
        experts_per_token=max(1, drawn * experts // (experts + idle)),
        moe_intermediate=intermediate,
        shared_intermediate=_shared(fields, intermediate),
        expert_hidden=fields.optional("moe_latent_size"),
        other_weights=shape.other_weights + moe_layers * _image_experts(fields, shape.hidden),
    )  # fmt: skip


def _image_experts(fields: Fields, hidden: int) -> int:
    """Weights of a layer's experts that text does not pass (ERNIE-4.5-VL), three matrices each."""
    if not fields.family.startswith("ernie4_5"):
        return 0
    widths, counts = fields.items("moe_intermediate_size"), fields.items("moe_num_experts")
    if len(widths) < 2:
        return 0
    count = counts[1] if len(counts) > 1 else fields.first("moe_num_experts")
    if not (type(widths[1]) is int and type(count) is int):
        raise fields.error(f"{count!r} experts of {widths[1]!r}: they must be whole numbers")
    return 3 * hidden * widths[1] * count


def _dbrx(shape: ModelShape, fields: Fields) -> ModelShape:
    """Its experts have an object of their own."""
    part = fields.part("ffn_config")
    if part is None:
        raise fields.error("ffn_config is missing")
    return dataclasses.replace(
        shape,
        moe_layers=shape.layers,
        dense_layers=None,
        experts=part.count("moe_num_experts"),
        experts_per_token=part.count("moe_top_k"),
        moe_intermediate=part.count("ffn_hidden_size"),
    )


def _shared(fields: Fields, intermediate: int) -> int:
    """Width of the shared part that every token passes besides its experts."""
    if fields.family.startswith("llama4"):
        return intermediate
    keys = (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size", "share_expert_dim",
    )  # fmt: skip
    if own := fields.optional(*keys):
        return own
    return intermediate * fields.first(
        "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"
    )


def _positions(fields: Fields, hidden: int) -> int:
    """A table of learned positions."""
    if fields.family in ("gpt2", "gpt_bigcode", "opt"):
        return hidden * fields.optional("n_positions", "max_position_embeddings")
    return 0


def _per_layer_tables(fields: Fields, hidden: int, layers: int) -> int:
    """The tables of small gemma-4 models that each layer looks up."""
    width = fields.optional("hidden_size_per_layer_input")
    if not width:
        return 0
    vocabulary = fields.optional("vocab_size_per_layer_input") or fields.count("vocab_size")
    return layers * width * (vocabulary + 3 * hidden)


def _with_encoders(shape: ModelShape, fields: Fields) -> ModelShape:
    found = encoder_weights(fields, shape.hidden, shape.intermediate)
    if found is None:
        return shape
    weights, whole = found
    doubt = Doubt(ENCODERS, VISION_ERROR if whole else UNKNOWN_ERROR)
    return dataclasses.replace(
        shape,
        other_weights=shape.other_weights + weights,
        unmodelled=(*shape.unmodelled, doubt),
    )


def _with_blocks(shape: ModelShape, fields: Fields) -> ModelShape:
    """The shape with individually chosen layers (Llama-Nemotron).

    Each block says how many query heads share a KV head, and how wide its MLP is as a multiple
    of the hidden size; either may be missing in a block, or be one square matrix.
    """
    attention = mlp = 0
    kept: dict[int, int] = {}  # layers by KV heads
    widths: set[int] = set()
    for block in fields.items("block_configs"):
        part: Mapping[str, Any] = block.get("attention", {})
        if part.get("replace_with_linear"):
            attention += shape.hidden * shape.hidden
        elif not part.get("no_op"):
            kv_heads = shape.heads // int(part.get("n_heads_in_group") or 1)
            kept[kv_heads] = kept.get(kv_heads, 0) + 1
            attention += 2 * shape.hidden * shape.head_dim * (shape.heads + kv_heads)
        part = block.get("ffn", {})
        if part.get("replace_with_linear"):
            mlp += shape.hidden * shape.hidden
        elif not part.get("no_op"):
            width = int(2 * float(part.get("ffn_mult") or 0) * shape.hidden / 3)
            width = -(-width // _WIDTH_STEP) * _WIDTH_STEP
            widths.add(width)
            mlp += 3 * shape.hidden * width
    return dataclasses.replace(
        shape,
        kv_heads=min(kept, default=shape.heads),
        intermediate=max(widths, default=0),
        attention_weights=attention,
        dense_weights=mlp,
        caches=tuple(Cache(n, heads, 2 * shape.head_dim) for heads, n in sorted(kept.items())),
    )


def _matrices(fields: Fields, shape: ModelShape) -> dict[str, tuple[list[int], int]]:
    """By kind of module: the layers that have one, and its weights in one layer."""
    mixers, feeds = layer_kinds(fields, shape.layers)
    attention = [i for i, kind in enumerate(mixers) if kind in (FULL, WINDOW, BOTH)]
    states = [i for i, kind in enumerate(mixers) if kind in (STATE, BOTH)]
    dense = [i for i, kind in enumerate(feeds) if kind in (MLP, BOTH)]
    moe = [i for i, kind in enumerate(feeds) if kind in (MOE, BOTH)]
    mlp, shared = _matrix(shape, shape.intermediate), _matrix(shape, shape.shared_intermediate)
    experts = shape.experts * shape.expert_weights
    state = state_space(fields, shape.hidden, shape.dtype).weights if states else 0
    mixing = shape.layer_weights - len(dense) * mlp - len(moe) * (experts + shared)
    each = max(0, mixing - len(states) * state) // max(1, len(attention))
    return {
        "attention": (attention, each),
        "state": (states, state),
        "mlp": (dense, mlp),
        "moe beside" if BOTH in feeds else "moe": (moe, experts),
        "shared": (moe, shared),
    }


def _matrix(shape: ModelShape, intermediate: int) -> int:
    return (3 if shape.gated else 2) * shape.hidden * intermediate


def _check_family(fields: Fields, weighed: bool) -> None:
    """Raise for models that would be counted wrong."""
    outer = str(fields.config.get("model_type", ""))
    for family in (fields.family, outer):
        if family in REFUSED:
            raise fields.error(f"model_type {family!r} is not modelled: {REFUSED[family]}")
    if fields.text.get("is_encoder_decoder"):
        raise fields.error("an encoder with a decoder is not modelled")
    if fields.family in KNOWN:
        return
    unusual = sorted(
        key
        for key, value in fields.text.items()
        if value and _UNUSUAL.search(key) and not (weighed and _EXPERTS.search(key))
    )
    if unusual:
        raise fields.error(
            f"model_type {fields.family!r} is not known, and it has what a plain decoder has not: "
            f"{', '.join(unusual[:4])}"
        )


def _doubts(fields: Fields, mixers: list[str]) -> tuple[Doubt, ...]:
    """The uncertain properties for the memory estimate, in words."""
    found = []
    if fields.family not in KNOWN:
        what = f"model_type {fields.family!r}, counted as a plain decoder,"
        found.append(Doubt(what, UNKNOWN_ERROR))
    if WINDOW in mixers:
        found.append(Doubt("how vLLM packs sliding window layers", WINDOWS_ERROR))
    if STATE in mixers or BOTH in mixers:
        found.append(Doubt("how vLLM packs hybrid layers", STATES_ERROR))
    if SHARED in mixers:
        found.append(Doubt("whether vLLM keeps once what layers share", UNKNOWN_ERROR))
    if CROSS in mixers:
        found.append(Doubt("what layers of cross-attention keep of images", STATES_ERROR))
    if fields.optional("kv_lora_rank"):
        found.append(Doubt("multi-head latent attention's working memory", LATENT_ERROR))
    return tuple(found)


def own_dtype(asked: str | None, fields: Fields) -> str:
    """The name of the loaded dtype."""
    own = fields.said("torch_dtype") or fields.said("dtype")
    # If it is missing, vLLM looks into the weights: bfloat16 in nearly all.
    own = "bfloat16" if own is None and fields.family in KNOWN - {""} else own
    return dtype_name(asked, "float16" if own in (None, "float32") else str(own))


def dtype_name(asked: str | None, own: str) -> str:
    """``own``, unless another is requested. Raises ConfigError for an unknown one."""
    name = own if asked in (None, "auto") else str(asked)
    name = name.removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if name not in ("float16", "bfloat16", "float32"):
        known = ", ".join(sorted({*_DTYPES, "float16", "bfloat16", "float32", "auto"}))
        raise ConfigError(f"dtype {name!r} is not known; one of {known}")
    assert name in DTYPE_BYTES
    return name
