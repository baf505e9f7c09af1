"""Standard input, output and error, whatever they are: closed, a full disk, a pipe nobody reads.

    stream                      if it is closed, or cannot be written
    output of a command         one line on standard error, exit code 1 (141: its reader has left)
    output of one that serves   is lost; it goes on
    error                       is lost; the command goes on
    input                       is empty

A descriptor below 3 that is closed would be given to the next file or socket that is opened: what
is printed would go there, and libuv refuses to close it.
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
    """What a command is for: that it cannot be written is an error."""

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
    """Lines that are lost where they cannot be written."""

    def __init__(self, descriptor: int, like: TextIO | None) -> None:
        # Without a buffer: what could not be written would be tried again with each line.
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
    """Make them ones that can be used. To be called before anything is opened."""
    for descriptor, flags in (
        (_STDIN, os.O_RDONLY),
        (_STDOUT, os.O_RDONLY),  # so that writing fails, as it does where it is closed
        (_STDERR, os.O_WRONLY),
    ):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(_STDIN, closefd=False)
    encoding = errors = None
    if sys.stdout is not None:
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
    raw = io.BufferedWriter(io.FileIO(_STDOUT, "w", closefd=False))
    sys.stdout = _Output(raw, encoding, errors, line_buffering=os.isatty(_STDOUT))
    sys.stderr = _Tolerant(_STDERR, sys.stderr)


def tolerate_output() -> None:
    """Of a command that serves: what it prints may be lost."""
    if isinstance(sys.stdout, _Output):
        sys.stdout = _Tolerant(_STDOUT, sys.stdout)


def discard_output() -> None:
    """What is left to write is lost: the interpreter's own flush at the end must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
