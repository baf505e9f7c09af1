"""The parts of a decoder: counts, and the bytes of its weights and of its caches.

    part            weights                                         stays wide when quantised
    embeddings      vocabulary · hidden, twice unless tied          yes
    attention       2·hidden·width + 2·hidden·kv_heads·head_dim     no (width = heads · head_dim)
    MLP             3·hidden·intermediate (2 without a gate)        no
    experts         the same, each; a router of experts · hidden    no (the router: yes)
    vision, audio   as their own part of the configuration says     yes

Layers may differ: attention keeps every token in some, only a window in others, and one state per
sequence, however long it is, in yet others. ``caches`` and ``state_bytes`` say which; a sequence's
total is ``kv_request_bytes``. Norms and biases, below 0.1 % of the rest, are left out.
``checkpoints.shape`` reads it from files.
"""

from dataclasses import dataclass, field

DTYPE_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "int8": 1.0,
}
# vLLM pads the vocabulary to a multiple of this before dividing it.
VOCABULARY_PADDING = 64


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of the layers are stored; embeddings and output layer stay wide.

    Args:
        method: vLLM's name ("fp8", "awq", "gptq", "compressed-tensors", …).
        bits: of one weight.
        group_size: weights that share a scale, along the input; 0: one scale per column.
        zero_points: a zero point per group is also stored.
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
class Cache:
    """What some of the layers keep of each token.

    Args:
        layers: that keep it.
        heads: KV heads, which tensor parallelism divides, or copies if it exceeds them.
        elements: of one head and token: key and value together.
        window: most tokens that are kept of a sequence; 0: all.
        copied: every accelerator keeps all of it (the latent vector of DeepSeek's attention).
        element_bytes: if it does not follow the KV cache's dtype.
    """

    layers: int
    heads: int
    elements: int
    window: int = 0
    copied: bool = False
    element_bytes: float | None = None

    def token_bytes(self, tensor_parallel: int, size: float) -> float:
        """On all accelerators together."""
        each = self.layers * self.elements * (self.element_bytes or size)
        return each * (tensor_parallel if self.copied else max(tensor_parallel, self.heads))


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something unknown about a model, and the relative error of its KV memory due to it."""

    what: str
    kv_error: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape, its storage, and its uncertain properties.

    Args:
        intermediate: of the dense MLP of a layer; with experts, of the layers that have none.
        gated: the MLP has a gate (SwiGLU): three matrices; else two.
        moe_layers: layers with experts; 0: dense. dense_layers: with a dense MLP; None: the
            others.
        moe_intermediate: of one expert. shared_intermediate: of the part that every token
            passes.
        expert_hidden: width of the experts' inputs if narrowed; 0: ``hidden``.
        caches: what the layers keep of a token; (): every layer its KV heads.
        state_bytes: of one sequence in addition, in all its state-space layers.
        state_heads: of a state-space layer, which tensor parallelism divides; 0: none.
        attention_weights: of all layers together, including state-space layers; None: those of
            the table above in every layer. dense_weights: the same of the dense MLPs.
        other_weights: of a vision or audio part, and tables; never quantised.
        wide_weights: of the layers' matrices, those that are not quantised.
        max_position: longest context of the position table; 0: no table.
        dtype: of everything not quantised, and of the KV cache unless the engine is told
            otherwise.
        kv_dtype: of the KV cache if the checkpoint says so; "auto": as ``dtype``.
        tables: embedding table and output layer that it holds; None: one if they are tied, else
            two. A stage of a pipeline has fewer.
        samples: it has the output layer, and the sampler with it.
        unmodelled: what makes the memory estimate uncertain.
        family: model_type of its configuration.
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
    expert_hidden: int = 0
    dense_layers: int | None = None
    caches: tuple[Cache, ...] = ()
    state_bytes: int = 0
    state_heads: int = 0
    attention_weights: int | None = None
    dense_weights: int | None = None
    other_weights: int = 0
    wide_weights: int = 0
    max_position: int = 0
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    quantization: Quantization | None = None
    tables: int | None = None
    samples: bool = True
    unmodelled: tuple[Doubt, ...] = ()
    family: str = field(default="", compare=False)

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
    def kv_error(self) -> float:
        """The relative error of the KV memory due to uncertain properties."""
        return max((doubt.kv_error for doubt in self.unmodelled), default=0.0)

    # -- weights

    @property
    def output_weights(self) -> int:
        """Of the output layer, which is as large as the embedding table."""
        return self.vocabulary * self.hidden

    @property
    def embedding_weights(self) -> int:
        """Embedding table and output layer, counted once if they are tied."""
        held = self.tables
        if held is None:
            held = 1 if self.tied_embeddings else 2
        return self.output_weights * held

    @property
    def layer_caches(self) -> tuple[Cache, ...]:
        return self.caches or (Cache(self.layers, self.kv_heads, 2 * self.head_dim),)

    @property
    def keeps_all(self) -> bool:
        """Whether every layer keeps every token, and nothing else."""
        return not self.state_bytes and not any(cache.window for cache in self.caches)

    @property
    def latent(self) -> bool:
        """Whether its attention keeps one vector for all heads (multi-head latent attention)."""
        return any(cache.copied for cache in self.caches)

    @property
    def mixing_weights(self) -> int:
        """In all layers, everything except MLPs and experts."""
        if self.attention_weights is not None:
            return self.attention_weights
        kv = 2 * self.hidden * self.kv_heads * self.head_dim
        return self.layers * (2 * self.hidden * self.heads * self.head_dim + kv)

    @property
    def mlp_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self.layers - self.moe_layers if self.dense_layers is None else self.dense_layers

    def _mlp(self, intermediate: int, hidden: int = 0) -> int:
        return (3 if self.gated else 2) * (hidden or self.hidden) * intermediate

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return self._mlp(self.moe_intermediate, self.expert_hidden)

    def _layers(self, experts: int) -> int:
        """Matrices of all layers, counting so many of the experts."""
        moe = experts * self.expert_weights + self._mlp(self.shared_intermediate)
        moe += 2 * self.hidden * self.expert_hidden
        dense = self.dense_weights
        if dense is None:
            dense = self.mlp_layers * self._mlp(self.intermediate)
        return self.mixing_weights + dense + self.moe_layers * moe

    @property
    def layer_weights(self) -> int:
        """All matrices except embeddings and output layer (and routers)."""
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
        return (
            self.layer_weights + self.router_weights + self.embedding_weights + self.other_weights
        )

    def layer_weights_touched(self, tokens: float) -> float:
        """Matrices that a step of so many tokens reads, if experts are drawn evenly."""
        if not self.moe_layers:
            return float(self.layer_weights)
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        idle = missed * self.experts * self.expert_weights
        return self.layer_weights - self.moe_layers * idle

    @property
    def wide_share(self) -> float:
        """The share of the layers' matrices that is not quantised."""
        return 0.0 if self.quantization is None else self.wide_weights / self.layer_weights

    def weight_bytes(self, tensor_parallel: int = 1) -> float:
        """On one accelerator of ``tensor_parallel``, as loaded.

        KV matrices are copied when there are more accelerators than KV heads; the
        vocabulary is padded; each accelerator has its own table of positions (sines and
        cosines), and the whole matrix that shrinks a latent vector.
        """
        t = tensor_parallel
        copies = 0.0
        for cache in self.layer_caches:
            if not cache.copied:
                matrices = cache.layers * self.hidden * cache.heads * cache.elements
                copies += matrices * (max(t, cache.heads) / cache.heads - 1)
        padded = -(-self.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        wide = self.embedding_weights * padded / self.vocabulary + self.router_weights * t
        wide += self.other_weights + self.wide_share * self.layer_weights
        narrow = self.layer_weights * (1 - self.wide_share) + copies
        positions = self.max_position * self.head_dim * self.dtype_bytes
        return (narrow * self.bytes_per_weight + wide * self.dtype_bytes) / t + positions

    # -- caches

    def _kv_element_bytes(self, asked: str) -> float:
        name = self.kv_dtype if asked == "auto" else asked
        return self.dtype_bytes if name == "auto" else DTYPE_BYTES[name]

    def kv_token_bytes(
        self, tensor_parallel: int = 1, kv_dtype: str = "auto", tokens: float | None = None
    ) -> float:
        """KV bytes of one token on all accelerators together, with heads copied if t exceeds them.

        Args:
            kv_dtype: vLLM's ``--kv-cache-dtype``; "auto" is the model's own.
            tokens: length of the sequence, for the mean per token, including its state;
                None: of a token that no window has dropped yet, without the state.
        """
        if tokens is not None:
            return self.kv_request_bytes(tokens, tensor_parallel, kv_dtype) / max(tokens, 1)
        size = self._kv_element_bytes(kv_dtype)
        return sum(cache.token_bytes(tensor_parallel, size) for cache in self.layer_caches)

    def kv_request_bytes(
        self, tokens: float, tensor_parallel: int = 1, kv_dtype: str = "auto", in_flight: int = 0
    ) -> float:
        """The memory of a sequence of so many tokens, on all accelerators together.

        Args:
            in_flight: tokens of a step that a window keeps in addition until the step is
                done.
        """
        size = self._kv_element_bytes(kv_dtype)
        total = float(self.state_bytes)
        for cache in self.layer_caches:
            kept = min(tokens, cache.window + in_flight) if cache.window else tokens
            total += cache.token_bytes(tensor_parallel, size) * kept
        return total
