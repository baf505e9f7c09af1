"""Four gateways over a real redis-server know together what one would; the benchmark's own
measurement, in virtual time.
"""

from pathlib import Path

import pytest

from benchmarks.scheduling import prefix
from benchmarks.scheduling import prefix_replicas_over_http as benchmark
from benchmarks.scheduling.prefix import load_instances
from benchmarks.scheduling.prefix_over_http import make_load
from benchmarks.scheduling.prefix_traces import main as make_trace
from tests.fakes.children import task_children
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.redis import redis_at_once

pytestmark = [pytest.mark.system(virtual=True), pytest.mark.slow]


async def test_four_gateways_find_as_much_cached_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "can_compile", lambda: False)
    trace = tmp_path / "chat.jsonl.gz"
    assert make_trace(["chat", "-o", str(trace), "--requests", "120", "--sessions-per-s", "1"]) == 0
    instances = load_instances("equal")
    load = make_load(trace, instances, 0.9, None)
    async with task_children(1) as children:
        monkeypatch.setattr(benchmark, "Children", children)
        monkeypatch.setattr(benchmark, "redis_server", redis_at_once)
        results = await benchmark.measure(instances, load, ("one", "shared"), 4)
    one, shared = results["one"], results["shared"]
    assert one["errors"] == shared["errors"] == {}
    assert shared["cached_share"] >= 0.97 * one["cached_share"]
    # Of so few requests, some that are placed elsewhere move a mean by some per cent.
    assert shared["ttft_mean_s"] <= 1.09 * one["ttft_mean_s"]
    assert shared["as_warm_after_s"] < 5
