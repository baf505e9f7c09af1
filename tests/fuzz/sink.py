"""An instance that reads strictly: whatever the gateway sends to it must be plain HTTP/1.1.

h11 does the reading: it refuses what is ambiguous. Every POST is answered alike.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import cast

import h11

_CARD = {"id": "m", "object": "model", "max_model_len": 4096}
_PAGES = {
    b"/health": b"",
    b"/v1/models": json.dumps({"object": "list", "data": [_CARD]}).encode(),
    b"/metrics": b"",
}
_ANSWER = json.dumps(
    {
        "id": "x",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
# Of one connection (RFC 9110, 7.6.1): a gateway's own business.
_HOP_BY_HOP = {
    b"connection", b"upgrade", b"te", b"keep-alive", b"proxy-connection", b"trailer",
    b"transfer-encoding",
}  # fmt: skip


class Sink:
    """``complaints``: what was not as it must be. ``targets``: of all POSTs."""

    def __init__(self) -> None:
        self.port = 0
        self.complaints: list[str] = []
        self.targets: set[bytes] = set()
        self.posts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Connection(asyncio.Protocol):
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._http = h11.Connection(h11.SERVER)
        self._posts = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        http = self._http
        http.receive_data(data)
        try:
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    return
                if isinstance(event, h11.Request):
                    self._request = event
                elif isinstance(event, h11.EndOfMessage):
                    self._answer(self._request)
                    http.start_next_cycle()
        except h11.RemoteProtocolError as error:
            self._sink.complaints.append(f"{error}: {data[:300]!r}")
            self._transport.abort()

    def _answer(self, request: h11.Request) -> None:
        body = _ANSWER
        if request.method == b"GET":
            if self._posts:
                self._sink.complaints.append(f"GET {request.target!r} behind a POST")
            body = _PAGES.get(request.target, b"")
        else:
            self._posts += 1
            self._sink.posts += 1
            self._sink.targets.add(request.target)
            names = [name for name, _ in request.headers]
            strange = _HOP_BY_HOP.intersection(names)
            strange |= {b"host"} if names.count(b"host") != 1 else set()
            strange |= {b"content-length"} if names.count(b"content-length") != 1 else set()
            if strange:
                self._sink.complaints.append(f"{sorted(strange)}: {list(request.headers)!r}"[:600])
        headers = [("content-length", str(len(body))), ("content-type", "application/json")]
        for event in (
            h11.Response(status_code=200, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self._transport.write(self._http.send(event) or b"")


@contextlib.asynccontextmanager
async def sink() -> AsyncIterator[Sink]:
    """One that listens on a free loopback port."""
    made = Sink()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(made), "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
