"""The bench around the servers under test: builds the C programs, starts and ends processes.

The server under test has the first of this process's cores to itself; the mock instances, the
load and this script share the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.dataplane.cpu import MachineCpu, process_cpu_s
from benchmarks.ports import free_port

HERE = Path(__file__).resolve().parent


class BenchError(Exception):
    """Something this benchmark needs is missing or failed; the message says what."""


def cache_dir() -> Path:
    """Where virtual environments and built programs are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "hetero-gateway" / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def note(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def raise_file_limit() -> None:
    """Lets this process and its children open as many files as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def build(name: str) -> Path:
    """The program made from `name`.c; built again only when the source is newer."""
    source, program = HERE / f"{name}.c", cache_dir() / name
    if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
        return program
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchError("a C compiler (cc) is needed to build the mock instance and the load")
    command = [compiler, "-O2", "-Wall", "-o", str(program), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{source.name} does not build:\n{done.stderr}")
    return program


def _leave(sign: int, _: object) -> None:
    # timeout(1) sends it twice; the second must not break off the clearing up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(128 + sign)


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """What is started inside inherits one core, and sees one when it counts cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Load:
    """One segment's load, and what the proxy's machine did meanwhile."""

    result: dict[str, Any]
    cpu_s: float
    duration_s: float


@dataclass
class Rig:
    """Everything that runs; leaving the context ends all of it."""

    workdir: Path
    interval_ms: float = 15.0
    mocks: int = 2
    proxy_core: int = field(init=False)
    load_core: int = field(init=False)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    instance_urls: list[str] = field(default_factory=list)
    instance_pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.proxy_core, self.load_core = cores[0], cores[-1]
        if len(cores) == 1:
            note("only one core: the load runs on the proxy's core, so latencies mean little")

    def __enter__(self) -> Rig:
        raise_file_limit()
        for sign in (signal.SIGTERM, signal.SIGHUP):  # else nothing would end the servers
            signal.signal(sign, _leave)
        self.load_program = build("load")
        mock = build("mock")
        for index in range(self.mocks):
            port = free_port()
            command = [str(mock), "--port", str(port), "--interval-ms", str(self.interval_ms)]
            process = self.start(f"mock-{index}", command, self.load_core)
            self.instance_pids.append(process.pid)
            self.instance_urls.append(f"http://127.0.0.1:{port}")
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            self.stop(process)

    def start(
        self, name: str, command: list[str], core: int, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a server in a session of its own, on one core, logging to the work directory."""
        with (self.workdir / f"{name}.log").open("wb") as log, pinned(core):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.workdir,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
                # Workers outlive a launcher that ends first: take the session with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return

    def log_tail(self, name: str, lines: int = 3) -> str:
        text = (self.workdir / f"{name}.log").read_text(errors="replace").strip()
        return " | ".join(line.strip() for line in text.splitlines()[-lines:])[-400:]

    def load(self, port: int, **options: float) -> LoadRun:
        """Starts a load that has warmed up and waits for `go`. Raises BenchError."""
        arguments = ["--port", str(port)]
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        with pinned(self.load_core):
            process = subprocess.Popen(
                [str(self.load_program), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline().strip() != "ready":
            process.wait()
            raise BenchError(process.stderr.read().strip() or f"load ended: {process.returncode}")
        return LoadRun(process)


class LoadRun:
    """A load generator that is ready to go."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._cpu_before_s = process_cpu_s(process.pid)
        self._started_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def go(self) -> None:
        assert self._process.stdin is not None
        self._started_s = time.monotonic()
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait(self) -> Load:
        """The result, once every request has ended. Raises BenchError."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        duration_s = time.monotonic() - self._started_s
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        if not line:
            raise BenchError(self._process.stderr.read().strip() or "the load gave no result")
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        cpu_s = usage.ru_utime + usage.ru_stime - self._cpu_before_s
        return Load(json.loads(line), cpu_s, duration_s)


@dataclass
class Watch:
    """CPU that others used between making this and asking."""

    own_before_s: float
    machine_before: MachineCpu
    started_s: float

    @classmethod
    def start(cls, own_s: float) -> Watch:
        """`own_s`: CPU seconds so far of everything that is not foreign."""
        return cls(own_s, MachineCpu.now(), time.monotonic())

    def foreign(self, own_now_s: float) -> tuple[float, float]:
        """Foreign CPU and stolen CPU, each in cores (1.0 is one core all the time)."""
        now, elapsed_s = MachineCpu.now(), time.monotonic() - self.started_s
        busy_s = now.busy_s - self.machine_before.busy_s
        steal_s = now.steal_s - self.machine_before.steal_s
        foreign_s = busy_s - (own_now_s - self.own_before_s)
        return max(foreign_s, 0.0) / elapsed_s, steal_s / elapsed_s
