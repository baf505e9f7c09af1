"""A soak, shortly and small; scripts/soak runs the whole one (docs/evidence/reliability.md)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.system
@pytest.mark.slow
def test_streams_and_idle_connections_leave_memory_and_descriptors_where_they_were() -> None:
    words = ("--seconds", "9", "--streams", "50", "--idle", "400", "--interval", "0.02", "--json")
    command = [sys.executable, "-m", "tests.chaos.soak", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert document["violations"] == []
    assert document["figures"]["streams_completed"] > 0
    # Both sides of each stream, and the idle ones.
    assert document["rows"][-1]["descriptors"] >= 2 * 50 + 400
