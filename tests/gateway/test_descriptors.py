"""A process that has no descriptors left: nothing spins, nobody is marked down, and it recovers."""

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.fakes.processes import Process, started

# Descriptors: most of them are a client's, since every limit below 4 of them is of no use.
LIMIT = 160
WITH_A_LIMIT = (
    "import resource, runpy, sys; "
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT // 2}, {LIMIT})); "
    "sys.argv = ['hetero-gateway', *sys.argv[1:]]; "
    "runpy.run_module('hetero_gateway', run_name='__main__', alter_sys=True)"
)


class Limited(Process):
    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-c", WITH_A_LIMIT, *args]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Process]:
    path = tmp_path / "gateway.yaml"
    path.write_text("server: {max_connections: 1000}\ninstances: []\n")
    with started("serve", "-c", str(path), "--port", "0", kind=Limited) as process:
        yield process


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_who_finds_no_descriptor_is_turned_away_and_nothing_spins(gateway: Process) -> None:
    port = int(gateway.url.rsplit(":", 1)[1])
    limits = Path(f"/proc/{gateway.process.pid}/limits").read_text()
    assert re.search(rf"Max open files +{LIMIT} +{LIMIT} ", limits)
    before = len(gateway.lines)
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            for _ in range(LIMIT + 40)
        ]
        time.sleep(0.5)
        started_s = cpu_s(gateway.process.pid)
        time.sleep(2)
        assert cpu_s(gateway.process.pid) - started_s < 1
        clients[0].sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert clients[0].recv(100).startswith(b"HTTP/1.1 200 ")
        # Closed, and not left in a queue that nobody looks at.
        assert clients[-1].recv(100) == b""
    for _ in range(50):
        with contextlib.suppress(OSError), urlopen(f"{gateway.url}/livez", timeout=30) as answer:
            assert json.load(answer) == {"status": "ok"}
            break
        time.sleep(0.1)
    else:
        pytest.fail("it does not recover")
    assert "Traceback" not in "".join(gateway.lines[before:])
