"""What every policy shares: its Protocol, the arrays it sees, and how ties are broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray, workload, workloads
from hetero_gateway.core.instances.progress import Estimates, Outlook
from hetero_gateway.core.types import InstanceId, Request

Objective = Literal["latency", "makespan"]
# Compiles a function, as numba.njit does.
Jit = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What a configuration may set.

    Args:
        randomised: round-robin policies draw an instance instead of taking turns.
        single_instance: where ``single-instance`` sends everything; None: the first candidate.
        objective: what ``finish-time`` is to keep low; see there.
        prefill_depth: most requests without a first token that ``finish-time`` leaves on one
            instance.
    """

    randomised: bool = False
    single_instance: InstanceId | None = None
    objective: Objective = "latency"
    prefill_depth: int = 8


class Candidates:
    """The eligible instances of one request, one array entry each.

    ``slots``: the instance's place in the ledger. ``request_time_s``: T_r^s. ``load``: outstanding
    charges. ``kv_usage``: Eq. (8). ``in_flight``: outstanding requests. ``capacity``: fitted
    requests/s. ``weight``: as configured. ``ids``: instance ids. Policies must not write to them.

    ``outlook`` is there for policies that say they use it; such a policy leaves its ``estimates``.
    """

    __slots__ = (
        "_workload",
        "capacity",
        "estimates",
        "ids",
        "in_flight",
        "kv_usage",
        "load",
        "outlook",
        "request_time_s",
        "slots",
        "theta",
        "weight",
    )

    def __init__(
        self,
        ids: tuple[InstanceId, ...],
        slots: NDArray[np.intp],
        request_time_s: FloatArray,
        load: FloatArray,
        kv_usage: FloatArray,
        in_flight: FloatArray,
        capacity: FloatArray,
        weight: FloatArray,
        theta: float,
        outlook: Outlook | None = None,
    ) -> None:
        self.ids = ids
        self.slots = slots
        self.request_time_s = request_time_s
        self.load = load
        self.kv_usage = kv_usage
        self.in_flight = in_flight
        self.capacity = capacity
        self.weight = weight
        self.theta = theta
        self.outlook = outlook
        self.estimates: Estimates | None = None
        self._workload: FloatArray | None = None

    def workload(self) -> FloatArray:
        """w_r^s of Eq. (7), computed on first use."""
        if self._workload is None:
            self._workload = workloads(self.request_time_s, self.kv_usage, self.theta)
        return self._workload

    def workload_at(self, position: int) -> float:
        """w_r^s of one candidate; most policies need no other."""
        if self._workload is not None:
            return float(self._workload[position])
        return workload(
            float(self.request_time_s[position]), float(self.kv_usage[position]), self.theta
        )


class Policy(Protocol):
    """What chooses."""

    @property
    def queues(self) -> bool:
        """Whether requests wait in the gateway for it, and it wants ``Candidates.outlook``."""
        ...

    def choose(
        self, request: Request, candidates: Candidates, rng: np.random.Generator
    ) -> int | None:
        """The position of the chosen instance; there is at least one candidate.

        None: none of them now (only where ``queues``).
        """
        ...

    def charges(self, candidates: Candidates) -> FloatArray:
        """What each candidate's load would grow by if it were chosen."""
        ...

    def charge(self, candidates: Candidates, position: int) -> float:
        """The same for one candidate alone."""
        ...

    def compile(self, jit: Jit) -> None:
        """Have ``jit`` compile what it computes with, if that pays; the results are the same."""
        ...


class PlacesAtOnce:
    """A policy that sends every request on as it comes."""

    queues = False

    def compile(self, jit: Jit) -> None:
        pass


class WorkloadCharge(PlacesAtOnce):
    """The common charge: w_r^s, so that ``instance_workload`` means the same under each policy."""

    def charges(self, candidates: Candidates) -> FloatArray:
        return candidates.workload()

    def charge(self, candidates: Candidates, position: int) -> float:
        return candidates.workload_at(position)


def argmin_with_random_ties(scores: FloatArray, rng: np.random.Generator) -> int:
    """The position of the lowest score; among equals a seeded draw (erratum 2).

    Never the list's order: with equal instances the lowest index would get every request of an
    idle moment, and reversing the configuration would change the throughput.
    """
    position = int(scores.argmin())
    ties = (scores == scores[position]).nonzero()[0]
    if ties.size > 1:
        position = int(ties[int(rng.random() * ties.size)])
    return position
