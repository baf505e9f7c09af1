"""Times of requests and their summaries, for simulated and measured ones alike. Pure.

TTFT     s        first output token, from the arrival (measured: from the sending)
TPOT     s/token  (last − first) / (output tokens − 1), of outputs of 2 or more
latency  s        last output token, from the arrival
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # measuring runs needs no simulator
    from hetero_gateway.core.costs.arrays import Flags, FloatArray
    from hetero_gateway.core.policies.slo import Slo
    from hetero_gateway.sim.cluster import Records
    from hetero_gateway.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles, in the unit of the values; nan if there were none."""

    mean: float = math.nan
    p50: float = math.nan
    p90: float = math.nan
    p99: float = math.nan
    max: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float] | FloatArray) -> Distribution:
        array = np.asarray(values, dtype=float)
        if not array.size:
            return cls()
        p50, p90, p99 = (float(v) for v in np.percentile(array, (50, 90, 99)))
        return cls(float(array.mean()), p50, p90, p99, float(array.max()))

    def scaled(self, factor: float) -> Distribution:
        """Every figure times ``factor``."""
        return Distribution(*(value * factor for value in dataclasses.astuple(self)))

    def to_dict(self) -> dict[str, float | None]:
        """As JSON, which has no nan: None."""
        return {name: finite(value) for name, value in dataclasses.asdict(self).items()}


def finite(value: float) -> float | None:
    """A figure for JSON."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Of finished requests, in order: latency and TTFT of all, TPOT where ``has_tpot``."""

    latency_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    has_tpot: Flags


def request_times(workload: Workload, records: Records, chosen: Flags) -> RequestTimes:
    """Of the ``chosen`` requests, all of which finished."""
    arrival_s, finish_s = workload.arrival_s[chosen], records.finish_s[chosen]
    first_s, output = records.first_token_s[chosen], workload.output_tokens[chosen]
    has_tpot = output >= 2
    tpot_s = (finish_s - first_s)[has_tpot] / (output[has_tpot] - 1)
    return RequestTimes(finish_s - arrival_s, first_s - arrival_s, tpot_s, has_tpot)


def within_slo(workload: Workload, records: Records, slo: Slo) -> Flags:
    """(N,): which requests finished within both limits; refused or lost ones did not."""
    done = np.isfinite(records.finish_s)
    times = request_times(workload, records, done)
    kept = times.ttft_s <= slo.ttft_s
    kept[times.has_tpot] &= times.tpot_s <= slo.tpot_s
    result = np.zeros(done.size, dtype=np.bool_)
    result[done] = kept
    return result
