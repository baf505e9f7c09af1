"""The gain of splitting requests on a simulated cluster, with a gateway's roles. Pure.

Roles are found at each rate from other requests of the same mix, as many as a gateway uses.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_gateway.core.instances.pairs import KV_BYTES_PER_TOKEN, Link, Pairs
from hetero_gateway.core.policies.legs import RolePrice
from hetero_gateway.core.types import InstanceId, roles_pair
from hetero_gateway.planner.roles import Roles, find_roles
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.experiment import Experiment, make_workload

# The policy that can split requests.
SPLITTING_POLICY = "finish-time"
# Requests that roles are found from, and their seed: one that no run has.
_MOST, _OTHER_SEED = 1000, 1_000_003


@dataclass(frozen=True, slots=True)
class Transfers:
    """How fast any two instances of a cluster hand prompts over.

    Args:
        link: between each two of them.
        kv_bytes_per_token: of handed-over prompts.
    """

    link: Link
    kv_bytes_per_token: float = KV_BYTES_PER_TOKEN

    @property
    def gbit_per_s(self) -> float:
        return self.link.bytes_per_s * 8 / 1e9

    def pairs(self, instances: Sequence[SimulatedInstance]) -> Pairs:
        """New ones, as far as the instances' roles allow."""
        return Pairs(
            self.kv_bytes_per_token,
            {
                (one.instance_id, other.instance_id): self.link
                for one in instances
                for other in instances
                if one is not other and roles_pair(one.kv_role, other.kv_role)
            },
        )


class Splitting:
    """One experiment's ``splits``.

    Args:
        experiment: without ``splits``.
    """

    def __init__(self, experiment: Experiment, transfers: Transfers) -> None:
        few = min(experiment.count, _MOST)
        times_s = experiment.trace_arrival_s
        self._experiment = dataclasses.replace(
            experiment,
            count=few,
            trace_arrival_s=None if times_s is None else times_s[:few],
            prefixes=None,
        )
        self.transfers = transfers
        self.found: dict[float, Roles] = {}

    def __call__(
        self, policy: str, rate_per_s: float
    ) -> tuple[Pairs, Mapping[InstanceId, RolePrice]] | None:
        roles = self.roles_at(rate_per_s) if policy == SPLITTING_POLICY else None
        return None if roles is None else (self._pairs(), roles)

    def roles_at(self, rate_per_s: float) -> Roles:
        """As a gateway would find them; None: it splits nothing."""
        if rate_per_s not in self.found:
            asked = self._experiment
            self.found[rate_per_s] = find_roles(
                asked.instances,
                make_workload(asked, rate_per_s, _OTHER_SEED),
                self._pairs,
                asked.slo,
                heeds_slo=asked.heeds_slo,
                max_batched_tokens=asked.max_batched_tokens,
            )
        return self.found[rate_per_s]

    def _pairs(self) -> Pairs:
        return self.transfers.pairs(self._experiment.instances)
