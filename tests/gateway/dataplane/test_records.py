"""When what came of a request is counted: soon, and ahead of whoever looks."""

import logging
from typing import Any

import httpx
import pytest

from tests.fakes.running import CHAT, RunningGateway, eventually, rig

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def post(running: RunningGateway, client: httpx.AsyncClient, count: int) -> None:
    for _ in range(count):
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    await eventually(running.settled)


def completed(running: RunningGateway) -> int:
    return running.gateway.metrics.counts("m", "i0").outcomes["completed"]


async def test_what_has_waited_is_counted_before_anybody_sees_counts() -> None:
    async with rig() as (running, client, _):
        gateway = running.gateway
        await post(running, client, 2)
        assert gateway.metrics.series("m", "i0").outcomes["completed"] == 2
        await post(running, client, 1)
        assert len(gateway.dataplane.history) == 3
        await post(running, client, 1)
        assert 'outcome="completed"} 4.0' in await running.metrics()


async def test_requests_are_counted_without_anybody_looking() -> None:
    async with rig() as (running, client, _):
        await post(running, client, 3)
        await eventually(lambda: completed(running) == 3)
        await post(running, client, 70)  # more than wait for one another
        await eventually(lambda: completed(running) == 73)


@pytest.mark.interpreted("it replaces a method")
async def test_a_request_that_cannot_be_counted_does_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as (running, client, _):
        recorder = running.gateway.dataplane.recorder
        count_seen, seen = recorder.count_seen, []

        def fail_once(*args: Any) -> Any:
            seen.append(args)
            if len(seen) == 1:
                raise ZeroDivisionError("a bug")
            return count_seen(*args)

        monkeypatch.setattr(recorder, "count_seen", fail_once)
        with caplog.at_level(logging.ERROR):
            await post(running, client, 3)
            recorder.catch_up()
        assert len(seen) == 3
        assert [record.getMessage() for record in caplog.records] == ["a request cannot be counted"]
        assert len(running.gateway.dataplane.history) == 2


async def test_what_was_counted_of_a_series_is_not_held_on_to() -> None:
    async with rig() as (running, client, _):
        await post(running, client, 3)
        running.gateway.metrics.catch_up()
        assert not running.gateway.dataplane.recorder._noted
