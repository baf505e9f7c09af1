"""The matrices by which a layer mixes tokens, and its cache: of one layer each.

    attention     2·hidden·heads·head_dim + hidden·kv_heads·(key + value), twice the queries if the
                  output is gated
    latent        DeepSeek's: queries and keys through narrow matrices, one vector kept per token
    Mamba-2       in: hidden·(2·inner + 2·groups·state + heads); out: inner·hidden
    Mamba-1       in: hidden·2·inner; B, C and dt: inner·(rank + 2·state) + rank·inner; out
    delta net     in: hidden·(2·keys + 2·values + 2·heads); out: values·hidden
    short conv    in: hidden·3·hidden; out: hidden·hidden
    lightning     in: hidden·4·inner; out: inner·hidden

States per sequence follow vLLM's model_executor/layers/mamba/mamba_utils.py: a convolution's last
inputs in the model's dtype, and the state itself in the dtype that the file names (float32 in
Nemotron-3 and Qwen3.5), else the model's.
"""

from dataclasses import dataclass

from hetero_gateway.files.checkpoints.fields import Fields
from hetero_gateway.planner.model_shape import DTYPE_BYTES, Cache

# Families whose attention multiplies its output by a gate of the queries' width.
_GATED_OUTPUT = ("qwen3_next", "qwen3_5")


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer: its matrices, and its cache per token."""

    weights: int
    heads: int  # KV heads
    elements: int  # of one KV head and token: key and value
    copied: bool = False


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer with a state per sequence."""

    weights: int
    state_bytes: int


def head_sizes(fields: Fields) -> tuple[int, int, int]:
    """(heads, KV heads, head size) of the decoder's ordinary attention."""
    heads = fields.count("num_attention_heads", "n_head", "n_heads")
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    size = (
        fields.optional("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head")
        or hidden // heads
    )
    return heads, _kv_heads(fields, heads), size


def _kv_heads(fields: Fields, heads: int) -> int:
    attention = fields.part("attn_config")
    if attention is not None:
        return attention.optional("kv_n_heads") or heads
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    keys = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    return fields.optional(*keys, "num_attention_groups") or heads


def full_attention(fields: Fields, hidden: int) -> Attention:
    """A layer that attends to all tokens."""
    if fields.optional("kv_lora_rank"):
        return _latent(fields, hidden)
    heads, kv_heads, size = head_sizes(fields)
    if fields.family.startswith("gemma4"):
        size = fields.optional("global_head_dim") or size
        kv_heads = fields.optional("num_global_key_value_heads") or kv_heads
        same = bool(fields.get("attention_k_eq_v"))  # one matrix for both, cached twice
        weights = hidden * size * (2 * heads + kv_heads * (1 if same else 2))
        return Attention(weights, kv_heads, 2 * size)
    return _attention(fields, hidden, heads, kv_heads, size, fields.optional("v_head_dim") or size)


def window_attention(fields: Fields, hidden: int) -> Attention:
    """A layer that attends to a window; its heads may differ from the full ones'."""
    heads, kv_heads, size = head_sizes(fields)
    value = fields.optional("swa_v_head_dim", "v_head_dim") or size
    heads = fields.optional("swa_num_attention_heads") or heads
    kv_heads = fields.optional("swa_num_key_value_heads") or kv_heads
    size = fields.optional("swa_head_dim") or size
    return _attention(fields, hidden, heads, kv_heads, size, value)


def _attention(
    fields: Fields, hidden: int, heads: int, kv_heads: int, size: int, value: int
) -> Attention:
    gated = fields.get("attn_output_gate", fields.family.startswith(_GATED_OUTPUT))
    queries = heads * size * (2 if gated else 1)
    weights = hidden * (queries + kv_heads * (size + value) + heads * value)
    return Attention(weights, kv_heads, size + value)


def _latent(fields: Fields, hidden: int) -> Attention:
    """DeepSeek V2 and V3's, with V3.2's indexer if there is one."""
    heads = fields.count("num_attention_heads")
    rank, rope = fields.count("kv_lora_rank"), fields.optional("qk_rope_head_dim")
    plain, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    q_rank = fields.optional("q_lora_rank")
    queries = heads * (plain + rope)
    weights = hidden * q_rank + q_rank * queries if q_rank else hidden * queries
    weights += hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    if fields.get("mla_use_output_gate"):
        weights += hidden * heads * value
    if index := fields.optional("index_head_dim"):
        index_heads = fields.count("index_n_heads")
        weights += q_rank * index_heads * index + hidden * (index + index_heads)
    return Attention(weights, 1, rank + rope, copied=True)


def index_cache(fields: Fields, layers: int) -> Cache | None:
    """The cache of DeepSeek-V3.2's indexer: a key in fp8, and a scale for each 128 of it."""
    size = fields.optional("index_head_dim")
    if not size or not fields.optional("kv_lora_rank"):
        return None
    own = sum(kind == "full" for kind in fields.items("indexer_types")[:layers]) or layers
    return Cache(own, 1, size + 4 * (size // 128), copied=True, element_bytes=1.0)


def state_space(fields: Fields, hidden: int, dtype: str) -> StateLayer:
    """A layer with a state, by its family's own field names."""
    size = int(DTYPE_BYTES[dtype])
    kept = str(fields.get("mamba_ssm_cache_dtype", fields.get("mamba_ssm_dtype", dtype)))
    state_size = int(DTYPE_BYTES.get(kept.removeprefix("torch."), size))
    if fields.optional("linear_num_value_heads"):
        return _delta_net(fields, hidden, size, state_size)
    if (linear := fields.part("linear_attn_config")) is not None:
        return _delta_attention(linear, hidden, size)
    if fields.optional("conv_L_cache", "L_cache"):
        cached = fields.count("conv_L_cache", "L_cache")
        return StateLayer(4 * hidden * hidden, hidden * (cached - 1) * size)
    if fields.family.startswith("minimax"):
        heads, _, width = head_sizes(fields)
        return StateLayer(5 * hidden * heads * width, heads * width * width * 4)
    if fields.family == "plamo2":
        return _plamo2(fields, hidden, size, state_size)
    if fields.family in ("jamba", "mamba", "falcon_mamba"):
        return _mamba1(fields, hidden, size, state_size)
    return _mamba2(fields, hidden, size, state_size)


def _mamba2(fields: Fields, hidden: int, size: int, state_size: int) -> StateLayer:
    state = fields.count("ssm_state_size", "mamba_d_state", "state_size")
    groups = fields.optional("n_groups", "mamba_n_groups", "mamba_ngroups") or 1
    kernel = fields.optional("conv_kernel", "mamba_d_conv") or 4
    expand = fields.optional("expand", "mamba_expand") or 2
    heads = fields.count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    width = fields.optional("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    if fields.family == "mamba2":
        width = fields.count("head_dim")
    inner = fields.optional("mamba_d_ssm") or (heads * width if width else expand * hidden)
    mixed = inner + 2 * groups * state
    weights = hidden * (inner + mixed + heads) + inner * hidden + mixed * kernel
    kept = mixed * (kernel - 1) * size + inner * state * state_size
    return StateLayer(weights, kept)


def _plamo2(fields: Fields, hidden: int, size: int, state_size: int) -> StateLayer:
    """Mamba-2's heads, with B, C and dt from the inner width, as Mamba-1 has them."""
    heads = fields.count("mamba_num_heads")
    inner = heads * fields.count("hidden_size_per_head")
    state, kernel = fields.count("mamba_d_state"), fields.optional("mamba_d_conv") or 4
    rank = max(64, hidden // 16)
    weights = hidden * 2 * inner + inner * (rank + 2 * state) + rank * heads + inner * hidden
    weights += inner * kernel
    return StateLayer(weights, inner * (kernel - 1) * size + inner * state * state_size)


def _mamba1(fields: Fields, hidden: int, size: int, state_size: int) -> StateLayer:
    inner = fields.optional("intermediate_size") if fields.family != "jamba" else 0
    inner = inner or hidden * (fields.optional("mamba_expand", "expand") or 2)
    state = fields.count("mamba_d_state", "state_size")
    kernel = fields.optional("mamba_d_conv", "conv_kernel") or 4
    rank = fields.get("mamba_dt_rank", fields.get("time_step_rank", "auto"))
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    weights = hidden * 3 * inner + inner * (rank + 2 * state) + rank * inner
    weights += inner * (state + kernel)
    return StateLayer(weights, inner * (kernel - 1) * size + inner * state * state_size)


def _delta_net(fields: Fields, hidden: int, size: int, state_size: int) -> StateLayer:
    heads = fields.count("linear_num_value_heads")
    key, value = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    keys, values = fields.count("linear_num_key_heads") * key, heads * value
    kernel = fields.optional("linear_conv_kernel_dim") or 4
    mixed = 2 * keys + values
    weights = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden + mixed * kernel
    return StateLayer(weights, mixed * (kernel - 1) * size + heads * key * value * state_size)


def _delta_attention(linear: Fields, hidden: int, size: int) -> StateLayer:
    """Kimi's: queries, keys and values of one width, gates through narrow matrices."""
    heads, width = linear.count("num_heads"), linear.count("head_dim")
    kernel = linear.optional("short_conv_kernel_size") or 4
    inner = heads * width
    narrow = 2 * width * (hidden + inner) + hidden * heads
    weights = hidden * 4 * inner + narrow + 3 * inner * kernel
    return StateLayer(weights, 3 * inner * (kernel - 1) * size + heads * width * width * 4)
