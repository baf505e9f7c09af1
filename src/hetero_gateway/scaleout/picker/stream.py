"""One ext_proc stream: one request behind the data plane, from its head to its end.

    event              HEAD          BODY         PLACING      ANSWERING
    -----------------  ------------  -----------  -----------  ----------------------------
    request's head     BODY, or as   –            –            –
                       with its body
    request's body     –             ANSWERING,   –            –
                                     or PLACING
    refused            an ImmediateResponse, ANSWERING         –
    placed             –             ANSWERING    ANSWERING    –
    response's head    –             –            –            the load goes to who served it
    other messages     –             –            –            answered, without effect
    the stream's end   OVER          OVER         leaves the   settled; OVER
                                                  queue; OVER

Everything happens in callbacks of the call; a task exists only if something has to wait: for a long
body to be read, or for the tokenizer.

The end of the stream is the end of the request: the data plane keeps it open until the response's
last byte (``response_trailer_mode: SEND``). ``release`` runs whatever ended it, and settles once.
Only reports (``reports``) say whether a stream ended with the response or because its client left,
and how many tokens the response's end stated.

Response bodies are not requested. If the data plane sends them all the same, they go back
unchanged.
"""

import asyncio
import enum
import logging
import time
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from hetero_gateway.core.types import InstanceId, Outcome, Reject, RejectReason, Usage
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.dataplane.answers import rejection
from hetero_gateway.gateway.dataplane.dispatcher import Waiting
from hetero_gateway.gateway.dataplane.intake import Job, Placed, PrefillLeg, shorten_body
from hetero_gateway.gateway.dataplane.observed import ReportedResponse
from hetero_gateway.gateway.dataplane.reading import RequestReader
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.bodies import BodyBuffer
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.heads import Inbound
from hetero_gateway.scaleout.picker import answers
from hetero_gateway.scaleout.picker.http2.calls import LINGER_S, Call
from hetero_gateway.scaleout.picker.http2.frames import Status
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import HttpBody, ProcessingRequest
from hetero_gateway.scaleout.picker.questions import (
    MOST_PLAIN_BYTES,
    failure_of,
    inbound_of,
    read_long,
    served_of,
    status_of,
    subset_of,
)
from hetero_gateway.scaleout.picker.resources import Resources

_log = logging.getLogger(__name__)

# ProcessingMode.BodySendMode
_BUFFERED = 2
_FULL_DUPLEX = 4

# The data plane's time limit beyond the queue's own.
_GRACE_S = 10.0
# Between two messages of a body, as a client may take between two reads of it (timeouts.body_s),
# and Envoy to send its data.
_BODY_PART_S = 60
# How much of a body is kept while its response passes: a prompt of 2000 tokens is kept whole.
_KEPT_BODY_BYTES = 8192
# The part of a head and of a body that is counted in every call (CALL_BYTES).
_USUAL_BYTES = 2048


# The paths that llm-d's sidecar splits into two requests.
_SPLIT_PATHS = (CHAT_COMPLETIONS, COMPLETIONS)


class _State(enum.Enum):
    HEAD = "head"
    BODY = "body"
    PLACING = "placing"
    ANSWERING = "answering"
    OVER = "over"


_HEAD, _BODY, _PLACING, _ANSWERING, _OVER = _State


@dataclass(slots=True, eq=False, repr=False)
class Stream(RequestReader):
    """The life of one request: a ``Receiver`` of its call, and the ``Owner`` of its place.

    Whoever creates one counts it among the resources' ``open`` ones.
    """

    _resources: Resources
    _call: Call
    _state: _State = _HEAD
    _inbound: Inbound | None = None
    _removed: tuple[str, ...] = ()  # of its header fields
    _client: Client | None = None
    _buffer: BodyBuffer | None = None
    _subset: frozenset[InstanceId] | None = None
    _head_bytes: int = 0  # of its message, if that is a long one
    _has_body: bool = True
    _gives_back: bool = False  # the body, at present
    _ended: bool = True  # the body; no trailers follow
    _job: Job | None = None
    _placed: Placed | None = None  # and not settled
    _task: asyncio.Task[None] | None = None
    _wait: Waiting | None = None  # for a place; the last one
    _halved: bool = False  # its prompt's estimate
    _body_mode: int = _BUFFERED
    _response_mode: int = 0
    _status: int = 0
    _error: InstanceError | None = None
    _ticket: bytes = b""  # of reports on its response
    _first_s: float | None = None
    _told: Usage | None = None
    _events: int = 0
    gone: bool = False

    def __repr__(self) -> str:
        where = self._placed and self._placed.instance.id
        return f"<Stream {self._inbound!r}: {self._state.value} on {where}>"

    @property
    def address(self) -> str:
        return self._call.peer.address

    # A Receiver

    def message(self, data: bytes) -> None:
        body = b""  # of a long message: taken out before the rest is parsed
        try:
            if len(data) > MOST_PLAIN_BYTES:
                message, body = read_long(data)
            else:
                message = ProcessingRequest.FromString(data)
        except DecodeError:
            self._call.finish(Status.INVALID_ARGUMENT, "this is no ProcessingRequest")
            self.lost()
            return
        kind = message.WhichOneof("request")
        state = self._state
        if state is _HEAD and kind == "response_headers":
            # The data plane has refused the request itself, before it asked.
            self._state = state = _ANSWERING
        if state is _ANSWERING:
            if body and kind == "response_body":
                message.response_body.body = body
            self._attend(kind, message)
            return
        try:
            if state is _HEAD:
                if kind != "request_headers":
                    raise self._resources.misconfigured("request_header_mode must be SEND")
                if len(data) > _USUAL_BYTES:
                    self._head_bytes = len(data)
                self._begin(message)
            elif state is _BODY:
                if kind == "request_body":
                    self._take_body(message.request_body, body)
                else:
                    self._ended = False
                    self._take_whole()
        except Refusal as refusal:
            self._refuse(refusal)

    def refuse(self, refusal: Refusal) -> None:
        if self._state is _BODY:
            self._refuse(refusal)
            return
        self.lost()
        late = refusal.status == 408
        self._call.finish(Status.DEADLINE_EXCEEDED if late else Status.RESOURCE_EXHAUSTED)

    def half_closed(self) -> None:
        self.lost()
        self._call.finish()

    def lost(self) -> None:
        self.gone = True
        if self._wait is not None and self._state is _PLACING:
            self._wait.leave()
            self._note("client_disconnected")
        self.release()

    # The request

    def _begin(self, message: ProcessingRequest) -> None:
        """The request's head. Raises Refusal: the client's answer instead."""
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        head = message.request_headers
        resources = self._resources
        method, inbound, self._removed = inbound_of(head, resources.guarded)
        if inbound is None:
            self._state = _ANSWERING
            self._call.expect(LINGER_S)
            self._call.send(resources.other_request(method, head))
            return
        self._inbound = inbound
        resources.name(inbound)
        subset = subset_of(message.metadata_context)
        if subset is not None:
            self._subset = resources.endpoints.instances_at(subset)
        self._client = resources.admission.client_of(inbound.headers)
        if self._head_bytes:
            self._call.hold(self._head_bytes)
        self._call.at_work = True
        resources.intake.limits.check(inbound.content_length)
        if head.end_of_stream:
            self._has_body = False
            self._take_whole()
            return
        if self._body_mode == _BUFFERED:
            self._call.send(answers.GO_ON_TO_BODY)
        elif self._body_mode != _FULL_DUPLEX:
            modes = "BUFFERED or FULL_DUPLEX_STREAMED"
            raise resources.misconfigured(f"request_body_mode must be {modes}")
        self._buffer = BodyBuffer(self._call.peer.share)
        self._state = _BODY
        self._call.expect(_BODY_PART_S)

    def _take_body(self, part: HttpBody, long: bytes) -> None:
        """A part of the body, or all of it; ``long``: of a long message. Raises Refusal."""
        buffer, body = self._buffer, long or part.body
        assert buffer is not None
        buffer.add(body)
        if buffer.holds:
            self._call.let_go(self._head_bytes)
        elif buffer.size_bytes > _USUAL_BYTES:
            self._call.hold(len(body))
        # Buffered bodies come whole; trailers after them are a message of their own.
        if part.end_of_stream or self._body_mode == _BUFFERED:
            self._take_whole()
        else:
            self._call.expect(_BODY_PART_S)

    def _take_whole(self) -> None:
        """The body is complete, if there is one. Raises Refusal."""
        self._state = _PLACING
        self._call.expect(self._resources.stream_timeout_s)
        inbound = self._inbound
        assert inbound is not None
        if self._buffer is not None:
            inbound.body = self._buffer.take()
        parsed = self._resources.intake.read(inbound, self._client)
        if parsed is None:
            self._read_in_steps(self._resources, inbound)
        else:
            self._describe(parsed, None)

    def _is_over(self) -> bool:
        return self.gone

    def _describe(self, parsed: ParsedRequest, counted: int | None) -> None:
        inbound, client = self._inbound, self._client
        assert inbound is not None
        assert client is not None
        job = self._job = self._resources.dispatcher.describe(inbound, client, parsed, counted)
        if job.request.streams and not self._call.peer.reports:
            # Its first token is not seen: a stream's head comes earlier, and its body is never
            # seen.
            job.request = job.request.replace(streams=False)
        resources = self._resources
        handovers = resources.handovers
        if handovers is not None and not (
            resources.prefill_header is not None
            and inbound.path in _SPLIT_PATHS
            and handovers.splits(inbound)
        ):
            job.request = job.request.replace(whole=True)
        self._place(job)

    # Placing

    def _place(self, job: Job) -> None:
        """Find a place for the request. Raises Refusal."""
        resources = self._resources
        exclude: tuple[InstanceId, ...] = resources.endpoints.unresolved
        if self._subset is not None:
            exclude = (*exclude, *resources.endpoints.outside(self._subset))
        deadline_s = job.inbound.received_s + resources.total_timeout_s
        try:
            place = resources.dispatcher.submit(
                job, exclude, None, deadline_s, self, first=False, wakes=False
            )
        except Refusal:
            self._note("unavailable")
            raise
        if isinstance(place, Waiting):
            if self._wait is None and resources.extends_timeout:
                self._call.send(answers.wait_longer(resources.queue_timeout_s + _GRACE_S))
            self._wait = place
        else:
            self._take(place)

    # An Owner

    def placed(self, place: Placed | Reject) -> None:
        try:
            self._take(place)
        except Refusal as refusal:
            self._refuse(refusal)
        except Exception as error:
            self.broke(error)

    def turned_away(self, refusal: Refusal) -> None:
        self._note("timed_out" if refusal.status == 504 else "unavailable")
        self._refuse(refusal)

    def _take(self, place: Placed | Reject) -> None:
        """Send the request where it was placed. Raises Refusal: it was not."""
        job = self._job
        assert job is not None
        if isinstance(place, Placed):
            self._placed = place
            self._send_there(place, job.inbound)
            return
        prompt_tokens = job.request.prompt_tokens
        if (
            place.reason is RejectReason.FITS_NO_INSTANCE
            and job.parsed.exact_prompt_tokens is None
            and prompt_tokens > 1
            and not self._halved
        ):
            # The length is an estimate: if half of it fits, the engine should judge.
            self._halved = True
            job.request = job.request.replace(prompt_tokens=-(-prompt_tokens // 2))
            self._place(job)
            return
        ours = place.reason is RejectReason.NO_AVAILABLE_INSTANCE
        self._note("unavailable" if ours else "rejected")
        if ours and self._subset is not None:
            place = Reject(place.reason, "none of the hinted endpoints is available")
        raise rejection(place, None, job.inbound.path)

    def _send_there(self, placed: Placed, inbound: Inbound) -> None:
        resources, instance = self._resources, placed.instance
        call = self._call
        known = resources.endpoints.known(instance)
        destination, prefix = known.destination, known.path_prefix
        if destination is None:
            raise Refusal(
                503,
                "no_healthy_instance",
                f"instance {instance.id} has no address",
                kind="server_error",
                retry_after_s=2,
            )
        self._state = _ANSWERING
        buffered = self._has_body and self._body_mode == _BUFFERED
        answer = destination.in_body if buffered else destination.in_headers
        added = () if placed.leg is None else self._begin_leg(placed, placed.leg)
        if prefix or self._removed or added:
            path = prefix + inbound.target if prefix else None
            answer = answers.changed(answer, path, self._removed, added)
        overhead_s = time.monotonic() - inbound.received_s - placed.waited_s
        resources.metrics.overhead_s.note(overhead_s)
        self._ticket = resources.tickets.issue(self)
        call.send(answers.with_ticket(answer, self._ticket))
        if self._has_body and not buffered:
            self._gives_back = True
            pieces = answers.streamed(inbound.body, ends=self._ended, of_request=True)
            call.send_each(pieces, self._has_given_back)
            if not self._ended:
                call.send(answers.REQUEST_TRAILERS)
        self._let_go_of_body()

    def _begin_leg(self, placed: Placed, leg: PrefillLeg) -> tuple[tuple[str, str], ...]:
        """Choose who computes the prompt, for the sidecar next to the answering instance."""
        resources = self._resources
        there = resources.endpoints.known(leg.instance).destination
        if there is None or resources.prefill_header is None or resources.handovers is None:
            resources.legs.over(leg, Outcome.COMPLETED)  # the answering instance computes it too
            return ()
        resources.handovers.results["handed_over"] += 1
        if not placed.dispatch.request.streams:
            resources.legs.fetched_unseen(placed, placed.decision.choice.prefill_s)
        return ((resources.prefill_header, there.endpoint),)

    def _has_given_back(self) -> None:
        self._gives_back = False
        self._let_go_of_body()

    def _let_go_of_body(self) -> None:
        """Drop a long one: the data plane has it. The rest is enough to tell it from others."""
        buffer, inbound = self._buffer, self._inbound
        if buffer is None or inbound is None or self._gives_back:
            return
        self._buffer = None
        if len(inbound.body) > _KEPT_BODY_BYTES or buffer.holds:
            shorten_body(inbound, self._job)
            buffer.release()
            self._call.let_go(self._head_bytes + len(inbound.body))

    def _refuse(self, refusal: Refusal) -> None:
        """An ImmediateResponse in place of an instance's."""
        if self._job is None and self._inbound is not None:
            self._resources.dispatcher.note(None, "rejected")
        inbound, path, request_id = self._inbound, "", b""
        if inbound is not None:
            path, request_id = inbound.path, inbound.request_id
        self._state = _ANSWERING
        self._call.at_work = False
        # The data plane ends the stream as soon as it has that.
        self._call.expect(LINGER_S)
        self._call.send(answers.refused(refusal, path, request_id))
        self._let_go_of_body()

    # The response

    def _attend(self, kind: str | None, message: ProcessingRequest) -> None:
        call = self._call
        if kind == "response_headers":
            call.send(self._answered(message))
        elif kind == "response_trailers":
            # That is the end of the response, and of everything.
            call.send(answers.RESPONSE_TRAILERS)
            call.finish()
            self.release()
        elif kind == "response_body":
            part = message.response_body
            if self._response_mode == _FULL_DUPLEX:
                for piece in answers.streamed(part.body, ends=part.end_of_stream, of_request=False):
                    call.send(piece)
            else:
                call.send(answers.RESPONSE_BODY)
        elif kind == "request_trailers":
            call.send(answers.REQUEST_TRAILERS)

    def _answered(self, message: ProcessingRequest) -> bytes:
        """The response's head: its status, and who served it."""
        self._status = status_of(message.response_headers)
        job = self._job
        if job is None:
            return answers.RESPONSE_HEADERS
        self._error = failure_of(message) or self._error
        served = served_of(message.metadata_context)
        if served is not None and self._placed is not None:
            # Envoy appends each further host to those that it has tried.
            self._move(job, self._placed, served.rpartition(",")[2])
        if self._placed is None or self._error is not None:
            return answers.RESPONSE_HEADERS
        if self._placed.leg is not None:
            # A sidecar asks for the answer once the prompt is computed.
            self._resources.legs.prefilled(self._placed.leg)
        destination = self._resources.endpoints.known(self._placed.instance).destination
        return answers.RESPONSE_HEADERS if destination is None else destination.served

    def _move(self, job: Job, placed: Placed, endpoint: str) -> None:
        """Charge the load to the instance that served the request, if it is not the chosen one."""
        resources = self._resources
        chosen = resources.endpoints.known(placed.instance).destination
        if chosen is not None and chosen.endpoint == endpoint:
            return
        error = InstanceError(Failure.RESET, f"the data plane went on to {endpoint}")
        self._placed = None
        seen = ReportedResponse(0, error)
        resources.dispatcher.settle(job, placed, seen, Outcome.UPSTREAM_ERROR, final=False)
        resources.metrics.retries[error.reason] += 1
        served = resources.endpoints.instance_at(endpoint)
        if served is None:
            return  # it is not ours
        request = job.request.replace(streams=False, only=served, whole=True)
        try:
            moved = resources.dispatcher.placement.submit(request, (), waits=False)
        except Refusal:
            return
        if isinstance(moved, Placed):
            self._placed = moved
            resources.metrics.decisions[served] += 1

    # Reports

    def first_bytes(self) -> None:
        placed = self._placed
        if self._first_s is not None or placed is None:
            return
        self._first_s = time.monotonic()
        dispatch, ttft_s = placed.dispatch, placed.decision.choice.ttft_s
        self._resources.dispatcher.placement.stream_began(dispatch, None)
        self._resources.legs.fetched(placed)
        if dispatch.predicted_s is None and ttft_s is not None:
            # Its steps are not seen: only its whole time tells about the engine's speed.
            dispatch.predicted_s = (placed.placed_s, ttft_s)

    def told(self, usage: Usage, events: int) -> None:
        self._told, self._events = usage, events
        if self._first_s is None:
            self._first_s = time.monotonic()

    # The end

    def release(self) -> None:
        """The request is over: settle its placement. Once, whatever happened."""
        if self._state is _OVER:
            return
        self._state = _OVER
        self._resources.open -= 1
        self._call.at_work = False
        self._resources.tickets.issued.pop(self._ticket, None)
        self._let_go_of_body()
        if self._job is not None:
            placed, self._placed = self._placed, None
            if placed is not None:
                self._settle(self._job, placed)
            if self._job.charge is not None:
                self._job.charge.end()

    def _settle(self, job: Job, placed: Placed) -> None:
        error, told = self._error, self._told
        outcome = Outcome.COMPLETED if self._status else Outcome.CLIENT_DISCONNECTED
        if error is not None:
            outcome = error.failure.outcome
        elif self._status == 200 and told is None and self._call.peer.reports:
            # Its client left in the middle, or nothing is reported on this connection any more: the
            # next report tells which.
            self._call.peer.reports = False
            outcome = Outcome.CLIENT_DISCONNECTED
        seen = ReportedResponse(
            self._status, error, self._first_s, self._events, told is not None, told or Usage()
        )
        self._resources.dispatcher.settle(job, placed, seen, outcome, final=True)

    def _note(self, outcome: str) -> None:
        assert self._job is not None
        self._resources.dispatcher.note(self._job, outcome)

    def broke(self, error: Exception) -> None:
        self._wait = None
        _log.error("%r failed inside the picker", self, exc_info=error)
        self._resources.count_bug()
        self._call.finish(Status.INTERNAL, "the picker failed")
        self.lost()
