"""Prompt and output lengths to draw from: a trace, or a log-normal mix like ShareGPT's.

The paper samples ShareGPT_Vicuna_unfiltered and does not say whether a request is a conversation's
first prompt or carries the turns before it. That decides the results, so both are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.load.trace import read_trace

IntArray = NDArray[np.int64]

POOL_REQUESTS = 20_000
CONTEXT_TOKENS = 8192  # of Llama-3-8B


@dataclass(frozen=True)
class Lengths:
    """A pool of requests; ``prompt_tokens`` and ``output_tokens`` are (N,), at least 1."""

    name: str
    prompt_tokens: IntArray
    output_tokens: IntArray

    def sample(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """``count`` requests, without repetition while the pool has enough."""
        size = len(self.prompt_tokens)
        picked = rng.choice(size, count, replace=count > size)
        return self.prompt_tokens[picked], self.output_tokens[picked]


@dataclass(frozen=True)
class LogNormal:
    """Whole tokens of a log-normal with this mean and sd (before the cut), from 1 to ``cut``."""

    mean: float
    sd: float
    cut: int

    @property
    def sigma(self) -> float:
        return math.sqrt(math.log1p((self.sd / self.mean) ** 2))

    @property
    def median(self) -> float:
        return self.mean * math.exp(-(self.sigma**2) / 2)

    def draw(self, count: int, rng: np.random.Generator) -> IntArray:
        tokens = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(tokens), 1, self.cut).astype(np.int64)


@dataclass(frozen=True)
class Mix:
    """Independent prompts and outputs; in the traces they correlate by less than 0.1."""

    name: str
    prompts: LogNormal
    outputs: LogNormal

    def pool(self) -> Lengths:
        rng = np.random.default_rng(0)
        prompts = self.prompts.draw(POOL_REQUESTS, rng)
        outputs = self.outputs.draw(POOL_REQUESTS, rng)
        return Lengths(self.name, np.minimum(prompts, CONTEXT_TOKENS - outputs), outputs)


# Mean, sd and cut of the lengths themselves, in two public traces of ShareGPT: the first turns in
# Thesys-lab/Helix-ASPLOS25 and the conversations, turn by turn with what came before, in
# project-etalon/etalon (both Apache-2.0). A log-normal of the same mean and sd is what is meant by
# fitted: throughput hangs on the sums, which a fit of the logarithms would miss.
FIRST_TURNS = Mix("first turns (mix)", LogNormal(75, 148, 1023), LogNormal(228, 135, 1046))
CONVERSATIONS = Mix("conversations (mix)", LogNormal(2355, 2099, 8141), LogNormal(437, 264, 1024))


def from_trace(path: Path, name: str) -> Lengths:
    """The lengths of a trace file. Raises ConfigError, in one line, for a file that is none."""
    rows = read_trace(path)
    return Lengths(
        name,
        np.array([row.input_tokens for row in rows], dtype=np.int64),
        np.array([row.output_tokens for row in rows], dtype=np.int64),
    )
