"""Prefills that take several steps of the engine, and what Eq. (3) can say of them.

docs/design/profiling.md says why it is fitted to batches of one step, and to single prompts of
several with the further steps' fixed part, (steps − 1)·(p2 + p4), taken off. How far the constants
are off for the other batches is measured and shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_gateway.core.costs.fitting import Sample, fit_robustly, prefill_terms
from hetero_gateway.lab.profiler.samples import kept_samples

KEY = "chunked"


@dataclass(frozen=True, slots=True)
class Chunked:
    """Measured prefills of several steps.

    Args:
        singles: of one prompt, as if the whole of it had run in one step.
        batches: of several prompts, as measured.
        measured: all of them, as measured.
    """

    singles: list[Sample]
    batches: list[Sample]
    measured: list[Sample]

    def error(self, constants: Sequence[float]) -> float | None:
        """Mean relative error of p1..p4 and p9 on the batches; None without any."""
        if not self.batches:
            return None
        seconds = np.array([s.prefill_s for s in self.batches])
        predicted = prefill_terms(self.batches) @ np.array(constants)
        return float(np.mean(np.abs(predicted / seconds - 1)))


def record(sample: Sample) -> dict[str, float | None]:
    """What a sample's line keeps of such a prefill, beside the columns that are fitted."""
    return {"prompt_tokens": sample.prompt_tokens, "prefill_s": sample.prefill_s}


def chunked_prefills(records: Iterable[Mapping[str, Any]], max_batched_tokens: int) -> Chunked:
    """Those of accepted records; the fixed part of a step comes from the others."""
    kept = [r for r in records if r["discarded"] is None]
    fixed_s = 0.0
    if one_step := [sample for sample in kept_samples(kept) if sample.prefill_s]:
        times = np.array([s.prefill_s for s in one_step])
        p = fit_robustly(prefill_terms(one_step), times, np.ones(len(times)))
        fixed_s = float(p[1] + p[3])
    singles: list[Sample] = []
    measured: list[Sample] = []
    for r in kept:
        if KEY not in r:
            continue
        prompt, prefill_s = r[KEY]["prompt_tokens"], r[KEY]["prefill_s"]
        measured.append(Sample(r["batch_size"], prompt, 1, prefill_s, None))
        if r["batch_size"] > 1:
            continue
        steps = math.ceil(prompt / max_batched_tokens)
        rest_s = prefill_s - (steps - 1) * fixed_s
        if rest_s > prefill_s / 2:  # else the steps' fixed part is all there is to see
            singles.append(Sample(1, prompt, 1, rest_s, None))
    return Chunked(singles, [s for s in measured if s.batch_size > 1], measured)
