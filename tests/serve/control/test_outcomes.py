"""A decision keeps what came of it, and a request's story has all of its attempts."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from hetero_gateway.cli import main
from hetero_gateway.gateway.records.request_log import (
    MOST_ENDED,
    ROW_OF,
    EndedRequest,
    RequestLog,
    parts_of,
)
from tests.fakes.running import CHAT, FAST, chat, eventually, rig

STREAM = {"events": 20, "delay_s": 0.02, "first_delay_s": 0.25}


async def post(client: httpx.AsyncClient, request_id: str, **fake: Any) -> httpx.Response:
    body = chat(stream="events" in fake, fake=fake)
    return await client.post(CHAT, json=body, headers={"x-request-id": request_id})


async def decisions(client: httpx.AsyncClient, query: str = "") -> list[dict[str, Any]]:
    answer = await client.get(f"/admin/decisions?candidates=false{query}")
    found: list[dict[str, Any]] = answer.json()["decisions"]
    return found


@pytest.mark.parametrize("workers", [1, 2])
async def test_what_was_predicted_stands_beside_what_came_of_it(workers: int) -> None:
    async with rig(1, workers=workers) as (running, client, _):
        await post(client, "one", **STREAM)
        await running.counted() if workers > 1 else None
        slow = asyncio.create_task(post(client, "two", first_delay_s=5))
        await eventually(lambda: len(running.gateway.dataplane.decisions) == 2)
        two, one = await decisions(client)
        assert (two["request_id"], two["outcome"]) == ("two", None)
        outcome, predicted = one["outcome"], one["predicted"]
        assert (outcome["outcome"], outcome["status"], outcome["retries"]) == ("completed", 200, 0)
        assert outcome["ttft_s"] == pytest.approx(0.25, abs=0.1)
        assert outcome["latency_s"] == pytest.approx(0.65, abs=0.2)
        assert outcome["total_s"] >= outcome["latency_s"]
        assert outcome["output_tokens"] == 20
        assert 0 < predicted["ttft_s"] < predicted["latency_s"]
        assert [d["request_id"] for d in await decisions(client, "&over=true")] == ["one"]
        assert (await slow).status_code == 200


@pytest.mark.parametrize("policy", ["min-max", "round-robin"])
async def test_where_a_policy_estimates_nothing_the_cost_model_does(policy: str) -> None:
    async with rig(2, profiles=(FAST, None), scheduler={"policy": policy}) as (_, client, _):
        for number in range(4):
            await post(client, f"r{number}")
        predicted = {d["chosen"]: d["predicted"] for d in await decisions(client)}
        assert predicted["i0"]["latency_s"] > 0
        assert all(each["ttft_s"] is None for each in predicted.values())
        assert predicted.get("i1", {"latency_s": None})["latency_s"] is None


async def test_a_requests_story_has_every_attempt_and_adds_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a/b%20#1"
    async with rig(2) as (running, client, fakes):
        fakes[0].fault = {"first_delay_s": 60}
        asked = asyncio.create_task(post(client, name, first_delay_s=0.25))
        await eventually(lambda: fakes[0].open == 1)
        await asyncio.sleep(0.5)
        await fakes[0].kill()
        assert (await asked).status_code == 200
        assert (await client.get("/admin/requests/nobody")).status_code == 404
        path = "/admin/requests/a%2Fb%2520%231"
        story = (await client.get(path)).json()
        first, second = story["attempts"]
        assert (first["chosen"], second["chosen"]) == ("i0", "i1")
        assert first["failed"]["reason"] == "reset"
        assert first["failed"]["after_s"] == pytest.approx(0.5, abs=0.2)
        assert first["outcome"] is None
        assert (second["failed"], second["outcome"]["outcome"]) == (None, "completed")
        assert {row["instance"] for row in first["candidates"]} == {"i0", "i1"}
        assert story["outcome"]["retries"] == 1
        waits = story["first_token"]
        parts = [waits[part] for part in ("queue_s", "retry_s", "network_s", "prefill_s")]
        assert sum(parts) == pytest.approx(waits["ttft_s"])
        assert waits["retry_s"] == pytest.approx(0.5, abs=0.2)
        assert waits["ttft_s"] > 0.7
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["why", name, running.url]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"request {name}: completed (HTTP 200) after ")
        assert "1 tried again" in out
        assert "it failed after 0.5" in out
        assert "PREDICTED" in out
        assert "attempts that failed" in out
        assert await asyncio.to_thread(main, ["why", name, running.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["request_id"] == name
        assert await asyncio.to_thread(main, ["why", "nobody", running.url]) == 1
        assert "Nothing is kept of the request" in capsys.readouterr().err


async def test_who_was_turned_away_is_found_too() -> None:
    async with rig(1) as (running, client, fakes):
        await fakes[0].kill()
        await eventually(lambda: not next(iter(running.gateway.fleet.instances.values())).up)
        assert (await post(client, "away")).status_code == 503
        story = (await client.get("/admin/requests/away")).json()
        assert [each["reason"] for each in story["turned_away"]] == ["unavailable"]
        assert (story["attempts"], story["outcome"]) == ([], None)


async def test_an_id_that_comes_again_has_each_time_its_own_outcome() -> None:
    async with rig(1) as (_, client, _):
        await post(client, "same", first_delay_s=1)
        await post(client, "same", first_delay_s=3)
        new, old = await decisions(client)
        assert new["outcome"]["latency_s"] == pytest.approx(3, abs=0.3)
        assert old["outcome"]["latency_s"] == pytest.approx(1, abs=0.3)


def test_memory_is_bounded_and_rows_have_their_fields() -> None:
    log = RequestLog()
    row = (b"id", 1.0, 0.25, 1.5, 2.0, 3.0, 200, None, "i0", "", True, None)
    log.add([row] * (MOST_ENDED + 5))
    assert len(list(log.newest_first())) == MOST_ENDED
    assert len(ROW_OF.__reduce__()[1]) == len(EndedRequest._fields)
    ended = EndedRequest(*row)  # type: ignore[arg-type]
    assert parts_of(ended, 0, 0.1) == (0.5, 0.0, 0.1, 0.4)
    assert parts_of(ended, 1, 9.0) == (0.25, 0.25, 0.5, 0.0)
    assert parts_of(ended._replace(first_body_at_s=None), 0, None) is None
