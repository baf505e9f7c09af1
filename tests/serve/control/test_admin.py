"""/admin over real sockets: what it shows and changes, what it refuses, and who may ask."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hetero_gateway.core.policies import POLICY_NAMES, PolicyOptions, make_policy
from hetero_gateway.core.policies.at_once import PlacesAtOnce
from hetero_gateway.core.policies.base import Decision, number
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec
from tests.fakes.reloads import from_file
from tests.fakes.running import CHAT, FAST, eventually, faked, rig
from tests.fakes.vllm import FakeInstance, fake_instances

ADMIN_KEY = "admin-secret-31415"
INSTANCE_KEY = "instance-secret-27182"
EVERY_READ = (
    "/admin/instances",
    "/admin/decisions",
    "/admin/requests",
    "/admin/explain?prompt_tokens=9",
)


async def decided(client: httpx.AsyncClient, **query: Any) -> Any:
    return (await client.get("/admin/explain", params=query)).json()


def error_of(response: httpx.Response) -> tuple[int, str]:
    """(status, code) of an error, which must have OpenAI's body."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


async def test_the_list_shows_load_share_and_both_kv_usages() -> None:
    reports = FakeInstance()
    reports.metrics = (
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    )
    async with rig([reports, FakeInstance()], profiles=(FAST, None)) as (running, client, _):
        first = running.gateway.fleet.instances[InstanceId("i0")]
        await eventually(lambda: first.engine_kv_usage is not None)
        stream = asyncio.create_task(client.post(CHAT, json=faked(events=1, first_delay_s=0.5)))
        await eventually(lambda: not running.settled())
        document = (await client.get("/admin/instances")).json()
        await stream
        text = await running.metrics()
    assert 'instance_kv_usage_ratio{backend="i0",source="engine"} 0.25' in text
    assert document["policy"] == "finish-time"
    assert document["queue"] == {"waiting": 0, "oldest_wait_s": 0.0}
    rows = {row["id"]: row for row in document["instances"]}
    assert rows["i0"]["profile"] == FAST
    assert rows["i0"]["engine_kv_usage"] == 0.25
    assert rows["i0"]["kv_capacity_tokens"] == 1600
    assert (rows["i1"]["profile"], rows["i1"]["kv_usage"]) == ("unprofiled", None)
    busy = [row for row in rows.values() if row["in_flight"]]
    assert len(busy) == 1
    assert (busy[0]["waiting_first_token"], busy[0]["speed_factor"]) == (1, 1.0)
    assert busy[0]["workload"] > 0
    assert sum(row["requests"] for row in rows.values()) == 1
    assert all(row["up"] and not row["draining"] for row in rows.values())


async def test_an_instance_is_added_and_serves() -> None:
    async with fake_instances(1) as more, rig() as (running, client, _):
        entry = {"id": "late", "base_url": more[0].url, "profile": FAST}
        response = await client.post("/admin/instances", json=entry)
        assert (response.status_code, response.json()["id"]) == (201, "late")
        await eventually(lambda: running.gateway.fleet.instances[InstanceId("late")].up)
        await client.patch("/admin/instances/i0", json={"draining": True})
        answer = await client.post(CHAT, json=faked())
        assert answer.headers["x-hetero-gateway-instance"] == "late"


NO_INSTANCES: list[tuple[str | bytes, int, str]] = [
    ('{"id": "x", "base_url": "http://127.0.0.1:1", "profil": "y"}', 400, "profil"),
    ('{"id": "x"}', 400, "base_url"),
    ('{"id": "../x", "base_url": "http://127.0.0.1:1"}', 400, "id"),
    ('{"id": "x", "base_url": "ftp://127.0.0.1"}', 400, "base_url"),
    ('{"id": "x", "base_url": "http://127.0.0.1:1", "profile": "nope"}', 400, "nope"),
    ('{"id": "x", "base_url": "http://127.0.0.1:1", "api_key_env": "UNSET_9"}', 400, "api_key_env"),
    ('{"id": "x", "base_url": "http://127.0.0.1:1", "weight": 1e999}', 400, ""),
    ('{"id": "x", "base_url": "http://127.0.0.1:1", "weight": 0}', 400, "weight"),
    ('{"id": "i0", "base_url": "http://127.0.0.1:1"}', 409, "i0"),
    ('{"id": ["i0"]}', 400, "id"),
    ("[1]", 400, "body"),
    ("null", 400, "body"),
    ("{", 400, "JSON"),
    ("", 400, "JSON"),
    ("[" * 100_000, 400, "JSON"),
    (b"\xff\xfe", 400, "JSON"),
    (" " * (2**20 + 1), 413, "bytes"),
]


async def test_what_is_no_instance_is_refused_and_changes_nothing() -> None:
    async with rig(1) as (running, client, _):
        for body, status, says in NO_INSTANCES:
            response = await client.post("/admin/instances", content=body)
            assert error_of(response)[0] == status, body[:99]
            assert says in response.json()["error"]["message"]
        assert list(running.gateway.fleet.instances) == ["i0"]
        assert (await client.post(CHAT, json=faked())).status_code == 200


async def test_draining_and_weight_are_changed() -> None:
    async with rig(2) as (_, client, _):
        patched = await client.patch("/admin/instances/i0", json={"draining": True, "weight": 2.5})
        assert (patched.json()["draining"], patched.json()["weight"]) == (True, 2.5)
        for _ in range(5):
            answer = await client.post(CHAT, json=faked())
            assert answer.headers["x-hetero-gateway-instance"] == "i1"
        back = await client.patch("/admin/instances/i0", json={"draining": False})
        assert (back.json()["draining"], back.json()["weight"]) == (False, 2.5)
        assert (await client.post(CHAT, json=faked())).headers["x-hetero-gateway-instance"] == "i0"


async def test_a_bad_change_is_refused() -> None:
    bad = (
        '{"drain": true}',
        '{"weight": -1}',
        '{"weight": "Infinity"}',
        "{",
        "[]",
        '{"draining": 7}',
    )
    async with rig(1) as (_, client, _):
        for body in bad:
            response = await client.patch("/admin/instances/i0", content=body)
            assert error_of(response)[0] == 400, body
        row = (await client.get("/admin/instances")).json()["instances"][0]
        assert (row["draining"], row["weight"]) == (False, 1.0)
        for method in ("PATCH", "DELETE"):
            response = await client.request(method, "/admin/instances/nobody", json={})
            assert error_of(response) == (404, "instance_not_found")


async def test_a_removed_instance_leaves_no_series_and_its_stream_ends_well() -> None:
    async with rig(2) as (running, client, fakes):
        await client.patch("/admin/instances/i1", json={"draining": True})
        await client.post(CHAT, json=faked())
        await client.post(CHAT, json=faked(die="before_head"))
        stream = asyncio.create_task(client.post(CHAT, json=faked(events=5, delay_s=0.1)))
        await eventually(lambda: fakes[0].open == 1)
        assert 'backend="i0"' in await running.metrics()
        removed = await client.delete("/admin/instances/i0")
        assert removed.json() == {"id": "i0", "open_requests": 1}
        assert 'backend="i0"' not in await running.metrics()
        assert (await stream).text.rstrip().endswith("[DONE]")
        # Nothing that ends afterwards brings them back.
        assert 'backend="i0"' not in await running.metrics()
        assert 'backend="i1"' in await running.metrics()
        assert running.settled()
        assert error_of(await client.delete("/admin/instances/i0"))[0] == 404


async def test_explain_says_what_would_be_chosen_and_sends_nothing() -> None:
    scheduler = {"policy": "min-max"}
    async with rig(3, scheduler=scheduler) as (running, client, fakes):
        await client.patch("/admin/instances/i2", json={"draining": True})
        document = await decided(client, prompt_tokens=800, max_tokens=200, model="m")
        assert (document["chosen"], document["policy"]) == ("i0", "min-max")
        assert document["predicted_output_tokens"] == 200
        assert document["waits"] is False
        rows = {row["instance"]: row for row in document["candidates"]}
        for row in rows.values():
            assert {"request_time_s", "kv_usage", "workload", "load_after", "excluded"} <= set(row)
            assert "cost_s" not in row  # finish-time's alone
        assert rows["i0"]["load_after"] < rows["i1"]["load_after"]
        assert rows["i2"]["excluded"] == "draining"
        assert rows["i2"]["load"] is None
        assert document["reason"].startswith("i0 would get it: its load would be ")
        assert number(rows["i1"]["load_after"]) in document["reason"]
        assert [fake.requests for fake in fakes] == [0, 0, 0]
        assert running.settled()
        assert (await client.get("/admin/decisions")).json()["decisions"] == []


async def test_explain_tells_why_nobody_can_take_a_request() -> None:
    async with rig(2) as (_, client, _):
        too_long = await decided(client, prompt_tokens=5000, model="m")
        assert too_long["chosen"] is None
        assert "4096" in too_long["reason"]
        assert {row["excluded"] for row in too_long["candidates"]} == {"the request does not fit"}
        unknown = await decided(client, prompt_tokens=5, model="zz")
        assert (unknown["chosen"], unknown["candidates"]) == (None, [])
        for i in range(2):
            await client.patch(f"/admin/instances/i{i}", json={"draining": True})
        drained = await decided(client, prompt_tokens=5, model="m")
        assert {row["excluded"] for row in drained["candidates"]} == {"draining"}


async def test_a_bad_question_is_refused_and_one_without_a_model_where_there_are_several() -> None:
    bad = (
        ("", "prompt_tokens"),
        ("prompt_tokens=0", "prompt_tokens"),
        ("prompt_tokens=many", "prompt_tokens"),
        (f"prompt_tokens={'9' * 400}", "prompt_tokens"),
        ("prompt_tokens=5&max_tokens=-1", "max_tokens"),
    )
    async with rig([FakeInstance(("a", "b"))]) as (_, c, _):
        for query, param in bad:
            response = await c.get(f"/admin/explain?{query}")
            assert error_of(response) == (400, "invalid_parameter"), query
            assert response.json()["error"]["param"] == param
        response = await c.get("/admin/explain?prompt_tokens=5")
        assert error_of(response) == (400, "missing_model")
        assert "a, b" in response.json()["error"]["message"]


async def test_decisions_come_newest_first_each_with_its_reason() -> None:
    async with rig(2) as (_, client, _):
        for i in range(3):
            await client.post(CHAT, json=faked(), headers={"x-request-id": f"r{i}"})
        document = (await client.get("/admin/decisions?limit=2")).json()
        assert [d["request_id"] for d in document["decisions"]] == ["r2", "r1"]
        for decision in document["decisions"]:
            rows = {row["instance"]: row for row in decision["candidates"]}
            lowest = min(rows.values(), key=lambda row: row["cost_s"])
            assert decision["chosen"] == lowest["instance"]
            assert all(row["room"] for row in rows.values())
            parts = ("latency_s", "delay_s", "memory_price_s", "late_price_s")
            assert lowest["cost_s"] == pytest.approx(sum(lowest[part] for part in parts))
            # The same prompt was sent there before, but these engines have no prefix cache.
            assert lowest["prefix"]["match_tokens"] > lowest["prefix"]["cached_tokens"] == 0
            assert 0 < lowest["ttft_s"] < lowest["latency_s"]
            assert decision["reason"].startswith(f"{decision['chosen']} got it: done in ")
            assert decision["waited_s"] == 0
            assert abs(decision["time"] - time.time()) < 60
        brief = (await client.get("/admin/decisions?candidates=false")).json()["decisions"]
        assert len(brief) == 3
        assert not any("candidates" in decision for decision in brief)
        one = (await client.get("/admin/decisions?request_id=r0")).json()["decisions"]
        assert [d["request_id"] for d in one] == ["r0"]
        assert one[0]["candidates"]
        assert error_of(await client.get("/admin/decisions?limit=0"))[0] == 400


# Reasons


def decision_of(policy: str, ids: str = "ab", **options: Any) -> Decision:
    """What a policy decides among idle instances, the first of which has a request on it."""
    scheduler = Scheduler(make_policy(policy, PolicyOptions()), np.random.default_rng(0))
    for name in ids:
        spec = InstanceSpec(InstanceId(name), frozenset(["m"]), **options)
        scheduler.add(spec)
    first = scheduler.choose(Request("m", 100, 50))
    assert isinstance(first, Decision)
    scheduler.dispatch(first)
    second = scheduler.choose(Request("m", 100, 50))
    assert isinstance(second, Decision)
    return second


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_has_a_reason_of_its_own(policy: str) -> None:
    decision = decision_of(policy)
    reason = decision.reason()
    assert reason.startswith(f"{decision.instance_id} got it: ")
    assert reason.endswith(".")
    assert f"policy {policy} chose it" not in reason


def test_a_policy_that_says_nothing_gets_no_invented_reason() -> None:
    class SomeNewOne(PlacesAtOnce):
        name = "some-new-one"

    decision = decision_of("min-max")
    decision.policy = SomeNewOne()
    assert decision.reason() == f"{decision.instance_id} got it: policy some-new-one chose it; " + (
        f"its load would be {number(decision.choice.charge)}."
    )


def test_a_tie_is_called_a_tie() -> None:
    reason = decision_of("least-requests", "abcd").reason()
    assert "0 requests in flight, the fewest, as 2 others; of equals one is drawn" in reason


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (1.2149, "1.21"), (2.4, "2.40"), (0.0123, "0.0123"), (1234.5, "1234")],
)
def test_numbers_are_short_and_without_exponent(value: float, text: str) -> None:
    assert number(value) == text


async def test_a_new_instance_cannot_name_a_secret_that_the_file_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_SECRET", "value")
    async with rig(1) as (_, client, fakes):
        entry = {"id": "evil", "base_url": fakes[0].url, "api_key_env": "SOME_SECRET"}
        assert error_of(await client.post("/admin/instances", json=entry))[0] == 400
        # Nor is there a file to read again.
        assert error_of(await client.post("/admin/reload")) == (409, "no_file")
    assert b"value" not in b"".join(fakes[0].heads)


# Who may ask


async def every_call(client: httpx.AsyncClient, **headers: str) -> list[httpx.Response]:
    entry = {"id": "evil", "base_url": "http://127.0.0.1:1"}
    return [
        *[await client.get(path, headers=headers) for path in EVERY_READ],
        await client.post("/admin/instances", json=entry, headers=headers),
        await client.patch("/admin/instances/i0", json={"draining": True}, headers=headers),
        await client.delete("/admin/instances/i0", headers=headers),
        await client.post("/admin/reload", headers=headers),
    ]


async def test_the_key_is_required_and_must_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ADMIN_KEY", ADMIN_KEY)
    async with rig(server={"admin_key_env": "TEST_ADMIN_KEY"}) as (running, client, _):
        wrong = ("Bearer wrong", "Bearer", ADMIN_KEY, f"Basic {ADMIN_KEY}", "Bearer é")
        for value in wrong:
            response = await client.get(
                "/admin/instances", headers={"authorization": value.encode("latin-1")}
            )
            assert error_of(response) == (401, "invalid_api_key")
        for response in await every_call(client):
            assert error_of(response) == (401, "invalid_api_key")
        assert list(running.gateway.fleet.instances) == ["i0"]
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {ADMIN_KEY}", "host": "gateway.example"}
            assert (await client.get("/admin/instances", headers=headers)).is_success
        # Not in the address, where logs and histories would keep it.
        assert (await client.get(f"/admin/instances?key={ADMIN_KEY}")).status_code == 401


async def test_without_a_key_it_is_off_unless_bound_to_loopback() -> None:
    async with rig(server={"host": "0.0.0.0"}) as (running, client, _):
        for response in await every_call(client):
            assert error_of(response) == (403, "admin_off")
        assert "admin_key_env" in response.json()["error"]["message"]
        assert list(running.gateway.fleet.instances) == ["i0"]
        assert (await client.post(CHAT, json=faked())).status_code == 200


async def test_no_answer_ever_holds_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("TEST_INSTANCE_KEY", INSTANCE_KEY)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    server, keyed = {"admin_key_env": "TEST_ADMIN_KEY"}, {"api_key_env": "TEST_INSTANCE_KEY"}
    async with from_file(tmp_path, 2, server=server) as rig:
        _, config, running, client, fakes = rig
        instances = config.model_dump(mode="json", exclude_unset=True)["instances"]
        rig.write(instances=[entry | keyed for entry in instances])
        reloaded = await client.post("/admin/reload", headers=headers)
        assert reloaded.json()["changed"] == ["i0", "i1"]
        await eventually(lambda: all(i.up for i in running.gateway.fleet.instances.values()))
        await client.post(CHAT, json=faked())
        assert INSTANCE_KEY.encode() in b"".join(fakes[0].heads + fakes[1].heads)
        await fakes[1].kill()
        second = running.gateway.fleet.instances[InstanceId("i1")]
        await eventually(lambda: not second.up)
        # As httpx words it when a key cannot be a header.
        second.down_reason = f"/health: Illegal header value b'Bearer {INSTANCE_KEY}\\n'"
        answers = [reloaded, *[await client.get(p, headers=headers) for p in EVERY_READ]]
        answers += [
            await client.patch("/admin/instances/i1", json={"weight": 2}, headers=headers),
            await client.post(
                "/admin/instances",
                json={"id": "i9", "base_url": "http://127.0.0.1:1", **keyed},
                headers=headers,
            ),
            await client.post("/admin/instances", json={"id": "i0"}, headers=headers),
            await client.delete("/admin/instances/i1", headers=headers),
            await client.get("/metrics"),
            await client.get("/dashboard"),
            await client.get("/admin/instances", headers={"authorization": "Bearer no"}),
        ]
        for answer in answers:
            shown = answer.text + json.dumps(dict(answer.headers))
            assert ADMIN_KEY not in shown
            assert INSTANCE_KEY not in shown
