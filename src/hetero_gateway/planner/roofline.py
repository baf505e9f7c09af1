"""p1..p9 of an accelerator without a profile, from its data sheet.

A step takes as long as the slower of arithmetic and memory traffic, plus the engine's overhead and
the all-reduce. That is not linear in batch and tokens, so Eqs. (3) and (4) are fitted to it over a
grid of batches, by relative-error least squares with non-negative constants (erratum 14).

    step        arithmetic (FLOP)                        memory (bytes)
    prefill     2·weights·n + 2·layers·width·n·I         weights once
    decode      2·weights·b                              weights once, and the KV of every sequence

with n = b·I prompt tokens, width = heads · head_dim, half of the attention matrix masked, and the
output layer only for the b sampled tokens. Both are divided by t accelerators. The second term of a
prefill's arithmetic is not fitted: it is p9, of the model's shape alone, so prompts beyond the grid
are right as well.

A layer also costs its many small kernels, and an all-reduce does not reach its link's figure. These
shares were fitted to the built-in profiles that are sums of measured operators (A100, H100, H200,
L40S); docs/evidence/planner.md has the ratios. Those of V100, T4 and A800 include an older engine's
overhead, 2.5 ms a step and 60 µs a sequence: against them it is optimistic.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from hetero_gateway.core.costs.cost_model import (
    attended_pairs,
    decode_step_time_s,
    prefill_time_s,
)
from hetero_gateway.core.costs.least_squares import non_negative_solution
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.model_shape import ModelShape

# Overhead of vLLM's scheduler, sampler and input preparation: as in the built-in profiles.
STEP_OVERHEAD_S = 1e-3
SEQUENCE_OVERHEAD_S = 1e-5
# A server's time before a first token, besides the steps: of vLLM's on an H100 and of those in
# docs/evidence/planner.md 7 to 13 ms, whatever the model or the group; not the card's.
FIRST_TOKEN_S = 9e-3
# A step that reads this share of a mixture's experts is assumed to read all.
AWAKE_SHARE = 0.9
# The start of one all-reduce (two follow each layer), and the share of a link's figure that an
# all-reduce reaches. Fitted as described above.
ALL_REDUCE_START_S = 0.7e-5
LINK_EFFICIENCY = 0.53
# Slower links are slots. The bandwidth of vLLM's all-reduce there, as a share of the link, and its
# time with hardly any tokens, by the number of cards: fitted to the collectives that AIConfigurator
# (Apache-2.0, systems/data/*/comm/vllm) measured on L40S, whose PCIe 4 slots meet in the processor,
# and on RTX PRO 6000, whose PCIe 5 slots meet in switches. Between, on a log scale.
SLOT_BYTES_PER_S = 100e9
SWITCHED_BYTES_PER_S = 48e9
ROOT_SHARES = {2: 0.59, 4: 0.116, 8: 0.061}
SWITCHED_SHARES = {2: 0.57, 4: 0.44, 8: 0.36}
SLOT_START_S = 3.3e-6  # for each card
# Beyond two cards boxes differ too much for better (the two above by a factor of 3).
SLOTS_UNCERTAINTY = 0.4

# The grid of the fit: batches, and prompt or cached tokens per sequence.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
MAX_PREFILL_TOKENS = 8192

StepTime = Callable[[float, float], float]


def roofline_profile(
    accelerator: Accelerator,
    model: ModelShape,
    tensor_parallel: int,
    max_num_seqs: int,
    kv_capacity_tokens: int,
    times: tuple[StepTime, StepTime] | None = None,
    copies: int = 1,
    plans_ahead: bool = True,
) -> Profile:
    """The profile of one instance: Eqs. (3) and (4) fitted to its step times.

    ``times`` are those of a prefill and of a decode step, None: the roofline's own; ``copies`` of
    the model share the attention over prompts; ``plans_ahead``: as ``Profile``.
    """
    prefill, decode = times or step_times(accelerator, model, tensor_parallel)
    p9 = attended_pair_s(accelerator, model, tensor_parallel) / copies
    prefill_shapes, decode_shapes = grid(kv_capacity_tokens, max_num_seqs)

    def without_attention(batch: float, prompt_tokens: float) -> float:
        return prefill(batch, prompt_tokens) - p9 * batch * attended_pairs(prompt_tokens)

    all_awake, awake_at, idle_s = decode, 0.0, 0.0
    if model.moe_layers:
        all_awake, awake_at, idle_s = _awake(decode, accelerator, model, tensor_parallel * copies)
    p1_to_p4 = _fit(without_attention, prefill_shapes)
    p5_to_p8 = _fit(all_awake, decode_shapes)
    constants = Constants(*[*p1_to_p4, *p5_to_p8, _rounded(p9)])
    return Profile(
        gpu=accelerator.name,
        model=model.name,
        tensor_parallel=tensor_parallel,
        constants=constants,
        kv_capacity_tokens=kv_capacity_tokens,
        max_num_seqs=max_num_seqs,
        first_token_s=FIRST_TOKEN_S,
        plans_ahead=plans_ahead,
        experts_awake_at=awake_at,
        idle_expert_s=idle_s,
        source={
            "how": "roofline",
            "note": (
                f"data sheet: {accelerator.flop_per_s / 1e12:g} TFLOP/s dense fp16 "
                f"x{accelerator.compute_efficiency:g}, {accelerator.memory_bytes_per_s / 1e9:g} "
                f"GB/s x{accelerator.memory_efficiency:g}; never measured"
            ),
            "error": {
                "prefill": _error(prefill, prefill_shapes, partial(prefill_time_s, constants)),
                "decode": _error(decode, decode_shapes, partial(decode_step_time_s, constants)),
            },
        },
    )


def _awake(
    decode: StepTime, accelerator: Accelerator, model: ModelShape, ranks: int
) -> tuple[StepTime, float, float]:
    """Decode steps that read all experts; the token count from which they nearly do; and the saving
    of each token fewer, s: a line from no saving there to that of one token alone.

    ``ranks``: accelerators that the experts are distributed over.
    """
    bytes_per_s = accelerator.memory_bytes_per_s * accelerator.memory_efficiency * ranks
    experts = model.moe_layers * model.experts * model.expert_weights * model.bytes_per_weight
    missed = 1 - model.experts_per_token / model.experts

    def all_awake(batch: float, cached_tokens: float) -> float:
        idle: float = missed**batch
        return decode(batch, cached_tokens) + experts / bytes_per_s * idle

    if missed <= 0:
        return decode, 0.0, 0.0
    awake_at = math.ceil(math.log(1 - AWAKE_SHARE) / math.log(missed))
    if awake_at < 2:
        return all_awake, 0.0, 0.0
    idle_s = experts / bytes_per_s * missed / (awake_at - 1)
    return all_awake, float(awake_at), _rounded(idle_s)


def step_times(
    accelerator: Accelerator, model: ModelShape, tensor_parallel: int
) -> tuple[StepTime, StepTime]:
    """The roofline itself: seconds of a prefill and of a decode step of (batch, tokens each)."""
    flop_per_s = matrix_flop_per_s(accelerator, model) * tensor_parallel
    attention_flop_per_s = _attention_flop_per_s(accelerator, tensor_parallel)
    pair_s = attended_pair_s(accelerator, model, tensor_parallel)
    bytes_per_s = accelerator.memory_bytes_per_s * accelerator.memory_efficiency * tensor_parallel
    experts = model.moe_layers * model.expert_weights
    others = model.layer_weights - model.experts * experts
    # Rows that the experts' kernels write and read besides the weights: inputs, gate, up, outputs.
    width = 3 * model.moe_intermediate / tensor_parallel + 2 * model.hidden
    row_bytes = model.moe_layers * model.experts_per_token * width * model.dtype_bytes

    def layers(tokens: float) -> float:
        dense = max(2 * others * tokens / flop_per_s, others * model.bytes_per_weight / bytes_per_s)
        if not experts:
            return dense
        # Arithmetic and weights of experts add up: each has too few rows to hide one in the other.
        touched = (model.layer_weights_touched(tokens) - others) * model.bytes_per_weight
        work = 2 * experts * model.experts_per_token * tokens / flop_per_s
        rows = tokens * row_bytes * tensor_parallel / bytes_per_s
        return dense + touched / bytes_per_s + work + rows

    def output(sequences: float) -> float:
        return model.output_weights * max(
            2 * sequences / attention_flop_per_s, model.dtype_bytes / bytes_per_s
        )

    def windowed_s(tokens: float) -> float:
        """Of the layers whose attention ends with a window; linear in the tokens beyond it."""
        flop = 4 * model.heads * model.head_dim / attention_flop_per_s
        return sum(
            flop * cache.layers * (attended_pairs(min(tokens, cache.window))
                                   + max(0, tokens - cache.window) * cache.window)
            for cache in model.layer_caches if cache.window
        )  # fmt: skip

    def added(batch: float, tokens: float) -> float:
        return (
            STEP_OVERHEAD_S
            + SEQUENCE_OVERHEAD_S * batch
            + model.layers
            * (
                accelerator.layer_overhead_s
                + 2 * all_reduce_s(accelerator, model, tensor_parallel, tokens)
            )
        )

    def prefill(batch: float, prompt_tokens: float) -> float:
        tokens = batch * prompt_tokens
        attention = pair_s * batch * attended_pairs(prompt_tokens)
        attention += windowed_s(prompt_tokens) * batch
        return layers(tokens) + attention + output(batch) + added(batch, tokens)

    def decode(batch: float, cached_tokens: float) -> float:
        # A state is read and written.
        read = batch * model.kv_request_bytes(cached_tokens, tensor_parallel) / bytes_per_s
        read += batch * model.state_bytes / bytes_per_s
        return layers(batch) + output(batch) + read + added(batch, batch)

    return prefill, decode


def attended_pair_s(accelerator: Accelerator, model: ModelShape, tensor_parallel: int) -> float:
    """p9: a token's product with one key, and with its value, in every layer and head.

    Only for layers that attend to all tokens.
    """
    layers = sum(
        cache.layers
        for cache in model.layer_caches
        if not cache.window and cache.element_bytes is None
    )
    flop = 4 * layers * model.heads * model.head_dim
    return flop / _attention_flop_per_s(accelerator, tensor_parallel)


def _attention_flop_per_s(accelerator: Accelerator, tensor_parallel: int) -> float:
    """In the model's own type, whatever the weights are stored in."""
    return accelerator.flop_per_s * accelerator.compute_efficiency * tensor_parallel


def all_reduce_s(
    accelerator: Accelerator, model: ModelShape, tensor_parallel: int, tokens: float
) -> float:
    """One all-reduce of the activations of so many tokens.

    Raises:
        ValueError: several accelerators without a link.
    """
    t = tensor_parallel
    if t == 1:
        return 0.0
    if accelerator.link_bytes_per_s <= 0:
        raise ValueError(f"{accelerator.name}: t > 1 needs link_bytes_per_s")
    slots = accelerator.link_bytes_per_s < SLOT_BYTES_PER_S
    # Between switches each doubling of the group adds one round of waiting for each other.
    start = SLOT_START_S * t if slots else ALL_REDUCE_START_S * math.log2(t)
    # A ring passes 2(t - 1)/t of the activations over every link.
    passed = 2 * (1 - 1 / t) * tokens * model.hidden * 2
    return start + passed / (accelerator.link_bytes_per_s * link_share(accelerator, t))


def link_share(accelerator: Accelerator, together: int) -> float:
    """The share of a link's figure that a collective of so many accelerators reaches."""
    if accelerator.link_bytes_per_s >= SLOT_BYTES_PER_S:
        return LINK_EFFICIENCY
    switched = accelerator.link_bytes_per_s >= SWITCHED_BYTES_PER_S
    shares = SWITCHED_SHARES if switched else ROOT_SHARES
    logs = np.log2(list(shares)), np.log(list(shares.values()))
    return float(np.exp(np.interp(np.log2(together), *logs)))


def matrix_flop_per_s(accelerator: Accelerator, model: ModelShape) -> float:
    """The speed of products with the layers' weights: in eight bits if both have them."""
    peak = accelerator.flop_per_s
    stored = model.quantization
    if stored is not None and stored.bits == 8:
        eight = accelerator.fp8_op_per_s if stored.method == "fp8" else accelerator.int8_op_per_s
        peak = max(peak, eight)
    return peak * accelerator.compute_efficiency


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


def _fit(time_s: StepTime, shapes: list[tuple[int, int]]) -> list[float]:
    times = np.array([time_s(b, n) for b, n in shapes])
    # The rows of Eqs. (3) and (4).
    shares = np.array([(b * n, b, n, 1.0) for b, n in shapes]) / times[:, None]
    solution = non_negative_solution(shares, np.ones(len(shapes)))
    solution[(shares * solution).max(axis=0) < 1e-6] = 0.0  # rounding errors of the solver
    return [_rounded(float(value)) for value in solution]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _error(
    time_s: StepTime, shapes: list[tuple[int, int]], fitted_s: Callable[[float, float], float]
) -> float:
    """Mean relative error of the fit."""
    return round(float(np.mean([abs(fitted_s(*s) / time_s(*s) - 1) for s in shapes])), 3)
