"""/v1/realtime: a WebSocket to an instance, placed like a request and held until it closes.

``websockets`` speaks for us on both sides: through the server towards the client, and as a client
towards the instance. Messages are passed on whole, one at a time, so that each side waits for the
other; a message is bounded, and so are the time of a session and its silence. The model is named in
the path's query, ``?model=NAME``, where instances serve several.

    event                         what follows
    ----------------------------  --------------------------------------------------------------
    no key, no model, no place    an HTTP answer with OpenAI's error body; never a session
    the instance cannot be had    another one, within the budget for retries; then 502 or 503
    it accepts                    the client's session is accepted, with its subprotocol
    one side closes               the other is closed, with the same code and reason
    too long, or silent           both are closed, code 1001
    the gateway ends              both are closed, code 1012
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import urlsplit

from hetero_gateway.core.types import InstanceId, Outcome, Reject, RejectReason, Usage
from hetero_gateway.engines.vllm import Work
from hetero_gateway.errors import Refusal
from hetero_gateway.files.link_local import is_link_local
from hetero_gateway.gateway.dataplane.answers import refusal_of, rejection
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.dispatcher import Place, Waiting
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.rooms import Rooms
from hetero_gateway.gateway.failures import Failure, InstanceError
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.wire.cors import Cors
from hetero_gateway.gateway.wire.downstream import Receive, Scope, Send
from hetero_gateway.gateway.wire.headers import (
    NOT_TO_INSTANCES,
    NOT_TO_INSTANCES_NOR_CREDENTIALS,
    named_by_connection,
)
from hetero_gateway.gateway.wire.inbound import Inbound
from hetero_gateway.gateway.wire.openai import error_body

# Audio in base64; vLLM takes no more than 25 MB of it.
MOST_MESSAGE_BYTES = 1 << 24
# Of one process; each may hold a few messages.
_MOST_SESSIONS = 1000
_GOING_AWAY, _RESTARTING, _ABNORMAL = 1001, 1012, 1006
# Codes that may stand in a close frame (RFC 6455, 7.4).
_CLOSE_CODES = range(1000, 5000)
_NOT_SENT_CODES = (1004, 1005, _ABNORMAL, 1015)
_MOST_REASON_BYTES = 123


class _Place:
    """Waits for a place: an ``Owner``."""

    def __init__(self) -> None:
        self.found: asyncio.Future[Place | Reject] = asyncio.get_running_loop().create_future()

    def placed(self, place: Place | Reject) -> None:
        if not self.found.done():
            self.found.set_result(place)

    def turned_away(self, refusal: Refusal) -> None:
        if not self.found.done():
            self.found.set_exception(refusal)

    def broke(self, error: Exception) -> None:
        if not self.found.done():
            self.found.set_exception(error)


class _Seen:
    """What is seen of an attempt: ``dispatcher.Seen``. What passes in a session is nobody's."""

    status = 0
    first_body_at_s: float | None = None
    events = 0
    empty = False
    congested = False

    def __init__(self) -> None:
        self.error: InstanceError | None = None
        self.complete = False

    def usage(self) -> Usage:
        return Usage(None, None, None)


class Realtime:
    """The sessions of one process.

    Args:
        dataplane: whose dispatcher, admission and limits they go through.
    """

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._open = 0

    def __len__(self) -> int:
        """Sessions that are open, or about to be."""
        return self._open

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One WebSocket of an ASGI server."""
        query = scope["query_string"]
        path = scope["path"]
        target = scope["raw_path"].partition(b"?")[0] + (b"?" + query if query else b"")
        inbound = Inbound(path, target, Work.GENERATE, scope["headers"], method=b"GET")
        inbound.dropped = named_by_connection(scope["headers"])
        self._dataplane.name(inbound)
        await receive()  # websocket.connect
        if self._open >= _MOST_SESSIONS:
            detail = f"{_MOST_SESSIONS} sessions are open."
            await _refuse(send, inbound, Refusal(503, "too_many_connections", detail))
            return
        self._open += 1
        try:
            await self._serve(inbound, scope, receive, send)
        except Refusal as refusal:
            await _refuse(send, inbound, refusal)
        finally:
            self._open -= 1

    async def _serve(self, inbound: Inbound, scope: Scope, receive: Receive, send: Send) -> None:
        rooms = self._dataplane.rooms
        try:
            _check_origin(inbound, rooms.cors)
            client = rooms.admission.admit(inbound)
            parsed = rooms.intake.read_realtime(inbound)
        except Refusal:
            rooms.dispatcher.note(None, "rejected")
            raise
        inbound.received_s = time.monotonic()
        job = rooms.dispatcher.describe(inbound, client, parsed, None)
        session = _Session(rooms, inbound, job, scope.get("subprotocols") or [])
        try:
            await session.run(receive, send)
        finally:
            if job.charge is not None:
                job.charge.end()


class _Session:
    """One session, from its placement to its end."""

    def __init__(self, rooms: Rooms, inbound: Inbound, job: Job, subprotocols: list[str]) -> None:
        self._rooms = rooms
        self._inbound = inbound
        self._job = job
        self._subprotocols = subprotocols
        self._deadline_s = inbound.received_s + rooms.total_timeout_s
        self._active_s = inbound.received_s

    async def run(self, receive: Receive, send: Send) -> None:
        """Raises Refusal, before the session is accepted."""
        rooms, tried = self._rooms, list[InstanceId]()
        failure: InstanceError | None = None
        rooms.budget.note_request(self._inbound.received_s)
        while True:
            place = await self._place(tried, failure)
            seen, outcome, final = _Seen(), Outcome.CLIENT_DISCONNECTED, True
            try:
                upstream = await self._connect(place.instance)
                async with upstream:
                    await self._accept(send, place.instance, upstream)
                    outcome = await self._pass_on(upstream, receive, send)
                    return
            except InstanceError as error:
                failure = seen.error = error
                outcome = error.failure.outcome
                tried.append(place.instance.id)
                final = not rooms.budget.may_retry(error, len(tried))
                if final:
                    raise refusal_of(error, place.instance, spent=len(tried) > 1) from error
            finally:
                seen.complete = outcome is Outcome.COMPLETED
                rooms.dispatcher.settle(self._job, place, seen, outcome, final=final)

    async def _place(self, tried: list[InstanceId], failure: InstanceError | None) -> Place:
        """Raises Refusal."""
        rooms, owner = self._rooms, _Place()
        try:
            place = rooms.dispatcher.submit(self._job, tried, failure, self._deadline_s, owner)
            if isinstance(place, Waiting):
                waiting = place
                try:
                    place = await owner.found
                except asyncio.CancelledError:
                    waiting.leave()
                    raise
        except Refusal:
            rooms.dispatcher.note(self._job, "unavailable")
            raise
        if isinstance(place, Reject):
            ours = place.reason is RejectReason.NO_AVAILABLE_INSTANCE
            rooms.dispatcher.note(self._job, "unavailable" if ours else "rejected")
            spent = len(tried) > 1
            raise rejection(place, failure, self._inbound.path, spent=spent)
        return place

    async def _connect(self, instance: Instance) -> Any:
        """Raises InstanceError."""
        # Imported here: few ever need it.
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.typing import Subprotocol

        pool, rooms = instance.pool, self._rooms
        parts = urlsplit(instance.config.base_url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        target = (pool.path_prefix + self._inbound.target).decode("ascii")
        try:
            upstream = await connect(
                f"{scheme}://{parts.netloc}{target}",
                additional_headers=self._headers(instance),
                subprotocols=[Subprotocol(name) for name in self._subprotocols] or None,
                ssl=instance.ssl_context if scheme == "wss" else None,
                open_timeout=rooms.connect_timeout_s,
                max_size=MOST_MESSAGE_BYTES,
                max_queue=4,
                compression=None,
                ping_interval=None,
                user_agent_header=None,
                proxy=None,
            )
        except InvalidStatus as error:
            message = f"it answered {error.response.status_code}"
            raise InstanceError(Failure.PROTOCOL, message) from error
        except TimeoutError as error:
            raise InstanceError(Failure.CONNECT, "no connection in time") from error
        except (OSError, WebSocketException) as error:
            raise InstanceError(Failure.CONNECT, f"no WebSocket: {error}") from error
        address = str((upstream.remote_address or ("",))[0])
        if is_link_local(address) and not pool.allows_link_local:
            await upstream.close()
            raise InstanceError(Failure.CONNECT, f"{address}: link-local addresses are not allowed")
        return upstream

    def _headers(self, instance: Instance) -> list[tuple[str, str]]:
        dropped = NOT_TO_INSTANCES
        if self._rooms.admission.has_key or instance.api_key is not None:
            dropped = NOT_TO_INSTANCES_NOR_CREDENTIALS
        named = self._inbound.dropped
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self._inbound.headers
            if name not in dropped and name not in named and not name.startswith(b"sec-websocket-")
        ]
        headers.append(("x-request-id", self._inbound.request_id.decode()))
        if instance.api_key is not None:
            headers.append(("authorization", f"Bearer {instance.api_key}"))
        return headers

    async def _accept(self, send: Send, instance: Instance, upstream: Any) -> None:
        headers = [
            (b"x-request-id", self._inbound.request_id),
            (b"x-hetero-gateway-instance", instance.id.encode()),
        ]
        await send(
            {
                "type": "websocket.accept",
                "subprotocol": upstream.subprotocol,
                "headers": headers,
            }
        )

    async def _pass_on(self, upstream: Any, receive: Receive, send: Send) -> Outcome:
        """Messages both ways, until one side closes; returns what came of it."""
        to_instance = asyncio.ensure_future(self._to_instance(upstream, receive))
        to_client = asyncio.ensure_future(self._to_client(upstream, send))
        watch = asyncio.ensure_future(self._watch())
        sides = (to_instance, to_client, watch)
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            if to_client.done():
                code, reason = upstream.close_code, upstream.close_reason
                with contextlib.suppress(Exception):
                    await send(_closing(code, reason or ""))
                return Outcome.UPSTREAM_ERROR if code == _ABNORMAL else Outcome.COMPLETED
            if to_instance.done():
                code, reason = to_instance.result()
                closing = _closing(code, reason)
                await upstream.close(closing["code"], closing["reason"])
                return Outcome.COMPLETED
            with contextlib.suppress(Exception):
                await send(_closing(_GOING_AWAY, "the session is over"))
            await upstream.close(_GOING_AWAY, "the session is over")
            return Outcome.TIMED_OUT
        except asyncio.CancelledError:
            # The gateway ends.
            with contextlib.suppress(Exception):
                await send(_closing(_RESTARTING, "the gateway is shutting down"))
            raise
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _to_instance(self, upstream: Any, receive: Receive) -> tuple[int, str]:
        """Until the client closes: with which code and reason."""
        from websockets.exceptions import ConnectionClosed

        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return message.get("code") or 1000, message.get("reason") or ""
            self._active_s = time.monotonic()
            text = message.get("text")
            try:
                await upstream.send(text if text is not None else message["bytes"])
            except ConnectionClosed:
                await asyncio.Event().wait()  # the other side has seen it, too

    async def _to_client(self, upstream: Any, send: Send) -> None:
        """Until the instance closes, or the client is gone."""
        async for message in upstream:
            self._active_s = time.monotonic()
            kind = "text" if isinstance(message, str) else "bytes"
            try:
                await send({"type": "websocket.send", kind: message})
            except Exception:  # however a server says that its client is gone
                await asyncio.Event().wait()  # ``receive`` says so as well

    async def _watch(self) -> None:
        """Until the session has lasted for too long, or been silent."""
        idle_s = self._rooms.deadlines.idle_s
        while True:
            now_s = time.monotonic()
            left_s = min(self._deadline_s - now_s, self._active_s + idle_s - now_s)
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)


def _check_origin(inbound: Inbound, cors: Cors | None) -> None:
    """A browser asks nobody before it opens one. Raises Refusal: 403 to another site's page."""
    fields = dict(inbound.headers)
    origin, host = fields.get(b"origin"), fields.get(b"host", b"")
    if origin is None or origin.partition(b"://")[2] == host:
        return
    if cors is None or not cors.allows(origin):
        detail = "Pages of this origin may not: server.cors.origins."
        raise Refusal(403, "origin_not_allowed", detail)


def _closing(code: int | None, reason: str) -> dict[str, Any]:
    """A close frame with a code that may stand in one."""
    if code not in _CLOSE_CODES or code in _NOT_SENT_CODES:
        code = 1000 if code in (None, 1005) else 1011
    short = reason.encode()[:_MOST_REASON_BYTES].decode("utf-8", "ignore")
    return {"type": "websocket.close", "code": code, "reason": short}


async def _refuse(send: Send, inbound: Inbound, refusal: Refusal) -> None:
    """An HTTP answer in place of a session."""
    body = error_body(refusal, inbound.path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", inbound.request_id),
        *refusal.headers,
    ]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
    start = {"type": "websocket.http.response.start", "status": refusal.status, "headers": headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})
