"""The cluster files that ship: each one loads, and simulates."""

from pathlib import Path

import pytest

from hetero_gateway.cluster_config import load_cluster
from hetero_gateway.sim.experiment import Experiment, mix_moments, run_once
from hetero_gateway.sim.result import Slo
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

FILES = sorted((Path(__file__).parents[1] / "configs/clusters").glob("*.yaml"))
LENGTHS = LogNormalLengths(LogNormal(200, 0.8, 2000), LogNormal(60, 0.5, 300))


def test_there_are_some():
    assert {"paper-a.yaml", "paper-b.yaml", "modern-mix.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_cluster_file_loads_and_serves(path):
    cluster = load_cluster(path)
    experiment = Experiment(cluster.instances, LENGTHS, 60, Slo(10, 1))
    result = run_once(experiment, "finish-time", 50.0, 0, mix_moments(LENGTHS))
    assert sum(i.requests for i in result.instances) == 60
    assert result.refused == result.lost == 0
