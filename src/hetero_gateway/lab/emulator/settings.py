"""What an emulated instance is started with; checked once, immutable after."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.emulator.lengths import LogNormalOutputs, OutputLengths
from hetero_gateway.sim.engine import Scheduling

BLOCK_TOKENS = 16
# A profile does not know its model's context window; 8 192 is Llama-3-8B's.
DEFAULT_MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """Everything but the address it listens on.

    Args:
        profile: whose p1..p9 and KV capacity are emulated.
        models: names in /v1/models, the first being the real one; empty means the profile's model.
        time_scale: virtual seconds per wall second, above 0.
        max_model_len: tokens of the context window; None means 8 192, or the KV capacity if less.
        scheduling, max_num_seqs, slowdown: as ``sim.engine.Engine`` has them.
        max_num_batched_tokens: None means vLLM's default, raised to max_num_seqs.
        num_gpu_blocks: a KV cache of this many blocks of 16 tokens instead of the profile's.
        max_num_queued_reqs: a request that finds as many waiting gets 503; None means no limit.
        api_key: guards /v1/*; None means open.
        lengths: how long an answer is when the client does not force it.
        seed: of texts, lengths and ids.
        prefix_caching: keep the KV blocks of what was computed, as vLLM does by default.
        prompt_tokens_details: say in ``usage`` how many prompt tokens were cached.
        lora_modules: further names, each an adapter that shares no cached prefix with others.
        store_responses: keep what /v1/responses answers, so that others can continue it.

    Raises:
        ConfigError: naming the option that cannot be.
    """

    profile: Profile
    models: tuple[str, ...] = ()
    time_scale: float = 1.0
    max_model_len: int | None = None
    scheduling: Scheduling = "chunked"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_gpu_blocks: int | None = None
    max_num_queued_reqs: int | None = None
    api_key: str | None = None
    lengths: OutputLengths = field(default_factory=LogNormalOutputs)
    seed: int = 0
    slowdown: float = 1.0
    prefix_caching: bool = True
    prompt_tokens_details: bool = False
    lora_modules: tuple[str, ...] = ()
    store_responses: bool = False

    def __post_init__(self) -> None:
        for name in ("time_scale", "slowdown"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')}: must be above 0")
        for name in (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
            *("num_gpu_blocks", "max_num_queued_reqs"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1, not {value}")
        capacity_tokens = self.capacity_tokens
        if capacity_tokens < 2:
            raise ConfigError(f"{self.profile.name}: the KV cache holds no block of 16 tokens")
        if self.max_model_len is not None and self.max_model_len > capacity_tokens:
            raise ConfigError(
                f"--max-model-len: {self.max_model_len} tokens exceed the KV cache's "
                f"{capacity_tokens}"
            )

    @property
    def capacity_tokens(self) -> int:
        """KV tokens, in whole blocks."""
        blocks = self.num_gpu_blocks or self.profile.kv_capacity_tokens // BLOCK_TOKENS
        return blocks * BLOCK_TOKENS

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that is served; the base model's first."""
        return self.base_names + self.lora_modules

    @property
    def base_names(self) -> tuple[str, ...]:
        """The names of the model itself."""
        return self.models or (self.profile.model,)

    @property
    def context_tokens(self) -> int:
        return self.max_model_len or min(DEFAULT_MAX_MODEL_LEN, self.capacity_tokens)
