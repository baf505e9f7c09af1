"""Emulated instances in the test's own event loop, for virtual time (tests/fakes/clock.py)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.server import EmulatedServer
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from tests.fakes.vllm import bound


@asynccontextmanager
async def emulated(
    settings: EmulatorSettings, port: int = 0
) -> AsyncIterator[tuple[str, EmulatedVLLM]]:
    """(its URL, itself) until the block ends."""
    instance = EmulatedVLLM(settings)
    async with serving(instance, port) as url:
        yield url, instance


@asynccontextmanager
async def serving(app: EmulatedVLLM, port: int = 0) -> AsyncIterator[str]:
    """The URL of an emulated instance, or of something around one."""
    listener = bound(port)
    listener.listen(1024)
    ready = asyncio.Event()
    server = EmulatedServer(app, listener, on_ready=ready.set)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        await ready.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
