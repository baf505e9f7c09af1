"""A cluster so simple that every figure can be computed by hand: no batching, turns in order."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.predictors import OutputLengthPredictor
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim.cluster import Records, SimulatedInstance
from hetero_gateway.sim.engine import Scheduling
from hetero_gateway.sim.workload import Fault, Workload


def profile(step_s: float = 0.01, **changes: Any) -> Profile:
    """An instance that makes a token every ``step_s`` seconds."""
    values: dict[str, Any] = {
        "gpu": "X",
        "model": "m",
        "tensor_parallel": 1,
        "constants": Constants(0, 0, 0, 0, 0, 0, 0, step_s),
        "kv_capacity_tokens": 100_000,
    }
    return Profile(**values | changes)


def simulated(name: str, step_s: float = 0.01, **changes: Any) -> SimulatedInstance:
    its_profile = profile(step_s, **changes)
    return SimulatedInstance(InstanceId(name), its_profile, its_profile)


class FakeSimulate:
    """Requests take turns over the instances, each of which serves one at a time.

    Remembers what it was called with. ``refuse`` and ``lose`` are the positions of requests.
    """

    def __init__(self, refuse: Sequence[int] = (), lose: Sequence[int] = ()) -> None:
        self.calls: list[dict[str, Any]] = []
        self._refuse = list(refuse)
        self._lose = list(lose)

    def __call__(
        self,
        instances: Sequence[SimulatedInstance],
        workload: Workload,
        scheduler: Scheduler,
        predictor: OutputLengthPredictor,
        *,
        faults: Sequence[Fault] = (),
        scheduling: Scheduling = "chunked",
        max_batched_tokens: int = 2048,
        predictions: NDArray[np.float64] | None = None,
    ) -> Records:
        self.calls.append(
            {
                "instances": instances,
                "workload": workload,
                "scheduler": scheduler,
                "predictor": predictor,
                "faults": faults,
                "scheduling": scheduling,
                "predictions": predictions,
            }
        )
        n = len(workload)
        free_s = [0.0] * len(instances)
        position = np.arange(n) % len(instances)
        first_s, finish_s = np.empty(n), np.empty(n)
        for i in range(n):
            step_s = instances[position[i]].profile.constants.p8
            start_s = max(float(workload.arrival_s[i]), free_s[position[i]])
            first_s[i] = start_s + step_s
            finish_s[i] = free_s[position[i]] = start_s + step_s * int(workload.output_tokens[i])
        finish_s[self._refuse + self._lose] = np.nan
        first_s[self._refuse] = np.nan
        none = np.zeros(n, np.int64)
        return Records(position, first_s.copy(), first_s, finish_s, none, none, none)
