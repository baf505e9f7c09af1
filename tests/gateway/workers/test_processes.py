"""``serve --workers 2`` as processes: what a SIGKILL of each costs, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.fakes.processes import Process
from tests.fakes.running import FAST, SLOW

COMPLETIONS = "/v1/completions"


@pytest.fixture
def anyio_backend() -> str:
    """Wall clock: what is asked is in other processes."""
    return "asyncio"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Process]:
    instances = {
        name: Process(
            *("emulate", "--profile", profile, "--port", "0", "--model", "m"),
            *("--time-scale", "2"),
        )
        for name, profile in (("fast", FAST), ("slow", SLOW))
    }
    document = {
        "health": {"probe_interval_s": 0.2, "probe_timeout_s": 60},
        "server": {"shutdown_timeout_s": 30},
        "instances": [
            {"id": name, "base_url": instance.wait_ready(), "profile": FAST}
            for name, instance in instances.items()
        ],
    }
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    gateway = Process("serve", "-c", str(path), "--port", "0", "--workers", "2")
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.stop()
        for instance in instances.values():
            instance.stop(signal.SIGKILL)


def children(gateway: Process) -> dict[str, int]:
    """The ids of the gateway's processes: ``null`` for the scheduler's, ``0``, ``1``."""
    pid = gateway.process.pid
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        role = Path(f"/proc/{child}/cmdline").read_text()
        found[role.partition('"worker":')[2].partition(",")[0]] = int(child)
    return found


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110 - it asks another process
            await asyncio.sleep(0.1)


async def stream(url: str, tokens: int = 60) -> str:
    """How one stream ended: ``done``, ``refused`` or ``broken``."""
    body = {"model": "m", "prompt": "x", "max_tokens": tokens, "min_tokens": tokens, "stream": True}
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            answer = await client.post(url + COMPLETIONS, json=body)
        except httpx.HTTPError:
            return "broken"
    if answer.status_code != 200:
        return f"refused: {answer.status_code} {answer.text}"
    return "done" if answer.text.endswith("data: [DONE]\n\n") else f"cut: {answer.text[-200:]}"


async def loads(url: str) -> tuple[list[int], list[float]]:
    """(in flight, load) of each instance."""
    async with httpx.AsyncClient(timeout=60) as client:
        seen = (await client.get(url + "/admin/instances")).json()["instances"]
    return [i["in_flight"] for i in seen], [i["workload"] for i in seen]


async def nothing_is_left(url: str) -> None:
    async def empty() -> bool:
        return await loads(url) == ([0, 0], [0.0, 0.0])

    await until(empty)


async def has_open(url: str, count: int) -> None:
    async def there() -> bool:
        return sum((await loads(url))[0]) == count

    await until(there)


async def both_work(url: str) -> None:
    async def two() -> bool:
        return await metric(url, "hetero_gateway_workers") == 2

    await until(two)


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(url + "/metrics")).text
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])


class Traffic:
    """Streams without a pause, until it is ended; ``ends``: how each ended."""

    def __init__(self, url: str, clients: int = 12) -> None:
        self.ends: list[str] = []
        self._over = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._client(url)) for _ in range(clients)]

    async def _client(self, url: str) -> None:
        while not self._over.is_set():
            self.ends.append(await stream(url))

    async def end(self) -> list[str]:
        self._over.set()
        await asyncio.gather(*self._tasks)
        return self.ends


async def test_a_killed_scheduler_costs_no_request(gateway: Process) -> None:
    async def some_open() -> bool:
        return sum((await loads(gateway.url))[0]) > 0

    traffic = Traffic(gateway.url)
    for _ in range(3):
        await asyncio.sleep(1.5)
        os.kill(children(gateway)["null"], signal.SIGKILL)
        await both_work(gateway.url)
        await until(some_open)  # what went on without it is charged
    ends = await traffic.end()
    assert set(ends) == {"done"}
    assert len(ends) > 12
    await nothing_is_left(gateway.url)


async def test_a_stopped_scheduler_costs_no_request(gateway: Process) -> None:
    traffic = Traffic(gateway.url, 6)
    await asyncio.sleep(1.0)
    stopped = children(gateway)["null"]
    os.kill(stopped, signal.SIGSTOP)
    await asyncio.sleep(5.0)  # the workers give it up after three seconds
    before = len(traffic.ends)
    await asyncio.sleep(2.0)
    assert len(traffic.ends) > before
    os.kill(stopped, signal.SIGCONT)
    await both_work(gateway.url)
    assert set(await traffic.end()) == {"done"}
    await nothing_is_left(gateway.url)


async def test_a_killed_worker_costs_its_own_requests(gateway: Process) -> None:
    streams = [asyncio.ensure_future(stream(gateway.url, 400)) for _ in range(16)]
    await has_open(gateway.url, 16)
    os.kill(children(gateway)["0"], signal.SIGKILL)
    ends = await asyncio.gather(*streams)
    lost = [end for end in ends if end == "broken" or end.startswith("cut")]
    assert 0 < len(lost) < 16  # the kernel dealt them out
    assert ends.count("done") == 16 - len(lost)
    await nothing_is_left(gateway.url)
    await both_work(gateway.url)
    assert {await stream(gateway.url, 5) for _ in range(8)} == {"done"}


async def test_streams_end_before_the_processes_do(gateway: Process) -> None:
    streams = [asyncio.ensure_future(stream(gateway.url, 200)) for _ in range(6)]
    await has_open(gateway.url, 6)
    there = children(gateway).values()
    gateway.process.terminate()
    assert set(await asyncio.gather(*streams)) == {"done"}
    assert await asyncio.to_thread(gateway.process.wait, 60) == 0
    assert not any(map(runs, there))


async def test_nobody_outlives_a_killed_supervisor(gateway: Process) -> None:
    there = children(gateway).values()
    assert len(there) == 3
    gateway.process.kill()

    async def gone() -> bool:
        return not any(map(runs, there))

    await until(gone)


def test_a_port_that_is_taken_is_said_in_one_line(gateway: Process, tmp_path: Path) -> None:
    port = gateway.url.rsplit(":", 1)[1]
    other = Process("serve", "-c", str(tmp_path / "gateway.yaml"), "--port", port, "--workers", "2")
    with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}"):
        other.wait_ready()
    assert other.stop() == 1
    assert len(other.lines) == 1
