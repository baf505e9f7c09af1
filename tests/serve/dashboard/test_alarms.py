"""Alarms say what is wrong, how much, since when and what to do, and nothing small."""

import asyncio
import logging
import re
import time

import httpx
import pytest

from hetero_gateway.cli import main
from tests.fakes.running import CHAT, FAST, RunningGateway, rig

# By the profile: a step of one to three short streams, and the prefill of 200 tokens.
STEP_S, PREFILL_S = 0.0105, 0.018


async def streams(client: httpx.AsyncClient, count: int, slow: float, http_s: float) -> None:
    """One after the other, of a second each where the instance is not slow."""
    fake = {"delay_s": slow * STEP_S, "events": 100, "first_delay_s": slow * PREFILL_S + http_s}
    body = {"model": "m", "prompt": [7] * 200, "stream": True, "fake": fake}
    for _ in range(count):
        assert (await client.post(CHAT, json=body)).status_code == 200


def texts(running: RunningGateway) -> list[str]:
    return [alarm["text"] for alarm in running.gateway.board.alarms.now()]


async def test_a_slow_instance_is_named_with_its_factor_within_15_s_and_no_other_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig(profiles=(FAST,)) as (running, client, _):
        await streams(client, 5, 1.0, 0.01)
        assert texts(running) == []
        with caplog.at_level(logging.INFO, "hetero_gateway"):
            slow = asyncio.create_task(streams(client, 3, 5.4, 0.01))
            began_s = time.monotonic()
            while not texts(running):  # noqa: ASYNC110 - nothing says that there is an alarm
                await asyncio.sleep(0.5)
            assert time.monotonic() - began_s <= 15
            await slow
            (alarm,) = running.gateway.board.alarms.now()
            factor = re.search(r"i0 is slow: it takes ([\d.]+) times as long", alarm["text"])
            assert factor is not None
            assert float(factor[1]) == pytest.approx(5.4, rel=0.15)
            assert "machine" in alarm["advice"]
            assert await asyncio.to_thread(main, ["status", running.url]) == 0
            await streams(client, 7, 1.0, 0.01)
            await asyncio.sleep(5)
        assert texts(running) == []
    slow, over = [m for m in caplog.messages if "as its profile says" in m or "steps take" in m]
    assert slow.startswith("instance i0: its steps take ")
    assert over == "instance i0 is as fast as its profile says again"
