"""Over real HTTP, two emulated instances do what the simulator says of them.

The benchmark's own measurement, with tasks in place of processes, and in virtual time: its figures
are the same on every machine.
"""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator import simulated_and_measured as benchmark
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.files.cluster_config import load_cluster
from hetero_gateway.sim.experiment import Experiment
from hetero_gateway.sim.workload import LogNormalLengths
from tests.fakes.children import task_children
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time

pytestmark = pytest.mark.slow

CLUSTER = """\
instances:
  - {id: fast, profile: V100-32GB-NVLink2/Llama-3-8B/tp4}
  - {id: slow, profile: V100-32GB-NVLink2/Llama-3-8B/tp1}
faults:
  - {instance: slow, kind: slow, start_s: 0.5, factor: 2.0}
workload:
  prompt: {median: 100, sigma: 0.5, max: 400}
  output: {median: 100, sigma: 0.5, max: 200}
"""


async def measured(
    folder: Path,
    patch: pytest.MonkeyPatch,
    policies: tuple[str, ...],
    load_per_s: float,
    workers: int = 1,
    text: str = CLUSTER,
    **options: Any,
) -> dict[str, Any]:
    """What the benchmark's document has of each policy."""
    path = folder / "cluster.yaml"
    path.write_text(text)
    cluster = load_cluster(path)
    lengths = LogNormalLengths(cluster.workload.prompt.to_core(), cluster.workload.output.to_core())
    experiment = Experiment(
        cluster.instances, lengths, slo=Slo(2.0, 0.2), faults=cluster.faults, **options
    )
    args = argparse.Namespace(
        config=path, policies=policies, loads=(load_per_s,),
        seeds=1, time_scale=1.0, attempts=1, json=True,
    )  # fmt: skip
    async with task_children(workers) as children:
        patch.setattr(benchmark, "Children", children)
        (cell,) = (await benchmark.measure(args, cluster, experiment))["loads"]
    assert tuple(cell["policies"]) == policies
    return cell["policies"]


# All at once, two workers would bring the requests in another order than one.
@pytest.mark.parametrize(
    ("workers", "load_per_s"),
    [(1, math.inf), pytest.param(2, 20.0, marks=pytest.mark.system(virtual=True))],
)
async def test_the_same_requests_take_as_long_as_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, load_per_s: float
) -> None:
    policies = ("round-robin", "finish-time")
    rows = await measured(tmp_path, monkeypatch, policies, load_per_s, workers, count=40)
    for row in rows.values():
        (run,) = row["runs"]
        # That every token of the workload was counted, the script checks itself.
        assert run["errors"] == 0
        assert run["quiet"]
        # What HTTP adds takes no virtual time; the order of events is the simulator's.
        assert list(row["ratio"].values()) == pytest.approx([1.0] * 5, abs=0.005)
    # The faults were real: half of the requests were on an instance that was twice as slow.
    factors = rows["finish-time"]["runs"][0]["speed_factors"]
    assert factors
    assert set(factors[0]) == {"at_s", "fast", "slow"}


@pytest.mark.system(virtual=True)
async def test_two_classes_are_two_clients_whose_shares_are_the_simulators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"(profile: \S+)}", r"\1, max_num_seqs: 4}", CLUSTER)
    policies = ("finish-time", "finish-time+classes")
    rows = await measured(
        tmp_path, monkeypatch, policies, 20.0, text=text, count=60, batch_share=0.5
    )
    fifo, classes = rows.values()
    for row in (fifo, classes):
        assert row["runs"][0]["errors"] == 0
        assert list(row["ratio"].values()) == pytest.approx([1.0] * 5, abs=0.02)
    interactive = "interactive_latency_mean_s"
    assert classes["measured"][interactive] < 0.8 * fifo["measured"][interactive]
    assert classes["measured"]["batch_latency_mean_s"] > fifo["measured"]["batch_latency_mean_s"]
