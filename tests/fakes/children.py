"""``emulate`` and ``serve`` as tasks of the test's event loop, in place of child processes.

What starts processes by ``load.children`` (the demo, measured runs) can so run in virtual time
(tests/fakes/clock.py), and gives the same figures on every machine.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

from hetero_gateway.cli import emulate, parse
from hetero_gateway.files.gateway_config import load_gateway_config
from tests.fakes.emulated import emulated
from tests.fakes.running import running_gateway


class TaskChild:
    """One command; it ends when it is told to."""

    def __init__(self, name: str, context: AbstractAsyncContextManager[str]) -> None:
        self.name = name
        self.process = SimpleNamespace(pid=os.getpid())
        self.over = asyncio.Event()
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve(context))

    async def _serve(self, context: AbstractAsyncContextManager[str]) -> None:
        async with context as url:
            self._url.set_result(url)
            await self.over.wait()

    async def url(self) -> str:
        await asyncio.wait((self._url, self.task), return_when=asyncio.FIRST_COMPLETED)
        self.check()
        return self._url.result()

    def check(self) -> None:
        if self.task.done():
            self.task.result()
            raise RuntimeError(f"{self.name} has ended")


class TaskChildren:
    """Has what ``load.children.Children`` has; ``started`` outlives it."""

    def __init__(self, started: list[TaskChild], workers: int) -> None:
        self._started = started
        self._workers = workers
        self._running: list[TaskChild] = []

    def start(self, name: str, *arguments: str) -> TaskChild:
        words = parse(arguments)
        emulates = words.command == "emulate"
        child = TaskChild(name, _emulate(words) if emulates else _serve(words, self._workers))
        self._running.append(child)
        self._started.append(child)
        return child

    def check(self) -> None:
        for child in self._running:
            child.check()

    def stop(self, *which: TaskChild) -> None:
        for child in which or tuple(self._running):
            child.over.set()
            self._running.remove(child)

    def __enter__(self) -> "TaskChildren":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@asynccontextmanager
async def _emulate(words: argparse.Namespace) -> AsyncIterator[str]:
    async with emulated(emulate.settings_of(words), words.port) as (url, _):
        yield url


@asynccontextmanager
async def _serve(words: argparse.Namespace, workers: int) -> AsyncIterator[str]:
    overrides = {"server.port": words.port, "scheduler.policy": words.policy}
    config = load_gateway_config(words.config, overrides)
    async with running_gateway(config, words.config, workers, one_port=True) as running:
        yield running.url


@asynccontextmanager
async def task_children(workers: int = 1) -> AsyncIterator[type]:
    """What to put in the place of ``Children``; at the end all that it started has ended.

    ``workers`` is how many each ``serve`` has.
    """
    started: list[TaskChild] = []

    class Children(TaskChildren):
        def __init__(self, _folder: Path) -> None:
            super().__init__(started, workers)

    yield Children
    await asyncio.gather(*(child.task for child in started))
