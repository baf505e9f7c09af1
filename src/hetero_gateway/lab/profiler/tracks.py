"""From the streams of one batch to its prefill and decode times. No clock and no socket here.

docs/design/profiling.md explains how a batch is timed. The number of tokens that the others had
emitted by the last first token shows whether all started in one step.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from hetero_gateway.core.costs.fitting import Sample
from hetero_gateway.engines.vllm import completion_counts_in, deltas_in
from hetero_gateway.lab.load.client import Reply, judge

# Steps at which the sequences are compared.
_CHECKS = 9


@dataclass(frozen=True, slots=True)
class Track:
    """The tokens of one sequence as they arrived.

    Args:
        times_s, tokens: cumulative tokens received by each time; the same length, at least 1.
        prompt_tokens: by the engine's count, or as asked for.
    """

    times_s: tuple[float, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int

    @property
    def first_s(self) -> float:
        return self.times_s[0]

    @property
    def output_tokens(self) -> int:
        return self.tokens[-1]

    def emitted_by(self, time_s: float) -> int:
        """Tokens received until ``time_s``."""
        i = bisect_right(self.times_s, time_s)
        return self.tokens[i - 1] if i else 0


@dataclass(frozen=True, slots=True)
class Reading:
    """The reading of a batch's streams.

    Args:
        whole: means over its sequences; its prefill is from ``start_s`` to the last first
            token.
        decode: the window in which all ran; None if there was none.
        together: all sequences emitted their first token in the same step.
        equal: all had the same number of output tokens.
        most_running: the most sequences in progress at one time.
    """

    whole: Sample
    decode: Sample | None
    together: bool
    equal: bool
    most_running: int


def track(reply: Reply, asked_prompt_tokens: int) -> Track | str:
    """The tokens of one streamed reply, or its error."""
    error, prompt_tokens, total, *_ = judge(reply, stream=True)
    if error is not None:
        return error
    times_s, tokens, counted = _marks(reply.parts or [])
    if not tokens:
        return "no tokens"
    # Deltas may have merged: without counts in the stream, spread the closing count evenly.
    if not counted and total is not None and total != tokens[-1]:
        tokens = [max(1, round(t * total / tokens[-1])) for t in tokens]
    return Track(tuple(times_s), tuple(tokens), prompt_tokens or asked_prompt_tokens)


def _marks(parts: Sequence[tuple[float, bytes]]) -> tuple[list[float], list[int], bool]:
    """(times, tokens by then, whether the stream itself counts them)."""
    times_s: list[float] = []
    tokens: list[int] = []
    deltas = latest = 0
    counted = False
    rest = b""
    for time_s, part in parts:
        whole, end, rest = (rest + part).rpartition(b"\n\n")
        if not end:
            continue
        new = deltas_in(whole)
        counts = completion_counts_in(whole)
        if deltas == 0 and new:
            # The closing usage counts too; a stream that counts does so from its first delta on.
            counted = len(counts) >= new
        deltas += new
        now = counts[-1] if counted and counts else (latest if counted else deltas)
        if new and now > latest:
            times_s.append(time_s)
            tokens.append(now)
        latest = max(latest, now)
    return times_s, tokens, counted


def read_batch(tracks: Sequence[Track], start_s: float) -> Reading:
    """Times of a batch that could begin at ``start_s``.

    Args:
        tracks: of all its sequences, at least one.
        start_s: same clock as the tracks.
    """
    late = max(tracks, key=lambda t: t.first_s)
    begin_s, first = late.first_s, late.tokens[0]
    span = late.output_tokens - first
    step_s = (late.times_s[-1] - begin_s) / span if span else 0.0
    leads = _leads(tracks, late, step_s)
    emitted = [max(1, first + lead) for lead in leads]
    prompt_tokens = fmean(t.prompt_tokens for t in tracks)
    room = min(t.output_tokens - e for t, e in zip(tracks, emitted, strict=True))
    decode = None
    end = bisect_right(late.tokens, first + room) - 1
    if room > 0 and end > 0:
        steps = late.tokens[end] - first
        decode = Sample(
            batch_size=len(tracks),
            prompt_tokens=prompt_tokens + fmean(emitted) - 1,
            output_tokens=steps + 1,
            prefill_s=None,
            decode_s=late.times_s[end] - begin_s,
        )
    output_tokens = fmean(t.output_tokens for t in tracks)
    return Reading(
        whole=Sample(len(tracks), prompt_tokens, output_tokens, begin_s - start_s, None),
        decode=decode,
        together=not any(leads),
        equal=len({t.output_tokens for t in tracks}) == 1,
        most_running=_most_running(tracks),
    )


def _leads(tracks: Sequence[Track], late: Track, step_s: float) -> list[int]:
    """By how many tokens each sequence is ahead of the one that started last.

    Compared at several steps, using the median: on a busy machine the tokens of one step may
    arrive half a step apart now and then.
    """
    ends_s = min(t.times_s[-1] for t in tracks)
    # Tokens of the same step arrive within half a step of it.
    at = [
        (time_s + step_s / 2, tokens)
        for time_s, tokens in zip(late.times_s, late.tokens, strict=True)
        if time_s + step_s / 2 < ends_s
    ][:_CHECKS] or [(late.first_s + step_s / 2, late.tokens[0])]
    return [
        sorted(track.emitted_by(time_s) - tokens for time_s, tokens in at)[len(at) // 2]
        for track in tracks
    ]


def _most_running(tracks: Sequence[Track]) -> int:
    """The most sequences between their first and last token at one time.

    One that starts as another ends counts as after it: the step that ends one can start no
        other.
    """
    events = sorted([(t.first_s, 1) for t in tracks] + [(t.times_s[-1], -1) for t in tracks])
    return max(1, *accumulate(change for _, change in events))
