"""The settings of an emulated instance; checked once, immutable afterwards."""

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Self

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.emulator.event_settings import KVEventsConfig
from hetero_gateway.lab.emulator.transfer_settings import KVTransferSettings
from hetero_gateway.sim.engine import Scheduling

BLOCK_TOKENS = 16
# A profile does not know its model's context window; 8 192 is Llama-3-8B's.
DEFAULT_MAX_MODEL_LEN = 8192
_NORMAL = NormalDist()


# How many tokens an answer has if only the model would end it: computed from one uniform number,
# which the caller derives from the request's content, so that the same body gets the same length on
# every instance of one seed, in whatever order requests come.


@dataclass(frozen=True, slots=True)
class LogNormalOutputs:
    """Log-normal with this mean and coefficient of variation (0: always the mean).

    The defaults are of the size of public chat traces (a few hundred tokens, spread about as
    wide as the mean), and no more exact than that.

    Raises:
        ConfigError: a mean below 1 or a negative coefficient.
    """

    mean_tokens: float = 200.0
    cv: float = 0.8

    def __post_init__(self) -> None:
        if not 1 <= self.mean_tokens < math.inf:
            raise ConfigError(f"--mean-output-tokens: must be at least 1, not {self.mean_tokens}")
        if not 0 <= self.cv < math.inf:
            raise ConfigError(f"--cv-output-tokens: must be 0 or more, not {self.cv}")

    def draw(self, u: float) -> int:
        """The length at quantile ``u`` (0 < u < 1), in tokens, at least 1."""
        variance = math.log1p(self.cv**2)
        mu = math.log(self.mean_tokens) - variance / 2
        return max(1, round(math.exp(mu + math.sqrt(variance) * _NORMAL.inv_cdf(u))))


@dataclass(frozen=True, slots=True)
class TraceOutputs:
    """Lengths taken from a trace, each as likely as any other."""

    tokens: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The ``output_tokens`` column of a trace.

        Raises ConfigError: the unusable file and line.
        """
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = csv.DictReader(file)
                if "output_tokens" not in (rows.fieldnames or ()):
                    raise ConfigError(f"{path}: has no column output_tokens")
                tokens = tuple(_length(row["output_tokens"], path, rows.line_num) for row in rows)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        if not tokens:
            raise ConfigError(f"{path}: has no rows")
        return cls(tokens)

    def draw(self, u: float) -> int:
        """The length at quantile ``u`` (0 < u < 1), in tokens, at least 1."""
        return self.tokens[int(u * len(self.tokens))]


OutputLengths = LogNormalOutputs | TraceOutputs


def _length(text: str | None, path: Path, line: int) -> int:
    try:
        return max(1, int(float(text or "")))
    except (ValueError, OverflowError):
        raise ConfigError(f"{path}: line {line}: output_tokens is {text!r}") from None


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """Everything except the address it listens on; ``emulate --help`` explains each option.

    Args:
        profile: its p1..p9 and KV capacity are emulated.
        models: names in /v1/models, the first being the real one; empty means the profile's
            model.
        max_model_len: tokens of the context window; None means 8 192, or the KV capacity if
            less.
        max_num_batched_tokens: None means vLLM's default, raised to max_num_seqs.
        num_gpu_blocks: a KV cache of this many blocks of 16 tokens instead of the profile's.
        lora_modules: further names, each an adapter that shares no cached prefix with others.
        kv_transfer: how it hands KV caches over; None: it does not.
        kv_events: where it publishes its cache events; None: it does not.
        dtype, attention_backend: compared by peers before they fetch its KV cache.
        rank: its rank among several behind one address (``ranks``).

    Raises:
        ConfigError: naming the impossible option.
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
    kv_transfer: KVTransferSettings | None = None
    kv_events: KVEventsConfig | None = None
    dtype: str = "auto"
    attention_backend: str = "auto"
    rank: int = 0

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
        if self.kv_events is not None and not self.prefix_caching:
            raise ConfigError("--kv-events-config: there is no prefix cache to tell of")
        if self.kv_transfer is not None and not self.prefix_caching:
            raise ConfigError("--kv-transfer-config: is emulated with a prefix cache only")
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
        """Every served name; the base model's first."""
        return self.base_names + self.lora_modules

    @property
    def base_names(self) -> tuple[str, ...]:
        """The names of the model itself."""
        return self.models or (self.profile.model,)

    @property
    def context_tokens(self) -> int:
        return self.max_model_len or min(DEFAULT_MAX_MODEL_LEN, self.capacity_tokens)
