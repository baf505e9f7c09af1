"""One ext_proc stream: one request behind the data plane, from its head to its end.

    event              head        body         waiting      answering
    -----------------  ----------  -----------  -----------  ----------------------------
    request's head     body        –            –            –
    request's body     –           placed, so   –            –
                                   answering;
                                   or waiting
    refused            over: an ImmediateResponse            –
    placed             –           –            answering    –
    response's head    –           –            –            the load goes to who served it
    other messages     –           –            –            answered, and without meaning
    the stream's end   over        over         leaves the   settled; over
                                                queue; over

The end of the stream is the end of the request: the data plane keeps it open until the response's
last byte (``response_trailer_mode: SEND``). It surfaces here as EOF or as a cancellation, and in
both cases ``release`` runs, once. What ends a response, its last byte or a client that leaves, the
data plane does not say.

Response bodies are not asked for. Where the data plane sends them all the same, they go back as
they came.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.types import InstanceId, Outcome, Reject, RejectReason, Request, Usage
from hetero_gateway.engines.vllm import work_of_path
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.answers import rejection, too_large
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.placement import Placed, SleeperGone
from hetero_gateway.gateway.failures import Failure, InstanceError
from hetero_gateway.gateway.wire.inbound import Inbound
from hetero_gateway.picker import answers
from hetero_gateway.picker.protocol.messages_pb2 import HttpHeaders, Metadata, ProcessingRequest

if TYPE_CHECKING:
    from hetero_gateway.picker.service import Picker

_log = logging.getLogger(__name__)

# ProcessingMode.BodySendMode
_BUFFERED = 2
_FULL_DUPLEX = 4

_EOF = grpc.aio.EOF
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_CODE_DETAILS = "response.code_details"
_FROM_INSTANCE = "via_upstream"
# What the data plane is given beyond the queue's own limit.
_GRACE_S = 10.0


class StreamGone(Exception):
    """The data plane has ended the stream."""


class SeenAnswer(NamedTuple):
    """What the picker sees of a response, as the recorder wants it: never its body."""

    status: int
    error: InstanceError | None
    first_body_at_s: float | None = None
    events: int = 0
    empty: bool = False

    def usage(self) -> Usage:
        return Usage()


class Stream:
    """The life of one request; a ``Sleeper``."""

    __slots__ = (
        "_awake",
        "_body_mode",
        "_context",
        "_error",
        "_inbound",
        "_job",
        "_picker",
        "_placed",
        "_reading",
        "_response_mode",
        "_status",
        "_woken",
        "gone",
    )

    def __init__(self, picker: Picker, context: Any) -> None:
        self._picker = picker
        self._context = context
        self._inbound: Inbound | None = None
        self._job: Job | None = None
        self._placed: Placed | None = None  # and not settled
        self._reading: asyncio.Future[bytes] | None = None  # a read that was begun to see the end
        self._woken: asyncio.Future[None] | None = None
        self._body_mode = _BUFFERED
        self._response_mode = 0
        self._status = 0
        self._awake = False
        self._error: InstanceError | None = None
        self.gone = False

    def __repr__(self) -> str:
        return f"<Stream {self._inbound!r} on {self._placed and self._placed.instance.id}>"

    async def run(self) -> None:
        """Serve the stream to its end."""
        try:
            try:
                answer = await self._pick()
            except Refusal as refusal:
                inbound = self._inbound
                path, request_id = (
                    ("", b"") if inbound is None else (inbound.path, inbound.request_id)
                )
                answer = answers.refused(refusal, path, request_id)
            if answer is not None:
                await self._write(answer)
            await self._attend()
        except StreamGone:
            pass

    # The request

    async def _pick(self) -> bytes | None:
        """Place the request and say where; an answer that ends the request, or None.

        Raises:
            Refusal: what the client is to be told instead.
        """
        first = await self._read()
        if not first.HasField("request_headers"):
            raise _misconfigured("request_header_mode must be SEND")
        if first.HasField("protocol_config"):
            self._body_mode = first.protocol_config.request_body_mode
            self._response_mode = first.protocol_config.response_body_mode
        head = first.request_headers
        method, inbound = _inbound(head)
        if inbound is None:
            return self._picker.other_request(method, head)
        self._inbound = inbound
        self._picker.name(inbound)
        rooms = self._picker.rooms
        try:
            client = rooms.admission.admit(inbound)
            rooms.intake.check_size(inbound.content_length)
            body, ended = await self._body(ends=head.end_of_stream)
            inbound.body = b"".join(body)
            inbound.received_s = time.monotonic()
            parsed = rooms.intake.read(inbound)
            counted = None
            if rooms.intake.counts(inbound, parsed):
                counted = await rooms.intake.count(inbound)
        except Refusal:
            rooms.metrics.series("unknown", "").outcomes["rejected"] += 1
            raise
        job = self._job = rooms.intake.describe(inbound, client, parsed, counted)
        # Its first token is not seen: a stream's head comes before it, and its body never.
        request = job.request._replace(streams=False)
        placed = await self._place(job, request, _subset(first.metadata_context))
        await self._send_there(placed, body, ended=ended, no_body=head.end_of_stream)
        return None

    async def _body(self, *, ends: bool) -> tuple[list[bytes], bool]:
        """(the body's pieces, whether no trailers follow)."""
        if ends:
            return [], True
        limit = self._picker.rooms.intake.max_body_bytes
        if self._body_mode == _BUFFERED:
            await self._write(answers.GO_ON_TO_BODY)
        elif self._body_mode != _FULL_DUPLEX:
            raise _misconfigured("request_body_mode must be BUFFERED or FULL_DUPLEX_STREAMED")
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._read()
            if not message.HasField("request_body"):
                return pieces, False  # trailers
            part = message.request_body
            pieces.append(part.body)
            size += len(part.body)
            if size > limit:
                raise too_large(limit)
            # What is buffered comes whole; trailers that follow it are a message of their own.
            if part.end_of_stream or self._body_mode == _BUFFERED:
                return pieces, True

    async def _place(self, job: Job, request: Request, subset: list[str] | None) -> Placed:
        """The request's place. Raises Refusal, or StreamGone."""
        picker, rooms = self._picker, self._picker.rooms
        exclude: tuple[InstanceId, ...] = picker.endpoints.unresolved
        if subset is not None:
            exclude = (*exclude, *picker.endpoints.outside(subset))
        try:
            place = rooms.placement.submit(request, exclude, waits=job.waits, first=False)
            if isinstance(place, Ticket):
                deadline_s = job.inbound.received_s + rooms.total_timeout_s
                self._reading = asyncio.ensure_future(self._context.read())
                self._reading.add_done_callback(self._read_while_waiting)
                place = await rooms.placement.wait(place, self, deadline_s)
        except SleeperGone:
            self._note("client_disconnected")
            raise StreamGone from None
        except Refusal as refusal:
            self._note("timed_out" if refusal.status == 504 else "unavailable")
            raise
        if isinstance(place, Placed):
            self._placed = place
            return place
        if (
            place.reason is RejectReason.FITS_NO_INSTANCE
            and job.parsed.exact_prompt_tokens is None
            and request.prompt_tokens == job.request.prompt_tokens > 1
        ):
            # The length is an estimate: when half of it fits, the engine is to judge.
            half = request._replace(prompt_tokens=-(-request.prompt_tokens // 2))
            return await self._place(job, half, subset)
        ours = place.reason is RejectReason.NO_AVAILABLE_INSTANCE
        self._note("unavailable" if ours else "rejected")
        if ours and subset is not None:
            place = Reject(place.reason, "none of the endpoints that were hinted at is available")
        raise rejection(place, None, job.inbound.path)

    async def _send_there(
        self, placed: Placed, body: list[bytes], *, ended: bool, no_body: bool
    ) -> None:
        """Say where the request goes."""
        picker, rooms, instance = self._picker, self._picker.rooms, placed.instance
        inbound = self._inbound
        assert inbound is not None
        rooms.metrics.decisions[instance.id] += 1
        rooms.decisions.append(time.time(), inbound.request_id, placed.decision, placed.waited_s)
        destination = picker.endpoints.destination(instance)
        if destination is None:
            raise Refusal(
                503,
                "no_healthy_instance",
                f"instance {instance.id} has no address",
                kind="server_error",
                retry_after_s=2,
            )
        buffered = self._body_mode == _BUFFERED and not no_body
        answer = destination.in_body if buffered else destination.in_headers
        if prefix := picker.endpoints.path_prefix(instance):
            answer = answers.with_path(answer, prefix + inbound.target)
        overhead_s = time.monotonic() - inbound.received_s - placed.waited_s
        rooms.metrics.overhead_s.observe(overhead_s)
        await self._write(answer)
        if not buffered and not no_body:
            for piece in answers.streamed(body, ends=ended, of_request=True):
                await self._write(piece)
            if not ended:
                await self._write(answers.REQUEST_TRAILERS)

    # The response

    async def _attend(self) -> None:
        """Follow what comes until the end of the stream."""
        while True:
            message = await self._read()
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                await self._write(self._answered(message))
            elif kind == "response_body":
                part = message.response_body
                if self._response_mode == _FULL_DUPLEX:
                    pieces = answers.streamed(
                        [part.body], ends=part.end_of_stream, of_request=False
                    )
                    for piece in pieces:
                        await self._write(piece)
                else:
                    await self._write(answers.RESPONSE_BODY)
            elif kind == "request_trailers":
                await self._write(answers.REQUEST_TRAILERS)
            elif kind == "response_trailers":
                await self._write(answers.RESPONSE_TRAILERS)

    def _answered(self, message: ProcessingRequest) -> bytes:
        """The response's head is here: what it says, and who served it."""
        self._status = _status(message.response_headers)
        if self._job is None:
            return answers.RESPONSE_HEADERS
        details = ""
        if message.attributes:
            attributes = message.attributes.get(_ATTRIBUTES)
            if attributes is not None and _CODE_DETAILS in attributes.fields:
                details = attributes.fields[_CODE_DETAILS].string_value
        if details and details != _FROM_INSTANCE:
            failure = Failure.CONNECT if "connection_failure" in details else Failure.RESET
            self._error = InstanceError(failure, f"the data plane reports {details}"[:200])
        served = _served(message.metadata_context)
        if served is not None and self._placed is not None:
            # Envoy appends each further host to those that it has tried.
            self._move(served.rpartition(",")[2])
        if self._placed is None or self._error is not None:
            return answers.RESPONSE_HEADERS
        destination = self._picker.endpoints.destination(self._placed.instance)
        return answers.RESPONSE_HEADERS if destination is None else destination.served

    def _move(self, endpoint: str) -> None:
        """Charge the load to who served the request, where that is not who was to."""
        placed, job, picker = self._placed, self._job, self._picker
        assert placed is not None
        assert job is not None
        chosen = picker.endpoints.destination(placed.instance)
        if chosen is not None and chosen.endpoint == endpoint:
            return
        rooms = picker.rooms
        error = InstanceError(Failure.RESET, f"the data plane went on to {endpoint}")
        self._settle(Outcome.UPSTREAM_ERROR, SeenAnswer(0, error), final=False)
        rooms.metrics.retries[error.reason] += 1
        served = picker.endpoints.instance_at(endpoint)
        if served is None:
            return  # it is none of ours
        request = job.request._replace(streams=False, only=served)
        try:
            moved = rooms.placement.submit(request, (), waits=False)
        except Refusal:
            return
        if isinstance(moved, Placed):
            self._placed = moved
            rooms.metrics.decisions[served] += 1

    # The end

    def release(self) -> None:
        """The stream is over: settle what was placed. To be called once, whatever happened."""
        if self._reading is not None:
            self._reading.cancel()
        if self._placed is None:
            return
        error = self._error
        if error is not None:
            outcome = error.failure.outcome
        elif self._status:
            outcome = Outcome.COMPLETED
        else:
            outcome = Outcome.CLIENT_DISCONNECTED
        self._settle(outcome, SeenAnswer(self._status, error), final=True)

    def _settle(self, outcome: Outcome, seen: SeenAnswer, *, final: bool) -> None:
        placed, job, rooms = self._placed, self._job, self._picker.rooms
        assert placed is not None
        assert job is not None
        self._placed = None
        rooms.placement.settle(placed.dispatch, outcome)
        rooms.recorder.record(job, placed, seen, outcome, final=final)

    def _note(self, outcome: str) -> None:
        """Count a request that reached no instance."""
        assert self._job is not None
        model, rooms = self._job.request.model, self._picker.rooms
        known = rooms.placement.knows(model)
        rooms.metrics.series(model if known else "unknown", "").outcomes[outcome] += 1

    # A Sleeper

    def wake(self) -> None:
        self._awake = True
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def wait(self) -> None:
        if self._woken is None and self._picker.extends_timeout:
            # Here, where the placement gives the ticket back whatever happens.
            await self._write(answers.wait_longer(self._picker.queue_timeout_s + _GRACE_S))
        if not (self._awake or self.gone):
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        self._awake = False

    def _read_while_waiting(self, reading: asyncio.Future[bytes]) -> None:
        if reading.cancelled() or reading.exception() is not None or reading.result() is _EOF:
            self.gone = True
            self.wake()

    # The wire

    async def _read(self) -> ProcessingRequest:
        reading, self._reading = self._reading, None
        data = await (self._context.read() if reading is None else reading)
        if data is _EOF:
            raise StreamGone
        return ProcessingRequest.FromString(data)

    async def _write(self, data: bytes) -> None:
        await self._context.write(data)


def _inbound(head: HttpHeaders) -> tuple[str, Inbound | None]:
    """(method, the request where it is a POST on an engine path)."""
    method = target = b""
    headers: list[tuple[bytes, bytes]] = []
    for field in head.headers.headers:
        name = field.key.encode()
        value = field.raw_value or field.value.encode()
        if name[:1] != b":":
            headers.append((name, value))
        elif name == b":method":
            method = value
        elif name == b":path":
            target = value
    path = target.partition(b"?")[0].decode("utf-8", "replace")
    work = work_of_path(path) if method == b"POST" else None
    if work is None:
        return f"{method.decode('latin-1')} {path}", None
    try:
        return "POST", Inbound(path, target, work, headers)
    except ValueError as error:
        raise Refusal(400, "invalid_header", f"a header cannot be used: {error}") from None


def _status(head: HttpHeaders) -> int:
    for field in head.headers.headers:
        if field.key == ":status":
            value = field.raw_value or field.value.encode()
            return int(value) if value.isdigit() else 0
    return 0


def _subset(metadata: Metadata) -> list[str] | None:
    """The endpoints to choose from; None: the data plane does not say."""
    hint = metadata.filter_metadata.get(answers.SUBSET_NAMESPACE)
    if hint is None or answers.SUBSET not in hint.fields:
        return None
    value = hint.fields[answers.SUBSET]
    if value.HasField("string_value"):  # a list in one word
        return [part.strip() for part in value.string_value.split(",") if part.strip()]
    return [each.string_value for each in value.list_value.values]


def _served(metadata: Metadata) -> str | None:
    told = metadata.filter_metadata.get(answers.LB_NAMESPACE)
    if told is None or answers.SERVED not in told.fields:
        return None
    return told.fields[answers.SERVED].string_value or None


def _misconfigured(what: str) -> Refusal:
    _log.error("the data plane's ext_proc filter is misconfigured: %s", what)
    return Refusal(500, "misconfigured_data_plane", f"ext_proc: {what}.", kind="server_error")
