"""Models by name, and from a Hugging Face ``config.json``.

The cards hold the figures of each model's own ``config.json``; parameters are computed from them,
and a test holds them against the published counts. Only decoders for text: of a multimodal model
its text part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from hetero_gateway.core.nearest import folded, nearest_names
from hetero_gateway.errors import ConfigError
from hetero_gateway.planner.model_shape import DTYPE_BYTES, ModelShape, Quantization

__all__ = ["MODEL_CARDS", "ModelShape", "Quantization", "model_card", "model_from_config"]

# Families whose MLP has two matrices.
_UNGATED: Final = {"phi", "gpt_neox", "starcoder2", "nemotron"}
# Families whose configuration leaves tie_word_embeddings out when it is true.
_TIED: Final = {"gemma", "gemma2", "gemma3", "gemma3_text", "granite"}
# Where intermediate_size is that of one expert.
_ALL_EXPERTS: Final = {"mixtral", "gpt_oss", "granitemoe", "phimoe"}
_DTYPES: Final = {"half": "float16", "float": "float32"}

_Row = tuple[str, int, int, int, int, int, int, int, bool, int]

# name, layers, hidden, heads, KV heads, head size, MLP, vocabulary, tied embeddings, positions.
_DENSE: Final[tuple[_Row, ...]] = (
    ("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, False, 4096),
    ("Llama-2-13B", 40, 5120, 40, 40, 128, 13824, 32000, False, 4096),
    ("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000, False, 4096),
    ("CodeLlama-7B", 32, 4096, 32, 32, 128, 11008, 32016, False, 16384),
    ("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, False, 8192),
    ("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, False, 8192),
    ("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, False, 131072),
    ("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, False, 131072),
    ("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True, 131072),
    ("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, True, 131072),
    ("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256, False, 131072),
    ("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, True, 32768),
    ("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, True, 32768),
    ("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, True, 32768),
    ("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, False, 32768),
    ("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, False, 32768),
    ("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, False, 32768),
    ("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, False, 32768),
    ("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True, 40960),
    ("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, True, 40960),
    ("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True, 40960),
    ("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, False, 40960),
    ("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False, 40960),
    ("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False, 40960),
    ("DeepSeek-R1-Distill-Qwen-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, False, 131072),
    ("DeepSeek-R1-Distill-Qwen-7B", 28, 3584, 28, 4, 128, 18944, 152064, False, 131072),
    ("DeepSeek-R1-Distill-Qwen-14B", 48, 5120, 40, 8, 128, 13824, 152064, False, 131072),
    ("DeepSeek-R1-Distill-Qwen-32B", 64, 5120, 40, 8, 128, 27648, 152064, False, 131072),
    ("DeepSeek-R1-Distill-Llama-8B", 32, 4096, 32, 8, 128, 14336, 128256, False, 131072),
    ("DeepSeek-R1-Distill-Llama-70B", 80, 8192, 64, 8, 128, 28672, 128256, False, 131072),
    ("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32768, False, 32768),
    ("Mistral-Nemo-12B", 40, 5120, 32, 8, 128, 14336, 131072, False, 131072),
    ("Mistral-Small-24B", 40, 5120, 32, 8, 128, 32768, 131072, False, 32768),
    ("gemma-2-2b", 26, 2304, 8, 4, 256, 9216, 256000, True, 8192),
    ("gemma-2-9b", 42, 3584, 16, 8, 256, 14336, 256000, True, 8192),
    ("gemma-2-27b", 46, 4608, 32, 16, 128, 36864, 256000, True, 8192),
    ("granite-3.1-2b", 40, 2048, 32, 8, 64, 8192, 49155, True, 131072),
    ("granite-3.1-8b", 40, 4096, 32, 8, 128, 12800, 49155, True, 131072),
    ("granite-3.3-8b", 40, 4096, 32, 8, 128, 12800, 49159, True, 131072),
    ("phi-2", 32, 2560, 32, 32, 80, 10240, 51200, False, 2048),
    ("Phi-3-mini", 32, 3072, 32, 32, 96, 8192, 32064, False, 4096),
    ("phi-4", 40, 5120, 40, 10, 128, 17920, 100352, False, 16384),
)

# The same, with every layer's MLP made of experts: (…, experts, per token, MLP of an expert).
_MOE: Final[tuple[tuple[_Row, int, int, int], ...]] = (
    (("Mixtral-8x7B", 32, 4096, 32, 8, 128, 0, 32000, False, 32768), 8, 2, 14336),
    (("Mixtral-8x22B", 56, 6144, 48, 8, 128, 0, 32768, False, 65536), 8, 2, 16384),
    (("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 0, 151936, False, 40960), 128, 8, 768),
    (("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 0, 151936, False, 40960), 128, 8, 1536),
)


def _card(row: _Row) -> ModelShape:
    name, layers, hidden, heads, kv_heads, head_dim, mlp, vocabulary, tied, positions = row
    return ModelShape(
        name, layers, hidden, heads, kv_heads, head_dim, vocabulary, mlp, tied,
        gated=name != "phi-2",
        max_position=positions,
    )  # fmt: skip


def _moe_card(row: _Row, experts: int, per_token: int, intermediate: int) -> ModelShape:
    card = _card(row)
    return dataclasses.replace(
        card,
        moe_layers=card.layers,
        experts=experts,
        experts_per_token=per_token,
        moe_intermediate=intermediate,
    )


MODEL_CARDS: Final[dict[str, ModelShape]] = {
    card.name: card for card in (*map(_card, _DENSE), *(_moe_card(*row) for row in _MOE))
}
_FOLDED: Final = {folded(name): name for name in MODEL_CARDS}
# Suffixes of tuned versions, whose shape is that of the model.
_TUNED: Final = {"meta", "instruct", "it", "chat", "hf", "base", "dynamic", "v0.1", "v0.2", "v0.3"}
# Suffixes of quantised checkpoints, and what they are stored as.
_STORED: Final = {
    "fp8": "fp8", "awq": "awq", "gptq": "gptq", "int4": "int4", "w4a16": "int4",
    "int8": "int8", "w8a8": "int8", "quantized.w4a16": "int4", "quantized.w8a8": "int8",
}  # fmt: skip


def model_card(
    name: str, *, dtype: str | None = None, quantization: str | Mapping[str, Any] | None = None
) -> ModelShape:
    """The built-in card of that name; case, an organisation and "-Instruct" do not matter.

    Args:
        name: "Qwen/Qwen2.5-72B-Instruct-AWQ" is Qwen2.5-72B, stored as AWQ.
        dtype, quantization: as of ``model_from_config``; None: bfloat16, and what the name says.

    Raises:
        ConfigError: with the nearest names, or for a dtype or method that is not known.
    """
    short = name.rsplit("/", 1)[-1]
    parts = short.casefold().split("-")
    plain = [part for part in parts if part not in _TUNED and part not in _STORED]
    known = _FOLDED.get(folded(short)) or _FOLDED.get(folded("-".join(plain)))
    if known is None:
        raise ConfigError(
            f"model {name!r} has no built-in card; the nearest: "
            f"{', '.join(nearest_names(short, MODEL_CARDS))}; or give its config.json"
        )
    if quantization is None:
        stored = [_STORED[part] for part in parts if part in _STORED]
        # "GPTQ-Int8": the bits count.
        quantization = "int8" if "int8" in stored else next(iter(stored), None)
    return dataclasses.replace(
        MODEL_CARDS[known],
        dtype=_dtype(dtype, "bfloat16"),
        quantization=None if quantization is None else _quantization(quantization),
    )


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    dtype: str | None = None,
    quantization: str | Mapping[str, Any] | None = None,
) -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Args:
        dtype: vLLM's ``--dtype``; None or "auto": the file's, float16 where that is float32.
        quantization: "fp8", "int8", "int4", "awq", "gptq", or a ``quantization_config``; None:
            what the file says.

    Raises:
        ConfigError: naming the field that is missing or of no use.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"{name}: text_config must be an object")
    fields = _Fields(text, name)
    family = str(text.get("model_type", config.get("model_type", "")))
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.optional("head_dim") or hidden // heads
    own = text.get("torch_dtype", text.get("dtype", config.get("torch_dtype", config.get("dtype"))))
    stored = quantization
    if stored is None:
        stored = text.get("quantization_config", config.get("quantization_config"))
    shape = ModelShape(
        name=name,
        layers=fields.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.optional("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocabulary=fields.count("vocab_size"),
        intermediate=0 if family in _ALL_EXPERTS else fields.count("intermediate_size"),
        tied_embeddings=bool(
            text.get("tie_word_embeddings", config.get("tie_word_embeddings", family in _TIED))
        ),
        gated=family not in _UNGATED,
        max_position=fields.optional("max_position_embeddings"),
        dtype=_dtype(dtype, "float16" if own in (None, "float32") else str(own)),
        quantization=None if stored is None else _quantization(stored),
        unmodelled=_unmodelled(text, config, family),
    )
    return _with_latent(_with_experts(shape, fields, family), fields)


class _Fields:
    """Whole numbers of a config.json, with errors that name the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config = config
        self._name = name

    def count(self, *keys: str) -> int:
        """The first of these fields that is there."""
        for key in keys:
            if self._config.get(key) is not None:
                return self._whole(key)
        raise ConfigError(f"{self._name}: config.json has no {' or '.join(keys)}")

    def optional(self, *keys: str) -> int:
        """The same, or 0."""
        for key in keys:
            if self._config.get(key) is not None:
                return self._whole(key, least=0)
        return 0

    def names(self, key: str) -> list[Any]:
        value = self._config.get(key) or []
        return list(value) if isinstance(value, list | tuple) else []

    def _whole(self, key: str, least: int = 1) -> int:
        value = self._config[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{self._name}: config.json: {key} is {value!r}, "
                f"it must be a whole number of at least {least}"
            )
        return value


def _with_experts(shape: ModelShape, fields: _Fields, family: str) -> ModelShape:
    """The same with its experts, where the configuration has some."""
    experts = fields.optional("num_local_experts", "num_experts", "n_routed_experts")
    if experts < 2:
        if family in _ALL_EXPERTS:
            fields.count("num_local_experts", "num_experts")
        return shape
    own = ("intermediate_size",) if family in _ALL_EXPERTS else ("moe_intermediate_size",)
    intermediate = fields.count(*own)
    shared = fields.optional("shared_expert_intermediate_size")
    if not shared:
        shared = fields.optional("n_shared_experts") * intermediate
    step = fields.optional("decoder_sparse_step", "moe_layer_freq") or 1
    first = fields.optional("first_k_dense_replace")
    dense = {int(layer) for layer in fields.names("mlp_only_layers")}
    layers = [
        layer
        for layer in range(first, shape.layers)
        if layer not in dense and ((layer + 1) % step == 0 or step == 1)
    ]
    return dataclasses.replace(
        shape,
        moe_layers=len(layers),
        experts=experts,
        experts_per_token=fields.count("num_experts_per_tok", "experts_per_token"),
        moe_intermediate=intermediate,
        shared_intermediate=shared,
    )


def _with_latent(shape: ModelShape, fields: _Fields) -> ModelShape:
    """The same with multi-head latent attention (DeepSeek V2 and V3), where it has that."""
    rank = fields.optional("kv_lora_rank")
    if not rank:
        return shape
    rope, plain = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value, q_rank = fields.count("v_head_dim"), fields.optional("q_lora_rank")
    queries = shape.heads * (plain + rope)
    weights = shape.hidden * queries
    if q_rank:
        weights = shape.hidden * q_rank + q_rank * queries
    weights += shape.hidden * (rank + rope) + rank * shape.heads * (plain + value)
    weights += shape.heads * value * shape.hidden
    return dataclasses.replace(
        shape,
        latent=rank + rope,
        attention_weights=weights,
        unmodelled=(*shape.unmodelled, "multi-head latent attention"),
    )


def _unmodelled(text: Mapping[str, Any], config: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """What the memory estimate leaves out, in words."""
    found = []
    kinds = set(text.get("layer_types") or ()) - {"full_attention"}
    if any("sliding" in str(kind) for kind in kinds):
        # vLLM gives gemma-2's sliding layers the same blocks as the others; its logs agree.
        if family != "gemma2":
            found.append("sliding-window layers (counted as full attention)")
    elif text.get("sliding_window") and text.get("use_sliding_window", True) and family != "gemma2":
        found.append("sliding window (counted as full attention)")
    if {str(kind) for kind in kinds} & {"linear_attention", "mamba", "recurrent"} or any(
        key in text for key in ("mamba_d_state", "ssm_state_size", "linear_num_key_heads")
    ):
        found.append("hybrid layers without a KV cache (counted as attention)")
    if "vision_config" in config or "audio_config" in config:
        found.append("the vision or audio part")
    return tuple(found)


def _dtype(asked: str | None, own: str) -> str:
    """The name of the dtype that is loaded."""
    name = own if asked in (None, "auto") else str(asked)
    name = name.removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if name not in ("float16", "bfloat16", "float32"):
        known = ", ".join(sorted({*_DTYPES, "float16", "bfloat16", "float32", "auto"}))
        raise ConfigError(f"dtype {name!r} is not known; one of {known}")
    assert name in DTYPE_BYTES
    return name


def _quantization(stored: str | Mapping[str, Any]) -> Quantization | None:
    """From a name, or from the quantization_config of a checkpoint."""
    if isinstance(stored, str):
        return _named_quantization(stored)
    method = str(stored.get("quant_method", stored.get("quant_algo", ""))).casefold()
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(stored)
    if method == "fp8":
        block = stored.get("weight_block_size")
        if isinstance(block, list | tuple) and len(block) == 2:
            return Quantization("fp8", 8, block=(int(block[0]), int(block[1])))
        return Quantization("fp8", 8)
    if method in ("awq", "gptq"):
        bits = _positive(stored.get("bits", stored.get("w_bit", 4)), f"{method} bits")
        group = stored.get("group_size", stored.get("q_group_size", 128))
        zero_points = method == "awq" or not stored.get("sym", False)
        return Quantization(method, bits, max(0, int(group)), zero_points)
    if method == "bitsandbytes":
        four = bool(stored.get("load_in_4bit", stored.get("_load_in_4bit", False)))
        return Quantization("bitsandbytes", 4 if four else 8, 64 if four else 0)
    return _named_quantization(method)


def _compressed_tensors(stored: Mapping[str, Any]) -> Quantization:
    groups = stored.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if isinstance(weights, Mapping):
            bits = _positive(weights.get("num_bits", 8), "num_bits")
            group = int(weights.get("group_size") or 0)
            zero_points = bits < 8 and not weights.get("symmetric", True)
            return Quantization("compressed-tensors", bits, max(0, group), zero_points)
    raise ConfigError("quantization_config: compressed-tensors without config_groups.*.weights")


def _named_quantization(name: str) -> Quantization | None:
    known = {
        "none": None,
        "fp8": Quantization("fp8", 8),
        "w8a8": Quantization("compressed-tensors", 8),
        "int8": Quantization("compressed-tensors", 8),
        # Four bits: groups of 128, as published checkpoints have them.
        "w4a16": Quantization("compressed-tensors", 4, 128),
        "int4": Quantization("compressed-tensors", 4, 128),
        "awq": Quantization("awq", 4, 128, zero_points=True),
        "gptq": Quantization("gptq", 4, 128, zero_points=True),
        "mxfp4": Quantization("mxfp4", 4.25),
        "bitsandbytes": Quantization("bitsandbytes", 4, 64),
    }
    base = name.casefold().removesuffix("_marlin")
    if base not in known:
        raise ConfigError(f"quantization {name!r} is not known; one of {', '.join(sorted(known))}")
    return known[base]


def _positive(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"quantization_config: {what} is {value!r}, it must be above 0")
    return float(value)
