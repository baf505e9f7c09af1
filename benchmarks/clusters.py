"""The instances and lengths of the benchmarks that measure our own CPU time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Four kinds that serve one model; instances take turns with them.
PROFILES = (
    "V100-32GB-NVLink2/Llama-3-8B/tp4",
    "V100-32GB-NVLink2/Llama-3-8B/tp1",
    "A800-80GB-PCIe/Llama-3-8B/tp1",
    "L40S-48GB/Llama-3-8B/tp1",
)


def draw_lengths(
    rng: np.random.Generator, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Log-normal prompt and output tokens, as of a chat."""
    prompts = np.minimum(rng.lognormal(6.0, 1.0, count), 6000).astype(np.int64) + 1
    outputs = np.minimum(rng.lognormal(5.3, 0.8, count), 2000).astype(np.int64) + 1
    return prompts, outputs
