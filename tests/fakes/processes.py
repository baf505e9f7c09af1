"""The installed commands as processes, on free ports, ended with the block."""

import asyncio
import contextlib
import inspect
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.fakes.forks import Forked

T = TypeVar("T")


class Process:
    """``hetero-gateway ARGS``, once it has told its address on standard error."""

    def __init__(self, *args: str) -> None:
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        command = self.command(*args)
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            self.process = (
                Forked(*args, stdout=nowhere.fileno())
                if command is None
                else subprocess.Popen(command, stdout=nowhere, stderr=subprocess.PIPE, text=True)
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def command(self, *args: str) -> list[str] | None:
        """What is executed; None: a fork of what has imported the package."""
        return None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            match = re.search(r"http://[\d.]+:\d+", line)
            if match and not line[:4].isdigit():  # not a log line, which begins with the year
                self.url = match.group()
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> str:
        if not self._ready.wait(120) or not self.url:
            raise RuntimeError("the command did not come up: " + "".join(self.lines[-5:]))
        return self.url

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(60)
        finally:
            self.process.kill()
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


class Executed(Process):
    """Where its start or its memory matters."""

    def command(self, *args: str) -> list[str]:
        return None


@contextlib.contextmanager
def started(*args: str, kind: type[Process] = Process) -> Iterator[Process]:
    """One that is ready, until the block ends."""
    process = kind(*args)
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop(signal.SIGKILL)


@contextlib.contextmanager
def emulated_cluster(
    directory: Path, profiles: dict[str, str], time_scale: float = 50, workers: int = 1
) -> Iterator[tuple[Process, dict[str, Process]]]:
    """(gateway, emulated instances by id) for ``{id: profile name}``; model ``llama-3-8b``."""
    instances = {
        name: Process(
            "emulate", "--profile", profile, "--port", "0", "--model", "llama-3-8b",
            "--time-scale", str(time_scale),
        )
        for name, profile in profiles.items()
    }  # fmt: skip
    gateway = None
    try:
        document = {
            "health": {"probe_interval_s": 0.2, "probe_timeout_s": 60},
            "batches": {"directory": "batches"},
            "instances": [
                {"id": name, "base_url": instances[name].wait_ready(), "profile": profile}
                for name, profile in profiles.items()
            ],
        }
        path = directory / "gateway.yaml"
        path.write_text(yaml.safe_dump(document))
        command = ("serve", "-c", str(path), "--port", "0", "--workers", str(workers))
        gateway = Process(*command)
        gateway.wait_ready()
        yield gateway, instances
    finally:
        for process in ([gateway] if gateway else []) + list(instances.values()):
            process.stop()


def children_of(supervisor: int) -> dict[str, int]:
    """Process ids of one gateway by role: ``null`` is the scheduler process, a number a worker."""
    found = {}
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has gone
            words = Path(f"/proc/{child}/cmdline").read_text()
            if '"worker":' in words:
                found[words.partition('"worker":')[2].partition(",")[0]] = int(child)
    return found


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What one printed, and how it ended."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = Forked(*args, stdout=output.fileno(), env={**os.environ, **environment})
        with process.stderr:
            errors = process.stderr.read()
        code = process.wait(60)
        output.seek(0)
        return subprocess.CompletedProcess(list(args), code, output.read(), errors)


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def wait_for(what: str, probe: Callable[[], T], within_s: float = 60.0) -> T:
    """The first answer that is something."""
    deadline_s = time.monotonic() + within_s
    while not (found := probe()):
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.05)
    return found


async def until(
    ask: Callable[[], Any], holds: Callable[[Any], bool] = bool, within_s: float = 60.0
) -> None:
    """Wait until what is asked, here or of another process, is as wanted."""
    async with asyncio.timeout(within_s):
        while not holds(await seen if inspect.isawaitable(seen := ask()) else seen):  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # it may be another process that is asked
