"""Loops that send mutated frames, and mutated messages in good frames, to a picker's port.

What must hold all the time: nothing is logged as an error, and after each input a good call on
another connection is answered. At the end: no call is open, nothing is held or buffered, no load is
charged, and the process is no larger than one connection may make it.
"""

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Callable

from hetero_gateway.scaleout.picker.http2 import frames
from hetero_gateway.scaleout.picker.http2.frames import (
    ACK,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    frame,
)
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import ProcessingRequest
from tests.fakes import asking
from tests.fakes.asking import CHECK, FULL_DUPLEX, PROCESS, REPORT, WATCH, in_data, opened
from tests.fakes.envoy import RunningPicker, running_picker
from tests.fakes.memory import resident_mb
from tests.fakes.peers import GREETING, Peer, peer_at
from tests.fakes.running import config_for, eventually
from tests.fuzz.fuzzing import Findings, errors_found
from tests.fuzz.mutation import mutated_bytes
from tests.fuzz.sink import sink

# Who gets no answer leaves after this; a good call has so long.
_PATIENCE_S = 0.05
_GOOD_S = 30.0
_MOST_MB = 100
# Of one peer's frames: it is in the same process, and must not be what fills that.
_MOST_BYTES = 2**20
_WARM = 20


@contextlib.asynccontextmanager
async def _target(findings: Findings) -> AsyncIterator[RunningPicker]:
    """A picker over one instance; what must hold at the end is looked at."""
    with errors_found(findings, but="filter is misconfigured"):
        async with sink() as instance:
            config = config_for([instance], profiles=(None,), picker={"port": 0, "drain_s": 0})  # type: ignore[list-item]
            async with running_picker(config) as picker:
                await eventually(lambda: "m" in picker.gateway.fleet.models())
                yield picker
                try:
                    await eventually(lambda: _is_at_rest(picker), within_s=30)
                except TimeoutError:
                    (server,) = picker.server.picker._servers
                    findings.add(
                        f"not at rest: {picker.loads()}, {server.open_calls} calls, "
                        f"{server.held_bytes} bytes, {server.limits.buffered_bytes} long ones",
                        b"",
                    )


def _is_at_rest(picker: RunningPicker) -> bool:
    (server,) = picker.server.picker._servers
    return (
        picker.settled()
        and not server.open_calls
        and not server.held_bytes
        and not server.limits.buffered_bytes
        and not len(server.turns)
    )


def frames_of(seed: int) -> Callable[[], bytes]:
    """Draws what a peer sends, for ever: good frames, of which some are changed."""
    rng = random.Random(seed)

    def draw() -> bytes:
        newest, sent = -1, []
        for _ in range(rng.randint(1, 30)):
            if newest < 0 or rng.random() < 0.3:
                newest += 2
                sent.append(_call(rng, newest))
            else:
                sent.append(_frame(rng, rng.randrange(1, newest + 1, 2)))
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            at, kind = rng.randrange(len(sent)), rng.randrange(6)
            one = sent[at]
            if kind == 0:
                most = _MOST_BYTES // (len(one) or 1)
                sent[at] = one * min(most, rng.choice((2, 50, 1000)))
            elif kind == 1:
                rng.shuffle(sent)
            elif kind == 2 and len(one) >= HEAD_BYTES:
                sent[at] = _with_other_head(rng, one)
            elif kind == 3:
                sent[at] = mutated_bytes(rng, one)
            elif kind == 4:
                del sent[at]
                sent.append(b"")
            else:
                sent[at] = one[: rng.randrange(len(one) + 1)]
        greeting = GREETING
        if rng.random() < 0.05:
            greeting = mutated_bytes(rng, greeting)
        return greeting + b"".join(sent)

    return draw


def _with_other_head(rng: random.Random, one: bytes) -> bytes:
    word, flags, stream_id = HEAD.unpack_from(one)
    kind = rng.randrange(4)
    if kind == 0:
        word = word & ~0xFF | rng.choice((*range(10), rng.randrange(256)))
    elif kind == 1:
        flags ^= 1 << rng.randrange(8)
    elif kind == 2:
        stream_id = rng.choice((0, 1, 2, stream_id + 2, 2**31 - 1, 2**32 - 1))
    else:
        word = word & 0xFF | rng.choice((0, 1, 5, 16384, 16385, 2**24 - 1)) << 8
    return HEAD.pack(word, flags, stream_id) + one[HEAD_BYTES:]


def _call(rng: random.Random, stream_id: int) -> bytes:
    """A good one, as far as it goes."""
    path = rng.choice((PROCESS, PROCESS, PROCESS, CHECK, WATCH, REPORT, "/none"))
    return opened(range(stream_id, stream_id + 1), *_talk(rng)[: rng.randint(0, 4)], path=path)


def _frame(rng: random.Random, stream_id: int) -> bytes:
    """A good one, or some that belong together, of a call that was opened."""
    kind = rng.randrange(2, 12)
    if kind < 6:
        return in_data(stream_id, *rng.sample(_talk(rng), 2))
    if kind == 6:
        size = rng.choice((1, 1000, 2**20, 2**31 - 1))
        return frames.window_update(rng.choice((0, stream_id)), size)
    if kind == 7:
        window = rng.choice((0, 1, 65535, 2**20, 2**31 - 1))
        return frames.settings({rng.choice((1, 3, 4, 4, 4, 5, 6, 99)): window})
    if kind == 8:
        return frame(frames.PING, rng.choice((0, ACK)), 0, rng.randbytes(8))
    if kind == 9:
        return frames.reset(stream_id, frames.ErrorCode.CANCEL)
    if kind == 10:
        padding = rng.randrange(20)
        data = bytes([padding]) + rng.choice(_talk(rng)) + bytes(padding)
        return frame(frames.DATA, frames.PADDED | rng.choice((0, END_STREAM)), stream_id, data)
    return rng.choice(
        (
            frame(frames.PRIORITY, 0, stream_id, bytes(5)),
            frame(frames.DATA, END_STREAM, stream_id),
            frames.goaway(0, frames.ErrorCode.NO_ERROR),
        )
    )


def _talk(rng: random.Random) -> list[bytes]:
    """The messages of one request."""
    mode = rng.choice((asking.BUFFERED, FULL_DUPLEX, FULL_DUPLEX, 1))
    size = rng.choice((0, 5, 500, 20_000))
    ends = rng.random() < 0.8
    fields = [("x-request-id", "r"), ("content-length", str(size))][: rng.randrange(3)]
    return [
        asking.head_bytes(*fields, body_mode=mode, response_mode=rng.choice((0, FULL_DUPLEX))),
        asking.body_bytes(asking.body(size), ends=ends),
        asking.response_head_bytes(rng.choice((200, 400, 503))),
        asking.response_body_bytes(b"y" * size, ends=ends),
        ProcessingRequest(response_trailers={}).SerializeToString(),
    ]


def messages_of(seed: int) -> Callable[[], bytes]:
    """Draws calls in good frames, whose messages are changed."""
    rng = random.Random(seed)
    paths = (PROCESS, PROCESS, PROCESS, CHECK, WATCH, REPORT)
    report = b"%020d end 10 5 - 3" % 7

    def message() -> bytes:
        kind = rng.randrange(8)
        if kind == 0:
            one = _with_struct(rng)
        elif kind == 1:
            one = rng.choice((report, b"\x0a\x09readiness", b""))
        else:
            one = rng.choice(_talk(rng))
        if rng.random() < 0.6:
            one = mutated_bytes(rng, one)
        if rng.random() < 0.05:
            one = _repeated(rng, one)
        return one

    def draw() -> bytes:
        out = GREETING
        for stream_id in range(1, 2 * rng.randint(1, 6), 2):
            talk = [message() for _ in range(rng.randint(0, 6))]
            if rng.random() < 0.7:
                talk.insert(0, _talk(rng)[0])
            out += opened(range(stream_id, stream_id + 1), *talk, path=rng.choice(paths))
            if rng.random() < 0.3:
                out += frame(frames.DATA, END_STREAM, stream_id)
        return out

    return draw


def _with_struct(rng: random.Random) -> bytes:
    """A head with metadata and attributes, as deep or as wide as a message may be."""
    made = asking.head(body_mode=FULL_DUPLEX)
    deep: object = "x"
    for _ in range(rng.choice((1, 20, 45))):
        deep = {"k": deep} if rng.random() < 0.5 else [deep]
    hint = rng.choice((deep, ["127.0.0.1:1"] * 1000, "a,b," * 300, 5.0, None))
    name = "x-gateway-destination-endpoint-subset"
    metadata = made.metadata_context.filter_metadata
    metadata["envoy.lb.subset_hint"].update({name: hint})
    metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": deep})
    made.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": deep})
    return made.SerializeToString()


def _repeated(rng: random.Random, one: bytes) -> bytes:
    piece = rng.choice((b"\x12\x00", b"\x12\x02\x0a\x00", b"\x0a\x00", one[:100] or b"\x08"))
    return one + piece * rng.choice((100, 5000))


async def fuzz_http2(seed: int, count: int) -> Findings:
    """``count`` peers whose frames are spoilt."""
    return await _fuzz(frames_of(seed), count)


async def fuzz_grpc(seed: int, count: int) -> Findings:
    """``count`` peers whose messages are."""
    return await _fuzz(messages_of(seed), count)


async def _fuzz(draw: Callable[[], bytes], count: int) -> Findings:
    findings = Findings()
    async with _target(findings) as picker:
        before_mb = 0.0
        async with peer_at(picker.ports[0], path=CHECK) as good:
            for number in range(count):
                data = draw()
                await _attack(picker.ports[0], data, findings)
                if not await _is_served(good, 2 * number + 1):
                    findings.add("a good call is not answered", data)
                    break
                if number == min(_WARM, count - 1):
                    before_mb = resident_mb()
        if resident_mb() - before_mb > _MOST_MB:
            findings.add(f"the process has grown from {before_mb} to {resident_mb()} MB", b"")
    return findings


async def _is_served(good: Peer, stream_id: int) -> bool:
    try:
        async with asyncio.timeout(_GOOD_S):
            good.open(stream_id, b"", ends=True)
            return (await good.trailers(stream_id))["grpc-status"] == "0"
    except (TimeoutError, OSError, asyncio.IncompleteReadError, AssertionError):
        return False


async def _attack(port: int, data: bytes, findings: Findings) -> None:
    """Send, read what comes, leave; counts how connections ended, and calls (grpc-status)."""
    findings.sent += 1
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(data)
        async with asyncio.timeout(_PATIENCE_S):
            while more := await reader.read(65536):
                received += more
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    findings.statuses[_ending(received)] += 1


def _ending(received: bytes) -> int:
    """100 + the code that the connection ended with; 1: calls ended alone; 0: nothing did."""
    at, found = 0, 0
    while len(received) - at >= HEAD_BYTES:
        word, flags, _ = HEAD.unpack_from(received, at)
        if word & 0xFF == GOAWAY:
            return 100 + int(struct.unpack_from(">I", received, at + HEAD_BYTES + 4)[0])
        if word & 0xFF == HEADERS and flags & END_STREAM:
            found = 1
        at += HEAD_BYTES + (word >> 8)
    return found
