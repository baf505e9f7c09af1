"""Which candidate comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.plan import Candidate, Figures


def rank(candidate: Candidate, goals: Goals) -> tuple[float, ...]:
    """Sorts the better candidate first; what was not simulated comes last."""
    known = candidate.simulated is not None
    if goals.name == "goodput" and known:
        key = (-(candidate.goodput_per_s or 0.0), float(candidate.accelerators))
    elif goals.name == "cost" and candidate.alone_tokens_per_s:
        key = (candidate.usd_per_million_tokens or 0.0, -candidate.tokens_per_s)
    elif known and goals.name == "fewest":
        key = (float(candidate.accelerators), -candidate.tokens_per_s)
    elif known:
        key = (-candidate.tokens_per_s, float(candidate.accelerators))
    else:
        key = (-candidate.alone_tokens_per_s, -candidate.estimate_tokens_per_s)
    return (float(not known), float(candidate.holds is False), *key)


def with_second_runs(candidates: Sequence[Candidate], second: Sequence[Figures]) -> list[Candidate]:
    """Each with the mean of its run with everything at once and of another one's figures.

    Other requests are a little harder or easier for all of them: that is nobody's merit.
    """
    level = sum(candidate.tokens_per_s for candidate in candidates)
    level /= sum(figures.tokens_per_s for figures in second)
    return [
        _mean(candidate, figures, level)
        for candidate, figures in zip(candidates, second, strict=True)
    ]


def _mean(candidate: Candidate, other: Figures, level: float) -> Candidate:
    """With the mean of two runs with everything at once, the second times ``level``."""
    one = candidate.simulated
    if one is None:
        return candidate
    figures = dataclasses.replace(
        one,
        tokens_per_s=(one.tokens_per_s + level * other.tokens_per_s) / 2,
        output_tokens_per_s=(one.output_tokens_per_s + level * other.output_tokens_per_s) / 2,
        batch=(one.batch + other.batch) / 2,
    )
    return dataclasses.replace(candidate, simulated=figures)


def pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both throughput and mean latency at the rate; fastest last."""
    known = [c for c in candidates if c.at_rate is not None]
    known.sort(key=lambda c: (-c.tokens_per_s, c.at_rate.latency_mean_s if c.at_rate else 0.0))
    kept: list[Candidate] = []
    for candidate in known:
        assert candidate.at_rate is not None
        last = kept[-1].at_rate if kept else None
        if last is None or candidate.at_rate.latency_mean_s < last.latency_mean_s:
            kept.append(candidate)
    return tuple(kept)
