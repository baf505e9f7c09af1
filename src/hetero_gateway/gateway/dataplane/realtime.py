"""/v1/realtime: a WebSocket to an instance, placed like a request and held until it closes.

``websockets`` speaks for us on both sides: through the server towards the client, and as a client
towards the instance. Messages are passed on whole, one at a time, so that each side waits for the
other; a message is bounded, and so are the time of a session, its silence, and how long either side
may read nothing. The model is named in the path's query, ``?model=NAME``, where instances serve
several, and stays the session's. What passes is counted as tokens, and charged to the client's
limits before it is sent on (``realtime_events``).

    event                         what follows
    ----------------------------  --------------------------------------------------------------
    no key, no model, no place    an HTTP answer with OpenAI's error body; never a session
    the instance cannot be had    another one, within the budget for retries; then 502 or 503
    it accepts                    the client's session is accepted, with its subprotocol
    an event that may not pass    an error event; the session goes on
    a limit is used up            an error event, and both are closed, code 1008
    one side closes               the other is closed, with the same code and reason
    too long, or silent           both are closed, code 1001
    one side reads nothing        the same, after ``timeouts.write_s``
    the gateway ends              both are closed, code 1012

A browser cannot send ``authorization`` with a WebSocket. It offers its key as a subprotocol, as
OpenAI's does: ``openai-insecure-api-key.KEY``. That lets it in, and goes no further.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from websockets.exceptions import ConnectionClosed

from hetero_gateway.core.types import InstanceId, Outcome, Reject, RejectReason, Usage
from hetero_gateway.engines.vllm import Work
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.answers import refusal_of, rejection, whole_answer
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.dispatcher import Place, Waiting
from hetero_gateway.gateway.dataplane.instance_websocket import (
    CLOSE_S,
    InstanceWebSocket,
    close_websocket,
    open_websocket,
)
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.observed import ReportedResponse
from hetero_gateway.gateway.dataplane.realtime_events import ClientEvents, Meter, error_event
from hetero_gateway.gateway.dataplane.records import context_of
from hetero_gateway.gateway.dataplane.rooms import Rooms
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.http.clients import acknowledged_bytes
from hetero_gateway.http.cors import Cors
from hetero_gateway.http.downstream import Receive, Scope, Send
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.headers import Headers, named_by_connection
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.hops import loop_detected
from hetero_gateway.http.websocket import GONE

# Of one process; each may hold a few messages.
_MOST_SESSIONS = 1000
_GOING_AWAY, _ABNORMAL, _NOT_ALLOWED, _BROKEN, _RESTARTING = 1001, 1006, 1008, 1011, 1012
# Codes that may appear in a close frame (RFC 6455, 7.4).
_CLOSE_CODES = range(1000, 5000)
_NOT_SENT_CODES = (1004, 1005, _ABNORMAL, 1015)
_MOST_REASON_BYTES = 123

_SUBPROTOCOL = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]{1,256}")
_MOST_SUBPROTOCOLS = 16
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
# A browser gives up unless one of the subprotocols it offered is chosen; vLLM chooses none.
_REALTIME_SUBPROTOCOL = "realtime"


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


class _End(NamedTuple):
    """How a session ends: the code and reason of its close frame, and how that counts."""

    code: int | None
    reason: str
    outcome: Outcome = Outcome.COMPLETED


class Realtime:
    """The sessions of one process.

    Args:
        dataplane: whose dispatcher, admission and limits they use.
    """

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._open = 0

    def __len__(self) -> int:
        """The number of sessions that are open, or about to be."""
        return self._open

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket of an ASGI server."""
        query = scope["query_string"]
        path = scope["path"]
        target = scope["raw_path"].partition(b"?")[0] + (b"?" + query if query else b"")
        inbound = Inbound(path, target, Work.GENERATE, scope["headers"], method=b"GET")
        inbound.dropped = named_by_connection(scope["headers"])
        self._dataplane.rooms.ids.name(inbound)
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
        offered, shown = _split(scope.get("subprotocols") or [])
        try:
            _check_origin(inbound, rooms.cors)
            if inbound.came_through:
                rooms.hops.check(inbound.came_through)
            client = rooms.admission.client_of([*inbound.headers, *shown])
            parsed = rooms.intake.read_realtime(inbound)
        except Refusal:
            rooms.dispatcher.note(None, "rejected")
            raise
        inbound.received_s = time.monotonic()
        job = rooms.dispatcher.describe(inbound, client, parsed, None)
        session = _Session(rooms, inbound, job, offered)
        session.gone = scope.get("extensions", {}).get(GONE)
        try:
            await session.run(receive, send)
        finally:
            if job.charge is not None:
                job.charge.end()


class _Session:
    """One session, from its placement to its end. ``gone``: its client has left, if known."""

    def __init__(self, rooms: Rooms, inbound: Inbound, job: Job, subprotocols: list[str]) -> None:
        self._rooms = rooms
        self._inbound = inbound
        self._job = job
        self._subprotocols = subprotocols
        self._deadline_s = inbound.received_s + rooms.total_timeout_s
        self._active_s = inbound.received_s
        self._spending = asyncio.Lock()
        self.gone: asyncio.Event | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        """Raises Refusal, before the session is accepted."""
        rooms, tried = self._rooms, list[InstanceId]()
        failure: InstanceError | None = None
        rooms.budget.requests += 1
        while True:
            place = await self._place(tried, failure)
            outcome, final, failure = Outcome.CLIENT_DISCONNECTED, True, None
            began_s: float | None = None
            meter = Meter(context_of(place.instance))
            try:
                upstream = await self._connect(place.instance)
                try:
                    await self._accept(send, place.instance, upstream)
                    began_s = time.monotonic()
                    outcome = await self._pass_on(upstream, receive, send, meter)
                    return
                finally:
                    upstream.transport.abort()
            except InstanceError as error:
                failure = error
                outcome = error.failure.outcome
                tried.append(place.instance.id)
                final = not rooms.budget.may_retry(error, len(tried), len(rooms.open))
                if final:
                    raise refusal_of(error, place.instance, spent=len(tried) > 1) from error
            finally:
                # The duration of a session says nothing about answers.
                self._job.features = None
                complete = outcome is Outcome.COMPLETED
                tokens = Usage(meter.input_tokens, meter.output_tokens)
                seen = ReportedResponse(0, failure, began_s, 0, complete, tokens)
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

    async def _connect(self, instance: Instance) -> InstanceWebSocket:
        """Raises InstanceError; Refusal if the session has come back to a gateway."""
        target = _with_one_model(self._inbound.target, self._job.parsed.model or "")
        timeout_s = self._rooms.connect_timeout_s
        headers = self._headers(instance)
        try:
            return await open_websocket(instance, target, headers, self._subprotocols, timeout_s)
        except InstanceError as error:
            if error.failure is Failure.LOOP and self._inbound.came_through:
                raise loop_detected("The request has come back to a gateway.") from error
            raise

    def _headers(self, instance: Instance) -> list[tuple[str, str]]:
        withheld = self._rooms.fields.withheld
        if self._rooms.admission.has_key or instance.api_key is not None:
            withheld = self._rooms.fields.withheld_with_credentials
        named = self._inbound.dropped
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self._inbound.headers
            if not withheld[name] and name not in named and not name.startswith(b"sec-websocket-")
        ]
        headers.append(("x-request-id", self._inbound.request_id.decode()))
        headers.append(self._rooms.hops.pair_behind(self._inbound.came_through))
        if instance.api_key is not None:
            headers.append(("authorization", f"Bearer {instance.api_key}"))
        return headers

    async def _accept(self, send: Send, instance: Instance, upstream: InstanceWebSocket) -> None:
        headers = [
            (b"x-request-id", self._inbound.request_id),
            (b"x-hetero-gateway-instance", instance.id.encode()),
        ]
        chosen: str | None = upstream.subprotocol
        if chosen is None and _REALTIME_SUBPROTOCOL in self._subprotocols:
            chosen = _REALTIME_SUBPROTOCOL
        await send({"type": "websocket.accept", "subprotocol": chosen, "headers": headers})

    async def _pass_on(
        self, upstream: InstanceWebSocket, receive: Receive, send: Send, meter: Meter
    ) -> Outcome:
        """Pass messages both ways until one side closes; returns the outcome."""
        sides = [
            asyncio.ensure_future(self._to_client(upstream, send, meter)),
            asyncio.ensure_future(self._to_instance(upstream, receive, send, meter)),
            asyncio.ensure_future(self._watch(upstream)),
        ]
        if self.gone is not None:
            sides.append(asyncio.ensure_future(_without_client(self.gone)))
        end = _End(_RESTARTING, "the gateway is shutting down")
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            end = _End(_BROKEN, "")
            end = next(side for side in sides if side in done).result()
            return end.outcome
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
            closing = _closing(end.code, end.reason)
            await asyncio.gather(
                _close_client(send, closing),
                close_websocket(upstream, closing["code"], closing["reason"]),
            )

    async def _to_instance(
        self, upstream: InstanceWebSocket, receive: Receive, send: Send, meter: Meter
    ) -> _End:
        """Until the client closes, or may send no more."""
        parsed = self._job.parsed
        events = ClientEvents(parsed.model or "", parsed.asked, self._rooms.intake.readers.allowed)
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return _End(message.get("code") or 1000, message.get("reason") or "")
            self._active_s = time.monotonic()
            text = message.get("text")
            try:
                event = events.read(text if text is not None else message["bytes"])
            except Refusal as refusal:
                await _say(send, refusal)
                continue
            meter.sent(event)
            if (over := await self._over_limit(meter)) is not None:
                meter.take_back(event)
                await _say(send, over)
                return _End(_NOT_ALLOWED, over.code)
            try:
                await upstream.send(event.message)
            except ConnectionClosed:
                await asyncio.Event().wait()  # the other side has seen it, too

    async def _to_client(self, upstream: InstanceWebSocket, send: Send, meter: Meter) -> _End:
        """Until the instance closes, the client has left, or may get no more."""
        while True:
            try:
                message = await upstream.recv()
            except ConnectionClosed:
                break
            self._active_s = time.monotonic()
            meter.answered(message)
            kind = "text" if isinstance(message, str) else "bytes"
            try:
                await send({"type": "websocket.send", kind: message})
            except Exception:  # however a server says that its client is gone
                await asyncio.Event().wait()  # ``receive`` says so as well
            if (over := await self._over_limit(meter)) is not None:
                await _say(send, over)
                return _End(_NOT_ALLOWED, over.code)
        code, reason = upstream.close_code, upstream.close_reason
        broken = code == _ABNORMAL
        return _End(code, reason or "", Outcome.UPSTREAM_ERROR if broken else Outcome.COMPLETED)

    async def _over_limit(self, meter: Meter) -> Refusal | None:
        """Charge the client for what has passed; returns an error beyond its limits."""
        if not self._job.client.accounts:
            return None
        async with self._spending:
            try:
                tokens = meter.input_tokens + meter.output_tokens
                await self._rooms.dispatcher.spend(self._job, tokens)
            except Refusal as refusal:
                return refusal
        return None

    async def _watch(self, upstream: InstanceWebSocket) -> _End:
        """Until the session has lasted too long, been silent, or its instance reads nothing."""
        deadlines, transport = self._rooms.deadlines, upstream.transport
        acked_bytes, stalled_s = -1, 0.0
        while True:
            now_s = time.monotonic()
            left_s = min(self._deadline_s, self._active_s + deadlines.idle_s) - now_s
            if left_s <= 0:
                return _End(_GOING_AWAY, "the session is over", Outcome.TIMED_OUT)
            if not transport.get_write_buffer_size():
                acked_bytes = -1
            elif (acked := acknowledged_bytes(transport)) != acked_bytes:
                acked_bytes, stalled_s = acked, now_s
            elif now_s - stalled_s >= deadlines.write_s:
                return _End(_GOING_AWAY, "the instance reads nothing", Outcome.TIMED_OUT)
            await asyncio.sleep(min(left_s, deadlines.write_s / 4))


async def _without_client(gone: asyncio.Event) -> _End:
    """Until the client has left, and nothing of its last messages waits to be sent on."""
    await gone.wait()
    await asyncio.sleep(CLOSE_S)
    return _End(_GOING_AWAY, "the client is gone")


async def _say(send: Send, refusal: Refusal) -> None:
    """Tell a client, if it is there, why something is not done."""
    with contextlib.suppress(Exception):  # however a server says that its client is gone
        await send({"type": "websocket.send", "text": error_event(refusal)})


async def _close_client(send: Send, closing: dict[str, Any]) -> None:
    """Close its side, unless it has left or reads nothing: the server cuts it then."""
    with contextlib.suppress(Exception):  # however a server says that its client is gone
        async with asyncio.timeout(CLOSE_S):
            await send(closing)


def _split(subprotocols: list[str]) -> tuple[list[str], Headers]:
    """The subprotocols for the instance, and a key among the others as a header field."""
    offered: list[str] = []
    shown: Headers = []
    for name in subprotocols[:_MOST_SUBPROTOCOLS]:
        if name.lower().startswith(_KEY_SUBPROTOCOL):
            key = name[len(_KEY_SUBPROTOCOL) :].encode("latin-1", "replace")
            shown.append((b"authorization", b"Bearer " + key))
        elif _SUBPROTOCOL.fullmatch(name) and name not in offered:
            offered.append(name)
    return offered, shown


def _with_one_model(target: bytes, model: str) -> bytes:
    """A path and query that name this model and no other."""
    path, mark, query = target.partition(b"?")
    fields = query.split(b"&")
    named = [
        i
        for i, field in enumerate(fields)
        if unquote_to_bytes(field.partition(b"=")[0].replace(b"+", b" ")) == b"model"
    ]
    if not named:
        return target
    name = quote(model, safe="/:").encode()
    if len(named) > 1 or unquote_to_bytes(fields[named[0]].partition(b"=")[2]) != model.encode():
        fields[named[0]] = b"model=" + name
        fields = [field for i, field in enumerate(fields) if i not in named[1:]]
    return path + mark + b"&".join(fields)


def _check_origin(inbound: Inbound, cors: Cors | None) -> None:
    """A browser does not ask before it opens one. Raises Refusal: 403 to another site's page."""
    host = dict(inbound.headers).get(b"host", b"")
    for name, origin in inbound.headers:
        if name != b"origin" or (host and origin.partition(b"://")[2] == host):
            continue
        if cors is None or not cors.allows(origin):
            detail = "Pages of this origin may not: server.cors.origins."
            raise Refusal(403, "origin_not_allowed", detail)


def _closing(code: int | None, reason: str) -> dict[str, Any]:
    """A close frame with a permitted code."""
    if code not in _CLOSE_CODES or code in _NOT_SENT_CODES:
        code = 1000 if code in (None, 1005) else _BROKEN
    short = reason.encode()[:_MOST_REASON_BYTES].decode("utf-8", "ignore")
    return {"type": "websocket.close", "code": code, "reason": short}


async def _refuse(send: Send, inbound: Inbound, refusal: Refusal) -> None:
    """An HTTP answer in place of a session."""
    headers, body = whole_answer(refusal, inbound.path, inbound.request_id)
    start = {"type": "websocket.http.response.start", "status": refusal.status, "headers": headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})
