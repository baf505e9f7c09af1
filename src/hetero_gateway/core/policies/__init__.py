"""The policies, by their names in a configuration, behind one signature.

A policy sees what is known of each eligible instance and returns its choice with the figures behind
it. It does no I/O, reads no clock, and draws only from the generator that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hetero_gateway.core.policies.affinity import PrefixAffinity, Session
from hetero_gateway.core.policies.at_once import Candidates, LowestScore
from hetero_gateway.core.policies.base import Policy, PolicyOptions, View
from hetero_gateway.core.policies.counting import CapacityWeighted, LeastRequests, PowerOfTwo
from hetero_gateway.core.policies.finish_time import FinishTime
from hetero_gateway.core.policies.rotation import RoundRobin, SingleInstance, WeightedRoundRobin
from hetero_gateway.core.policies.workload import LeastWork, MemoryBased, MinMax, Paper

_POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "finish-time": FinishTime,
    "min-max": lambda _: MinMax(),
    "paper": lambda _: Paper(),
    "memory-based": lambda _: MemoryBased(),
    "least-work": lambda _: LeastWork(),
    "least-requests": lambda _: LeastRequests(),
    "capacity-weighted": lambda _: CapacityWeighted(),
    "power-of-two": lambda _: PowerOfTwo(),
    "prefix-affinity": lambda _: PrefixAffinity(),
    "session": lambda _: Session(),
    "round-robin": RoundRobin,
    "weighted-round-robin": WeightedRoundRobin,
    "single-instance": SingleInstance,
}

POLICY_NAMES = tuple(_POLICIES)


PolicyMaker = Callable[[], Policy]


def make_policy(
    name: str,
    options: PolicyOptions | None = None,
    installed: Mapping[str, PolicyMaker] = MappingProxyType({}),
) -> Policy:
    """Make a policy by its name, built-in or installed. KeyError: no such policy."""
    if name in installed:
        return installed[name]()
    return _POLICIES[name](options or PolicyOptions())


__all__ = [
    "POLICY_NAMES",
    "Candidates",
    "LowestScore",
    "Policy",
    "PolicyMaker",
    "PolicyOptions",
    "View",
    "make_policy",
]
