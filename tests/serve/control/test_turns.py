"""Control paths over many clients, models and instances let the event loop turn meanwhile.

How long a step takes is benchmarks/dataplane/control_paths.py's to measure; here steps are counted.
"""

import csv
import io
import json
from pathlib import Path

import pytest

from benchmarks.dataplane.control_paths import Size, measure, write_files
from hetero_gateway.gateway.admission.usage import ClientUsage
from tests.fakes.gateway_files import clients
from tests.fakes.running import rig

SIZE = Size(keys=1000, models=10, instances=40)


@pytest.mark.slow
async def test_every_control_path_turns_the_loop_as_often_as_it_has_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/admin/clients did all of it at once: 8.8 s at 3000 keys, in which every stream waited."""
    monkeypatch.setenv("CONTROL_PATHS_ADMIN_KEY", "admin")
    held = await measure(write_files(tmp_path, SIZE), SIZE)
    # 4000 entries of usage at a time, then 100 clients.
    assert held["/admin/clients"].turns >= 10_000 / 4000 + 1000 / 100
    # 100 series of each of a client's counters.
    assert held["/metrics"].turns >= 10_000 / 4000 + 10_000 / 100 + 40 / 4
    assert held["/admin/instances"].turns >= 40 / 16
    assert held["/admin/decisions?limit=256"].turns >= 256 * 40 / 1000
    # All of them together, though no more than what there is.
    assert sum(each.turns for each in held.values()) < 10**7


async def test_what_is_made_in_turns_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADMIN_KEY_OF_TURNS", "admin")
    names = [f"client-{number}" for number in range(450)]
    keys = clients(tmp_path, **{name: {} for name in names}) | {"most_labels": 400}
    server = {"admin_key_env": "ADMIN_KEY_OF_TURNS"}
    async with rig(clients=keys, server=server) as (running, client, _):
        client.headers["authorization"] = "Bearer admin"
        usage = running.gateway.admission.usage
        for model in ("a", "b"):
            running.gateway.metrics.counts(model, "i0").outcomes["completed"] += 1
        for number, name in enumerate(names):
            for model in ("a", "b"):
                usage.count(name, model, number, 1, 2)
        usage.denied["client-7", "concurrency"] += 3
        told = (await client.get("/admin/clients")).json()["clients"]
        assert [row["name"] for row in told] == names
        for number, row in enumerate(told):
            denied = {"concurrency": 3} if number == 7 else {}
            tokens = {"input_tokens": 2 * number, "cached_tokens": 2, "output_tokens": 4}
            assert row["usage"] == {"requests": 2, "denied": denied} | tokens
        rows = list(csv.DictReader(io.StringIO((await client.get("/admin/usage")).text)))
        assert len(rows) == 900
        assert [(r["client"], r["model"]) for r in rows] == sorted(
            (name, model) for name in names for model in "ab"
        )
        text = (await client.get("/metrics")).text
        lines = [x for x in text.splitlines() if x.startswith("hetero_gateway_client_requests")]
        assert len([x for x in lines if 'client="client-' in x]) == 800
        # Those beyond the limit share a label.
        assert 'hetero_gateway_client_requests_total{client="other",model="a"} 50.0' in lines
        assert text.count("# TYPE hetero_gateway_client_requests_total counter") == 1
        told = (await client.get("/admin/instances")).json()
        assert [each["id"] for each in told["instances"]] == ["i0"]
        assert list(told)[-1] == "instances"
        assert json.loads((await client.get("/admin/decisions")).text)["decisions"] == []


def test_days_that_are_not_kept_are_in_the_sums() -> None:
    now_s = 0.0
    usage = ClientUsage(clock=lambda: now_s)
    for day in range(40):
        now_s = day * 86400.0
        usage.count("a", "m", 10, 1, 2)
    assert len(usage.days()) == 31
    assert sum(amounts[1] for _, amounts in usage.entries()) == 400
    assert [row.input_tokens for row in usage.rows(usage.days()[-1])] == [10]
