"""/metrics on the wire: compressed for those who take it, and less of each instance if wanted."""

import gzip
from itertools import pairwise

import httpx
import pytest

from hetero_gateway.core.histogram import Histogram
from hetero_gateway.gateway.records.exposition import Family
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.records.series import SHOWN_BOUNDS, Series
from hetero_gateway.http.headers import takes_gzip
from tests.fakes.reloads import from_file
from tests.fakes.running import CHAT, chat, eventually, rig
from tests.gateway.records.test_metrics import key, samples


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("", False),
        ("identity", False),
        ("gzip; q=0, identity", False),
        ("gzip;q=0.000", False),
        ("br", False),
    ],
)
def test_an_answer_is_compressed_for_those_who_take_it(header: str, takes: bool) -> None:
    assert takes_gzip(header) is takes


@pytest.mark.parametrize("workers", [1, 2])
async def test_prometheus_gets_gzip_and_others_text(workers: int) -> None:
    async with rig(2, workers=workers) as (running, client, _):
        await client.post(CHAT, json=chat())
        await eventually(running.settled)
        url = f"{running.url}/metrics"
        plain = await client.get("/metrics", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        async with client.stream("GET", "/metrics", headers={"accept-encoding": "gzip"}) as packed:
            body = b"".join([part async for part in packed.aiter_raw()])
        assert packed.headers["content-encoding"] == "gzip", url
        assert packed.headers["vary"] == "accept-encoding"
        assert packed.headers["content-type"] == plain.headers["content-type"]
        found = samples(gzip.decompress(body).decode())
        # The process's own series, and gauges, have moved on meanwhile.
        names = {name for name, _ in samples(plain.text)}
        assert {name for name, _ in found} == names
        assert len(body) < len(plain.content) / 5


async def test_basic_shows_sums_and_how_each_instance_is_and_changes_while_serving(
    tmp_path,
) -> None:
    async with from_file(tmp_path, instances=3) as file:
        running, client = file.running, file.client
        for _ in range(9):
            assert (await client.post(CHAT, json=chat())).status_code == 200
        await client.post(CHAT, json=chat(model="nobody-has-it"))
        await eventually(running.settled)
        full = samples((await client.get("/metrics")).text)
        change = await file.reload(metrics={"per_backend": "basic"})
        assert change["settings"] == ["metrics.per_backend"]
        answer: httpx.Response = await client.get("/metrics")
    basic = samples(answer.text)
    for name in ("request_duration_seconds_count", "input_tokens_total", "output_tokens_total"):
        of_each = [v for (n, _), v in full.items() if n == name]
        assert len(of_each) == 3
        assert basic[key(name, model="m", backend="")] == sum(of_each)
    done = key("requests_total", model="m", backend="", outcome="completed")
    assert basic[done] == 9
    rejected = key("requests_total", model="unknown", backend="", outcome="rejected")
    assert basic[rejected] == full[rejected] == 1
    assert basic[key("routing_decisions_total", policy="finish-time", backend="")] == 9
    assert basic[key("upstream_errors_total", backend="", reason="connect")] == 0
    each = {n for n, labels in basic if dict(labels).get("backend")}
    assert each == {
        "instance_up", "instance_ejected", "in_flight_requests", "instance_kv_usage_ratio",
        "instance_speed_factor", "instance_problem",
    }  # fmt: skip


def test_fewer_buckets_are_shown_and_they_count_the_same() -> None:
    series, metrics = Series(), Metrics("min-max", list)
    metrics.every_series["m", "i"] = series
    for bounds, shown in SHOWN_BOUNDS.items():
        assert set(shown) < set(bounds)
        histogram = Histogram(bounds)
        for value in (*bounds, bounds[-1] + 1):
            histogram.observe(value)
        family = Family("x", "histogram", "", ("a",))
        family.add(("b",), histogram)
        found = samples(family.head() + family.lines())
        buckets = [(float(dict(k)["le"]), v) for (n, k), v in found.items() if n == "x_bucket"]
        assert [le for le, _ in buckets] == [*shown, float("inf")]
        assert all(v == sum(b <= le for b in (*bounds, bounds[-1] + 1)) for le, v in buckets)
        assert all(a[1] < b[1] for a, b in pairwise(buckets))
        assert found[key("x_count", a="b")] == len(bounds) + 1
