"""A picker in the test's event loop, or as a process, in front of one instance."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from hetero_gateway.scaleout.picker.http2 import server as servers
from tests.fakes.asking import CHECK
from tests.fakes.envoy import RunningPicker, running_picker
from tests.fakes.memory import resident_mb
from tests.fakes.peers import Peer
from tests.fakes.processes import Process
from tests.fakes.running import config_for
from tests.fakes.vllm import fake_instances


@contextlib.asynccontextmanager
async def one_picker(**sections: Any) -> AsyncIterator[RunningPicker]:
    sections["picker"] = {"port": 0, "drain_s": 0} | sections.get("picker", {})
    async with fake_instances(1) as fakes, running_picker(config_for(fakes, **sections)) as picker:
        yield picker


def port_of(picker: RunningPicker) -> int:
    return picker.ports[0]


def server_of(picker: RunningPicker) -> servers.GrpcServer:
    return picker.server.picker._servers[0]


async def checked(peer: Peer, stream_id: int) -> None:
    """A good call is answered."""
    peer.open(stream_id, b"", ends=True, path=CHECK)
    assert (await peer.trailers(stream_id))["grpc-status"] == "0"


class PickerProcess(Process):
    def __init__(self, folder: Path, url: str) -> None:
        path = folder / "gateway.yaml"
        document = {"instances": [{"id": "i0", "base_url": url, "model": "m"}]}
        path.write_text(yaml.safe_dump(document), "utf-8")
        super().__init__("picker", "-c", str(path), "--port", "0", "--http-port", "0")

    async def port(self) -> int:
        await asyncio.to_thread(self.wait_ready)
        (line,) = (line for line in self.lines if line.startswith("hetero-gateway: picking"))
        return int(line.split(", serving")[0].rsplit(":", 1)[1])

    def resident_mb(self) -> float:
        return resident_mb(self.process.pid)


@contextlib.asynccontextmanager
async def picker_process(folder: Path) -> AsyncIterator[tuple[PickerProcess, int]]:
    async with fake_instances(1) as fakes:
        process = PickerProcess(folder, fakes[0].url)
        try:
            yield process, await process.port()
        finally:
            process.stop(signal.SIGKILL)
