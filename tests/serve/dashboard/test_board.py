"""What the dashboard is told: figures now and over 15 minutes, and events of what changes."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hetero_gateway.core.types import InstanceId, Outcome
from hetero_gateway.gateway.dataplane.records import AnswerTokens
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.records.request_log import FailedAttempt, RequestLog, WaitParts
from hetero_gateway.serve.dashboard.board import MOST_VIEWERS
from hetero_gateway.serve.dashboard.trend import (
    LONG_STEPS,
    MOST_MODELS,
    NOW_STEPS,
    STEP_S,
    STEPS,
    Trend,
)
from hetero_gateway.serve.dashboard.use import describe_use
from tests.fakes.running import eventually, rig


def count(metrics: Metrics, number: int, *, model: str = "m", outcome: str = "completed") -> None:
    series = metrics.counts(model, "i0")
    series.outcomes[outcome] += number
    series.output_tokens += 100 * number
    series.input_tokens += 1000 * number
    series.ttft.observe(0.3, number)


def test_now_forgets_what_fifteen_minutes_remember() -> None:
    metrics = Metrics("min-max", list)
    trend = Trend(metrics)
    count(metrics, 60)
    trend.step(queued=7)
    for _ in range(NOW_STEPS):
        count(metrics, 6)
        count(metrics, 2, outcome="upstream_error")
        trend.step(queued=2)
    now, all_of_it = trend.figures(NOW_STEPS), trend.figures(STEPS)
    assert now["requests_per_s"] == pytest.approx(8 / STEP_S)
    assert now["output_tokens_per_s"] == pytest.approx(800 / STEP_S)
    assert now["errors"] == 0.25
    assert now["queue"] == {"now": 2, "most": 2}
    assert all_of_it["queue"]["most"] == 7
    assert all_of_it["requests_per_s"] == pytest.approx(108 / 7 / STEP_S, rel=0.01)
    # Between the bounds of its bucket, 0.25 and 0.5 s.
    assert now["ttft_s"][0] == pytest.approx(0.375)
    assert now["tpot_s"] is None
    for _ in range(STEPS):
        trend.step(queued=0)
    # The hours have it still: two minutes in a point.
    first, *_, last = trend.long_points()
    assert first[0] == pytest.approx(108 / (LONG_STEPS * STEP_S), rel=0.01)
    assert (first[7], last[0]) == (7, 0)
    assert trend.figures(STEPS)["requests_per_s"] == 0
    assert trend.figures(STEPS)["ttft_s"] is None


def test_its_memory_is_bounded_and_a_forgotten_instance_leaves_it() -> None:
    metrics = Metrics("min-max", list)
    trend = Trend(metrics)
    for turn in range(3 * MOST_MODELS):
        count(metrics, 1, model=f"m{turn}")
        trend.step(0)
    assert len(trend.models()) == MOST_MODELS
    assert len(trend.points(10_000)) == 3 * MOST_MODELS
    assert trend.of_instance("i0")[0] > 0
    metrics.forget("i0")
    trend.step(0)
    assert trend.of_instance("i0") == (0, 0, 0)
    # It comes back and counts anew: nothing is negative.
    count(metrics, 1)
    trend.step(0)
    assert trend.points(1)[0][0] == pytest.approx(1 / STEP_S)


async def test_clients_and_waits_add_up_and_the_smaller_ones_are_one_row() -> None:
    log, now_s = RequestLog(), time.monotonic()
    tokens = AnswerTokens(10, 7)
    for number in range(30):
        row = (b"%d" % number, now_s - 3, 0.5, now_s - 2, now_s - 1, now_s, 200, Outcome.COMPLETED)
        log.add([(*row, "i0", f"c{number % 9}" if number else "", number % 2 == 0, tokens)])
    log.add_failed(FailedAttempt(b"2", "i0", "reset", now_s))
    async with rig() as (running, _, _):
        use = await describe_use(
            log, running.gateway.fleet, {("c1", "tokens"): 4, ("late", "x"): 1}
        )
    assert (use["requests"], use["retried"], use["retries"], use["span_s"]) == (30, 1, 1, 60.0)
    assert use["waits"]["streams"] == 15
    parts = [use["waits"][part] for part in WaitParts._fields]
    assert sum(parts) == pytest.approx(use["waits"]["ttft_s"], rel=0.01)
    assert use["waits"]["ttft_s"] == pytest.approx(2.0, rel=0.01)
    assert use["waits"]["retry_s"] == pytest.approx(0.5 / 15, rel=0.01)
    assert sum(row["requests"] for row in use["clients"]) == 30
    assert sum(row["output_tokens"] for row in use["clients"]) == 210
    assert use["clients"][-1]["name"] == "5 others"
    assert sum(row["refused"] for row in use["clients"]) == 5


def test_a_queue_that_grows_is_told_from_one_that_is_long() -> None:
    trend = Trend(Metrics("min-max", list))
    for depth in [50] * 40:
        trend.step(queued=depth)
    assert not trend.queue_grows()
    for depth in range(50, 50 + 20 * NOW_STEPS, 10):
        trend.step(queued=depth)
    assert trend.queue_grows()


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    text = ""
    async for part in answer.aiter_text():
        *whole, text = (text + part).split("\n\n")
        for event in whole:
            if event.startswith("event: "):
                name, data = event.removeprefix("event: ").split("\ndata: ", 1)
                yield name, json.loads(data)


@pytest.mark.parametrize("workers", [1, 2])
async def test_everything_comes_once_and_then_what_changes(workers: int) -> None:
    async with rig(2, workers=workers) as (running, client, fakes):
        async with client.stream("GET", "/admin/events") as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = events_of(answer)
            name, told = await anext(events)
            assert name == "all"
            assert [row["id"] for row in told["instances"]] == ["i0", "i1"]
            assert [row[0] for row in told["rows"]] == ["up", "up"]
            # The profiles of both are known: what each can do, in requests/s.
            assert told["capacities"][0] > told["capacities"][1] > 0
            running.gateway.fleet.instances[InstanceId("i1")].draining = True
            async for name, told in events:
                if name == "rows" and told["rows"]:
                    break
            assert [row[:2] for row in told["rows"]] == [[1, "draining"]]
            await fakes[0].kill()
            async for name, told in events:
                if name == "head" and "i0 is down" in str(told["alarms"]):
                    break
            nobody, alarm = told["alarms"]
            assert nobody["text"] == "No instance takes requests: clients get 503."
            assert alarm["severity"] == "bad"
            assert "Connection refused" in alarm["text"]
            assert alarm["since"] == pytest.approx(time.time(), abs=60)
            assert "log" in alarm["advice"]
        await eventually(lambda: running.gateway.board.viewers == 0)


async def test_what_stands_still_says_little() -> None:
    async with rig(2) as (running, client, _):
        await eventually(lambda: all(i.up for i in running.gateway.fleet.instances.values()))
        async with client.stream("GET", "/admin/events") as answer:
            parts = answer.aiter_raw()
            await anext(parts)
            later = b""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.5):
                    async for part in parts:
                        later += part
        assert later.count(b"event: rows") <= 1
        assert len(later) < 2000


async def test_too_many_viewers_are_refused_and_all_are_let_go_at_the_end() -> None:
    async with rig(server={"shutdown_timeout_s": 60}) as (running, client, _):
        async with client.stream("GET", "/admin/events") as answer:
            events = events_of(answer)
            assert (await anext(events))[0] == "all"
            running.gateway.board.viewers += MOST_VIEWERS - 1
            refused = await client.get("/admin/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            began_s = time.monotonic()
            running.gateway.drain()
            running.server.should_exit = True
            async for _ in events:
                pass
    # Not by the time that open requests have to end.
    assert time.monotonic() - began_s < 30


async def test_the_stream_is_for_whom_admin_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ADMIN_KEY", "right")
    async with rig(server={"admin_key_env": "TEST_ADMIN_KEY"}) as (_, client, _):
        assert (await client.get("/admin/events")).status_code == 401
        headers = {"authorization": "Bearer right"}
        async with client.stream("GET", "/admin/events", headers=headers) as answer:
            assert answer.status_code == 200


async def test_an_instance_that_rests_is_shown_as_resting_and_raises_no_alarm() -> None:
    async with rig(4) as (running, client, _):
        asleep, paused, draining, _ = running.gateway.fleet.instances.values()
        # As if they were told so just now: no scrape overrules it.
        asleep.asleep, paused.paused = True, True
        asleep.rested_s = paused.rested_s = float("inf")
        draining.draining = True
        async with client.stream("GET", "/admin/events") as answer:
            _, board = await anext(events_of(answer))
    state = board["columns"].index("state")
    assert [row[state] for row in board["rows"]] == ["asleep", "paused", "draining", "up"]
    assert [each["why"] for each in board["instances"]] == [
        "gets nothing until it wakes",
        "gets nothing until it resumes",
        "finishes what it has, and gets nothing new",
        "",
    ]
    assert board["head"]["alarms"] == []
