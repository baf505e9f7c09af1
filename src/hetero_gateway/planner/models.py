"""Models by name.

The cards hold the figures of each model's own ``config.json``; parameters are computed from them,
and a test holds them against the published counts. ``checkpoints.shape`` reads such a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from hetero_gateway.core.nearest import folded, nearest_names
from hetero_gateway.errors import ConfigError
from hetero_gateway.planner.checkpoints.quantizations import quantization_of
from hetero_gateway.planner.checkpoints.shape import dtype_name, model_from_config
from hetero_gateway.planner.model_shape import ModelShape, Quantization

__all__ = ["MODEL_CARDS", "ModelShape", "Quantization", "model_card", "model_from_config"]

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
    ("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, False, 131072),
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
    ("Qwen3-4B-2507", 36, 2560, 32, 8, 128, 9728, 151936, True, 262144),
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
    ("Phi-4-mini", 32, 3072, 24, 8, 128, 8192, 200064, True, 131072),
    ("phi-4", 40, 5120, 40, 10, 128, 17920, 100352, False, 16384),
)

# The same, with every layer's MLP made of experts: (…, experts, per token, MLP of an expert).
_MOE: Final[tuple[tuple[_Row, int, int, int], ...]] = (
    (("Mixtral-8x7B", 32, 4096, 32, 8, 128, 0, 32000, False, 32768), 8, 2, 14336),
    (("Mixtral-8x22B", 56, 6144, 48, 8, 128, 0, 32768, False, 65536), 8, 2, 16384),
    (("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 0, 151936, False, 40960), 128, 8, 768),
    (("Qwen3-30B-A3B-2507", 48, 2048, 32, 4, 128, 0, 151936, False, 262144), 128, 8, 768),
    (("Qwen3-Coder-30B-A3B", 48, 2048, 32, 4, 128, 0, 151936, False, 262144), 128, 8, 768),
    (("Qwen3-Coder-480B-A35B", 62, 6144, 96, 8, 128, 0, 151936, False, 262144), 160, 8, 2560),
    (("Qwen3-235B-A22B-2507", 94, 4096, 64, 4, 128, 0, 151936, False, 262144), 128, 8, 1536),
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


# Models whose layers differ, by the fields of their own config.json.
_DEEPSEEK: Final = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_SIGLIP: Final = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201088, "num_local_experts": experts,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    }  # fmt: skip


def _gemma3(hidden: int, mlp: int, layers: int, **more: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "sliding_window": 1024, **more,
    }  # fmt: skip
    return {"model_type": "gemma3", "text_config": text, "vision_config": _SIGLIP}


_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma-3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 262144, "sliding_window": 512, "max_position_embeddings": 32768,
    },
    "gemma-3-4b": _gemma3(2560, 10240, 34),
    "gemma-3-12b": _gemma3(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8),
    "gemma-3-27b": _gemma3(
        5376, 21504, 62, num_attention_heads=32, num_key_value_heads=16, head_dim=128
    ),
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-V3-0324": _DEEPSEEK,
    "DeepSeek-V3.1": _DEEPSEEK,
    "DeepSeek-R1": _DEEPSEEK,
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "vocab_size": 151936, "full_attention_interval": 4, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
        "max_position_embeddings": 262144,
    },
}  # fmt: skip

MODEL_CARDS: Final[dict[str, ModelShape]] = {
    card.name: card
    for card in (
        *map(_card, _DENSE),
        *(_moe_card(*row) for row in _MOE),
        *(model_from_config(fields, name=name) for name, fields in _CONFIGS.items()),
    )
}
_FOLDED: Final = {folded(name): name for name in MODEL_CARDS}
# Suffixes of tuned versions, whose shape is that of the model.
_TUNED: Final = {
    "meta", "instruct", "it", "chat", "hf", "base", "dynamic", "thinking", "pt", "qat", "unsloth",
    "v0.1", "v0.2", "v0.3",
}  # fmt: skip
# Suffixes of quantised checkpoints, and what they are stored as.
_STORED: Final = {
    "fp8": "fp8", "awq": "awq", "gptq": "gptq", "int4": "int4", "w4a16": "int4",
    "int8": "int8", "w8a8": "int8", "quantized.w4a16": "int4", "quantized.w8a8": "int8",
    "bnb": "bitsandbytes", "4bit": "bitsandbytes", "nf4": "bitsandbytes", "nvfp4": "nvfp4",
    "fp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip


def says_storage(name: str) -> bool:
    """Whether a checkpoint's name ends with how it is stored: "…-AWQ", "…-FP8-dynamic"."""
    return any(part in _STORED for part in name.rsplit("/", 1)[-1].casefold().split("-"))


def model_card(
    name: str, *, dtype: str | None = None, quantization: str | Mapping[str, Any] | None = None
) -> ModelShape:
    """The built-in card of that name; case, an organisation and "-Instruct" do not matter.

    Args:
        name: "Qwen/Qwen2.5-72B-Instruct-AWQ" is Qwen2.5-72B, stored as AWQ.
        dtype, quantization: as of ``model_from_config``; None: bfloat16, and what the name says,
            else what the publisher stores it in (gpt-oss: mxfp4, DeepSeek-V3: fp8).

    Raises:
        ConfigError: with the nearest names, or for a dtype or method that is not known.
    """
    short = name.rsplit("/", 1)[-1]
    parts = short.casefold().split("-")
    plain = [part for part in parts if part not in _TUNED and part not in _STORED]
    undated = [part for part in plain if not (part.isdigit() and len(part) == 4)]
    tried = (short, "-".join(plain), "-".join(undated))
    known = next((_FOLDED[folded(x)] for x in tried if folded(x) in _FOLDED), None)
    if known is None:
        raise ConfigError(
            f"model {name!r} has no built-in card; the nearest: "
            f"{', '.join(nearest_names(short, MODEL_CARDS))}; or give its config.json"
        )
    card = MODEL_CARDS[known]
    if quantization is None:
        stored = [_STORED[part] for part in parts if part in _STORED]
        # "GPTQ-Int8": the bits count.
        quantization = "int8" if "int8" in stored else next(iter(stored), None)
        if quantization == "fp8" and name.casefold().startswith("qwen/"):
            quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    card = dataclasses.replace(card, dtype=dtype_name(dtype, "bfloat16"))
    if quantization is None:
        return card
    found = quantization_of(quantization)
    own = card.quantization
    if own is not None and found is not None and own.method == found.method:
        return card  # the publisher's own, with its blocks and what it leaves wide
    return dataclasses.replace(card, quantization=found, wide_weights=0)
