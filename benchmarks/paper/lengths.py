"""Prompt and output lengths to draw from: a trace, or a log-normal mix like ShareGPT's.

The paper samples ShareGPT_Vicuna_unfiltered and does not say whether a request is a conversation's
first prompt or carries the turns before it. That decides the results, so both are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.files.trace import read_trace
from hetero_gateway.sim.workload import LogNormal, TraceLengths

POOL_REQUESTS = 20_000
CONTEXT_TOKENS = 8192  # of Llama-3-8B


@dataclass(frozen=True)
class Source:
    """Requests to draw from, and what tables call them."""

    name: str
    lengths: TraceLengths


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of a length in tokens, and where draws are cut."""

    mean: float
    sd: float
    cut: int

    def log_normal(self) -> LogNormal:
        """The log-normal that has this mean and sd before the cut."""
        variance = math.log1p((self.sd / self.mean) ** 2)
        return LogNormal(self.mean * math.exp(-variance / 2), math.sqrt(variance), self.cut)


@dataclass(frozen=True)
class Mix:
    """Independent prompts and outputs; in the traces they correlate by less than 0.1."""

    name: str
    prompts: Moments
    outputs: Moments

    def source(self) -> Source:
        rng = np.random.default_rng(0)
        prompts = self.prompts.log_normal().draw(POOL_REQUESTS, rng)
        outputs = self.outputs.log_normal().draw(POOL_REQUESTS, rng)
        # What is longer than the context does not reach an engine.
        prompts = np.minimum(prompts, CONTEXT_TOKENS - outputs)
        return Source(self.name, TraceLengths(prompts, outputs))


# Mean, sd and cut of the lengths themselves, in two public traces of ShareGPT: the first turns in
# Thesys-lab/Helix-ASPLOS25 and the conversations, turn by turn with what came before, in
# project-etalon/etalon (both Apache-2.0). A log-normal of the same mean and sd is what is meant by
# fitted: throughput hangs on the sums, which a fit of the logarithms would miss.
FIRST_TURNS = Mix("first turns (mix)", Moments(75, 148, 1023), Moments(228, 135, 1046))
CONVERSATIONS = Mix("conversations (mix)", Moments(2355, 2099, 8141), Moments(437, 264, 1024))


def from_trace(path: Path, name: str) -> Source:
    """The lengths of a trace file. Raises ConfigError, in one line, for a file that is none."""
    rows = read_trace(path)
    prompts: Integers = np.array([row.input_tokens for row in rows], dtype=np.int64)
    outputs: Integers = np.array([row.output_tokens for row in rows], dtype=np.int64)
    return Source(name, TraceLengths(prompts, outputs))
