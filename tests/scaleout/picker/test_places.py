"""Who may be connected to the picker's port: places, certificates, reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from hetero_gateway.scaleout.picker.http2 import frames, handshakes, register
from hetero_gateway.scaleout.picker.http2.frames import (
    ACK,
    DATA,
    PREFACE,
    SETTINGS,
    ErrorCode,
    frame,
)
from tests.fakes import asking
from tests.fakes.asking import CHECK, PROCESS, REPORT, WATCH, WHOLE, in_data, numbers, opened
from tests.fakes.envoy import RunningPicker
from tests.fakes.peers import peer_at
from tests.fakes.pickers import checked, one_picker, picker_process, port_of, server_of
from tests.fakes.running import eventually

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


GREETING = PREFACE + frames.settings({}) + frame(SETTINGS, ACK, 0)


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


class Someone:
    """A member of a register."""

    def __init__(
        self, address: str, *, at_work: bool = False, has_spoken: bool = False, spoke_tick: int = 0
    ) -> None:
        self.address = address
        self.at_work = at_work
        self.heard = False
        self.has_spoken = has_spoken
        self.spoke_tick = spoke_tick
        self.gone = False

    def works(self) -> bool:
        return self.at_work

    def make_room(self) -> None:
        self.gone = True


def test_the_one_that_would_be_missed_least_makes_room(monkeypatch):
    monkeypatch.setattr(register, "MAX_CONNECTIONS", 4)
    connected: register.Register[Someone] = register.Register()
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
    monkeypatch.setattr(register, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(register, "MAX_PER_ADDRESS", 4)
    connected: register.Register[Someone] = register.Register()
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
    network = register.network_of
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
def issued(tmp_path: Path) -> dict[str, Path]:
    """Files of a picker's and of a data plane's certificate, and of one by somebody else."""
    paths = {}
    ours, others = trustme.CA(), trustme.CA()
    for name, authority in (("picker", ours), ("envoy", ours), ("stranger", others)):
        made = authority.issue_cert("127.0.0.1", common_name=name)
        paths[f"{name}.key"] = tmp_path / f"{name}.key"
        paths[name] = tmp_path / f"{name}.pem"
        made.private_key_pem.write_to_path(str(paths[f"{name}.key"]))
        for blob in made.cert_chain_pems:
            blob.write_to_path(str(paths[name]), append=True)
    paths["ca"] = tmp_path / "ca.pem"
    ours.cert_pem.write_to_path(str(paths["ca"]))
    return paths


def secured(issued: dict[str, Path]) -> dict[str, Any]:
    return {
        "certificate_file": str(issued["picker"]),
        "key_file": str(issued["picker.key"]),
        "client_ca_file": str(issued["ca"]),
    }


async def asked_as(picker: RunningPicker, issued: dict[str, Path], name: str | None) -> bool:
    """Whether a client with this certificate is answered."""
    credentials = grpc.ssl_channel_credentials(
        issued["ca"].read_bytes(),
        None if name is None else issued[f"{name}.key"].read_bytes(),
        None if name is None else issued[name].read_bytes(),
    )
    async with grpc.aio.secure_channel(picker.address, credentials) as channel:
        try:
            await channel.unary_unary(CHECK)(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
        return True


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """The picker runs on uvloop, other tests on asyncio."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


async def test_without_a_certificate_of_the_right_authority_no_data_plane_is_answered(issued):
    async with one_picker(picker=secured(issued)) as picker:
        assert await asked_as(picker, issued, "envoy")
        assert not await asked_as(picker, issued, None)
        assert not await asked_as(picker, issued, "stranger")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with peer_at(port_of(picker)):
                pass


async def test_handshakes_that_stall_hold_no_place_for_long(issued, monkeypatch):
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.2)
    async with one_picker(picker=secured(issued)) as picker:
        with silent(port_of(picker), 20, b"\x16\x03\x01"):
            await eventually(lambda: len(server_of(picker).register) == 20)
            await eventually(lambda: not len(server_of(picker).register))
        monkeypatch.setattr(handshakes, "HANDSHAKE_S", 60)
        monkeypatch.setattr(register, "MAX_CONNECTIONS", 8)
        with silent(port_of(picker), 20):
            assert await asked_as(picker, issued, "envoy")
            assert len(server_of(picker).register) <= 8


async def test_what_comes_with_the_handshakes_end_is_not_lost(issued):
    context = ssl.create_default_context(cafile=issued["ca"])
    context.load_cert_chain(issued["envoy"], issued["envoy.key"])
    context.set_alpn_protocols(["h2"])
    async with one_picker(picker=secured(issued)) as picker:
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
