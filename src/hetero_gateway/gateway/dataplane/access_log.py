"""The access log: one line for each request on an engine's path, on standard output.

A line contains only measurements and names: the request's id, the name of its key, and models if
they are served. Anything else that clients write, such as prompts, keys and invented names, never
appears.

A thread does the writing, so that no stream waits for a slow reader. Lines that are not taken in
time are dropped and counted, and a warning says so.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from hetero_gateway.gateway.dataplane.ended import Ended

_log = logging.getLogger(__name__)

# Batches of lines that wait to be written: some megabytes at most.
_MOST_WAITING = 256
_CLOSE_S = 2.0
# Temporary errors: the disk is full, or the user's share of it.
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
_PLAIN = re.compile(r"[!#-<>-~]+")
_LONGEST_NAME = 200


class LineWriter:
    """Writes whole lines to a descriptor, in a thread of its own.

    Lines that cannot be stored (a full disk) are lost, and writing resumes once there is space.
    Raises OSError: the descriptor is closed, or cannot be written.

    Several processes may write to one pipe: one call writes at most ``PIPE_BUF`` bytes, which the
    system keeps together, and ends with a line.
    """

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._queue: queue.Queue[list[bytes] | None] = queue.Queue(_MOST_WAITING)
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._torn = False  # the last line has no end
        self._failed = 0  # lines since the last that could be written
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, lines: list[bytes]) -> None:
        """Write soon; each line ends with a newline. Never waits."""
        try:
            self._queue.put_nowait(lines)
        except queue.Full:
            if not self.dropped:
                _log.warning("access log: its reader is too slow; lines are dropped")
            self.dropped += len(lines)
            return
        if self.dropped:
            _log.warning("access log: %d lines were dropped", self.dropped)
            self.dropped = 0

    def close(self) -> None:
        """Write what is left, within two seconds."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                if self._torn:
                    self._write(b"\n")
                for piece in [b"".join(lines)] if self._is_file else pieces(lines):
                    self._write(piece)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    _log.error("access log: %s; no further lines are written", error.strerror)
                    while self._queue.get() is not None:
                        pass
                    return
                if not self._failed:
                    _log.error("access log: %s; lines are lost until there is room", error.strerror)
                self._failed += len(lines)
            else:
                if self._failed:
                    _log.warning(
                        "access log: there is room again; %d lines were lost", self._failed
                    )
                    self._failed = 0

    def _write(self, data: bytes) -> None:
        while data:
            try:
                written = os.write(self._descriptor, data)
                self._torn = data[written - 1 : written] != b"\n"
                data = data[written:]
            except BlockingIOError:  # the descriptor was inherited as non-blocking
                select.select([], [self._descriptor], [], 1.0)


def pieces(lines: Sequence[bytes]) -> list[bytes]:
    """The same lines, in groups that fit in ``PIPE_BUF``."""
    found: list[bytes] = []
    part: list[bytes] = []
    size = 0
    for line in lines:
        if part and size + len(line) > select.PIPE_BUF:
            found.append(b"".join(part))
            part, size = [], 0
        part.append(line)
        size += len(line)
    return [*found, b"".join(part)]


class AccessLog:
    """Makes lines of requests that have ended.

    Args:
        write: takes the lines.
        as_json: otherwise they are for people.
        knows: whether a model is served: other names are a client's invention.
    """

    def __init__(
        self, write: Callable[[list[bytes]], None], *, as_json: bool, knows: Callable[[str], bool]
    ) -> None:
        self._write = write
        self._make = _json_line if as_json else _text_line
        self._knows = knows
        self._second = 0
        self._stamp = ""

    def __call__(self, requests: Sequence[Ended]) -> None:
        unix_less_monotonic_s = time.time() - time.monotonic()
        lines = []
        for ended in requests:
            at = self._at(ended.ended_s + unix_less_monotonic_s)
            lines.append(self._make(ended, at, self._model(ended)))
        self._write(lines)

    def _model(self, ended: Ended) -> str:
        job = ended.job
        if job is None:
            return ""
        model = job.parsed.model or ""
        if ended.last is None and not self._knows(model):
            return "unknown"
        return model[:_LONGEST_NAME]

    def _at(self, unix_s: float) -> str:
        second = int(unix_s)
        if second != self._second:
            self._second = second
            self._stamp = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._stamp}.{int((unix_s - second) * 1000):03d}Z"


def _text_line(ended: Ended, at: str, model: str) -> bytes:
    inbound, (prompt, output, cached) = ended.inbound, ended.usage()
    where = "-" if ended.last is None else ended.last[0].instance.id
    ttft_s, overhead_s, reason = ended.ttft_s, ended.overhead_s, ended.reason
    return (
        f"{at} access {inbound.method.decode('ascii')} {_plain(inbound.path)} {ended.status} "
        f"{ended.outcome}{f':{reason}' if reason else ''} id={inbound.request_id.decode('ascii')} "
        f"key={_plain(ended.client)} model={_plain(model)} instance={_plain(where)} "
        f"attempts={ended.attempts} wait_s={ended.waited_s:.3f} "
        f"ttft_s={'-' if ttft_s is None else f'{ttft_s:.3f}'} total_s={ended.duration_s:.3f} "
        f"in={_figure(prompt)} out={_figure(output)} cached={_figure(cached)} "
        f"overhead_ms={'-' if overhead_s is None else f'{overhead_s * 1e3:.2f}'}\n"
    ).encode("utf-8", "replace")


def _json_line(ended: Ended, at: str, model: str) -> bytes:
    inbound, (prompt, output, cached) = ended.inbound, ended.usage()
    document: dict[str, Any] = {
        "time": at,
        "kind": "access",
        "request_id": inbound.request_id.decode("ascii"),
        "method": inbound.method.decode("ascii"),
        "path": inbound.path[:_LONGEST_NAME],
        "status": ended.status,
        "outcome": ended.outcome,
        "reason": ended.reason or None,
        "key": ended.client or None,
        "model": model or None,
        "instance": None if ended.last is None else ended.last[0].instance.id,
        "attempts": ended.attempts,
        "queue_wait_s": round(ended.waited_s, 6),
        "ttft_s": _rounded(ended.ttft_s),
        "duration_s": round(ended.duration_s, 6),
        "input_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": cached,
        "overhead_s": _rounded(ended.overhead_s),
    }
    return msgspec.json.encode(document) + b"\n"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _figure(value: int | None) -> str:
    return "-" if value is None else str(value)


def _plain(name: str) -> str:
    """A name as one word of a line, quoted if necessary."""
    if _PLAIN.fullmatch(name):
        return name[:_LONGEST_NAME]
    return msgspec.json.encode(name[:_LONGEST_NAME]).decode() if name else "-"
