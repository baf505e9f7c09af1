"""Whether a process still works: its heartbeat, and the supervisor's conclusions.

Each process has one end of a pair of sockets, the supervisor the other. A process writes a byte
each ``LOOK_S`` from its event loop; a process that is stopped or whose loop is blocked writes none.
The supervisor counts looks, not seconds: while it does not run itself, nothing counts.

    state of a process                               action
    silent for ``SILENT_LOOKS``                      the other workers accept its connections, too
    stopped (SIGSTOP) for as long                    it is killed, and started again
    silent for ``server.worker_timeout_s``           the same
    not up yet                                       the same after ten times as long

The first is harmless if it was wrong, so a machine that is short of CPU time loses no process.

The supervisor sends two bytes: ``+`` or ``-`` and a worker's number. With ``+`` comes the
descriptor of that worker's listener, to accept from until ``-``.
"""

import asyncio
import contextlib
import enum
import logging
import os
import socket
from typing import Protocol

LOOK_S = 0.5
SILENT_LOOKS = 3
_STARTING = 10

_COVER, _LEAVE = b"+", b"-"

_log = logging.getLogger(__name__)


class Condition(enum.Enum):
    """A process's apparent state."""

    WELL = "well"
    SILENT = "silent"
    STOPPED = "stopped"
    HANGS = "hangs"


class Pulse:
    """What is known of one process, from its start on.

    Args:
        timeout_s: of silence, after which it counts as hanging.
    """

    def __init__(self, timeout_s: float) -> None:
        self.up = False
        self._most_silent = max(SILENT_LOOKS, round(timeout_s / LOOK_S))
        self._silent = 0
        self._stopped = 0

    def beat(self) -> None:
        self.up = True
        self._silent = 0

    def look(self, *, stopped: bool) -> Condition:
        """To be called each ``LOOK_S``; ``stopped``: the system reports it as stopped."""
        self._silent += 1
        self._stopped = self._stopped + 1 if stopped else 0
        if self._stopped >= SILENT_LOOKS:
            return Condition.STOPPED
        if self._silent > self._most_silent * (1 if self.up else _STARTING):
            return Condition.HANGS
        return Condition.SILENT if self._silent >= SILENT_LOOKS else Condition.WELL


def is_stopped(pid: int) -> bool:
    """Whether a child is stopped by a signal; a debugger's hold does not count."""
    if not hasattr(os, "waitid"):
        return False  # macOS before Python 3.13: only silence shows it
    try:
        # WNOWAIT: the exit status stays available to others.
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return stopped is not None


def tell_cover(link: socket.socket, number: int, listener: socket.socket | None) -> None:
    """Have a worker accept connections for the one with this number, or (None) no longer."""
    with contextlib.suppress(OSError):  # it is gone, or does not read: it will be told again
        if listener is None:
            link.send(_LEAVE + bytes([number]))
        else:
            socket.send_fds(link, [_COVER + bytes([number])], [listener.fileno()])


class Covers(Protocol):
    """A server that can accept connections from further listeners."""

    def cover(self, number: int, listener: socket.socket) -> None: ...

    def leave(self, number: int) -> None: ...


class Heartbeat:
    """A process's end. It reports the process as up once started.

    Args:
        descriptor: of the socket.
    """

    def __init__(self, descriptor: int) -> None:
        self._link = socket.socket(fileno=descriptor)
        self._link.setblocking(False)
        self._server: Covers
        self._timer: asyncio.TimerHandle | None = None

    def start(self, server: Covers) -> None:
        self._server = server
        asyncio.get_running_loop().add_reader(self._link, self._read)
        self._beat()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()

    def _beat(self) -> None:
        # A supervisor that does not read needs no more; one that is gone is noticed elsewhere.
        with contextlib.suppress(OSError):
            self._link.send(b".")
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._beat)

    def _read(self) -> None:
        try:
            said, descriptors, _, _ = socket.recv_fds(self._link, 2, 1)
        except BlockingIOError:
            return
        except OSError:
            said, descriptors = b"", []
        if len(said) < 2:  # the supervisor is gone
            asyncio.get_running_loop().remove_reader(self._link)
            return
        if said[:1] == _COVER and descriptors:
            listener = socket.socket(fileno=descriptors[0])
            listener.setblocking(False)
            self._server.cover(said[1], listener)
        else:
            self._server.leave(said[1])
