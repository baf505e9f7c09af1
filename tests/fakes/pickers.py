"""A picker in the test's event loop, or as a process, in front of one instance."""

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hetero_gateway.scaleout.picker.http2 import server as servers
from tests.fakes.asking import CHECK
from tests.fakes.envoy import PickerProcess, RunningPicker, running_picker
from tests.fakes.gateway_files import write
from tests.fakes.peers import Peer
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


@contextlib.asynccontextmanager
async def picker_process(folder: Path) -> AsyncIterator[tuple[PickerProcess, int]]:
    """A process, and the picker's port."""
    async with fake_instances(1) as fakes:
        document = {"instances": [{"id": "i0", "base_url": fakes[0].url, "model": "m"}]}
        process = PickerProcess(write(folder / "gateway.yaml", document))
        try:
            yield process, (await process.ports())[0]
        finally:
            process.stop(signal.SIGKILL)
