"""The cluster files that ship: each one loads, and simulates."""

from pathlib import Path

import pytest

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.files.cluster_config import is_cluster, load_cluster
from hetero_gateway.files.plan_request import load_requests
from hetero_gateway.files.yaml_file import read_yaml
from hetero_gateway.sim.experiment import Experiment, mix_moments, run_once
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

EVERY = sorted((Path(__file__).parents[2] / "configs/clusters").glob("*.yaml"))
FILES = [path for path in EVERY if not path.name.startswith("plan-")]
PLANS = [path for path in EVERY if path.name.startswith("plan-")]
LENGTHS = LogNormalLengths(LogNormal(200, 0.8, 2000), LogNormal(60, 0.5, 300))


def test_there_are_some():
    assert {"paper-a.yaml", "paper-b.yaml", "modern-mix.yaml"} <= {path.name for path in FILES}
    assert {"plan-paper.yaml", "plan-mixed.yaml"} <= {path.name for path in PLANS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_cluster_file_loads_and_serves(path):
    assert is_cluster(read_yaml(path))
    cluster = load_cluster(path)
    assert len(cluster.instances) >= 2
    experiment = Experiment(cluster.instances, LENGTHS, 60, Slo(10, 1))
    result = run_once(experiment, "finish-time", 50.0, 0, mix_moments(LENGTHS))
    assert sum(i.requests for i in result.instances) == 60
    assert result.refused == result.lost == 0


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_a_plan_file_loads_and_every_machine_can_hold_the_model(path):
    question = load_requests(path)[0].question
    assert {m.accelerator for m in question.machines} == {a for a, _ in question.types}
