"""Two gateway processes on one Redis: one of them is killed, or the store, and no request fails."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.gateway_files import write
from tests.fakes.processes import Process
from tests.fakes.redis import RedisServer, redis_server
from tests.fakes.running import FAST

pytestmark = pytest.mark.system

TTL_S = 2.0
LATE_S = 0.5
COMPLETIONS = "/v1/completions"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[RedisServer, list[Process]]]:
    """A Redis, and two gateways in front of one emulated instance."""
    processes: list[Process] = []
    with redis_server() as server:
        try:
            instance = Process(
                *("emulate", "--profile", FAST, "--port", "0", "--model", "m"),
                *("--time-scale", "1"),
            )
            processes.append(instance)
            document = {
                # On a busy machine 50 ms may pass before anybody is looked at.
                "scheduler": {
                    "shared": server.url,
                    "sharing": {"ttl_s": TTL_S, "timeout_s": 0.5},
                },
                "health": {"probe_interval_s": 0.2, "probe_timeout_s": 60},
                "instances": [{"id": "i", "base_url": instance.wait_ready(), "profile": FAST}],
            }
            path = write(tmp_path / "gateway.yaml", document)
            gateways = [Process("serve", "-c", str(path), "--port", "0") for _ in range(2)]
            processes += gateways
            for gateway in gateways:
                gateway.wait_ready()
            yield server, gateways
        finally:
            for process in processes:
                process.stop(signal.SIGKILL)


async def sharing(client: httpx.AsyncClient, gateway: Process) -> dict[str, Any]:
    told: dict[str, Any] = (await client.get(f"{gateway.url}/admin/instances")).json()["sharing"]
    return told


async def until(condition: Any, within_s: float = 60.0) -> float:
    """When an asynchronous condition first held, on the monotonic clock."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110 - it asks another process
            await asyncio.sleep(0.02)
    return time.monotonic()


async def test_the_load_of_a_killed_gateway_is_gone_with_its_lease(
    cluster: tuple[RedisServer, list[Process]],
) -> None:
    _, (doomed, other) = cluster
    body = {
        "model": "m",
        "prompt": "x " * 50,
        "max_tokens": 2000,
        "stream": True,
        "min_tokens": 2000,
    }
    async with httpx.AsyncClient(timeout=60) as client:

        async def there() -> bool:
            seen = (await sharing(client, other))["others"]
            return bool(seen) and seen["i"]["in_flight"] == 3

        async def gone() -> bool:
            return not (await sharing(client, other))["others"]

        async def stream() -> None:
            with pytest.raises(httpx.HTTPError):
                (await client.post(doomed.url + COMPLETIONS, json=body)).raise_for_status()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(stream())
            await until(there)
            killed_s = time.monotonic()
            doomed.process.kill()
            gone_s = await until(gone)
        assert gone_s - killed_s < TTL_S + LATE_S


async def test_no_request_fails_while_redis_is_killed_stopped_and_started_again(
    cluster: tuple[RedisServer, list[Process]],
) -> None:
    server, gateways = cluster
    body = {"model": "m", "prompt": "x", "max_tokens": 8}
    answers: list[int] = []
    end = asyncio.Event()
    async with httpx.AsyncClient(timeout=60) as client:

        async def send(gateway: Process) -> None:
            while not end.is_set():
                answers.append(
                    (await client.post(gateway.url + COMPLETIONS, json=body)).status_code
                )

        async def all_are(mode: str) -> bool:
            return all([(await sharing(client, g))["mode"] == mode for g in gateways])

        async with asyncio.TaskGroup() as tasks:
            for gateway in gateways * 2:
                tasks.create_task(send(gateway))
            for away, back in ((server.kill, server.start), (server.stop, server.go_on)):
                await until(lambda: all_are("shared"))
                away()
                await until(lambda: all_are("local"))
                back()
            await until(lambda: all_are("shared"))
            end.set()
        assert len(answers) > 20
        assert set(answers) == {200}

        async def nothing_is_left() -> bool:
            return all([not (await sharing(client, g))["others"] for g in gateways])

        await until(nothing_is_left)
