"""An instance that breaks off in mid-stream: the client has one stream, to its end."""

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

import httpx
import pytest

from hetero_gateway.engines.vllm import continuations
from hetero_gateway.gateway.dataplane import continuing, kept
from tests.fakes.running import CHAT, eventually, rig
from tests.fakes.vllm import FakeInstance

DIES: dict[str, Any] = {"die": "after_events", "events": 2}
GOES_ON = {"events": 3, "event_bytes": 2}


def body(**more: object) -> dict[str, Any]:
    message = {"role": "user", "content": "hello"}
    options = {"include_usage": True}
    return {"model": "m", "messages": [message], "stream": True, "stream_options": options} | more


async def read(client: httpx.AsyncClient, **more: object) -> tuple[str, list[Any]]:
    """(All that came, its events); "cut" is the last one of a response that is not complete."""
    text, events = "", []
    try:
        async with client.stream("POST", CHAT, json=body(**more)) as response:
            assert response.status_code == 200
            async for part in response.aiter_text():
                text += part
    except httpx.RemoteProtocolError:
        events = ["cut"]
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return text, [line if line == "[DONE]" else json.loads(line) for line in lines] + events


def texts(events: list[Any]) -> list[str]:
    choices = [e["choices"][0] for e in events if isinstance(e, dict) and e.get("choices")]
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


async def test_the_client_sees_one_stream_with_the_true_sums() -> None:
    async with rig(2) as (running, client, fakes):
        fakes[0].fault, fakes[1].fault = DIES, GOES_ON
        text, events = await read(client, max_tokens=20)
        assert texts(events) == ["xxxx"] * 2 + ["xx"] * 3
        assert events[-1] == "[DONE]"
        assert ": continued by i1\n\n" in text
        assert events[-2]["usage"] == {"prompt_tokens": 8, "completion_tokens": 5}
        roles = [e for e in events[:-2] if "role" in e["choices"][0]["delta"]]
        assert len(roles) == 1
        asked = json.loads(fakes[1].bodies[0])
        assert asked["messages"][1:] == [{"role": "assistant", "content": "xxxxxxxx"}]
        assert asked["continue_final_message"] is True
        assert asked["max_tokens"] == 18
        await eventually(running.settled)
        told = await running.metrics()
        assert 'hetero_gateway_streams_continued_total{result="continued"} 1.0' in told
        series = running.gateway.metrics.every_series["m", "i1"]
        assert +Counter(series.outcomes) == {"completed": 1}
        assert (series.input_tokens, series.output_tokens) == (8, 5)
        assert running.gateway.metrics.upstream_errors["i0", "reset"] == 1


@pytest.mark.parametrize("workers", [1, 2])
async def test_what_is_placed_is_the_rest_and_both_legs_are_settled(workers: int) -> None:
    async with rig(2, workers=workers) as (running, client, fakes):
        fakes[0].fault, fakes[1].fault = DIES, GOES_ON | {"delay_s": 0.05}
        asked = asyncio.create_task(read(client))
        await eventually(lambda: fakes[1].requests == 1)
        states = running.gateway.fleet.scheduler.members.table
        (rest,) = states["i1"].outstanding()
        assert rest.request.predicted_output_tokens == 256 - 2
        _, events = await asked
        assert len(texts(events)) == 5
        await eventually(running.settled)
        continued = running.gateway.metrics.streams_continued
        await eventually(lambda: continued["continued"] == 1)  # a worker says so once a second


async def test_events_of_several_tokens_are_counted_by_the_engine_that_goes_on() -> None:
    async with rig(2) as (_, client, fakes):
        fakes[0].fault = DIES | {"event_bytes": 10}  # of 2 or 3 tokens
        fakes[1].fault = GOES_ON
        _, events = await read(client, max_tokens=20)
        assert json.loads(fakes[1].bodies[0])["max_tokens"] == 15
        assert events[-2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 8}


async def test_the_rest_is_asked_for_with_the_priority_of_the_whole() -> None:
    async with rig(2, scheduler={"engine_priorities": {"interactive": -1}}) as (_, client, fakes):
        fakes[0].fault, fakes[1].fault = DIES, GOES_ON
        _, events = await read(client)
        assert len(texts(events)) == 5
        first, rest = json.loads(fakes[0].bodies[0]), json.loads(fakes[1].bodies[0])
        assert first["priority"] == rest["priority"] == -1
        assert rest["continue_final_message"] is True


async def test_what_turns_out_to_be_all_of_its_tokens_is_not_continued() -> None:
    async with rig(2) as (running, client, fakes):
        fakes[0].fault = DIES | {"event_bytes": 10}
        _, events = await read(client, max_tokens=5)
        assert [len(fake.bodies) for fake in fakes] == [1, 0]
        assert events[-1] == "cut"
        await eventually(running.settled)


async def test_an_instance_that_dies_ahead_of_the_first_token_costs_nothing() -> None:
    async with rig(2) as (_, client, fakes):
        fakes[0].fault = {"die": "after_head"}
        _, events = await read(client)
        assert len(texts(events)) == 3
        assert events[-1] == "[DONE]"
        assert "continue_final_message" not in json.loads(fakes[1].bodies[0])


async def test_it_goes_on_a_second_time_if_something_came_of_the_first() -> None:
    async with rig(3) as (running, client, fakes):
        for fake in fakes:
            fake.fault = DIES | {"events": 10}
        task = asyncio.create_task(read(client))
        await eventually(lambda: sum(fake.requests for fake in fakes) == 2)
        for fake in fakes:
            fake.fault = {"events": 10}  # for whom comes now
        _, events = await task
        assert len(texts(events)) == 30
        assert events[-1] == "[DONE]"
        assert running.gateway.metrics.streams_continued["continued"] == 2


async def test_a_prompt_under_which_two_broke_off_is_not_given_to_a_third() -> None:
    async with rig(3) as (running, client, fakes):
        for fake in fakes:
            fake.fault = DIES
        _, events = await read(client)
        assert sum(fake.requests for fake in fakes) == 2
        assert events[-2:] == [{"error": events[-2]["error"]}, "cut"]
        assert len(texts(events)) == 4
        assert running.gateway.metrics.streams_continued == {"continued": 1, "not_continuable": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_kills_instances_is_tried_once_more_and_then_refused(
    stream: bool,
) -> None:
    async with rig(4) as (_, client, fakes):

        async def die(fake: FakeInstance) -> None:
            await eventually(lambda: fake.open == 1)
            await asyncio.sleep(1)
            await fake.kill()

        for fake in fakes:
            fake.fault = {"events": 4, "delay_s": 10, "first_delay_s": 10}
        killing = [asyncio.create_task(die(fake)) for fake in fakes]
        poison = body(stream=stream)
        for died in (2, 3, 3):
            with contextlib.suppress(httpx.RemoteProtocolError):
                answer = await client.post(CHAT, json=poison)
            assert sum(fake.requests for fake in fakes) == died
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "deadly_request"
        left = next(fake for fake in fakes if not fake.requests)
        left.fault = {}
        for task in killing:
            task.cancel()
        assert (await client.post(CHAT, json=poison | {"user": "another"})).status_code == 200
        await asyncio.sleep(301)
        assert (await client.post(CHAT, json=poison)).status_code == 200


@pytest.mark.parametrize(
    "second",
    [
        {"status": 400, "body": '{"error": {"message": "context"}}'},
        {"status": 500, "body": "{}"},
        {"status": 429, "body": "{}"},
        {"die": "before_head"},
        {"end": "error", "events": 0},
    ],
)
async def test_where_nobody_goes_on_the_stream_ends_with_an_error(second: dict[str, Any]) -> None:
    async with rig(2) as (running, client, fakes):
        fakes[0].fault, fakes[1].fault = DIES, second
        _, events = await read(client)
        assert len(texts(events)) == 2
        assert set(events[-2]) == {"error"}
        assert events[-1] == "cut"
        await eventually(running.settled)
        running.gateway.metrics.catch_up()
        counts = [
            +Counter(series.outcomes) for series in running.gateway.metrics.every_series.values()
        ]
        assert [each for each in counts if each] == [{"upstream_error": 1}]


@pytest.mark.parametrize("continues", ["text-safe", "off"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("cut", ["finish", "usage", "done"])
async def test_a_stream_that_lacks_its_end_alone_is_ended(
    cut: str, workers: int, continues: str
) -> None:
    sections = {"continue_streams": continues}
    async with rig(2, workers=workers, scheduler=sections) as (running, client, fakes):
        fakes[0].fault = {"cut": cut, "usage": "continuous"}
        for more in ({}, {"odd": 1}):  # what could not be continued, too
            _, events = await read(client, **more)
            assert texts(events) == ["xxxx"] * 3
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"] == []
            assert events[-2]["usage"] == {"prompt_tokens": 10, "completion_tokens": 3}
            assert sum(event == "[DONE]" for event in events) == 1
        await eventually(running.settled)
        assert fakes[1].requests == 0
        outcomes = running.gateway.metrics.counts("m", "i0").outcomes
        await eventually(lambda: outcomes["completed"] == 2)
        assert sum(outcomes.values()) == 2


async def test_a_second_leg_that_lacks_its_end_alone_is_ended() -> None:
    async with rig(2) as (running, client, fakes):
        fakes[0].fault, fakes[1].fault = DIES, GOES_ON | {"cut": "usage"}
        _, events = await read(client)
        assert texts(events) == ["xxxx"] * 2 + ["xx"] * 3
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"] == {"prompt_tokens": 8, "completion_tokens": 5}
        await eventually(running.settled)
        assert running.gateway.metrics.streams_continued == {"continued": 1}


async def test_a_stream_that_its_engine_gave_up_is_not_ended_for_it() -> None:
    async with rig(1) as (_, client, fakes):
        fakes[0].fault = {"end": "abort", "cut": "finish"}
        _, events = await read(client)
        assert events[-1] == "cut"
        assert "[DONE]" not in events


async def test_alone_it_ends_as_ever() -> None:
    async with rig(1) as (running, client, fakes):
        fakes[0].fault = DIES
        _, events = await read(client)
        assert len(texts(events)) == 2
        assert set(events[-2]) == {"error"}
        assert events[-1] == "cut"
        running.gateway.metrics.catch_up()
        series = running.gateway.metrics.every_series["m", "i0"]
        assert +Counter(series.outcomes) == {"upstream_error": 1}


@pytest.mark.parametrize(
    "sections",
    [
        {"scheduler": {"continue_streams": "off"}},
        {"server": {"max_kept_bytes": 0}},
        {"retry": {"budget_ratio": 0, "budget_min": 0}},
    ],
)
async def test_it_can_be_switched_off(sections: dict[str, Any]) -> None:
    async with rig(2, **sections) as (_, client, fakes):
        fakes[0].fault = DIES
        _, events = await read(client)
        assert len(texts(events)) == 2
        assert events[-1] == "cut"
        assert fakes[1].requests == 0


@pytest.mark.parametrize("more", [{"seed": 3}, {"tools": [{"type": "function"}]}, {"odd": 1}])
async def test_what_would_not_be_exact_ends_honestly(more: dict[str, Any]) -> None:
    async with rig(2) as (running, client, fakes):
        fakes[0].fault = DIES
        _, events = await read(client, **more)
        assert events[-1] == "cut"
        assert running.gateway.metrics.streams_continued == {"not_continuable": 1}


async def test_a_stream_that_became_too_long_is_not_kept() -> None:
    async with rig(2, server={"max_kept_bytes": 20_000}, timeouts={"idle_s": 0.8}) as rigged:
        running, client, fakes = rigged
        fakes[0].fault = DIES | {"events": 300, "event_bytes": 100, "delay_s": 0.01}
        task = asyncio.create_task(read(client))
        await eventually(lambda: bool(running.gateway.deadlines.exchanges))
        (exchange,) = running.gateway.deadlines.exchanges
        _, events = await task
        assert len(texts(events)) == 300
        assert events[-1] == "cut"
        assert exchange.kept is None
        assert len(exchange._tail) == 6


async def test_what_was_squeezed_goes_on_elsewhere_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "_MOST_LOOSE_BYTES", 0)
    monkeypatch.setattr(kept, "_LEAST_SQUEEZED_BYTES", 0)
    async with rig(2) as (_, client, fakes):
        fakes[0].fault, fakes[1].fault = DIES | {"events": 300, "delay_s": 0.01}, GOES_ON
        _, events = await read(client)
        assert texts(events) == ["xxxx"] * 300 + ["xx"] * 3
        asked = json.loads(fakes[1].bodies[0])
        assert asked["messages"][1:] == [{"role": "assistant", "content": "xxxx" * 300}]


async def test_a_hung_stream_goes_on_when_it_has_been_silent_for_too_long() -> None:
    async with rig(2, timeouts={"idle_s": 0.3}) as (_, client, fakes):
        fakes[0].fault = DIES | {"events": 2, "delay_s": 3}
        _, events = await read(client)
        assert len(texts(events)) == 1 + 3
        assert events[-1] == "[DONE]"


async def test_a_client_that_leaves_meanwhile_leaves_nothing() -> None:
    async with rig(2) as (running, client, fakes):
        fakes[0].fault, fakes[1].fault = DIES, {"first_delay_s": 60}
        task = asyncio.create_task(read(client))
        await eventually(lambda: fakes[1].requests == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(running.settled)
        assert fakes[1].open == 0


async def test_a_reader_that_is_slow_holds_up_the_second_leg_too() -> None:
    many = FakeInstance(), FakeInstance()
    many[0].fault = DIES
    many[1].fault = {"events": 400, "event_bytes": 20_000}
    async with rig(many) as (running, client, _):
        async with client.stream("POST", CHAT, json=body()) as response:
            parts = response.aiter_bytes()
            await anext(parts)
            await eventually(lambda: any(e.congested for e in running.gateway.deadlines.exchanges))
            size = sum([len(part) async for part in parts])
        assert size > 400 * 20_000


@pytest.mark.parametrize("workers", [1, 2])
async def test_at_the_deadline_of_a_drain_what_can_goes_on_elsewhere(workers: int) -> None:
    async with rig(2, workers=workers) as (running, client, fakes):
        fakes[0].fault = {"events": 40, "delay_s": 0.2}
        fakes[1].fault = {"events": 5}
        streams = [asyncio.create_task(read(client, **more)) for more in ({}, {"odd": 1})]
        plain = asyncio.create_task(
            client.post(CHAT, json=body(stream=False, stream_options=None, fake={"hang": True}))
        )
        await eventually(lambda: fakes[0].open == 3)
        fakes[0].fault = {}
        async with httpx.AsyncClient(base_url=running.url) as admin:
            patched = await admin.patch(
                "/admin/instances/i0", json={"draining": True, "deadline_s": 2}
            )
            assert patched.status_code == 200, patched.text
            wrong = await admin.patch("/admin/instances/i0", json={"deadline_s": 2})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_instance")
        text, events = await streams[0]
        assert ": continued by i1\n\n" in text
        assert 10 < len(texts(events)) < 30
        assert events[-1] == "[DONE]"
        await eventually(lambda: fakes[1].requests == 2)
        plain.cancel()
        _, stays = await streams[1]
        assert len(texts(stays)) == 40  # nobody could go on with it, and it is let be


async def test_what_cannot_leave_an_instance_that_drains_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_in_full = []

    def told_by(path: str, events: bytes) -> continuations.Told:
        read_in_full.append(events)
        return continuations.told_by(path, events)

    monkeypatch.setattr(continuing, "told_by", told_by)
    async with rig(2) as (running, client, fakes):
        fakes[0].fault = {"events": 40, "delay_s": 0.2}
        stream = asyncio.create_task(read(client, odd=1))
        await eventually(lambda: fakes[0].open == 1)
        async with httpx.AsyncClient(base_url=running.url) as admin:
            await admin.patch("/admin/instances/i0", json={"draining": True, "deadline_s": 2})
        _, events = await stream
        assert events[-1] == "[DONE]"
        assert len(read_in_full) == 1


async def test_alone_nothing_leaves_an_instance_that_drains() -> None:
    async with rig(1) as (running, client, fakes):
        fakes[0].fault = {"events": 20, "delay_s": 0.2}
        stream = asyncio.create_task(read(client))
        await eventually(lambda: fakes[0].open == 1)
        async with httpx.AsyncClient(base_url=running.url) as admin:
            await admin.patch("/admin/instances/i0", json={"draining": True, "deadline_s": 0})
        _, events = await stream
        assert len(texts(events)) == 20
        assert events[-1] == "[DONE]"


async def test_the_streams_of_an_instance_that_freezes_go_on_elsewhere() -> None:
    async with rig(2) as (running, client, fakes):
        fakes[0].fault = {"events": 200, "delay_s": 0.1}
        fakes[1].fault = {"events": 5}
        streams = [asyncio.create_task(read(client)) for _ in range(4)]
        await eventually(lambda: fakes[0].open == 4)
        await asyncio.sleep(2)
        fakes[0].runs.clear()
        for text, events in await asyncio.gather(*streams):
            assert ": continued by i1\n\n" in text
            assert events[-1] == "[DONE]"
        assert running.gateway.metrics.streams_continued["continued"] == 4
