"""What a response is by RFC 9110 and 9112: byte by byte, and through the whole gateway."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import h11
import httpx
import pytest

from hetero_gateway.http.response import (
    MOST_CHUNK_LINE_BYTES,
    MOST_FIELDS,
    MOST_HEAD_BYTES,
    MOST_INTERIM,
    ChunkedBody,
    DecodedBody,
    HeadReader,
    MalformedResponse,
    ResponseHead,
    parse_head,
    whole_chunk_length,
)
from tests.fakes.raw import GOOD, RawInstance
from tests.fakes.running import RunningGateway, config_for, eventually, running_gateway

BODY = b'{"model": "m", "messages": []}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
) + BODY
EVIL = b"HTTP/1.1 200 OK\r\nx-evil: 1\r\ncontent-length: 4\r\n\r\nevil"


def head(*fields: bytes, status: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join((status, *fields, b"", b""))


# Heads


def test_a_head_is_read_as_it_is() -> None:
    read = parse_head(
        head(b"Content-Type:  text/plain \t", b"CONTENT-LENGTH:5", b"x-a:", b"X-A: \xe9")
    )
    assert read.status == 200
    assert read.headers == [
        (b"content-type", b"text/plain"),
        (b"content-length", b"5"),
        (b"x-a", b""),
        (b"x-a", b"\xe9"),
    ]
    assert (read.content_length, read.chunked, read.keep_alive) == (5, False, True)


@pytest.mark.parametrize(
    "line", [b"HTTP/1.1 200", b"HTTP/1.1 200 ", b"HTTP/1.0 200 OK", b"HTTP/1.1 599 \xff odd\t"]
)
def test_status_lines_that_are_taken(line: bytes) -> None:
    assert parse_head(head(b"content-length: 0", status=line)).content_length == 0


MALFORMED = {
    "a blank line ahead": b"\r\n" + head(b"content-length: 0"),
    "two blank lines ahead": b"\r\n\r\n" + EVIL,
    "a line feed ahead": b"\n" + head(b"content-length: 0"),
    "HTTP/2.0": head(status=b"HTTP/2.0 200 OK"),
    "HTTP/1.2": head(status=b"HTTP/1.2 200 OK"),
    "HTTP/0.9": head(status=b"HTTP/0.9 200 OK"),
    "no version": head(status=b"200 OK"),
    "lower case": head(status=b"http/1.1 200 OK"),
    "status 000": head(status=b"HTTP/1.1 000 OK"),
    "status 999": head(status=b"HTTP/1.1 999 OK"),
    "status 99": head(status=b"HTTP/1.1 99 OK"),
    "status 2000": head(status=b"HTTP/1.1 2000 OK"),
    "status +20": head(status=b"HTTP/1.1 +20 OK"),
    "two spaces": head(status=b"HTTP/1.1  200 OK"),
    "101": head(b"upgrade: x", b"connection: upgrade", status=b"HTTP/1.1 101 Switching"),
    "a control character in the reason": head(status=b"HTTP/1.1 200 O\x00K"),
    "a folded line": head(b"x-a: 1", b" folded", b"content-length: 0"),
    "a fold at once": head(b" x-a: 1"),
    "a carriage return in a value": head(b"x-a: 1\r2"),
    "a line feed in a value": head(b"x-a: 1\nx-b: 2"),
    "NUL in a value": head(b"x-a: 1\x002"),
    "DEL in a value": head(b"x-a: \x7f"),
    "an escape in a value": head(b"x-a: \x1b[2J"),
    "a field without a colon": head(b"x-a"),
    "a field without a name": head(b": 1"),
    "a space in a name": head(b"x a: 1"),
    "a byte in a name": head(b"x\xe9: 1"),
    "white space in a framing name": head(b"transfer-encoding : chunked"),
    "gzip, chunked": head(b"transfer-encoding: gzip, chunked"),
    "chunked twice": head(b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
    "chunked, identity": head(b"transfer-encoding: chunked, identity"),
    "xchunked": head(b"transfer-encoding: xchunked"),
    "no transfer-encoding": head(b"transfer-encoding:"),
    "CL and TE": head(b"content-length: 4", b"transfer-encoding: chunked"),
    "TE and CL": head(b"transfer-encoding: chunked", b"content-length: 4"),
    "TE in 1.0": head(b"transfer-encoding: chunked", status=b"HTTP/1.0 200 OK"),
    "two lengths": head(b"content-length: 4", b"content-length: 5"),
    "two lengths in one": head(b"content-length: 4, 5"),
    "a negative length": head(b"content-length: -1"),
    "a signed length": head(b"content-length: +1"),
    "a hexadecimal length": head(b"content-length: 0x10"),
    "an underscore": head(b"content-length: 1_0"),
    "no length": head(b"content-length: "),
    "a length of 400 digits": head(b"content-length: " + b"9" * 400),
    "too many fields": head(*(b"x-%d: 1" % i for i in range(MOST_FIELDS + 1))),
    "too long": head(b"x-a: " + b"a" * MOST_HEAD_BYTES),
    "a length of 4 400 digits": head(b"content-length: " + b"9" * 4400),
}


def feed_all(pieces: Iterable[bytes]) -> None:
    reader = HeadReader()
    for piece in pieces:
        reader.feed(piece)


@pytest.mark.parametrize("name", MALFORMED)
def test_what_could_be_read_in_two_ways_is_refused(name: str) -> None:
    whole = MALFORMED[name]
    for pieces in ([whole], (whole[i : i + 1] for i in range(len(whole)))):
        with pytest.raises(MalformedResponse):
            feed_all(pieces)


def test_equal_lengths_are_one() -> None:
    read = parse_head(head(b"content-length: 4", b"Content-Length: 4"))
    assert read.headers == [(b"content-length", b"4")]


def test_white_space_ahead_of_a_colon_is_removed() -> None:
    assert parse_head(head(b"x-a : 1", b"content-length: 0")).headers[0] == (b"x-a", b"1")


def test_what_connection_names_is_removed() -> None:
    read = parse_head(
        head(
            b"connection: close, X-Hop", b"Connection: x-other ,content-length", b"x-hop: 1",
            b"X-OTHER: 2", b"x-end: 3", b"content-length: 0",
        )
    )  # fmt: skip
    names = [name for name, _ in read.headers]
    assert [n for n in names if n != b"connection"] == [b"x-end", b"content-length"]
    assert not read.keep_alive


@pytest.mark.parametrize(
    ("version", "options", "kept"),
    [
        (b"1", (), True),
        (b"1", (b"Close",), False),
        (b"1", (b"keep-alive",), True),
        (b"1", (b"keep-alive, close",), False),
        (b"0", (), False),
        (b"0", (b"Keep-Alive",), True),
    ],
)
def test_whether_a_connection_is_kept(version: bytes, options: tuple[bytes], kept: bool) -> None:
    fields = [b"connection: " + option for option in options]
    read = parse_head(head(*fields, b"content-length: 0", status=b"HTTP/1.%b 200 OK" % version))
    assert read.keep_alive is kept


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize(
    "framing", [b"content-length: 9", b"transfer-encoding: chunked", b"x-a: 1"]
)
def test_a_status_without_a_body_has_none(status: int, framing: bytes) -> None:
    read = parse_head(head(framing, status=b"HTTP/1.1 %d X" % status))
    assert (read.content_length, read.chunked, read.ends_at_close) == (0, False, False)
    assert b"content-length" not in dict(read.headers)


def test_interim_answers_are_dropped_and_bounded() -> None:
    hints = head(b"link: </a>", status=b"HTTP/1.1 103 Early Hints")
    found = HeadReader().feed(head(status=b"HTTP/1.1 100 Continue") + hints + GOOD)
    assert found is not None
    assert found[0].status == 200
    assert b"link" not in dict(found[0].headers)
    assert found[1] == b'{"ok":true}'
    long_hints = head(b"x: " + b"x" * 9000, status=b"HTTP/1.1 103 E")
    for answer in (head(status=b"HTTP/1.1 102 P"), long_hints):
        with pytest.raises(MalformedResponse):
            feed_all([answer] * (MOST_INTERIM + 1))
    with pytest.raises(MalformedResponse):
        HeadReader().feed(hints * 1000 + GOOD)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_a_head_in_pieces_is_the_same_head(size: int) -> None:
    whole = head(status=b"HTTP/1.1 100 Continue") + GOOD
    reader, found, rest = HeadReader(), None, b""
    for i in range(0, len(whole), size):
        piece = whole[i : i + size]
        if found is not None:
            rest += piece
        elif (got := reader.feed(piece)) is not None:
            found, rest = got
    assert found is not None
    assert found.headers == parse_head(GOOD[: -len(b'{"ok":true}')]).headers
    assert rest == b'{"ok":true}'


def test_garbage_is_refused_as_soon_as_it_shows() -> None:
    for start in (b"SSH-2.0", b"\x16\x03\x01", b"\r", b"HTTP/1.1 20", b"HTTP/1.1 abc\r\n"):
        reader = HeadReader()
        if start == b"HTTP/1.1 20":
            assert reader.feed(start) is None
        else:
            with pytest.raises(MalformedResponse):
                reader.feed(start)


# Chunked bodies


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def follow(whole: bytes, cuts: list[int]) -> tuple[bytes, bytes, ChunkedBody]:
    """(what is passed on, that decoded, the follower) of a body that comes in pieces."""
    body = ChunkedBody()
    decoder, passed, decoded, last = DecodedBody(body), b"", b"", 0
    for cut in [*cuts, len(whole)]:
        if body.ended:
            break
        part = body.feed(whole[last:cut])
        passed, decoded, last = passed + part, decoded + decoder.decode(part), cut
    return passed, decoded, body


@pytest.mark.parametrize("seed", range(40))
def test_chunks_are_found_wherever_the_pieces_end(seed: int) -> None:
    rng = random.Random(seed)
    sizes = rng.choices([1, 2, 15, 47, 48, 255, 4096, 70000], [9, 9, 5, 5, 5, 3, 1, 0.3], k=60)
    payload = [rng.randbytes(size) for size in sizes]
    extensions = [rng.choice([b"", b"", b"", b";a=1", b';b="c d"']) for _ in payload]
    whole = b"".join(chunk(*pair) for pair in zip(payload, extensions, strict=True))
    closing = rng.choice(
        [b"0\r\n\r\n", b"0\r\n\r\n", b"00;x\r\n\r\n", b"0\r\nx-t: 1\r\ny: 2\r\n\r\n"]
    )
    whole += closing
    cuts = sorted(rng.sample(range(1, len(whole)), min(len(whole) - 1, rng.choice([0, 3, 200]))))
    if seed % 4 == 0:
        cuts = [*range(1, min(len(whole), 3000)), *range(len(whole) - 40, len(whole))]
    passed, decoded, body = follow(whole, cuts)
    assert decoded == b"".join(payload)
    assert body.ended
    assert not body.extra
    assert b"x-t" not in passed[-60:]
    # An independent parser reads the same from what is passed on.
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + passed)
    read = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        read += bytes(event.data) if isinstance(event, h11.Data) else b""
    assert read == decoded
    assert client.trailing_data[0] == b""


def is_short_cut(data: bytes) -> bool:
    """What the upstream connection asks of a read at the beginning of a chunk."""
    return whole_chunk_length(data[:5]) == len(data) and data[-2:] == b"\r\n"


@pytest.mark.parametrize("size", [16, 17, 228, 255, 256, 257, 4000, 4095])
def test_the_short_cut_takes_whole_chunks_only(size: int) -> None:
    event = b"data: ".ljust(size, b"x")
    assert is_short_cut(chunk(event))
    odd = (
        chunk(event)[:-1], chunk(event)[:-1] + b"x", chunk(event) + b"\n", b"0" + chunk(event),
        chunk(event, b";a"), chunk(event) * 2, chunk(event + b"x")[:-1],
        chunk(event + b"\r\n")[:-2],
        chunk(event).replace(b"\r", b"\n", 1), chunk(event).replace(b"\n", b"x", 1), b"0\r\n\r\n",
    )  # fmt: skip
    assert not any(map(is_short_cut, odd))


BAD_CHUNKS = {
    "no size": b"\r\nabc\r\n",
    "not hexadecimal": b"g\r\n",
    "0x": b"0x1\r\na\r\n",
    "a sign": b"+1\r\na\r\n",
    "an underscore": b"1_0\r\n",
    "a space behind": b"1 ;a\r\na\r\n",
    "a space ahead": b" 1\r\na\r\n",
    "too many digits": b"0" * 16 + b"\r\n",
    "2^64": b"10000000000000000\r\n",
    "a bare line feed": b"3\nabc\r\n0\r\n\r\n",
    "a carriage return in an extension": b"3;a\rb\r\nabc\r\n",
    "a line feed in an extension": b"3;a\nb\r\nabc\r\n",
    "NUL in an extension": b"3;\x00\r\nabc\r\n",
    "longer than its size": b"3\r\nabcd\r\n",
    "shorter than its size": b"5\r\nabc\r\n0\r\n\r\n",
    "a bare line feed behind it": b"3\r\nabc\n0\r\n\r\n",
    "a long extension": b"3;" + b"a" * MOST_CHUNK_LINE_BYTES + b"\r\nabc\r\n",
    "an extension without an end": b"3;" + b"a" * 3 * MOST_CHUNK_LINE_BYTES,
    "tiny chunks, and a bad one": b"1\r\na\r\n" * 50 + b"2\r\na\r\n0\r\n\r\n",
    "a folded trailer": b"0\r\na: 1\r\n b\r\n\r\n",
    "no trailer": b"0\r\nabc\r\n\r\n",
    "long trailers": b"0\r\na: " + b"a" * MOST_HEAD_BYTES + b"\r\n\r\n",
    "endless trailers": b"0\r\n" + b"a: b\r\n" * 20000,
    "many trailers": b"0\r\n" + b"a: b\r\n" * 200 + b"\r\n",
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
@pytest.mark.parametrize("piece", [1, 5, 1 << 20])
def test_framing_that_is_not_chunked_is_refused(name: str, piece: int) -> None:
    whole = BAD_CHUNKS[name]
    with pytest.raises(MalformedResponse):
        follow(whole, list(range(piece, len(whole), piece)))


def test_what_follows_the_end_is_not_the_bodys() -> None:
    for end in (b"0\r\n\r\n", b"0\r\na: b\r\n\r\n"):
        passed, _, body = follow(chunk(b"abc") + end + EVIL, [])
        assert passed == chunk(b"abc") + b"0\r\n\r\n"
        assert body.ended
        assert body.extra


# Through the gateway


async def exchange(running: RunningGateway, requests: int = 1) -> bytes:
    """All that one connection of a client gets for so many requests, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    got = b""
    for _ in range(requests):
        writer.write(REQUEST)
        try:
            async with asyncio.timeout(5):
                got += await reader.readuntil(b"}")
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            got += getattr(error, "partial", b"")
            break
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(5):
        got += await reader.read()
    writer.close()
    return got


@contextlib.asynccontextmanager
async def relayed(**sections: Any) -> AsyncIterator[tuple[RawInstance, RunningGateway]]:
    """An instance that writes what it likes, and a gateway that sends a request to it once."""
    async with RawInstance() as instance:
        config = config_for([instance], retry={"max_attempts": 1}, **sections)
        async with running_gateway(config) as running:
            yield instance, running
            await eventually(running.settled)


SPLITTING = {
    **{
        name: text
        for name, text in MALFORMED.items()
        if len(text) < 5000 and text.endswith(b"\r\n\r\n")
    },
    "blank lines and a hostile answer": b"\r\n\r\n" + EVIL,
    "a malformed body with its head": head(b"transfer-encoding: chunked") + b"3\nabc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", SPLITTING)
async def test_a_malformed_response_is_a_502_and_the_connection_goes_on(name: str) -> None:
    async with relayed() as (instance, running):
        instance.posts = [SPLITTING[name] + EVIL]
        got = await exchange(running)
        assert got.startswith(b"HTTP/1.1 502 ")
        assert b"evil" not in got
        assert b'"code":"upstream_error"' in got.replace(b" ", b"")
        assert got.count(b"HTTP/1.1 200 OK") == 1  # /livez, on the same connection
        assert got.endswith(b'{"status":"ok"}')


EXTRA = {
    "behind a content-length": [GOOD + EVIL],
    "behind a content-length, later": [GOOD, EVIL],
    "behind a last chunk": [
        head(b"transfer-encoding: chunked") + chunk(b'{"ok":true}') + b"0\r\n\r\n" + EVIL
    ],
    "behind trailers": [
        head(b"transfer-encoding: chunked") + chunk(b'{"ok":true}')
        + b"0\r\ncontent-length: 4\r\nset-cookie: evil\r\n\r\n" + EVIL
    ],
    "trailers": [
        head(b"transfer-encoding: chunked") + chunk(b'{"ok":true}') + b"0\r\nx-evil: 1\r\n\r\n"
    ],
    "interim": [head(b"x-evil: 1", status=b"HTTP/1.1 103 Early Hints") + GOOD],
    "fields that connection names": [
        head(b"connection: x-evil", b"x-evil: 1", b"content-length: 11") + b'{"ok":true}'
    ],
    "HTTP/1.0": [head(status=b"HTTP/1.0 200 OK") + b'{"ok":true}', None],
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRA)
async def test_only_the_response_itself_reaches_a_client(name: str) -> None:
    async with relayed() as (instance, running):
        instance.posts = EXTRA[name]
        got = await exchange(running, requests=3)
        assert b"evil" not in got
        assert got.count(b"HTTP/1.1 200 OK") == 4
        assert got.count(b'{"ok":true}') == 3
        assert got.endswith(b'{"status":"ok"}')


async def test_a_connection_with_bytes_behind_the_end_is_not_used_again() -> None:
    async with relayed() as (instance, running):
        instance.posts = [GOOD + EVIL]
        before = instance.connections
        await exchange(running, requests=3)
        assert instance.connections - before == 3
        instance.posts = [GOOD]
        before = instance.connections
        await exchange(running, requests=3)
        assert instance.connections - before == 1


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body_takes_no_bytes_of_the_next(status: bytes) -> None:
    async with relayed() as (instance, running):
        instance.posts = [head(b"content-length: 4", status=b"HTTP/1.1 " + status) + b"evil"]
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(REQUEST + REQUEST.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost"))
        got = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert got.count(b"HTTP/1.1 " + status[:3]) == 2
        assert b"evil" not in got
        assert b"content-length" not in got
        assert b"transfer-encoding" not in got


BROKEN_LATER = {
    "a bad chunk": [head(b"transfer-encoding: chunked") + chunk(b"good"), b"zz\r\n" + EVIL],
    "a chunk too long": [
        head(b"transfer-encoding: chunked") + chunk(b"good"), b"1\r\nab\r\n" + EVIL,
    ],
    "bad trailers": [
        head(b"transfer-encoding: chunked") + chunk(b"good"), b"0\r\n\x00\r\n\r\n" + EVIL,
    ],
    "an endless extension": [
        head(b"transfer-encoding: chunked") + chunk(b"good") + b"1;", b"a" * (1 << 20),
    ],
    "endless trailers": [
        head(b"transfer-encoding: chunked") + chunk(b"good") + b"0\r\n", b"a: b\r\n" * 50000,
    ],
    "a length not reached": [head(b"content-length: 99") + b"good", None],
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_LATER)
async def test_a_response_that_breaks_later_is_cut_and_never_ended(name: str) -> None:
    async with relayed() as (instance, running):
        instance.posts, instance.pause_s = BROKEN_LATER[name], 0.01
        got = await exchange(running)
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"good" in got
        assert b"evil" not in got
        assert b"0\r\n\r\n" not in got.partition(b"\r\n\r\n")[2]
        assert got.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("piece_bytes", [16, 1 << 16])
async def test_a_head_of_megabytes_costs_its_request_only(piece_bytes: int) -> None:
    count = (1 << 22) // piece_bytes if piece_bytes > 16 else 8192
    async with relayed() as (instance, running):
        instance.posts = [b"HTTP/1.1 200 OK\r\nx-a: ", *([b"a" * piece_bytes] * count)]
        got = await exchange(running)
        assert got.startswith(b"HTTP/1.1 502 ")
        # It was broken off, not read to its end: what sockets hold was on its way.
        assert instance.written_bytes < MOST_HEAD_BYTES + (1 << 22)
        instance.posts = [GOOD]
        assert (await exchange(running)).count(b'{"ok":true}') == 1


async def test_a_head_that_never_ends_is_under_the_first_byte_timeout() -> None:
    timeouts = {"first_byte_s": 0.5, "idle_s": 60}
    async with relayed(timeouts=timeouts) as (instance, running):
        for posts in ([b"HTTP/1.1 200 OK\r\nx-a: 1"], [head(status=b"HTTP/1.1 102 P")] * 3):
            instance.posts = posts
            assert (await exchange(running)).startswith(b"HTTP/1.1 504 ")
            await eventually(running.settled)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_never_ends_waits_for_its_client(stream: bool) -> None:
    """A line of 64 MB, for a client that does not read: it stays with the instance."""
    part = b"x" * (1 << 18)
    framed = [chunk(part)] * 256
    opening = head(
        b"content-type: " + (b"text/event-stream" if stream else b"application/json"),
        b"transfer-encoding: chunked",
    )
    async with relayed() as (instance, running):
        instance.posts = [opening, *framed]
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(5)
        # Sockets hold some of it, and the gateway next to nothing.
        assert instance.written_bytes < 1 << 25
        (attempts,) = running.gateway.dataplane.rooms.open
        assert len(attempts._exchange.tail()) <= 8192  # type: ignore[union-attr]
        assert sum(map(len, attempts._exchange._tail)) <= 6 * 8192  # type: ignore[union-attr]
        writer.transport.abort()


async def test_the_decoded_way_out_follows_the_same_rules() -> None:
    """An HTTP/1.0 client gets bodies without their framing."""
    async with relayed() as (instance, running):
        opening = head(b"transfer-encoding: chunked")
        instance.posts = [
            opening + chunk(b'{"ok"') + b"6",
            b";x\r\n:true}\r\n0\r\na: evil\r\n\r\n" + EVIL,
        ]
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await client.post("/v1/completions", content=BODY)).text == '{"ok":true}'
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        got = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert b'{"ok":true}' in got
        assert b"evil" not in got


def test_a_head_has_what_a_relay_asks_for() -> None:
    assert ResponseHead(200, []).ends_at_close
    assert not ResponseHead(200, [], content_length=0).ends_at_close
