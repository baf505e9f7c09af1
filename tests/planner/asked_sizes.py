"""Which tensor parallelism vLLM was asked about, and of which widths.

vllm_sizes.json has vLLM 0.32's own answers; tests/real_vllm/test_plans.py asks again.
"""

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 32)
# Of a decoder of Llama's and of Qwen3-MoE's class, whose layers all others share.
DENSE = {
    "llama", "qwen2", "qwen3", "phi3", "mistral", "cohere", "granite", "olmo2", "glm4", "smollm3",
    "seed_oss", "ernie4_5", "exaone4", "gemma2", "mimo",
}  # fmt: skip
MOE = {"qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe"}
SHARED = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "moe_intermediate_size", "num_experts_per_tok",
)  # fmt: skip


def small(config):
    """The same widths in one layer, of a class that every width can be asked of; None: neither."""
    family = config["model_type"]
    if family not in DENSE | MOE:
        return None
    fields = {key: config[key] for key in SHARED if config.get(key)}
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields |= {
        "num_hidden_layers": 1, "max_position_embeddings": 1024, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    if family in DENSE:
        return fields | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    experts = next(config[k] for k in ("num_experts", "n_routed_experts", "num_local_experts")
                   if config.get(k))  # fmt: skip
    fields.setdefault("moe_intermediate_size", config["intermediate_size"])
    return fields | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True,
    }  # fmt: skip
