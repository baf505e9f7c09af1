"""Verdicts on a batch: samples to fit, or the reason why not. No clock and no socket here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.fitting import Sample, fit_robustly, prefill_terms
from hetero_gateway.engines.vllm import EngineMetrics
from hetero_gateway.lab.profiler.batch import Shot
from hetero_gateway.lab.profiler.samples import kept_samples

ENGINE_ERROR = "engine error"  # what it said follows
FOREIGN = "foreign load"
PREEMPTED = "preemption"
CACHED = "prefix cache hit"
BUSY_CLIENT = "client too slow"
RAGGED = "did not start together"
UNEQUAL = "output lengths not as asked"
NO_WINDOW = "did not run together"
HURRIED = "sooner than a step can end"

# A prefill reads all the weights that a decode step of the same batch reads. One that seems to take
# less than this share of such a step was timed from a late starting signal: a server decodes the
# gate's whole prompt to text before it sends its token, while the batch runs already.
_SOONEST = 0.75


class BatchVerdict(NamedTuple):
    """A sample, and why it must not be fitted, if so.

    ``closes``: its cell has been measured. ``beyond``: the prefill of a batch of several steps.
    """

    sample: Sample
    reason: str | None
    closes: bool = False
    beyond: Sample | None = None


def one_step(whole: Sample, decode: Sample | None, ragged: bool) -> list[BatchVerdict]:
    """A batch's accepted parts: one sample if both are of the same lengths, else one each."""
    reason = RAGGED if ragged else None
    if decode is None:
        return [BatchVerdict(whole, reason, closes=not ragged)]
    if not ragged and _hurried(whole, decode):
        reason = HURRIED
    if reason is None and decode.prompt_tokens == whole.prompt_tokens:
        return [BatchVerdict(replace(decode, prefill_s=whole.prefill_s), None, closes=True)]
    return [BatchVerdict(whole, reason, closes=reason is None), BatchVerdict(decode, None)]


def _hurried(whole: Sample, decode: Sample) -> bool:
    """Whether the prefill seems shorter than any step of this batch can be."""
    if whole.prefill_s is None or decode.decode_s is None:
        return False
    return whole.prefill_s * (decode.output_tokens - 1) < _SOONEST * decode.decode_s


def several_steps(whole: Sample, decode: Sample | None) -> list[BatchVerdict]:
    """The decode part; the prefill is kept with it, for ``chunked_prefills``."""
    sample = decode or replace(whole, prefill_s=None)
    return [BatchVerdict(sample, None, closes=True, beyond=whole)]


def disturbance(before: EngineMetrics, after: EngineMetrics, shot: Shot) -> str | None:
    """The disturbance that the engine's counters show, or None."""
    if grown(before.preemptions, after.preemptions) > 0:
        return PREEMPTED
    if grown(before.prefix_cache_hits, after.prefix_cache_hits) > 0:
        return CACHED
    foreign = (
        grown(before.generation_tokens, after.generation_tokens) > shot.output_tokens
        or grown(before.prompt_tokens, after.prompt_tokens) > shot.prompt_tokens
        or (after.running or 0.0) + (after.waiting or 0.0) > 0
    )
    return FOREIGN if foreign else None


def grown(before: float | None, after: float | None) -> float:
    """A counter's growth; 0 if it is not exported."""
    return 0.0 if before is None or after is None else after - before


# Prefills that take several steps of the engine, and their relation to Eq. (3). It is fitted to
# batches of one step, and to single prompts of several with the further steps' fixed part,
# (steps − 1)·(p2 + p4), subtracted: docs/design/profiling.md explains it.

# The part of such a prefill kept in a sample's line, besides the fitted columns.
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
        if rest_s > prefill_s / 2:  # else the steps' fixed part dominates
            singles.append(Sample(1, prompt, 1, rest_s, None))
    return Chunked(singles, [s for s in measured if s.batch_size > 1], measured)
