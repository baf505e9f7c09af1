"""The command as a process that is forked, from one that has imported all of it already.

A start by ``exec`` imports a thousand modules: half of a second of CPU. That, and Python's own
start, is what is left out; the process has its number, descriptors, environment and folder, and the
command reads its arguments and streams as ever. What is tested *of* starts is started by ``exec``.

``python -m tests.fakes.forks DESCRIPTOR`` forks what messages through that socket ask for.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from functools import cache
from typing import IO, NoReturn

from hetero_gateway.cli import main

# What most of what tests start imports.
_MODULES = (
    *("cli.arguments", "cli.emulate", "cli.picker", "cli.profile", "cli.serve", "cli.validate"),
    *("serve.picker", "serve.processes.supervisor", "serve.processes.worker"),
)
_LARGEST = 1 << 20  # bytes of a message: arguments and an environment


class Forked:
    """As a ``subprocess.Popen`` of ``python -m hetero_gateway ARGS`` whose errors come here."""

    def __init__(self, *args: str, stdout: int, env: Mapping[str, str] | None = None) -> None:
        self.args = args
        self.returncode: int | None = None
        errors, errors_of_it = os.pipe()
        self._status, status_of_it = os.pipe()
        told: list[object] = [args, dict(os.environ if env is None else env), os.getcwd()]
        nursery = _nursery()
        given = [0, stdout, errors_of_it, status_of_it]
        socket.send_fds(nursery, [json.dumps(told).encode()], given)
        self.pid = int(nursery.recv(32))
        os.close(errors_of_it)
        os.close(status_of_it)
        self.stderr: IO[str] = open(errors, encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        found = self._look(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return found

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status, 32)))
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its status is on its way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _nursery() -> socket.socket:
    """To the process that forks for this one; it ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.forks", str(number)], pass_fds=[number]
    )
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def _serve(asked: socket.socket) -> None:
    """Fork for each message, until whoever asks has gone."""
    for name in _MODULES:
        importlib.import_module(f"hetero_gateway.{name}")
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who asks has it, too
    watching = 0
    while True:
        message, given, _, _ = socket.recv_fds(asked, _LARGEST, 4)
        if not message:
            break
        if os.fork() == 0:
            _watch(asked, message, given)
        watching += 1
        for descriptor in given:
            os.close(descriptor)
        while watching and os.waitpid(-1, os.WNOHANG)[0]:
            watching -= 1
    for _ in range(watching):  # their CPU time counts, too
        os.wait()


def _watch(asked: socket.socket, message: bytes, given: list[int]) -> NoReturn:
    """Fork once more, tell the number, wait for the end and tell its status."""
    *streams, status = given
    if (pid := os.fork()) == 0:
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, max([*given, asked.fileno()]) + 1)
        _run(message)
    asked.send(b"%d" % pid)
    asked.close()
    for descriptor in (0, 1, 2, *streams):  # of pipes whose end somebody may wait for
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, b"%d" % os.waitpid(pid, 0)[1])
    os._exit(0)


def _run(message: bytes) -> NoReturn:
    """What ``python -m hetero_gateway`` does, and at its end Python itself."""
    args, environment, folder = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["hetero-gateway", *args]
    code: object = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
