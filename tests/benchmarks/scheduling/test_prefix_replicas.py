"""Several gateways with prefix caches: who knows of the others' placements finds more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduling import prefix_replicas
from benchmarks.scheduling.prefix import at_load, load_instances, read_rows, workload_of
from benchmarks.scheduling.prefix_traces import main as make_trace


def test_what_is_shared_is_found_and_what_is_not_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_replicas, "can_compile", lambda: False)
    path = tmp_path / "trace.jsonl.gz"
    assert make_trace(["agents", "-o", str(path), "--requests", "150", "--seed", "1"]) == 0
    instances = load_instances("equal")
    rows = read_rows(path, 10**6, None)
    sessions = np.array([row.text.session for row in rows])
    workload = at_load(workload_of(rows), 6.0)
    cached = {
        way: prefix_replicas.run(way, instances, workload, sessions, 4, 0).cached_share
        for way in ("one", *prefix_replicas.WAYS)
    }
    assert cached["shared"] == pytest.approx(cached["one"], abs=0.02)
    assert cached["affinity"] == pytest.approx(cached["one"], abs=0.04)
    assert cached["shared"] > cached["own"] + 0.03
    assert cached["own"] > cached["blind"]
