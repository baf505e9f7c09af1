"""Instances that fail, seen by clients: real sockets, and time that jumps (fakes/clock.py)."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import Any

import httpx
import openai
import pytest

from hetero_gateway.core.types import InstanceId
from hetero_gateway.lab.load.client import LoadClient, parse_target
from tests.fakes.running import CHAT, FAST, RunningGateway, chat, counted, eventually, faked, rig

EQUAL = (FAST,)
# What a good instance takes for an answer.
WORKS = {"first_delay_s": 0.5}
RESET = {"die": "before_head"}
GARBAGE = {"garbage": "\x00\x01 not HTTP\r\n\r\n"}
FAULTS = {
    "500": {"status": 500},
    "reset": RESET,
    "garbage": GARBAGE,
    "empty": {"empty": "bytes"},
    "empty chunks": {"empty": "chunks"},
    "503": {"status": 503},
    "429": {"status": 429},
}


class Clients:
    """So many at once, each with one request after the other; what came of them."""

    def __init__(self, running: RunningGateway) -> None:
        self.statuses: Counter[int] = Counter()
        self._url = running.url
        self._sent = 0

    @property
    def share_of_good(self) -> float:
        return self.statuses[200] / self.statuses.total()

    async def send(self, count: int, *, at_once: int = 8, **fake: object) -> None:
        client = LoadClient(parse_target(self._url), CHAT, stream=False, timeout_s=900)
        async with contextlib.aclosing(client):
            await asyncio.gather(*(self._one(client, count, fake) for _ in range(at_once)))
        self._sent = 0

    async def _one(self, client: LoadClient, count: int, fake: dict[str, Any]) -> None:
        while self._sent < count:
            self._sent += 1
            body = json.dumps(chat(f"question {self._sent}", fake=fake))
            reply = await client.post(body.encode())
            assert reply.failure is None
            self.statuses[0 if reply.status == 200 and not reply.tail else reply.status] += 1


@pytest.mark.parametrize(
    ("fault", "policy"),
    [
        *((fault, "finish-time") for fault in FAULTS),
        *(("500", policy) for policy in ("min-max", "least-requests", "round-robin")),
    ],
)
async def test_of_two_equal_instances_the_one_that_fails_at_once_gets_little(
    fault: str, policy: str
) -> None:
    async with rig(2, profiles=EQUAL, scheduler={"policy": policy}) as (running, _, fakes):
        fakes[0].fault = FAULTS[fault]
        clients = Clients(running)
        await clients.send(240, **WORKS)
        assert clients.share_of_good >= 0.94
        if fault != "empty chunks":  # its head had reached the client
            assert clients.share_of_good == 1
        assert fakes[0].requests <= 20
        assert running.settled()


async def test_one_that_fails_now_and_then_does_not_draw_the_requests() -> None:
    """Too few failures for an ejection: what failed stays charged."""
    async with rig(2, profiles=EQUAL) as (running, _, fakes):
        clients = Clients(running)
        real = fakes[0]._post
        asked = 0

        async def now_and_then(request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            nonlocal asked
            asked += 1
            fakes[0].fault = {"status": 500} if asked % 3 == 0 else {}
            return await real(request, writer)

        fakes[0]._post = now_and_then  # type: ignore[method-assign]
        await clients.send(240, **WORKS)
        assert clients.share_of_good == 1
        assert fakes[0].requests < 0.75 * (fakes[0].requests + fakes[1].requests)


async def test_one_that_hangs_is_ejected_when_its_time_outs_come() -> None:
    async with rig(2, profiles=EQUAL, timeouts={"first_byte_s": 3}) as (running, _, fakes):
        fakes[0].fault = {"hang": True}
        clients = Clients(running)
        await clients.send(400, **WORKS)
        assert clients.share_of_good >= 0.95
        assert fakes[0].requests <= 20
        assert set(clients.statuses) == {200, 504}


async def test_a_good_health_alone_brings_nobody_back_and_one_request_does() -> None:
    scheduler = {"policy": "least-requests"}
    async with rig(2, profiles=EQUAL, scheduler=scheduler) as (running, _, fakes):
        fakes[0].fault = FAULTS["500"]
        clients = Clients(running)
        await clients.send(24, **WORKS)  # less than 2 s
        failed = fakes[0].requests
        assert await standing(running, "i0") == "ejected"
        fakes[0].fault = {}
        await asyncio.sleep(60)
        assert await standing(running, "i0") == "half-open"
        assert fakes[0].requests == failed
        await clients.send(8, **WORKS)
        assert fakes[0].requests == failed + 1  # eight at once, and one of them to it
        assert await standing(running, "i0") == "recovering"
        await asyncio.sleep(10.1)
        assert await standing(running, "i0") == "open"
        before = [f.requests for f in fakes]
        await clients.send(80, **WORKS)
        gained = [f.requests - b for f, b in zip(fakes, before, strict=True)]
        assert gained == [40, 40]
        assert clients.share_of_good == 1


async def test_a_stream_that_begins_is_enough_to_come_back() -> None:
    async with rig(2, profiles=EQUAL) as (running, client, fakes):
        fakes[0].fault = FAULTS["reset"]
        clients = Clients(running)
        await clients.send(40, **WORKS)
        fakes[0].fault = {}
        await asyncio.sleep(60)
        slow = faked(events=100, delay_s=1)
        answers = [asyncio.ensure_future(client.post(CHAT, json=slow)) for _ in range(4)]
        await asyncio.sleep(5)
        assert await standing(running, "i0") == "recovering"
        await asyncio.gather(*answers)


@pytest.mark.parametrize("beside", ["nothing", "the same", "short ones"])
@pytest.mark.parametrize("trial", [{"first_delay_s": 15}, {"first_delay_s": 600}, {"hang": True}])
async def test_however_long_a_trial_takes_it_is_back_within_three_seconds(
    trial: dict[str, Any], beside: str
) -> None:
    often = {"probe_interval_s": 2, "probe_timeout_s": 2}  # as by default
    async with rig(2, profiles=EQUAL, health=often) as (running, client, fakes):
        fakes[0].fault = FAULTS["500"]
        await Clients(running).send(24, **WORKS)
        fakes[0].fault = {}
        await asyncio.sleep(60)
        assert await standing(running, "i0") == "half-open"
        before = fakes[0].requests
        long = [asyncio.ensure_future(client.post(CHAT, json=chat("long", fake=trial)))]
        await eventually(lambda: fakes[0].requests > before)
        began_s = time.monotonic()
        while await standing(running, "i0") != "recovering":
            await asyncio.sleep(0.1)
            if beside == "the same":
                long.append(asyncio.ensure_future(client.post(CHAT, json=chat(fake=trial))))
            elif beside == "short ones":
                await client.post(CHAT, json=chat(fake=WORKS))
        assert time.monotonic() - began_s <= 3
        assert fakes[0].requests - before <= 3
        for request in long:
            request.cancel()


async def test_of_instances_that_all_fail_half_are_ejected_and_clients_get_their_words() -> None:
    async with rig(4, profiles=EQUAL) as (running, client, fakes):
        for fake in fakes:
            fake.fault = {"status": 500, "body": '{"error": "EngineDeadError"}'}
        for i in range(60):
            answer = await client.post(CHAT, json=chat(f"question {i}"))
            assert answer.status_code == 500
            assert answer.text == '{"error": "EngineDeadError"}'
        shown = [await standing(running, f"i{i}") for i in range(4)]
        assert shown.count("ejected") <= 2
        assert running.gateway.fleet.ready()


async def test_when_the_other_one_goes_down_an_ejected_one_is_asked_again() -> None:
    async with rig(2, profiles=EQUAL) as (running, _, fakes):
        fakes[0].fault = FAULTS["500"]
        clients = Clients(running)
        await clients.send(24, **WORKS)  # less than 2 s
        assert await standing(running, "i0") == "ejected"
        fakes[0].fault = {}
        await fakes[1].kill()
        await eventually(lambda: not running.gateway.fleet.instances[InstanceId("i1")].up)
        assert await standing(running, "i0") == "recovering"
        await clients.send(40, at_once=8, **WORKS)
        assert clients.share_of_good == 1


@pytest.mark.parametrize("poison", [{"status": 500}, RESET, GARBAGE, {"empty": "bytes"}])
async def test_a_poisonous_request_in_a_loop_is_tried_a_few_times_and_ejects_nobody(
    poison: dict[str, Any],
) -> None:
    async with rig(3, profiles=EQUAL) as (running, client, fakes):
        for i in range(40):
            before = sum(fake.requests for fake in fakes)
            answer = await client.post(CHAT, json=chat(f"poison {i}", fake=poison))
            tries = sum(fake.requests for fake in fakes) - before
            most = 2 if "status" in poison else 3
            assert 1 <= tries <= most
            assert answer.status_code >= 500 or not answer.content
            if tries > 1 and answer.status_code >= 500:
                assert answer.headers["x-should-retry"] == "false"
            await asyncio.sleep(2)  # within the budget
        assert {await standing(running, f"i{i}") for i in range(3)} == {"open"}
        clients = Clients(running)
        await clients.send(24)
        assert clients.share_of_good == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_where_all_engines_are_busy_the_client_gets_ones_own_answer(status: int) -> None:
    async with rig(2, profiles=EQUAL) as (running, client, fakes):
        busy = {"status": status, "body": '{"object": "busy"}', "head": "retry-after: 7\r\n"}
        answer = await client.post(CHAT, json=faked(**busy))
        assert [fake.requests for fake in fakes] == [1, 1]
        assert (answer.status_code, answer.text) == (status, '{"object": "busy"}')
        assert answer.headers["retry-after"] == "7"
        assert "x-should-retry" not in answer.headers
        # They are spared now, but for what nobody else could take: one attempt and no more.
        await client.post(CHAT, json=faked(**busy))
        assert sum(fake.requests for fake in fakes) == 3
        assert (await client.post(CHAT, json=chat())).status_code == 200
        text = await running.metrics()
        assert 'hetero_gateway_retries_total{reason="busy"} 1.0' in text
        assert counted(text, "instance_ejections_total") == 0
        assert running.settled()


async def test_a_long_error_and_other_statuses_pass_at_once() -> None:
    async with rig(2, profiles=EQUAL) as (_, client, fakes):
        for status, body in [(500, "x" * 70_000), (501, "{}"), (504, "{}"), (404, "{}")]:
            before = sum(fake.requests for fake in fakes)
            answer = await client.post(CHAT, json=faked(status=status, body=body))
            assert (answer.status_code, answer.text) == (status, body)
            assert sum(fake.requests for fake in fakes) == before + 1


@pytest.mark.parametrize("fault", [{"status": 500}, RESET])
async def test_the_openai_clients_retries_do_not_multiply_with_ours(fault: dict[str, Any]) -> None:
    async with rig(3, profiles=EQUAL) as (running, _, fakes):
        for fake in fakes:
            fake.fault = fault
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k") as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=[])
        assert 2 <= sum(fake.requests for fake in fakes) <= 3


async def test_explain_admin_and_metrics_show_who_is_ejected_and_why() -> None:
    async with rig(2, profiles=EQUAL) as (running, client, fakes):
        fakes[1].fault = FAULTS["500"]
        clients = Clients(running)
        while await standing(running, "i1") != "ejected":
            await clients.send(8, **WORKS)
        shown = (await client.get("/admin/explain", params={"prompt_tokens": 9})).json()
        rows = (await client.get("/admin/instances")).json()["instances"]
        assert shown["chosen"] == "i0"
        assert [c["excluded"] for c in shown["candidates"]] == [None, "ejected"]
        assert [row["ejected"] for row in rows] == [False, True]
        assert rows[1]["ejected_reason"] == "server_error"
        assert 0 < rows[1]["ejected_for_s"] <= 60
        assert rows[1]["recent_failures"] >= 5
        assert rows[1]["up"]
        text = await running.metrics()
        assert 'hetero_gateway_instance_ejected{backend="i1"} 1.0' in text
        assert 'hetero_gateway_instance_ejected{backend="i0"} 0.0' in text
        key = 'hetero_gateway_instance_ejections_total{backend="i1",reason="server_error"}'
        assert key in text


async def test_switched_off_a_failing_instance_is_treated_as_any_other() -> None:
    off = {"ejection": {"enabled": False}}
    scheduler = {"policy": "least-requests"}
    async with rig(2, profiles=EQUAL, health=off, scheduler=scheduler) as (running, _, fakes):
        fakes[0].fault = FAULTS["500"]
        clients = Clients(running)
        await clients.send(40, **WORKS)
        assert await standing(running, "i0") == "open"
        assert fakes[0].requests > 20


async def standing(running: RunningGateway, instance_id: str) -> str:
    async with httpx.AsyncClient(base_url=running.url) as client:
        rows = (await client.get("/admin/instances")).json()["instances"]
    return next(str(row["standing"]) for row in rows if row["id"] == instance_id)
