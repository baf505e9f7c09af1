"""Clients that leave, in each way and at each moment: nobody's fault, and no word of it in the log.

A real server with its own loop (uvloop), real sockets, and an instance in another thread.
"""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.request import urlopen

import pytest

from tests.fakes.gateway_files import write
from tests.fakes.processes import Process, started
from tests.fakes.threads import Handler, listening

CHAT = "/v1/chat/completions"


class Slow(Handler):
    """An instance whose streams go on for a minute, unless their request is for /v1/completions."""

    def do_GET(self) -> None:
        card = b'{"data": [{"id": "m", "max_model_len": 4096}]}'
        self.answer(card if "models" in self.path else b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with contextlib.suppress(OSError):
            if self.path == "/v1/completions":
                time.sleep(5)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            # One that fills every buffer, or one at an engine's pace.
            size, pause_s = (1_000_000, 0) if self.path == "/v1/responses" else (300, 0.005)
            event = b"data: " + b"x" * size + b"\n\n"
            for _ in range(5000):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                time.sleep(pause_s)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    profile = "V100-32GB-NVLink2/Llama-3-8B/tp1"
    with listening(Slow) as url:
        document = {
            "scheduler": {"prefill_depth": 1},
            "instances": [{"id": "a", "base_url": url, "profile": profile}],
        }
        path = write(tmp_path_factory.mktemp("leaving") / "gateway.yaml", document)
        with started("serve", "-c", str(path), "--port", "0") as process:
            yield process


def request(path: str = CHAT) -> bytes:
    body = json.dumps({"model": "m", "messages": [], "prompt": "x", "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get(path: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path


class Moment(NamedTuple):
    sent: bytes = b""
    read_bytes: int = 0  # at most
    waits_s: float = 0.0
    behind: bytes = b""  # as much of it as goes at once

    def reach(self, client: socket.socket) -> None:
        client.sendall(self.sent)
        if self.read_bytes:
            client.recv(self.read_bytes)
        time.sleep(self.waits_s)
        if self.behind:
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.sendall(self.behind)


FLOOD = request("/v1/responses")
HTTP_10 = (b"HTTP/1.1", b"HTTP/1.0")
MOMENTS = {
    "idle": Moment(),
    "in a head": Moment(b"POST /v1/chat"),
    "in a body": Moment(request()[:-5]),
    "in a body of the gateway's own": Moment(request("/admin/instances")[:-5]),
    "unanswered": Moment(request("/v1/completions"), waits_s=0.05),
    "streaming": Moment(request(), 4096),
    "flooded": Moment(FLOOD, 4096),
    "flooded and stuck": Moment(FLOOD, waits_s=0.3),
    "flooded by HTTP/1.0": Moment(FLOOD.replace(*HTTP_10), 100_000),
    "streaming by HTTP/1.0": Moment(request().replace(*HTTP_10), 4096),
    "with a request behind": Moment(2 * request() + get(b"/metrics"), 4096),
    "with many behind": Moment(request(), 100, behind=get(b"/livez") * 20_000),
    "asking for metrics": Moment(get(b"/metrics") * 50),
    "asking for the API": Moment(get(b"/openapi.json") * 50),
    "garbage": Moment(b"\x16\x03\x01\x00"),
    "refused": Moment(
        request().split(b"content-length")[0] + b"content-length: 99999999\r\n\r\n", 100
    ),
}


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
    time.sleep(0.02)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("leave", [reset, socket.socket.close, half_close])
@pytest.mark.parametrize("moment", MOMENTS)
def test_who_leaves_is_not_in_the_log(
    gateway: Process, moment: str, leave: Callable[[socket.socket], None]
) -> None:
    before = len(gateway.lines)
    port = int(gateway.url.rsplit(":", 1)[1])
    for _ in range(3):
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), 30)) as client:
            MOMENTS[moment].reach(client)
            leave(client)
    urlopen(f"{gateway.url}/livez", timeout=60).read()
    time.sleep(0.1)
    # That somebody without a right asked for a change belongs there.
    assert [line for line in gateway.lines[before:] if "hetero_gateway.audit" not in line] == []
