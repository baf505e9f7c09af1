"""Keys and limits over real sockets: exact, whatever clients and instances do, and settled once."""

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hetero_gateway.core.scheduling.disciplines import Clients
from tests.fakes.reloads import from_file
from tests.fakes.running import CHAT, FAST, RunningGateway, eventually, faked, rig
from tests.fakes.vllm import FakeInstance

ADMIN = {"authorization": "Bearer admin-secret-31415"}
WORKERS = pytest.mark.parametrize("workers", [1, 2])


@pytest.fixture(autouse=True)
def _admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY_9", ADMIN["authorization"].removeprefix("Bearer "))


def key_of(name: str) -> str:
    return f"hg-{name}-0123456789abcdefghij"


def entry(name: str, **limits: object) -> dict[str, object]:
    digest = hashlib.sha256(key_of(name).encode()).hexdigest()
    return {"name": name, "hash": f"sha256:{digest}", **limits}


def sections_with(
    directory: Path, *keys: dict[str, object], groups: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    """Of a configuration with these keys, which are written into a file."""
    file = directory / "keys.yaml"
    file.write_text(yaml.safe_dump({"groups": groups or {}, "keys": list(keys)}))
    server = {"admin_key_env": "ADMIN_KEY_9", **sections.pop("server", {})}
    clients = {"keys_file": str(file)}
    return {"profiles": (FAST,), "clients": clients, "server": server} | sections


def of(name: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}", **headers}


def no_charge_is_left(running: RunningGateway) -> bool:
    return all(
        account.in_flight == 0
        for process in running.processes()
        for account in process.admission.accounts()
    )


def tokens_used(running: RunningGateway, name: str) -> int:
    running.gateway.metrics.catch_up()
    accounts = {account.name: account for account in running.gateway.admission.accounts()}
    return accounts[name].tokens.used


@pytest.mark.slow
@WORKERS
async def test_of_200_at_once_just_as_many_are_served_as_may_be(
    workers: int, tmp_path: Path
) -> None:
    sections = sections_with(
        tmp_path, entry("a", requests_per_minute=70), entry("b", concurrency=5)
    )
    async with rig(2, workers=workers, **sections) as (running, client, fakes):

        async def ask(i: int) -> tuple[str, int]:
            name = "ab"[i % 2]
            url = f"http://127.0.0.1:{running.port}{CHAT}"
            body = faked(events=1, first_delay_s=1.5)
            response = await client.post(url, json=body, headers=of(name), timeout=60)
            return name, response.status_code

        answers = Counter(await asyncio.gather(*(ask(i) for i in range(200))))
        assert answers["a", 200] == 70
        assert answers["a", 429] == 30
        # All of b's come within the 1.5 s that the first five take.
        assert answers["b", 200] == 5
        assert answers["b", 429] == 95
        await eventually(lambda: running.settled() and no_charge_is_left(running))
        assert sum(fake.requests for fake in fakes) == 75


@WORKERS
async def test_who_leaves_in_mid_stream_gives_back_its_place_and_pays_for_what_it_saw(
    workers: int, tmp_path: Path
) -> None:
    sections = sections_with(tmp_path, entry("a", concurrency=100, tokens_per_minute=10_000_000))
    async with rig(workers=workers, **sections) as (running, client, _):

        async def leave(i: int) -> None:
            url = f"http://127.0.0.1:{running.port}{CHAT}"
            body = faked(events=500, delay_s=0.05)
            if i % 2:
                body = faked(events=1, first_delay_s=60)
            async with asyncio.timeout(1.0 + 0.01 * i):
                async with client.stream("POST", url, json=body, headers=of("a")) as response:
                    async for _ in response.aiter_bytes():
                        pass

        left = await asyncio.gather(*(leave(i) for i in range(100)), return_exceptions=True)
        assert all(isinstance(each, TimeoutError) for each in left)
        await eventually(lambda: running.settled() and no_charge_is_left(running))
        usage = await running.used_by("a")
        assert usage["requests"] == 100
        assert tokens_used(running, "key a") == usage["input_tokens"] + usage["output_tokens"]
        # About twenty events a second, of every second stream.
        assert 50 <= usage["output_tokens"] < 50 * 500


@WORKERS
async def test_tokens_are_charged_by_estimate_and_settled_by_usage_once(
    workers: int, tmp_path: Path
) -> None:
    sections = sections_with(tmp_path, entry("a", tokens_per_minute=10_000))
    async with rig(workers=workers, **sections) as (running, client, _):
        first = await client.post(CHAT, json=faked(events=3, event_tokens=7), headers=of("a"))
        told = first.headers
        assert told["x-ratelimit-limit-tokens"] == "10000"
        estimate = 10_000 - int(told["x-ratelimit-remaining-tokens"])
        assert estimate > 200  # the predictor's prior
        assert 59 < float(told["x-ratelimit-reset-tokens"].removesuffix("s")) <= 61
        assert "x-ratelimit-limit-requests" not in told
        await eventually(running.settled)
        used = tokens_used(running, "key a")
        usage = running.gateway.admission.usage
        row = next(usage.rows(usage.days()[0]))
        assert used == row.input_tokens + row.output_tokens
        assert row.output_tokens == 21
        second = await client.post(CHAT, json=faked(status=400, body="no"), headers=of("a"))
        assert second.status_code == 400
        await eventually(running.settled)
        assert tokens_used(running, "key a") == used  # what failed costs nothing


@WORKERS
async def test_a_refusal_says_which_limit_and_when_to_come_back(
    workers: int, tmp_path: Path
) -> None:
    sections = sections_with(
        tmp_path,
        entry("a", group="team"),
        entry("b", group="team", requests_per_minute=1),
        groups={"team": {"requests_per_minute": 3}},
    )
    async with rig(workers=workers, **sections) as (running, client, _):
        answer = await client.post(CHAT, json=faked(), headers=of("b"))
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await client.post(CHAT, json=faked(), headers=of("b"))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
        assert "key b on requests per minute" in error["message"]
        assert 58 <= int(refused.headers["retry-after"]) <= 61
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        for remaining in ("1", "0"):
            answer = await client.post(CHAT, json=faked(), headers=of("a"))
            assert answer.headers["x-ratelimit-remaining-requests"] == remaining
        refused = await client.post(CHAT, json=faked(), headers=of("a"))
        assert "group team on" in refused.json()["error"]["message"]
        assert dict(running.gateway.admission.usage.denied) == {
            ("b", "requests_per_minute"): 1,
            ("a", "requests_per_minute"): 1,
        }


@WORKERS
async def test_a_key_has_models_classes_and_an_end(workers: int, tmp_path: Path) -> None:
    sections = sections_with(
        tmp_path,
        entry("a", models=["n"], classes=["batch"]),
        entry("old", expires="2020-01-01"),
    )
    fakes = [FakeInstance(), FakeInstance(("n",))]
    async with rig(fakes, workers=workers, **sections) as (running, client, _):
        await eventually(lambda: len(running.gateway.fleet.models()) == 2)
        body = faked() | {"model": "n"}

        async def ask(headers: dict[str, str], body: dict[str, object]) -> tuple[int, str]:
            answer = await client.post(CHAT, json=body, headers=headers)
            code = answer.json()["error"]["code"] if answer.status_code != 200 else ""
            return answer.status_code, code

        assert await ask(of("a"), body) == (200, "")
        assert await ask(of("a"), faked()) == (403, "model_not_allowed")
        batch, urgent = ({"x-hetero-gateway-class": name} for name in ("batch", "urgent"))
        assert await ask(of("a") | batch, body) == (200, "")
        assert await ask(of("a") | urgent, body) == (403, "class_not_allowed")
        assert await ask(of("old"), body) == (401, "invalid_api_key")
        assert await ask(of("nobody"), body) == (401, "invalid_api_key")
        assert await ask({}, body) == (401, "invalid_api_key")
        models = (await client.get("/v1/models", headers=of("a"))).json()["data"]
        assert [model["id"] for model in models] == ["n"]
        slow = faked(events=1, first_delay_s=1) | {"model": "n"}
        stream = asyncio.create_task(client.post(CHAT, json=slow, headers=of("a") | batch))
        await eventually(lambda: not running.settled())
        scheduler = running.gateway.fleet.scheduler
        dispatches = [
            d
            for i in running.gateway.fleet.instances
            for d in scheduler.members.table[i].outstanding()
        ]
        assert [dispatch.request.request_class for dispatch in dispatches] == ["batch"]
        await stream
        # A key is never an instance's business.
        heads = b"".join(fakes[0].heads + fakes[1].heads)
        assert b"authorization" not in heads


async def test_the_one_key_goes_on_beside_keys_with_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_KEY_9", "the-one-key")
    sections = sections_with(
        tmp_path, entry("a", concurrency=1), server={"api_key_env": "CLIENT_KEY_9"}
    )
    async with rig(**sections) as (running, client, _):
        for headers in ({"authorization": "Bearer the-one-key"}, of("a")):
            assert (await client.post(CHAT, json=faked(), headers=headers)).status_code == 200
        running.gateway.metrics.catch_up()
        usage = running.gateway.admission.usage
        assert [client for (client, _), _ in usage.entries()] == ["a"]


@WORKERS
async def test_keys_are_taken_up_by_a_reload_and_what_was_used_stays(
    workers: int, tmp_path: Path
) -> None:
    sections = sections_with(tmp_path, entry("a", requests_per_minute=3), entry("b"))
    async with from_file(tmp_path, workers=workers, **sections) as (_, _, running, client, _):

        async def ask(name: str) -> int:
            urls = [f"http://127.0.0.1:{running.port}{CHAT}" for _ in range(workers)]
            answers = [await client.post(u, json=faked(), headers=of(name)) for u in urls]
            (status,) = {answer.status_code for answer in answers}
            return status

        async def reload() -> dict[str, Any]:
            url = f"http://127.0.0.1:{running.port}/admin/reload"
            answer = await client.post(url, headers=ADMIN)
            assert answer.status_code == 200
            document: dict[str, Any] = answer.json()
            await asyncio.sleep(0.1)
            return document

        assert (await ask("a"), await ask("b"), await ask("c")) == (200, 200, 401)
        sections_with(tmp_path, entry("a", requests_per_minute=workers), entry("c"))
        document = await reload()
        assert document["settings"] == ["key a", "key b", "key c"]
        assert document["needs_restart"] == []
        assert (await ask("a"), await ask("b"), await ask("c")) == (429, 401, 200)
        assert (await reload())["settings"] == []
        (tmp_path / "keys.yaml").write_text("keys: [{name: a}]")
        answer = await client.post(f"{running.url}/admin/reload", headers=ADMIN)
        assert (answer.status_code, "keys.0.hash" in answer.text) == (400, True)
        assert await ask("c") == 200


async def test_what_clients_used_is_shown_by_name_and_never_by_key(tmp_path: Path) -> None:
    sections = sections_with(
        tmp_path,
        entry("a", group="team", tokens_per_minute=5000),
        entry("b"),
        entry("c"),
        groups={"team": {"concurrency": 9}},
    )
    sections["clients"]["most_labels"] = 1
    async with rig(**sections) as (running, client, _):
        for name in "aabc":
            await client.post(CHAT, json=faked(events=4), headers=of(name))
        await eventually(running.settled)
        assert (await client.get("/metrics")).status_code == 401  # it shows their names
        paths = ("/admin/clients", "/admin/usage", "/metrics")
        document, table, text = [(await client.get(p, headers=ADMIN)).text for p in paths]
    rows = table.splitlines()
    (a, _, _) = httpx.Response(200, text=document).json()["clients"]
    assert a["usage"]["requests"] == 2
    assert a["usage"]["output_tokens"] == 8
    assert [limits["account"] for limits in a["limits"]] == ["key a", "group team"]
    assert a["limits"][0]["within_a_minute"]["requests"] == 2
    assert rows[0] == ("day,client,group,model,requests,input_tokens,cached_tokens,output_tokens")
    assert [row.split(",")[1:5] for row in rows[1:]] == [
        ["a", "team", "m", "2"],
        ["b", "", "m", "1"],
        ["c", "", "m", "1"],
    ]
    assert 'client_requests_total{client="a",model="m"} 2.0' in text
    assert 'client_requests_total{client="other",model="m"} 2.0' in text
    assert 'client_output_tokens_total{client="a",model="m"} 8.0' in text
    assert 'client_in_flight_requests{account="group team"} 0.0' in text
    assert 'client="b"' not in text
    for secret in (key_of("a"), str(entry("a")["hash"])[7:]):
        assert secret not in document + text + "".join(rows)


async def test_shares_reach_the_queue_and_a_group_with_one_counts_as_one(tmp_path: Path) -> None:
    sections = sections_with(
        tmp_path,
        entry("a", group="team"),
        entry("b", group="team", share=5),
        entry("c"),
        groups={"team": {"share": 2}},
        scheduler={"queue": {"discipline": "clients"}},
    )
    async with rig(**sections) as (running, _, _):
        discipline = running.gateway.fleet.discipline
    assert isinstance(discipline, Clients)
    assert discipline.shares == {"group team": 2.0, "key b": 5.0, "key c": 1.0}


@WORKERS
@pytest.mark.parametrize("discipline", ["fifo", "clients"])
async def test_under_fair_shares_nobody_waits_behind_anothers_backlog(
    discipline: str, workers: int, tmp_path: Path
) -> None:
    sections = sections_with(
        tmp_path,
        entry("flood"),
        entry("quiet"),
        scheduler={"prefill_depth": 1, "queue": {"discipline": discipline}},
    )
    async with rig(workers=workers, **sections) as (running, client, _):

        def post(name: str) -> asyncio.Task[httpx.Response]:
            url = f"http://127.0.0.1:{running.port}{CHAT}"
            body = faked(first_delay_s=0.2)
            # Of a prompt that is a step by itself, one is sent at a time.
            body["messages"] = [{"role": "user", "content": "word " * 5000}]
            return asyncio.create_task(client.post(url, json=body, headers=of(name)))

        flood = [post("flood") for _ in range(40)]
        await eventually(lambda: running.gateway.fleet.scheduler.queued >= 30)
        assert (await post("quiet")).status_code == 200
        in_front = sum(task.done() for task in flood)
        assert {task.status_code for task in await asyncio.gather(*flood)} == {200}
        assert in_front <= 15 if discipline == "clients" else in_front >= 38
        await eventually(lambda: running.settled() and no_charge_is_left(running))
