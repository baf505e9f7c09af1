"""Clients that leave, in each way and at each moment: nobody's fault, and no word of it in the log.

A real server with its own loop (uvloop), real sockets, and an instance in another thread.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

import pytest
import yaml

from tests.fakes.processes import Process

CHAT = "/v1/chat/completions"


class Slow(BaseHTTPRequestHandler):
    """An instance whose streams go on for a minute, unless their request is for /v1/completions."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m", "max_model_len": 4096}]}' if "models" in self.path else b""
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

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
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as instance:
        threading.Thread(target=instance.serve_forever, daemon=True).start()
        path = tmp_path_factory.mktemp("leaving") / "gateway.yaml"
        url = f"http://127.0.0.1:{instance.server_port}"
        document = {
            "scheduler": {"prefill_depth": 1},
            "instances": [
                {"id": "a", "base_url": url, "profile": "V100-32GB-NVLink2/Llama-3-8B/tp1"}
            ],
        }
        path.write_text(yaml.safe_dump(document))
        process = Process("serve", "-c", str(path), "--port", "0")
        try:
            process.wait_ready()
            yield process
        finally:
            process.stop()
            instance.shutdown()


def request(
    path: str = CHAT, method: str = "POST", host: str = "127.0.0.1", **fields: object
) -> bytes:
    body = json.dumps(
        {"model": "m", "messages": [], "prompt": "x", "stream": True} | fields
    ).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def idle(client: socket.socket) -> None:
    client.sendall(b"")


def in_a_head(client: socket.socket) -> None:
    client.sendall(b"POST /v1/chat")


def in_a_body(client: socket.socket) -> None:
    client.sendall(request()[:-5])


def in_a_body_of_the_gateways_own(client: socket.socket) -> None:
    client.sendall(request("/admin/instances")[:-5])


def unanswered(client: socket.socket) -> None:
    client.sendall(request("/v1/completions"))
    time.sleep(0.05)


def streaming(client: socket.socket) -> None:
    client.sendall(request())
    client.recv(4096)


def flooded(client: socket.socket) -> None:
    client.sendall(request("/v1/responses"))
    client.recv(4096)


def flooded_and_stuck(client: socket.socket) -> None:
    client.sendall(request("/v1/responses"))
    time.sleep(0.3)


def flooded_by_http_10(client: socket.socket) -> None:
    client.sendall(request("/v1/responses").replace(b"HTTP/1.1", b"HTTP/1.0"))
    client.recv(100_000)


def streaming_by_http_10(client: socket.socket) -> None:
    client.sendall(request().replace(b"HTTP/1.1", b"HTTP/1.0"))
    client.recv(4096)


def with_a_request_behind(client: socket.socket) -> None:
    client.sendall(request() + request() + b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    client.recv(4096)


def with_many_behind(client: socket.socket) -> None:
    client.sendall(request())
    client.recv(100)
    with contextlib.suppress(OSError):
        client.setblocking(False)
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000)


def asking_for_metrics(client: socket.socket) -> None:
    client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 50)


def asking_for_the_api(client: socket.socket) -> None:
    client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 50)


def garbage(client: socket.socket) -> None:
    client.sendall(b"\x16\x03\x01\x00")


def refused(client: socket.socket) -> None:
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
    )
    client.recv(100)


MOMENTS = [
    idle, in_a_head, in_a_body, in_a_body_of_the_gateways_own, unanswered, streaming, flooded,
    flooded_and_stuck, flooded_by_http_10, streaming_by_http_10, with_a_request_behind,
    with_many_behind, asking_for_metrics, asking_for_the_api, garbage, refused,
]  # fmt: skip


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def end(client: socket.socket) -> None:
    client.close()


def half_close(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
    time.sleep(0.02)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("leave", [reset, end, half_close])
@pytest.mark.parametrize("moment", MOMENTS)
def test_who_leaves_is_not_in_the_log(
    gateway: Process,
    moment: Callable[[socket.socket], None],
    leave: Callable[[socket.socket], None],
) -> None:
    before = len(gateway.lines)
    port = int(gateway.url.rsplit(":", 1)[1])
    for _ in range(3):
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), 30)) as client:
            moment(client)
            leave(client)
    urlopen(f"{gateway.url}/livez", timeout=60).read()
    time.sleep(0.1)
    # That somebody without a right asked for a change belongs there.
    assert [line for line in gateway.lines[before:] if "hetero_gateway.audit" not in line] == []
