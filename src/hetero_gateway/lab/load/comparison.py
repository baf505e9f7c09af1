"""Policies side by side: the demo's table and its last line. Pure.

Everything here is computed from the figures; a policy that lost is reported as such.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_gateway.lab.load.result import InstanceShare, Summary

# Differences below this are noise between repetitions of one run (docs/evidence/scheduling.md).
NOISE = 0.02
# Shorter runs are dominated by their few longest answers: with 29 requests, four seeds put
# min-max's throughput from 20 % below capacity-weighted's to level with it; with 864, three were
# within 2 %.
_FEW_REQUESTS = 300


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's run."""

    policy: str
    summary: Summary

    def instance(self, instance_id: str) -> InstanceShare:
        """The instance's part; empty if it got no request."""
        shares = (share for share in self.summary.instances if share.instance_id == instance_id)
        return next(shares, InstanceShare(instance_id, 0, 0.0))


def table_rows(
    results: Sequence[PolicyResult], instance_ids: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Rows of (label, one cell per policy); times in seconds."""
    summaries = [r.summary for r in results]
    rows = [
        ("throughput, tokens/s", [f"{s.throughput_tokens_per_s:.0f}" for s in summaries]),
        ("latency, mean, s", [_figure(s.latency_s.mean) for s in summaries]),
        ("latency, p99, s", [_figure(s.latency_s.p99) for s in summaries]),
        ("TTFT, mean, s", [_figure(s.ttft_s.mean) for s in summaries]),
        ("TTFT, p99, s", [_figure(s.ttft_s.p99) for s in summaries]),
        ("TPOT, mean, s", [_figure(s.tpot_s.mean, 4) for s in summaries]),
    ]
    for name in instance_ids:
        times = [f"{r.instance(name).completion_s:.1f}" for r in results]
        rows.append((f"{name} done after, s", times))
    rows.append(("difference, s", [f"{completion_gap_s(r, instance_ids):.1f}" for r in results]))
    for name in instance_ids:
        shares = [f"{_share(r, name):.0%}" for r in results]
        rows.append((f"requests to {name}", shares))
    if any(s.errors for s in summaries):
        rows.append(("requests failed", [f"{s.errors}" for s in summaries]))
    return rows


def completion_gap_s(result: PolicyResult, instance_ids: Sequence[str]) -> float:
    """Between the first and the last instance to finish, in seconds."""
    times = [result.instance(name).completion_s for name in instance_ids]
    return max(times) - min(times)


def conclusion(results: Sequence[PolicyResult], policy: str) -> str:
    """How ``policy`` compares with each of the others in this run, in plain words."""
    (mine,) = (r for r in results if r.policy == policy)
    said = [_against(mine.summary, r) for r in results if r.policy != policy]
    text = f"In this run {policy} {' and '.join(said)}; differences under {NOISE:.0%} are noise."
    if mine.summary.requests < _FEW_REQUESTS:
        text += f" {mine.summary.requests} requests are few: chance has a large part in this."
    failed = sum(r.summary.errors for r in results)
    if failed:
        text += f" {failed} requests failed, so this does not compare like with like."
    return text


def _against(mine: Summary, other: PolicyResult) -> str:
    theirs = other.summary
    if (
        math.isnan(mine.latency_s.mean + theirs.latency_s.mean)
        or not theirs.throughput_tokens_per_s
    ):
        return f"cannot be compared with {other.policy}, as one of them answered nothing"
    throughput = mine.throughput_tokens_per_s / theirs.throughput_tokens_per_s - 1
    latency = mine.latency_s.mean / theirs.latency_s.mean - 1
    better = throughput >= NOISE or latency <= -NOISE
    worse = throughput <= -NOISE or latency >= NOISE
    verdict = {
        (True, False): "beat",
        (False, True): "lost to",
        (False, False): "was level with",
        (True, True): "was better in one way and worse in another than",
    }[better, worse]
    return (
        f"{verdict} {other.policy} (throughput {_change(throughput)}, "
        f"mean latency {_change(latency)})"
    )


def _change(ratio: float) -> str:
    if abs(ratio) < NOISE:
        return f"level at {ratio:+.1%}"
    return f"{abs(ratio):.1%} {'higher' if ratio > 0 else 'lower'}"


def _share(result: PolicyResult, instance_id: str) -> float:
    answered = result.summary.requests - result.summary.errors
    return result.instance(instance_id).requests / answered if answered else 0.0


def _figure(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"
