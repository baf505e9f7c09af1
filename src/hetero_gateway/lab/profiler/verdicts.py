"""What becomes of a batch: samples to fit, or the reason why not. No clock and no socket here."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hetero_gateway.core.costs.fitting import Sample
from hetero_gateway.engines.vllm import EngineMetrics
from hetero_gateway.lab.profiler.batch import Shot

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
# less than this share of such a step was timed from a starting signal that came late: a server
# decodes the gate's whole prompt to text before it sends its token, while the batch runs already.
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
    """A batch's accepted parts: one sample when both are of the same lengths, else one each."""
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
    """The decode part; the prefill is kept beside it, for ``chunked``."""
    sample = decode or replace(whole, prefill_s=None)
    return [BatchVerdict(sample, None, closes=True, beyond=whole)]


def disturbance(before: EngineMetrics, after: EngineMetrics, shot: Shot) -> str | None:
    """Why the engine's counters say that the batch was disturbed, or None."""
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
    """By how much a counter grew; 0 where it is not exported."""
    return 0.0 if before is None or after is None else after - before
