"""A request that is over is gone at once: nothing of it waits for the garbage collector."""

import contextlib
import gc
from typing import Any

import httpx
import pytest

from tests.fakes.running import CHAT, RunningGateway, config_for, eventually, faked, running_gateway
from tests.fakes.vllm import fake_instances

LEFT = "its client left"
ENDINGS: dict[str, dict[str, Any]] = {
    "answered": faked(),
    "streamed": faked(events=3),
    "refused by its engine": faked(status=400),
    "failed everywhere": faked(status=500),
    "broken off": faked(events=3, die="after_events"),
    LEFT: faked(events=3, delay_s=60),
}
# A client's connection and the last cycle on it know each other.
OF_CONNECTIONS = {
    f"hetero_gateway.http.protocol.{name}" for name in ("EngineProtocol", "EngineCycle")
}


async def ask(running: RunningGateway, ending: str, count: int) -> None:
    """So many requests that end like that, until they are over, and counted."""
    patience_s = 0.1 if ending == LEFT else 30.0
    async with httpx.AsyncClient(timeout=patience_s) as client:
        for _ in range(count):
            with contextlib.suppress(httpx.HTTPError):
                await client.post(running.url + CHAT, json=ENDINGS[ending])
    await eventually(lambda: len(running.gateway.dataplane) == 0)
    await running.counted()


def left_behind() -> set[str]:
    """Objects of ours that only the garbage collector found."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = {f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return {kind for kind in kinds if kind.startswith("hetero_gateway.")} - OF_CONNECTIONS


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_nothing_of_a_request_waits_for_the_garbage_collector(
    ending: str, workers: int
) -> None:
    async with (
        fake_instances(2) as fakes,
        running_gateway(config_for(fakes), workers=workers) as running,
    ):
        await ask(running, ending, 2)
        gc.collect()
        gc.disable()
        try:
            await ask(running, ending, 4)
            assert not left_behind()
        finally:
            gc.enable()
