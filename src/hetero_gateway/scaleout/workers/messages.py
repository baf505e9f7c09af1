"""What a worker and the scheduler process say to each other, and how it stands on a socket.

Frames of a length (4 bytes, little-endian) and a MessagePack array of messages; a message is an
array that begins with its kind. Times are of the monotonic clock, which all processes of a machine
share, in seconds. ``key`` numbers a request within its worker.

    worker → scheduler                            scheduler → worker
    Hello      who it is                          Members    the instances; the answer to Hello
    Outstanding what it has placed already        View       their loads, once a second
                                                  Served     what /readyz and /v1/models answer by
                                                  Keys       clients', once they have changed
    Submit     a request                          Placed     where it goes
    Again      its next attempt                   Rejected   nobody can take it
    Leave      it wants no place any more         Refused    it waited too long; queue full
    Began      its stream's first bytes           Failed     placing it met a bug
    Made       it is answered with a response   Spent      the answer to Spend: it may go on
    Spend      a session's tokens so far
    Known      responses that it has passed on
    Settle     the attempt is over
    Outside    the same of one at a service elsewhere
    PassOn     the client gets a settled answer
    Over       the request is over, unplaced
    Speed      steps of the last second
    Counts     what the worker counted itself
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.limits.accounts import LimitStanding
from hetero_gateway.core.types import InstanceId, Outcome, RejectReason, Usage
from hetero_gateway.engines.vllm import ModelCard
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import Failure

PREFIX = struct.Struct("<I")
# A frame is one turn's messages; a whole body may be among them, for a predictor that reads it.
MOST_FRAME_BYTES = 1 << 30


class _Message(msgspec.Struct, array_like=True, gc=False):
    pass


class Facts(msgspec.Struct, array_like=True, gc=False):
    """What the scheduler process has to know of a request; see ``Inbound``.

    ``headers``: those that ``Intake.describe`` looks at.
    ``body``: for a predictor that reads the prompt; else empty.
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


class Lengths(msgspec.Struct, array_like=True, gc=False):
    """A request as it was placed."""

    prompt_tokens: int
    output_tokens: float
    sequences: int
    streams: bool


class Error(msgspec.Struct, array_like=True, gc=False):
    """An ``InstanceError``."""

    failure: Failure
    message: str
    retry_after_s: float | None


class Report(msgspec.Struct, array_like=True, gc=False):
    """What was seen of a response: ``dispatcher.Seen``."""

    status: int
    error: Error | None
    first_body_at_s: float | None
    events: int
    empty: bool
    complete: bool
    usage: Usage
    mark: bytes  # distinguishes the request's body from others
    body_bytes: int


# Worker to scheduler


class Hello(_Message, tag=1):
    worker: int
    pid: int
    version: str


class Carried(msgspec.Struct, array_like=True, gc=False):
    """A request that is on an instance already, or was placed while nobody answered."""

    key: int
    facts: Facts
    lengths: Lengths
    instance: InstanceId
    placed_s: float
    waited_s: float
    began_s: float | None


class Outstanding(_Message, tag=2):
    requests: list[Carried]


class Submit(_Message, tag=3):
    key: int
    facts: Facts
    tried: list[InstanceId]
    failure: Error | None


class Again(_Message, tag=4):
    """``model``: another one from now on, a fallback; "": the same."""

    key: int
    tried: list[InstanceId]
    failure: Error | None
    model: str = ""


class Leave(_Message, tag=5):
    key: int


class Began(_Message, tag=6):
    key: int


class Settle(_Message, tag=7):
    key: int
    outcome: Outcome
    final: bool
    report: Report


class PassOn(_Message, tag=8):
    key: int
    report: Report


class Over(_Message, tag=9):
    """``outcome``: as it is counted; "": it is not."""

    key: int
    outcome: str


class Speed(_Message, tag=10):
    """``parts``: (instance, seconds, steps) of streams; ``samples``: (instance, events, tokens)."""

    parts: list[tuple[InstanceId, float, float]]
    samples: list[tuple[InstanceId, int, int]]


class Counts(_Message, tag=11):
    """What has come to a worker's own counts since the last time.

    ``outcomes``: (model, instance, outcome, number); ``refusals``, ``statuses``: by HTTP status;
    ``connections``: now; ``pools``: open connections to each instance, now. ``overhead``,
    ``round_trip``: (number in each bin, sum) of the histograms. ``usage``: ``Usage.take``'s.
    """

    draining: bool
    connections: int
    pools: dict[InstanceId, int]
    outcomes: list[tuple[str, str, str, int]]
    timeouts: dict[str, int]
    refusals: dict[int, int]
    statuses: dict[int, int]
    overhead: tuple[list[int], float]
    round_trip: tuple[list[int], float]
    usage: list[tuple[int, str, str, tuple[int, int, int, int]]]


class Outside(_Message, tag=13):
    """An attempt at a service elsewhere is over; ``label``: of the fallback."""

    key: int
    label: str
    outcome: Outcome
    final: bool
    report: Report


class Made(_Message, tag=12):
    """``name``: ``Intake.response_name``."""

    key: int
    name: bytes


class KnownResponse(msgspec.Struct, array_like=True, gc=False):
    """A ``dataplane.responses.Response``, without its keys."""

    name: bytes
    instance: InstanceId
    tokens: int
    model: str
    owner: str


class Known(_Message, tag=15):
    """For a scheduler process that is new: the worker's latest, in the order in which they came."""

    responses: list[KnownResponse]


class Spend(_Message, tag=14):
    """A session's tokens so far, all of which its client is charged for."""

    key: int
    tokens: int


FromWorker = (
    Hello
    | Outstanding
    | Submit
    | Again
    | Leave
    | Began
    | Made
    | Spend
    | Known
    | Settle
    | Outside
    | PassOn
    | Over
    | Speed
    | Counts
)


# Scheduler to worker


class Member(msgspec.Struct, array_like=True, gc=False):
    """An instance. ``config``: its configuration as JSON."""

    config: bytes
    models: list[str]
    max_model_len: int | None
    kv_capacity_tokens: int | None
    weight: float
    available: bool
    draining: bool


class Members(_Message, tag=101):
    instances: list[Member]


class Served(_Message, tag=109):
    """``ready``: an instance can take requests. ``models``: of live instances, with their cards."""

    ready: bool
    models: dict[str, ModelCard]


class View(_Message, tag=102):
    """``loads``: by instance, all workers' together."""

    loads: list[tuple[InstanceId, PeerLoad]]


class Keys(_Message, tag=108):
    """``text``: a ``KeysFile`` as JSON; it has hashes alone."""

    text: bytes


class Placed(_Message, tag=103):
    key: int
    instance: InstanceId
    lengths: Lengths
    placed_s: float
    waited_s: float
    standing: LimitStanding | None = None  # of its client


class Rejected(_Message, tag=104):
    key: int
    reason: RejectReason
    detail: str


class Refused(_Message, tag=105):
    """The fields of ``Refusal``."""

    key: int
    status: int
    code: str
    message: str
    param: str | None
    kind: str
    retry_after_s: int | None
    headers: list[tuple[bytes, bytes]]


class Failed(_Message, tag=106):
    key: int


class Spent(_Message, tag=110):
    """The answer to a ``Spend``, unless that is ``Refused``: it was charged."""

    key: int


class Configuration(_Message, tag=107):
    """The gateway's configuration in effect, as JSON."""

    config: bytes


FromScheduler = (
    Configuration | Members | Served | View | Keys | Placed | Rejected | Refused | Failed | Spent
)

_encode = msgspec.msgpack.Encoder().encode


def frame(messages: list[Any]) -> bytes:
    """Messages as bytes."""
    data = _encode(messages)
    return PREFIX.pack(len(data)) + data


class FrameReader:
    """Bytes as they come, to lists of messages.

    Args:
        kinds: the messages that may come, as a union.
        take: called with each frame's messages.
    """

    def __init__(self, kinds: Any, take: Callable[[list[Any]], None]) -> None:
        self._decode = msgspec.msgpack.Decoder(list[kinds]).decode
        self._take = take
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Raises msgspec.DecodeError, ValueError: these are no frames of ours."""
        if not self._buffer and len(data) >= 4:
            (size,) = PREFIX.unpack_from(data)
            if size == len(data) - 4:  # the rule
                self._take(self._decode(memoryview(data)[4:]))
                return
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (size,) = PREFIX.unpack_from(buffer, start)
            if size > MOST_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if len(buffer) - start - 4 < size:
                break
            with memoryview(buffer)[start + 4 : start + 4 + size] as view:
                messages = self._decode(view)
            start += 4 + size
            self._take(messages)
        del buffer[:start]
