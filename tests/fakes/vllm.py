"""A fake vLLM instance whose faults are scripted by the request itself.

The gateway passes bodies on unchanged, so a test puts what it wants under the key ``fake``:

    events        how many content events a stream has (default 3)
    first_delay_s, delay_s   waiting before the first event, and between events
    die           "before_head", "after_head", "mid_chunk", "after_events": the socket is reset
    die_mid_body  a non-streamed answer stops half way
    status, body  a plain answer instead
    head          header lines of that, or of a stream, as text
    empty         "bytes" (content-length: 0) or "chunks" (the last chunk alone), under status 200
    end           "error" (the engine's error event, then [DONE]) or "abort"
    cut           the socket is reset after "finish", "usage" or "done", where a stream ends
    framing       "close" (the body ends with the connection), "bytes" (one byte per write)
    usage         False: no usage event
    hang          nothing is ever sent
    garbage       not HTTP at all
    extra         bytes after the end of the response
    event_bytes   size of one event's text
    event_tokens  tokens that the usage counts for one event (default 1)

It counts what a test asks about: ``requests``, ``open`` requests, ``aborted`` ones (the client's
socket closed early), ``peers`` that sent requests, and keeps each request's head and body.
"""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from tests.fakes.servers import FakeServer, read_request

# Of a real one nobody would know how much of a prompt it prefilled, were it not told.
NO_PREFIX_CACHE = 'vllm:cache_config_info{enable_prefix_caching="False"} 1.0\n'


class FakeInstance(FakeServer):
    def __init__(self, models: tuple[str, ...] = ("m",), max_model_len: int | None = 4096) -> None:
        super().__init__()
        self.host = "127.0.0.1"
        self.models = models
        self.max_model_len = max_model_len
        self.healthy = True
        self.metrics = NO_PREFIX_CACHE
        self.metrics_status = 200
        self.models_body: bytes | None = None  # in place of the list of its models
        self.checks_models = False  # 404 for others
        self.api_key: str | None = None
        self.close_after_response = False
        # Clear: it takes requests and answers none, as a process that is stopped.
        self.runs = asyncio.Event()
        self.runs.set()
        self.health_delay_s = 0.0
        self.delay_s = 0.0  # between events, where the request says nothing of it
        self.fault: dict[str, Any] = {}  # what every request is to meet, as under ``fake``
        self.requests = 0
        self.open = 0
        self.aborted = 0
        self.peers: set[object] = set()
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        # Bound and not listening while it is down: refuses, and nobody else is given the port.
        self._held: socket.socket | None = None

    def at(self, url: str) -> "FakeInstance":
        """Stands for what listens there."""
        self.port = int(url.rsplit(":", 1)[1])
        return self

    async def start(self, ssl_context: ssl.SSLContext | None = None) -> None:
        """Listen: again where it did before it was killed, or on a free port."""
        held, self._held = self._held or bound(self.port, self.host), None
        self._server = await asyncio.start_server(
            self._connection, sock=held, backlog=1024, ssl=ssl_context
        )
        self.port = held.getsockname()[1]

    async def kill(self) -> None:
        """Stop listening and reset every connection, as a killed process would."""
        assert self._server is not None
        self._server.close()
        self._held = self._held or bound(self.port, self.host)
        self.reset_connections()
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Be gone for good."""
        await self.kill()
        if self._held is not None:
            self._held.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head, body = await read_request(reader)
        path = head.split(b" ")[1].decode()
        if head.startswith(b"GET "):
            if path == "/health" and self.health_delay_s:
                await asyncio.sleep(self.health_delay_s)
            await self.runs.wait()
            _write_plain(writer, *self._get(path))
            await writer.drain()
            return True
        if path == "/tokenize" and "add_special_tokens" in (asked := _decoded(body)):
            _write_plain(writer, 200, b'{"count": %d}' % -(-len(asked["prompt"]) // 4))
            return True
        self.requests += 1
        self.open += 1
        self.heads.append(head)
        self.peers.add(writer.get_extra_info("peername"))
        self.bodies.append(body)
        watcher = asyncio.ensure_future(reader.read(1))
        answer = asyncio.ensure_future(self._post(_decoded(body), writer))
        try:
            await asyncio.wait({watcher, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.aborted += 1
                return False
            keep = answer.result() and b"connection: close" not in head.lower()
            return keep and not self.close_after_response and not watcher.done()
        finally:
            self.open -= 1
            for task in (answer, watcher):
                task.cancel()
            await asyncio.gather(answer, watcher, return_exceptions=True)

    def _get(self, path: str) -> tuple[int, bytes]:
        if path == "/health":
            return (200 if self.healthy else 503), b""
        if path == "/v1/models" and self.models_body is not None:
            return 200, self.models_body
        if path == "/v1/models":
            cards = [{"id": m, "max_model_len": self.max_model_len} for m in self.models]
            return 200, json.dumps({"object": "list", "data": cards}).encode()
        if path == "/metrics":
            return self.metrics_status, self.metrics.encode()
        return 404, b'{"detail":"Not Found"}'

    async def _post(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        fake = request.get("fake", {}) | self.fault
        if self.checks_models and request.get("model") not in self.models:
            text = f"The model `{request.get('model')}` does not exist."
            error = {"message": text, "type": "NotFoundError", "param": "model", "code": 404}
            fake = {"status": 404, "body": json.dumps({"error": error})}
        await self.runs.wait()
        if fake.get("hang"):
            await asyncio.sleep(3600)
        if fake.get("die") == "before_head":
            writer.transport.abort()
            return False
        if "garbage" in fake:
            writer.write(fake["garbage"].encode())
            return True
        if "empty" in fake:
            framing = b"content-length: 0\r\n\r\n"
            if fake["empty"] == "chunks":
                framing = b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + framing)
        elif "status" in fake:
            lines = fake.get("head", "").encode()
            _write_plain(writer, fake["status"], fake.get("body", "{}").encode(), lines)
        elif request.get("stream"):
            return await self._stream(request, fake, writer)
        else:
            await asyncio.sleep(fake.get("first_delay_s", 0))
            await self.runs.wait()
            await self._plain(fake, writer)
        if "extra" in fake:
            writer.write(fake["extra"].encode())
        await writer.drain()
        return True

    async def _plain(self, fake: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        text = "x" * fake.get("event_bytes", 4)
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": self.models[0],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3},
        }
        body = json.dumps(answer).encode()
        if fake.get("die_mid_body"):
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            writer.write(head % len(body) + body[: len(body) // 2])
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
            return
        if fake.get("framing") == "close":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + body)
            await writer.drain()
            writer.close()
            return
        _write_plain(writer, 200, body)

    async def _stream(
        self, request: dict[str, Any], fake: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        close = fake.get("framing") == "close"
        one_by_one = fake.get("framing") == "bytes"
        framing = b"" if close else b"transfer-encoding: chunked\r\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n" + framing
        head += fake.get("head", "").encode()

        async def write(data: bytes) -> None:
            await self.runs.wait()
            if one_by_one:
                for i in range(len(data)):
                    writer.write(data[i : i + 1])
                    await writer.drain()
                    await asyncio.sleep(0)
            else:
                writer.write(data)
                await writer.drain()

        async def event(data: bytes) -> None:
            text = b"data: " + data + b"\n\n"
            await write(text if close else b"%x\r\n%b\r\n" % (len(text), text))

        await write(head + b"\r\n")
        if fake.get("die") == "after_head":
            await asyncio.sleep(0.02)
            writer.transport.abort()
            return False
        await asyncio.sleep(fake.get("first_delay_s", 0))
        events = fake.get("events", 3)
        text = "x" * fake.get("event_bytes", 4)
        await event(_chunk({"role": "assistant", "content": ""}))
        for _ in range(events):
            await event(_chunk({"content": text}))
            await asyncio.sleep(fake.get("delay_s", self.delay_s))
        if fake.get("die") == "after_events":
            await asyncio.sleep(0.02)
            writer.transport.abort()
            return False
        if fake.get("die") == "mid_chunk":
            writer.write(b"ff\r\ndata: {")
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
            return False
        if fake.get("end") == "error":
            await event(b'{"error": {"message": "EngineDeadError", "code": 500}}')
        else:
            usage = {
                "prompt_tokens": 10,
                "completion_tokens": events * fake.get("event_tokens", 1),
            }
            last = _chunk({}, "abort" if fake.get("end") == "abort" else "stop")
            if fake.get("usage") == "continuous":
                last = json.dumps(json.loads(last) | {"usage": usage}).encode()
            await event(last)
            if fake.get("cut") != "finish" and fake.get("usage", True):
                await event(json.dumps({"choices": [], "usage": usage}).encode())
        if fake.get("cut") not in ("finish", "usage"):
            await event(b"[DONE]")
        if "cut" in fake:
            await asyncio.sleep(0.02)
            writer.transport.abort()
            return False
        if close:
            writer.close()
            return False
        await write(b"0\r\n\r\n" + fake.get("extra", "").encode())
        return True


def _chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(body)
    except (ValueError, RecursionError):
        return {"fake": {"status": 400}}
    return document


def _write_plain(
    writer: asyncio.StreamWriter, status: int, body: bytes, lines: bytes = b""
) -> None:
    head = b"HTTP/1.1 %d Status\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    writer.write(head % (status, lines, len(body)) + body)


def bound(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A socket on a loopback port (0: any) that does not listen yet: connections are refused."""
    # Named as TCP, or asyncio would not turn off Nagle's algorithm on its connections.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


@contextlib.asynccontextmanager
async def fake_instances(count: int, **options: Any) -> AsyncIterator[list[FakeInstance]]:
    """``count`` running fakes."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = (FakeInstance(**options) for _ in range(count))
        yield [await stack.enter_async_context(fake) for fake in fakes]
