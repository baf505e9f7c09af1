"""Which batches to measure, and in which order. Pure: the engine's limits and a seed in, cells out.

docs/design/profiling.md describes the one-step and the deep cells. Eq. (3) describes exactly the
first, whose p4 is paid once; the others are for decoding over many cached tokens (p5, p7), for
attention (p9), and to show how far Eq. (3) is off. Batch size and length vary independently, so
that b·I, b, I and 1 can be distinguished.
"""

import math
from dataclasses import dataclass

import numpy as np

from hetero_gateway.core.costs.fitting import Sample, decode_terms, eq_3_terms
from hetero_gateway.errors import ConfigError

# Of the KV cache: above it, vLLM may have to preempt.
KV_SHARE = 0.9
MIN_PROMPT_TOKENS = 16
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 16, 64
# Strata per batch size; twice as many deep ones of single prompts.
ONE_STEP_CELLS = 4
DEEP_CELLS = 2
# Changes whenever the same limits and seed give other cells: a resumed run must fit its samples.
GRID_VERSION = 3


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch, in tokens and sequences; ``max_batched_tokens`` is of one step."""

    max_model_len: int
    kv_capacity_tokens: int
    block_tokens: int
    max_num_seqs: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """A batch of equal requests; ``one_step``: its prefill fits into one step."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    one_step: bool

    @property
    def key(self) -> str:
        return f"{self.batch_size}x{self.prompt_tokens}+{self.output_tokens}"


def plan_cells(limits: BatchLimits, seed: int) -> list[GridCell]:
    """The cells of one pass, in the order of measuring.

    Raises ConfigError: the limits leave no room for a batch.
    """
    rng = np.random.default_rng(seed)
    columns = [_column(limits, b, rng) for b in _batch_sizes(limits)]
    columns = [column for column in columns if column]
    if not columns:
        raise ConfigError(
            f"a context of {limits.max_model_len} tokens and a KV cache of "
            f"{limits.kv_capacity_tokens} leave no room for a request of "
            f"{MIN_PROMPT_TOKENS} + {MIN_OUTPUT_TOKENS} tokens"
        )
    order = []
    for r in range(max(map(len, columns))):
        # The first round goes up, so that the engine's own limit of sequences, if no flag gives it,
        # is met with a batch that is a little too large, not with a queue of hundreds.
        for i in _spread(len(columns)) if r else range(len(columns)):
            column = columns[i]
            if r < len(column):
                # A different stratum for each batch size in the same round.
                order.append(column[(r + i) % len(column)])
    return order


def _batch_sizes(limits: BatchLimits) -> list[int]:
    """Powers of two, and the largest batch that can run when it is well above the last of them."""
    blocks = -(-(MIN_PROMPT_TOKENS + MIN_OUTPUT_TOKENS) // limits.block_tokens)
    largest = min(
        limits.max_num_seqs,
        int(KV_SHARE * limits.kv_capacity_tokens) // (blocks * limits.block_tokens),
        limits.max_batched_tokens,
    )
    sizes = [1 << k for k in range(max(0, largest).bit_length())]
    if sizes and largest >= 1.25 * sizes[-1]:
        sizes.append(largest)
    return sizes


def _column(limits: BatchLimits, b: int, rng: np.random.Generator) -> list[GridCell]:
    """The cells of one batch size, in random order, with deep ones distributed among them."""
    one_step_most = limits.max_batched_tokens // b
    kv_blocks = int(KV_SHARE * limits.kv_capacity_tokens) // b // limits.block_tokens
    most = min(limits.max_model_len, kv_blocks * limits.block_tokens)
    # One range for every batch size, so that length does not correlate with size.
    deep = DEEP_CELLS if b > 1 else 2 * DEEP_CELLS
    outputs = rng.permutation(
        np.geomspace(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS, ONE_STEP_CELLS + deep)
    )
    cells: list[GridCell] = []
    low = min(MIN_PROMPT_TOKENS, one_step_most)
    high = min(one_step_most, most - MIN_OUTPUT_TOKENS)
    for prompt in _strata(low, high, ONE_STEP_CELLS, rng):
        output = min(int(outputs[len(cells)]), most - prompt)
        cells.append(GridCell(b, prompt, output, one_step=True))
    # Early starters must still run when the last prompt's last chunk is done.
    deep_high = (most - MIN_OUTPUT_TOKENS) * limits.max_batched_tokens
    deep_high //= limits.max_batched_tokens + 2 * b
    # A short context may have no room for two whole steps of one prompt, and only there p9 shows.
    deep_low = 2 * one_step_most if b > 1 else one_step_most * 5 // 4
    for prompt in _strata(deep_low, deep_high, deep, rng, ends=False):
        chunks = math.ceil(b * prompt / limits.max_batched_tokens)
        output = min(int(outputs[len(cells)]) + math.ceil(1.25 * chunks), most - prompt)
        cells.append(GridCell(b, prompt, output, one_step=False))
    return [cells[i] for i in rng.permutation(len(cells))]


def _strata(
    low: int, high: int, count: int, rng: np.random.Generator, *, ends: bool = True
) -> list[int]:
    """Distinct integers in [low, high], one in each of ``count`` equal parts of its log.

    With ``ends`` the outer parts give their outer ends: measurements there bound the others.
    """
    draws = (np.arange(count) + rng.random(count)) / count
    if high < low or low < 1:
        return []
    ratio = high / low
    if ends:
        draws[0], draws[-1] = 0.0, 1.0
    return sorted({min(high, round(low * ratio**u)) for u in draws})


def _spread(count: int) -> list[int]:
    """0 … count−1 with neighbours in the order far apart: the ends first, then between."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)]
    return [i for i in reversed_bits if i < count]


def cost_s(cell: GridCell, prefill: np.ndarray, decode: np.ndarray) -> float:
    """A cell's time by a rough fit of p1..p4 and p5..p8, in seconds."""
    sample = [Sample(cell.batch_size, cell.prompt_tokens, cell.output_tokens, None, None)]
    return float((eq_3_terms(sample) @ prefill + decode_terms(sample) @ decode)[0])
