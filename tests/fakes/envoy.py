"""A real Envoy with docker/envoy/envoy.yaml, its ports and addresses replaced by free ones."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.envoy import command, ext_proc
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.serve.picker import PickerServer
from hetero_gateway.serve.wiring.gateway import Gateway
from tests.fakes.admin_key import kept
from tests.fakes.memory import resident_mb
from tests.fakes.processes import Process
from tests.fakes.running import loads_of

START_S = 30.0


@dataclass
class Envoy:
    url: str
    admin_url: str
    process: subprocess.Popen[bytes]

    async def stats(self, pattern: str) -> dict[str, int]:
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.admin_url}/stats?filter={pattern}")).text
        pairs = (line.rsplit(": ", 1) for line in text.splitlines() if ": " in line)
        return {name: int(value) for name, value in pairs if value.isdigit()}


@contextlib.asynccontextmanager
async def running_envoy(document: dict[str, Any], folder: Path) -> AsyncIterator[Envoy]:
    """An Envoy until the block ends."""
    admin, log = folder / "admin", folder / "envoy.log"
    process = _start(document, folder, admin, log)
    try:
        async with asyncio.timeout(START_S):
            url, admin_url = await _addresses(process, admin, log)
        yield Envoy(url, admin_url, process)
    finally:
        await end(process)


async def end(process: subprocess.Popen[bytes]) -> None:
    """Have a process end, by force if it must be."""
    process.terminate()
    try:
        await asyncio.to_thread(process.wait, 10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start(
    document: dict[str, Any], folder: Path, admin: Path, log: Path
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command(path), "--admin-address-path", str(admin)], stdout=output, stderr=output
        )


def _read(path: Path) -> str:
    return path.read_text("utf-8", "replace").strip()


async def _addresses(process: subprocess.Popen[bytes], admin: Path, log: Path) -> tuple[str, str]:
    async with httpx.AsyncClient() as client:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"envoy ended: {_read(log)[-2000:]}")
            with contextlib.suppress(OSError, ValueError, KeyError, IndexError, httpx.HTTPError):
                admin_url = f"http://{_read(admin)}"
                if (await client.get(f"{admin_url}/ready")).status_code == 200:
                    listed = (await client.get(f"{admin_url}/listeners?format=json")).json()
                    port = listed["listener_statuses"][0]["local_address"]["socket_address"][
                        "port_value"
                    ]
                    return f"http://127.0.0.1:{port}", admin_url
            await asyncio.sleep(0.02)


async def until_picked(envoy: Envoy, pickers: int = 1) -> None:
    """Wait until Envoy has found so many pickers healthy; 0: until it has found that none is."""
    async with asyncio.timeout(START_S):
        healthy = -1
        while healthy < pickers or healthy > 0 == pickers:
            await asyncio.sleep(0.02)
            name = "cluster.picker.membership_healthy"
            healthy = (await envoy.stats(f"^{name}$")).get(name, -1)


@dataclass
class RunningPicker:
    server: PickerServer
    address: str
    url: str

    @property
    def gateway(self) -> Gateway:
        return self.server.gateway

    @property
    def ports(self) -> tuple[int, int]:
        return self.server.picker.port, int(self.url.rsplit(":", 1)[1])

    def loads(self) -> list[tuple[float, int, int]]:
        return loads_of(self.gateway)

    def settled(self) -> bool:
        """Every load is exactly 0, nobody waits, and no stream is open."""
        return (
            all(load == (0.0, 0, 0) for load in self.loads())
            and self.gateway.fleet.scheduler.queued == 0
            and len(self.gateway.placement) == 0
            and self.server.picker.resources.open == 0
        )


class PickerProcess(Process):
    """``hetero-gateway picker`` as a process of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__("picker", "-c", str(path), "--port", "0", "--http-port", "0")

    async def ports(self) -> tuple[int, int]:
        """(the picker's, that of its HTTP)"""
        url = await asyncio.to_thread(self.wait_ready)
        (line,) = (line for line in self.lines if line.startswith("hetero-gateway: picking"))
        return int(line.split(", serving")[0].rsplit(":", 1)[1]), int(url.rsplit(":", 1)[1])

    def resident_mb(self) -> float:
        return resident_mb(self.process.pid)


@contextlib.asynccontextmanager
async def running_picker(
    config: GatewayConfig, config_path: Path | None = None
) -> AsyncIterator[RunningPicker]:
    """A picker in the test's own event loop until the block ends."""
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    server = PickerServer(config, config_path, lambda *addresses: ready.set_result(addresses))
    task = asyncio.ensure_future(server.serve())
    try:
        done, _ = await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
            raise RuntimeError("the picker stopped before it was ready")
        address, url = ready.result()
        with kept(server.made_admin_key, url):
            yield RunningPicker(server, address, url)
    finally:
        server.should_exit = True
        await task


def full_duplex(document: dict[str, Any]) -> None:
    """Have Envoy stream bodies to its picker, and not buffer them."""
    ext_proc(document)["processing_mode"] |= {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
    }
