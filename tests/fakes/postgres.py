"""A real PostgreSQL on a free loopback port, in a folder of its own, ended with the block."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from benchmarks.ports import free_port

_START_S = 30.0
PASSWORD = "pass word:that/nobody@may?say"
PASSWORD_ENV = "TEST_POSTGRES_PASSWORD"


def postgres_binaries() -> Path | None:
    """Where they are: Debian has none of the server's in PATH."""
    found = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(found).resolve().parent if found else debian[-1].parent if debian else None


class PostgresServer:
    """``postgres``, which can be killed and started again. Its user has a password."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        binaries = postgres_binaries()
        assert binaries is not None
        self._binaries = binaries
        # It does not run as root.
        self._as = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
        if self._as:
            shutil.chown(directory, "postgres", "postgres")
        pass_file = directory / "password"
        pass_file.write_text(PASSWORD + "\n", "utf-8")
        options = ("--auth", "scram-sha-256", "-U", "gateway", "--pwfile", str(pass_file))
        pass_file.chmod(0o644)
        self._run("initdb", "-D", str(directory / "data"), "--no-sync", "-E", "UTF8", *options)

    @property
    def url(self) -> str:
        return f"postgresql://gateway@127.0.0.1:{self.port}/postgres?sslmode=disable"

    def _run(self, name: str, *args: str) -> None:
        command = [str(self._binaries / name), *args]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._as)  # type: ignore[call-overload]

    def start(self) -> None:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "shared_buffers": "16MB",
        }
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self._binaries / "postgres"), "-D", str(self._directory / "data")),
                    *(f"--{name}={value}" for name, value in settings.items()),
                ],
                stdout=log,
                stderr=log,
                cwd="/",
                **self._as,  # type: ignore[arg-type]
            )
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            assert self._process.poll() is None, "postgres ended"
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url, password=PASSWORD).close()
                return
            time.sleep(0.05)
        raise RuntimeError("postgres did not come up")

    def stop(self) -> None:
        """At once: connections break off."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
            self._process = None


@contextlib.contextmanager
def postgres() -> Iterator[PostgresServer]:
    # Not under a folder that only root can enter.
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as directory:
        server = PostgresServer(Path(directory))
        try:
            server.start()
            yield server
        finally:
            server.stop()
