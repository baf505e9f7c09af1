"""Standard input, output and error in any state: closed, a full disk, a pipe nobody reads.

    stream                      if it is closed, or cannot be written
    output of a command         one line on standard error, exit code 1 (141: its reader has left)
    output of a server          is lost; it goes on
    error                       is lost; the command goes on
    input                       is empty

A closed descriptor below 3 would be reused by the next file or socket: output would go there, and
libuv refuses to close it.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from hetero_gateway.errors import OutputError

_STDIN, _STDOUT, _STDERR = range(3)


class _Output(io.TextIOWrapper):
    """A command's output matters: a failed write is an error."""

    def write(self, text: str) -> int:
        with _reported():
            return super().write(text)

    def flush(self) -> None:
        with _reported():
            super().flush()


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror}") from error


class _Tolerant(io.TextIOWrapper):
    """Lines are dropped if they cannot be written."""

    def __init__(self, descriptor: int, like: TextIO | None) -> None:
        # Unbuffered: text that failed would otherwise be retried with each line.
        raw = io.FileIO(descriptor, "w", closefd=False)
        encoding = None if like is None else like.encoding
        super().__init__(raw, encoding, "backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def prepare() -> None:
    """Make the streams usable. Call this before anything is opened."""
    for descriptor, flags in (
        (_STDIN, os.O_RDONLY),
        (_STDOUT, os.O_RDONLY),  # so that writing fails, as on a closed stream
        (_STDERR, os.O_WRONLY),
    ):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number
    if sys.stdin is None:
        sys.stdin = open(_STDIN, closefd=False)
    encoding = errors = None
    if sys.stdout is not None:
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
    raw = io.BufferedWriter(io.FileIO(_STDOUT, "w", closefd=False))
    sys.stdout = _Output(raw, encoding, errors, line_buffering=os.isatty(_STDOUT))
    sys.stderr = _Tolerant(_STDERR, sys.stderr)


def tolerate_output() -> None:
    """For servers: printed output may be lost."""
    if isinstance(sys.stdout, _Output):
        sys.stdout = _Tolerant(_STDOUT, sys.stdout)


def discard_output() -> None:
    """Drop the remaining output: the interpreter's own flush at exit must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
