"""Non-engine paths, passed on to the scheduler process by HTTP over its Unix socket."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.fleet.engine_calls import TIMEOUT_S as ENGINE_CALL_S
from hetero_gateway.http.downstream import Receive, Scope, Send
from hetero_gateway.http.errors import error_body
from hetero_gateway.plain_httpx import httpx
from hetero_gateway.serve.control.access import PEER_HEADER

# /admin accepts less, and reports its own limit.
_MOST_BODY_BYTES = 2**20 + 1
_TRIES, _PAUSE_S = 40, 0.05
# A hanging process still accepts connections: the worker knows whether it is away.
_AWAY_S, _LOOK_S = 5.0, 0.25
_TIMEOUT_S = 60.0
_ENGINE_CALL = re.compile(rb"/admin/(?:instances|models)/.*/engine/")
# Files of batches, which may have any length in either direction.
_FILES = re.compile(rb"/v1/(?:files|uploads)(?:/|\?|\Z)")
_ENGINE_CALL_S = 10.0 + ENGINE_CALL_S
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length"))


_PEER = PEER_HEADER.encode()
# The body of an answer read whole: in the extensions, which httpx leaves to others.
_BODY = "hetero_gateway.body"


class ControlRelay:
    """An ASGI application. It waits up to five seconds for an absent scheduler process.

    Args:
        path: of the socket.
        is_away: whether that process is gone, or has been silent for some seconds.
    """

    def __init__(self, path: str, is_away: Callable[[], bool]) -> None:
        self._is_away = is_away
        self._client = httpx.AsyncClient(
            # No connection is kept open: one to a crashed process would fail its next request.
            transport=httpx.AsyncHTTPTransport(
                uds=path, limits=httpx.Limits(max_keepalive_connections=0)
            ),
            timeout=_TIMEOUT_S,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        is_file = _FILES.match(target) is not None
        body = None if is_file and scope["method"] == "POST" else await _body(receive)
        if body is None and not is_file:
            return
        headers = [
            pair for pair in scope["headers"] if pair[0] not in _HOP_BY_HOP and pair[0] != _PEER
        ]
        if scope.get("client") is not None:
            headers.append((_PEER, scope["client"][0].encode("latin-1", "replace")))
        # The Host header is the client's, and is checked.
        if not any(name == b"host" for name, _ in headers):
            headers.append((b"host", b""))
        try:
            if body is None:
                answer = await self._upload(target, headers, receive)
            else:
                answer = await self._ask_in_time(scope["method"], target, headers, body)
            fields = [
                (name.lower(), value)
                for name, value in answer.headers.raw
                if name.lower() not in _HOP_BY_HOP
            ]
            if not answer.is_stream_consumed:
                await _pass_on(answer, fields, receive, send)
                return
            status, content = answer.status_code, answer.extensions[_BODY]
        except ClientDisconnect:
            return
        except (httpx.HTTPError, TimeoutError):
            message = "The gateway's scheduler process does not answer."
            refusal = Refusal(503, "scheduler_unavailable", message, kind="server_error")
            content = error_body(refusal, scope["path"])
            status, fields = 503, [(b"content-type", b"application/json"), (b"retry-after", b"2")]
        fields.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": content})

    async def _upload(
        self, target: bytes, headers: list[tuple[bytes, bytes]], receive: Receive
    ) -> httpx.Response:
        """Pass a body on as it arrives. Raises httpx.HTTPError, ClientDisconnect."""

        async def body() -> AsyncIterator[bytes]:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                more = message.get("more_body", False)
                yield message.get("body", b"")

        url = httpx.URL("http://gateway").copy_with(raw_path=target)
        request = self._client.build_request("POST", url, headers=headers, content=body())
        return await self._client.send(request, stream=True)

    async def _ask_in_time(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> httpx.Response:
        """Ask without a time limit, as long as the process is present.

        Raises httpx.HTTPError, TimeoutError.
        """
        asking = asyncio.ensure_future(self._ask(method, target, headers, body))
        try:
            while not asking.done():
                if not self._is_away():
                    await asyncio.wait({asking}, timeout=_LOOK_S)
                    continue
                # Its successor takes connections that wait at the socket.
                await asyncio.wait({asking}, timeout=_AWAY_S)
                if not asking.done() and self._is_away():
                    raise TimeoutError
            return asking.result()
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    async def _ask(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> httpx.Response:
        """Raises httpx.HTTPError."""
        url = httpx.URL("http://gateway").copy_with(raw_path=target)
        timeout_s = _ENGINE_CALL_S if _ENGINE_CALL.match(target) else _TIMEOUT_S
        for tries_left in range(_TRIES, -1, -1):
            try:
                request = self._client.build_request(
                    method, url, headers=headers, content=body, timeout=timeout_s
                )
                answer = await self._client.send(request, stream=True)
                if not _is_stream(answer) and not _FILES.match(target):
                    # Raw bytes: it may be compressed.
                    parts = [part async for part in answer.aiter_raw()]
                    answer.extensions[_BODY] = b"".join(parts)
                return answer
            except httpx.TransportError as error:
                # Reads may be retried, wherever the process was when it ended.
                again = isinstance(error, httpx.ConnectError) or method in ("GET", "HEAD")
                late = isinstance(error, httpx.TimeoutException)
                if late or not again or not tries_left:
                    raise
                await asyncio.sleep(_PAUSE_S)
        raise AssertionError


async def _body(receive: Receive) -> bytes | None:
    """The request's body; cut off above the accepted size. None: the client is gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        if size < _MOST_BODY_BYTES:
            parts.append(part)
        size += len(part)
        if not message.get("more_body"):
            return b"".join(parts)[:_MOST_BODY_BYTES]


def _is_stream(answer: httpx.Response) -> bool:
    return bool(answer.headers.get("content-type", "").startswith("text/event-stream"))


async def _pass_on(
    answer: httpx.Response, fields: list[tuple[bytes, bytes]], receive: Receive, send: Send
) -> None:
    """Pass on a stream of events, as they arrive, until it ends or the client is gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        passing.cancel()

    async def relay() -> None:
        await send({"type": "http.response.start", "status": answer.status_code, "headers": fields})
        with suppress(httpx.HTTPError):  # the scheduler process is gone: so is the stream
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        watching.cancel()

    try:
        async with asyncio.TaskGroup() as tasks:
            passing, watching = tasks.create_task(relay()), tasks.create_task(watch())
    finally:
        await answer.aclose()
