"""p1..p8 of an accelerator that nobody has profiled, from its data sheet.

A step takes as long as the slower of arithmetic and memory traffic, plus what the engine and the
all-reduce add. That is not linear in batch and tokens, so Eqs. (3) and (4) are fitted to it over a
grid of batches, by relative-error least squares with non-negative constants (erratum 14).

    step        arithmetic (FLOP)                        memory (bytes)
    prefill     2·weights·n + 2·layers·width·n·I         weights once
    decode      2·weights·b                              weights once, and the KV of every sequence

with n = b·I prompt tokens, width = heads · head_dim, half of the attention matrix masked, and the
output layer only for the b tokens that are sampled. Both are shared by t accelerators.

How far to trust it: its step times over those of the built-in profiles, the mean ratio over the
same grid (tests/planner/test_roofline.py computes it). The built-in figures come from measured
operators, but for A10G's, which are another roofline and check the arithmetic only.

    Llama-3-8B          prefill  decode
    A10G-24GB      t=1  0.95     0.97
    L40S-48GB      t=1  0.74     0.94     with compute_efficiency 0.5: 1.00 and 0.94
    L40S-48GB      t=2  0.69     0.93
    A100-80GB-SXM  t=1  0.95     0.83
    A100-80GB-SXM  t=2  0.85     0.79
    H100-80GB-SXM  t=1  0.85     0.88

So it is optimistic, by up to a quarter, and by more with tensor parallelism. Memory is Eq. (1),
with the vendor's figure for it; the cards have less (an L4 22.06 GiB), so the real KV is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from hetero_gateway.core.cost_model import kv_bytes_per_token, kv_capacity_bytes
from hetero_gateway.core.profile import DEFAULT_MAX_NUM_SEQS, Constants, Profile

# Share of the data sheet's figures that large matrix products and streaming reads reach: round
# figures of common experience, checked by the table above.
COMPUTE_EFFICIENCY = 0.75
MEMORY_EFFICIENCY = 0.8
# What vLLM's scheduler, sampler and input preparation add to a step: as in the built-in profiles.
STEP_OVERHEAD_S = 1e-3
SEQUENCE_OVERHEAD_S = 1e-5
# Start of one all-reduce; two of them follow each layer.
ALL_REDUCE_START_S = 1e-5
# Eq. (1) as the paper sets it: φ, and δ per accelerator.
UTILISATION = 0.9
RESERVED_BYTES = 2 * 2**30

# The grid of the fit: batches, and prompt or cached tokens per sequence.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
MAX_PREFILL_TOKENS = 8192

StepTime = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A data sheet: dense fp16 tensor FLOP/s, memory in bytes and bytes/s, link in bytes/s.

    ``link_bytes_per_s`` is one direction of what an all-reduce goes over; 0 where there is none.
    """

    name: str
    flop_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float = 0.0
    compute_efficiency: float = COMPUTE_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder: counts, and bytes per weight and per cached element."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    bytes_per_weight: float = 2.0
    bytes_per_cached: float = 2.0

    @property
    def output_weights(self) -> float:
        return float(self.vocabulary) * self.hidden

    @property
    def layer_weights(self) -> float:
        """Everything but the embedding table (looked up) and the output layer."""
        return self.parameters - 2 * self.output_weights


LLAMA_3_8B = ModelShape("Llama-3-8B", 8.03e9, 32, 4096, 32, 8, 128, 128_256)
# NVIDIA's data sheet: 242 TFLOP/s fp16 with sparsity, 300 GB/s, PCIe 4.0 x16. Half of the
# arithmetic, because that is what the L40S of the same generation reaches, and at 72 W it is not
# going to be more.
L4 = Accelerator("L4-24GB", 121e12, 24 * 2**30, 300e9, 32e9, compute_efficiency=0.5)


def roofline_profile(
    accelerator: Accelerator,
    model: ModelShape,
    tensor_parallel: int = 1,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
) -> Profile | None:
    """The profile of one instance, or None when the model's weights leave no room for KV."""
    kv_token_bytes = kv_bytes_per_token(
        model.layers, model.kv_heads, model.head_dim, model.bytes_per_cached
    )
    kv_bytes = kv_capacity_bytes(
        tensor_parallel,
        accelerator.memory_bytes,
        UTILISATION,
        RESERVED_BYTES,
        model.parameters,
        model.bytes_per_weight,
    )
    kv_capacity_tokens = int(kv_bytes // kv_token_bytes)
    if kv_capacity_tokens < 1:
        return None
    prefill, decode = step_times(accelerator, model, tensor_parallel)
    prefill_shapes, decode_shapes = grid(kv_capacity_tokens, max_num_seqs)
    constants = [*_fit(prefill, prefill_shapes), *_fit(decode, decode_shapes)]
    return Profile(
        gpu=accelerator.name,
        model=model.name,
        tensor_parallel=tensor_parallel,
        constants=Constants(*constants),
        kv_capacity_tokens=kv_capacity_tokens,
        max_num_seqs=max_num_seqs,
        source={
            "how": "roofline",
            "note": (
                f"data sheet: {accelerator.flop_per_s / 1e12:g} TFLOP/s dense fp16 "
                f"x{accelerator.compute_efficiency:g}, {accelerator.memory_bytes_per_s / 1e9:g} "
                f"GB/s x{accelerator.memory_efficiency:g}; never measured"
            ),
            "error": {
                "prefill": _error(prefill, prefill_shapes, constants[:4]),
                "decode": _error(decode, decode_shapes, constants[4:]),
            },
        },
    )


def step_times(
    accelerator: Accelerator, model: ModelShape, tensor_parallel: int
) -> tuple[StepTime, StepTime]:
    """The roofline itself: seconds of a prefill and of a decode step of (batch, tokens each)."""
    flop_per_s = accelerator.flop_per_s * accelerator.compute_efficiency * tensor_parallel
    bytes_per_s = accelerator.memory_bytes_per_s * accelerator.memory_efficiency * tensor_parallel
    kv_token_bytes = kv_bytes_per_token(
        model.layers, model.kv_heads, model.head_dim, model.bytes_per_cached
    )

    def products(weights: float, tokens: float) -> float:
        return max(
            2 * weights * tokens / flop_per_s, weights * model.bytes_per_weight / bytes_per_s
        )

    def added(batch: int, tokens: int) -> float:
        time_s = STEP_OVERHEAD_S + SEQUENCE_OVERHEAD_S * batch
        if tensor_parallel > 1:
            if accelerator.link_bytes_per_s <= 0:
                raise ValueError(f"{accelerator.name}: t > 1 needs link_bytes_per_s")
            # A ring passes 2(t - 1)/t of the activations over every link.
            passed_bytes = 2 * (1 - 1 / tensor_parallel) * tokens * model.hidden * 2
            all_reduce_s = ALL_REDUCE_START_S + passed_bytes / accelerator.link_bytes_per_s
            time_s += 2 * model.layers * all_reduce_s
        return time_s

    def prefill(batch: int, prompt_tokens: int) -> float:
        tokens = batch * prompt_tokens
        width = model.heads * model.head_dim
        attention = 2 * model.layers * width * tokens * prompt_tokens / flop_per_s
        layers = products(model.layer_weights, tokens) + attention
        return layers + products(model.output_weights, batch) + added(batch, tokens)

    def decode(batch: int, cached_tokens: int) -> float:
        read = batch * cached_tokens * kv_token_bytes / bytes_per_s
        weights = model.layer_weights + model.output_weights
        return products(weights, batch) + read + added(batch, batch)

    return prefill, decode


def grid(
    kv_capacity_tokens: int, max_num_seqs: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (batch, tokens) that an engine can run, of a prefill and of a decode step."""
    shapes = [
        (batch, tokens)
        for batch in BATCHES
        for tokens in TOKENS
        if batch == 1 or (batch <= max_num_seqs and batch * tokens <= kv_capacity_tokens)
    ]
    return [shape for shape in shapes if shape[0] * shape[1] <= MAX_PREFILL_TOKENS], shapes


def _terms(shapes: list[tuple[int, int]]) -> NDArray[np.float64]:
    """The rows (b·n, b, n, 1) of Eqs. (3) and (4)."""
    return np.array([(b * n, b, n, 1.0) for b, n in shapes], dtype=np.float64)


def _fit(time_s: StepTime, shapes: list[tuple[int, int]]) -> list[float]:
    times = np.array([time_s(b, n) for b, n in shapes])
    shares = _terms(shapes) / times[:, None]
    solution, _ = nnls(shares, np.ones(len(shapes)))
    solution[(shares * solution).max(axis=0) < 1e-6] = 0.0  # rounding errors of the solver
    return [float(f"{value:.4g}") for value in solution]


def _error(time_s: StepTime, shapes: list[tuple[int, int]], constants: list[float]) -> float:
    """Mean relative error of the fit."""
    times = np.array([time_s(b, n) for b, n in shapes])
    return round(float(np.mean(np.abs(_terms(shapes) @ np.array(constants) / times - 1))), 3)
