"""Calls that concern an engine, and what the gateway heeds of them."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from hetero_gateway.core.types import InstanceId
from tests.fakes.running import CHAT, FAST, eventually, rig
from tests.fakes.vllm import NO_PREFIX_CACHE, FakeInstance

KEY = "admin-secret-31415"


class Engine(FakeInstance):
    """Has adapters, sleeps and pauses, as vLLM does in its development mode."""

    def __init__(self, *models: str) -> None:
        super().__init__(models or ("m",))
        self.calls: list[str] = []
        self.level = 0
        self.paused = False
        self.refuses = False
        self.wake_s = 0.0
        self.shows = True
        self.served_asleep = 0

    def _get(self, path: str) -> tuple[int, bytes]:
        if path == "/is_sleeping":
            return 200, json.dumps({"is_sleeping": self.level > 0}).encode()
        if path == "/is_paused":
            return 200, json.dumps({"is_paused": self.paused}).encode()
        if path == "/metrics" and self.shows:
            states = {"awake": 0, "weights_offloaded": 1, "discard_all": 2}
            lines = [
                f'vllm:engine_sleep_state{{sleep_state="{name}"}} {level == self.level:d}'
                for name, level in states.items()
            ]
            return 200, (NO_PREFIX_CACHE + "\n".join(lines) + "\n").encode()
        return super()._get(path)

    async def _post(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        target = self.heads[-1].split(b" ")[1].decode()
        path, _, query = target.partition("?")
        if path.startswith("/v1/") and "lora" not in path:
            self.served_asleep += bool(self.level or self.paused)
            return await super()._post(request, writer)
        self.calls.append(target)
        answer: dict[str, Any] = {"status": 200}
        if self.refuses:
            answer = {"status": 500, "body": '{"error": "no"}'}
        elif path == "/v1/load_lora_adapter":
            self.models += (request["lora_name"],)
        elif path == "/v1/unload_lora_adapter":
            self.models = tuple(m for m in self.models if m != request["lora_name"])
        elif path == "/sleep":
            self.level = int(query.partition("level=")[2] or "1")
        elif path == "/wake_up":
            await asyncio.sleep(self.wake_s)
            self.level = 0
            answer["body"] = json.dumps({"status": "awake", "tags": None})
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        return await super()._post({"fake": answer}, writer)


async def ask(client: httpx.AsyncClient, model: str = "m", **fake: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "fake": fake}
    return await client.post(CHAT, json=body)


async def where(client: httpx.AsyncClient, number: int = 6) -> set[str]:
    answers = [await ask(client) for _ in range(number)]
    assert {a.status_code for a in answers} == {200}, [a.text for a in answers]
    return {a.headers["x-hetero-gateway-instance"] for a in answers}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("model", [None, "m"])
async def test_a_loaded_adapter_is_routable_at_once(workers: int, model: str | None) -> None:
    health = {"probe_interval_s": 1000, "scrape_interval_s": 1000}
    engines = Engine(), Engine()
    for engine in engines:
        await engine.start()
    instances = [
        {"id": f"i{i}", "base_url": each.url, "model": model, "profile": FAST}
        for i, each in enumerate(engines)
    ]
    async with rig(engines, workers=workers, health=health, instances=instances) as (_, client, _):
        for instance, engine in zip(("i0", "i1"), engines, strict=True):
            adapter = {"lora_name": f"lora-{instance}", "lora_path": "/adapters/1"}
            assert (await ask(client, f"lora-{instance}")).status_code == 404
            url = f"/admin/instances/{instance}/engine/v1"
            answer = await client.post(f"{url}/load_lora_adapter", json=adapter)
            assert answer.status_code == 200, answer.text
            assert json.loads(engine.bodies[-1]) == adapter
            answer = await ask(client, f"lora-{instance}")
            assert answer.headers["x-hetero-gateway-instance"] == instance
            listed = [c["id"] for c in (await client.get("/v1/models")).json()["data"]]
            assert f"lora-{instance}" in listed
            await client.post(f"{url}/unload_lora_adapter", json=adapter)
            assert (await ask(client, f"lora-{instance}")).status_code == 404


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("calls", [("sleep?level=1", "wake_up"), ("pause?mode=keep", "resume")])
async def test_an_engine_that_sleeps_or_pauses_gets_no_requests(
    workers: int, calls: tuple[str, str]
) -> None:
    one, other = Engine(), Engine()
    one.shows = "pause" not in calls[0]
    scheduler = {"policy": "round-robin"}
    async with rig([one, other], workers=workers, scheduler=scheduler) as (_, client, _):
        assert await where(client) == {"i0", "i1"}
        answer = await client.post(f"/admin/instances/i0/engine/{calls[0]}")
        assert answer.status_code == 200
        assert one.calls == [f"/{calls[0]}"]
        assert await where(client) == {"i1"}
        await asyncio.sleep(5)  # and scrapes change nothing of it
        assert await where(client) == {"i1"}
        state = "asleep" if "sleep" in calls[0] else "paused"
        shown = (await client.get("/admin/instances")).json()["instances"][0]
        assert shown[state]
        assert shown["up"]
        explained = (await client.get("/admin/explain?prompt_tokens=9")).json()["candidates"]
        assert {c["instance"]: c["excluded"] for c in explained}["i0"] == state
        await client.post(f"/admin/instances/i0/engine/{calls[1]}")
        assert await where(client) == {"i0", "i1"}
        assert one.served_asleep == 0


async def test_one_that_will_not_sleep_goes_on() -> None:
    engine = Engine()
    async with rig([engine]) as (_, client, _):
        engine.refuses = True
        answer = await client.post("/admin/instances/i0/engine/sleep")
        assert (answer.status_code, answer.json()) == (500, {"error": "no"})
        assert await where(client) == {"i0"}


@pytest.mark.parametrize("shows", [True, False])
async def test_what_is_asked_of_an_engine_directly_is_seen(shows: bool) -> None:
    engine = Engine()
    engine.shows = shows
    async with rig([engine]) as (running, client, _):
        instance = running.gateway.fleet.instances[InstanceId("i0")]
        if shows:
            engine.level = 1
        else:
            await client.post("/admin/instances/i0/engine/sleep")
        await eventually(lambda: instance.asleep)
        refused = await ask(client)
        assert refused.status_code == 503
        assert "asleep" in refused.json()["error"]["message"]
        assert (await client.get("/readyz")).status_code == 503
        engine.level = 0
        await eventually(lambda: not instance.asleep)
        assert await where(client) == {"i0"}


async def test_a_broadcast_reports_each_answer() -> None:
    engines = Engine(), Engine(), Engine("other")
    async with rig(engines) as (_, client, _):
        answer = await client.post("/admin/models/m/engine/reset_prefix_cache")
        assert answer.status_code == 200
        document = answer.json()
        assert (document["model"], document["call"]) == ("m", "/reset_prefix_cache")
        assert [(a["instance"], a["status"], a["error"]) for a in document["answers"]] == [
            ("i0", 200, None),
            ("i1", 200, None),
        ]
        assert not engines[2].calls
        engines[1].refuses = True
        await engines[0].kill()
        answer = await client.post("/admin/models/m/engine/reset_prefix_cache")
        assert answer.status_code == 502
        dead, refusing = answer.json()["answers"]
        assert dead["status"] is None
        assert dead["error"]
        assert (refusing["status"], refusing["body"]) == (500, {"error": "no"})
        nobody = await client.post("/admin/models/x/y/engine/reset_prefix_cache")
        assert nobody.status_code == 404
        assert nobody.json()["error"]["code"] == "model_not_found"


async def test_a_reset_cache_is_forgotten() -> None:
    engine = Engine()
    async with rig([engine]) as (running, client, _):
        caches = running.gateway.fleet.scheduler.caches
        assert caches is not None
        for call in ("reset_prefix_cache", "sleep"):
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9000}]}
            assert (await client.post(CHAT, json=body)).status_code == 200
            await eventually(running.settled)
            assert caches.index.bytes_on(InstanceId("i0"))[0]
            await client.post(f"/admin/instances/i0/engine/{call}")
            assert not caches.index.bytes_on(InstanceId("i0"))[0]


async def test_only_who_may_use_admin_calls_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ADMIN_KEY_8", KEY)
    engine = Engine()
    caplog.set_level(logging.INFO, "hetero_gateway.audit")
    async with rig([engine], server={"port": 0, "admin_key_env": "ADMIN_KEY_8"}) as (_, client, _):
        paths = ("/admin/instances/i0/engine/sleep", "/admin/models/m/engine/sleep")
        for path in paths:
            assert (await client.post(path)).status_code == 401
        assert not engine.calls
        client.headers["authorization"] = f"Bearer {KEY}"
        for path, status, code in (
            ("/admin/instances/i9/engine/sleep", 404, "instance_not_found"),
            ("/admin/instances/i0/engine/v1/chat/completions", 404, "not_found"),
            ("/admin/instances/i0/engine/shutdown", 404, "not_found"),
            ("/admin/models/m/engine/health", 404, "not_found"),
            ("/admin/instances/i0/engine/is_sleeping", 405, "method_not_allowed"),
        ):
            answer = await client.post(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.headers["allow"] == "GET"
        long = await client.post(paths[0], content=b"x" * (2**20 + 1))
        assert long.status_code == 413
        assert not engine.calls
        asked = await client.get("/admin/instances/i0/engine/is_sleeping")
        assert asked.json() == {"is_sleeping": False}
        assert (await client.post(paths[0])).status_code == 200
        assert b"authorization" not in engine.heads[-1].lower()
    lines = [record.getMessage() for record in caplog.records]
    assert any("instance i0: /sleep; by key" in line for line in lines)


# By demand


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_engine_is_woken_by_demand_where_that_is_on(workers: int) -> None:
    engine = Engine()
    engine.wake_s = 2.0
    wakes = {"wake_on_demand": True}
    async with rig([engine], workers=workers, scheduler=wakes) as (_, client, _):
        for _ in range(2):
            await client.post("/admin/instances/i0/engine/sleep")
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
            answers = await asyncio.gather(*(ask(client) for _ in range(5)))
            assert [a.status_code for a in answers] == [200] * 5
        assert engine.calls == ["/sleep", "/wake_up"] * 2
        assert engine.served_asleep == 0


async def test_what_has_lost_its_weights_is_not_woken_nor_what_is_off() -> None:
    for call, scheduler in (("/sleep?level=2", {"wake_on_demand": True}), ("/sleep", {})):
        engine = Engine()
        async with rig([engine], scheduler=scheduler) as (_, client, _):
            await client.post(f"/admin/instances/i0/engine{call}")
            assert (await ask(client)).status_code == 503
            assert engine.calls == [call]


async def test_one_that_cannot_be_woken_is_asked_once_in_a_while() -> None:
    engine = Engine()
    async with rig([engine], scheduler={"wake_on_demand": True}) as (_, client, _):
        await client.post("/admin/instances/i0/engine/sleep")
        engine.refuses = True
        for _ in range(5):
            assert (await ask(client)).status_code == 503
        assert engine.calls == ["/sleep", "/wake_up"]
        engine.refuses = False
        await asyncio.sleep(11)
        assert (await ask(client)).status_code == 200


async def test_a_client_that_leaves_while_an_engine_wakes_leaves_nothing() -> None:
    engine = Engine()
    engine.wake_s = 5.0
    async with rig([engine], scheduler={"wake_on_demand": True}) as (running, client, _):
        await client.post("/admin/instances/i0/engine/sleep")
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json={"model": "m", "messages": []}, timeout=1)
        await asyncio.sleep(10)
        assert running.settled()
        assert engine.requests == 2
        assert (await ask(client)).status_code == 200
