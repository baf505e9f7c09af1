"""From the records of simulated requests to figures; docs/guide/simulate.md has them. Pure.

Times (``figures``) count from a request's arrival: waiting in the gateway's queue is part of them.
By arrivals, an overloaded cluster would be seen while it fills up, so ``steady`` goes by finished
requests. With everything at once it counts from the start: leaving out the start, which only
prefills, would flatter it.

Requests that were refused, or lost with a dead instance, count in ``refused``, ``lost`` and the
share within the SLO, and nowhere else. nan (no request finished) becomes None in JSON.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Self

import numpy as np

from hetero_gateway.core.costs.arrays import Flags, FloatArray
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.sim.cluster import Records
from hetero_gateway.sim.figures import Distribution, RequestTimes, finite, request_times, within_slo
from hetero_gateway.sim.workload import Workload

# Shares of finished requests between which the cluster is assumed to be in steady state.
_FROM, _TO = 0.2, 0.8
# The stored quantiles of a latency distribution.
QUANTILES = np.linspace(0, 1, 201)


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """One instance's finished requests, and when the last one ended."""

    requests: int
    completion_s: float


@dataclass(frozen=True, slots=True)
class ClassResult:
    """Of the finished requests of one class."""

    latency_s: Distribution
    ttft_s: Distribution


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run: one policy, one rate, one seed. See the module's text for the figures."""

    requests: int
    throughput_tokens_per_s: float
    total_tokens_per_s: float
    steady_tokens_per_s: float
    latency_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    slo_share: float
    instances: tuple[InstanceResult, ...]
    preemptions: int
    refused: int
    lost: int
    latencies_s: FloatArray  # of the finished requests, sorted
    cached_share: float = 0.0
    split_share: float = 0.0
    classes: Mapping[str, ClassResult] = field(default_factory=dict)

    @property
    def completion_spread(self) -> float:
        times_s = [i.completion_s for i in self.instances]
        latest_s = max(times_s)
        return (latest_s - min(times_s)) / latest_s if latest_s > 0 else 0.0


def summarise(workload: Workload, records: Records, instances: int, slo: Slo) -> RunResult:
    """Sum up one run on a cluster of ``instances`` instances."""
    start_s = float(workload.arrival_s[0])
    done = np.isfinite(records.finish_s)
    finish_s, output = records.finish_s[done], workload.output_tokens[done]
    times = request_times(workload, records, done)
    duration_s = float(finish_s.max(initial=start_s)) - start_s
    shares = []
    for i in range(instances):
        its_own_s = finish_s[records.instance[done] == i]
        completion_s = float(its_own_s.max(initial=start_s)) - start_s
        shares.append(InstanceResult(int(its_own_s.size), completion_s))
    from_s, to_s = _steady(workload, finish_s, shares)
    return RunResult(
        requests=len(workload),
        throughput_tokens_per_s=_per_second(float(output.sum()), duration_s),
        total_tokens_per_s=_per_second(
            float(output.sum() + workload.prompt_tokens[done].sum()), duration_s
        ),
        steady_tokens_per_s=_per_second(
            tokens_between(workload, records, from_s, to_s), to_s - from_s
        ),
        latency_s=Distribution.of(times.latency_s),
        ttft_s=Distribution.of(times.ttft_s),
        tpot_s=Distribution.of(times.tpot_s),
        slo_share=float(within_slo(workload, records, slo).mean()),
        instances=tuple(shares),
        preemptions=int(records.preemptions.sum()),
        refused=int((~done & np.isnan(records.first_token_s)).sum()),
        lost=int((~done & np.isfinite(records.first_token_s)).sum()),
        latencies_s=np.sort(times.latency_s),
        cached_share=float(records.cached_tokens[done].sum())
        / max(1.0, float(workload.prompt_tokens[done].sum())),
        split_share=float(records.split.mean()),
        classes=_classes(workload, done, times),
    )


def _classes(workload: Workload, done: Flags, times: RequestTimes) -> dict[str, ClassResult]:
    of = np.array(workload.classes)[done] if workload.classes else np.empty(0, dtype=str)
    return {
        str(name): ClassResult(
            Distribution.of(times.latency_s[of == name]), Distribution.of(times.ttft_s[of == name])
        )
        for name in np.unique(of)
    }


def tokens_between(workload: Workload, records: Records, from_s: float, to_s: float) -> float:
    """Output tokens of the finished requests that were generated in a window.

    A request's first token is at ``first_token_s``, its others are spread evenly up to its end.
    Counting whole requests at their end instead would shift tokens by a request's whole length.
    """
    done = np.isfinite(records.finish_s)
    first_s, finish_s = records.first_token_s[done], records.finish_s[done]
    others = workload.output_tokens[done] - 1
    overlap_s = np.minimum(finish_s, to_s) - np.maximum(first_s, from_s)
    length_s = np.maximum(finish_s - first_s, 1e-12)
    share = np.clip(overlap_s / length_s, 0, 1)
    return float(((first_s >= from_s) & (first_s <= to_s)).sum() + (others * share).sum())


def _steady(
    workload: Workload, finish_s: FloatArray, shares: Sequence[InstanceResult]
) -> tuple[float, float]:
    """When the cluster was in steady state; see the module's text. Empty: (0, 0)."""
    if not finish_s.size:
        return 0.0, 0.0
    ends_s = np.sort(finish_s)
    start_s, last_arrival_s = float(workload.arrival_s[0]), float(workload.arrival_s[-1])
    dry_s = start_s + min(i.completion_s for i in shares if i.requests)
    if last_arrival_s == start_s:
        return start_s, dry_s
    from_s, to_s = (float(ends_s[round(q * (ends_s.size - 1))]) for q in (_FROM, _TO))
    to_s = min(to_s, max(last_arrival_s, dry_s))
    return (from_s if from_s < to_s else start_s), to_s


def _per_second(tokens: float, duration_s: float) -> float:
    return tokens / duration_s if duration_s > 0 else 0.0


# Over seeds


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation (0 of one value) over seeds; nan if there is none."""

    mean: float
    sd: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        numbers = np.array([v for v in values if math.isfinite(v)])
        if not numbers.size:
            return cls(math.nan, math.nan)
        return cls(float(numbers.mean()), float(numbers.std(ddof=1)) if numbers.size > 1 else 0.0)

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": finite(self.mean), "sd": finite(self.sd)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one rate, over all seeds.

    Args:
        rate_per_s: of the arrivals; infinite: everything at once.
        load: the rate's work as a share of the bound, if it was requested like that.
        bound_tokens_per_s: the output of the instances, each alone and saturated.
        runs: one per seed, at least one.
    """

    policy: str
    rate_per_s: float
    load: float | None
    bound_tokens_per_s: float
    instance_ids: tuple[str, ...]
    runs: tuple[RunResult, ...]

    def spread(self, figure: Callable[[RunResult], float]) -> Spread:
        return Spread.of([figure(run) for run in self.runs])

    @property
    def throughput_tokens_per_s(self) -> Spread:
        return self.spread(lambda run: run.throughput_tokens_per_s)

    @property
    def share_of_bound(self) -> Spread:
        """Throughput over the bound; nan if the bound is 0 (nothing fits anywhere)."""
        bound = self.bound_tokens_per_s or math.nan
        return self.spread(lambda run: run.throughput_tokens_per_s / bound)

    def finished_on(self, instance: int) -> Spread:
        return self.spread(lambda run: run.instances[instance].requests)

    def completion_s(self, instance: int) -> Spread:
        return self.spread(lambda run: run.instances[instance].completion_s)

    def total(self, count: Callable[[RunResult], int]) -> int:
        """The sum of a count over the seeds."""
        return sum(count(run) for run in self.runs)

    def latency_quantiles_s(self) -> FloatArray:
        """Latencies of all seeds together, at ``QUANTILES``; empty if nothing finished."""
        pooled = np.concatenate([run.latencies_s for run in self.runs])
        return np.quantile(pooled, QUANTILES) if pooled.size else pooled

    def to_dict(self) -> dict[str, Any]:
        """One entry of ``results`` of ``simulate --json``."""
        n = len(self.runs)
        return {
            "policy": self.policy,
            "rate": "inf" if math.isinf(self.rate_per_s) else self.rate_per_s,
            "load": self.load,
            "seeds": n,
            "requests": self.runs[0].requests,
            **{
                f"{name}_tokens_per_s": self.spread(attrgetter(f"{name}_tokens_per_s")).to_dict()
                for name in ("throughput", "total", "steady")
            },
            **{n: self._statistics(attrgetter(n)) for n in ("latency_s", "ttft_s", "tpot_s")},
            "slo_share": self.spread(lambda run: run.slo_share).to_dict(),
            "share_of_bound": finite(self.share_of_bound.mean),
            "cached_share": finite(self.spread(lambda run: run.cached_share).mean),
            "split_share": finite(self.spread(lambda run: run.split_share).mean),
            "completion_spread": self.spread(lambda run: run.completion_spread).to_dict(),
            **{
                name: self.total(attrgetter(name)) / n
                for name in ("preemptions", "refused", "lost")
            },
            "classes": {
                name: {
                    figure: self._statistics(lambda run: getattr(run.classes[name], figure))  # noqa: B023
                    for figure in ("latency_s", "ttft_s")
                }
                for name in self.runs[0].classes
            },
            "instances": [
                {
                    "id": instance_id,
                    "requests": self.finished_on(i).mean,
                    "completion_s": self.completion_s(i).mean,
                    "completion_sd_s": self.completion_s(i).sd,
                }
                for i, instance_id in enumerate(self.instance_ids)
            ],
        }

    def _statistics(self, of: Callable[[RunResult], Distribution]) -> dict[str, float | None]:
        result: dict[str, float | None] = {}
        for name in ("mean", "p50", "p99"):
            spread = Spread.of([getattr(of(run), name) for run in self.runs])
            result[name] = finite(spread.mean)
            result[f"{name}_sd"] = finite(spread.sd)
        return result
