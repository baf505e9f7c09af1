"""The messages between a worker and the scheduler process, and their encoding.

Frames of a length (4 bytes, little-endian) and a MessagePack array of messages; a message is an
array that begins with its kind. Times are of the monotonic clock, which all processes of a machine
share, in seconds. ``key`` numbers a request within its worker.

    worker → scheduler                              scheduler → worker
    Hello         who it is                         Instances     all of them; the answer to Hello
    Outstanding   what it has placed already        InstanceLoads once a second
                                                    Listed        answers at /readyz, /v1/models
                                                    Keys          clients', once they have changed
                                                    PrefixSecret  of several gateways
    Submit        a request                         PlacedAt      where it goes
    Resubmit      its next attempt                  Rejected      nobody can take it
    Leave         it no longer wants a place        Refused       it waited too long; queue full
    Began         its stream's first bytes          Failed        placing it met a bug
    Made          its answer is a response          Spent         answer to Spend: it may continue
    Spend         a session's tokens so far
    Known         responses that it has passed on
    Settle        the attempt is over
    SettleOutside of one at a service elsewhere
    PassOn        the client gets a settled answer
    Over          the request is over, unplaced
    Speed         steps of the last second
    Counts        the worker's counts       Counted       they have arrived
"""

import asyncio
import functools
import logging
import operator
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, cast

import msgspec
from xxhash import xxh3_64_intdigest

from hetero_gateway.core.histogram import Taken
from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.limits.accounts import LimitStanding
from hetero_gateway.core.types import InstanceId, Outcome, RejectReason, Usage
from hetero_gateway.engines.vllm import ModelCard
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.records import AnswerTokens
from hetero_gateway.gateway.records.metrics import SeriesRow
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import Failure, InstanceError

PREFIX = struct.Struct("<I")
# A frame is one turn's messages; a whole body may be among them, for a predictor that reads it.
MOST_FRAME_BYTES = 1 << 30
_MARKED_BYTES = 2048

_log = logging.getLogger(__name__)


class _Record(msgspec.Struct, array_like=True, gc=False):
    pass


class _FromWorker(_Record):
    pass


class _FromScheduler(_Record):
    pass


class Facts(_Record):
    """The properties of a request that the scheduler process needs; see ``Inbound``.

    ``headers``: those that ``Intake.describe`` looks at.
    ``body``: for a predictor that reads the prompt; else empty. ``told_tokens``: its answer
    broke off after so many, and is being continued; None: it is not.
    """

    request_id: bytes
    path: str
    client: str
    received_s: float
    deadline_s: float
    headers: list[tuple[bytes, bytes]]
    parsed: ParsedRequest
    counted: int | None
    body: bytes
    told_tokens: int | None


def mark_of(body: bytes) -> bytes:
    """Identifies a body in every process: its length and its ends."""
    ends = xxh3_64_intdigest(body[-_MARKED_BYTES:], xxh3_64_intdigest(body[:_MARKED_BYTES]))
    return b"%x-%x" % (len(body), ends)


# Worker to scheduler


class Hello(_FromWorker, tag=1):
    worker: int
    pid: int
    version: str


class CarriedRequest(_Record):
    """A request that is on an instance already, or was placed while nobody answered.

    ``instance``: "" if it is at a service elsewhere; the rest has no meaning then.
    """

    key: int
    facts: Facts
    prompt_tokens: int
    predicted_output_tokens: float
    sequences: int
    streams: bool
    instance: InstanceId
    placed_s: float
    waited_s: float
    began_s: float | None


class Outstanding(_FromWorker, tag=2):
    requests: list[CarriedRequest]


class Submit(_FromWorker, tag=3):
    key: int
    facts: Facts
    tried: list[InstanceId]
    failure: InstanceError | None


class Resubmit(_FromWorker, tag=4):
    """``model``: another one from now on, a fallback; "": the same. ``told_tokens``: see
    ``Facts``.
    """

    key: int
    tried: list[InstanceId]
    failure: InstanceError | None
    model: str = ""
    told_tokens: int | None = None


class Leave(_FromWorker, tag=5):
    key: int


class Began(_FromWorker, tag=6):
    key: int


class _Answer(_Record):
    """An ``ObservedResponse``. ``prompt``, ``output``, ``cached``: tokens, as its end stated them.

    Plain numbers: msgspec does not see the types of compiled code.
    """

    status: int
    error: InstanceError | None
    first_body_at_s: float | None
    empty: bool
    prompt: int | None
    output: int | None
    cached: int | None

    congested: ClassVar[bool] = False

    def usage(self) -> Usage:
        return Usage(self.prompt, self.output, self.cached)


class CountedAnswer(_Answer):
    """The rest of an answer that a worker has counted, needed if it was the last one.

    ``mark``: ``mark_of`` the request's body. ``told_prompt``, ``told_output``: tokens, as
    accepted (``Recorder.count_seen``); no output: it stated nothing.
    """

    mark: bytes
    told_prompt: int | None
    told_output: int | None

    # In these, everything was made in the worker
    events: ClassVar[int] = 0
    complete: ClassVar[bool] = True
    body_bytes: ClassVar[int] = 0

    def told(self) -> AnswerTokens | None:
        output = self.told_output
        return None if output is None else AnswerTokens(self.told_prompt, output)


class OutsideAnswer(_Answer):
    """Of a service elsewhere."""

    events: int
    complete: bool
    body_bytes: int


class Settle(_FromWorker, tag=7):
    key: int
    outcome: Outcome
    final: bool
    answer: CountedAnswer


class PassOn(_FromWorker, tag=8):
    key: int
    answer: CountedAnswer
    outcome: Outcome = Outcome.COMPLETED


class Over(_FromWorker, tag=9):
    """``outcome``: as it is counted; "": it is not."""

    key: int
    outcome: str


class Speed(_FromWorker, tag=10):
    """``parts``: (instance, seconds, steps) of streams; ``samples``: (instance, events, tokens)."""

    parts: list[tuple[InstanceId, float, float]]
    samples: list[tuple[InstanceId, int, int]]


class Counts(_FromWorker, tag=11):
    """The increase of a worker's own counts since the last message: each 50 ms while there is any,
    and before the worker ends. It is repeated until answered with a ``Counted``.

    ``number``: rises, so that none is counted twice. ``connections``: now; ``pools``: open
    connections to each instance, now; ``series``: ``Metrics.take_series``'s; ``classes``:
    (class, outcome, number); ``refusals``, ``statuses``: by HTTP status; ``usage``:
    ``ClientUsage.take``'s. ``continued``: streams that broke off, by result.
    """

    number: int
    draining: bool
    connections: int
    pools: dict[InstanceId, int]
    series: list[SeriesRow]
    classes: list[tuple[str, str, int]]
    disconnects: dict[str, int]
    timeouts: dict[str, int]
    refusals: dict[int, int]
    statuses: dict[int, int]
    overhead: Taken
    round_trip: Taken
    usage: list[tuple[int, str, str, tuple[int, int, int, int]]]
    continued: dict[str, int] = {}


class Made(_FromWorker, tag=12):
    """``name``: ``Intake.response_name``."""

    key: int
    name: bytes


class SettleOutside(_FromWorker, tag=13):
    """``label``: of the fallback."""

    key: int
    label: str
    outcome: Outcome
    final: bool
    answer: OutsideAnswer


class Spend(_FromWorker, tag=14):
    """A session's tokens so far, all of which its client is charged for."""

    key: int
    tokens: int


class Known(_FromWorker, tag=15):
    """For a new scheduler process: the worker's latest responses, in order of arrival.

    ``responses``: (name, instance, tokens, model, owner) of ``dataplane.responses.Response``.
    """

    responses: list[tuple[bytes, InstanceId, int, str, str]]


FromWorker: Any = functools.reduce(operator.or_, _FromWorker.__subclasses__())


# Scheduler to worker


class InstanceNow(_Record):
    """An instance. ``config``: its configuration as JSON."""

    config: bytes
    models: list[str]
    max_model_len: int | None
    kv_capacity_tokens: int | None
    weight: float
    available: bool
    draining: bool
    silent: bool
    leave_at_s: float
    names_prompts: bool


class Instances(_FromScheduler, tag=101):
    instances: list[InstanceNow]


class InstanceLoads(_FromScheduler, tag=102):
    """Of instances, all workers' together."""

    loads: list[tuple[InstanceId, PeerLoad]]


class PlacedAt(_FromScheduler, tag=103):
    """``model``: if the request named another one. ``standing``: of its client."""

    key: int
    instance: InstanceId
    prompt_tokens: int
    predicted_output_tokens: float
    sequences: int
    streams: bool
    placed_s: float
    waited_s: float
    model: str = ""
    standing: LimitStanding | None = None


class Rejected(_FromScheduler, tag=104):
    key: int
    reason: RejectReason
    detail: str


class Refused(_FromScheduler, tag=105):
    key: int
    refusal: Refusal


class Failed(_FromScheduler, tag=106):
    key: int


class Configuration(_FromScheduler, tag=107):
    """The gateway's configuration in effect, as JSON."""

    config: bytes


class Keys(_FromScheduler, tag=108):
    """``text``: a ``KeysFile`` as JSON; it contains only hashes."""

    text: bytes


class PrefixSecret(_FromScheduler, tag=112):
    """The start of keys of prompts from now on, as at other gateways."""

    secret: bytes


class Listed(_FromScheduler, tag=109):
    """``ready``: an instance can take requests. ``models``: of live instances, with their cards."""

    ready: bool
    models: dict[str, ModelCard]


class Spent(_FromScheduler, tag=110):
    """The answer to a ``Spend``, unless that is ``Refused``: it was charged."""

    key: int


class Counted(_FromScheduler, tag=111):
    number: int


FromScheduler: Any = functools.reduce(operator.or_, _FromScheduler.__subclasses__())


def _of_error(error: Any) -> Any:
    if isinstance(error, InstanceError):
        return error.failure, str(error), error.retry_after_s
    if isinstance(error, Refusal):
        return vars(error)
    raise NotImplementedError


def _error_of(kind: type, parts: Any) -> InstanceError | Refusal:
    if kind is Refusal:
        return Refusal(**parts | {"headers": [(name, value) for name, value in parts["headers"]]})
    return InstanceError(*msgspec.convert(parts, tuple[Failure, str, float | None]))


_encode = msgspec.msgpack.Encoder(enc_hook=_of_error).encode


def frame(messages: list[Any]) -> bytes:
    data = _encode(messages)
    return PREFIX.pack(len(data)) + data


class FrameReader:
    """Turns incoming bytes into lists of messages.

    Args:
        kinds: the accepted messages, as a union.
        take: called with each frame's messages.
        most_bytes: of a frame.
    """

    def __init__(
        self, kinds: Any, take: Callable[[list[Any]], None], most_bytes: int = MOST_FRAME_BYTES
    ) -> None:
        self._most_bytes = most_bytes
        self._decode = msgspec.msgpack.Decoder(list[kinds], dec_hook=_error_of).decode
        self._take = take
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Raises msgspec.DecodeError, ValueError: these are not frames of ours."""
        if not self._buffer and len(data) >= 4:
            (size,) = PREFIX.unpack_from(data)
            if size == len(data) - 4:  # the usual case
                self._take(self._decode(memoryview(data)[4:]))
                return
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (size,) = PREFIX.unpack_from(buffer, start)
            if size > self._most_bytes:
                raise ValueError(f"a frame of {size} bytes")
            if len(buffer) - start - 4 < size:
                break
            with memoryview(buffer)[start + 4 : start + 4 + size] as view:
                messages = self._decode(view)
            start += 4 + size
            self._take(messages)
        del buffer[:start]


class ChannelUser(Protocol):
    """The user of an end. Called from the event loop's callbacks."""

    def received(self, messages: list[Any]) -> None: ...

    def unsent(self, message: Any, error: Exception) -> None:
        """A message cannot be encoded: for example, a number has too many digits."""

    def lost(self) -> None:
        """The other end is gone. Called once, unless ``close`` was."""


class Channel(asyncio.Protocol):
    """One end of the socket. Messages of one turn of the event loop go in one write.

    Args:
        kinds: the accepted messages, as a union.
        listener: receives them; set before any arrive.
        most_bytes: of one read.
    """

    def __init__(
        self,
        kinds: Any,
        listener: ChannelUser | None = None,
        most_bytes: int = MOST_FRAME_BYTES,
    ) -> None:
        self.listener = listener
        self._reader = FrameReader(kinds, self._take, most_bytes)
        self._outbox: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # so that uvloop keeps nothing for a later turn

    def fileno(self) -> int:
        """The socket's descriptor, once it is connected."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("socket").fileno())

    def send(self, message: Any) -> None:
        """Send it at the end of this turn; without effect when the other end is gone."""
        if self.closed:
            return
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append(message)

    def flush(self) -> None:
        if self._outbox and self._transport is not None and not self.closed:
            outbox, self._outbox = self._outbox, []
            try:
                data = frame(outbox)
            except Exception:
                data = self._what_can_be_sent(outbox)
            self._transport.write(data)

    def _what_can_be_sent(self, outbox: list[Any]) -> bytes:
        """One message that cannot be encoded must not take the others with it."""
        parts = []
        for message in outbox:
            try:
                parts.append(frame([message]))
            except Exception as error:
                _log.exception("a %s cannot be sent", type(message).__name__)
                if self.listener is not None:
                    self.listener.unsent(message, error)
        return b"".join(parts)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except (msgspec.MsgspecError, ValueError):
            _log.exception("a message on an internal socket cannot be read")
            self.abort()

    def _take(self, messages: list[Any]) -> None:
        if self.listener is not None and not self.closed:
            self.listener.received(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            if self.listener is not None:
                self.listener.lost()

    def close(self) -> None:
        """Send waiting messages, and end; the listener gets nothing more."""
        self.flush()
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once, as if the other end were gone."""
        if self._transport is not None:
            self._transport.abort()
