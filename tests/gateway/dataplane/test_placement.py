"""The queue: who waits, who is next, who leaves, and what each of them is told."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from hetero_gateway.core.types import InstanceId
from tests.core.builders import Changed
from tests.fakes.running import (
    FAST,
    Rig,
    RunningGateway,
    config_for,
    eventually,
    rig,
    running_gateway,
)
from tests.fakes.vllm import FakeInstance, fake_instances

CHAT = "/v1/chat/completions"


def chat(stream: bool = True, **fake: object) -> dict[str, object]:
    # So long that one of them is all that an instance is given to begin with, and exact.
    return {"model": "m", "prompt": [1] * 5000, "stream": stream, "fake": fake}


def fakes_of(count: int) -> list[FakeInstance]:
    return [FakeInstance(max_model_len=32768) for _ in range(count)]


def narrow(**sections: Any) -> dict[str, Any]:
    """For equal instances that take one request without a first token at a time."""
    scheduler = {"prefill_depth": 1, "queue": sections.pop("queue", {})}
    scheduler |= sections.pop("scheduler", {})
    return {"profiles": (FAST,), "scheduler": scheduler} | sections


@asynccontextmanager
async def serving(
    fakes: int | list[FakeInstance] = 1, *, wide: bool = False, **sections: Any
) -> AsyncIterator[Rig]:
    """A narrow gateway, or a wide one; at the end nothing is left in it."""
    there = fakes_of(fakes) if isinstance(fakes, int) else fakes
    async with rig(there, **(sections if wide else narrow(**sections))) as made:
        yield made
        await eventually(made.running.settled)
        await eventually(lambda: len(made.running.gateway.dataplane.open_exchanges) == 0)
        await eventually(lambda: made.running.gateway.placement.idle)


def waiting(running: RunningGateway) -> int:
    return running.gateway.fleet.scheduler.queued


async def occupy(
    client: httpx.AsyncClient, fake: FakeInstance, seconds: float = 0.4
) -> asyncio.Task[httpx.Response]:
    """A stream whose first token takes so long."""
    before = fake.open
    task = asyncio.create_task(client.post(CHAT, json=chat(first_delay_s=seconds)))
    await eventually(lambda: fake.open == before + 1)
    return task


async def queued(
    running: RunningGateway, client: httpx.AsyncClient, name: str = "waits"
) -> asyncio.Task[httpx.Response]:
    """A request of this id that waits."""
    before = waiting(running)
    post = client.post(CHAT, json=chat(), headers={"x-request-id": name})
    task = asyncio.create_task(post)
    await eventually(lambda: waiting(running) == before + 1)
    return task


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def named(fake: FakeInstance) -> list[str]:
    """The ids of the requests that an instance got, in order."""
    ids = []
    for head in fake.heads:
        line = next(x for x in head.split(b"\r\n") if x.startswith(b"x-request-id: "))
        ids.append(line.split(b": ")[1].decode())
    return ids


async def test_a_request_waits_for_room_and_is_served_in_turn() -> None:
    async with serving() as (running, client, fakes):
        first = await occupy(client, fakes[0])
        tasks = [await queued(running, client, f"r{i}") for i in range(4)]
        assert fakes[0].requests == 1
        assert running.gateway.placement.oldest_wait_s() > 0
        answers = await asyncio.gather(first, *tasks)
        assert [answer.status_code for answer in answers] == [200] * 5
        assert named(fakes[0])[1:] == ["r0", "r1", "r2", "r3"]
        decisions = (await client.get("/admin/decisions")).json()["decisions"]
        late = next(d for d in decisions if d["request_id"] == "r0")
        assert late["waited_s"] > 0.1
        assert "s in the queue: no other instance can take the request" in late["reason"]


async def test_a_first_token_makes_room_before_the_stream_ends() -> None:
    async with serving() as (_, client, fakes):
        long = chat(first_delay_s=0.2, events=20, delay_s=0.1)
        stream = asyncio.create_task(client.post(CHAT, json=long))
        await eventually(lambda: fakes[0].open == 1)
        begun_s = time.monotonic()
        assert (await client.post(CHAT, json=chat(events=1))).status_code == 200
        assert 0.1 < time.monotonic() - begun_s < 1.5
        assert not stream.done()
        assert (await stream).status_code == 200


async def test_plain_requests_do_not_hold_their_place_until_they_end() -> None:
    # Nobody sees their first token; the scheduler predicts it (35 ms on this profile, idle).
    async with serving() as (_, client, fakes):
        slow = asyncio.create_task(client.post(CHAT, json=chat(False, first_delay_s=3)))
        await eventually(lambda: fakes[0].open == 1)
        begun_s = time.monotonic()
        assert (await client.post(CHAT, json=chat(False))).status_code == 200
        assert time.monotonic() - begun_s < 2
        assert not slow.done()
        await slow


async def test_a_client_that_leaves_the_queue_is_never_sent_on() -> None:
    async with serving() as (running, client, fakes):
        first = await occupy(client, fakes[0])
        leaving = await queued(running, client, "gone")
        staying = await queued(running, client)
        leaving.cancel()
        await eventually(lambda: waiting(running) == 1)
        assert not first.done()
        assert (await first).status_code == (await staying).status_code == 200
        assert "gone" not in named(fakes[0])
        text = await running.metrics()
        assert 'outcome="client_disconnected"' in text
        assert "hetero_gateway_queue_depth 0.0" in text


async def test_a_full_queue_is_429_with_retry_after_in_the_openai_client() -> None:
    async with serving(queue={"max_requests": 1}) as (running, client, fakes):
        first = await occupy(client, fakes[0], 2.0)
        second = await queued(running, client)
        base_url = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as once:
            with pytest.raises(openai.RateLimitError) as caught:
                await once.chat.completions.create(model="m", messages=[])
        assert caught.value.code == "queue_full"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        # Its own retries, after what we told it, are served in the end.
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=5) as patient:
            answer = await patient.chat.completions.create(model="m", messages=[])
        assert answer.choices
        assert (await first).status_code == (await second).status_code == 200
        assert 'queue_rejections_total{reason="queue_full"}' in await running.metrics()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "limit"),
    [
        (1, {"queue": {"most_wait_s": 1}}),
        (2, {"queue": {"most_wait_s": 1}}),
        (1, {"scheduler": {"slo": {"ttft_s": 1}}}),
        (2, {"scheduler": {"slo": {"models": {"m": {"ttft_s": 1}}}}}),
    ],
)
async def test_of_200_at_once_who_would_wait_too_long_hears_so_at_once(
    workers: int, limit: dict[str, Any]
) -> None:
    async with serving(workers=workers, **limit) as (running, client, fakes):
        held = await occupy(client, fakes[0], 3)
        posts = [client.post(CHAT, json=chat(first_delay_s=0.05)) for _ in range(200)]
        tasks = [asyncio.create_task(post) for post in posts]
        # While nobody can be served, all but those who wait have their answer.
        await eventually(lambda: sum(t.done() for t in tasks) + waiting(running) == 200)
        assert not held.done()
        let_in = waiting(running)
        refused = [task.result() for task in tasks if task.done()]
        answers = await asyncio.gather(held, *tasks)
        assert 1 <= let_in < 100
        assert len(refused) == 200 - let_in
        assert {error_of(answer) for answer in refused} == {(429, "wait_too_long")}
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
        assert sum(answer.status_code == 200 for answer in answers) == let_in + 1
        await eventually(running.settled)
        text = await running.metrics()
        assert f'queue_rejections_total{{reason="wait_too_long"}} {200 - let_in}.0' in text


async def test_a_wait_that_is_too_long_is_429_and_leaves_the_queue() -> None:
    async with serving(queue={"timeout_s": 0.15}) as (running, client, fakes):
        first = await occupy(client, fakes[0], 1.0)
        begun_s = time.monotonic()
        response = await client.post(CHAT, json=chat())
        assert 0.1 < time.monotonic() - begun_s < 0.9
        assert error_of(response) == (429, "queue_timeout")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert waiting(running) == 0
        assert (await first).status_code == 200
        assert fakes[0].requests == 1
        assert 'queue_rejections_total{reason="queue_timeout"} 1.0' in await running.metrics()


async def test_the_total_time_out_counts_while_waiting() -> None:
    async with serving(timeouts={"total_s": 0.3}) as (running, client, fakes):
        # Who is sent on holds the instance until its own time is over, when that of all is.
        posts = [client.post(CHAT, json=chat(hang=True)) for _ in range(8)]
        answers = await asyncio.gather(*posts)
        assert [error_of(answer) for answer in answers] == [(504, "upstream_timeout")] * 8
        assert fakes[0].requests < 8
        assert 'backend="",model="m",outcome="timed_out"' in await running.metrics()


async def test_what_waits_goes_to_an_instance_that_comes_up() -> None:
    fakes = fakes_of(2)
    await fakes[1].start()
    await fakes[1].kill()
    async with serving(fakes) as (running, client, _):
        first = await occupy(client, fakes[0], 2.0)
        second = await queued(running, client)
        await fakes[1].start()
        answer = await second
        assert answer.headers["x-hetero-gateway-instance"] == "i1"
        assert not first.done()
        await first


async def test_what_waits_goes_to_an_instance_that_is_added_or_undrained() -> None:
    (late,) = fakes_of(1)
    await late.start()
    async with serving(2) as (running, client, fakes):
        await client.patch("/admin/instances/i1", json={"draining": True})
        first = await occupy(client, fakes[0], 2.0)
        second = asyncio.create_task(client.post(CHAT, json=chat(first_delay_s=2.0)))
        await eventually(lambda: waiting(running) == 1)
        await client.patch("/admin/instances/i1", json={"draining": False})
        await eventually(lambda: fakes[1].open == 1)
        third = await queued(running, client)
        entry = {"id": "late", "base_url": late.url, "profile": FAST}
        await client.post("/admin/instances", json=entry)
        assert (await third).headers["x-hetero-gateway-instance"] == "late"
        await asyncio.gather(first, second)
    await late.close()


async def test_a_removed_instance_makes_what_waited_for_it_unavailable() -> None:
    async with serving() as (running, client, fakes):
        first = await occupy(client, fakes[0])
        second = await queued(running, client)
        await client.delete("/admin/instances/i0")
        assert error_of(await second) == (404, "model_not_found")
        assert (await first).status_code == 200


async def test_with_the_last_instance_down_the_queue_is_503_at_once() -> None:
    async with serving() as (running, client, fakes):
        first = asyncio.create_task(client.post(CHAT, json=chat(hang=True)))
        await eventually(lambda: fakes[0].open == 1)
        second = await queued(running, client)
        await fakes[0].kill()
        answers = await asyncio.gather(first, second)
        assert error_of(answers[0]) == (502, "upstream_error")
        assert error_of(answers[1]) == (503, "no_healthy_instance")
        assert answers[1].headers["retry-after"]


async def test_a_retry_waits_at_the_head_even_of_a_full_queue_and_holds_nobody_up() -> None:
    async with serving(2, queue={"max_requests": 2}) as (running, client, fakes):
        await client.patch("/admin/instances/i0", json={"draining": True})
        named_headers = {"x-request-id": "unlucky"}
        unlucky = asyncio.create_task(
            client.post(CHAT, json=chat(hang=True), headers=named_headers)
        )
        await eventually(lambda: fakes[1].open == 1)
        await client.patch("/admin/instances/i0", json={"draining": False})
        held = await occupy(client, fakes[0], 0.8)
        tasks = [await queued(running, client, f"r{i}") for i in range(2)]
        fakes[1].reset_connections()
        # It waits for i0, in front of all; the others find i1 free once it is out of their way.
        answers = await asyncio.gather(*tasks)
        assert not held.done()
        assert waiting(running) == 1
        answers.append(await held)
        assert [answer.status_code for answer in answers] == [200] * 3
        # It hangs there, too.
        await eventually(lambda: named(fakes[0])[1:] == ["unlucky"])
        assert named(fakes[1]) == ["unlucky", "r0", "r1"]
        unlucky.cancel()


async def test_a_bug_in_a_placement_is_500_for_that_request_alone() -> None:
    async with serving() as (running, client, fakes):
        scheduler = running.gateway.fleet.scheduler
        policy = scheduler.policy

        def broken(view: Any, rng: Any) -> Any:
            choice = policy.choose(view, rng)
            if choice is not None and view.request.prompt_tokens == 13:
                raise OverflowError("int too large to convert to float")
            return choice

        scheduler.set_policy(Changed(policy, choose=broken))  # type: ignore[arg-type]
        unlucky = {"model": "m", "prompt": [1] * 13, "stream": True}
        # Where it is placed at once, and where it waits in front of another.
        assert error_of(await client.post(CHAT, json=unlucky)) == (500, "internal_error")
        held = await occupy(client, fakes[0])
        posts = [client.post(CHAT, json=body) for body in (unlucky, chat())]
        tasks = []
        for i, post in enumerate(posts):
            tasks.append(asyncio.create_task(post))
            if i == 0:
                await eventually(lambda: waiting(running) == 1)
        answers = await asyncio.gather(*tasks)
        assert error_of(answers[0]) == (500, "internal_error")
        assert answers[1].status_code == 200
        assert (await held).status_code == 200


async def test_light_work_does_not_wait() -> None:
    async with serving() as (_, client, fakes):
        first = await occupy(client, fakes[0], 1.0)
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        assert not first.done()
        await first


async def test_explain_says_that_a_request_would_wait_and_why() -> None:
    async with serving(2) as (running, client, fakes):
        post = client.post
        streams = [asyncio.create_task(post(CHAT, json=chat(first_delay_s=2))) for _ in range(2)]
        await eventually(lambda: [fake.open for fake in fakes] == [1, 1])
        document = (await client.get("/admin/explain?prompt_tokens=100")).json()
        assert document["waits"] is True
        assert document["chosen"] in ("i0", "i1")
        assert document["reason"].startswith("It would wait: no instance has room now; ")
        rows = document["candidates"]
        assert [row["room"] for row in rows] == [False, False]
        parts = ("latency_s", "delay_s", "memory_price_s", "late_price_s")
        assert all(row["cost_s"] == pytest.approx(sum(row[p] for p in parts)) for row in rows)
        streams.append(asyncio.create_task(client.post(CHAT, json=chat())))
        await eventually(lambda: waiting(running) == 1)
        status = (await client.get("/admin/instances")).json()
        assert status["queue"]["waiting"] == 1
        assert 0 <= status["queue"]["oldest_wait_s"] < 5
        assert [row["waiting_first_token"] for row in status["instances"]] == [1, 1]
        assert "hetero_gateway_queue_depth 1.0" in await running.metrics()
        await asyncio.gather(*streams)


async def test_without_profiles_the_reason_counts_sequences() -> None:
    async with serving(2, wide=True, profiles=(None,)) as (_, client, _):
        document = (await client.get("/admin/explain?prompt_tokens=100")).json()
        assert "it would have 1.00 sequences for its weight, the fewest" in document["reason"]
        rows = document["candidates"]
        assert [(row["latency_s"], row["cost_s"], row["room"]) for row in rows] == [
            (None, 1.0, True)
        ] * 2


async def test_waiting_counts_in_ttft_and_duration_and_not_in_the_overhead() -> None:
    async with serving() as (running, client, fakes):
        first = await occupy(client, fakes[0], 0.5)
        second = asyncio.create_task(client.post(CHAT, json=chat(events=1)))
        await asyncio.gather(first, second)
        await eventually(running.settled)
        sums = {
            line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1])
            for line in (await running.metrics()).splitlines()
            if line.startswith("hetero_gateway_") and "_sum" in line
        }
    assert sums["hetero_gateway_time_to_first_token_seconds_sum"] > 0.8
    assert sums["hetero_gateway_request_duration_seconds_sum"] > 0.8
    assert sums["hetero_gateway_queue_wait_seconds_sum"] > 0.3
    assert sums["hetero_gateway_overhead_seconds_sum"] < 0.2


@pytest.mark.parametrize("policy", ["min-max", "round-robin"])
async def test_policies_that_place_at_once_have_no_queue_and_no_timer(policy: str) -> None:
    async with serving(scheduler={"policy": policy}) as (running, client, fakes):
        streams = [await occupy(client, fakes[0], 0.3) for _ in range(3)]
        assert waiting(running) == 0
        assert running.gateway.placement.idle
        document = (await client.get("/admin/instances")).json()
        assert document["queue"] is None
        assert document["instances"][0]["waiting_first_token"] is None
        await asyncio.gather(*streams)


@pytest.mark.parametrize("policy", ["finish-time", "min-max", "round-robin"])
async def test_the_speed_factor_follows_what_the_streams_show_whether_a_policy_asks_for_it_or_not(
    policy: str,
) -> None:
    # The profile says about 12 ms a step; the fake makes one in 60 ms.
    async with serving(wide=True, scheduler={"policy": policy}) as (running, client, _):
        body = chat(events=60, delay_s=0.06)
        streams = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(3)]
        scheduler, there = running.gateway.fleet.scheduler, InstanceId("i0")
        await eventually(lambda: (scheduler.members.snapshot(there).speed_factor or 0) > 2)
        if policy == "finish-time":
            row = (await client.get("/admin/instances")).json()["instances"][0]
            assert row["speed_factor"] > 2
        await asyncio.gather(*streams)
        await eventually(lambda: running.gateway.placement.idle)
        assert scheduler.members.snapshot(there).waiting == 0


async def test_a_request_whose_progress_nobody_sees_spoils_no_observation() -> None:
    async with serving(wide=True, scheduler={"policy": "min-max"}) as (running, client, _):
        plain = chat(stream=False, first_delay_s=3.0)
        stream = chat(events=60, delay_s=0.03)
        await asyncio.gather(*(client.post(CHAT, json=body) for body in (plain, stream)))
        observations = running.gateway.fleet.scheduler.members.table[InstanceId("i0")].observations
        # The stream's two looks were both while the plain one was there, but for a first moment.
        assert len(observations.steps) <= 1


async def test_the_speed_factor_follows_what_plain_answers_take() -> None:
    # Three tokens take half a second; by the profile a tenth of that.
    async with serving(wide=True) as (running, client, _):
        scheduler = running.gateway.fleet.scheduler
        for _ in range(4):
            body = {"model": "m", "prompt": [1] * 50, "fake": {"first_delay_s": 0.5}}
            assert (await client.post(CHAT, json=body)).status_code == 200
        assert scheduler.members.snapshot(InstanceId("i0")).speed_factor > 2


async def test_answers_shorter_than_an_interval_do_not_look_like_a_hang() -> None:
    # Always one or two streams, at the speed of the profile, and none through a whole second.
    async with serving(wide=True) as (running, client, _):
        scheduler = running.gateway.fleet.scheduler
        there = InstanceId("i0")
        body = chat(events=20, delay_s=0.012)
        streams = []
        for _ in range(16):
            streams.append(asyncio.create_task(client.post(CHAT, json=body)))
            await asyncio.sleep(0.15)
        assert scheduler.members.snapshot(there).speed_factor < 1.5
        await asyncio.gather(*streams)


async def test_finished_lengths_are_learnt() -> None:
    async with serving(wide=True) as (running, client, _):
        scheduler = running.gateway.fleet.scheduler
        before = scheduler.residual.of("m").plain[0]
        for _ in range(32):  # the table is made anew at each 32nd
            await client.post(CHAT, json=chat(events=40))
        assert scheduler.residual.of("m").plain[0] < before


async def test_the_end_of_the_gateway_serves_the_queue_or_answers_503() -> None:
    async with fake_instances(1, max_model_len=32768) as fakes:
        client = httpx.AsyncClient(timeout=30)
        async with running_gateway(config_for(fakes, **narrow())) as running:
            url = f"{running.url}{CHAT}"
            first = asyncio.create_task(client.post(url, json=chat(first_delay_s=0.3)))
            await eventually(lambda: fakes[0].open == 1)
            served = asyncio.create_task(client.post(url, json=chat(first_delay_s=30)))
            await eventually(lambda: waiting(running) == 1)
            unserved = asyncio.create_task(client.post(url, json=chat()))
            await eventually(lambda: waiting(running) == 2)
        assert (await first).status_code == 200
        answer = await unserved
        assert error_of(answer) == (503, "shutting_down")
        assert answer.headers["retry-after"]
        (outcome,) = await asyncio.gather(served, return_exceptions=True)
        assert isinstance(outcome, httpx.HTTPError) or outcome.status_code == 200  # type: ignore[union-attr]
        await client.aclose()
        assert running.settled()
        assert running.gateway.placement.idle
