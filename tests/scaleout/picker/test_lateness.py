"""What the picker's peers send late, or never, or do not read."""

import asyncio
import struct

import pytest

from hetero_gateway.scaleout.picker.http2 import calls, commons, connection, frames
from hetero_gateway.scaleout.picker.http2.frames import (
    DATA,
    GOAWAY,
    PING,
    RST_STREAM,
    ErrorCode,
    frame,
)
from tests.fakes import asking
from tests.fakes.asking import (
    CHECK,
    DUPLEX,
    NO_WINDOW,
    PROCESS,
    REPORT,
    WATCH,
    WHOLE,
    in_data,
    many,
    numbers,
    opened,
)
from tests.fakes.peers import peer_at
from tests.fakes.pickers import one_picker, port_of, server_of
from tests.fakes.running import eventually

# What comes late, or never


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second takes 10 ms."""
    monkeypatch.setattr(commons, "TICK_S", 0.01)


async def test_a_call_without_a_message_is_ended(fast):
    async with one_picker() as picker, peer_at(port_of(picker)) as peer:
        for number, path in zip(numbers(4), (PROCESS, REPORT, CHECK, WATCH), strict=True):
            peer.open(number, path=path)
        for number in numbers(4):
            assert (await peer.trailers(number))["grpc-status"] != "0"
        # It ends its own half, or that is ended for it.
        await eventually(lambda: server_of(picker).open_calls == 0)


async def test_a_message_that_does_not_go_on_is_given_up(fast, monkeypatch):
    monkeypatch.setattr(calls, "MESSAGE_S", 3)
    async with one_picker() as picker, peer_at(port_of(picker), path=PROCESS) as peer:
        peer.open(1, asking.head_bytes())
        await peer.until(DATA, 1)
        begun = frames.MESSAGE_HEAD.pack(0, 2**20) + b"abc"
        for byte in (begun[i : i + 1] for i in range(len(begun))):
            peer.send(frame(DATA, 0, 1, byte))
        _, payload = await peer.until(DATA, 1)
        assert b"request_timeout" in payload
        assert b"408" in payload or b"\x98\x03" in payload  # as a varint
        # The data plane would end it now.
        await peer.until(RST_STREAM, 1)
        await eventually(picker.settled)
        assert server_of(picker).held_bytes == 0


async def test_a_body_that_does_not_go_on_is_answered_with_408(fast, monkeypatch):
    monkeypatch.setattr("hetero_gateway.scaleout.picker.stream._BODY_PART_S", 3)
    async with one_picker() as picker, peer_at(port_of(picker), path=PROCESS) as peer:
        peer.open(1, DUPLEX[0], asking.body_bytes(b"{", ends=False))
        _, payload = await peer.until(DATA, 1)
        assert b"request_timeout" in payload
        await peer.until(RST_STREAM, 1)
        await eventually(picker.settled)


async def test_a_request_that_never_ends_gives_its_load_back(fast):
    timeouts = {"total_s": 5.0}
    async with (
        one_picker(timeouts=timeouts) as picker,
        peer_at(port_of(picker), path=PROCESS) as peer,
    ):
        peer.open(1, *WHOLE)
        await peer.until(DATA, 1)
        await peer.until(DATA, 1)
        assert (await peer.trailers(1))["grpc-status"] == "4"
        await eventually(picker.settled)


async def test_a_call_whose_answers_are_not_read_is_reset(fast, monkeypatch):
    monkeypatch.setattr(calls, "UNREAD_S", 3)
    async with one_picker() as picker, peer_at(port_of(picker), path=PROCESS) as peer:
        peer.send(NO_WINDOW)
        peer.send(opened(range(1, 2), *DUPLEX))
        await peer.until(RST_STREAM, 1)
        await eventually(picker.settled)
        assert server_of(picker).held_bytes == 0


async def test_a_call_that_sends_more_than_it_reads_gets_no_more_room():
    async with one_picker() as picker, peer_at(port_of(picker), path=PROCESS) as peer:
        peer.send(NO_WINDOW)
        peer.send(opened(range(1, 2), *DUPLEX))
        echoed = in_data(1, asking.response_body_bytes(bytes(16_000)))
        for _ in range(2 * calls.STREAM_WINDOW_BYTES // len(echoed)):
            peer.send(echoed)
        # It was told of no more, and sent it all the same.
        _, payload = await peer.until_goaway()
        assert struct.unpack_from(">II", payload)[1] == ErrorCode.FLOW_CONTROL_ERROR
        await eventually(picker.settled)


async def test_an_idle_connection_is_told_goodbye_and_one_with_a_call_is_not(fast, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_S", 5)
    async with (
        one_picker() as picker,
        peer_at(port_of(picker), path=PROCESS) as works,
        peer_at(port_of(picker)) as idle,
    ):
        works.open(1, *WHOLE)
        assert await idle.until_goaway()
        async with asyncio.timeout(20):
            assert b"" == (await idle.reader.read(-1))[:0]
        assert len(server_of(picker).register) == 1
        works.send(frames.reset(1, ErrorCode.CANCEL))
        await eventually(picker.settled)


async def test_a_connection_that_is_to_be_closed_is_closed_though_it_reads_nothing(
    fast, monkeypatch
):
    monkeypatch.setattr(connection, "CLOSE_S", 2)
    async with one_picker() as picker, peer_at(port_of(picker), path=PROCESS) as peer:
        peer.writer.transport.pause_reading()
        # Enough for the sockets' buffers, and not to be taken for one that does not read.
        monkeypatch.setattr(connection, "STALL_S", 3600)
        peer.send(many(frame(PING, 0, 0, bytes(8))), frame(GOAWAY, 0, 1, bytes(8)))
        await eventually(lambda: not len(server_of(picker).register))
