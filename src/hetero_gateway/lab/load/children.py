"""Server processes for a load run: started, awaited, and never left behind.

``Children`` is a context manager; leaving it, for whatever reason, ends every process group that it
started: SIGTERM first, SIGKILL for those that remain. Each child leads a group of its own, so a
Ctrl-C at the terminal reaches only the parent, which then ends them in order.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from hetero_gateway.errors import HeteroGatewayError

START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 4.0
_POLL_S = 0.02
_URL = re.compile(r"https?://[\w.\[\]:]+:\d+")


class Child:
    """One ``hetero_gateway`` command in a process of its own; its output goes to a file."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hetero_gateway", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def url(self) -> str:
        """The address that it reports serving on, as soon as it does.

        Raises HeteroGatewayError: it ended, or reported nothing within ``START_TIMEOUT_S``.
        """
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while (match := _URL.search(self._output())) is None:
            self.check()
            if time.monotonic() > give_up_s:
                raise HeteroGatewayError(
                    f"{self.name} did not start in {START_TIMEOUT_S:.0f} s: {self._last_line()}"
                )
            await asyncio.sleep(_POLL_S)
        return match.group()

    def check(self) -> None:
        """Raises HeteroGatewayError with its last line if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise HeteroGatewayError(f"{self.name} ended with code {code}: {self._last_line()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its whole process group, if that still exists."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _last_line(self) -> str:
        lines = [line for line in self._output().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"


class Children:
    """Every child of one run. ``folder`` takes their output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[Child] = []
        self._started = 0

    def start(self, name: str, *arguments: str) -> Child:
        """Start ``hetero_gateway`` with these arguments."""
        self._started += 1
        child = Child(name, arguments, self._folder / f"{self._started}.log")
        self._running.append(child)
        return child

    def check(self) -> None:
        """Raises HeteroGatewayError if any of them has ended by itself."""
        for child in self._running:
            child.check()

    def stop(self, *which: Child) -> None:
        """End these (by default all) and wait; blocks for at most a few seconds.

        It blocks on purpose: nothing, not even a second Ctrl-C, may come between.
        """
        children = which or tuple(self._running)
        for child in children:
            child.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            child.signal(signal.SIGKILL)  # whatever is left of its group
            child.process.wait()
        self._running = [child for child in self._running if child not in children]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
