"""What arrives at a simulated cluster and when, and its faults.

    arrivals   Poisson, Gamma with a coefficient of variation, all at once, a trace's own times
    lengths    log-normal, or a trace's rows, sampled or in order
    faults     an instance is slower, or dead, for a time

Arrival times are drawn at a rate of 1 and then stretched, and lengths come from a separate
generator: so one seed means the same requests in the same pattern at every rate and under every
policy, and differences between policies are not differences between draws.

``hetero_gateway.files.trace`` reads a trace's file; here are arrays.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray, Integers
from hetero_gateway.sim.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one run, in the order of their arrival.

    Args:
        arrival_s: (N,), s, at least 0, never decreasing.
        prompt_tokens: (N,), at least 1.
        output_tokens: (N,), at least 1.
        prefixes: which of them begin alike; None: unknown.
        classes: of each, for a queue of classes; empty: all are of one.

    Raises:
        ValueError: shapes that differ, no request, or a value outside of these ranges.
    """

    arrival_s: FloatArray
    prompt_tokens: Integers
    output_tokens: Integers
    prefixes: Prefixes | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = self.arrival_s.shape
        if len(shape) != 1 or {self.prompt_tokens.shape, self.output_tokens.shape} != {shape}:
            raise ValueError("arrival_s, prompt_tokens and output_tokens must have one length")
        if not shape[0]:
            raise ValueError("a workload needs at least one request")
        if self.classes and len(self.classes) != shape[0]:
            raise ValueError("each request must have a class, or none")
        if not np.isfinite(self.arrival_s).all() or self.arrival_s[0] < 0:
            raise ValueError("arrival times must be finite and at least 0")
        if (np.diff(self.arrival_s) < 0).any():
            raise ValueError("arrival times must not decrease")
        if min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError("lengths must be at least 1 token")

    def __len__(self) -> int:
        return int(self.arrival_s.size)


class FaultKind(enum.Enum):
    SLOW = "slow"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one instance.

    Args:
        instance: its index.
        kind: SLOW multiplies its step times by ``factor``; DEAD loses its requests.
        start_s, end_s: its duration; ``end_s`` may be infinite.
        factor: of SLOW, above 0.

    Raises:
        ValueError: a time or factor outside of these ranges.
    """

    instance: int
    kind: FaultKind
    start_s: float
    end_s: float = math.inf
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:
            raise ValueError(f"start_s ({self.start_s}) must be at least 0 and before end_s")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"factor is {self.factor}: it must be above 0")


class FaultEvent(NamedTuple):
    """A fault begins or ends; ``holding``: factors of its kind that apply there from then on."""

    at_s: float
    fault: Fault
    begins: bool
    holding: tuple[float, ...]


def fault_events(faults: Sequence[Fault]) -> list[FaultEvent]:
    """In the order of time; at one time, in that of the faults."""
    edges = [(fault.start_s, i, True) for i, fault in enumerate(faults)]
    edges += [(f.end_s, i, False) for i, f in enumerate(faults) if math.isfinite(f.end_s)]
    holding: dict[tuple[int, FaultKind], list[float]] = {}
    events = []
    for at_s, i, begins in sorted(edges):
        fault = faults[i]
        factors = holding.setdefault((fault.instance, fault.kind), [])
        if begins:
            factors.append(fault.factor)
        else:
            factors.remove(fault.factor)
        events.append(FaultEvent(at_s, fault, begins, tuple(factors)))
    return events


# Lengths


class Lengths(Protocol):
    """A source of lengths."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Prompt and output tokens of ``count`` requests, each (count,) and at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A length in tokens: ``sigma`` is of its natural logarithm; cut to 1 .. ``maximum``."""

    median: float
    sigma: float
    maximum: int

    def draw(self, count: int, rng: np.random.Generator) -> Integers:
        values = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(values), 1, self.maximum).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Independent log-normal prompt and output lengths."""

    prompt: LogNormal
    output: LogNormal

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        return self.prompt.draw(count, rng), self.output.draw(count, rng)


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """A trace's rows, prompt and output kept together.

    Args:
        prompt_tokens, output_tokens: (rows,), at least one row.
        in_order: take the rows in order, again from the first after the last, instead of
            sampling them with replacement.
    """

    prompt_tokens: Integers
    output_tokens: Integers
    in_order: bool = False

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        rows = self.prompt_tokens.size
        chosen = np.arange(count) % rows if self.in_order else rng.integers(rows, size=count)
        return self.prompt_tokens[chosen], self.output_tokens[chosen]


@dataclass(frozen=True, slots=True)
class EvenLengths:
    """Rows of a pool, drawn so evenly that a few have its means: one of each slice of its lengths.

    Args:
        prompt_tokens, output_tokens: (rows,), at least one row.
    """

    prompt_tokens: Integers
    output_tokens: Integers

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        rows = even_rows(self.prompt_tokens, self.output_tokens, count, rng)
        rng.shuffle(rows)
        return self.prompt_tokens[rows], self.output_tokens[rows]


def even_rows(
    prompt_tokens: Integers, output_tokens: Integers, count: int, rng: np.random.Generator
) -> Integers:
    """Indices of ``count`` rows: one of each slice of them sorted by length, short ones first."""
    order = np.lexsort((output_tokens, prompt_tokens + output_tokens))
    slices = (np.arange(count) + rng.random(count)) * order.size / count
    return order[slices.astype(np.int64)]


# Gaps vary by less than this: like a clock. Its Gamma distribution's shape, 1/cv², would overflow.
_CLOCK_CV = 1e-6

# Arrivals. Each is (count,) in seconds, and begins at 0.


def gamma_arrivals(
    count: int, rate_per_s: float, cv: float, rng: np.random.Generator
) -> FloatArray:
    """Gaps from a Gamma distribution of mean 1/rate and this coefficient of variation.

    ``cv`` 1 is a Poisson process, above 1 comes in bursts, 0 is like a clock. Both parameters
    are finite, the rate above 0, ``cv`` at least 0.
    """
    if cv > _CLOCK_CV:
        shape = 1 / cv**2
        gaps = rng.gamma(shape, 1 / shape, count)
    else:
        gaps = np.ones(count)
    times: FloatArray = np.cumsum(gaps) - gaps[0]
    return times / rate_per_s


def mean_rate_per_s(arrival_s: FloatArray) -> float:
    """Requests per second of given times; infinite when they are all the same."""
    span_s = float(arrival_s[-1] - arrival_s[0])
    return (arrival_s.size - 1) / span_s if span_s > 0 else math.inf


def at_rate(arrival_s: FloatArray, rate_per_s: float) -> FloatArray:
    """Given times from 0, stretched to a mean rate; an infinite rate makes them all 0."""
    own_rate_per_s = mean_rate_per_s(arrival_s)
    if math.isinf(rate_per_s) or math.isinf(own_rate_per_s):
        return np.zeros(arrival_s.size)
    times: FloatArray = (arrival_s - arrival_s[0]) * (own_rate_per_s / rate_per_s)
    return times
