"""What a decoder is made of: counts, and the bytes of its weights and of its KV cache.

    part            weights                                         stays wide when quantised
    embeddings      vocabulary · hidden, twice unless tied          yes
    attention       2·hidden·width + 2·hidden·kv_heads·head_dim     no (width = heads · head_dim)
    MLP             3·hidden·intermediate (2 without a gate)        no
    experts         the same, each; a router of experts · hidden    no (the router: yes)

Norms and biases, below 0.1 % of the rest, are left out. Which file says so is ``models``' work.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "int8": 1.0,
}
# vLLM pads the vocabulary to a multiple of this before it is shared out.
VOCABULARY_PADDING = 64


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of the layers are stored; embeddings and output layer stay wide.

    Args:
        method: vLLM's name ("fp8", "awq", "gptq", "compressed-tensors", …).
        bits: of one weight.
        group_size: weights that share a scale, along the input; 0: one scale per column.
        zero_points: a zero point per group is stored too.
        block: (output, input) weights of one scale of block fp8.
    """

    method: str
    bits: float
    group_size: int = 0
    zero_points: bool = False
    block: tuple[int, int] | None = None

    @property
    def bytes_per_weight(self) -> float:
        """Scales included: two bytes per group, or four per block."""
        extra = 0.0
        if self.group_size > 0:
            extra = (2.0 + (self.bits / 8 if self.zero_points else 0.0)) / self.group_size
        elif self.block is not None:
            extra = 4.0 / (self.block[0] * self.block[1])
        return self.bits / 8 + extra


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape, its storage, and what of it nobody models here.

    Args:
        intermediate: of the dense MLP of a layer; with experts, of the layers that have none.
        gated: the MLP has a gate (SwiGLU): three matrices; else two.
        moe_layers: layers with experts; 0: dense.
        moe_intermediate: of one expert. shared_intermediate: of what every token passes, too.
        latent: elements cached per token and layer by multi-head latent attention, in place of
            the KV heads; 0: none.
        attention_weights: of one layer; None: those of the table above.
        max_position: longest context that the position table is made for; 0: no table.
        dtype: of what is not quantised, and of the KV cache unless the engine is told otherwise.
        unmodelled: what makes the memory estimate uncertain, in words.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    tied_embeddings: bool = False
    gated: bool = True
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    latent: int = 0
    attention_weights: int | None = None
    max_position: int = 0
    dtype: str = "bfloat16"
    quantization: Quantization | None = None
    unmodelled: tuple[str, ...] = ()

    @property
    def dtype_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_weight(self) -> float:
        """Of the layers' matrices."""
        if self.quantization is None:
            return self.dtype_bytes
        return self.quantization.bytes_per_weight

    @property
    def output_weights(self) -> int:
        """Of the output layer, which is as large as the embedding table."""
        return self.vocabulary * self.hidden

    @property
    def embedding_weights(self) -> int:
        """Embedding table and output layer, one and the same where they are tied."""
        return self.output_weights * (1 if self.tied_embeddings else 2)

    @property
    def kv_weights(self) -> int:
        """Of one layer's key and value matrices, which are copied when t exceeds the KV heads."""
        return 0 if self.latent else 2 * self.hidden * self.kv_heads * self.head_dim

    @property
    def _attention(self) -> int:
        if self.attention_weights is not None:
            return self.attention_weights
        return 2 * self.hidden * self.heads * self.head_dim + self.kv_weights

    def _mlp(self, intermediate: int) -> int:
        return (3 if self.gated else 2) * self.hidden * intermediate

    def _layers(self, experts: int) -> int:
        """Matrices of all layers, with so many of the experts counted."""
        dense = self.layers - self.moe_layers
        moe = experts * self._mlp(self.moe_intermediate) + self._mlp(self.shared_intermediate)
        return (
            self.layers * self._attention
            + dense * self._mlp(self.intermediate)
            + self.moe_layers * moe
        )

    @property
    def layer_weights(self) -> int:
        """All matrices but embeddings and output layer (and routers)."""
        return self._layers(self.experts)

    @property
    def active_layer_weights(self) -> int:
        """Those of them that one token passes."""
        return self._layers(self.experts_per_token)

    @property
    def router_weights(self) -> int:
        return self.moe_layers * self.experts * self.hidden

    @property
    def parameters(self) -> int:
        """Φ of Eq. (1)."""
        return self.layer_weights + self.router_weights + self.embedding_weights

    def layer_weights_touched(self, tokens: float) -> float:
        """Matrices that a step of so many tokens reads, its experts drawn evenly."""
        if not self.moe_layers:
            return float(self.layer_weights)
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        idle = missed * self.experts * self._mlp(self.moe_intermediate)
        return self.layer_weights - self.moe_layers * idle

    def weight_bytes(self, tensor_parallel: int = 1) -> float:
        """Of one accelerator of ``tensor_parallel``, as loaded.

        KV matrices are copied when there are more accelerators than KV heads; the vocabulary is
        padded; each accelerator has its own table of positions (sines and cosines).
        """
        t = tensor_parallel
        copies = self.layers * self.kv_weights * (max(t, self.kv_heads) / self.kv_heads - 1)
        padded = -(-self.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        wide = self.embedding_weights * padded / self.vocabulary + self.router_weights * t
        positions = self.max_position * self.head_dim * self.dtype_bytes
        matrices = (self.layer_weights + copies) * self.bytes_per_weight
        return (matrices + wide * self.dtype_bytes) / t + positions

    def kv_token_bytes(self, tensor_parallel: int = 1, kv_dtype: str = "auto") -> float:
        """KV bytes of one token on all accelerators together, heads copied where t exceeds them.

        Args:
            kv_dtype: vLLM's ``--kv-cache-dtype``; "auto" is the model's own.
        """
        size = self.dtype_bytes if kv_dtype == "auto" else DTYPE_BYTES[kv_dtype]
        if self.latent:  # every accelerator caches the whole latent vector
            return self.layers * self.latent * size * tensor_parallel
        return 2 * self.layers * max(tensor_parallel, self.kv_heads) * self.head_dim * size
