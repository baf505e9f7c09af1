"""``serve --workers 2`` as processes: what a SIGKILL of each costs, and how they end."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.gateway_files import write
from tests.fakes.processes import Process, alive, children_of, until
from tests.fakes.running import FAST, SLOW

pytestmark = [pytest.mark.system, pytest.mark.slow]

COMPLETIONS = "/v1/completions"


@pytest.fixture
def anyio_backend() -> str:
    """Wall clock: what is asked is in other processes."""
    return "asyncio"


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """The system's temporary directory, as gateways see it: short, as sockets lie in it."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.fixture(scope="module")
def instances() -> Iterator[dict[str, str]]:
    """Their addresses; what is killed is never one of them, so that all gateways have the same."""
    running = {
        name: Process(
            *("emulate", "--profile", profile, "--port", "0", "--model", "m"),
            *("--time-scale", "2"),
        )
        for name, profile in (("fast", FAST), ("slow", SLOW))
    }
    try:
        yield {name: instance.wait_ready() for name, instance in running.items()}
    finally:
        for instance in running.values():
            instance.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def started(temporary: Path) -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.stop()


@pytest.fixture
def gateway(tmp_path: Path, instances: dict[str, str], started: list[Process]) -> Process:
    """The one of the test before, or a new one where that test ended it; all of it works."""
    document = {
        "health": {"probe_interval_s": 0.2, "probe_timeout_s": 60},
        "server": {"shutdown_timeout_s": 30},
        "instances": [
            {"id": name, "base_url": url, "profile": FAST} for name, url in instances.items()
        ],
    }
    path = write(tmp_path / "gateway.yaml", document)
    if not started or started[-1].process.poll() is not None:
        started.append(Process("serve", "-c", str(path), "--port", "0", "--workers", "2"))
    url = started[-1].wait_ready()
    for _ in range(600):
        if "hetero_gateway_workers 2.0" in httpx.get(f"{url}/metrics", timeout=60).text:
            return started[-1]
        time.sleep(0.1)
    raise RuntimeError("the gateway did not get both of its workers")


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


async def answered(url: str) -> httpx.Response:
    """Asked again while the scheduler process is being started."""
    async with asyncio.timeout(60), httpx.AsyncClient(timeout=60) as client:
        while True:
            answer = await client.get(url)
            if answer.status_code != 503:
                return answer


async def loads(url: str) -> tuple[list[int], list[float]]:
    """(in flight, load) of each instance."""
    seen = (await answered(url + "/admin/instances")).json()["instances"]
    return [i["in_flight"] for i in seen], [i["workload"] for i in seen]


async def nothing_is_left(url: str) -> None:
    await until(lambda: loads(url), lambda seen: seen == ([0, 0], [0.0, 0.0]))


async def has_open(url: str, least: int, most: int | None = None) -> None:
    await until(lambda: loads(url), lambda seen: least <= sum(seen[0]) <= (most or least))


async def is_replaced(gateway: Process, role: str, pid: int) -> None:
    await until(lambda: children_of(gateway.process.pid).get(role, pid) != pid)
    assert not alive(pid)


async def both_work(url: str) -> None:
    await until(lambda: metric(url, "hetero_gateway_workers"), lambda workers: workers == 2)


async def are_gone(pids: Iterable[int]) -> None:
    await until(lambda: not any(map(alive, pids)))


async def metric(url: str, name: str) -> float:
    text = (await answered(url + "/metrics")).text
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])


class Traffic:
    """Streams without a pause, until it is ended; ``ends``: how each ended."""

    def __init__(self, url: str, clients: int = 6) -> None:
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
    traffic = Traffic(gateway.url)
    for _ in range(3):
        await asyncio.sleep(1.5)
        os.kill(children_of(gateway.process.pid)["null"], signal.SIGKILL)
        await both_work(gateway.url)
        await has_open(gateway.url, 1, 99)  # what went on without it is charged
    ends = await traffic.end()
    assert set(ends) == {"done"}
    assert len(ends) > 12
    await nothing_is_left(gateway.url)


async def test_a_stopped_scheduler_costs_no_request(gateway: Process) -> None:
    traffic = Traffic(gateway.url, 6)
    await asyncio.sleep(1.0)
    stopped = children_of(gateway.process.pid)["null"]
    os.kill(stopped, signal.SIGSTOP)
    await is_replaced(gateway, "null", stopped)
    before = len(traffic.ends)
    await until(lambda: len(traffic.ends) > before + 6)
    await both_work(gateway.url)
    assert set(await traffic.end()) == {"done"}
    await nothing_is_left(gateway.url)


async def test_workers_answer_while_the_scheduler_process_is_stopped(gateway: Process) -> None:
    """Liveness, readiness and models are theirs to tell; before, each took a minute."""
    for _ in range(3):
        there = children_of(gateway.process.pid)
        os.kill(there["null"], signal.SIGSTOP)
        for path in ("/livez", "/health", "/ping", "/readyz", "/version", "/v1/models"):
            async with httpx.AsyncClient(timeout=20) as client:
                answer = await client.get(gateway.url + path)
            assert answer.status_code == 200, path
        assert [card["id"] for card in answer.json()["data"]] == ["m"]
        for path in ("/metrics", "/dashboard", "/admin/instances"):
            async with httpx.AsyncClient(timeout=20) as client:
                answer = await client.get(gateway.url + path)
            assert answer.status_code in (200, 503), path
        await is_replaced(gateway, "null", there["null"])
        await both_work(gateway.url)
        now = children_of(gateway.process.pid)
        assert [now["0"], now["1"]] == [there["0"], there["1"]]  # nobody else was taken for hung


async def test_a_stopped_worker_is_replaced_and_gets_no_connections(gateway: Process) -> None:
    for number in ("0", "1"):
        stopped = children_of(gateway.process.pid)[number]
        os.kill(stopped, signal.SIGSTOP)
        # Each has a connection of its own; the kernel deals half of them to the stopped one.
        ends = await asyncio.gather(*(stream(gateway.url, 2) for _ in range(24)))
        assert set(ends) == {"done"}
        await is_replaced(gateway, number, stopped)
        await both_work(gateway.url)
    assert await asyncio.gather(*(stream(gateway.url, 2) for _ in range(12))) == ["done"] * 12
    await nothing_is_left(gateway.url)


async def test_what_comes_in_for_a_killed_worker_the_others_serve(gateway: Process) -> None:
    killed = children_of(gateway.process.pid)["0"]
    os.kill(killed, signal.SIGKILL)
    await are_gone([killed])
    ends = await asyncio.gather(*(stream(gateway.url, 2) for _ in range(24)))
    assert set(ends) == {"done"}


async def test_a_killed_worker_costs_its_own_requests(gateway: Process) -> None:
    lost: list[str] = []
    while not lost:  # a worker that has just been started accepts nothing for a moment
        await both_work(gateway.url)
        streams = [asyncio.ensure_future(stream(gateway.url, 400)) for _ in range(16)]
        await has_open(gateway.url, 16)
        os.kill(children_of(gateway.process.pid)["0"], signal.SIGKILL)
        ends = await asyncio.gather(*streams)
        lost = [end for end in ends if end == "broken" or end.startswith("cut")]
        assert len(lost) < 16  # the kernel dealt them out
        assert ends.count("done") == 16 - len(lost)
        await nothing_is_left(gateway.url)
    await both_work(gateway.url)
    assert {await stream(gateway.url, 5) for _ in range(8)} == {"done"}


async def test_streams_end_before_the_processes_do(gateway: Process) -> None:
    streams = [asyncio.ensure_future(stream(gateway.url, 200)) for _ in range(6)]
    await has_open(gateway.url, 6)
    there = children_of(gateway.process.pid).values()
    gateway.process.terminate()
    assert set(await asyncio.gather(*streams)) == {"done"}
    assert await asyncio.to_thread(gateway.process.wait, 60) == 0
    assert not any(map(alive, there))


async def test_a_killed_supervisor_leaves_nobody_and_nothing_behind(
    gateway: Process, temporary: Path
) -> None:
    assert os.listdir(temporary)
    there = children_of(gateway.process.pid).values()
    assert len(there) == 3
    gateway.process.kill()
    await are_gone(there)
    assert os.listdir(temporary) == []


async def test_what_nobody_was_left_to_remove_the_next_gateway_does(
    gateway: Process, temporary: Path, tmp_path: Path
) -> None:
    (abandoned,) = os.listdir(temporary)
    there = [gateway.process.pid, *children_of(gateway.process.pid).values()]
    for pid in there:
        os.kill(pid, signal.SIGSTOP)
    for pid in there:
        os.kill(pid, signal.SIGKILL)
    await are_gone(there)
    assert os.listdir(temporary) == [abandoned]
    command = ("serve", "-c", str(tmp_path / "gateway.yaml"), "--port", "0", "--workers", "2")
    first = await asyncio.to_thread(Process, *command)
    try:
        await asyncio.to_thread(first.wait_ready)
        (held,) = os.listdir(temporary)
        assert held != abandoned
        second = await asyncio.to_thread(Process, *command)
        await asyncio.to_thread(second.wait_ready)
        assert len(os.listdir(temporary)) == 2  # that of one that lives stays
        assert await asyncio.to_thread(second.stop) == 0
        assert os.listdir(temporary) == [held]
    finally:
        await asyncio.to_thread(first.stop)
    assert os.listdir(temporary) == []


def test_a_port_that_is_taken_is_said_in_one_line(gateway: Process, tmp_path: Path) -> None:
    port = gateway.url.rsplit(":", 1)[1]
    other = Process("serve", "-c", str(tmp_path / "gateway.yaml"), "--port", port, "--workers", "2")
    with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}"):
        other.wait_ready()
    assert other.stop() == 1
    assert len(other.lines) == 1
