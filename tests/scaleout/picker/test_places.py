"""Who may be connected to the picker's port: places, certificates, reports."""

import asyncio
import contextlib
import dataclasses
import itertools
import resource
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from hetero_gateway.scaleout.picker.http2 import commons, frames, server
from hetero_gateway.scaleout.picker.http2.frames import (
    DATA,
    PREFACE,
    ErrorCode,
)
from tests.fakes import asking, certificates
from tests.fakes.asking import CHECK, PROCESS, REPORT, WATCH, WHOLE, in_data, numbers, opened
from tests.fakes.envoy import RunningPicker
from tests.fakes.peers import GREETING, anyio_backend, peer_at
from tests.fakes.pickers import checked, one_picker, picker_process, port_of, server_of
from tests.fakes.running import eventually

__all__ = ["anyio_backend"]

# Connections


@contextlib.contextmanager
def silent(port: int, count: int, data: bytes = b"") -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sockets = []
    try:
        for _ in range(count):
            sockets.append(socket.create_connection(("127.0.0.1", port)))
            sockets[-1].sendall(data)
        yield sockets
    finally:
        for each in sockets:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SAID_BY_SILENT = (
    b"",
    PREFACE[:10],
    GREETING,
    GREETING + opened(numbers(3)),
    GREETING + opened(range(1, 2), b"", path=WATCH),
    GREETING + opened(range(1, 2), b"x" * 10),
)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the picker is another process
@pytest.mark.system
async def test_silent_connections_shut_out_nobody(tmp_path):
    async with picker_process(tmp_path) as (_, port):
        for data in SAID_BY_SILENT:
            async with peer_at(port, path=PROCESS) as working:
                working.open(1, asking.head_bytes())
                await working.until(DATA, 1)
                with silent(port, 1100, data):
                    async with peer_at(port) as newcomer:
                        await checked(newcomer, 1)
                    # And who was there, with a request open, still is.
                    working.send(in_data(1, WHOLE[1]))
                    await working.until(DATA, 1)


@dataclasses.dataclass(eq=False)
class Someone:
    """An occupant of a register."""

    address: str
    at_work: bool = False
    has_spoken: bool = False
    spoke_tick: int = 0
    heard: bool = False
    gone: bool = False

    def works(self) -> bool:
        return self.at_work

    def make_room(self) -> None:
        self.gone = True


def test_the_one_that_would_be_missed_least_makes_room(monkeypatch):
    monkeypatch.setattr(commons, "MAX_CONNECTIONS", 4)
    connected: commons.Register[Someone] = commons.Register()
    works = Someone("a", at_work=True)
    early = Someone("b", has_spoken=True, spoke_tick=3)
    late = Someone("c", has_spoken=True, spoke_tick=9)
    silent = Someone("d", spoke_tick=9)
    for each in (works, early, late, silent):
        assert connected.add(each)
    for number, expected in enumerate((silent, early, late)):
        assert connected.add(Someone(f"e{number}", at_work=True))
        assert expected.gone
        assert expected not in connected
    assert not connected.add(Someone("f"))
    assert not works.gone
    assert len(connected) == 4


def test_a_crowd_at_one_address_pushes_out_only_its_own(monkeypatch):
    monkeypatch.setattr(commons, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(commons, "MAX_PER_ADDRESS", 4)
    connected: commons.Register[Someone] = commons.Register()
    good = Someone("good")
    assert connected.add(good)
    crowd = [Someone("crowd", has_spoken=True, spoke_tick=9) for _ in range(20)]
    assert all(connected.add(each) for each in crowd)
    assert [each.gone for each in crowd] == [True] * 16 + [False] * 4
    # When all is full, room is made by those that have most.
    assert connected.add(Someone("another"))
    assert connected.add(Someone("a third"))
    assert not good.gone
    assert sum(each.gone for each in crowd) == 17


def test_who_has_a_network_of_ipv6_has_one_address():
    network = commons.network_of
    assert network("2001:db8::1") == network("2001:db8::ffff:2") != network("2001:db8:0:1::1")
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") != network("10.0.0.2")
    assert network("fe80::1%eth0") == network("fe80::2")


# Reports


async def test_reports_count_from_the_address_that_asked_and_tickets_cannot_be_guessed():
    async with one_picker() as picker, peer_at(port_of(picker), path=PROCESS) as peer:
        for number in numbers(20):
            peer.open(number, *WHOLE)
        issued = picker.server.picker.resources.tickets.issued
        await eventually(lambda: len(issued) >= 4)
        found = sorted(int(ticket[10:]) for ticket in issued)
        gaps = {b - a for a, b in itertools.pairwise(found)}
        assert len(gaps) > 1
        assert min(gaps) > 1
        (ticket, stream), *_ = issued.items()
        (member,) = server_of(picker).register
        for address, believed in (("10.0.0.9", False), (member.address, True)):
            async with peer_at(port_of(picker), path=REPORT) as reporter:
                other = list(server_of(picker).register)[-1]
                other.address = address
                reporter.open(1, ticket + b" end 10 5 - 3", ends=True)
                assert (await reporter.trailers(1))["grpc-status"] == "0"
            assert (stream._told is not None) is believed
        peer.send(*[frames.reset(n, ErrorCode.CANCEL) for n in numbers(20)])
        await eventually(picker.settled)


async def test_watches_hear_of_a_change_by_one_timer(monkeypatch):
    monkeypatch.setattr("hetero_gateway.scaleout.picker.service._WATCH_S", 0.02)
    async with one_picker() as picker, peer_at(port_of(picker), path=WATCH) as peer:
        asked = b"\x0a\x09readiness"
        for number in numbers(300):
            peer.open(number, asked)
        for number in numbers(300):
            assert (await peer.until(DATA, number))[1].endswith(b"\x08\x01")
        loop = asyncio.get_running_loop()
        due = [each for each in getattr(loop, "_scheduled", ()) if "_look" in repr(each)]
        assert len(due) < 10
        picker.gateway.draining = True
        for _ in numbers(300):
            assert (await peer.until(DATA))[1].endswith(b"\x08\x02")


# TLS


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return certificates.issued(tmp_path, "picker", "envoy", "stranger")


def read(path: str) -> bytes:
    return Path(path).read_bytes()


async def asked_as(picker: RunningPicker, files: dict[str, str], name: str | None) -> bool:
    """Whether a client with this certificate is answered."""
    own = (f"{name}.key", name) if name is not None else ()
    credentials = grpc.ssl_channel_credentials(*(read(files[each]) for each in ("ca", *own)))
    async with grpc.aio.secure_channel(picker.address, credentials) as channel:
        try:
            await channel.unary_unary(CHECK)(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
        return True


async def test_without_a_certificate_of_the_right_authority_no_data_plane_is_answered(files):
    async with one_picker(picker=certificates.secured(files, "picker")) as picker:
        assert await asked_as(picker, files, "envoy")
        assert not await asked_as(picker, files, None)
        assert not await asked_as(picker, files, "stranger")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with peer_at(port_of(picker)):
                pass


async def test_handshakes_that_stall_hold_no_place_for_long(files, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.2)
    async with one_picker(picker=certificates.secured(files, "picker")) as picker:
        with silent(port_of(picker), 20, b"\x16\x03\x01"):
            await eventually(lambda: len(server_of(picker).register) == 20)
            await eventually(lambda: not len(server_of(picker).register))
        monkeypatch.setattr(server, "HANDSHAKE_S", 60)
        monkeypatch.setattr(commons, "MAX_CONNECTIONS", 8)
        with silent(port_of(picker), 20):
            assert await asked_as(picker, files, "envoy")
            assert len(server_of(picker).register) <= 8


async def test_what_comes_with_the_handshakes_end_is_not_lost(files):
    context = ssl.create_default_context(cafile=files["ca"])
    context.load_cert_chain(files["envoy"], files["envoy.key"])
    context.set_alpn_protocols(["h2"])
    async with one_picker(picker=certificates.secured(files, "picker")) as picker:
        # All in one packet, as TLS 1.3 lets a client send it.
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(picker))
        try:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(65536))
            tls.write(GREETING + opened(range(1, 2), b"", path=CHECK))
            writer.write(outgoing.read())
            received = b""
            async with asyncio.timeout(20):
                while b"\x00\x00\x00\x00\x02\x08\x01" not in received:
                    incoming.write(await reader.read(65536))
                    with contextlib.suppress(ssl.SSLWantReadError):
                        while True:
                            received += tls.read(65536)
        finally:
            writer.close()
