"""Running out of descriptors is the gateway's own fault: no instance goes down for it."""

import contextlib
import http.client
import json
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_gateway.files.admin_key import find
from hetero_gateway.http.upstream import is_our_own
from tests.fakes.processes import started, wait_for
from tests.fakes.threads import Handler, listening

BODY = json.dumps({"model": "m", "prompt": "x"})


class _Handler(Handler):
    """Closes each connection after its answer: every probe and request needs a new one."""

    def do_GET(self) -> None:
        document = {"data": [{"id": "m"}]} if self.path == "/v1/models" else {}
        self.answer(json.dumps(document).encode(), connection="close")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(b'{"choices": []}', connection="close")


class Client:
    """One connection, which is there before descriptors run out."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        found = find(url)
        assert found is not None
        self._headers = {"authorization": f"Bearer {found.key}"}

    def ask(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        self._connection.request(method, path, body, self._headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def up(self) -> list[bool]:
        return [row["up"] for row in self.ask("GET", "/admin/instances")[1]["instances"]]

    def close(self) -> None:
        self._connection.close()


def test_without_descriptors_every_instance_stays_up_and_serves_again(tmp_path: Path) -> None:
    with listening(_Handler) as one, listening(_Handler) as other:
        config = {
            "health": {"probe_interval_s": 0.1, "unhealthy_after": 1},
            "instances": [{"id": "a", "base_url": one}, {"id": "b", "base_url": other}],
        }
        path = tmp_path / "gateway.yaml"
        path.write_text(yaml.safe_dump(config))
        with (
            started("serve", "-c", str(path), "--port", "0") as gateway,
            contextlib.closing(Client(gateway.url)) as client,
        ):
            assert client.up() == [True, True]
            assert client.ask("POST", "/v1/completions", BODY)[0] == 200
            pid = gateway.process.pid
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            wait_for("probes", lambda: "could not be probed" in "".join(gateway.lines))
            for _ in range(5):
                status, answer = client.ask("POST", "/v1/completions", BODY)
                assert (status, answer["error"]["code"]) == (503, "gateway_exhausted")
                assert client.up() == [True, True]
                time.sleep(0.1)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            assert client.ask("POST", "/v1/completions", BODY)[0] == 200
            assert client.up() == [True, True]


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (OSError(24, "Too many open files"), True),
        (OSError(99, "Cannot assign requested address"), True),
        (socket.gaierror(socket.EAI_SYSTEM, "System error"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), False),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
        (ConnectionRefusedError(111, "Connection refused"), False),
        (OSError("Multiple exceptions: refused, unreachable"), False),
        (UnicodeError("label too long"), False),
    ],
)
def test_whose_fault_it_is(error: OSError, ours: bool) -> None:
    assert is_our_own(error) is ours


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError("Multiple exceptions: too many open files, refused"),
    ],
)
def test_a_vague_error_is_ours_where_no_descriptor_can_be_had(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted() -> socket.socket:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(socket, "socket", exhausted)
    assert is_our_own(error)
