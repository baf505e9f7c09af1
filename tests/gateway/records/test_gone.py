"""Models, adapters and clients that are gone leave nothing behind for good."""

from pathlib import Path

import pytest

from hetero_gateway.core.types import Reject
from hetero_gateway.gateway.records.metrics import KEPT_S, MOST_KEPT, Metrics
from tests.core.builders import request, scheduler, spec
from tests.fakes.gateway_files import clients
from tests.fakes.reloads import from_file
from tests.fakes.running import CHAT, RunningGateway, chat, eventually, rig
from tests.fakes.vllm import FakeInstance


async def series_of(running: RunningGateway, model: str) -> int:
    return sum(f'model="{model}"' in line for line in (await running.metrics()).splitlines())


def test_series_of_a_model_that_is_not_served_go_a_while_after_its_last_request() -> None:
    metrics = Metrics("min-max", lambda: ())
    served = {("base", "i0")}
    for model in ("base", "adapter"):
        metrics.counts(model, "i0").outcomes["completed"] += 1
    metrics.counts("", "").outcomes["internal_error"] += 1
    metrics.counts("unknown", "").outcomes["rejected"] += 1
    metrics.counts("adapter", "").outcomes["queue_full"] += 1

    def look(now_s: float) -> set[str]:
        metrics.forget_unserved(lambda *key: key in served, now_s)
        return metrics.models() - {"", "unknown"}

    assert look(0.0) == {"base", "adapter"}
    # One that was under way ends: its end is there to be scraped.
    metrics.counts("adapter", "i0").outcomes["completed"] += 1
    assert "adapter" in look(KEPT_S - 1)
    assert "adapter" in look(2 * KEPT_S - 2)
    assert look(2 * KEPT_S) == {"base"}
    assert metrics.models() == {"base", "", "unknown"}
    # It comes back, and begins anew.
    served.add(("adapter", "i0"))
    metrics.counts("adapter", "i0").outcomes["completed"] += 1
    assert "adapter" in look(2 * KEPT_S)
    assert "adapter" in look(9 * KEPT_S)


def test_adapters_that_come_and_go_all_the_time_are_bounded() -> None:
    metrics = Metrics("min-max", lambda: ())
    for number in range(3 * MOST_KEPT):
        metrics.counts(f"adapter-{number}", "i0").outcomes["completed"] += 1
        if number % 100 == 99:
            metrics.forget_unserved(lambda *_: False, float(number))
    assert len(metrics.models()) <= MOST_KEPT
    assert f"adapter-{3 * MOST_KEPT - 1}" in metrics.models()


def test_a_workers_counts_are_gone_with_being_taken() -> None:
    metrics = Metrics("min-max", lambda: ())
    for number in range(100):
        metrics.counts(f"adapter-{number}", "i0").outcomes["completed"] += 1
    assert len(metrics.take_series()) == 100
    assert not metrics.models()


async def test_an_adapter_that_was_unloaded_leaves_metrics_and_trend() -> None:
    async with rig([FakeInstance(("base", "lora"))]) as (running, client, fakes):
        for model in ("base", "lora"):
            assert (await client.post(CHAT, json=chat(model=model))).status_code == 200
        # What clients make up is no label, wherever it turns up.
        invented = "invented-by-a-client"
        assert (await client.post(CHAT, json=chat(model=invented))).status_code == 404
        assert await series_of(running, invented) == 0
        running.gateway.board._step()
        assert await series_of(running, "lora") > 40
        assert running.gateway.board.trend.models() == ["base", "lora"]
        fakes[0].models = ("base",)
        instance = next(iter(running.gateway.fleet.instances.values()))
        await eventually(lambda: instance.models == {"base"})
        for _ in range(int(KEPT_S / 5) + 30):
            running.gateway.board._step()
        assert await series_of(running, "lora") > 40, "as long as it can be scraped"
        metrics = running.gateway.metrics
        for key, (requests, since_s) in metrics._unserved.items():
            metrics._unserved[key] = (requests, since_s - KEPT_S)
        for _ in range(13):
            running.gateway.board._step()
        assert await series_of(running, "lora") == 0
        assert await series_of(running, "base") > 40
        assert running.gateway.board.trend.models() == ["base"]


async def test_clients_that_were_removed_leave_metrics_and_so_do_their_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADMIN_KEY_OF_GONE", "admin")
    keys, admin = clients(tmp_path, stays={}, goes={}), {"admin_key_env": "ADMIN_KEY_OF_GONE"}
    async with from_file(tmp_path, clients=keys, server=admin) as (_, _, running, client, _):

        async def shown() -> str:
            headers = {"authorization": "Bearer admin"}
            return (await client.get("/metrics", headers=headers)).text

        for name in ("stays", "goes"):
            headers = {"authorization": f"Bearer k{name}"}
            assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
        await eventually(running.settled)
        text = await shown()
        assert 'client="goes",model="m"' in text
        clients(tmp_path, stays={})
        await running.gateway.reloader.reload("a test")
        text = await shown()
        assert 'client="stays",model="m"' in text
        assert "goes" not in text
        assert 'client="other"' not in text, "it is nobody else's either"
        # A day's CSV has it all the same.
        headers = {"authorization": "Bearer admin"}
        assert ",goes," in (await client.get("/admin/usage", headers=headers)).text


def test_queues_of_models_that_nobody_serves_are_not_kept() -> None:
    s = scheduler(spec("a", models=frozenset({"base"})), policy="finish-time")
    for number in range(2000):
        model = f"adapter-{number}"
        s.replace(spec("a", models=frozenset({"base", model})))
        ticket = s.place(request(model=model), 0.0, at_once=False)
        assert not isinstance(ticket, Reject)
        s.cancel(ticket)
    assert len(s.queues) <= 256
