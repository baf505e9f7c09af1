"""Small clusters and workloads for the simulator's tests."""

import numpy as np

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.workload import Workload
from tests.core.builders import FAST_CONSTANTS, SLOW_CONSTANTS

FAST = Profile("fast", "m", 1, FAST_CONSTANTS, 60_000, 32)
SLOW = Profile("slow", "m", 1, SLOW_CONSTANTS, 12_000, 16)


def instances(*profiles: Profile, profiled: bool = True) -> list[SimulatedInstance]:
    """Called i0, i1, …; the scheduler knows what they run if they are ``profiled``."""
    return [
        SimulatedInstance(InstanceId(f"i{i}"), p, p if profiled else None)
        for i, p in enumerate(profiles)
    ]


def poisson(
    rng: np.random.Generator, count: int, per_s: float, prompt: tuple[int, int], output: float
) -> Workload:
    """Prompts of any length in a range; exponential outputs of this mean."""
    return Workload(
        np.cumsum(rng.exponential(1 / per_s, count)),
        rng.integers(*prompt, count),
        np.maximum(1, rng.exponential(output, count)).astype(np.int64),
    )


def random_workload(count: int, per_s: float, seed: int = 0) -> Workload:
    """A chat's lengths: a few are long."""
    rng = np.random.default_rng(seed)
    return Workload(
        np.cumsum(rng.exponential(1 / per_s, count)),
        np.minimum(rng.lognormal(5.5, 1.0, count), 4000).astype(np.int64) + 1,
        np.minimum(rng.lognormal(4.5, 0.8, count), 1000).astype(np.int64) + 1,
    )


def make_scheduler(policy: str = "round-robin", seed: int = 0) -> Scheduler:
    return Scheduler(make_policy(policy), np.random.default_rng(seed))
