"""``serve --takeover`` as processes: under clients, with a bad configuration, under systemd."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.fakes.processes import Process, alive, until
from tests.fakes.running import CHAT, chat
from tests.fakes.vllm import FakeInstance, fake_instances

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture
def anyio_backend() -> str:
    """Wall clock: what is asked is in other processes."""
    return "asyncio"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets lie in it."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def write(folder: Path, fakes: list[FakeInstance]) -> Path:
    path = folder / "gateway.yaml"
    document = {
        "server": {"takeover_socket": str(folder / "takeover")},
        "instances": [{"id": f"i{i}", "base_url": fake.url} for i, fake in enumerate(fakes)],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("workers", ["1", "2,1"])
def test_clients_on_kept_connections_do_not_notice(workers):
    command = [sys.executable, "-m", "tests.chaos.handovers", "--json", "--workers", workers]
    command += ["--handovers", "2", "--clients", "24", "--instances", "2", "--every", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    seen = json.loads(ended.stdout)
    assert seen["faults"] == []
    assert seen["handovers"] == 2
    assert seen["streams"] > 24 < seen["documents"]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_gateway_that_cannot_start_leaves_the_one_that_runs_as_it_is(folder, workers):
    async with fake_instances(1) as fakes:
        path = write(folder, fakes)
        command = ("serve", "-c", str(path), "--workers", workers)
        gateway = await asyncio.to_thread(Process, *command, "--port", "0")
        try:
            url = await asyncio.to_thread(gateway.wait_ready)
            port = url.rpartition(":")[2]
            taking = [sys.executable, "-m", "hetero_gateway", *command, "--port", port]
            taking.append("--takeover")
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                # Of what is wrong, some is found at once, and some as all is put together.
                for wrong in ("instances: [", "traces: {endpoint: 'http://127.0.0.1:1'}\nno: 1"):
                    path.write_text(wrong)
                    ended = await asyncio.to_thread(subprocess.run, taking, capture_output=True)
                    assert ended.returncode != 0
                    assert str(path) in ended.stderr.decode().splitlines()[-1]
                    assert (await client.post(CHAT, json=chat())).status_code == 200
                document = yaml.safe_load(write(folder, fakes).read_text())
                document["server"]["admin_listen"] = f"127.0.0.1:{port}"  # which is taken
                path.write_text(yaml.safe_dump(document))
                ended = await asyncio.to_thread(subprocess.run, taking, capture_output=True)
                assert ended.returncode != 0
                assert "server.admin_listen" in ended.stderr.decode()
                assert (await client.post(CHAT, json=chat())).status_code == 200
                assert (await client.get("/admin/instances")).status_code == 200  # its key is kept
            assert gateway.process.poll() is None
        finally:
            await asyncio.to_thread(gateway.stop)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_systemd_gives_the_socket_and_looks_after_the_successor(folder, workers):
    async with fake_instances(1) as fakes:
        path = write(folder, fakes)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told,
        ):
            told.bind(str(folder / "notify"))
            told.settimeout(60)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serve = f"exec {sys.executable} -m hetero_gateway serve -c {path} --workers {workers}"
            started = f"exec 3<&{listener.fileno()}; export LISTEN_PID=$$ LISTEN_FDS=1; {serve}"
            process = await asyncio.to_thread(
                subprocess.Popen,
                ["bash", "-c", started],
                pass_fds=[listener.fileno()],
                env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify")},
            )
            pids = [process.pid]
            try:
                for expected in (process.pid, None):
                    said = (await asyncio.to_thread(told.recv, 4096)).decode()
                    found = re.fullmatch(r"READY=1\nMAINPID=(\d+)", said)
                    assert found is not None
                    pids.append(int(found[1]))
                    assert pids[-1] == (expected or pids[-1])
                    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                        assert (await client.post(CHAT, json=chat())).status_code == 200
                    os.kill(pids[1], signal.SIGUSR2 if expected else 0)
                assert pids[2] != pids[1]
                assert await asyncio.to_thread(process.wait, 60) == 0
            finally:
                for pid in set(pids):
                    if alive(pid):
                        os.kill(pid, signal.SIGTERM)
                await until(lambda: not any(map(alive, pids)))
