"""Over real HTTP, two emulated instances do what the simulator says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.slow
def test_the_same_requests_take_about_as_long_as_simulated(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    run = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "simulated_and_measured.py")),
            *("-c", str(cluster), "--policies", "round-robin,finish-time", "--loads", "inf"),
            *("--count", "40", "--time-scale", "2", "--attempts", "1", "--json"),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout, run.stderr
    (cell,) = json.loads(run.stdout)["loads"]
    assert list(cell["policies"]) == ["round-robin", "finish-time"]
    for row in cell["policies"].values():
        (measured,) = row["runs"]
        # That every token of the workload was counted, the script checks itself.
        assert measured["errors"] == 0
        # Above 1, because HTTP takes time, and far above on a machine with other work.
        assert 0.8 < row["ratio"]["latency_mean_s"] < 2.5
    # The faults were real: half of the requests were on an instance that was twice as slow.
    factors = cell["policies"]["finish-time"]["runs"][0]["speed_factors"]
    assert factors
    assert set(factors[0]) == {"at_s", "fast", "slow"}
