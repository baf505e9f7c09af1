"""The processes of one gateway, killed one at a time: its workers and its scheduler process."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")


def kill_worker(pid: int, port: int) -> set[int]:
    """SIGKILL; returns the client ports of the connections to ``port`` that it had."""
    os.kill(pid, signal.SIGSTOP)  # so that it has those, and no others
    while not all(_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the moment before it stood still
            match = _SOCKET.match(os.readlink(entry))
            if match:
                inodes.add(match[1])
    clients = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes and int(fields[1].rpartition(":")[2], 16) == port:
            clients.add(int(fields[2].rpartition(":")[2], 16))
    kill(pid)
    return clients


def kill(pid: int) -> None:
    """SIGKILL; when it returns, nobody is accepted by it any more."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # who started it has noticed
        while _state(Path(f"/proc/{pid}")) != "Z":
            time.sleep(0.001)


def _stopped(task: Path) -> bool:
    return _state(task) == "T"


def _state(process: Path) -> str:
    """Of a process or thread: a signal is only on its way when ``os.kill`` returns."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]
