"""Where a request goes, with what it was decided from."""

from __future__ import annotations

from typing import NamedTuple

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.policies import Candidates, Policy
from hetero_gateway.core.types import Candidate, InstanceId, InstanceSpec, Request


class Decision(NamedTuple):
    """Where a request goes. The reason is kept as the arrays it was made from; see ``explain``."""

    instance_id: InstanceId
    request: Request
    position: int
    charge: float
    candidates: Candidates
    policy: Policy
    excluded: tuple[tuple[InstanceSpec, str], ...]
    waits: bool = False  # it would get the request, but not now

    @property
    def charges(self) -> FloatArray:
        """What each candidate's load would have grown by."""
        return self.policy.charges(self.candidates)

    def explain(self) -> list[Candidate]:
        """Every candidate's T, KV usage, w and resulting load, and why the others were excluded."""
        c, charges, w = self.candidates, self.charges, self.candidates.workload()
        rows = [
            Candidate(
                instance_id=instance_id,
                request_time_s=float(c.request_time_s[i]),
                kv_usage=float(c.kv_usage[i]),
                workload=float(w[i]),
                load_s=float(c.load[i]),
                load_after_s=float(c.load[i] + charges[i]),
                in_flight=int(c.in_flight[i]),
                excluded=None,
            )
            for i, instance_id in enumerate(c.ids)
        ]
        return rows + [
            Candidate(spec.instance_id, None, None, None, None, None, None, why)
            for spec, why in self.excluded
        ]
