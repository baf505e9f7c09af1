"""How much KV memory an instance has left: Eq. (1), and a model of the rest.

vLLM measures everything except the weights at start-up, in one pass over T tokens and n logits; its
versions differ in what they reserve. docs/design/memory-model.md has the parts and their formulas.
The coefficients are fitted to vLLM's own logs and tested on model families that were left out:
benchmarks/planner/memory.py, docs/evidence/planner.md. All logs but one are of NVIDIA's cards:
for others the uncertainty is larger.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hetero_gateway.core.costs.cost_model import kv_capacity_bytes
from hetero_gateway.errors import ConfigError
from hetero_gateway.planner.accelerators import GIB, Accelerator
from hetero_gateway.planner.model_shape import ModelShape, Quantization
from hetero_gateway.planner.parallelism import precision_refusal, refusal
from hetero_gateway.planner.plan import MemoryEstimate
from hetero_gateway.sim.engine import DEFAULT_MAX_BATCHED_TOKENS

Method = Literal["fitted", "paper"]

# Eq. (1) with the paper's δ per accelerator.
RESERVED_BYTES = 2 * GIB
# Eq. (1)'s error on vLLM's logs: the root mean square in benchmarks/planner/memory.py.
PAPER_UNCERTAINTY = 0.15
# vLLM allocates KV memory in blocks of this many tokens.
BLOCK_TOKENS = 16
# vLLM's defaults: (max_num_batched_tokens, max_num_seqs) of its server, as in the source of 0.32
# (vllm/engine/arg_utils.py). Large cards have 70 GiB or more, except the A100: it goes by the
# device's name. Of 160 GiB or more: since about 0.28.
HUGE_BYTES, LARGE_BYTES = 160 * GIB, 70 * GIB
HUGE_DEFAULTS, LARGE_DEFAULTS, SMALL_DEFAULTS = (16_384, 1024), (8192, 1024), (2048, 256)
# The newest version whose start-up is modelled; the logs of the fit end at 0.19.
NEWEST = "0.32"
# Links at or above this count as NVLink, those below it as a PCIe slot.
FAST_LINK_BYTES_PER_S = 100e9

# 0.2 kept the input of each all-reduce until the pass was over (torch's record_stream).
_INPUTS_KEPT = (0, 2)
_HUGE_KNOWN = (0, 28)
_LAST_V0, _SMALL_SAMPLER, _GRAPHS_COUNTED, _TORCH_COUNTED = (0, 7), (0, 17), (0, 21), (0, 6)
# Since then a step is planned while the one before it runs (asynchronous scheduling by default).
_PLANS_AHEAD = (0, 14)
# The second model runner serves models without experts, later all (0.25 to 0.32, by their source).
# Its start-up pass neither sorts nor masks: a logit takes at most 4 bytes (logs of 0.26 leave room
# for 4.3). At first it reserved nothing for CUDA graphs.
_SECOND_RUNNER, _SECOND_RUNNER_WITH_EXPERTS = (0, 25), (0, 32)
_SECOND_RUNNER_COUNTS_GRAPHS = (0, 27)
_SECOND_RUNNER_LOGIT_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The fitted coefficients; memory in GiB per accelerator, unless it says bytes.

    benchmarks/planner/memory.py prints the defaults. Not fitted: slow_link, as no log used has
    t > 1 over PCIe (logs in vLLM's issues say 0.05 to 0.45), and the sigmas, rounded up.

    Args:
        mlp: measured over counted bytes of the MLP's peak.
        logit_bytes_before_0_17, logit_bytes: the sampler's, per sequence and vocabulary entry.
        outside_before_0_6: including the allocator's reserve, which those versions counted
            there.
        outside_before_0_17, outside: of one accelerator alone.
        fast_link, slow_link: in addition, with tensor parallelism over NVLink or PCIe.
        graphs, graphs_per_layer: CUDA graphs.
        sigma: standard deviation of the total, on families left out of the fit; sigma_others:
            on cards of other makers than NVIDIA, by the one log of an MI300X.
        sigma_link: of the addition with tensor parallelism: logs say 0.2 to 2.1.
        sigma_graphs: of CUDA graphs; logs of vLLM's estimate say 0.1 to 1.6.
    """

    mlp: float = 1.01
    logit_bytes_before_0_17: float = 38.9
    logit_bytes: float = 14.8
    outside_before_0_6: float = 0.83
    outside_before_0_17: float = 0.17
    outside: float = 0.27
    fast_link: float = 1.86
    slow_link: float = 0.2
    graphs: float = 0.21
    graphs_per_layer: float = 0.0208
    sigma: float = 0.4
    sigma_others: float = 2.5
    sigma_link: float = 0.6
    sigma_graphs: float = 0.3


FITTED = Coefficients()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of ``vllm serve`` that change memory; None: vLLM's own default.

    Args:
        utilisation: ``--gpu-memory-utilization``, in (0, 1].
        max_model_len: tokens of the longest request; None: the model's own maximum.
        vllm_version: "0.32", "0.11.2", …; a later one counts as the newest modelled.
        kv_dtype: ``--kv-cache-dtype``: "auto", "fp8", …
        enforce_eager: no CUDA graphs.

    Raises:
        ConfigError: a value that vLLM would not accept.
    """

    utilisation: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    vllm_version: str = NEWEST
    kv_dtype: str = "auto"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"utilisation is {self.utilisation}: it must be above 0, at most 1")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: it must be at least 1")
        if self.kv_dtype not in ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"):
            raise ConfigError(f"kv_dtype {self.kv_dtype!r} is not known: auto, bfloat16, fp8, …")
        _ = self.version

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor); the patch level makes no modelled difference."""
        found = re.match(r"v?(\d+)\.(\d+)", self.vllm_version)
        if found is None:
            raise ConfigError(f"vllm_version {self.vllm_version!r} is not like 0.21 or 0.21.1")
        return int(found[1]), int(found[2])

    def sequences(self, accelerator: Accelerator) -> int:
        """max_num_seqs there."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return SMALL_DEFAULTS[1] if self.version <= _LAST_V0 else self._defaults(accelerator)[1]

    @property
    def caches_prefixes(self) -> bool:
        """Whether vLLM has a prefix cache by default: its V1 does."""
        return self.version > _LAST_V0

    @property
    def plans_ahead(self) -> bool:
        """As ``Profile``'s, by default."""
        return self.version >= _PLANS_AHEAD

    def batched_tokens(self, accelerator: Accelerator) -> int:
        """max_num_batched_tokens there."""
        if self.max_num_batched_tokens is not None:
            # vLLM refuses a step that cannot hold a token of each sequence.
            return max(self.max_num_batched_tokens, self.sequences(accelerator))
        old = self.version <= _LAST_V0
        tokens = self.step_tokens if old else self._defaults(accelerator)[0]
        return max(tokens, self.sequences(accelerator))

    @property
    def step_tokens(self) -> int:
        """A plan's setting if its file has none: 2048, and before 0.8 a whole prompt."""
        if self.version > _LAST_V0:
            return DEFAULT_MAX_BATCHED_TOKENS
        # A whole prompt at once, unless prompts may be long: then in chunks.
        length = self.max_model_len or 0
        return max(DEFAULT_MAX_BATCHED_TOKENS, length if length <= 32_768 else 0)

    def _defaults(self, accelerator: Accelerator) -> tuple[int, int]:
        if accelerator.usable_bytes >= HUGE_BYTES and self.version >= _HUGE_KNOWN:
            return HUGE_DEFAULTS
        large = accelerator.usable_bytes >= LARGE_BYTES and "A100" not in accelerator.name
        return LARGE_DEFAULTS if large else SMALL_DEFAULTS


class StartUp(NamedTuple):
    """One start of vLLM, and its use of each accelerator's memory."""

    model: ModelShape
    accelerator: Accelerator
    tensor_parallel: int
    options: EngineOptions
    c: Coefficients = FITTED

    def memory(
        self, method: Method = "fitted", needed_tokens: int = 1, buffers_bytes: float = 0.0
    ) -> MemoryEstimate:
        """The KV memory of the instance, and the rest of its accelerators' memory.

        The parts and the KV cache add up to the accelerators' nominal memory. If the model
        does not fit at all, ``kv_bytes`` is negative and the capacity 0. The capacity is
        for requests of the longest length, like vLLM's own figure; if layers keep a window
        or a state, shorter ones have room for fewer tokens (``tokens_at``).

        Args:
            method: "fitted", or "paper" for Eq. (1) as printed.
            needed_tokens: of the longest request; decides ``tight``, with max_model_len.
            buffers_bytes: each accelerator's buffers to pass activations on, beyond those
                of tensor parallelism.
        """
        model, t, options = self.model, self.tensor_parallel, self.options
        parts = self._paper_parts() if method == "paper" else self._fitted_parts()
        if buffers_bytes:
            parts["other communicators"] = buffers_bytes
        kv_bytes = t * (self.accelerator.memory_bytes - sum(parts.values()))
        needed = max(needed_tokens, options.max_model_len or 1)
        each = model.kv_token_bytes(t, options.kv_dtype)
        if not model.keeps_all:
            each = self._request_bytes(needed) / needed
        tokens = max(0, int(kv_bytes // each))
        uncertainty = PAPER_UNCERTAINTY
        if method == "fitted":
            tokens -= tokens % BLOCK_TOKENS
            uncertainty = min(1.0, self.spread_bytes / kv_bytes) if kv_bytes > 0 else 1.0
            uncertainty = min(1.0, math.hypot(uncertainty, model.kv_error))
        return MemoryEstimate(
            kv_capacity_tokens=tokens,
            kv_bytes=kv_bytes,
            parts=parts,
            uncertainty=uncertainty,
            # Two standard deviations to either side.
            tight=tokens * (1 - 2 * uncertainty) < needed <= tokens * (1 + 2 * uncertainty),
            how=method,
        )

    def _request_bytes(self, tokens: int) -> float:
        """KV bytes of one request while a step is computed."""
        in_flight = self.options.batched_tokens(self.accelerator)
        return self.model.kv_request_bytes(
            tokens, self.tensor_parallel, self.options.kv_dtype, in_flight
        )

    @property
    def spread_bytes(self) -> float:
        """One standard deviation of the instance's KV bytes: the accelerators' errors are the
        same."""
        sigmas = [self.c.sigma if self.accelerator.cuda_capability else self.c.sigma_others]
        if self.tensor_parallel > 1:
            sigmas.append(self.c.sigma_link)
        if self._graphs_counted:
            sigmas.append(self.c.sigma_graphs)
        return math.hypot(*sigmas) * GIB * self.tensor_parallel

    def shortfall_bytes(self, estimate: MemoryEstimate, needed_tokens: int) -> float:
        """The bytes missing on each accelerator for ``is_feasible``; 0 if it is."""
        if is_feasible(estimate, needed_tokens):
            return 0.0
        needed = self._request_bytes(-(-needed_tokens // BLOCK_TOKENS) * BLOCK_TOKENS)
        margin = 0.0
        if estimate.how == "fitted":
            # The K for which K less its own uncertainty holds what is needed.
            e = self.model.kv_error
            root = math.hypot(e * needed, self.spread_bytes * math.sqrt(1 - e * e))
            margin = (needed + root) / (1 - e * e) - needed
        return max(0.0, needed + margin - estimate.kv_bytes) / self.tensor_parallel

    def remedies(self, method: Method, needed_tokens: int, largest: int) -> tuple[str, ...]:
        """Changes that would make it fit: more accelerators, shorter requests, fewer bits; each
        alone.

                Args:
                    needed_tokens: of the longest request.
                    largest: accelerators of the machine.
        """

        def fits(**changes: Any) -> bool:
            return is_feasible(
                self._replace(**changes).memory(method, needed_tokens), needed_tokens
            )

        found = []
        for t in range(self.tensor_parallel + 1, largest + 1):
            if refusal(self.model, t) is None and fits(tensor_parallel=t):
                found.append(f"tensor_parallel {t}")
                break
        here = self.memory(method, needed_tokens)
        sure = 1 - here.uncertainty if method == "fitted" else 1.0
        tokens = int(here.kv_capacity_tokens * sure) // BLOCK_TOKENS * BLOCK_TOKENS
        if BLOCK_TOKENS <= tokens < needed_tokens:
            found.append(f"a max length of {tokens} tokens")
        for model, name in _fewer_bits(self.model):
            if refusal(model, self.tensor_parallel) or precision_refusal(model, self.accelerator):
                continue
            if fits(model=model):
                found.append(f"{name} weights")
                break
        if self.options.kv_dtype == "auto" and (self.accelerator.cuda_capability or 0.0) >= 8.9:
            if fits(options=dataclasses.replace(self.options, kv_dtype="fp8")):
                found.append("an fp8 KV cache")
        return tuple(found)

    # -- parts

    def _paper_parts(self) -> dict[str, float]:
        """Eq. (1) in parts; its remaining KV bytes are those of ``core.cost_model``."""
        t, d, utilisation = (
            self.tensor_parallel,
            self.accelerator.memory_bytes,
            self.options.utilisation,
        )
        kv_bytes = kv_capacity_bytes(
            t, d, utilisation, RESERVED_BYTES, self.model.parameters, self.model.bytes_per_weight
        )
        free = d * (1 - utilisation)
        return {
            "left free": free,
            "weights": d - free - RESERVED_BYTES - kv_bytes / t,
            "reserved": float(RESERVED_BYTES),
        }

    def _fitted_parts(self) -> dict[str, float]:
        usable = self.accelerator.usable_bytes
        parts = {
            "not usable": self.accelerator.memory_bytes - usable,
            "left free": usable * (1 - self.options.utilisation),
            "weights": self.model.weight_bytes(self.tensor_parallel),
            "activations": self.activation_bytes(),
            "outside torch": self.outside_bytes(),
        }
        uncounted = self._second_runner and self.options.version < _SECOND_RUNNER_COUNTS_GRAPHS
        if self._graphs_counted and not uncounted:
            graphs = self.c.graphs + self.c.graphs_per_layer * self.model.layers
            parts["CUDA graphs"] = graphs * GIB
        return parts

    @property
    def _graphs_counted(self) -> bool:
        return self.options.version >= _GRAPHS_COUNTED and not self.options.enforce_eager

    @property
    def _second_runner(self) -> bool:
        since = _SECOND_RUNNER_WITH_EXPERTS if self.model.moe_layers else _SECOND_RUNNER
        return self.options.version >= since

    def activation_bytes(self) -> float:
        """The peak of the start-up pass: of gate, up and their product, or of the sampler."""
        model, t, version = self.model, self.tensor_parallel, self.options.version
        size, tokens = model.dtype_bytes, self.options.batched_tokens(self.accelerator)
        kept = size * tokens * model.hidden
        width = (3 if model.gated else 2) * model.intermediate / t + 3 * model.hidden
        mlp = self.c.mlp * (size * tokens * width)
        sampler = self._logit_bytes * self._logits
        peak = max(mlp, sampler + kept) if version <= _LAST_V0 else max(mlp, sampler) + kept
        if model.moe_layers:
            width = 3 * model.moe_intermediate / t + model.hidden
            peak += size * tokens * model.experts_per_token * width
        if t > 1 and version <= _INPUTS_KEPT:
            peak += 2 * model.layers * kept
        return peak

    @property
    def _logits(self) -> float:
        """Entries that the sampler sorts in the start-up pass."""
        tokens = self.options.batched_tokens(self.accelerator)
        # V0 with chunked prefill ended its pass before the sampler.
        length = self.options.max_model_len or self.model.max_position
        if not self.model.samples or (self.options.version <= _LAST_V0 and tokens < length):
            return 0.0
        sequences = self.options.sequences(self.accelerator)
        return float(min(sequences, tokens)) * self.model.vocabulary

    @property
    def _logit_bytes(self) -> float:
        """Of one entry: the logit itself in the model's dtype, and the memory for sorting it."""
        if self._second_runner:
            return _SECOND_RUNNER_LOGIT_BYTES
        old = self.options.version < _SMALL_SAMPLER
        base = self.c.logit_bytes_before_0_17 if old else self.c.logit_bytes
        return base + self.model.dtype_bytes - 2

    def outside_bytes(self) -> float:
        """Memory outside of torch: the context, and the buffers of the all-reduce."""
        if self.options.version < _TORCH_COUNTED:
            outside = self.c.outside_before_0_6
        elif self.options.version < _SMALL_SAMPLER:
            outside = self.c.outside_before_0_17
        else:
            outside = self.c.outside
        if self.tensor_parallel > 1:
            fast = self.accelerator.link_bytes_per_s >= FAST_LINK_BYTES_PER_S
            outside += self.c.fast_link if fast else self.c.slow_link
        return outside * GIB


def tokens_at(
    estimate: MemoryEstimate, model: ModelShape, t: int, options: EngineOptions, tokens: float
) -> int:
    """KV tokens that sequences of this length have room for together; at most the capacity."""
    if estimate.kv_bytes <= 0 or model.keeps_all:
        return estimate.kv_capacity_tokens
    each = model.kv_token_bytes(t, options.kv_dtype, tokens)
    return max(1, min(estimate.kv_capacity_tokens, int(estimate.kv_bytes // each)))


def is_feasible(estimate: MemoryEstimate, needed_tokens: int) -> bool:
    """Eq. (2); for an estimate with a known spread, with one standard deviation to spare.

    vLLM refuses to start if its KV cache cannot hold one request of max_model_len.
    """
    tokens = float(estimate.kv_capacity_tokens)
    if estimate.how == "fitted":
        tokens *= 1 - estimate.uncertainty
    return estimate.kv_capacity_tokens >= 1 and tokens >= needed_tokens


def _fewer_bits(model: ModelShape) -> list[tuple[ModelShape, str]]:
    """The same model quantised further, most bits first."""
    bits = 8 * model.dtype_bytes if model.quantization is None else model.quantization.bits
    choices = (
        ("fp8", Quantization("fp8", 8)),
        ("int8", Quantization("compressed-tensors", 8)),
        ("int4 (AWQ or GPTQ)", Quantization("gptq", 4, 128, zero_points=True)),
    )
    return [
        (dataclasses.replace(model, quantization=stored), name)
        for name, stored in choices
        if stored.bits < bits
    ]
