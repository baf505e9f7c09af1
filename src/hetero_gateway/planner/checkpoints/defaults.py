"""What a config.json leaves out because its family's configuration class has it as a default.

Some publishers write only what differs from the defaults of the class: gemma-3's file has no number
of attention heads. The figures are those of transformers' configuration classes (5.19), which vLLM
reads a config.json with; a test compares them where that version is installed. Families whose
published files are complete are not here, so that a field that is missing there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_GEMMA3: Final[dict[str, Any]] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
_GEMMA4: Final[dict[str, Any]] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "global_head_dim": 512, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
_LLAMA4: Final[dict[str, Any]] = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
_COHERE: Final[dict[str, Any]] = {"tie_word_embeddings": True}

# Of any config.json of the family.
FAMILY_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "cohere": _COHERE,
    "cohere2": _COHERE | {"sliding_window": 4096},
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    # IBM publishes tied models; the class itself says untied.
    "granite": {"tie_word_embeddings": True},
    "bloom": {"tie_word_embeddings": True},
    "falcon": {
        "tie_word_embeddings": True,
        "multi_query": True,
        "new_decoder_architecture": False,
    },
    "gpt2": {"tie_word_embeddings": True},
    "gpt_bigcode": {"tie_word_embeddings": True, "multi_query": True},
    "opt": {"tie_word_embeddings": True},
    "mpt": {"tie_word_embeddings": True},
    "starcoder2": {"tie_word_embeddings": True},
    "olmo": {"tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "seed_oss": {"head_dim": 128},
    "lfm2": {"tie_word_embeddings": True, "conv_L_cache": 3},
    "lfm2_moe": {"tie_word_embeddings": True, "conv_L_cache": 3},
    "ernie4_5": {"tie_word_embeddings": True},
    "ernie4_5_moe": {"tie_word_embeddings": True},
    "jamba": {
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "mamba": {"tie_word_embeddings": True, "state_size": 16, "conv_kernel": 4, "expand": 2},
    "mamba2": {"n_groups": 8, "state_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 64},
    "falcon_mamba": {"tie_word_embeddings": True, "state_size": 16, "conv_kernel": 4, "expand": 2},
}

# Of a text_config inside a multimodal file, which is written as a difference, too.
NESTED_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
}  # fmt: skip
