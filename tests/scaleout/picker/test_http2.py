"""gRPC over HTTP/2: against grpc's own client, and against peers that keep to no rules."""

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator

import grpc
import pytest

from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.scaleout.picker.http2 import blocks, calls, connection, frames
from hetero_gateway.scaleout.picker.http2.calls import Call
from hetero_gateway.scaleout.picker.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Status,
    frame,
)
from hetero_gateway.scaleout.picker.http2.server import GrpcServer
from tests.fakes.peers import GREETING, Peer, anyio_backend, header_block, peer_at
from tests.fakes.running import eventually

__all__ = ["anyio_backend"]

MAX_BYTES = 4 * 2**20
MARGIN_BYTES = 2**20


class Echo:
    """Sends back what it gets; ``seen``: what it was called with."""

    def __init__(self, call: Call, seen: list[object]) -> None:
        self.call = call
        self.seen = seen

    def message(self, data: bytes) -> None:
        self.seen.append(data)
        if data == b"bug":
            raise RuntimeError("a bug")
        self.call.at_work = data == b"work"
        self.call.send(frames.message(data))

    def refuse(self, refusal: Refusal) -> None:
        self.seen.append(refusal)
        self.call.finish(Status.RESOURCE_EXHAUSTED, "too long")

    def half_closed(self) -> None:
        self.seen.append("half-closed")
        self.call.finish()

    def lost(self) -> None:
        self.seen.append("lost")


class Running:
    def __init__(self) -> None:
        self.seen: list[object] = []
        self.bugs: list[None] = []
        self.limits = BodyLimits(MAX_BYTES, 4 * MAX_BYTES)
        self.server = GrpcServer(
            {"/test.Test/Echo": lambda call: Echo(call, self.seen)},
            self.limits,
            MARGIN_BYTES,
            lambda: self.bugs.append(None),
        )
        self.port = 0


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Running]:
    run = Running()
    run.port = await run.server.listen("127.0.0.1", 0)
    try:
        yield run
    finally:
        await run.server.stop(0.2)
    assert run.server.open_calls == 0
    assert run.limits.buffered_bytes == 0


def peer_of(run: Running, *, greets: bool = True) -> contextlib.AbstractAsyncContextManager[Peer]:
    return peer_at(run.port, greets=greets)


@contextlib.asynccontextmanager
async def grpc_client(run: Running, **options: int) -> AsyncIterator[grpc.aio.Channel]:
    given = [(f"grpc.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{run.port}", options=given) as channel:
        yield channel


async def test_grpcs_own_client_gets_its_messages_back_whole():
    async with (
        running() as run,
        grpc_client(run, max_receive_message_length=-1, max_send_message_length=-1) as channel,
    ):
        echo = channel.stream_stream("/test.Test/Echo")
        rng = random.Random(1)
        sizes = [0, 1, 16379, 16380, 65536, 100_000, MAX_BYTES, 3]
        sent = [rng.randbytes(size) for size in sizes]

        async def one() -> list[bytes]:
            return [each async for each in echo(iter(sent))]

        for received in await asyncio.gather(one(), one()):
            assert received == sent
        assert run.server.open_calls == 0
        assert run.limits.buffered_bytes == 0


async def test_a_message_that_is_too_long_is_refused_and_the_next_call_goes_on():
    async with (
        running() as run,
        grpc_client(run, max_send_message_length=-1) as channel,
    ):
        echo = channel.stream_stream("/test.Test/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in echo(iter([bytes(MAX_BYTES + MARGIN_BYTES + 1)])):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (refusal,) = (each for each in run.seen if isinstance(each, Refusal))
        assert refusal.status == 413
        assert [each async for each in echo(iter([b"x"]))] == [b"x"]


async def test_what_has_come_of_long_messages_counts_and_not_what_was_announced():
    async with running() as run, peer_of(run) as peer, peer_of(run) as other:
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**30}))
        begun = frames.MESSAGE_HEAD.pack(0, MAX_BYTES) + b"abc"
        for stream_id in (1, 3, 5, 7, 9):
            peer.open(stream_id)
            peer.send(frame(DATA, 0, stream_id, begun))
        await peer.pong()
        assert run.limits.buffered_bytes == 0
        # Of what has come, a connection may have half: the rest is for the others.
        for stream_id, count in ((1, 255), (3, 255), (5, 15)):
            for _ in range(count):
                peer.send(frame(DATA, 0, stream_id, bytes(16384)))
                await peer.writer.drain()
        assert (await peer.trailers(5))["grpc-status"] == "8"
        (refusal,) = (each for each in run.seen if isinstance(each, Refusal))
        assert refusal.status == 503
        assert run.limits.buffered_bytes <= 2 * MAX_BYTES
        other.open(1)
        message = frames.message(bytes(MAX_BYTES))
        for at in range(0, len(message), 16384):
            other.send(frame(DATA, 0, 1, message[at : at + 16384]))
            await other.writer.drain()
        await eventually(lambda: bytes(MAX_BYTES) in run.seen)
        held = run.limits.buffered_bytes
        peer.send(frames.reset(1, ErrorCode.CANCEL))
        await peer.pong()
        assert run.limits.buffered_bytes < held


async def test_a_call_of_an_unknown_method_or_none_of_grpcs_is_answered():
    async with running() as run, grpc_client(run) as channel, peer_of(run) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Test/Other")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        block = peer.block(**{"content-type": "text/plain"})
        peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
        assert (await peer.trailers(1))["grpc-status"] == "12"


async def test_a_bug_costs_its_own_call_alone():
    async with running() as run, peer_of(run) as peer:
        peer.open(1, b"one")
        peer.open(3, b"bug")
        assert (await peer.trailers(3))["grpc-status"] == "13"
        peer.send(frame(DATA, END_STREAM, 1, frames.message(b"two")))
        assert (await peer.trailers(1))["grpc-status"] == "0"
        assert run.seen == [b"one", b"bug", "lost", b"two", "half-closed"]
        assert len(run.bugs) == 1
        peer.send(frames.reset(3, ErrorCode.CANCEL))


async def test_a_reset_and_a_lost_connection_end_calls_once():
    async with running() as run:
        async with peer_of(run) as peer:
            peer.open(1, b"a")
            peer.open(3, b"b")
            peer.send(frames.reset(1, ErrorCode.CANCEL))
            peer.send(frame(DATA, 0, 1, frames.message(b"late")))  # was on its way
            await peer.pong()
            assert run.seen == [b"a", b"b", "lost"]
            assert run.server.open_calls == 1
        await eventually(lambda: run.server.open_calls == 0)
        assert run.seen == [b"a", b"b", "lost", "lost"]


async def test_what_is_sent_keeps_to_the_peers_windows():
    async with running() as run, peer_of(run) as peer:
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
        peer.open(1, b"x" * 30, ends=True)
        _, payload = await peer.until(DATA, 1)
        assert len(payload) == 10
        # A window may shrink below 0, too.
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 4}))
        peer.send(frames.window_update(1, 6))
        await peer.pong()
        peer.send(frames.window_update(1, 5))
        _, more = await peer.until(DATA, 1)
        assert len(more) == 5
        peer.send(frames.window_update(1, 100))
        _, rest = await peer.until(DATA, 1)
        assert payload + more + rest == frames.message(b"x" * 30)
        assert (await peer.trailers(1))["grpc-status"] == "0"


async def test_a_larger_window_is_used_once_it_is_acknowledged():
    async with running() as run, peer_of(run) as peer:
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
        peer.open(1, b"x")
        await peer.pong()
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
        kinds = [(await peer.read())[0] for _ in range(2)]
        assert kinds == [SETTINGS, DATA]


async def test_the_connections_own_window_holds_all_calls_and_frees_them_in_turn():
    async with running() as run, peer_of(run) as peer:
        whole = frames.message(b"y" * 40_000)
        peer.open(1, b"y" * 10_000, b"y" * 10_000, b"y" * 10_000)
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**20}))
        for stream_id in (3, 5):
            peer.open(stream_id)
            for at in range(0, len(whole), 16384):
                peer.send(frame(DATA, 0, stream_id, whole[at : at + 16384]))
        received = {1: 0, 3: 0, 5: 0}

        async def until(total: int) -> None:
            async with asyncio.timeout(20):
                while sum(received.values()) < total:
                    kind, _, stream_id, payload = await peer.read()
                    if kind == DATA:
                        received[stream_id] += len(payload)

        await until(65535)
        assert sum(received.values()) == 65535
        peer.send(frames.window_update(0, 2**20))
        await until(3 * 10_005 + 2 * len(whole))
        assert received == {1: 3 * 10_005, 3: len(whole), 5: len(whole)}


async def test_a_large_stream_is_given_more_room_as_it_is_read():
    async with running() as run, peer_of(run) as peer:
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**30}))
        peer.send(frames.window_update(0, 2**30))
        peer.open(1)
        more = 0
        for _ in range(100):
            peer.send(frame(DATA, 0, 1, frames.message(bytes(16379))))
            await peer.writer.drain()
        peer.send(frame(DATA, END_STREAM, 1))
        async with asyncio.timeout(20):
            while True:
                kind, flags, stream_id, payload = await peer.read()
                if kind == WINDOW_UPDATE and stream_id == 1:
                    more += int.from_bytes(payload, "big")
                if kind == HEADERS and flags & END_STREAM:
                    break
        assert more >= 100 * 16384 - calls.STREAM_WINDOW_BYTES


async def test_padding_and_priorities_are_left_out_and_continuations_put_together():
    async with running() as run, peer_of(run) as peer:
        block = peer.block(**{"x-long": "z" * 3000})
        first = b"\x03" + bytes(5) + block[:1000] + bytes(3)
        peer.send(frame(HEADERS, PADDED | frames.WITH_PRIORITY, 1, first))
        peer.send(frame(CONTINUATION, 0, 1, block[1000:2000]))
        peer.send(frame(CONTINUATION, END_HEADERS, 1, block[2000:]))
        peer.send(frame(DATA, PADDED, 1, b"\x02" + frames.message(b"padded") + b"\0\0"))
        _, payload = await peer.until(DATA, 1)
        assert payload == frames.message(b"padded")


async def test_a_header_table_is_kept_until_the_peer_has_heard_of_its_size():
    async with running() as run, peer_of(run, greets=False) as peer:
        peer.send(PREFACE, frames.settings({}))
        peer.encoder.header_table_size = 4096
        for stream_id in (1, 3):
            peer.open(stream_id, b"early")  # the second one refers to the table
        peer.send(frame(SETTINGS, ACK, 0))
        peer.encoder.header_table_size = 0
        for stream_id in (5, 7, 9):
            peer.open(stream_id, b"late", ends=True)
            assert (await peer.trailers(stream_id))["grpc-status"] == "0"
        assert run.seen.count(b"early") == 2
        # From the second block on they are known.
        assert list(run.server.known_blocks.values()) == ["/test.Test/Echo"]


async def test_blocks_that_all_differ_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(blocks, "_MAX_KNOWN", 8)
    async with running() as run, peer_of(run) as peer:
        for number in range(30):
            block = peer.block(traceparent=f"{number:032x}")
            peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, block))
            assert (await peer.trailers(2 * number + 1))["grpc-status"] == "0"
            assert len(run.server.known_blocks) <= 8


def head(stream_id: int, flags: int = END_HEADERS, block: bytes = header_block()) -> bytes:
    return frame(HEADERS, flags, stream_id, block)


def rules_broken() -> dict[str, tuple[ErrorCode, list[bytes]]]:
    """What a peer sends, and what it is told."""
    block, opened, cancelled = header_block(), head(1), frames.reset(1, ErrorCode.CANCEL)
    largest = struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, 2**31)
    part = frame(CONTINUATION, 0, 1, b"")
    told = {
        ErrorCode.FRAME_SIZE_ERROR: {
            "a frame that is too long": [frames.HEAD.pack(16385 << 8 | DATA, 0, 1)],
            "a priority of 4 bytes": [frame(PRIORITY, 0, 1, bytes(4))],
            "a goodbye of 7 bytes": [frame(GOAWAY, 0, 0, bytes(7))],
            "a ping of 7 bytes": [frame(PING, 0, 0, bytes(7))],
            "settings of 5 bytes": [frame(SETTINGS, 0, 0, bytes(5))],
        },
        ErrorCode.PROTOCOL_ERROR: {
            "data of no call": [frame(DATA, 0, 1, b"x")],
            "data of stream 0": [frame(DATA, 0, 0, b"x")],
            "a window for no call": [frames.window_update(5, 1)],
            "a reset of no call": [frames.reset(5, ErrorCode.CANCEL)],
            "a window that grows by 0": [frames.window_update(0, 0)],
            "an even number": [head(2)],
            "an even number of the past": [head(9), head(2)],
            "a head on stream 0": [head(0)],
            "a head on stream 0, later": [opened, head(0)],
            "a head on stream 0, in pieces": [head(0, 0), frame(CONTINUATION, END_HEADERS, 0)],
            "a head on stream 0, with the reserved bit": [head(2**31)],
            "a priority of stream 0": [frame(PRIORITY, 0, 0, bytes(5))],
            "a reset of stream 0": [frames.reset(0, ErrorCode.CANCEL)],
            "settings of a call": [opened, frame(SETTINGS, 0, 1)],
            "a ping of a call": [opened, frame(PING, 0, 1, bytes(8))],
            "a goodbye of a call": [opened, frame(GOAWAY, 0, 1, bytes(8))],
            "a push": [frame(frames.PUSH_PROMISE, 0, 1, block)],
            "a second head": [opened, opened],
            "padding longer than the frame": [opened, frame(DATA, PADDED, 1, b"\x09abc")],
            "something within a block": [head(1, 0), frame(PING, 0, 0, bytes(8))],
            "a continuation of nothing": [part],
        },
        ErrorCode.FLOW_CONTROL_ERROR: {
            "a window above its limit": [frames.window_update(0, 2**31 - 1)],
            "an initial window above it": [frame(SETTINGS, 0, 0, largest)],
        },
        ErrorCode.COMPRESSION_ERROR: {
            "three updates of the table": [head(1, block=b"\x20\x3f\x80\x00\x20" + block)],
            "a block that is none": [head(1, block=b"\xff\xff\xff\xff\xff\xff")],
            "a table that was forbidden": [head(1, block=b"\x3f\x21" + block)],
        },
        ErrorCode.ENHANCE_YOUR_CALM: {
            "goodbyes": [opened, *[frame(GOAWAY, 0, 0, bytes(8))] * 10_000],
            "continuations without an end": [head(1, 0), *[part] * 40],
            "a block without an end": [
                head(1, 0, b""),
                *[frame(CONTINUATION, 0, 1, bytes(16384))] * 3,
            ],
            "pings": [frame(PING, 0, 0, bytes(8))] * 10_000,
            "settings": [frames.settings({})] * 10_000,
            "priorities": [frame(PRIORITY, 0, 1, bytes(5))] * 10_000,
            "unknown frames": [frame(0x70, 0, 1)] * 10_000,
            "empty data": [opened, *[frame(DATA, 0, 1)] * 10_000],
            "data of a call that is over": [opened, cancelled, *[frame(DATA, 0, 1, b"x")] * 10_000],
            "calls that are reset at once": [
                head(i) + frames.reset(i, ErrorCode.CANCEL) for i in range(1, 20_000, 2)
            ],
        },
    }
    return {name: (code, sent) for code, named in told.items() for name, sent in named.items()}


@pytest.mark.parametrize(("code", "sent"), rules_broken().values(), ids=rules_broken())
async def test_who_breaks_the_rules_is_told_so_and_harms_nobody_else(code, sent):
    async with running() as run, peer_of(run) as other, peer_of(run) as peer:
        other.open(1, b"before")
        await other.until(DATA, 1)
        peer.writer.write(b"".join(sent))
        kinds = set()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(20):
                while True:
                    kind, _, _, payload = await peer.read()
                    kinds.add(kind)
                    if kind == GOAWAY:
                        assert struct.unpack_from(">II", payload)[1] == code, payload
        assert GOAWAY in kinds
        other.send(frame(DATA, END_STREAM, 1, frames.message(b"after")))
        assert (await other.trailers(1))["grpc-status"] == "0"
        assert run.server.open_calls == 0


async def test_what_is_no_http_2_is_refused():
    async with running() as run:
        for sent in (b"GET / HTTP/1.1\r\n\r\n", PREFACE + frame(PING, 0, 0, bytes(8))):
            async with peer_of(run, greets=False) as peer:
                peer.send(sent)
                assert await peer.goaway() is ErrorCode.PROTOCOL_ERROR


async def test_who_says_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(connection, "PREFACE_S", 0.05)
    async with running() as run, peer_of(run, greets=False) as peer:
        peer.send(PREFACE[:10])
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                await peer.reader.read()


async def test_who_reads_nothing_is_not_read_from_and_let_go(monkeypatch):
    monkeypatch.setattr(connection, "STALL_S", 0.3)
    async with running() as run, peer_of(run) as peer:
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31 - 1}))
        peer.send(frames.window_update(0, 2**30))
        peer.writer.transport.pause_reading()
        peer.open(1)
        one = frame(DATA, 0, 1, frames.message(bytes(16379)))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(20):
                for _ in range(10_000):
                    peer.send(one)
                    await peer.writer.drain()
        await eventually(lambda: run.server.open_calls == 0)
        assert run.seen[-1] == "lost"
        # What was kept for it: no more than a part of what it might have sent.
        assert len(run.seen) * 16384 < 80 * 2**20


async def test_calls_above_the_limit_are_refused_and_there_is_room_again(monkeypatch):
    monkeypatch.setattr(connection, "MAX_CALLS", 2)
    async with running() as run, peer_of(run) as peer:
        for stream_id in (1, 3, 5):
            peer.open(stream_id)
        _, payload = await peer.until(RST_STREAM, 5)
        assert int.from_bytes(payload, "big") == ErrorCode.REFUSED_STREAM
        peer.send(frame(DATA, END_STREAM, 1, frames.message(b"x")))
        assert (await peer.trailers(1))["grpc-status"] == "0"
        peer.open(7, b"there is room again")
        await peer.until(DATA, 7)


async def test_at_its_end_a_server_says_goaway_and_lets_calls_finish():
    async with running() as run, peer_of(run) as peer:
        peer.open(1, b"open")
        await peer.until(DATA, 1)
        stopping = asyncio.ensure_future(run.server.stop(20))
        _, payload = await peer.until_goaway()
        assert struct.unpack(">II", payload) == (2**31 - 1, ErrorCode.NO_ERROR)
        peer.open(3, b"was on its way")
        _, mark = await peer.until(PING)
        peer.send(frame(PING, ACK, 0, mark))
        _, payload = await peer.until_goaway()
        assert struct.unpack(">II", payload) == (3, ErrorCode.NO_ERROR)
        peer.open(5, b"too late")
        _, payload = await peer.until(RST_STREAM, 5)
        assert int.from_bytes(payload, "big") == ErrorCode.REFUSED_STREAM
        for stream_id in (1, 3):
            peer.send(frame(DATA, END_STREAM, stream_id, frames.message(b"last")))
            assert (await peer.trailers(stream_id))["grpc-status"] == "0"
        async with asyncio.timeout(20):
            await stopping
            assert await peer.reader.read() == b""
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", run.port)


async def test_no_bytes_however_cut_or_changed_break_the_server():
    rng = random.Random(7)
    async with running() as run:
        block = header_block()
        good = GREETING
        for i in range(6):
            good += frame(HEADERS, END_HEADERS, 2 * i + 1, block)
            good += frame(DATA, i % 2, 2 * i + 1, frames.message(rng.randbytes(i * 40)))
            good += frames.window_update(0, 10) + frame(PING, 0, 0, bytes(8))
        for _ in range(150):
            data = bytearray(good)
            for _ in range(rng.randrange(4)):
                data[rng.randrange(24, len(data))] = rng.randrange(256)
            _, writer = await asyncio.open_connection("127.0.0.1", run.port)
            with contextlib.suppress(ConnectionError):
                while data and not writer.is_closing():
                    size = rng.randrange(1, 400)
                    writer.write(bytes(data[:size]))
                    del data[:size]
                    if rng.random() < 0.3:
                        await asyncio.sleep(0)
                if not writer.is_closing():
                    await writer.drain()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await eventually(lambda: run.server.open_calls == 0)
        assert not run.bugs
        async with grpc_client(run) as channel:
            echo = channel.stream_stream("/test.Test/Echo")
            assert [each async for each in echo(iter([b"x"]))] == [b"x"]


async def test_frames_may_come_in_any_pieces():
    rng = random.Random(3)
    async with running() as run, peer_of(run) as peer:
        for round_ in range(40):
            stream_id = 2 * round_ + 1
            sent = frame(HEADERS, END_HEADERS, stream_id, peer.block())
            for number in range(6):
                sent += frame(DATA, 0, stream_id, frames.message(b"%d" % number * number * 20))
            sent += frame(DATA, END_STREAM, stream_id, frames.message(b"last"))
            while sent:
                size = rng.choice((1, 8, 9, 10, 100, 2000))
                peer.send(sent[:size])
                await peer.writer.drain()
                await asyncio.sleep(0)
                sent = sent[size:]
            assert (await peer.trailers(stream_id))["grpc-status"] == "0"
        whole = [*(b"%d" % n * n * 20 for n in range(6)), b"last", "half-closed"]
        assert run.seen == whole * 40
